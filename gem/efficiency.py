"""Useful work of a jagged batch: pairs, FLOPs and least bytes. Padding, recompute and masked pairs earn nothing.

numpy only, so that declarations and reports count without torch. Lengths are int arrays ``[B]``, one entry a sample.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

Direction = Literal["forward", "backward"]
Ints = npt.NDArray[np.int64]


def window_edges(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    """(left, right) reach of a query around its own position; -1 = unlimited. Causal: nothing right of it is seen."""
    left, right = window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    return left, right


def _pairs_up_to(q_len: Ints, k_len: Ints, reach: Ints) -> Ints:
    """Pairs (i, j) with 0 <= i < q_len, 0 <= j < k_len, j <= i + reach: a sum of clamp(t, 0, k_len) in closed form."""

    def ramp(x: Ints) -> Ints:
        low = np.clip(x, 0, k_len)
        return low * (low + 1) // 2 + np.maximum(x - k_len, 0) * k_len

    return ramp(reach + q_len) - ramp(reach)


def attention_pairs(
    q_lens: npt.ArrayLike, k_lens: npt.ArrayLike, causal: bool = False, window: tuple[int, int] = (-1, -1)
) -> int:
    """Number of (query, key) pairs that are computed in a batch, exactly.

    Causal and window are aligned bottom-right as in FlashAttention >= 2.1: query i of a sample stands at key position
    ``i + k_len - q_len``. Lengths in tokens, result in pairs (per head).
    """
    q_len, k_len = np.asarray(q_lens, np.int64), np.asarray(k_lens, np.int64)
    if q_len.shape != k_len.shape:
        raise ValueError(f"q_lens and k_lens must hold one length a sample; got shapes {q_len.shape} and {k_len.shape}")
    left, right = window_edges(causal, window)
    shift = k_len - q_len
    pairs = q_len * k_len if right < 0 else _pairs_up_to(q_len, k_len, shift + right)
    if left >= 0:
        pairs = pairs - _pairs_up_to(q_len, k_len, shift - left - 1)
    return int(pairs.sum())


def block_pairs(lens: npt.ArrayLike, block: int) -> int:
    """Pairs of BlockAttention: each block of ``block`` tokens, counted from the sample's start, sees itself only."""
    length = np.asarray(lens, np.int64)
    full, rest = length // block, length % block
    return int((full * block * block + rest * rest).sum())


def attention_flops(pairs: int, heads: int, head_dim: int, direction: Direction) -> float:
    """Useful FLOPs: two products of 2 * head_dim a pair forward (4 * H * D * pairs); five backward, 2.5 times that."""
    forward = 4.0 * heads * head_dim * pairs
    return forward if direction == "forward" else 2.5 * forward


def attention_bytes(
    tokens_q: int,
    tokens_k: int,
    heads: int,
    head_dim: int,
    element_size: int,
    direction: Direction,
    shared_queries: int | None = None,
    outputs: int | None = None,
) -> float:
    """Least traffic in bytes: each input read once, each output written once.

    Forward: q, k, v in, out out. Backward: q, k, v and d_out in, dq, dk, dv out. With ``shared_queries`` (PMA) the
    queries are that many rows in all, while ``outputs`` (default ``tokens_q``) counts the rows of out and d_out.
    """
    row = heads * head_dim * element_size
    q_rows = tokens_q if shared_queries is None else shared_queries
    out_rows = tokens_q if outputs is None else outputs
    if direction == "forward":
        return float(row * (q_rows + out_rows + 2 * tokens_k))
    return float(row * (2 * q_rows + out_rows + 4 * tokens_k))
