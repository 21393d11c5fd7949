"""impl="triton": the ops on the kernels of gem.kernels, and where those run.

gem.kernels is imported by the first call: importing Triton takes a good part of a second, and it need not be there.

Legend: T rows of all samples, H heads, D head_dim.
"""

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gem.efficiency import window_edges

if TYPE_CHECKING:
    from gem.dispatch import Call
    from gem.kernels.bias import Bias
    from gem.portable.biases import BiasInputs

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_HEAD_DIM = 256
_OLDEST = (8, 0)
Gradients = tuple[Tensor, Tensor, Tensor]


def refuses(call: "Call") -> str | None:
    """Why the kernels cannot run a call, or None."""
    if call.dtype not in _DTYPES:
        return f"the Triton kernels take float32, float16 and bfloat16, not {str(call.dtype).removeprefix('torch.')}"
    if call.head_dim > _LARGEST_HEAD_DIM:
        return f"the Triton kernels take head_dim up to {_LARGEST_HEAD_DIM}, not {call.head_dim}"
    return _no_device(call.device)


def not_by_itself(call: "Call") -> str | None:
    """Why impl="auto" passes over kernels that could run."""
    if call.device == "cpu":
        return "on a CPU the Triton kernels are interpreted, slowly: they run when named"
    return None


@torch.compiler.assume_constant_result  # asked while torch.compile traces, it is answered and not traced
def _no_device(device: str) -> str | None:
    return _look(device, os.environ.get("TRITON_INTERPRET", "0"))


@functools.cache
def _look(device: str, interpret: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'gem-recsys[triton]')"
    if device == "cpu":
        if interpret not in ("", "0"):
            return _not_interpreted()
        return (
            "Triton kernels need an NVIDIA GPU; on a CPU they are interpreted if TRITON_INTERPRET=1 is set at the start"
        )
    if device != "cuda" or torch.version.cuda is None:
        return f"the Triton kernels were built for NVIDIA GPUs, not for {device} ({torch.__version__})"
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST:
        return f"the Triton kernels need compute capability 8.0 or newer, this GPU has {capability[0]}.{capability[1]}"
    return None


def _not_interpreted() -> str | None:
    from gem.kernels.device import INTERPRETED

    return (
        None if INTERPRETED else "TRITON_INTERPRET was set after gem.kernels was imported; set it before Python starts"
    )


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever the tensors' own."""
    if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(x.device)


_HERE = nullcontext()


@functools.cache
def _kernels() -> ModuleType:
    """gem.kernels.ops. (An import statement, though it finds the module loaded, costs a microsecond a call.)"""
    from gem.kernels import ops

    return ops


# -- jagged_attention --------------------------------------------------------------------------------------------------


def jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, causal: bool, window: tuple[int, int],
    scale: float, bias: "BiasInputs",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [T, H, D], log-sum-exp [H, T] in base 2)."""
    ops = _kernels()
    batch = ops.jagged_batch(q, k, q_offsets, k_offsets, *window_edges(causal, window))
    with on_device_of(q):
        return ops.attention_forward(q, k, v, batch, qk_scale=scale, bias=_bias(bias))


def jagged_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_offsets: Tensor, k_offsets: Tensor, *,
    causal: bool, window: tuple[int, int], scale: float, bias: "BiasInputs",
) -> Gradients:  # fmt: skip
    """(dq, dk, dv); the gradient of a bias is left in ``bias.grads``."""
    ops = _kernels()
    batch = ops.jagged_batch(q, k, q_offsets, k_offsets, *window_edges(causal, window))
    given = _bias(bias)
    with on_device_of(q):
        dq, dk, dv, d_bias = ops.attention_backward(d_out, q, k, v, out, lse, batch, qk_scale=scale, bias=given)
    if d_bias is not None and given is not None:
        name = "dense" if given.kind == "dense" else f"{given.kind}_table"
        bias.grads[name] = d_bias.view(getattr(bias, name).shape)
    return dq, dk, dv


def _bias(inputs: "BiasInputs") -> "Bias | None":
    if not inputs.present:
        return None
    from gem.kernels.bias import Bias, as_int64, dense_4d

    if inputs.dense is not None:
        return Bias("dense", dense_4d(inputs.dense))
    if inputs.position_table is not None:
        return Bias("position", inputs.position_table, as_int64(inputs.position_boundaries))
    return Bias(
        "time", inputs.time_table, as_int64(inputs.time_boundaries), as_int64(inputs.q_times), as_int64(inputs.k_times)
    )


# -- gdpa --------------------------------------------------------------------------------------------------------------


def gdpa(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, *, activation: str, qk_scale: float,
    out_scale: float, causal: bool, window: tuple[int, int],
) -> Tensor:  # fmt: skip
    """out [T, H, D]."""
    ops = _kernels()
    batch = ops.jagged_batch(q, k, q_offsets, k_offsets, *window_edges(causal, window))
    how = {"activation": activation, "qk_scale": qk_scale, "out_scale": out_scale}
    with on_device_of(q):
        return ops.attention_forward(q, k, v, batch, **how)[0]


def gdpa_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, *, activation: str,
    qk_scale: float, out_scale: float, causal: bool, window: tuple[int, int],
) -> Gradients:  # fmt: skip
    """(dq, dk, dv)."""
    ops = _kernels()
    batch = ops.jagged_batch(q, k, q_offsets, k_offsets, *window_edges(causal, window))
    how = {"activation": activation, "qk_scale": qk_scale, "out_scale": out_scale}
    with on_device_of(q):
        return ops.attention_backward(d_out, q, k, v, None, None, batch, **how)[:3]


# -- block_attention ---------------------------------------------------------------------------------------------------


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block: int, rope: tuple[Tensor, Tensor] | None, scale: float
) -> Tensor:
    """out [T, H, D]."""
    from gem.kernels.block_attention import block_attention_forward

    with on_device_of(q):
        return block_attention_forward(q, k, v, offsets, block, rope, scale)


def block_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block: int, rope: tuple[Tensor, Tensor] | None,
    scale: float,
) -> Gradients:  # fmt: skip
    """(dq, dk, dv)."""
    from gem.kernels.block_attention import block_attention_backward

    with on_device_of(q):
        return block_attention_backward(d_out, q, k, v, offsets, block, rope, scale)
