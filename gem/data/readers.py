"""Readers: from the chunks of a dataset to training batches, merged by Base Batch Shuffling. Exact by seed, resumable.

    batches = Batches(Reader(source, batch=1024, strategy="budget", seed=1, rank=rank, ranks=ranks), workers=2)
    for batch in batches:
        ...
        state = batches.state_dict()        # load_state_dict on another Batches of the same reader: the rest follows

A reader reads a pool of base batches at a time and divides it into batches by a strategy:

    none, random, bbs, lpt    whole base batches, as gem.data.shuffling.group: equal sizes
    samples                   single samples, dealt by cost within the pool: equal sizes
    budget                    the same, but ranks and pools are cut where they cost alike, not where they count alike:
                              sizes differ from batch to batch, costs hardly do, on all ranks. A loss must be divided
                              by the samples of all ranks, not averaged over means of ranks. Nothing is dropped

What a rank sees depends on the source and the reader's arguments alone, not on how many workers read.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gem.data.reader_cost import Cost, as_cost, lengths_of
from gem.data.reader_plan import Plan, Shuffle, steps_of
from gem.data.reader_select import Picker, select
from gem.data.reader_source import MemorySource, Sized, Source, StoredSource, read_checked, sizes_of, weigh
from gem.data.samples import Samples
from gem.data.shuffling import READER_STRATEGIES, ReaderStrategy, divide
from gem.errors import RequestError

__all__ = [
    "READER_STRATEGIES", "Batches", "Cost", "MemorySource", "Reader", "ReaderStrategy", "Shuffle", "Sized", "Source",
    "StoredSource",
]  # fmt: skip


class Reader(IterableDataset[Samples]):
    """A rank's training batches of one epoch after another (``epochs`` None: without end).

    batch       samples of a training batch; of "budget" on average
    base        samples of a base batch; ``batch`` is a multiple of it
    pool        base batches that are read, and balanced, at a time; a multiple of a training batch's
    cost        what balances: "tokens", "pairs" or a Cost
    shuffle     samples: chunks, and samples within each; chunks: their order only, base batches stay as they are
                stored; none: neither
    drop_last   every rank gets as many batches: True drops what does not fill one on every rank (``dropped`` says how
                many samples; other ones each epoch); False makes all batches a little smaller instead

    Iterated under a DataLoader of its own it keeps the order too, but every worker reads what all need; use Batches.
    "budget" goes over the lengths of all samples once, here.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch: int = 1024,
        base: int = 128,
        pool: int = 64,
        strategy: ReaderStrategy = "bbs",
        cost: Cost | str = "tokens",
        shuffle: Shuffle = "samples",
        seed: int = 0,
        epochs: int | None = 1,
        rank: int = 0,
        ranks: int = 1,
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        _check_sizes(batch, base, pool)
        _check_choice("strategy", strategy, READER_STRATEGIES)
        _check_choice("shuffle", shuffle, get_args(Shuffle))
        if not 0 <= rank < ranks:
            raise RequestError(f"rank {rank} of {ranks}; accepted: 0 to ranks - 1")
        if seed < 0 or (epochs is not None and epochs < 1):
            raise RequestError(f"seed {seed}, epochs {epochs}; accepted: seed >= 0, epochs >= 1 or None for no end")
        self.strategy: ReaderStrategy = strategy
        self.source, self.cost, self.epochs = source, as_cost(cost), epochs
        self.batch, self.base, self.drop_last = batch, base, drop_last
        self.sizes_C = sizes_of(source)
        weight_C = self.sizes_C
        self._bounds: tuple[float, float] | None = None
        steps = steps_of(len(source), batch, ranks, drop_last)
        if strategy == "budget":
            self._bounds, weight_C = weigh(source, self.sizes_C, self.cost, batch, len(source) / (steps * ranks))
        even = strategy == "budget" or not drop_last
        self.plan = Plan(weight_C, batch, pool * base // batch, steps, rank, ranks, seed, shuffle, even)
        self._held: dict[int, Samples] = {}  # chunks of the pool read last, since the next one may begin in them

    @property
    def steps(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return self.plan.steps

    @property
    def dropped(self) -> int:
        """Samples of an epoch that no rank sees."""
        return 0 if self.plan.even else len(self.source) - self.steps * self.batch * self.plan.ranks

    def describe(self) -> str:
        """One line: what an epoch is, and what it leaves out."""
        size = "about " if self.plan.even else ""
        return (
            f"{self.steps} steps an epoch, dealt to {self.plan.ranks} rank{'s' * (self.plan.ranks > 1)}, batches of "
            f"{size}{self.batch} by {self.strategy}; {self.dropped} of {len(self.source)} samples dropped"
        )

    def key(self) -> dict[str, Any]:
        """What the order of samples depends on, besides the source's content."""
        plan = self.plan
        return {
            "samples": len(self.source), "chunks": self.source.chunks, "batch": self.batch, "base": self.base,
            "per_pool": plan.per_pool, "strategy": self.strategy, "cost": repr(self.cost), "shuffle": plan.shuffle,
            "seed": plan.seed, "rank": plan.rank, "ranks": plan.ranks, "drop_last": self.drop_last,
        }  # fmt: skip

    def of_rank(self, rank: int) -> "Reader":
        """The same reader of another rank; what it took to know the source is shared."""
        other = copy(self)
        other.plan, other._held = replace(self.plan, rank=rank), {}
        return other

    def units(self, start: int = 0) -> Iterator[tuple[int, int, range]]:
        """(epoch, pool, its batches) of all work from batch number ``start`` on, counted through all epochs."""
        epoch, step = divmod(start, self.steps)
        while self.epochs is None or epoch < self.epochs:
            for pool in range(step // self.plan.per_pool, self.plan.pools):
                yield epoch, pool, range(max(step - pool * self.plan.per_pool, 0), self.plan.batches(pool))
            epoch, step = epoch + 1, 0

    def read(self, epoch: int, pool: int, wanted: Sequence[int]) -> Iterator[Samples]:
        """Those batches of a pool, numbered from 0."""
        if not wanted:
            return
        picker, row_B, cost_B = self._pool(epoch, pool)
        per_batch, generator = self.batch // self.base, self.plan.generator(epoch, pool)
        batches = divide(cost_B, self.plan.batches(pool), per_batch, self.strategy, generator)
        for number in wanted:
            yield picker.pick(row_B[batches[number]])

    def __iter__(self) -> Iterator[Samples]:
        worker = get_worker_info()
        turn, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        before = 0
        for epoch, pool, batches in self.units():
            yield from self.read(epoch, pool, [i for i in batches if (before + i) % workers == turn])
            before += len(batches)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": {}}

    def _pool(self, epoch: int, pool: int) -> tuple[Picker, np.ndarray, np.ndarray]:
        """(samples to pick from, the rows of the pool's B, their costs)."""
        parts, rows, costs, before, held = [], [], [], 0, {}
        for piece in self.plan.pieces(epoch, pool):
            chunk = held[piece.chunk] = self._chunk(piece.chunk)
            row = self.plan.rows(epoch, piece.chunk, len(chunk))
            cost = self.cost(lengths_of(chunk), len(chunk))[row]
            start, stop = piece.range(None if self._bounds is None else np.clip(cost, *self._bounds), len(chunk))
            row = row[start:stop]
            if len(row) * 2 < len(chunk):  # not worth to carry the rest along
                chunk, row = select(chunk, row), np.arange(len(row))
            parts.append(chunk)
            rows.append(row + before)
            costs.append(cost[start:stop])
            before += len(chunk)
        self._held = held
        return Picker(parts), np.concatenate(rows), np.concatenate(costs)

    def _chunk(self, index: int) -> Samples:
        return self._held.get(index) or read_checked(self.source, index, int(self.sizes_C[index]))


class Batches:
    """The batches of a reader, read by ``workers`` processes (0: by this one), in the reader's order.

    Pools are dealt to the workers in turn; each reads ahead while the others' batches are used. It counts what it has
    delivered: ``state_dict`` and ``load_state_dict`` go on from there, with any number of workers. Each ``iter`` starts
    behind the last batch delivered.

    prefetch    batches that each worker holds ready
    context     how processes start: "fork", "spawn", "forkserver"; None: as torch would
    """

    def __init__(
        self,
        reader: Reader,
        *,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        context: str | None = None,
    ) -> None:
        if workers < 0 or prefetch < 1:
            raise RequestError(f"workers {workers}, prefetch {prefetch}; accepted: workers >= 0, prefetch >= 1")
        self.reader, self.workers, self.prefetch = reader, workers, prefetch
        self.pin_memory, self.context = pin_memory, context
        self.delivered = 0  # through all epochs

    @property
    def epoch(self) -> int:
        """That of the next batch."""
        return self.delivered // self.reader.steps

    @property
    def step(self) -> int:
        """Number of the next batch within its epoch."""
        return self.delivered % self.reader.steps

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; plain numbers and strings."""
        return {"delivered": self.delivered, "reader": self.reader.key()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there. RequestError where the state is another reader's."""
        try:
            delivered, theirs = int(state["delivered"]), dict(state["reader"])
        except (KeyError, TypeError, ValueError):
            raise RequestError("reader state: not one; accepted: what state_dict gave") from None
        ours = self.reader.key()
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                raise RequestError(
                    f"reader state: {name} {theirs.get(name)!r}; accepted: {ours.get(name)!r}, as this reader has it"
                )
        if delivered < 0:
            raise RequestError(f"reader state: {delivered} batches delivered; accepted: 0 or more")
        self.delivered = delivered

    def __iter__(self) -> Iterator[Samples]:
        start, reader = self.delivered, self.reader
        if self.workers == 0:
            streams = [self._pinned(_Share(reader, start, 0, 1))]
        else:
            streams = [
                iter(
                    DataLoader(
                        _Share(reader, start, turn, self.workers), batch_size=None, num_workers=1,
                        prefetch_factor=self.prefetch, pin_memory=self.pin_memory, multiprocessing_context=self.context,
                        generator=torch.Generator(),  # else it draws from the global one, and training would differ
                    )
                )
                for turn in range(self.workers)
            ]  # fmt: skip
        try:
            for unit, (_, _, batches) in enumerate(reader.units(start)):
                for _ in batches:
                    batch = next(streams[unit % len(streams)])
                    if isinstance(batch, _Refused):
                        raise RequestError(batch.reason)
                    self.delivered += 1
                    yield batch
        finally:
            streams.clear()  # ends the workers now, and not when the garbage collector comes by

    def _pinned(self, share: "_Share") -> "Iterator[Samples | _Refused]":
        for batch in share:
            yield batch.pin_memory() if self.pin_memory and isinstance(batch, Samples) else batch


@dataclass(frozen=True)
class _Refused:
    """A RequestError on its way from a worker; DataLoader would make a traceback of its one line."""

    reason: str


class _Share(IterableDataset[Samples | _Refused]):
    """Every ``workers``-th pool from number ``turn`` on, counted from batch ``start``."""

    def __init__(self, reader: Reader, start: int, turn: int, workers: int) -> None:
        super().__init__()
        self.reader, self.start, self.turn, self.workers = reader, start, turn, workers

    def __iter__(self) -> Iterator[Samples | _Refused]:
        try:
            for unit, (epoch, pool, batches) in enumerate(self.reader.units(self.start)):
                if unit % self.workers == self.turn:
                    yield from self.reader.read(epoch, pool, batches)
        except RequestError as error:
            yield _Refused(str(error))


def _check_sizes(batch: int, base: int, pool: int) -> None:
    if base < 1 or batch < 1 or batch % base:
        raise RequestError(f"batch {batch}, base {base}; accepted: batch a multiple of base, both 1 or more")
    if pool < 1 or pool % (batch // base):
        raise RequestError(f"pool {pool}; accepted: a multiple of the {batch // base} base batches of a training batch")


def _check_choice(name: str, value: str, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise RequestError(f"{name} {value!r}; accepted: {', '.join(accepted)}")
