"""Sources: datasets as chunks of samples that readers read in any order; what is known of them before.

Legend: C chunks, B samples of a chunk, N samples of all.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from gem.data.reader_cost import Cost, bounds, lengths_of
from gem.data.reader_plan import UNIT
from gem.data.samples import Samples
from gem.data.schema import Schema
from gem.errors import RequestError

if TYPE_CHECKING:
    from gem.data.parquet import Dataset


class Source(Protocol):
    """Samples in chunks that can be read in any order, the same each time. It can be pickled.

    Chunks of a plain source are as large as the first, but for the last; one of other sizes is a :class:`Sized`.
    """

    @property
    def schema(self) -> Schema: ...

    @property
    def chunks(self) -> int: ...

    def __len__(self) -> int: ...

    def read_chunk(self, index: int) -> Samples: ...


@runtime_checkable
class Sized(Protocol):
    """A source that knows its chunks without reading them."""

    def chunk_sizes(self) -> Sequence[int]:
        """Samples of each chunk."""
        ...

    def chunk_lengths(self, index: int) -> Mapping[str, np.ndarray]:
        """By sequence, int [B]: events of each sample of a chunk. Cheaper than to read it."""
        ...


class MemorySource:
    """Samples in memory, in chunks of ``chunk``."""

    def __init__(self, schema: Schema, samples: Samples, chunk: int) -> None:
        if chunk < 1:
            raise RequestError(f"samples in chunks of {chunk}; accepted: 1 or more")
        self.schema, self.samples, self.chunk = schema, samples, chunk

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def chunks(self) -> int:
        return -(-len(self.samples) // self.chunk)

    def read_chunk(self, index: int) -> Samples:
        return self.samples.take(index * self.chunk, min((index + 1) * self.chunk, len(self)))


class StoredSource:
    """A dataset on disk; a chunk is a row group. Row groups of a quarter of a pool or less are read least often."""

    def __init__(self, dataset: "Dataset") -> None:
        self.dataset, self.schema = dataset, dataset.schema
        self._where = [(file, group) for file, groups in enumerate(dataset.groups) for group in range(len(groups))]

    def __len__(self) -> int:
        return self.dataset.rows

    @property
    def chunks(self) -> int:
        return len(self._where)

    def read_chunk(self, index: int) -> Samples:
        return self.dataset.read(*self._where[index])

    def chunk_sizes(self) -> Sequence[int]:
        return [rows for groups in self.dataset.groups for rows in groups]

    def chunk_lengths(self, index: int) -> Mapping[str, np.ndarray]:
        return self.dataset.group_lengths(*self._where[index])


def sizes_of(source: Source) -> np.ndarray:
    """int64 [C]: samples of each chunk."""
    if isinstance(source, Sized):
        found = np.asarray(source.chunk_sizes(), dtype=np.int64)
    else:
        found = np.full(source.chunks, len(source.read_chunk(0)) if source.chunks else 0, dtype=np.int64)
        if source.chunks:
            found[-1] = len(source) - found[:-1].sum()
    if len(found) != source.chunks or found.sum() != len(source) or (found < 0).any():
        raise RequestError(
            f"source: {len(source)} samples in {source.chunks} chunks; accepted: chunks of one size but the last, or "
            "chunk_sizes that add up"
        )
    return found


def read_checked(source: Source, index: int, size: int) -> Samples:
    """A chunk; RequestError if it has not as many samples as the source made believe."""
    chunk = source.read_chunk(index)
    if len(chunk) != size:
        raise RequestError(
            f"chunk {index}: {len(chunk)} samples; accepted: {size}, as the source's length and chunks say"
        )
    return chunk


def weigh(
    source: Source, size_C: np.ndarray, cost: Cost, batch: int, held: float
) -> tuple[tuple[float, float], np.ndarray]:
    """(least and most that a sample weighs, int64 [C]: what each chunk weighs, in units) where weight is cost.

    ``batch``, ``held``: of a batch's samples, as bounds takes them.
    """
    known = source if isinstance(source, Sized) else None
    costs = []
    for chunk, size in enumerate(size_C.tolist()):
        lengths = known.chunk_lengths(chunk) if known else lengths_of(read_checked(source, chunk, size))
        costs.append(cost(lengths, size))
    cost_N = np.concatenate(costs) if costs else np.zeros(0)
    limits = bounds(cost_N, batch, held)
    return limits, np.maximum(weights_of(costs, limits), size_C)


def weights_of(costs: list[np.ndarray], limits: tuple[float, float]) -> np.ndarray:
    """int64 [C]: the chunks' weights in units, the costs of whose samples are given."""
    weights = [float(np.clip(one, *limits).sum()) for one in costs]
    count = sum(map(len, costs))
    unit = UNIT * count / sum(weights) if count else 0.0
    return np.rint(np.array(weights) * unit).astype(np.int64)
