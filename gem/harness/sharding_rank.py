"""What one rank of a plan measures, in a process of its own (sharding_ranks.py), and one process alone beside it.

Five steps: the first is counted beneath torch.distributed, the next three are timed in CPU time, the last is profiled.
"""

import resource
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gem.data.samples import Samples
from gem.data.schema import Schema
from gem.data.synthetic import Synthetic
from gem.harness.sharding_params import ShardingParams
from gem.model.work import TRAINING, Work
from gem.sharding.counting import Counter, Kind
from gem.sharding.mesh import Meshes
from gem.sharding.start import sharded_stepper
from gem.sharding.tables import ShardedTables, drawn
from gem.sharding.volume import step_bytes
from gem.train.config import TrainConfig, parse_config
from gem.train.step import Stepper, StepResult
from gem.train.world import World

STEPS = 5
TIMED = range(1, 4)
FILE = "samples.pt"


@dataclass
class Found:
    """Of one rank, or of one process alone. Bytes and seconds of a step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of each timed step, all threads
    flops: float = 0.0  # useful, forward and backward, mean of the timed steps
    sent: dict[Kind, int] = field(default_factory=dict)  # of the first step, as counted beneath torch.distributed
    formula: dict[str, int] = field(default_factory=dict)  # by purpose
    traffic: dict[str, int] = field(default_factory=dict)  # by purpose, as senders count
    collectives_s: float = 0.0  # of the last step, in which a collective was under way
    wall_s: float = 0.0  # of the last step
    tables: int = 0  # bytes that are held between steps
    sums: int = 0  # of the tables' optimizer
    dense: int = 0
    moments: int = 0  # of the dense optimizer
    tables_v1: int = 0  # weights and sums, by tables V1 on the same ranks


def config_of(params: ShardingParams, plan: dict[str, Any] | None) -> TrainConfig:
    """Of a case. RequestError, in one line, where model or data are wrong."""
    samples = STEPS * (params.samples + params.batch)
    document = {
        "data": {"kind": "synthetic", "train": {**params.data, "samples": samples, "chunk": samples}},
        "model": {"preset": params.preset, **params.model}, "seed": params.seed,
        "lr": 2e-3, "table_lr": 0.05, "clip": 0.5, "warmup": 2,
    }  # fmt: skip
    return parse_config(document | ({"plan": plan} if plan is not None else {}), "params")


class Alone:
    """One process with the whole model, on the whole batches: what every plan has to agree with."""

    def __init__(self, rank: int, ranks: int, params: ShardingParams, folder: str) -> None:
        torch.set_default_dtype(getattr(torch, params.dtype))
        self.params, self.folder = params, Path(folder)
        # What a plan's gather does to weights is part of the answer: then one rank is asked, by that plan.
        self.planned = params.gather != "full"
        plan = replace_ranks(params, 1).plan() if self.planned else None
        config = config_of(params, plan)
        assert config.data.kind == "synthetic"
        source = Synthetic(config.data.train)
        self.samples = source.read_chunk(0)
        self.stepper = _stepper(source.schema, config, World(0, 1, torch.device("cpu")))
        torch.save((source.schema, self.samples), self.folder / FILE)

    def run(self) -> Found:
        """Losses and norms of the whole batches, CPU time of a rank's (weak) or of the whole (strong)."""
        found, size = Found(), self.params.samples
        for number in range(STEPS):
            batch = self.samples.take(number * size, (number + 1) * size)
            _learn(self.stepper, batch, found, timed=number in TIMED)
        if self.params.scaling == "weak" and self.params.ranks > 1:
            found.cpu_s.clear()
            first, size = STEPS * size, self.params.batch
            for number in range(STEPS - 1):
                batch = self.samples.take(first + number * size, first + (number + 1) * size)
                _learn(self.stepper, batch, Found(), timed=False) if number not in TIMED else _learn(
                    self.stepper, batch, found, timed=True, told=False
                )
        return found


class RankOfPlan:
    """One rank."""

    def __init__(self, rank: int, ranks: int, params: ShardingParams, folder: str) -> None:
        torch.set_default_dtype(getattr(torch, params.dtype))
        schema, self.samples = torch.load(Path(folder) / FILE, weights_only=False)
        self.params, self.rank, self.ranks = params, rank, ranks
        self.world = World(rank, ranks, torch.device("cpu"))
        self.stepper = sharded_stepper(schema, config_of(params, params.plan()), self.world)

    def run(self) -> Found:
        """All figures of this rank."""
        found = Found()
        for number in range(STEPS):
            batches = [self._batch(number, rank) for rank in range(self.ranks)]
            own = batches[self.rank]
            if number == 0:
                found.formula = step_bytes(self.stepper, batches)
                self.stepper.traffic.sent.clear()
                with Counter(self.stepper.meshes, self.stepper.traffic) as counted:
                    _learn(self.stepper, own, found, timed=False)
                found.sent, found.traffic = dict(counted.sent), dict(self.stepper.traffic.sent)
            elif number == STEPS - 1:
                start = time.perf_counter()
                with profile(use_kineto=True) as seen:
                    _learn(self.stepper, own, found, timed=False)
                    found.wall_s = time.perf_counter() - start
                found.collectives_s = _under_way(seen)
            else:
                _learn(self.stepper, own, found, timed=True)
                found.flops += TRAINING * self.stepper.model.flops(Work.of(own)) / len(TIMED)
        self._weigh(found)
        return found

    def _batch(self, number: int, rank: int) -> Samples:
        first, last = self.params.share(rank)
        start = number * self.params.samples
        return self.samples.take(start + first, start + last)

    def _weigh(self, found: Found) -> None:
        stepper = self.stepper
        found.tables, found.sums = held(stepper.tables.weights.values()), held(stepper.tables.sums.values())
        found.dense = held(stepper.model.parameters())
        states = stepper.dense_optimizer.state.values()
        found.moments = held(x for state in states for x in state.values() if isinstance(x, Tensor) and x.dim())
        found.tables_v1 = found.tables + found.sums
        if stepper.tables.kind != "v1":
            one = init_device_mesh("cpu", (1, self.ranks), mesh_dim_names=("table_replica", "table_shard"))
            meshes = Meshes(
                replace(stepper.meshes.plan, tables="v1", table_replicas=1), stepper.meshes.dense,
                stepper.meshes.experts, one,
            )  # fmt: skip
            tables = list(stepper.tables.tables.values())
            v1 = ShardedTables(tables, meshes, drawn(0, dtype=getattr(torch, self.params.dtype)), lr=0.1)
            found.tables_v1 = held([*v1.weights.values(), *v1.sums.values()])


def replace_ranks(params: ShardingParams, ranks: int) -> ShardingParams:
    """The same case on another number of ranks."""
    return params.model_copy(update={"ranks": ranks})


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, each once: also of what lies in it beside them."""
    found: dict[int, int] = {}
    for x in tensors:
        storage = (x.to_local() if isinstance(x, DTensor) else x).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _stepper(schema: Schema, config: TrainConfig, world: World) -> Any:
    return sharded_stepper(schema, config, world) if config.plan is not None else Stepper(schema, config, world)


def _learn(stepper: Any, batch: Samples, found: Found, *, timed: bool, told: bool = True) -> None:
    start = cpu_s()
    done: StepResult = stepper.step(batch)
    if timed:
        found.cpu_s.append(cpu_s() - start)
    if told:
        assert done.norm is not None
        found.losses.append(float(done.loss))
        found.norms.append(float(done.norm))


def cpu_s() -> float:
    """Of this process, all its threads, in its own code and the kernel's."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _under_way(seen: profile | None) -> float:
    """Seconds in which at least one of gloo's collectives was under way."""
    # As they were recorded: a tree of all operators, which torch.profiler makes of them, costs more than the step.
    assert seen is not None and seen.kineto_results is not None
    events = [e for e in seen.kineto_results.events() if e.name().startswith("gloo:")]
    total, reached = 0.0, 0.0
    for start, end in sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total * 1e-9


def together(found: Sequence[Found], what: str) -> list[float]:
    """One figure of every rank."""
    return [float(getattr(one, what)) for one in found]
