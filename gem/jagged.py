"""Jagged tensors: values [T, H, D] and offsets [B + 1]. Checks, and the ways in and out of other forms.

offsets: int32 or int64, starting at 0, non-decreasing; sample b owns rows offsets[b] to offsets[b + 1]. Rows behind
offsets[-1] belong to no sample: they read as absent.

Legend: T rows of all samples, B samples, L longest sample, H heads, D head_dim.
"""

from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_values(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes, types and devices of q [TQ, H, D], k and v [TK, H, D]. Reads no device memory."""
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape  # each asking makes an object: a fifth of a microsecond
    for name, x, shape in (("q", q, q_shape), ("k", k, k_shape), ("v", v, v_shape)):
        if len(shape) != 3:
            raise ValueError(f"{op}: {name} must be [total, heads, head_dim], got shape {tuple(shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{op}: {name} is {x.dtype}; accepted are {', '.join(str(d) for d in DTYPES)}")
        if x.layout is not torch.strided:
            raise ValueError(f"{op}: {name} has layout {x.layout}; accepted: torch.strided")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{op}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"{op}: q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if k_shape != v_shape:
        raise ValueError(f"{op}: k and v must have one shape, got {tuple(k_shape)} and {tuple(v_shape)}")
    _, heads, head_dim = q_shape
    if heads != k_shape[1] or head_dim != k_shape[2]:
        raise ValueError(
            f"{op}: q and k must agree in heads and head_dim, got {tuple(q_shape[1:])} and {tuple(k_shape[1:])}"
        )
    if heads == 0 or head_dim == 0:
        raise ValueError(f"{op}: heads and head_dim must be at least 1, got {tuple(q_shape[1:])}")


def check_offsets(op: str, name: str, offsets: Tensor, device: torch.device) -> None:
    """Form of offsets [B + 1]. Reads no device memory."""
    if not isinstance(offsets, Tensor):
        raise ValueError(f"{op}: {name} must be an int32 or int64 tensor [batch + 1], got {type(offsets).__name__}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{op}: {name} must be [batch + 1], got shape {tuple(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: {name} is {offsets.dtype}; accepted are torch.int32, torch.int64")
    if offsets.device != device:
        raise ValueError(f"{op}: {name} is on {offsets.device}, the values are on {device}")


def check_offset_values(op: str, name: str, offsets: Tensor, total: int, max_len: int | None, max_name: str) -> None:
    """Values of offsets against ``total`` rows and the longest length promised. Reads memory (a sync on a GPU)."""
    edges = offsets.cpu().long()
    if int(edges[0]) != 0:
        raise ValueError(f"{op}: {name}[0] must be 0, got {int(edges[0])}")
    if int(edges.max()) > total or int(edges.min()) < 0:
        # All of them, and before the differences: those of garbage may wrap around and look ascending.
        worst = int(edges.max()) if int(edges.max()) > total else int(edges.min())
        raise ValueError(f"{op}: {name} has {worst} (last: {int(edges[-1])}), but there are only {total} rows")
    lens = edges.diff()
    if lens.numel() and int(lens.min()) < 0:
        b = int((lens < 0).nonzero()[0])
        raise ValueError(
            f"{op}: {name} must not decrease, got {name}[{b}] = {int(edges[b])} > {name}[{b + 1}] = {int(edges[b + 1])}"
        )
    if max_len is not None and lens.numel() and int(lens.max()) > max_len:
        b = int(lens.argmax())
        raise ValueError(f"{op}: sample {b} has {int(lens[b])} rows in {name}, more than {max_name} = {max_len}")


def from_nested(op: str, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """(values [T, H, D], offsets [B + 1]) of a nested tensor [B, j, H, D] in the jagged layout."""
    if x.layout != torch.jagged:
        raise ValueError(f"{op}: nested {name} must have layout torch.jagged, got {x.layout}")
    if x.dim() != 4 or getattr(x, "_ragged_idx", 1) != 1:
        raise ValueError(
            f"{op}: nested {name} must be [batch, jagged, heads, head_dim] with the jagged dimension second; "
            f"got {x.dim()} dimensions, jagged at {getattr(x, '_ragged_idx', 1)} (transpose(1, 2) moves it)"
        )
    if getattr(x, "_lengths", None) is not None:
        raise ValueError(f"{op}: nested {name} has holes between its samples; call .contiguous() first")
    nested: Any = x  # torch declares offsets() on the subclass only
    return nested.values(), nested.offsets()


def to_nested(values_THD: Tensor, offsets: Tensor) -> Tensor:
    """Nested tensor [B, j, H, D] over the same values."""
    return torch.nested.nested_tensor_from_jagged(values_THD, offsets)


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Offsets [B + 1] of lengths [B], same integer type."""
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=lengths.dtype, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def from_padded(padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(values [T, ...], offsets [B + 1]) of a padded batch [B, L, ...] with lengths [B] <= L. Gradients flow."""
    if lengths.dim() != 1 or lengths.shape[0] != padded.shape[0]:
        raise ValueError(f"from_padded: lengths must be [{padded.shape[0]}], got shape {tuple(lengths.shape)}")
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > padded.shape[1]):
        raise ValueError(
            f"from_padded: lengths must be in [0, {padded.shape[1]}], got {int(lengths.min())} to {int(lengths.max())}"
        )
    inside = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
    return padded[inside], lengths_to_offsets(lengths)


def to_padded(values: Tensor, offsets: Tensor, max_len: int, fill: float = 0.0) -> Tensor:
    """Padded batch [B, max_len, ...] of values [T, ...]; a longer sample is an error, never cut. Gradients flow."""
    lens = offsets.diff()
    if lens.numel() and int(lens.max()) > max_len:
        raise ValueError(
            f"to_padded: sample {int(lens.argmax())} has {int(lens.max())} rows, more than max_len = {max_len}"
        )
    inside = torch.arange(max_len, device=values.device) < lens[:, None]
    padded = values.new_full((lens.shape[0], max_len, *values.shape[1:]), fill)
    return padded.masked_scatter(
        inside.view(*inside.shape, *[1] * (values.dim() - 1)).expand_as(padded), values[: int(offsets[-1])]
    )


def from_keyed(keyed: Any, key: str) -> tuple[Tensor, Tensor]:
    """(values, offsets [B + 1]) of one feature of a TorchRec ``KeyedJaggedTensor`` (TorchRec is not imported)."""
    keys = list(keyed.keys())
    if key not in keys:
        raise ValueError(f"from_keyed: no feature {key!r}; the KeyedJaggedTensor has: {', '.join(keys)}")
    jagged = keyed[key]
    return jagged.values(), jagged.offsets()
