"""Sharded training beside public peers, as races of rank processes over gloo, on the CPU.

    sharded_tables   gem.sharding's tables V1 and TorchRec's DistributedModelParallel: pooled lookups of the same ids,
                     squared distances to targets, exact row-wise Adagrad on the owner
    sharded_dense    gem.sharding's FSDP and DeepSpeed's ZeRO-3: the same model on the same samples, AdamW; tables rest

Each contestant's worker starts ranks of its own once; they sleep while others have their turn. A turn's time is from a
barrier to a barrier, of ranks that share the machine's cores: of use beside a peer's, and for nothing else. Beside it
stands CPU time, which others at work on the machine disturb less.
"""

import importlib
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gem.data.samples import Samples
from gem.data.synthetic import Synthetic
from gem.harness.measured import Metric, Ready, Report, best_batch
from gem.harness.measured_params import ShardedDenseParams, ShardedTablesParams
from gem.harness.sharding_rank import cpu_s
from gem.harness.sharding_ranks import Ranks
from gem.harness.worker import Unsupported, load
from gem.sharding.mesh import Cluster, Plan, build
from gem.sharding.placement import Table
from gem.sharding.start import sharded_stepper
from gem.sharding.tables import ShardedTables, sliced
from gem.train.config import TrainConfig, parse_config
from gem.train.world import World

Lookup = tuple[str, Tensor, Tensor, Tensor]  # table, ids [N], offsets [B + 1], target [B, D]
EPS = 1e-8
AHEAD = 4  # batches that a rank has drawn; steps take them in turn


class _Learner(Protocol):
    """What a contestant is on a rank."""

    def step(self, batch: Any) -> Tensor: ...


# ---- in a rank


class _Rank(ABC):
    """One rank of one contestant."""

    def __init__(self, rank: int, ranks: int, params: Any, target: str) -> None:
        self.rank, self.ranks, self.params, self.target = rank, ranks, params, target
        self.learner: _Learner | None = None
        self._batches: list[Any] = []
        self._next = 0

    @abstractmethod
    def _build(self) -> _Learner:
        """From the weights that all contestants begin with."""

    @abstractmethod
    def _draw(self, number: int, size: int) -> Any:
        """This rank's batch of a step."""

    def losses(self) -> list[float]:
        """Of the first steps, as this rank has them."""
        self.learner, size = self._build(), self.params.check_batch
        return [float(self.learner.step(self._draw(n, size))) for n in range(self.params.check_steps)]

    def prepare(self, size: int) -> None:
        """Batches of so many samples, and a step with one."""
        self._batches = [self._draw(n, size) for n in range(AHEAD)]
        self._step()

    def turn(self, steps: int) -> tuple[float, float]:
        """Seconds of so many steps, from when all ranks begin until all have ended, and this rank's CPU time."""
        self._step()  # others had the caches
        dist.barrier()
        start, used = time.perf_counter(), cpu_s()
        for _ in range(steps):
            self._step()
        used = cpu_s() - used
        dist.barrier()
        return time.perf_counter() - start, used

    def memory(self) -> int:
        """Bytes of weights and optimizer state, where the contestant tells; else 0."""
        tell: Callable[[], int] = getattr(self.learner, "memory_bytes", lambda: 0)
        return tell()

    def _step(self) -> None:
        assert self.learner is not None, "losses comes first"
        self._next += 1
        self.learner.step(self._batches[self._next % AHEAD])


class TablesRank(_Rank):
    """Of tables."""

    params: ShardedTablesParams

    def _build(self) -> _Learner:
        p = self.params
        draw = torch.Generator().manual_seed(p.seed)
        whole = {f"t{n}": torch.randn(rows, p.dim, generator=draw) * 0.05 for n, rows in enumerate(p.rows)}
        sizes = {name: (len(weight), p.dim) for name, weight in whole.items()}
        return load(self.target)(sizes, whole, lr=p.lr, eps=EPS, cut=p.cut)

    def _draw(self, number: int, size: int) -> list[Lookup]:
        p = self.params
        draw = torch.Generator().manual_seed((p.seed + 1) * 1_000_003 + number * self.ranks + self.rank)
        found = []
        for n, rows in enumerate(p.rows):
            lengths = torch.randint(0, 2 * p.bag + 1, (size,), generator=draw)
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            # Few rows are asked for often, most seldom: the ids' distribution is that of a power of an even one.
            even = torch.rand(int(offsets[-1]), generator=draw)
            ids = (even**p.skew * rows).long().clamp(max=rows - 1)
            found.append((f"t{n}", ids, offsets, torch.randn(size, p.dim, generator=draw)))
        return found


class GemTables:
    """gem.sharding's tables, V1."""

    def __init__(
        self, tables: dict[str, tuple[int, int]], whole: dict[str, Tensor], *, lr: float, eps: float, cut: Any
    ) -> None:
        ranks = dist.get_world_size()
        meshes = build(Plan(tables="v1"), Cluster(gpus=ranks), "cpu")
        placed = [Table(name, rows, dim, cut) for name, (rows, dim) in tables.items()]
        # Parts of columns have Adagrad sums of their own with the peer.
        self.tables = ShardedTables(placed, meshes, sliced(whole), lr=lr, eps=eps, whole_rows=False)

    def step(self, lookups: list[Lookup]) -> Tensor:
        """Learn; this rank's loss before it, []."""
        self.tables.zero_grad()
        self.tables.gather()
        rows = self.tables.pooled([(name, ids, offsets) for name, ids, offsets, _ in lookups])
        loss = torch.stack([(x - y).square().sum() for x, (*_, y) in zip(rows, lookups, strict=True)]).sum() / 2
        loss.backward()
        self.tables.release()
        self.tables.exchange_gradients()
        self.tables.step()
        return loss.detach()

    def memory_bytes(self) -> int:
        """Of weights and optimizer state."""
        return self.tables.memory_bytes()


class DenseRank(_Rank):
    """Of dense parts."""

    params: ShardedDenseParams

    def __init__(self, rank: int, ranks: int, params: ShardedDenseParams, target: str) -> None:
        super().__init__(rank, ranks, params, target)
        most = max(params.check_steps * params.check_batch, AHEAD * params.batches[-1]) * ranks
        data = {"kind": "synthetic", "train": {**params.data, "samples": most, "chunk": most}}
        self.config = parse_config(
            {
                "data": data, "model": {"preset": params.preset, **params.model}, "lr": params.lr, "warmup": 0,
                "seed": params.seed, "table_lr": 1e-30, "plan": {"gpus": ranks},
            },
            "params",
        )  # fmt: skip
        assert self.config.data.kind == "synthetic"
        source = Synthetic(self.config.data.train)
        self.schema, self.samples = source.schema, source.read_chunk(0)

    def _build(self) -> _Learner:
        return load(self.target)(self.schema, self.config, rank=self.rank, ranks=self.ranks)

    def _draw(self, number: int, size: int) -> Samples:
        first = (number * self.ranks + self.rank) * size
        return self.samples.take(first, first + size)

    def losses(self) -> list[float]:
        """Tables rest: their optimizers are not the same."""
        self.learner, size = self._build(), self.params.check_batch
        if hasattr(self.learner, "set_table_rate"):
            self.learner.set_table_rate(0.0)  # type: ignore[attr-defined]
        return [float(self.learner.step(self._draw(n, size))) for n in range(self.params.check_steps)]


class GemDense:
    """gem.sharding's FSDP over all ranks."""

    def __init__(self, schema: Any, config: TrainConfig, *, rank: int, ranks: int) -> None:
        self.stepper = sharded_stepper(schema, config, World(rank, ranks, torch.device("cpu")))

    def step(self, batch: Samples) -> Tensor:
        """Learn; the global loss before it, []."""
        return self.stepper.step(batch).loss


# ---- in the worker


class _Racer:
    """A contestant: its ranks, called all at once."""

    rank: ClassVar[type[_Rank]]
    target: ClassVar[str]
    before: ClassVar[tuple[str, ...]] = ()  # modules that are imported once, before the ranks are forked

    def __init__(self, params: Any, device: str) -> None:
        if device != "cpu":
            raise Unsupported("rank processes over gloo, on the CPU alone")
        self.params = params
        for module in (self.target.partition(":")[0], *self.before):
            importlib.import_module(module)
        self.group = Ranks(params.ranks, self.rank, params, self.target)
        self._cpu_ms: list[float] = []  # of a step, a turn each

    def losses(self) -> list[float]:
        """Of all ranks together."""
        return self._together(self.group.call("losses"))

    def _together(self, found: list[list[float]]) -> list[float]:
        return [sum(step) for step in zip(*found, strict=True)]

    def setup(self, report: Report) -> Ready:
        """Samples of a rank that give the most samples/s."""
        ranks, steps = self.params.ranks, self.params.turn_steps

        def rate(size: int) -> float:
            self.group.call("prepare", size)
            return ranks * size * steps / self._turn()[0]

        found = best_batch(self.params.batches, rate, report)
        self.group.call("prepare", found.batch)
        return Ready(ranks * found.batch, {ranks * size: x for size, x in found.tried.items()}, f"{ranks} ranks")

    def turn(self) -> float:
        """Seconds."""
        seconds, cpu = self._turn()
        self._cpu_ms.append(1e3 * cpu / self.params.turn_steps)
        return seconds

    def _turn(self) -> tuple[float, float]:
        """Of the ranks that took longest and needed most."""
        found = self.group.call("turn", self.params.turn_steps)
        return max(seconds for seconds, _ in found), max(cpu for _, cpu in found)

    def finish(self) -> list[Metric]:
        """CPU time of a step; memory of tables, where the contestant tells."""
        most = max(self.group.call("memory"))
        self.group.close()
        metrics = [Metric("cpu_ms", statistics.median(self._cpu_ms), tuple(self._cpu_ms))]
        return [*metrics, Metric("memory_tables", most)] if most else metrics


class TablesRacer(_Racer):
    """gem's own."""

    rank, target = TablesRank, "gem.harness.subject_sharded:GemTables"


class TorchRecRacer(_Racer):
    """TorchRec."""

    rank, target = TablesRank, "gem.baselines.torchrec_tables:TorchRecTables"
    before = ("torchrec.distributed",)


class DenseRacer(_Racer):
    """gem's own."""

    rank, target = DenseRank, "gem.harness.subject_sharded:GemDense"

    def _together(self, found: list[list[float]]) -> list[float]:
        return found[0]  # each has the loss of all


class Zero3Racer(DenseRacer):
    """DeepSpeed."""

    target = "gem.baselines.deepspeed_dense:Zero3"
