"""Useful work of a jagged batch: pairs, FLOPs and least bytes; and what a training step makes of it: MFU, waterfall.

Padding, recompute and masked pairs earn nothing. E2E MFU = Local MFU × Scaling Ratio.

numpy only, so that declarations and reports count without torch. Lengths are int arrays ``[B]``, one entry a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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


# -- of a training step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A layer run alone on one device, forward and backward, without recompute or communication."""

    name: str
    flops: float  # useful, forward and backward
    seconds: float

    def mfu(self, peak: float) -> float:
        """Share of ``peak`` FLOP/s."""
        return mfu(self.flops, self.seconds, peak)


@dataclass(frozen=True)
class Slice:
    """A piece of the step time in a waterfall."""

    part: str
    ms: float
    of: str  # "model", "optimizer", "input", "communication", "skew", "recompute" or "rest"


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Useful FLOPs over what the device could have done at ``peak`` FLOP/s in that time."""
    if not (seconds > 0 and peak > 0):
        raise ValueError(f"mfu: {seconds} s at a peak of {peak} FLOP/s; accepted: both above 0")
    return flops / (seconds * peak)


def local_mfu(parts: Sequence[Part], peak: float) -> float:
    """The layers' MFU, each weighted by its share of the FLOPs of a step."""
    total = sum(part.flops for part in parts)
    if not total > 0:
        raise ValueError("local_mfu: no part has FLOPs; accepted: at least one that has")
    return sum(part.flops / total * part.mfu(peak) for part in parts if part.flops > 0)


def waterfall(
    parts: Sequence[Part],
    *,
    step_s: float,
    wait_s: float,
    compute_s: float,
    optimizer_s: float,
    communication_s: float = 0.0,
    skew_s: float = 0.0,
    recompute_s: float = 0.0,
) -> list[Slice]:
    """Where the time of a step goes; the slices add up to it.

    step_s           of a whole step, from batch to batch
    wait_s           for the input
    compute_s        forward and backward of this rank without communication, lookups and losses with it
    optimizer_s      clipping, dense and sparse updates
    communication_s  that nothing hid; skew_s: by which the slowest rank was above the mean
    The parts are timed alone: what they leave of compute_s, or take beyond it, is the slice "lookups, loss, between".
    """
    slices = [Slice("input wait", wait_s * 1e3, "input")]
    slices += [Slice(part.name, part.seconds * 1e3, "model") for part in parts]
    alone = sum(part.seconds for part in parts)
    slices += [
        Slice("lookups, loss, between", (compute_s - alone - recompute_s) * 1e3, "rest"),
        Slice("recompute", recompute_s * 1e3, "recompute"),
        Slice("optimizer", optimizer_s * 1e3, "optimizer"),
        Slice("exposed communication", communication_s * 1e3, "communication"),
        Slice("skew", skew_s * 1e3, "skew"),
    ]
    told = sum(one.ms for one in slices)
    return [*slices, Slice("rest", step_s * 1e3 - told, "rest")]
