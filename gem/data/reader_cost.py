"""What a sample costs the step, by the lengths of its histories; and the weights by which a dataset is cut evenly.

Legend: B samples, N samples of a dataset.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gem.data.samples import Samples
from gem.errors import RequestError

_FLOOR = 1 / 32  # of the mean sample: so that no batch holds more than 32 times the usual number of samples
_SHARE = 1 / 2  # of a batch: what one sample may weigh, so that no batch is left without samples


@dataclass(frozen=True)
class Cost:
    """``samples`` + for each sequence ``tokens`` · length + ``pairs`` · length². Any unit; one of them above 0.

    Time of a step is a fair unit: embeddings and experts cost by the sample, projections by the token, full
    self-attention by the pair.
    """

    tokens: float = 0.0
    pairs: float = 0.0
    samples: float = 0.0

    def __post_init__(self) -> None:
        each = (self.tokens, self.pairs, self.samples)
        if not all(0 <= x < float("inf") for x in each) or not any(each):
            raise RequestError(f"cost {self}: accepted: finite numbers >= 0, one of them above 0")

    def __call__(self, lengths: Mapping[str, np.ndarray], count: int) -> np.ndarray:
        """float64 [B] of ``count`` samples, whose events of each sequence ``lengths`` holds, int [B] each."""
        cost_B = np.full(count, self.samples)
        for length in lengths.values():
            x = np.asarray(length, dtype=np.float64)
            cost_B += self.tokens * x + self.pairs * x * x
        return cost_B


COSTS = {"tokens": Cost(tokens=1.0), "pairs": Cost(pairs=1.0)}


def as_cost(cost: Cost | str) -> Cost:
    """A cost by name, or itself."""
    if isinstance(cost, Cost):
        return cost
    if cost not in COSTS:
        raise RequestError(f"cost {cost!r}; accepted: {', '.join(COSTS)}, or a Cost")
    return COSTS[cost]


def lengths_of(samples: Samples) -> dict[str, np.ndarray]:
    """By sequence, int64 [B]."""
    return {name: events.lengths.numpy() for name, events in samples.sequences.items()}


def bounds(cost_N: np.ndarray, batch: int, held: float | None = None) -> tuple[float, float]:
    """(least, most) that a sample should weigh when a dataset is cut by cost into batches of ``batch`` on average.

    held    what batches hold on average where it is less, 1 or more; from 2 down all samples come to weigh the same

    Within them any stretch that weighs as much as a batch holds one sample or more, and not too many. Few samples are
    outside: empty histories, and those half as heavy as a batch.
    """
    if batch < 4:
        raise RequestError(f"batches of {batch} samples cut by cost; accepted: 4 or more")
    held = batch if held is None else min(held, batch)
    mean = float(np.mean(cost_N)) if len(cost_N) else 0.0
    if mean <= 0:
        return 1.0, 1.0  # nothing costs anything: all weigh the same
    least, most = mean * _FLOOR, mean * held
    for _ in range(64):  # the mean falls with what is cut off; each turn comes closer to where both agree
        most = max(least, _SHARE * held * float(np.clip(cost_N, least, most).mean()))
    return least, most
