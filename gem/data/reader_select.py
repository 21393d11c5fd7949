"""Samples picked by their rows: copies of runs where rows are neighbours, else a gather.

Legend: B rows picked, T their events, N samples picked from.
"""

import numpy as np
import torch
from torch import Tensor

from gem.data.samples import Events, Samples, merge

_RUN = 16  # rows of a run on average, from which on runs are copied as a whole
_LONG = 48  # events of a sample on average, from which on each is copied as a whole


def select(samples: Samples, row_B: np.ndarray) -> Samples:
    """Those samples, in that order, in memory of their own. ``row_B``: int64, each 0 … N - 1."""
    breaks = np.flatnonzero(np.diff(row_B) != 1) + 1
    if len(row_B) and len(row_B) >= _RUN * (len(breaks) + 1):
        edges = [0, *breaks.tolist(), len(row_B)]
        first = row_B[edges[:-1]].tolist()
        runs = [samples.take(a, a + e - s) for a, s, e in zip(first, edges[:-1], edges[1:], strict=True)]
        return merge(runs) if len(runs) > 1 else runs[0].apply(torch.clone)
    row = torch.from_numpy(row_B)
    return Samples(
        samples.keys[row],
        {name: x[row] for name, x in samples.ids.items()},
        samples.floats[row],
        {name: _events(e, row_B) for name, e in samples.sequences.items()},
        {name: x[row] for name, x in samples.labels.items()},
    )


def _events(events: Events, row_B: np.ndarray) -> Events:
    offset_N = events.offsets.numpy()
    start_B, stop_B = offset_N[row_B], offset_N[row_B + 1]
    length_B = stop_B - start_B
    offsets = np.zeros(len(row_B) + 1, dtype=np.int64)
    np.cumsum(length_B, out=offsets[1:])
    total = int(offsets[-1])
    if total >= _LONG * len(row_B):
        bounds = list(zip(start_B.tolist(), stop_B.tolist(), strict=True))

        def pick(x: Tensor) -> Tensor:
            x_N = x.numpy()
            return torch.from_numpy(np.concatenate([x_N[a:b] for a, b in bounds] or [x_N[:0]]))
    else:
        at_T = torch.from_numpy(np.repeat(start_B - offsets[:-1], length_B) + np.arange(total))

        def pick(x: Tensor) -> Tensor:
            return x.index_select(0, at_T)

    return Events(
        torch.from_numpy(offsets),
        {name: pick(x) for name, x in events.ids.items()},
        None if events.times is None else pick(events.times),
    )
