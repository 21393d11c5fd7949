"""Which part of a dataset makes up each pool of each rank and epoch: a pure function of the seed, known beforehand.

The chunks of an epoch, in the order that the seed gives them, are laid end to end on a line of whole numbers, each as
long as its weight, and the line is cut into ranks × steps equal batches; a pool is a few neighbouring ones. Where every
sample weighs 1, all batches have the same size. Where a sample weighs what it costs, all batches of all ranks cost
alike, however the lengths are correlated, and nothing is sent between ranks.

Legend: C chunks, B samples of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gem.errors import RequestError

Shuffle = Literal["samples", "chunks", "none"]
UNIT = 2**20  # weight of the mean sample where samples weigh what they cost

_CHUNKS, _SAMPLES, _POOL = range(3)  # what a stream of random numbers is for


@dataclass(frozen=True)
class Piece:
    """The samples of a chunk that stand at low … high - 1 of its weight."""

    chunk: int
    low: int
    high: int
    weight: int  # of the whole chunk

    def range(self, weight_B: np.ndarray | None, count: int) -> tuple[int, int]:
        """(start, stop) among the chunk's ``count`` samples in the epoch's order; weights None: all the same.

        A sample belongs where it starts. Pieces that share an edge share no sample and leave none out.
        """
        if self.low <= 0 and self.high >= self.weight:
            return 0, count
        if weight_B is None:
            at_B = np.arange(count, dtype=np.float64) * (self.weight / max(count, 1))
        else:
            end_B = np.cumsum(weight_B)
            at_B = (end_B - weight_B) * (self.weight / end_B[-1])
        at_B = np.minimum(np.rint(at_B).astype(np.int64), self.weight - 1)
        start, stop = np.searchsorted(at_B, [self.low, self.high])
        return int(start), int(stop)


@dataclass(frozen=True, eq=False)
class Plan:
    """The line and its cuts. ``batch``: samples of a batch, where they weigh 1; else what they are on average."""

    weight_C: np.ndarray  # int64
    batch: int
    per_pool: int  # batches
    steps: int  # batches of each rank in an epoch
    rank: int
    ranks: int
    seed: int
    shuffle: Shuffle
    even: bool  # whether the whole line is cut evenly, or in batches of ``batch`` with the rest dropped
    _line: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)  # of the last epoch asked

    @property
    def pools(self) -> int:
        """Of a rank in an epoch; the last may have fewer batches."""
        return -(-self.steps // self.per_pool)

    def batches(self, pool: int) -> int:
        """Of that pool."""
        return min(self.per_pool, self.steps - pool * self.per_pool)

    def order(self, epoch: int) -> np.ndarray:
        """int [C]: the chunks, in the epoch's order."""
        count = len(self.weight_C)
        return np.arange(count) if self.shuffle == "none" else self._random(epoch, _CHUNKS).permutation(count)

    def rows(self, epoch: int, chunk: int, count: int) -> np.ndarray:
        """int64 [B]: the samples of a chunk, in the epoch's order."""
        if self.shuffle != "samples":
            return np.arange(count, dtype=np.int64)
        return self._random(epoch, _SAMPLES, chunk).permutation(count)

    def generator(self, epoch: int, pool: int) -> np.random.Generator:
        """For the choices within a pool."""
        return self._random(epoch, _POOL, self.rank, pool)

    def pieces(self, epoch: int, pool: int) -> Iterator[Piece]:
        """What the pool consists of, in order."""
        first = self.rank * self.steps + pool * self.per_pool
        low, high = self._edge(first), self._edge(first + self.batches(pool))
        order, end_C = self._laid_out(epoch)
        for i in range(int(np.searchsorted(end_C, low, side="right")), len(order)):
            weight = int(self.weight_C[order[i]])
            start = int(end_C[i]) - weight
            if start >= high:
                break
            if weight:
                yield Piece(int(order[i]), max(low - start, 0), min(high - start, weight), weight)

    def _laid_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Chunks in order, and where each ends."""
        if epoch not in self._line:
            order = self.order(epoch)
            self._line.clear()
            self._line[epoch] = order, np.cumsum(self.weight_C[order])
        return self._line[epoch]

    def _edge(self, batch: int) -> int:
        """Where batch number ``batch`` of all ranks' begins."""
        if not self.even:
            return batch * self.batch
        return int(self.weight_C.sum()) * batch // (self.steps * self.ranks)

    def _random(self, *words: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *words])


def steps_of(samples: int, batch: int, ranks: int, drop_last: bool) -> int:
    """Batches that each rank gets in an epoch; RequestError where there are too few samples for one."""
    steps = samples // (batch * ranks) if drop_last else -(-samples // (batch * ranks))
    if steps < 1 or samples < steps * ranks:
        wanted = batch * ranks if drop_last else ranks
        raise RequestError(
            f"{samples} samples in batches of {batch} on {ranks} ranks; accepted: {wanted} samples or more"
        )
    return steps
