"""Training samples in columns: what readers emit, batches are merged of, and the model takes.

Legend: B samples, T events of all samples of a sequence, F float features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Events:
    """One sequence of a batch, jagged: sample b has the events offsets[b] … offsets[b + 1] - 1, oldest first."""

    offsets: Tensor  # int64 [B + 1], from 0, non-decreasing; the last is T
    ids: dict[str, Tensor]  # by feature, int64 [T]
    times: Tensor | None = None  # int64 [T], seconds; None where the schema has none

    @property
    def lengths(self) -> Tensor:
        """int64 [B]."""
        return self.offsets.diff()


@dataclass(frozen=True, eq=False)
class Samples:
    """A base batch or a training batch."""

    keys: Tensor  # int64 [B]: which sample of the dataset each is
    ids: dict[str, Tensor]  # by feature, int64 [B]
    floats: Tensor  # fp32 [B, F]
    sequences: dict[str, Events]
    labels: dict[str, Tensor]  # by task, fp32 [B]: 0, 1, or NaN where not defined

    def __len__(self) -> int:
        return self.keys.shape[0]

    def apply(self, change: Callable[[Tensor], Tensor]) -> "Samples":
        """The same with every tensor changed."""
        sequences = {
            name: Events(
                change(e.offsets),
                {feature: change(x) for feature, x in e.ids.items()},
                None if e.times is None else change(e.times),
            )
            for name, e in self.sequences.items()
        }
        return Samples(
            change(self.keys), {n: change(x) for n, x in self.ids.items()}, change(self.floats), sequences,
            {n: change(x) for n, x in self.labels.items()},
        )  # fmt: skip

    def to(self, device: torch.device | str) -> "Samples":
        """On another device; from pinned memory without waiting."""
        return self.apply(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> "Samples":
        """In page-locked memory. DataLoader calls it by this name."""
        return self.apply(lambda x: x.pin_memory())

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        total = 0

        def count(x: Tensor) -> Tensor:
            nonlocal total
            total += x.nbytes
            return x

        self.apply(count)
        return total

    def take(self, start: int, stop: int) -> "Samples":
        """Samples start … stop - 1, as views but for the offsets."""
        sequences = {}
        for name, e in self.sequences.items():
            low, high = (int(e.offsets[i]) for i in (start, stop))
            sequences[name] = Events(
                e.offsets[start : stop + 1] - low,
                {feature: x[low:high] for feature, x in e.ids.items()},
                None if e.times is None else e.times[low:high],
            )
        return Samples(
            self.keys[start:stop], {n: x[start:stop] for n, x in self.ids.items()}, self.floats[start:stop], sequences,
            {n: x[start:stop] for n, x in self.labels.items()},
        )  # fmt: skip

    def split(self, pieces: int) -> list["Samples"]:
        """As many pieces of about as many samples, in order; fewer, of one each, where there are no more samples."""
        count = max(1, min(pieces, len(self)))
        ends = [len(self) * i // count for i in range(count + 1)]
        return [self.take(*pair) for pair in pairwise(ends)] if count > 1 else [self]


def merge(parts: Sequence[Samples]) -> Samples:
    """One batch of several, in their order."""
    if not parts:
        raise ValueError("nothing to merge; accepted: one batch or more")
    first = parts[0]
    if len(parts) == 1:
        return first
    sequences = {}
    for name, e in first.sequences.items():
        events = [part.sequences[name] for part in parts]
        sequences[name] = Events(
            _joined_offsets([one.offsets for one in events]),
            {feature: torch.cat([one.ids[feature] for one in events]) for feature in e.ids},
            None if e.times is None else torch.cat([one.times for one in events if one.times is not None]),
        )
    return Samples(
        torch.cat([part.keys for part in parts]),
        {name: torch.cat([part.ids[name] for part in parts]) for name in first.ids},
        torch.cat([part.floats for part in parts]),
        sequences,
        {name: torch.cat([part.labels[name] for part in parts]) for name in first.labels},
    )


def _joined_offsets(offsets: list[Tensor]) -> Tensor:
    pieces, total = [offsets[0]], int(offsets[0][-1])
    for one in offsets[1:]:
        pieces.append(one[1:] + total)
        total += int(one[-1])
    return torch.cat(pieces)
