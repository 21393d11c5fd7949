"""Block attention: softmax attention inside each block of a sample, q and k rotated on the way.

A block fits into one tile, so one program computes one block of one head and nothing is ever revisited: no online
softmax, no log-sum-exp, no rotated copies of q and k in memory, and the backward recomputes the weights. What is left
is one read of the inputs and one write of the outputs, and that bounds the time. The heads of a block lie beside each
other in memory, and so do their programs in the grid.

q and k are held as two halves of columns, the pairs that rotary positions turn; scores are the sum of two products.
Blocks that do not fit are rotated in memory and attended to as samples of their own by the general kernels.

Legend: T rows of all samples, H heads, D head_dim, M queries and N keys of a block, C columns of half a head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem.kernels.config import Config
from gem.kernels.device import LOG2E, dot, load_rows, read_tile, store_rows
from gem.kernels.launch import (
    PLANS,
    Launch,
    empty_like,
    kind_of,
    last_contiguous,
    precision_of,
    remember,
    tile_dim,
    wide,
)
from gem.kernels.ops import attention_backward, attention_forward
from gem.kernels.rotary import load_angles, load_halves, rotate, store_halves, tile_of_heads, turned
from gem.kernels.schedule import Batch

_LARGEST_TILE = 32 * 1024  # bytes of a block of q, and of its weights
Rope = tuple[Tensor, Tensor]


def block_attention_forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    offsets: Tensor,
    block: int,
    rope: Rope | None,
    scale: float,
    config: Config | None = None,
    registers: int | None = None,
) -> Tensor:
    """out [T, H, D]; rows behind the last offset are 0.

    ``offsets`` [B + 1], ``rope`` = (cos, sin), each [>= longest sample, D / 2]. For the fused kernel: ``config``, of
    which the warps count, and ``registers``, the most that a thread may use (None: as the compiler likes).
    """
    q_THD, k_THD, v_THD = (last_contiguous(x) for x in (q_THD, k_THD, v_THD))
    rows, heads = q_THD.shape[:2]
    batch = Batch(offsets, offsets, rows, rows)
    if not _fits(q_THD, block):
        return _attend(q_THD, k_THD, v_THD, batch, block, rope, scale)[0]
    out = empty_like(q_THD)
    if out.numel() == 0:
        return out
    tiles = batch.tiles("q", block)
    cos, sin = (q_THD, q_THD) if rope is None else (last_contiguous(x) for x in rope)
    run = _launch(_forward, block, rope, (q_THD, k_THD, v_THD), (cos, sin), batch, config, registers)
    run(
        (tiles.shape[0] * heads,), q_THD, k_THD, v_THD, out, cos, sin, tiles,
        q_THD.stride(0), q_THD.stride(1), k_THD.stride(0), k_THD.stride(1), v_THD.stride(0), v_THD.stride(1),
        out.stride(0), out.stride(1), cos.stride(0), sin.stride(0),
        heads, tiles.shape[0], scale * LOG2E,
    )  # fmt: skip
    return out


def block_attention_backward(
    d_out_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    offsets: Tensor,
    block: int,
    rope: Rope | None,
    scale: float,
    config: Config | None = None,
    registers: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each [T, H, D]; rows behind the last offset are 0. Nothing of the forward is needed.

    Blocks that do not fit into a tile go through their forward again: the general kernels read its output and
    log-sum-exp, which no caller of block attention keeps. Arguments are those of ``block_attention_forward``.
    """
    d_out_THD, q_THD, k_THD, v_THD = (last_contiguous(x) for x in (d_out_THD, q_THD, k_THD, v_THD))
    rows, heads = q_THD.shape[:2]
    batch = Batch(offsets, offsets, rows, rows)
    if not _fits(q_THD, block):
        return _attend_backward(d_out_THD, q_THD, k_THD, v_THD, batch, block, rope, scale)
    dq, dk, dv = empty_like(q_THD), empty_like(k_THD), empty_like(v_THD)
    if dq.numel() == 0:
        return dq, dk, dv
    tiles = batch.tiles("q", block)
    cos, sin = (q_THD, q_THD) if rope is None else (last_contiguous(x) for x in rope)
    run = _launch(_backward, block, rope, (q_THD, k_THD, v_THD, d_out_THD), (cos, sin), batch, config, registers)
    run(
        (tiles.shape[0] * heads,), d_out_THD, q_THD, k_THD, v_THD, dq, dk, dv, cos, sin, tiles,
        d_out_THD.stride(0), d_out_THD.stride(1), q_THD.stride(0), q_THD.stride(1), k_THD.stride(0), k_THD.stride(1),
        v_THD.stride(0), v_THD.stride(1), dq.stride(0), dq.stride(1), cos.stride(0), sin.stride(0),
        heads, tiles.shape[0], scale * LOG2E, scale,
    )  # fmt: skip
    return dq, dk, dv


def _fits(q_THD: Tensor, block: int) -> bool:
    """Whether a block is one tile: four of its tensors and both matrices of weights share an SM's memory."""
    size = tile_dim(block)
    return size * max(size, tile_dim(q_THD.shape[2])) * q_THD.element_size() <= _LARGEST_TILE


def _config(q_THD: Tensor, block: int) -> Config:
    """The fewest warps whose registers hold the tiles: several programs share an SM, one loads while another computes.

    At least a warp for each 16 rows, which is how products are dealt. Those of fp32, which no matrix unit computes,
    take more registers.
    """
    size = tile_dim(block)
    of_a_warp = 512 if q_THD.dtype == torch.float32 else 2048  # elements of a tile
    return Config(size, size, min(8, max(size // 16, size * tile_dim(q_THD.shape[2]) // of_a_warp)), 1)


def _launch(
    kernel: Any, block: int, rope: Rope | None, read: tuple[Tensor, ...], tables: tuple[Tensor, ...], batch: Batch,
    config: Config | None, registers: int | None,
) -> Launch:  # fmt: skip
    """The kernel with its constants. ``read``: the tensors [T, H, D] that it reads, q first; ``tables``: cos, sin."""
    kind, angles = kind_of(batch, *read), kind_of(batch, *tables)
    known = None not in (kind, angles) and config is None and registers is None
    key = (kernel, kind, angles, tables[1].dtype, block, rope is not None)
    found = PLANS.get(key) if known else None
    if found is None:
        q_THD, head_dim = read[0], read[0].shape[2]
        found = Launch(
            kernel, ROPE=rope is not None, SIZE=block, BLOCK=tile_dim(block), HEAD_DIM=head_dim,
            HALF=tile_dim((head_dim + 1) // 2), BLOCK_D=tile_dim(head_dim), WIDE=wide(*read, *tables),
            PRECISION=precision_of(q_THD), warps=(config or _config(q_THD, block)).warps, registers=registers,
        )  # fmt: skip
        if known:
            remember(key, found)
    return found


@triton.jit(do_not_specialize=["heads", "n_tiles"])
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, cos_ptr, sin_ptr, tiles,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, cos_row, sin_row,
    heads, n_tiles, scale,
    ROPE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_D: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index = tile_of_heads(heads)
    head = (tl.program_id(0) % heads).to(tl.int64)
    sample, row, start, length, _, k_len = read_tile(tiles, index, n_tiles)
    if sample >= 0:
        end = tl.minimum(row + SIZE, length)
        # k_len is 0 behind the last offset: nothing is read there, whatever it is, and zeros give outputs of 0.
        read_end = tl.minimum(row + SIZE, k_len)
        rows, half, columns = tl.arange(0, BLOCK), tl.arange(0, HALF), tl.arange(0, BLOCK_D)
        q_base, k_base = q_ptr + start * q_row + head * q_head, k_ptr + start * k_row + head * k_head
        v_base = v_ptr + start * v_row + head * v_head
        q1, q2 = load_halves(q_base, row, rows, half, q_row, read_end, HEAD_DIM, HALF, WIDE)
        k1, k2 = load_halves(k_base, row, rows, half, k_row, read_end, HEAD_DIM, HALF, WIDE)
        v = load_rows(v_base, row, rows, columns, v_row, read_end, HEAD_DIM, BLOCK_D, WIDE)
        if ROPE:
            cos, sin = load_angles(cos_ptr, sin_ptr, row, rows, half, cos_row, sin_row, read_end, HEAD_DIM, HALF, WIDE)
            q1, q2 = turned(q1, q2, cos, sin, q_ptr.dtype.element_ty)
            k1, k2 = turned(k1, k2, cos, sin, k_ptr.dtype.element_ty)
        weights, factor = _softmax(q1, q2, k1, k2, row, rows, read_end, scale, BLOCK, PRECISION)
        out = dot(weights.to(v.dtype), v, None, PRECISION) * factor[:, None]
        out_base = out_ptr + start * out_row + head * out_head
        store_rows(out_base, row, rows, columns, out_row, end, out, HEAD_DIM, BLOCK_D, False)


@triton.jit(do_not_specialize=["heads", "n_tiles"])
def _backward(
    d_out_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, tiles,
    d_out_row, d_out_head, q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, cos_row, sin_row,
    heads, n_tiles, scale, grad_scale,
    ROPE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_D: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index = tile_of_heads(heads)
    head = (tl.program_id(0) % heads).to(tl.int64)
    sample, row, start, length, _, k_len = read_tile(tiles, index, n_tiles)
    if sample >= 0:
        end = tl.minimum(row + SIZE, length)
        read_end = tl.minimum(row + SIZE, k_len)
        rows, half, columns = tl.arange(0, BLOCK), tl.arange(0, HALF), tl.arange(0, BLOCK_D)
        q_base, k_base = q_ptr + start * q_row + head * q_head, k_ptr + start * k_row + head * k_head
        v_base, d_out_base = v_ptr + start * v_row + head * v_head, d_out_ptr + start * d_out_row + head * d_out_head
        q1, q2 = load_halves(q_base, row, rows, half, q_row, read_end, HEAD_DIM, HALF, WIDE)
        k1, k2 = load_halves(k_base, row, rows, half, k_row, read_end, HEAD_DIM, HALF, WIDE)
        v = load_rows(v_base, row, rows, columns, v_row, read_end, HEAD_DIM, BLOCK_D, WIDE)
        d_out = load_rows(d_out_base, row, rows, columns, d_out_row, read_end, HEAD_DIM, BLOCK_D, WIDE)
        # Zeros already, but see load_angles: without this every warp would hold all of v from here on.
        v = tl.where((row + rows < read_end)[:, None], v, 0.0)
        if ROPE:
            cos, sin = load_angles(cos_ptr, sin_ptr, row, rows, half, cos_row, sin_row, read_end, HEAD_DIM, HALF, WIDE)
            q1, q2 = turned(q1, q2, cos, sin, q_ptr.dtype.element_ty)
            k1, k2 = turned(k1, k2, cos, sin, k_ptr.dtype.element_ty)
        weights, factor = _softmax(q1, q2, k1, k2, row, rows, read_end, scale, BLOCK, PRECISION)
        weights *= factor[:, None]
        # One gradient after another, each written before the next is begun: their sums are what fills the registers.
        grad = start * grad_row + head * grad_head
        dv = dot(tl.trans(weights.to(d_out.dtype)), d_out, None, PRECISION)
        store_rows(dv_ptr + grad, row, rows, columns, grad_row, end, dv, HEAD_DIM, BLOCK_D, False)
        d_weights = dot(d_out, tl.trans(v), None, PRECISION)
        delta = tl.sum(weights * d_weights, 1)
        dx = (weights * (d_weights - delta[:, None])).to(q1.dtype)
        dk1, dk2 = dot(tl.trans(dx), q1, None, PRECISION), dot(tl.trans(dx), q2, None, PRECISION)
        if ROPE:  # loaded anew: from the cache, where they occupied no registers meanwhile
            cos, sin = load_angles(cos_ptr, sin_ptr, row, rows, half, cos_row, sin_row, read_end, HEAD_DIM, HALF, WIDE)
            dk1, dk2 = turned(dk1, dk2, cos, -sin, tl.float32)
        store_halves(dk_ptr + grad, row, rows, half, grad_row, end, dk1 * grad_scale, dk2 * grad_scale, HEAD_DIM, HALF)
        dq1, dq2 = dot(dx, k1, None, PRECISION), dot(dx, k2, None, PRECISION)
        if ROPE:
            dq1, dq2 = turned(dq1, dq2, cos, -sin, tl.float32)
        store_halves(dq_ptr + grad, row, rows, half, grad_row, end, dq1 * grad_scale, dq2 * grad_scale, HEAD_DIM, HALF)


@triton.jit
def _softmax(q1, q2, k1, k2, row, rows, end, scale, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(weights [M, N] with a largest of 1, the factor [M] that makes their sum 1). ``scale`` is in base 2."""
    x = dot(q1, tl.trans(k1), None, PRECISION)
    x = dot(q2, tl.trans(k2), x, PRECISION) * scale
    if row + BLOCK > end:  # a block that does not fill its tile: behind its end scores are those of zeros
        x = tl.where((row + rows < end)[None, :], x, float("-inf"))
    top = tl.max(x, 1)
    # A row that sees nothing has the maximum -inf, and -inf - -inf is no number.
    weights = tl.exp2(x - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weights, 1)
    return weights, tl.where(total == 0.0, 0.0, 1.0 / total)


# -- blocks that no tile holds -----------------------------------------------------------------------------------------


def _attend(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, batch: Batch, block: int, rope: Rope | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out [T, H, D], lse [H, T], q and k rotated)."""
    if rope is not None:
        q_THD, k_THD = rotate(q_THD, rope, batch), rotate(k_THD, rope, batch)
    out, lse = attention_forward(q_THD, k_THD, v_THD, batch.blocks(block), qk_scale=scale)
    return out, lse, q_THD, k_THD


def _attend_backward(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, batch: Batch, block: int, rope: Rope | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), each [T, H, D]: dq and dk leave the products in fp32 and are rounded once, rotated back."""
    out, lse, q_THD, k_THD = _attend(q_THD, k_THD, v_THD, batch, block, rope, scale)
    dq, dk, dv, _ = attention_backward(
        d_out_THD, q_THD, k_THD, v_THD, out, lse, batch.blocks(block), qk_scale=scale,
        dtype=None if rope is None else torch.float32,
    )  # fmt: skip
    if rope is not None:
        dq, dk = (rotate(x, rope, batch, back=True, dtype=q_THD.dtype) for x in (dq, dk))
    return dq, dk, dv
