"""Samples picked by their rows out of several parts, without joining the parts where samples are long.

Legend: N rows of all parts, B rows picked, T events picked, P stretches of neighbouring events.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gem.data.samples import Events, Samples

_LONG = (
    48  # events of a stretch on average, from which on each is copied as a whole: shorter ones are gathered by event
)


def select(samples: Samples, row_B: np.ndarray) -> Samples:
    """Those samples, in that order, in memory of their own. ``row_B``: int64, each 0 … N - 1."""
    return Picker([samples]).pick(row_B)


class Picker:
    """Rows of several parts, numbered through."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        """One part or more."""
        first = parts[0]
        self._keys = _join([part.keys for part in parts])
        self._ids = {name: _join([part.ids[name] for part in parts]) for name in first.ids}
        self._floats = _join([part.floats for part in parts])
        self._labels = {name: _join([part.labels[name] for part in parts]) for name in first.labels}
        self._sequences = {name: _Sequence([part.sequences[name] for part in parts]) for name in first.sequences}

    def pick(self, row_B: np.ndarray) -> Samples:
        """Those samples, in that order, in memory of their own."""
        row = torch.from_numpy(row_B)
        return Samples(
            self._keys[row],
            {name: x[row] for name, x in self._ids.items()},
            self._floats[row],
            {name: one.pick(row_B) for name, one in self._sequences.items()},
            {name: x[row] for name, x in self._labels.items()},
        )


class _Sequence:
    """The events of all parts, numbered through."""

    def __init__(self, parts: list[Events]) -> None:
        offsets = [part.offsets.numpy() for part in parts]
        self._before = np.concatenate([[0], np.cumsum([each[-1] for each in offsets])])  # each part's first event
        numbered = list(zip(offsets, self._before.tolist(), strict=False))
        self._start_N = np.concatenate([each[:-1] + before for each, before in numbered])
        self._stop_N = np.concatenate([each[1:] + before for each, before in numbered])
        self._part_N = np.repeat(np.arange(len(parts)), [len(each) - 1 for each in offsets])
        self._ids = {name: _Column([part.ids[name] for part in parts]) for name in parts[0].ids}
        self._times = None if parts[0].times is None else _Column([p.times for p in parts if p.times is not None])

    def pick(self, row_B: np.ndarray) -> Events:
        start_B, stop_B = self._start_N[row_B], self._stop_N[row_B]
        length_B = stop_B - start_B
        offsets = np.zeros(len(row_B) + 1, dtype=np.int64)
        np.cumsum(length_B, out=offsets[1:])
        total = int(offsets[-1])
        # Stretches: the events of neighbouring rows of one part.
        filled = np.flatnonzero(length_B)
        start_P, stop_P, part_P = start_B[filled], stop_B[filled], self._part_N[row_B[filled]]
        breaks = np.flatnonzero((start_P[1:] != stop_P[:-1]) | (part_P[1:] != part_P[:-1]))
        if total and total >= _LONG * (len(breaks) + 1):
            first, last = np.append(0, breaks + 1), np.append(breaks, len(filled) - 1)
            part = part_P[first]
            before = self._before[part]
            stretches = zip(
                part.tolist(), (start_P[first] - before).tolist(), (stop_P[last] - before).tolist(), strict=True
            )
            return self._events(offsets, _Column.copy, list(stretches))
        at_T = np.repeat(start_B - offsets[:-1], length_B) + np.arange(total)
        return self._events(offsets, _Column.gather, torch.from_numpy(at_T))

    def _events(self, offsets: np.ndarray, pick: "Callable[[_Column, Any], Tensor]", what: Any) -> Events:
        return Events(
            torch.from_numpy(offsets),
            {name: pick(column, what) for name, column in self._ids.items()},
            None if self._times is None else pick(self._times, what),
        )


class _Column:
    """One value of each event, in parts; joined when it is first gathered from."""

    def __init__(self, parts: list[Tensor]) -> None:
        self._parts = parts
        self._whole: Tensor | None = None

    def gather(self, at_T: Tensor) -> Tensor:
        if self._whole is None:
            self._whole = _join(self._parts)
        return self._whole.index_select(0, at_T)

    def copy(self, stretches: list[tuple[int, int, int]]) -> Tensor:
        """Of each (part, start, stop) the values, one behind the other."""
        parts = [part.numpy() for part in self._parts]
        return torch.from_numpy(np.concatenate([parts[p][a:b] for p, a, b in stretches]))


def _join(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
