"""A small schema and random samples of it, for tests of the model and of training."""

import numpy as np
import torch
from torch import Tensor

from gem.data.samples import Events, Samples
from gem.data.schema import Feature, Schema, SequenceSchema, Table, Task
from gem.model.layout import Packed, rotate

ROWS = {"item": 100, "user": 50, "signal": 5}


def small_schema() -> Schema:
    """Two ids, two floats, a timed history of two features, an audience of one, CTR and CVR."""
    return Schema(
        tables=[Table(name=name, rows=rows) for name, rows in ROWS.items()],
        ids=[Feature(name="user", table="user"), Feature(name="item", table="item")],
        floats=["a", "b"],
        sequences=[
            SequenceSchema(
                name="history",
                features=[Feature(name="item", table="item"), Feature(name="signal", table="signal")],
                longest=512,
                timed=True,
            ),
            SequenceSchema(name="audience", features=[Feature(name="user", table="user")], longest=64),
        ],
        tasks=[Task(name="ctr"), Task(name="cvr", given="ctr")],
    )


def random_samples(history: list[int], audience: list[int], seed: int = 0) -> Samples:
    """Samples with these numbers of events."""
    generator = np.random.default_rng(seed)

    def draw(high: int, count: int) -> Tensor:
        return torch.from_numpy(generator.integers(0, high, count))

    def events(lengths: list[int], features: dict[str, int], timed: bool) -> Events:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)])
        total = int(offsets[-1])
        times = torch.cat([draw(10**6, n).sort().values for n in lengths]) if timed else None
        return Events(offsets, {name: draw(high, total) for name, high in features.items()}, times)

    count = len(history)
    clicked = draw(2, count).float()
    return Samples(
        torch.arange(count),
        {name: draw(ROWS[name], count) for name in ("user", "item")},
        torch.from_numpy(generator.standard_normal((count, 2)).astype(np.float32)),
        {
            "history": events(history, {"item": ROWS["item"], "signal": ROWS["signal"]}, True),
            "audience": events(audience, {"user": ROWS["user"]}, False),
        },
        {"ctr": clicked, "cvr": torch.where(clicked > 0, draw(2, count).float(), torch.nan)},
    )


class Dense(Packed):
    """Samples of equal lengths: attention as plain products of batched matrices, which torch counts."""

    def __init__(self, events: Events) -> None:
        super().__init__(events)
        self.batch = events.offsets.shape[0] - 1

    def _product(self, q: Tensor, k: Tensor, v: Tensor, softmax: bool) -> Tensor:
        """q [G, M, H, D], k and v [G, N, H, D]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2)
        return ((scores.softmax(-1) if softmax else scores) @ v).transpose(1, 2)

    def blocks(self, q, k, v, rope, block):
        cos, sin = (table[: q.shape[0]][:, None] for table in rope)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self._product(*(x.unflatten(0, (-1, block)) for x in (q, k, v)), softmax=True)
        return out.flatten(0, 1)

    def cross(self, q, k, v, keys, activation, scale):
        return self._product(*(x.unflatten(0, (self.batch, -1)) for x in (q, k, v)), softmax=False).flatten(0, 1)

    def pooled(self, q, k, v, activation, scale):
        q = q.expand(self.batch, *q.shape[-3:])
        return self._product(q, *(x.unflatten(0, (self.batch, -1)) for x in (k, v)), softmax=False)
