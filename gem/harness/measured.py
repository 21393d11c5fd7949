"""Subjects that are no op, as their worker sees them: code that is called and returns metrics.

A *measured* subject measures itself: load balance by simulation, the quality that a training run reaches. A *race* has
contestants, the project's own and public ones, each in a worker of its own; the parent lets them take turns (race.py).
Which code it is stands in measured_params.py; only a worker imports it.
"""

import gc
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gem.harness import names
from gem.harness.results import WaterfallPart
from gem.harness.worker import is_out_of_memory, load, report

Report = Callable[[int, int], None]  # (done, total): how far a long call is


@dataclass(frozen=True)
class Metric:
    """One measured number. `name` is one of names.py, which knows its unit and better side; `note` is for the reader.

    `samples`: single measurements of which `value` is the median, in its unit. ValueError for a name unknown there.
    """

    name: str
    value: float
    samples: tuple[float, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if names.metric(self.name) is None:
            near = names.nearest(self.name, names.METRICS)
            raise ValueError(f"unknown metric {self.name!r}; accepted: {', '.join(names.METRICS)}{near}")

    @property
    def unit(self) -> str:
        """Of the value and the samples."""
        return self._known.unit

    @property
    def better(self) -> names.Better:
        """Which way is better."""
        return self._known.better

    @property
    def _known(self) -> names.Metric:
        found = names.metric(self.name)
        assert found is not None
        return found


class Slice(Protocol):
    """A piece of a step's time, as gem.efficiency makes it; see `results.WaterfallPart`."""

    @property
    def part(self) -> str: ...
    @property
    def ms(self) -> float: ...
    @property
    def of(self) -> str: ...


@dataclass(frozen=True)
class Findings:
    """What a measurement found: metrics, and where a step's time went (empty: not asked, or not known)."""

    metrics: list[Metric]
    waterfall: Sequence[Slice] = ()


class Measured(Protocol):
    """A subject that measures itself; built without arguments, in the worker."""

    def measure(self, params: Any, device: str, report: Report) -> list[Metric] | Findings:
        """Run the case on `device` (cpu or cuda) and say what was found; `params` is the subject's own model.

        Raises `worker.Unsupported` with the reason where it cannot run here: the case is skipped.
        """
        ...


@dataclass(frozen=True)
class Ready:
    """A contestant that has found its batch size: samples to a step, and what each size that it tried reached."""

    batch: int
    tried: dict[int, float] = field(default_factory=dict)  # batch size → samples/s
    note: str = ""

    def __str__(self) -> str:
        others = [f"{size} {rate:,.0f}/s" for size, rate in self.tried.items() if size != self.batch]
        of = f" (others: {', '.join(others)})" if others else ""
        return "; ".join(filter(None, (f"batch {self.batch}{of}", self.note)))


class Racer(Protocol):
    """A contestant of a race; built with (params, device), in a worker of its own, its calls in the order below.

    All contestants of a case live on one device, so between calls one holds no more memory than its weights and its
    optimizer need. The harness gives back what torch keeps for reuse after each call, so that a turn's first step is
    slow: `turn` takes one step that is not timed, then `params.turn_steps` that are, and waits for the device.
    """

    def losses(self) -> list[float] | dict[str, float]:
        """The training loss of each of the first `params.check_steps` batches of `params.check_batch` samples, while
        training on them from the case's initial weights; or figures by name, such losses among them. The contestants'
        must agree."""
        ...

    def setup(self, report: Report) -> Ready:
        """Start anew from the initial weights at the batch size of `params.batches` that gives the most samples/s."""
        ...

    def turn(self) -> float:
        """Train `params.turn_steps` steps; seconds that they took."""
        ...

    def finish(self) -> list[Metric] | Findings:
        """After the last turn: metrics besides qps."""
        ...


class DoesNotFit(MemoryError):
    """Of `best_batch`'s search: a size that is known not to fit, or barely, and why."""


def best_batch(sizes: Sequence[int], samples_per_s: Callable[[int], float], report: Report) -> Ready:
    """The size of `sizes` (ascending) at which `samples_per_s(size)` is highest; out of memory ends the search.

    What `samples_per_s` builds must be its own, so that it is gone when it returns. The out-of-memory error is raised
    when not even the first size fits; so that none is run into amid a step, `samples_per_s` may raise DoesNotFit.
    """
    tried: dict[int, float] = {}
    note = ""
    for done, size in enumerate(sizes):
        report(done, len(sizes))
        try:
            tried[size] = samples_per_s(size)
        except Exception as error:
            if not is_out_of_memory(error) or not tried:
                raise
            note = f"{size} does not fit" + (f": {error}" if isinstance(error, DoesNotFit) else "")
        gc.collect()  # what refers to itself holds memory until it is found; too slow (0.15 s) for every turn
        release()
        if note:
            break
    report(len(sizes), len(sizes))
    return Ready(max(tried, key=lambda size: tried[size]), tried, note)


def release() -> int:
    """Give back the device memory that torch keeps for reuse: others live on the same device. Bytes that are left."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


# ---- what answers the parent


class MeasuredHost:
    """A measured subject in its worker. Each method is one message."""

    def __init__(self, target: str, params: Any, device: str) -> None:
        self._target, self._params, self._device = target, params, device

    def measure(self) -> Findings:
        """See `Measured.measure`."""
        subject: Measured = load(self._target)()
        return _findings(subject.measure(self._params, self._device, report))


class RacerHost:
    """A contestant of a race in its worker. Each method is one message; see `Racer`."""

    def __init__(self, target: str, params: Any, device: str) -> None:
        self._target, self._params, self._device = target, params, device
        self._racer: Racer | None = None

    def losses(self) -> dict[str, float]:
        """Build the contestant and let it tell its losses."""
        self._racer = load(self._target)(self._params, self._device)
        given = self._given().losses()
        named = given if isinstance(given, dict) else {f"loss of batch {i + 1}": x for i, x in enumerate(given)}
        found = {name: float(x) for name, x in named.items()}
        release()
        if not found or not all(map(math.isfinite, found.values())):
            raise ValueError(f"losses are not finite numbers: {list(found.values())}")
        return found

    def setup(self) -> Ready:
        """See `Racer.setup`."""
        try:
            return self._given().setup(report)
        finally:
            release()

    def turn(self) -> float:
        """See `Racer.turn`; raises ValueError for a time that is none."""
        try:
            seconds = float(self._given().turn())
        finally:
            # Also of a turn that failed: on an H200 what one kept after running out of memory was the next one's end.
            release()
        if not seconds > 0:
            raise ValueError(f"a turn took {seconds} s")
        return seconds

    def settle(self) -> int:
        """Before another one's turn: hold no more than is needed between turns; bytes of the device that it holds.

        What only refers to itself is found too, which takes 0.3 s of a contestant with a GPU.
        """
        if release():
            gc.collect()
        return release()

    def finish(self) -> Findings:
        """See `Racer.finish`."""
        try:
            return _findings(self._given().finish())
        finally:
            # On an H200 the first one's 87 GiB of its last steps were the end of those that finished after it.
            release()

    def _given(self) -> Racer:
        assert self._racer is not None, "losses comes first"
        return self._racer


def _findings(given: list[Metric] | Findings) -> Findings:
    """As the parent takes it: the waterfall checked here, where a mistake in it is the contestant's own."""
    found = given if isinstance(given, Findings) else Findings(list(given))
    parts = [WaterfallPart.model_validate({"part": s.part, "ms": s.ms, "of": s.of}) for s in found.waterfall]
    return Findings(found.metrics, parts)
