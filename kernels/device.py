"""What every kernel here builds on: whether Triton runs or is interpreted, products, and addressing.

Legend: M rows of a product, N columns, K its inner dimension.
"""

import os

import triton
import triton.language as tl

# Triton decides when a kernel is defined, so the variable counts as it stands at the import of this package.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
UPCAST = tl.constexpr(INTERPRETED)
LOG2E = 1.4426950408889634


@triton.jit
def dot(a_MK, b_KN, acc_MN, PRECISION: tl.constexpr):
    """acc + a b with fp32 accumulation. PRECISION: "ieee" for fp32 operands, which tf32 would round to 10 bits."""
    if UPCAST:  # a bf16 product is garbage in the interpreter of triton 3.6 to 3.9
        # In float64: numpy sums a float32 product in an order of its own, another one for its transpose.
        product = tl.dot(a_MK.to(tl.float64), b_KN.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
        return product if acc_MN is None else acc_MN + product
    else:
        return tl.dot(a_MK, b_KN, acc_MN, input_precision=PRECISION)


@triton.jit
def weights_of(x, lse):
    """Softmax weights from scores and their log-sum-exp, in base 2: at most 1, and NaN where either is.

    Whatever rounding did to x since the forward: scores of 1e6 have an ulp of 0.06. A plain minimum would hide NaN.
    """
    return tl.exp2(tl.minimum(x - lse, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def tile_offsets(rows, columns, row_stride, WIDE: tl.constexpr):
    """Element offsets [rows, columns] of a tile from its first element: 32 bits, a register each, unless ``WIDE``."""
    if WIDE:
        return rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    else:
        return rows[:, None] * row_stride + columns[None, :]


@triton.jit
def load_rows(base, first, rows, columns, row_stride, end, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              WIDE: tl.constexpr):  # fmt: skip
    """Rows [first, first + len(rows)) of a sample; rows from ``end`` on and columns behind HEAD_DIM read 0.

    The zeros are free: a masked cp.async fills its part of shared memory with them.
    """
    pointers = base + tl.cast(first, tl.int64) * row_stride + tile_offsets(rows, columns, row_stride, WIDE)
    if HEAD_DIM == BLOCK_D:
        return tl.load(pointers, mask=(first + rows < end)[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=(first + rows < end)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_tile(source, start, length, head, first, rows, columns, row_stride, head_stride, HEAD_DIM: tl.constexpr,
              BLOCK_D: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """``load_rows`` of the sample [start, start + length) and one head, from a pointer or a ragged TMA descriptor."""
    if TMA:
        # One thread asks for the tile and no register holds an address. The descriptor (launch.ragged) has the rows
        # twice more in front: a row's number counts back from 2**30 and the hardware stops at the sample's end.
        end = 2**30
        row = (end - length + first).to(tl.int32)
        tile = source.load([end, (start + length).to(tl.int32), row, (head * HEAD_DIM).to(tl.int32)])
        return tl.reshape(tile, [tile.shape[2], tile.shape[3]])
    else:
        return load_rows(source + start * row_stride + head * head_stride, first, rows, columns, row_stride, length,
                         HEAD_DIM, BLOCK_D, WIDE)  # fmt: skip


@triton.jit
def load_two(first_ptr, second_ptr, start, length, BLOCK: tl.constexpr):
    """Entries [start, start + BLOCK) of two vectors of fp32; 0 from ``length`` on.

    One load of twice the entries: a vector with fewer entries than a program has threads is fetched by each thread for
    itself, 32 copies of 4 bytes a thread in each turn of a backward's loop of 64 rows.
    """
    both = tl.arange(0, 2 * BLOCK)
    row = start + both % BLOCK
    source = tl.where(both < BLOCK, first_ptr, second_ptr)
    pair = tl.load(source + row, mask=row < length, other=0.0)
    return tl.split(tl.trans(tl.reshape(pair, [2, BLOCK])))


@triton.jit
def warm_rows(base, first, rows, row_stride, end, HEAD_DIM: tl.constexpr):
    """Have rows [first, first + len(rows)) brought into L2 without waiting for them.

    What stands before a loop is a chain of reads from DRAM: each tile read into shared memory is waited for before the
    next is asked for. ``end`` > 0 bounds the rows that are touched.
    """
    if not UPCAST:  # inline assembly is not interpreted
        LINE: tl.constexpr = 1024 // base.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
        lines = tl.arange(0, triton.next_power_of_2((HEAD_DIM + LINE - 1) // LINE))
        row = tl.minimum(first + rows, end - 1).to(tl.int64)
        address = (base + row[:, None] * row_stride + tl.minimum(lines * LINE, HEAD_DIM - 1)[None, :]).to(tl.int64)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], tl.int32, False, 1)


@triton.jit
def store_rows(base, first, rows, columns, row_stride, end, x, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
               WIDE: tl.constexpr):  # fmt: skip
    """The counterpart of ``load_rows``: only rows before ``end`` and columns before HEAD_DIM are written."""
    pointers = base + tl.cast(first, tl.int64) * row_stride + tile_offsets(rows, columns, row_stride, WIDE)
    mask = (first + rows < end)[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def dealt(turn, count, PERSISTENT: tl.constexpr):
    """Number of this program's ``turn``-th piece of work out of ``count``, which are sorted, the longest first.

    A grid as long as the list takes it in order and the hardware deals: each SM takes the next piece when it is free. A
    persistent grid is dealt statically, in zigzag (…P-2, P-1, then P-1, P-2…), so that whoever got the longest piece
    of one round gets the shortest of the next. ``count`` or more: there is none left.
    """
    program = tl.program_id(0)
    if PERSISTENT:
        programs = tl.num_programs(0)
        return turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)
    else:
        return program


@triton.jit
def read_tile(tiles, index, n_tiles):
    """The record of a tile (schedule.Batch.tiles): sample (-1 = none), row, q_start, q_len, k_start, k_len."""
    record = tiles + 8 * index  # schedule.FIELDS
    sample = tl.load(record, mask=index < n_tiles, other=-1)
    row = tl.load(record + 1, mask=index < n_tiles, other=0)
    q_start = tl.load(record + 2, mask=index < n_tiles, other=0).to(tl.int64)
    q_len = tl.load(record + 3, mask=index < n_tiles, other=0)
    k_start = tl.load(record + 4, mask=index < n_tiles, other=0).to(tl.int64)
    k_len = tl.load(record + 5, mask=index < n_tiles, other=0)
    return sample, row, q_start, q_len, k_start, k_len
