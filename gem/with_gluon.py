"""impl="gluon": jagged attention and GDPA on the kernels of gem.kernels.hopper, and where those run.

Legend: T rows of all samples, H heads, D head_dim.
"""

import functools
import importlib
import importlib.util
import os
import re
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gem.efficiency import window_edges
from gem.with_triton import Gradients, on_device_of

if TYPE_CHECKING:
    from gem.dispatch import Call
    from gem.portable.biases import BiasInputs

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128)
_HOPPER = (9, 0)
_TRITONS = ((3, 6), (3, 7))  # Gluon still changes: 3.9 has other names for stores through the copy engine
_NAMES = ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")  # that the kernels import


def refuses(call: "Call") -> str | None:
    """Why the kernels cannot run a call, or None."""
    if reason := _no_device(call.device):
        return reason
    if call.dtype not in _DTYPES:
        return f"the Gluon kernels take bfloat16 and float16, not {str(call.dtype).removeprefix('torch.')}"
    if call.head_dim not in _HEAD_DIMS:
        return f"the Gluon kernels take head_dim 64 and 128, not {call.head_dim}"
    if call.masked and call.op == "gdpa":
        return "the Gluon kernels of gdpa know no causal or window mask"
    if call.biased:
        return "the Gluon kernels add no bias"
    if not call.readable:
        return (
            "the Gluon kernels read q, k and v through the copy engine: the heads of a row must lie side by side, "
            "and rows a multiple of 16 bytes apart"
        )
    return None


def not_by_itself(call: "Call") -> str | None:
    """Why ``auto`` passes them over where they could run."""
    return "its kernels of jagged_attention are not yet measured beside the others" if call.op != "gdpa" else None


def readable(*tensors_THD: Tensor) -> bool:
    """Whether the copy engine can read tiles of tensors of these strides. (At any address: odd ones are copied.)"""
    return all(_readable(x) for x in tensors_THD)


def _readable(x: Tensor) -> bool:
    row, head, element = x.stride()
    heads, head_dim = x.shape[1:]
    return element == 1 and (head == head_dim or heads == 1) and row * x.element_size() % 16 == 0 and 0 < row < 2**34


@torch.compiler.assume_constant_result  # asked while torch.compile traces, it is answered and not traced
def _no_device(device: str) -> str | None:
    return _look(device, os.environ.get("TRITON_INTERPRET", "0"))


@functools.cache
def _look(device: str, interpret: str) -> str | None:
    if device != "cuda" or torch.version.cuda is None:
        return f"the Gluon kernels are for NVIDIA GPUs of compute capability 9.0 (Hopper), not for {device}"
    capability = torch.cuda.get_device_capability()
    if capability != _HOPPER:
        return (
            f"the Gluon kernels are for compute capability 9.0 (Hopper), this GPU has {capability[0]}.{capability[1]}"
        )
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'gem-recsys[triton]')"
    if interpret not in ("", "0"):
        return "TRITON_INTERPRET is set, and Gluon has no interpreter"
    import triton

    return _unfit(triton.__version__)


def _unfit(version: str) -> str | None:
    """Why a version of triton does not do: Gluon is younger than it, and still changes."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) not in _TRITONS:
        return f"the Gluon kernels are written for triton 3.6 and 3.7, this is {version}"
    try:
        hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    except ImportError as error:
        return f"the Gluon of triton {version} is not the one that the kernels are written in: {error}"
    missing = [name for name in _NAMES if not hasattr(hopper, name)]
    if missing:
        return f"the Gluon of triton {version} is not the one that the kernels are written in: no {', '.join(missing)}"
    return None


@functools.cache
def _kernels() -> ModuleType:
    """gem.kernels.hopper.ops. (An import statement, though it finds the module loaded, costs a microsecond a call.)"""
    from gem.kernels.hopper import ops

    return ops


def gdpa(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, *, activation: str, qk_scale: float,
    out_scale: float, causal: bool, window: tuple[int, int],
) -> Tensor:  # fmt: skip
    """out [T, H, D]."""
    ops = _kernels()
    batch = ops.jagged_batch(q, k, q_offsets, k_offsets, *window_edges(causal, window))
    with on_device_of(q):
        return ops.gdpa_forward(q, k, v, batch, activation=activation, qk_scale=qk_scale, out_scale=out_scale)


def gdpa_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, *, activation: str,
    qk_scale: float, out_scale: float, causal: bool, window: tuple[int, int],
) -> Gradients:  # fmt: skip
    """(dq, dk, dv)."""
    ops = _kernels()
    batch = ops.jagged_batch(q, k, q_offsets, k_offsets, *window_edges(causal, window))
    with on_device_of(q):
        return ops.gdpa_backward(d_out, q, k, v, batch, activation=activation, qk_scale=qk_scale, out_scale=out_scale)


def jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, causal: bool, window: tuple[int, int],
    scale: float, bias: "BiasInputs",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [T, H, D], log-sum-exp [H, T] in base 2)."""
    ops = _kernels()
    batch = ops.jagged_batch(q, k, q_offsets, k_offsets, *window_edges(causal, window))
    with on_device_of(q):
        return ops.attention_forward(q, k, v, batch, qk_scale=scale)


def jagged_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_offsets: Tensor, k_offsets: Tensor, *,
    causal: bool, window: tuple[int, int], scale: float, bias: "BiasInputs",
) -> Gradients:  # fmt: skip
    """(dq, dk, dv)."""
    ops = _kernels()
    batch = ops.jagged_batch(q, k, q_offsets, k_offsets, *window_edges(causal, window))
    with on_device_of(q):
        return ops.attention_backward(d_out, q, k, v, out, lse, batch, qk_scale=scale)


__all__ = [
    "gdpa", "gdpa_backward", "jagged_attention", "jagged_attention_backward", "not_by_itself", "readable", "refuses"
]  # fmt: skip
