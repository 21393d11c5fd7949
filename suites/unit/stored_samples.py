"""Samples for the tests of datasets: a schema with something of everything, random samples of any, equality."""

import numpy as np
import torch

from gem.data.parquet import Dataset
from gem.data.samples import Events, Samples
from gem.data.schema import Feature, Schema, SequenceSchema, Table, Task

SCHEMA = Schema(
    tables=[Table(name="ad", rows=50), Table(name="kind", rows=3)],
    ids=[Feature(name="ad", table="ad"), Feature(name="kind", table="kind")],
    floats=["price", "hour"],
    sequences=[
        SequenceSchema(
            name="seen",
            features=[Feature(name="ad", table="ad"), Feature(name="kind", table="kind")],
            longest=9,
            timed=True,
        ),
        SequenceSchema(name="others", features=[Feature(name="ad", table="ad")], longest=4),
    ],
    tasks=[Task(name="ctr"), Task(name="cvr", given="ctr")],
)


def draw(schema: Schema, size: int, seed: int = 0) -> Samples:
    """Random samples that satisfy the schema."""
    rng = np.random.default_rng(seed)

    def ids(feature: Feature, n: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, schema.rows(feature.table), n))

    sequences = {}
    for one in schema.sequences:
        lengths = rng.integers(0, one.longest + 1, size) * (rng.random(size) < 0.8)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        times = [np.sort(rng.integers(-5, 1 << 40, n)) for n in lengths]
        sequences[one.name] = Events(
            torch.from_numpy(offsets),
            {feature.name: ids(feature, int(offsets[-1])) for feature in one.features},
            torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *times])) if one.timed else None,
        )
    labels: dict[str, torch.Tensor] = {}
    for task in schema.tasks:
        x = rng.choice(np.array([0, 1, np.nan], dtype=np.float32), size)
        if task.given is not None:
            x[labels[task.given].numpy() != 1] = np.nan
        labels[task.name] = torch.from_numpy(x)
    floats = torch.from_numpy(rng.standard_normal((size, len(schema.floats)), dtype=np.float32))
    keys = torch.from_numpy(rng.integers(-(1 << 62), 1 << 62, size))
    return Samples(keys, {one.name: ids(one, size) for one in schema.ids}, floats, sequences, labels)


def tensors(samples: Samples) -> dict[str, torch.Tensor]:
    found = {"keys": samples.keys, "floats": samples.floats}
    found |= {f"ids {name}": x for name, x in samples.ids.items()}
    found |= {f"labels {name}": x for name, x in samples.labels.items()}
    for name, events in samples.sequences.items():
        found[f"{name} offsets"] = events.offsets
        found |= {f"{name} {feature}": x for feature, x in events.ids.items()}
        if events.times is not None:
            found[f"{name} times"] = events.times
    return found


def assert_equal(found: Samples, expected: Samples) -> None:
    """Bit for bit; a NaN equals a NaN."""
    a, b = tensors(found), tensors(expected)
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert x.dtype == b[name].dtype and x.shape == b[name].shape, name
        assert torch.equal(x, b[name]) or np.array_equal(x.numpy(), b[name].numpy(), equal_nan=True), name


def read_all(data: Dataset) -> list[Samples]:
    return [data.read(f, g) for f, groups in enumerate(data.groups) for g in range(len(groups))]
