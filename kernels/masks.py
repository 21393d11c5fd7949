"""Which keys a tile of queries sees, and the reverse; causal and windows are aligned bottom-right.

Query i of a sample stands at key position i + shift, shift = k_len - q_len, and sees the keys from ``left`` before to
``right`` behind it. "Own" rows are those of a program's tile, "other" rows those that it visits.
"""

import triton
import triton.language as tl


@triton.jit
def sample_rows(offsets, sample, batch_size, rows):
    """(first row, number of rows) of a sample; sample ``batch_size`` is what lies behind the last offset."""
    start = tl.load(offsets + sample).to(tl.int64)
    end = tl.load(offsets + sample + 1, mask=sample < batch_size, other=rows).to(tl.int64)
    return start, (end - start).to(tl.int32)


@triton.jit
def seen_range(first, BLOCK: tl.constexpr, own_len, other_len, before, after,
               HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr):  # fmt: skip
    """[low, high) of the other rows that any of the own rows [first, first + BLOCK) sees or is seen by.

    It starts at the very first such row, not at a multiple of a tile: a window then meets one tile less.
    """
    shift = other_len - own_len
    low, high = 0, other_len
    if HAS_BEFORE:
        low = tl.maximum(first + shift - before, 0)
    if HAS_AFTER:
        last = tl.minimum(first + BLOCK, own_len) - 1
        high = tl.minimum(last + shift + after + 1, other_len)
    return low, high


@triton.jit
def tile_is_whole(i, BLOCK_M: tl.constexpr, j, BLOCK_N: tl.constexpr, q_len, k_len, left, right,
                  HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Whether all queries of [i, i + BLOCK_M), but those behind the end, see all keys of [j, j + BLOCK_N)."""
    shift = k_len - q_len
    whole = j + BLOCK_N <= k_len
    if HAS_LEFT:
        whole = whole & (j >= tl.minimum(i + BLOCK_M, q_len) - 1 + shift - left)
    if HAS_RIGHT:
        whole = whole & (j + BLOCK_N - 1 <= i + shift + right)
    return whole


@triton.jit
def visible(i, j, q_len, k_len, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which of the pairs (i, j) count; i and j broadcast against each other. For i behind the end: anything.

    A window costs a pair one subtraction and one comparison: what is below its start wraps to a huge unsigned number.
    """
    own = i + (k_len - q_len)
    last = own + right if HAS_RIGHT else own * 0 + k_len
    last = tl.minimum(last, k_len - 1)
    if HAS_LEFT:
        first = own - left
        return (j - first).to(tl.uint32) <= (last - first).to(tl.uint32)
    else:
        return j <= last
