"""Lengths of a jagged batch: what every fixture and every interaction log is turned into.

B samples; each has q[b] query rows and k[b] key rows. Three patterns of GEM's attention layers:
self (keys = queries), cross (a history of queries against short keys), pma (the same few queries for all samples).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gem.errors import RequestError

Pattern = Literal["self", "cross", "pma"]
PATTERNS: tuple[str, ...] = ("self", "cross", "pma")


def as_lengths(values: Any, what: str) -> np.ndarray:
    """A read-only int64 [B] copy of `values`; RequestError naming `what` when they are not lengths."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise RequestError(f"{what}: shape {array.shape}; accepted: one dimension [batch]")
    if array.size == 0:
        array = array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise RequestError(f"{what}: dtype {array.dtype}; accepted: integers")
    array = array.astype(np.int64)
    if array.size and array.min() < 0:
        at = int(np.argmin(array >= 0))
        raise RequestError(f"{what}: {array[at]} at sample {at}; accepted: 0 or more")
    array.setflags(write=False)
    return array


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """int64 [B + 1]: where each sample starts, beginning with 0 and ending with the total."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def describe_lengths(lengths: np.ndarray) -> dict[str, Any]:
    """Total, mean, percentiles, max (in rows) and a histogram in powers of two, as plain JSON values.

    A percentile is a length that occurs: the smallest that at least so many per cent of the samples do not exceed.
    `histogram` = {edges, counts}: counts[i] samples have edges[i] <= length < edges[i + 1]; edges 0, 1, 2, 4, 8, ...
    """
    if not lengths.size:
        return dict(total=0, mean=0.0, p50=0, p90=0, p99=0, max=0, histogram={"edges": [0, 1], "counts": [0]})
    p50, p90, p99 = (int(x) for x in np.percentile(lengths, [50, 90, 99], method="inverted_cdf"))
    longest = int(lengths.max())
    edges = [0, *(1 << i for i in range(longest.bit_length() + 1))]
    counts, _ = np.histogram(lengths, bins=np.array(edges, dtype=np.int64))
    return dict(total=int(lengths.sum()), mean=float(lengths.mean()), p50=p50, p90=p90, p99=p99, max=longest,
                histogram={"edges": edges, "counts": counts.tolist()})  # fmt: skip


def choose(total: int, batch: int, seed: int = 0) -> np.ndarray:
    """Indices [batch], ascending, of `batch` samples out of `total`: the first ones of a seeded permutation.

    RandomState and not default_rng: numpy freezes the streams of the former, so a choice is the same in every release.
    """
    return np.sort(np.random.RandomState(seed).permutation(total)[:batch])


def check_batch(batch: int | None, where: str) -> None:
    """RequestError unless `batch` is None or a whole number, 0 or more."""
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 0):
        raise RequestError(f"{where}: batch {batch!r}; accepted: a whole number, 0 or more")


@dataclass(frozen=True, eq=False)
class Lengths:
    """Row counts of one jagged batch.

    q, k        int64 [B], read-only: query and key rows of each sample
    queries     pma only: rows of the one query block that all samples share; then q is `queries` everywhere
    tail_q/_k   rows behind the last offset, to be read as absent
    source      one line: where the lengths are from and how they were drawn
    """

    name: str
    q: np.ndarray
    k: np.ndarray
    pattern: Pattern
    queries: int | None = None
    tail_q: int = 0
    tail_k: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "q", as_lengths(self.q, f"{self.name}: q"))
        object.__setattr__(self, "k", as_lengths(self.k, f"{self.name}: k"))
        if self.pattern not in PATTERNS:
            raise RequestError(f"{self.name}: pattern {self.pattern!r}; accepted: {', '.join(PATTERNS)}")
        if len(self.q) != len(self.k):
            raise RequestError(f"{self.name}: {len(self.q)} q lengths and {len(self.k)} k lengths; accepted: as many")
        if self.pattern == "self" and not np.array_equal(self.q, self.k):
            raise RequestError(f"{self.name}: q and k differ; accepted for pattern self: the same lengths")
        if self.pattern == "pma" and (self.queries is None or bool((self.q != self.queries).any())):
            raise RequestError(f"{self.name}: queries {self.queries}; accepted for pattern pma: q = queries everywhere")
        if self.pattern != "pma" and self.queries is not None:
            raise RequestError(f"{self.name}: queries {self.queries}; accepted only for pattern pma")
        if self.tail_q < 0 or self.tail_k < 0:
            raise RequestError(f"{self.name}: tail_q {self.tail_q}, tail_k {self.tail_k}; accepted: 0 or more")

    @property
    def batch(self) -> int:
        """B, the number of samples."""
        return len(self.q)

    @property
    def tokens_q(self) -> int:
        """Query rows inside the offsets (without the tail)."""
        return int(self.q.sum())

    @property
    def tokens_k(self) -> int:
        """Key rows inside the offsets (without the tail)."""
        return int(self.k.sum())

    @property
    def max_q(self) -> int:
        """Longest sample on the query side, 0 for an empty batch."""
        return int(self.q.max(initial=0))

    @property
    def max_k(self) -> int:
        """Longest sample on the key side, 0 for an empty batch."""
        return int(self.k.max(initial=0))

    @property
    def history(self) -> np.ndarray:
        """The long, user-dependent side [B]: k for pma, q for self and cross."""
        return self.k if self.pattern == "pma" else self.q

    @property
    def sparsity(self) -> float:
        """Filled share of the padded history: mean / max (1.0 = nothing to pad), 0.0 where there are no rows.

        The word is used as the public GDPA benchmark uses it, see distributions.Sparsity.
        """
        longest = int(self.history.max(initial=0))
        return float(self.history.mean()) / longest if longest else 0.0

    def offsets_q(self) -> np.ndarray:
        """int64 [B + 1] row offsets of the query side. The tail lies behind the last one."""
        return offsets_of(self.q)

    def offsets_k(self) -> np.ndarray:
        """int64 [B + 1] row offsets of the key side. The tail lies behind the last one."""
        return offsets_of(self.k)

    def stats(self) -> dict[str, Any]:
        """Plain JSON values for a results document; sides `q` and `k` as in describe_lengths."""
        return dict(name=self.name, pattern=self.pattern, source=self.source, batch=self.batch, queries=self.queries,
                    tail_q=self.tail_q, tail_k=self.tail_k, sparsity=self.sparsity,
                    q=describe_lengths(self.q), k=describe_lengths(self.k))  # fmt: skip

    def take(self, samples: Iterable[int] | np.ndarray, note: str) -> "Lengths":
        """The samples with these indices, in this order; `note` is added to the source line."""
        index = np.asarray(samples, dtype=np.int64)
        return replace(self, q=self.q[index], k=self.k[index], source=f"{self.source}; {note}")
