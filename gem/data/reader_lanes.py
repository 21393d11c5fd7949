"""Batches of a run that goes on with another number of ranks than it began with: the same samples in the same steps.

A reader deals an epoch to the ranks there are, for good: what each of them has seen by some step is no prefix of what
another number of ranks would have. So a run keeps as many *lanes* as it began with ranks, each a reader of its own.
Rank r of R takes what lies in [r/R, (r+1)/R) of the lanes side by side: whole lanes, or the middle of a lane's batches
where there are more ranks than lanes. A step's samples are the same ones, in whatever hands.

A lane that several ranks share is read by each of them: twice the ranks cost twice the reading in all, as much a rank.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from gem.data.readers import Batches, Reader
from gem.data.samples import Samples, merge
from gem.errors import RequestError

Share = tuple[int, Fraction, Fraction]  # lane, from where to where of each of its batches


def shares(lanes: int, rank: int, ranks: int) -> list[Share]:
    """What a rank takes, in order. Over all ranks each lane is taken once, and ranks get equal shares."""
    low, high = Fraction(rank * lanes, ranks), Fraction((rank + 1) * lanes, ranks)
    touched = range(low.numerator // low.denominator, -(-high.numerator // high.denominator))
    return [(lane, max(low - lane, Fraction(0)), min(high - lane, Fraction(1))) for lane in touched]


def cut(batch: Samples, low: Fraction, high: Fraction) -> Samples:
    """That share of a batch, perhaps none of it; neighbouring shares leave no sample out and have none in common."""
    if (low, high) == (0, 1):
        return batch
    return batch.take(int(len(batch) * low), int(len(batch) * high))


class Lanes:
    """A rank's batches. ``reader``: of any lane, its ``ranks`` are how many lanes there are. Else as Batches."""

    def __init__(
        self, reader: Reader, rank: int, ranks: int, *, workers: int = 0, prefetch: int = 2, pin_memory: bool = False
    ) -> None:
        if not 0 <= rank < ranks:
            raise RequestError(f"rank {rank} of {ranks}; accepted: 0 to ranks - 1")
        self.lanes = reader.plan.ranks
        self.shares = shares(self.lanes, rank, ranks)
        # Workers are dealt to the lanes, one at least where there are any; the order does not depend on them.
        own = max(1, workers // len(self.shares)) if workers else 0
        self._whole = len(self.shares) == 1 and self.shares[0][1:] == (0, 1)
        self._pin = pin_memory and not self._whole
        self._batches = [
            Batches(reader.of_rank(lane), workers=own, prefetch=prefetch, pin_memory=pin_memory and self._whole)
            for lane, _, _ in self.shares
        ]

    @property
    def delivered(self) -> int:
        """Batches, through all epochs."""
        return self._batches[0].delivered

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is, the same on every rank; plain numbers and strings."""
        state = self._batches[0].state_dict()
        return state | {"reader": _of_all(state["reader"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there, whichever rank has saved it. RequestError where the state is another reader's."""
        theirs = state.get("reader")
        for batches in self._batches:
            rank = {"rank": batches.reader.plan.rank}
            batches.load_state_dict({**state, "reader": {**_of_all(theirs), **rank}} if theirs is not None else state)

    def __iter__(self) -> Iterator[Samples]:
        streams = [iter(batches) for batches in self._batches]
        while True:
            parts = []
            for stream, (_, low, high) in zip(streams, self.shares, strict=True):
                try:
                    parts.append(cut(next(stream), low, high))
                except StopIteration:  # all lanes have as many
                    return
            found = merge(parts)
            yield found.pin_memory() if self._pin else found


def _of_all(reader: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in dict(reader).items() if name != "rank"}
