"""The past of each interaction: the strictly earlier events of its user, or of its item, as ranges of a sorted log.

Legend: n interactions in order of time, B of them in a batch, T events in their pasts.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Past:
    """Interaction e has the past order[begin[e]] … order[end[e] - 1], oldest first.

    order     int64 [n]: interactions by owner (user or item), within an owner by time
    begin     int64 [n]
    end       int64 [n]: before the first event of the owner at the very time of e, so that ties are no past
    earlier   int64 [n]: events of the past before the cut
    tied      int: other events of an owner at the same time as one of its events, summed over events
    """

    order: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    earlier: np.ndarray
    tied: int

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: events after the cut."""
        return self.end - self.begin

    def gather(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(offsets int64 [B + 1], places in `order` int64 [T]) of the interactions start … stop - 1."""
        begin, lengths = self.begin[start:stop], self.end[start:stop] - self.begin[start:stop]
        offsets = np.zeros(stop - start + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return offsets, np.repeat(begin - offsets[:-1], lengths) + np.arange(offsets[-1])

    def last(self) -> np.ndarray:
        """int64 [n]: the latest interaction of each past; -1 where it is empty."""
        found = self.order[np.maximum(self.end - 1, 0)] if len(self.order) else self.order
        return np.where(self.end > self.begin, found, -1)


def find_past(owner: np.ndarray, times: np.ndarray, longest: int) -> Past:
    """The pasts of all interactions; `owner` int64 [n], `times` int64 [n] not falling."""
    n = len(owner)
    order = np.argsort(owner, kind="stable")
    owners, when = owner[order], times[order]
    places = np.arange(n)
    new_owner = np.ones(n, dtype=bool)
    new_owner[1:] = owners[1:] != owners[:-1]
    new_time = new_owner.copy()
    new_time[1:] |= when[1:] != when[:-1]
    first = np.maximum.accumulate(np.where(new_owner, places, 0))  # of the owner
    end = np.maximum.accumulate(np.where(new_time, places, 0))  # first of the owner at this time
    sizes = np.diff(np.flatnonzero(np.append(new_time, True)))  # of each group of ties
    begin = np.maximum(first, end - longest)

    def by_interaction(sorted_: np.ndarray) -> np.ndarray:
        values = np.empty(n, dtype=np.int64)
        values[order] = sorted_
        return values

    tied = int((sizes * (sizes - 1)).sum())
    return Past(order, by_interaction(begin), by_interaction(end), by_interaction(end - first), tied)
