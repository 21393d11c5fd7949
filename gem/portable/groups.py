"""Group the samples of a jagged batch by length, so that each group is one dense batch with little padding.

A group of one long sample runs on views, query tile by query tile, with the key range that causal and window leave.
Short samples share a group: their rows are gathered to the longest of the *group*, and its padded pairs are bounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Padded pairs that a group may add: a share of its real pairs, plus about what one more group would cost. A group costs
# some thirty ATen calls, over 100 us: at 150 GFLOP/s 20 MFLOP, or 20,000 pairs of 4 heads of 64 forward.
PADDING_SHARE = 0.08
PADDING_PAIRS = 20_000


@dataclass(frozen=True)
class Group:
    """Samples ``[g]`` that run as one dense batch, padded to ``q_len`` queries and ``k_len`` keys."""

    samples: Ints
    q_len: int
    k_len: int
    uniform: bool


def group_samples(q_lens: Ints, k_lens: Ints, max_pairs: int) -> list[Group]:
    """Cut a batch into groups of similar lengths; samples without queries or without keys are in none.

    ``max_pairs`` bounds the padded pairs of a group of several samples (the score tile has to stay in cache); a sample
    above it stands alone.
    """
    alive = np.flatnonzero((q_lens > 0) & (k_lens > 0))
    if alive.size == 0:
        return []
    # Quarter-octave key buckets, then by queries: neighbours in this order pad each other least.
    bucket = np.floor(4 * np.log2(k_lens[alive])).astype(np.int64)
    order = alive[np.lexsort((k_lens[alive], q_lens[alive], bucket))]
    q_sorted, k_sorted = q_lens[order].tolist(), k_lens[order].tolist()

    cuts, start = [], 0
    q_max, k_max, real = 0, 0, 0
    for i, (q_len, k_len) in enumerate(zip(q_sorted, k_sorted, strict=True)):
        new_q, new_k = max(q_max, q_len), max(k_max, k_len)
        new_real = real + q_len * k_len
        padded = (i - start + 1) * new_q * new_k
        if i > start and (padded > max_pairs or padded - new_real > PADDING_SHARE * new_real + PADDING_PAIRS):
            cuts.append((start, i, q_max, k_max))
            start, new_q, new_k, new_real = i, q_len, k_len, q_len * k_len
        q_max, k_max, real = new_q, new_k, new_real
    cuts.append((start, len(q_sorted), q_max, k_max))

    groups = []
    for first, last, q_len, k_len in cuts:
        samples = order[first:last]
        uniform = bool((q_lens[samples] == q_len).all() and (k_lens[samples] == k_len).all())
        groups.append(Group(samples, q_len, k_len, uniform))
    return groups


@dataclass(frozen=True)
class QueryTile:
    """Query rows [q0, q1) of a lone sample and the key rows [k0, k1) that any of them sees."""

    q0: int
    q1: int
    k0: int
    k1: int
    crossed: bool  # an edge of the mask runs through the tile


def query_tiles(q_len: int, k_len: int, left: int, right: int, rows: int) -> Iterator[QueryTile]:
    """Cut a lone sample's queries into tiles of ``rows``; queries that see no key are in none.

    ``left`` / ``right``: reach of a query around its own key position ``i + k_len - q_len``; -1 = unlimited.
    """
    shift = k_len - q_len
    # Bottom-right alignment: only the first queries of a sample with fewer keys than queries can see nothing.
    first = max(0, -shift - right) if right >= 0 else 0
    for q0 in range(first, q_len, rows):
        q1 = min(q0 + rows, q_len)
        k0 = max(0, q0 + shift - left) if left >= 0 else 0
        k1 = min(k_len, q1 + shift + right) if right >= 0 else k_len
        crossed = (left >= 0 and q1 - 1 + shift - left > k0) or (right >= 0 and q0 + shift + right + 1 < k1)
        yield QueryTile(q0, q1, k0, k1, crossed)
