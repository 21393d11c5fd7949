"""How fast a reader merges samples that are in memory, on one core.

Legend of suffixes: E epochs.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from gem.data.reader_source import MemorySource
from gem.data.readers import Batches, Reader
from gem.data.samples import Events, Samples
from gem.data.schema import Schema
from gem.data.shuffling import ReaderStrategy

_SCHEMA = Schema.model_validate({
    "tables": [{"name": "rows", "rows": 2**20}],
    "ids": [{"name": name, "table": "rows"} for name in ("user", "item", "place")],
    "floats": ["a", "b", "c", "d"],
    "sequences": [{
        "name": "history", "features": [{"name": name, "table": "rows"} for name in ("item", "action")],
        "longest": 16384, "timed": True,
    }],
    "tasks": [{"name": "ctr"}, {"name": "cvr", "given": "ctr"}],
})  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """By a second of the core's own time, so that other work on it does not count: medians over the epochs.

    `epochs`: samples of each epoch, in their order.
    """

    samples: float
    bytes: float
    epochs: tuple[float, ...]


def merge_speed(
    median: float, strategy: ReaderStrategy, *, samples: int | None = None, batch: int = 1024, pool: int = 64,
    repeats: int = 9, seed: int = 0,
) -> Speed:  # fmt: skip
    """Epochs through a reader on one thread: lognormal lengths, three ids, four floats, two features and times.

    ``samples``: as many as have about 2**23 events, if not given.
    """
    count = samples or max(batch * 16, int(2**23 / (median * 1.65)) // batch * batch)
    source = MemorySource(_SCHEMA, _draw(median, count, seed), 2048)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates: list[tuple[float, float]] = []
        for epoch in range(repeats):
            reader = Reader(source, batch=batch, pool=pool, strategy=strategy, seed=seed + epoch)
            seen = size = 0
            began = time.process_time()
            for found in Batches(reader):
                seen, size = seen + len(found), size + found.nbytes()
            took = time.process_time() - began
            rates.append((seen / took, size / took))
        samples_E, bytes_E = zip(*rates, strict=True)
        return Speed(statistics.median(samples_E), statistics.median(bytes_E), samples_E)
    finally:
        torch.set_num_threads(threads)


def _draw(median: float, count: int, seed: int) -> Samples:
    draw = np.random.default_rng(seed)
    length = np.exp(draw.normal(np.log(median), 1.0, count)).clip(0, 16384).astype(np.int64)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(length)]))
    events = torch.from_numpy(draw.integers(0, 2**20, int(offsets[-1])))
    keys = torch.arange(count)
    label = torch.from_numpy(draw.integers(0, 2, count).astype(np.float32))
    return Samples(
        keys,
        {name: keys.clone() for name in ("user", "item", "place")},
        torch.zeros(count, 4),
        {"history": Events(offsets, {"item": events, "action": events.clone()}, events.clone())},
        {"ctr": label, "cvr": label.clone()},
    )
