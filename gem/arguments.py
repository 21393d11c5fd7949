"""Checks of the public ops' arguments: cheap, no device memory is read. Each error names the argument, what it was and
what is accepted.

Legend: T rows of all samples (TQ, TK), B samples, H heads, D head_dim.
"""

import math
import numbers
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gem.bias import Bias, PositionBias, TimeBias
from gem.jagged import check_offsets, check_values, from_nested

LARGEST = 2**31 - 1  # of lengths, windows, blocks: sums of them must not wrap in int64


class Inputs(NamedTuple):
    """Plain values and offsets of one call, whether they came plain or nested."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor | None  # None: the queries are shared by all samples
    k_offsets: Tensor
    nested: Tensor | None  # offsets of the nested result; None: a plain one


def flatten(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    *,
    broadcast_q: bool = False,
    name: str = "q_offsets",
) -> Inputs:
    """Check a call's tensors; bring nested ones into values and offsets. ``name``: what the op calls its offsets."""
    for arg, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{op}: {arg} must be a tensor, got {type(x).__name__}")
    nested = None
    if q.is_nested or k.is_nested or v.is_nested:
        if q_offsets is not None or k_offsets is not None:
            raise ValueError(f"{op}: nested tensors carry their own offsets; leave out {name} and k_offsets")
        if not (k.is_nested and v.is_nested) or q.is_nested == broadcast_q:
            wanted = "k and v nested and q plain (broadcast_q)" if broadcast_q else "all three nested, or none"
            raise ValueError(f"{op}: nested and plain tensors are mixed; accepted: {wanted}")
        k, k_offsets = from_nested(op, "k", k)
        v, v_offsets = from_nested(op, "v", v)
        _same_offsets(op, "k and v", k_offsets, v_offsets)
        if q.is_nested:
            q, q_offsets = from_nested(op, "q", q)
            nested = q_offsets
            if name == "offsets":  # the op has one set of offsets for all three
                _same_offsets(op, "q and k", q_offsets, k_offsets)
    elif broadcast_q:
        if q_offsets is not None and k_offsets is not None:
            raise ValueError(
                f"{op}: with broadcast_q the queries have no offsets; pass q_offsets=None beside k_offsets"
            )
        q_offsets, k_offsets = None, q_offsets if k_offsets is None else k_offsets
    elif k_offsets is None:
        k_offsets = q_offsets
    check_values(op, q, k, v)
    _refuse_forward_mode(op, q, k, v)
    if k_offsets is None or (q_offsets is None and not broadcast_q):
        raise ValueError(f"{op}: {name} is missing; it may be left out only with nested tensors")
    check_offsets(op, name if q_offsets is k_offsets else "k_offsets", k_offsets, q.device)
    if q_offsets is not None and q_offsets is not k_offsets:
        check_offsets(op, name, q_offsets, q.device)
        if q_offsets.shape[0] != k_offsets.shape[0]:
            raise ValueError(
                f"{op}: q_offsets and k_offsets must hold one batch, got {q_offsets.shape[0] - 1} and "
                f"{k_offsets.shape[0] - 1} samples"
            )
    return Inputs(q, k, v, q_offsets, k_offsets, nested)


def _same_offsets(op: str, names: str, a: Tensor, b: Tensor) -> None:
    """Nested tensors of one op must agree in lengths. Values are read on the CPU; elsewhere the batch is compared."""
    if a is b:
        return
    if a.shape != b.shape or (a.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.equal(a, b)):
        raise ValueError(f"{op}: nested {names} must have the same lengths")


def _refuse_forward_mode(op: str, *tensors: Tensor) -> None:
    """Forward-mode derivatives would be dropped in silence: torch.library ops have none."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ValueError(f"{op}: has no forward-mode derivative (torch.func.jvp, forward_ad); accepted: reverse mode")


def number(op: str, name: str, value: float) -> float:
    """A finite number."""
    if type(value) is float and -math.inf < value < math.inf:  # math.isfinite of a traced float breaks the graph
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{op}: {name} must be a finite number, got {value!r}")
    return float(value)


def flag(op: str, name: str, value: bool) -> bool:
    """True or False, and nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise ValueError(f"{op}: {name} must be True or False, got {value!r}")
    return value


def _whole(value: object) -> bool:
    """Python's and numpy's integers, and the symbolic ones of torch.compile; no bool, no tensor."""
    # The exact type first: asking an abstract class costs half a microsecond.
    return type(value) is int or (isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool))


def block_size(op: str, block: int) -> int:
    """Rows of a block, at least 1."""
    if not _whole(block) or not 1 <= block <= LARGEST:
        raise ValueError(f"{op}: block must be a whole number >= 1, got {block!r}")
    return block


def length(op: str, name: str, value: int | None) -> int | None:
    """A promised longest length, or None."""
    if value is None:
        return None
    if not _whole(value) or not 0 <= value <= LARGEST:
        raise ValueError(f"{op}: {name} must be a whole number >= 0 or None, got {value!r}")
    return value


def window_sides(op: str, window: tuple[int, int]) -> tuple[int, int]:
    """(left, right), each >= -1."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"{op}: window must be (left, right), got {window!r}")
    for side in window:
        if not _whole(side) or not -1 <= side <= LARGEST:
            raise ValueError(
                f"{op}: window sides must be whole numbers >= 0 and < 2**31, or -1 for unlimited; got {window!r}"
            )
    return window[0], window[1]


def rope_tables(op: str, rope: tuple[Tensor, Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each [>= longest sample, D // 2]."""
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        raise ValueError(f"{op}: rope must be (cos, sin), got {type(rope).__name__}")
    if q.shape[2] % 2:
        raise ValueError(f"{op}: rope needs an even head_dim, got {q.shape[2]}")
    for name, table in zip(("cos", "sin"), rope, strict=True):
        if not isinstance(table, Tensor) or table.dim() != 2 or table.shape[1] != q.shape[2] // 2:
            shape = tuple(table.shape) if isinstance(table, Tensor) else type(table).__name__
            raise ValueError(f"{op}: rope's {name} must be [max_len, {q.shape[2] // 2}], got {shape}")
        if table.device != q.device:
            raise ValueError(f"{op}: rope's {name} is on {table.device}, the values are on {q.device}")
        if not table.is_floating_point():
            raise ValueError(f"{op}: rope's {name} must be a floating tensor, got {table.dtype}")
        if table.requires_grad:
            raise ValueError(f"{op}: rope's {name} gets no gradient; pass it detached")
    _refuse_forward_mode(op, *rope)
    if rope[0].shape != rope[1].shape:
        raise ValueError(f"{op}: rope's cos and sin differ: {tuple(rope[0].shape)} and {tuple(rope[1].shape)}")
    return rope[0], rope[1]


_NO_BIAS = (None,) * 7


def flat_bias(
    op: str, x: Inputs, bias: Bias | None, max_q_len: int | None, max_k_len: int | None
) -> tuple[int | None, int | None, tuple[Tensor | None, ...]]:
    """A bias flattened for the library op; a dense one also promises the longest lengths it covers."""
    if bias is None:
        return max_q_len, max_k_len, _NO_BIAS
    if isinstance(bias, Tensor):
        _refuse_forward_mode(op, bias)
        if not 1 <= bias.dim() <= 4 or not bias.is_floating_point():
            raise ValueError(
                f"{op}: bias must be a floating tensor broadcastable to [batch, heads, max_q_len, max_k_len], got "
                f"{bias.dtype} {tuple(bias.shape)}"
            )
        batch, heads, bias_q, bias_k = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        for name, have, want in (
            ("batch", batch, x.k_offsets.shape[0] - 1),
            ("heads", heads, x.q.shape[1]),
            ("max_q_len", bias_q, max_q_len),
            ("max_k_len", bias_k, max_k_len),
        ):
            if have != 1 and want is not None and have != want:
                raise ValueError(
                    f"{op}: bias has {have} for {name}; accepted are 1 and {want} (shape {tuple(bias.shape)})"
                )
        max_q_len = bias_q if max_q_len is None and bias_q != 1 else max_q_len
        if bias.device != x.q.device:
            raise ValueError(f"{op}: bias is on {bias.device}, the values are on {x.q.device}")
        max_k_len = bias_k if max_k_len is None and bias_k != 1 else max_k_len
        return max_q_len, max_k_len, (bias, *_NO_BIAS[1:])
    if not isinstance(bias, (PositionBias, TimeBias)):
        raise ValueError(f"{op}: bias must be a tensor, PositionBias or TimeBias, got {type(bias).__name__}")
    _refuse_forward_mode(op, bias.table)
    if bias.table.shape[1] not in (1, x.q.shape[1]):
        raise ValueError(f"{op}: the bias table has {bias.table.shape[1]} heads; accepted are 1 and {x.q.shape[1]}")
    parts = {"table": bias.table, "boundaries": bias.boundaries}
    if isinstance(bias, TimeBias):
        parts |= {"q_times": bias.q_times, "k_times": bias.k_times}
    for name, part in parts.items():
        if part.device != x.q.device:
            raise ValueError(f"{op}: the bias {name} is on {part.device}, the values are on {x.q.device}")
    if isinstance(bias, PositionBias):
        return max_q_len, max_k_len, (None, bias.table, bias.boundaries, None, None, None, None)
    for name, times, rows in (("q_times", bias.q_times, x.q.shape[0]), ("k_times", bias.k_times, x.k.shape[0])):
        if times.shape[0] != rows:
            raise ValueError(f"{op}: {name} must hold one time a row, {rows}; got {times.shape[0]}")
    return max_q_len, max_k_len, (None, None, None, bias.table, bias.boundaries, bias.q_times, bias.k_times)
