"""Rotary positions: of row i of a sample, the halves x[..., :D/2] and x[..., D/2:] turn by row i of cos and sin.

The fused kernels turn the tiles that they have just loaded, in registers, with the functions below. ``rotate`` is a
pass of its own over memory, for blocks that a fused kernel has no room for.

Legend: T rows of all samples, H heads, D head_dim, R rows of a tile, C columns of half a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem.kernels.device import load_rows, read_tile, store_rows
from gem.kernels.launch import PLANS, Launch, empty_like, kind_of, last_contiguous, remember, tile_dim, wide
from gem.kernels.schedule import Batch

_TILE_ROWS = 32


def rotate(
    x_THD: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, *, back: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """x rotated, [T, H, D], computed in fp32 and rounded once; rows behind the last offset are 0.

    ``rope`` = (cos, sin), each [>= longest sample, D / 2]. ``back``: by the opposite angles, as a gradient is.
    """
    x_THD, cos, sin = (last_contiguous(x) for x in (x_THD, *rope))
    heads, head_dim = x_THD.shape[1:]
    out = empty_like(x_THD, dtype)
    if out.numel() == 0:
        return out
    tiles = batch.tiles("q", _TILE_ROWS)
    kinds = kind_of(batch, x_THD), kind_of(batch, cos, sin)
    key = ("rotate", *kinds, sin.dtype, out.dtype, back)
    run = None if None in kinds else PLANS.get(key)
    if run is None:
        run = Launch(
            _rotate, BACK=back, HEAD_DIM=head_dim, HALF=tile_dim(head_dim // 2), ROWS=_TILE_ROWS,
            WIDE=wide(x_THD, cos, sin), warps=4,
        )  # fmt: skip
        if None not in kinds:
            remember(key, run)
    run(
        (tiles.shape[0] * heads,), x_THD, cos, sin, out, tiles,
        x_THD.stride(0), x_THD.stride(1), cos.stride(0), sin.stride(0), out.stride(0), out.stride(1),
        heads, tiles.shape[0],
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["heads", "n_tiles"])
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, tiles, x_row, x_head, cos_row, sin_row, out_row, out_head, heads, n_tiles,
    BACK: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    index = tile_of_heads(heads)
    head = (tl.program_id(0) % heads).to(tl.int64)
    sample, row, start, length, _, k_len = read_tile(tiles, index, n_tiles)
    if sample >= 0:
        # k_len is 0 behind the last offset, where no row has a position: everything reads 0 there.
        r, columns = tl.arange(0, ROWS), tl.arange(0, HALF)
        x_base, out_base = x_ptr + start * x_row + head * x_head, out_ptr + start * out_row + head * out_head
        x1, x2 = load_halves(x_base, row, r, columns, x_row, k_len, HEAD_DIM, HALF, WIDE)
        cos, sin = load_angles(cos_ptr, sin_ptr, row, r, columns, cos_row, sin_row, k_len, HEAD_DIM, HALF, WIDE)
        x1, x2 = turned(x1, x2, cos, -sin if BACK else sin, tl.float32)
        store_halves(out_base, row, r, columns, out_row, length, x1, x2, HEAD_DIM, HALF)


@triton.jit
def tile_of_heads(heads):
    """Number in the tile list of this program's tile: all heads of a tile, whose rows are neighbours, then the next."""
    return tl.program_id(0) // heads


@triton.jit
def load_halves(base, first, rows, columns, row_stride, end, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
                WIDE: tl.constexpr):  # fmt: skip
    """Both halves [R, C] of rows [first, first + R) of a sample. Of an odd HEAD_DIM, the first has a column more."""
    FIRST: tl.constexpr = (HEAD_DIM + 1) // 2
    x1 = load_rows(base, first, rows, columns, row_stride, end, FIRST, HALF, WIDE)
    x2 = load_rows(base + FIRST, first, rows, columns, row_stride, end, HEAD_DIM - FIRST, HALF, WIDE)
    return x1, x2


@triton.jit
def store_halves(base, first, rows, columns, row_stride, end, x1, x2, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """The counterpart of ``load_halves``, to a tensor of ours (whose rows lie close)."""
    FIRST: tl.constexpr = (HEAD_DIM + 1) // 2
    store_rows(base, first, rows, columns, row_stride, end, x1, FIRST, HALF, False)
    store_rows(base + FIRST, first, rows, columns, row_stride, end, x2, HEAD_DIM - FIRST, HALF, False)


@triton.jit
def load_angles(cos_ptr, sin_ptr, first, rows, columns, cos_row, sin_row, end, HEAD_DIM: tl.constexpr,
                HALF: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """cos and sin [R, C] in fp32 of the positions [first, first + R); the tables need no rows from ``end`` on.

    They are made 0 there by a select though loaded as 0, for what it keeps Triton (3.6) from: where a product's operand
    is elementwise arithmetic on nothing but loads, it moves the arithmetic into the product's register layout. All of
    x, cos and sin then take the way through shared memory, and the registers that a rotation needs double.
    """
    cos = load_rows(cos_ptr, first, rows, columns, cos_row, end, HEAD_DIM // 2, HALF, WIDE)
    sin = load_rows(sin_ptr, first, rows, columns, sin_row, end, HEAD_DIM // 2, HALF, WIDE)
    there = (first + rows < end)[:, None]
    return tl.where(there, cos.to(tl.float32), 0.0), tl.where(there, sin.to(tl.float32), 0.0)


@triton.jit
def turned(x1, x2, cos, sin, DTYPE: tl.constexpr):
    """Both halves rotated in fp32, as DTYPE."""
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    return (x1 * cos - x2 * sin).to(DTYPE), (x2 * cos + x1 * sin).to(DTYPE)
