"""BlockAttention in plain PyTorch: rotate, then softmax attention over the samples cut into blocks.

Legend: T rows of all samples, H heads, D head_dim, L longest sample.
"""

import numpy as np
import torch
from torch import Tensor

from gem.portable import softmax
from gem.portable.batch import Spec
from gem.portable.biases import BiasInputs
from gem.portable.products import compute_dtype


def forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    offsets: Tensor,
    block: int,
    rope: tuple[Tensor, Tensor] | None,
    scale: float,
) -> Tensor:
    """[T, H, D]; rows outside every sample 0."""
    spec = _block_spec(offsets, block)
    q, k, v = _rotated(q_THD, k_THD, v_THD, offsets, rope)
    return softmax.forward(q, k, v, spec, scale, BiasInputs()).to(q_THD.dtype)


def backward(
    d_out_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    offsets: Tensor,
    block: int,
    rope: tuple[Tensor, Tensor] | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv: rotated back in the precision of the products, rounded once."""
    spec = _block_spec(offsets, block)
    q, k, v = _rotated(q_THD, k_THD, v_THD, offsets, rope)
    dq, dk, dv = softmax.backward(d_out_THD.to(v.dtype), q, k, v, spec, scale, BiasInputs())
    if rope is not None:
        position = _positions(offsets, q_THD.shape[0])
        dq, dk = (rotate(x, position, rope[0], -rope[1]) for x in (dq, dk))
    return dq.to(q_THD.dtype), dk.to(k_THD.dtype), dv.to(v_THD.dtype)


def rotate(x_THD: Tensor, position_T: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """Rotate pairs (x[..., :D/2], x[..., D/2:]) by each row's position; rotation by -sin undoes it."""
    cos, sin = (t.index_select(0, position_T)[:, None, :].to(x_THD.dtype) for t in (cos_LD, sin_LD))
    first, second = x_THD.chunk(2, dim=-1)
    out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


def _rotated(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, offsets: Tensor, rope: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k rotated, all in the type of the products: rounding a rotated bf16 row would double its error."""
    dtype = torch.float32 if q_THD.dtype in (torch.bfloat16, torch.float16) else compute_dtype(q_THD)
    q, k, v = (x.to(dtype) for x in (q_THD, k_THD, v_THD))
    if rope is not None:
        position = _positions(offsets, q.shape[0])
        q, k = (rotate(x, position, *rope) for x in (q, k))
    return q, k, v


def _positions(offsets: Tensor, rows: int) -> Tensor:
    """Position of each row in its sample, [T]; rows behind the last offset read position 0, nobody reads them."""
    lens = offsets.diff()
    starts = offsets[:-1].repeat_interleave(lens)
    position = torch.zeros(rows, dtype=torch.int64, device=offsets.device)
    position[: starts.shape[0]] = torch.arange(starts.shape[0], device=offsets.device) - starts
    return position


def _block_spec(offsets: Tensor, block: int) -> Spec:
    """Every block is a sample of its own."""
    edges = offsets.cpu().numpy().astype(np.int64)
    lens = np.diff(edges)
    counts = -(-lens // block)
    first = np.repeat(edges[:-1], counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = first + number * block
    ends = np.minimum(starts + block, np.repeat(edges[1:], counts))
    return Spec(starts, ends - starts, starts, ends - starts, -1, -1)
