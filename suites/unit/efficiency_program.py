"""Run by torchrun in tests of efficiency on ranks: steps whose work and exchange take known times, then their account.

    efficiency_program.py OUT

Each rank writes OUT/<rank>.json: by scenario its efficiency, its windows, what it slept and ``scale``. Sleeps stand for
work: they last as long on a busy core as on an idle one. Those of a model's forward or backward are compute, those of
DDP's hook are exchange. What they have to be many times of, the model's own work, takes the longer the busier the cores
are: so does every sleep, ``scale`` times its length. A rank's batches of a scenario are told by their numbers of
samples, all of one length: FLOPs are proportional to these.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_data import random_samples, small_schema
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gem.data.samples import Samples
from gem.model import GemModel
from gem.train.config import parse_config
from gem.train.local import measure_peak
from gem.train.profile import measure_efficiency
from gem.train.step import Stepper
from gem.train.window import Window
from gem.train.world import World, join

CONFIG = {
    "data": {"kind": "synthetic"},
    # A head's weights are more than the 1 MB of DDP's first bucket: their exchange begins early in the backward.
    "model": {"layers": 1, "experts": 1, "dim": 32, "expert_hidden": 32, "head_hidden": 640},
}


@dataclass(frozen=True)
class Scenario:
    """Seconds that are slept, by rank where they are a tuple. The first of the windows warms up."""

    tower: tuple[float, float] = (0.0, 0.0)  # a forward of tower.0
    sample: float = 0.0  # a forward of the model, for each sample
    backward: float = 0.0  # a backward, after the heads' and before all others
    early: float = 0.0  # a bucket's exchange, beside the backward; not the last bucket's
    last: float = 0.0  # before the last bucket's exchange
    tables: float = 0.0  # before the exchange of tables' gradients
    wait: tuple[float, float] = (0.02, 0.02)  # for a batch
    windows: tuple[tuple[list[int], ...], ...] = (([2], [2], [2, 2]),) * 2  # by rank: samples of each step


OWN_S = 0.04  # of a step that sleeps nowhere, up to which scale is 1
MOST_SCALE, TRIES = 6.0, 3
SCENARIOS = {
    "unequal": Scenario(tower=(0.1, 0.4)),
    "heavier": Scenario(sample=0.05, windows=(([1], [1], [4, 1]), ([4], [4], [16, 4]))),
    "exchange": Scenario(last=0.3),
    "tables": Scenario(tables=0.3),
    "input": Scenario(wait=(0.02, 0.32)),
    "hidden": Scenario(backward=0.25, early=0.5),
}


def scaled(scenario: Scenario, scale: float) -> Scenario:
    """All sleeps ``scale`` times as long."""
    pairs = {name: tuple(scale * x for x in getattr(scenario, name)) for name in ("tower", "wait")}
    names = ("sample", "backward", "early", "last", "tables")
    return replace(scenario, **pairs, **{name: scale * getattr(scenario, name) for name in names})


class Slept:
    """Sleeps, and adds up the seconds; from several threads."""

    def __init__(self) -> None:
        self._lock, self.total = threading.Lock(), 0.0

    def __call__(self, seconds: float) -> None:
        if seconds:
            time.sleep(seconds)
            with self._lock:
                self.total += seconds


def batch(size: int, seed: int) -> Samples:
    return random_samples([8] * size, [3] * size, seed)


def slow_compute(model: GemModel, scenario: Scenario, rank: int, slept: Slept) -> None:
    def backward(module: torch.nn.Module, arguments: tuple[Tensor]) -> None:
        if arguments[0].requires_grad:
            arguments[0].register_hook(lambda gradient: slept(scenario.backward))

    model.tower[0].register_forward_pre_hook(lambda module, arguments: slept(scenario.tower[rank]))
    model.register_forward_pre_hook(lambda module, arguments: slept(scenario.sample * len(arguments[0])))
    model.head_norm.register_forward_pre_hook(backward)


def slow_exchange(scenario: Scenario, slept: Slept) -> Callable[[Any, GradBucket], torch.futures.Future[Tensor]]:
    """DDP's mean of a bucket over the ranks, slowed."""

    def exchange(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        last, mean = bucket.is_last(), bucket.buffer().div_(dist.get_world_size())
        if last:
            slept(scenario.last)
        work, done = dist.all_reduce(mean, async_op=True), torch.futures.Future()
        assert work is not None

        def finish() -> None:
            work.wait()
            if not last:
                slept(scenario.early)
            done.set_result(mean)

        # Not Future.then: where the exchange is done by now, it would sleep here and now, in the backward.
        threading.Thread(target=finish).start()
        return done

    return exchange


def scale_now(world: World, stepper: Stepper) -> float:
    """By the mean of a few steps that sleep nowhere, on the rank where it is longest; the same on all."""
    start, steps = time.perf_counter(), 6
    for seed in range(steps):
        stepper.step(batch(2, seed))
    longest = torch.tensor((time.perf_counter() - start) / steps)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return min(MOST_SCALE, max(1.0, float(longest) / OWN_S))


def accounted(world: World, idle: Stepper, scenario: Scenario) -> dict[str, Any]:
    """At a scale that is still right behind it, else once more: cores may be busy all of a sudden."""
    scale = scale_now(world, idle)
    for _ in range(TRIES - 1):
        found = account(world, scaled(scenario, scale)) | {"scale": scale}
        before, scale = scale, scale_now(world, idle)
        if scale <= 1.5 * before:
            return found
    return account(world, scaled(scenario, scale)) | {"scale": scale}


def account(world: World, scenario: Scenario) -> dict[str, Any]:
    stepper = Stepper(small_schema(), parse_config(CONFIG, "test"), world)
    computed, exchanged = Slept(), Slept()
    slow_compute(stepper.model, scenario, world.rank, computed)
    assert isinstance(stepper._losses, DistributedDataParallel)
    stepper._losses.register_comm_hook(None, slow_exchange(scenario, exchanged))
    average = stepper.table_optimizer.average_gradients

    def slow_average(group: dist.ProcessGroup | None = None) -> None:
        exchanged(scenario.tables)
        average(group)

    stepper.table_optimizer.average_gradients = slow_average
    window = Window(["ctr", "cvr"], stepper.model, world.device)
    windows, last = [], None
    for number, sizes in enumerate(scenario.windows[world.rank]):
        if number == 1:  # the first one is not accounted for
            computed.total = exchanged.total = 0.0
        window.restart()
        for seed, size in enumerate(sizes):
            start = time.perf_counter()
            time.sleep(scenario.wait[world.rank])
            last = batch(size, seed)
            window.waited += time.perf_counter() - start
            window.begin(last)
            window.end(stepper.step(last, window.clock.mark), last.labels)
        windows.append(window.close())
    assert last is not None
    slept = {"computed": computed.total, "exchanged": exchanged.total}  # by the steps, before the measuring
    found = measure_efficiency(stepper, windows[1:], last, measure_peak(world.device, "fp32", 0.1))
    work = sum(w.flops for w in windows[1:]) / sum(w.steps for w in windows[1:])
    return {"efficiency": asdict(found), "windows": [asdict(w) for w in windows[1:]], "flops": work, "slept": slept}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    with join("cpu") as world:
        idle = Stepper(small_schema(), parse_config(CONFIG, "test"), world)
        idle.step(batch(2, 0))  # what is set up at the first one is no step's work
        found = {name: accounted(world, idle, scenario) for name, scenario in SCENARIOS.items()}
        (out / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
