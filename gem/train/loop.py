"""The training loop: batches, steps, figures, evaluation, checkpoints. Alone or under torchrun.

A run is exact: what it computes follows from configuration and data, and one that was stopped, at whatever moment, goes
on from its last checkpoint as if it had not been (bit for bit on a CPU).
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gem.data.reader_lanes import Lanes
from gem.data.readers import Reader
from gem.data.samples import Samples, merge
from gem.efficiency import mfu
from gem.errors import RequestError
from gem.model.work import Work
from gem.sharding.verdict import named
from gem.train.agree import LANES, lanes_of, pieces_of, same_everywhere
from gem.train.checkpoint import Checkpoints, Damaged, rng_state, seed_rng, set_rng_state
from gem.train.config import TrainConfig, parse_config
from gem.train.guard import Health, Lock
from gem.train.local import measure_compute, measure_parts, measure_peak
from gem.train.metrics import Quality
from gem.train.profile import measure_efficiency, measure_steps
from gem.train.records import Evaluation, Listener, Progress, Result, StepEfficiency
from gem.train.sources import differences, fingerprint, is_former, open_sources, sizes_of
from gem.train.step import Stepper
from gem.train.window import Closed, Window, memory_bytes
from gem.train.world import World

if TYPE_CHECKING:
    from gem.sharding.step import ShardedStepper

# What may change when a run goes on: how it is logged, checked, ended and fed, and nothing that it learns from.
_FREE = {
    "steps", "epochs", "log_every", "evaluate_every", "evaluate_batches", "checkpoint_every", "keep", "pieces",
    "reader.workers", "timeout_s",
}  # fmt: skip
_PLAN = "plan"  # nor where the model lies: any plan goes on from any other's checkpoint


_T = TypeVar("_T")
_DATA = "fingerprint"  # of the data, beside the configuration's fields in config.json


class Run:
    """One run in one folder: ``Run(config, folder, world).train()``."""

    def __init__(self, config: TrainConfig, folder: Path, world: World, listener: Listener | None = None) -> None:
        self.config, self.folder, self.world = config, folder, world
        self.tell = listener if listener is not None and world.first else Listener()
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=config.keep)
        self._lock = Lock(folder, self.tell.say)
        if config.plan is not None:  # seen before samples are made of a log
            from gem.sharding.start import check_plan

            world.at("checking its plan")
            check_plan(config, world)
        self.checkpoints.first(self._lock.take)
        world.at("opening the data")
        self.sources = open_sources(config, folder, world, self.tell.say)
        world.at("building the model")
        self.stepper = self._stepper()
        world.at("planning its batches")
        r, lanes = config.reader, self.checkpoints.first(lambda: lanes_of(folder, self.checkpoints, world.size))
        self.reader = Reader(
            self.sources.train, batch=r.batch, base=r.base, pool=r.pool, strategy=r.strategy, cost=r.cost,
            seed=config.seed, epochs=None, rank=min(world.rank, lanes - 1), ranks=lanes,
        )  # fmt: skip
        same_everywhere(sizes_of(self.sources) | {"batches an epoch": self.reader.steps}, world)
        self.batches = Lanes(
            self.reader, world.rank, world.size, workers=r.workers, pin_memory=world.device.type == "cuda"
        )
        self._data: dict[str, Any] | None = None  # its fingerprint, of the first rank
        self.tasks = [task.name for task in self.sources.schema.tasks]
        epochs = 1 if config.epochs is None and config.steps is None else config.epochs
        ends = [config.steps, None if epochs is None else epochs * self.reader.steps]
        self.total = min(end for end in ends if end is not None)
        self._windows: list[Closed] = []
        self._health, self._began = Health(world.device), 0  # the step that this process goes on from

    def _stepper(self) -> "Stepper | ShardedStepper":
        if self.config.plan is None:
            return Stepper(self.sources.schema, self.config, self.world)
        from gem.sharding.start import sharded_stepper

        stepper = sharded_stepper(self.sources.schema, self.config, self.world)
        for line in stepper.described:
            self.tell.say(line)
        return stepper

    def train(self, resume: bool = True) -> Result:
        """Train to the end; with ``resume`` from the last checkpoint of the folder, where there is one.

        RequestError where a checkpoint is there and ``resume`` is False, or it is of another configuration; and where
        the loss, the gradients or the weights are finite no more: that is seen at reports and before each save, and
        nothing is saved. The folder is another run's to take once this returns.
        """
        try:
            return self._train(resume)
        finally:
            self._lock.free()

    def _train(self, resume: bool) -> Result:
        if self.sources.files:  # which may take minutes to read
            self.world.first_alone("reading the data for their fingerprint", self._know_data)
        self.world.at("loading the last checkpoint")
        result = Result(0, self._resume(resume), [], [], None, self.stepper.counts(), self.reader.describe())
        self._began = self.stepper.number
        self.checkpoints.first(self._keep_config)
        if self.batches.lanes != self.world.size:
            self.tell.say(
                f"the data stay dealt to {self.batches.lanes} ranks, as the run began; now there are {self.world.size}"
            )
        self._peak = measure_peak(self.world.device, self.config.precision)
        counts = ", ".join(f"{count:,} {kind}" for kind, count in result.parameters.items())
        self.tell.say(f"parameters: {counts}; {result.described}")
        batch = self._loop(result)
        if batch is None:
            self.tell.say(f"all {self.total} steps are done: the results have no speed, and no waterfall")
        else:
            self._save()
        if not result.evaluations or result.evaluations[-1].step != self.stepper.number:
            self._evaluate(result)
        if batch is not None and len(self._windows) > 1:  # the first one warms up
            result.efficiency = self._efficiency(batch)
        result.steps = self.stepper.number
        return result

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _loop(self, result: Result) -> Samples | None:
        """Steps until the end. Returns the last batch; None where no step was left."""
        config, batch = self.config, None
        window = Window(self.tasks, self.stepper.model, self.world.device)
        for batch in self._timed(window):
            pieces = pieces_of(batch, config.pieces, self.world)
            labels = {task: torch.cat([piece.labels[task] for piece in pieces]) for task in self.tasks}
            done = self.stepper.step(pieces, self._marking(window))
            window.end(done, labels)
            self._health.note(done.loss, done.norm)
            number, last = self.stepper.number, self.stepper.number == self.total
            if last or number % config.log_every == 0:
                self._report(result, window)
            if config.evaluate_every is not None and number % config.evaluate_every == 0:
                self._evaluate(result)
                window.restart()
            if config.checkpoint_every is not None and number % config.checkpoint_every == 0 and not last:
                self._save()
                window.restart()
        return batch

    def _timed(self, window: Window) -> Iterator[Samples]:
        """The batches that are left; the window learns how long they were waited for."""
        stream = iter(self.batches)
        while self.stepper.number < self.total:
            self.world.at(f"step {self.stepper.number + 1}, reading its batch")
            start = time.perf_counter()
            batch = next(stream, None)
            window.waited += time.perf_counter() - start
            self.world.at(f"step {self.stepper.number + 1}")
            if batch is not None:
                window.begin(batch)
            # Before the step, whose collectives would never end; within its time, as the wait for others that it is.
            if not self.world.all_have(batch is not None) or batch is None:
                raise self._short(batch is not None)
            yield batch

    def _short(self, have: bool) -> RequestError:
        """Of a rank without a batch, the same on all. Nothing is lost: the step has not begun, and is saved so far.

        Batches of none for those who have none would go on too, and learn from part of each batch without a word.
        """
        everyone = self.world.gather(have)
        without = [rank for rank, has in enumerate(everyone) if not has]
        self._save()
        others = ", the others have one" if len(without) < len(everyone) else ""
        return RequestError(
            f"step {self.stepper.number + 1} of {self.total}: no batch on {named(without)}{others}; saved as step "
            f"{self.stepper.number}, from which the same command goes on; accepted: as many batches on every rank"
        )

    def _marking(self, window: Window) -> Callable[[str], None]:
        where = f"step {self.stepper.number + 1}"

        def mark(stage: str) -> None:
            window.clock.mark(stage)
            self.world.at(f"{where}, after its {stage}")

        return mark

    def _report(self, result: Result, window: Window) -> None:
        self.world.at(f"the report of step {self.stepper.number}")
        closed = window.close()
        self._refuse_divergence()
        quality = Quality.from_state(self.tasks, self.world.sum(window.quality.state()))
        own = torch.tensor([closed.samples, closed.flops], dtype=torch.float64, device=self.world.device)
        samples, flops = self.world.sum(own).tolist()
        if closed.flops > self._peak * closed.seconds:  # other work may have slowed the peak's measurement
            self._peak = max(self._peak, measure_peak(self.world.device, self.config.precision))
        now = Progress(
            step=self.stepper.number, steps=self.total, epoch=(self.stepper.number - 1) // self.reader.steps,
            loss=closed.loss, quality=quality.compute(), samples_per_s=samples / closed.seconds,
            mfu=mfu(flops / self.world.size, closed.seconds, self._peak), wait=closed.waited / closed.seconds,
            memory_bytes=memory_bytes(self.world.device), norm=closed.norm,
        )  # fmt: skip
        result.progress.append(now)
        self._windows.append(closed)
        self.tell.progress(now)
        window.restart()

    def _efficiency(self, batch: Samples) -> StepEfficiency | None:
        """Of the layers, on the batch's heaviest piece: more than a piece need not fit. A failure costs no results."""
        if not isinstance(self.stepper, Stepper):
            self.tell.say(
                "efficiency: no Local MFU or Scaling Ratio with a plan, whose layers cannot be timed alone; the "
                "waterfall has stages of a step"
            )
            return measure_steps(self.world, self._windows[1:], self._peak)
        flops = self.stepper.model.flops
        piece = max(batch.split(self.config.pieces), key=lambda one: flops(Work.of(one)))
        fault = None
        try:
            if self.world.size > 1:  # what measures together would wait for ever for a rank that failed: first alone
                on_device = piece.to(self.world.device)
                measure_parts(self.stepper, on_device, repeats=1)
                measure_compute(self.stepper, on_device, repeats=1)
            else:
                self._peak = max(self._peak, measure_peak(self.world.device, self.config.precision))
                return measure_efficiency(self.stepper, self._windows[1:], piece, self._peak)
        except Exception as error:
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
        failed = int(self.world.sum(torch.tensor(int(fault is not None), device=self.world.device)))
        if not failed:
            self._peak = max(self._peak, measure_peak(self.world.device, self.config.precision))
            return measure_efficiency(self.stepper, self._windows[1:], piece, self._peak)
        self.tell.say(f"efficiency: not measured: {fault or f'{failed} other ranks failed'}")
        return None

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def _evaluate(self, result: Result) -> None:
        """Ranks take validation batches in turns. Floors are computed by the first rank, over all of them."""
        if self.sources.valid is None:
            return
        quality, seen = Quality(self.tasks, self.world.device), []
        for together in batched(self._valid_batches(), self.world.size):
            self.world.at(f"the evaluation after step {self.stepper.number}")
            # Ranks that share a model predict together: who has no batch left takes none of the first one's samples.
            own = together[self.world.rank] if self.world.rank < len(together) else together[0].take(0, 0)
            if len(own) or self.stepper.shared:
                on_device = own.to(self.world.device)
                found = self.stepper.predict(on_device)
                quality.update(found, on_device.labels)
            if self.sources.floors is not None and self.world.first:
                seen += together
        total = Quality.from_state(self.tasks, self.world.sum(quality.state()))
        floors = self.sources.floors(merge(seen)) if self.sources.floors is not None and seen else {}
        found = Evaluation(self.stepper.number, total.compute(), {t: asdict(f) for t, f in floors.items()})
        result.evaluations.append(found)
        self.tell.evaluated(found)

    def _valid_batches(self) -> Iterator[Samples]:
        valid, size, given = self.sources.valid, self.config.reader.batch, 0
        assert valid is not None
        for index in range(valid.chunks):
            chunk = valid.read_chunk(index)
            for start in range(0, len(chunk), size):
                if given == self.config.evaluate_batches:
                    return
                yield chunk.take(start, min(start + size, len(chunk)))
                given += 1

    # -- what is kept --------------------------------------------------------------------------------------------------

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(state that all ranks share, state of this rank)."""
        # A batch may have been read for a step that other ranks had none for.
        place = self.batches.state_dict() | {"delivered": self.stepper.number}
        return self.stepper.state(), {"random": rng_state(), "batches": place, "ranks": self.world.size}

    def _save(self) -> None:
        self.world.at(f"saving step {self.stepper.number}")
        self._refuse_divergence()
        # The last step's weights come after its loss, and without clipping there is no norm. A sum could overflow.
        weights = torch.stack([x for p in self.stepper.own_weights() if p.numel() for x in p.aminmax()])
        wrong = (~weights.isfinite().all()).int()
        if bool(self.world.sum(wrong) if self.stepper.shared else wrong):
            raise self._diverged(f"weights after step {self.stepper.number} are not finite")
        path = self.checkpoints.save(self.stepper.number, *self._state())
        self.world.hint(f"the last checkpoint is {path}; the same command goes on from it")
        self.tell.saved(path)

    def _refuse_divergence(self) -> None:
        """Of figures that are the same on every rank, so that all end alike."""
        fault = self._health.fault()
        if fault is not None:
            before, loss, norm = fault
            of_gradient = "" if self.config.clip is None else f", gradient norm {norm:g}"
            raise self._diverged(f"step {self._began + before + 1}: loss {loss:g}{of_gradient}")

    def _diverged(self, what: str) -> RequestError:
        latest = self.checkpoints.latest()
        there = f"the last good checkpoint is {latest}" if latest is not None else "no checkpoint was saved before"
        return RequestError(
            f"{self.folder}: {what}: the run has diverged and ends, nothing of it is saved; {there}; accepted: a lower "
            "lr or table_lr, a longer warmup or a lower clip, in another folder"
        )

    def _resume(self, resume: bool) -> int | None:
        latest = self.checkpoints.latest()
        if latest is None:
            if (self.folder / "config.json").exists():
                self.tell.say(f"{self.folder}: a run was here and left no checkpoint: from the first step")
            return None
        if not resume:
            raise RequestError(f"{latest}: there is a run already; accepted: go on with it, or another folder")
        self.checkpoints.first(self._refuse_other_config)
        shared, own = self.stepper.state(), {}
        try:
            step = self.checkpoints.load(shared, own, any_ranks=True)
        except Damaged as error:
            go_on = "from the first step" if error.before is None else f"from step {error.before}"
            raise RequestError(
                f"{error.path}: damaged: {error.fault}; accepted: a whole one; without this folder the run goes on "
                f"{go_on}"
            ) from None
        assert step is not None
        self.stepper.number = step
        self.batches.load_state_dict(own["batches"])
        if own.get("ranks", self.batches.lanes) == self.world.size:
            set_rng_state(own["random"])
        else:  # there is no telling whose would be whose
            seed_rng(self.config.seed, step, self.world.rank)
        self.world.hint(f"the last checkpoint is {latest}; the same command goes on from it")
        self.tell.say(f"going on from {latest}")
        return step

    def _refuse_other_config(self) -> None:
        path = self.folder / "config.json"
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            raise RequestError(f"{path}: {what}; accepted: the run's configuration") from None
        if not isinstance(document, dict):
            raise RequestError(f"{path}: holds no object; accepted: the run's configuration")
        data = document.pop(_DATA, None)
        document.pop(LANES, None)
        before, now = _settings(parse_config(document, str(path))), _settings(self.config)
        for name in sorted((before.keys() | now.keys()) - _FREE):
            if name.partition(".")[0] != _PLAN and before.get(name) != now.get(name):
                raise RequestError(
                    f"{self.folder}: has a run with {name} = {before.get(name)!r}, not {now.get(name)!r}; accepted: "
                    "the same, or another folder"
                )
        if data is None:  # of a run from before it was kept
            self.tell.say(f"{path}: has no fingerprint of the data; they are taken to be those of the run")
            return
        if odd := differences(data, self._fingerprint()):
            raise RequestError(
                f"{self.folder}: has a run on other data of the same name: not the same {', '.join(odd)}; accepted: "
                "the data as they were, or another folder"
            )
        if is_former(data):
            self.tell.say(f"{path}: has a fingerprint of before files were read whole; only sizes are held to it")

    def _know_data(self) -> None:
        self._fingerprint()

    def _fingerprint(self) -> dict[str, Any]:
        if self._data is None:
            try:
                self._data = fingerprint(self.sources)
            except OSError as error:
                raise RequestError(f"{error.filename}: {error.strerror}; accepted: a file that can be read") from None
        return self._data

    def _keep_config(self) -> None:
        document = self.config.model_dump(mode="json") | {_DATA: self._fingerprint(), LANES: self.batches.lanes}
        part = self.folder / "config.part"
        try:
            part.write_text(json.dumps(document, indent=1) + "\n")
            part.rename(self.folder / "config.json")
        except OSError as error:
            raise RequestError(f"{part}: cannot be written: {error.strerror}; accepted: a disk with room") from None


def batched(items: Iterable[_T], count: int) -> Iterator[list[_T]]:
    """In lists of ``count``, the last one of what is left. (itertools.batched is Python 3.12's.)"""
    items = iter(items)
    while found := list(islice(items, count)):
        yield found


def _settings(config: TrainConfig) -> dict[str, Any]:
    """By dotted name, defaults and the model's preset written out: how a file says it does not matter."""
    document = config.model_dump(mode="json") | {"model": config.sizes().model_dump(mode="json")}
    return dict(_leaves(document, ""))


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield at, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, f"{at}.{name}" if at else name)
