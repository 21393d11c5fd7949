"""Shared by the tests of measured cases: small real subjects and contestants, and each fault that one can have."""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from gem.harness import measured_params, names
from gem.harness.measured import Findings, Metric, Ready, Report, best_batch
from gem.harness.measured_params import MeasuredSubject, RaceParams
from gem.harness.params import Params
from gem.harness.worker import Unsupported

HERE = __name__
Fault = Literal["none", "segfault", "hang", "oom", "unsupported", "raises", "nan", "twice", "nothing", "bad_waterfall"]


@dataclass(frozen=True)
class Piece:
    """A piece of a step's time, as gem.efficiency's slices are."""

    part: str
    ms: float
    of: str


class SumParams(Params):
    """How many numbers to add, and what goes wrong meanwhile."""

    n: int = 1000
    fault: Fault = "none"


class Sums:
    """How far a float32 sum of 1/k is from the same in float64: real work with a known order of magnitude."""

    def measure(self, params: SumParams, device: str, report: Report) -> list[Metric] | Findings:
        """The relative error, and how many numbers a second."""
        break_down(params.fault)
        start, total = time.perf_counter(), torch.zeros((), device=device)
        numbers = 1.0 / torch.arange(1, params.n + 1, dtype=torch.float64, device=device)
        for k, number in enumerate(numbers.float()):
            total += number
            report(k + 1, params.n)
        exact = float(numbers.sum())
        error = abs(float(total) - exact) / exact
        metrics = [
            Metric("max_error", float("nan") if params.fault == "nan" else error, note=f"of {params.n} numbers"),
            Metric("samples_per_s", params.n / (time.perf_counter() - start)),
        ]
        if params.fault == "nothing":
            return []
        of = "modle" if params.fault == "bad_waterfall" else "model"
        waterfall = [Piece("adding", 3.0, of), Piece("waiting", 1.0, "input")]
        return Findings([*metrics, *metrics] if params.fault == "twice" else metrics, waterfall)


def break_down(fault: str) -> None:
    """Do what `fault` says, if it is one of the violent ones."""
    if fault == "segfault":
        import ctypes

        ctypes.string_at(0)
    if fault == "hang":
        time.sleep(300)
    if fault == "oom":
        torch.empty(1 << 50)
    if fault == "unsupported":
        raise Unsupported("needs more than there is")
    if fault == "raises":
        Metric("max_eror", 1.0)


class Regression:
    """Least squares by gradient descent on rows of 64 numbers, all rows of a batch at once."""

    pause = 0.0  # seconds a step on top: a contestant whose speed is known
    rate = 0.1
    fits = 10**9  # largest batch that memory holds

    def __init__(self, params: RaceParams, device: str) -> None:
        self.params, self.device = params, device
        self.generator = torch.Generator(device).manual_seed(params.seed)
        self.steps_ms: list[float] = []  # one a turn
        self.answer_D = torch.randn(64, generator=self.generator, device=device)
        self.start()

    def start(self) -> None:
        """From the initial weights and the first batch."""
        self.weight_D = torch.zeros(64, device=self.device, requires_grad=True)
        self.generator.manual_seed(self.params.seed + 1)

    def predict(self, x_BD: Tensor) -> Tensor:
        """[B]."""
        return x_BD @ self.weight_D

    def train(self, batch: int) -> float:
        """One step; its loss."""
        if batch > self.fits:
            torch.empty(1 << 50)
        x_BD = torch.randn(batch, 64, generator=self.generator, device=self.device)
        loss = (self.predict(x_BD) - x_BD @ self.answer_D).square().mean()
        (gradient,) = torch.autograd.grad(loss, self.weight_D)
        with torch.no_grad():
            self.weight_D -= self.rate * gradient
        time.sleep(self.pause)
        return float(loss)

    def losses(self) -> list[float]:
        """See gem.harness.measured.Racer, as for the rest."""
        return [self.train(self.params.check_batch) for _ in range(self.params.check_steps)]

    def setup(self, report: Report) -> Ready:
        """Each size for some steps."""
        self.ready = best_batch(self.params.batches, self.rate_of, report)
        self.start()
        return self.ready

    def rate_of(self, batch: int) -> float:
        """Samples/s."""
        self.train(batch)
        return batch * 3 / timed(lambda: [self.train(batch) for _ in range(3)])

    def turn(self) -> float:
        """One untimed step, then those that are timed."""
        self.train(self.ready.batch)
        seconds = timed(lambda: [self.train(self.ready.batch) for _ in range(self.params.turn_steps)])
        self.steps_ms.append(1e3 * seconds / self.params.turn_steps)
        return seconds

    def finish(self) -> list[Metric] | Findings:
        """Its own account of a step's time, and where that went: all of it in one part."""
        part = Piece("regression", 1.0, "model")
        return Findings([Metric("ms", statistics.median(self.steps_ms)), Metric("peak_memory", 256.0)], [part])


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class RowByRow(Regression):
    """The same, a row at a time, and a pause that makes it slower than any machine's noise."""

    pause = 0.004
    fits = 64

    def predict(self, x_BD: Tensor) -> Tensor:
        """[B]."""
        return torch.stack([(row * self.weight_D).sum() for row in x_BD.unbind(0)])

    def finish(self) -> list[Metric] | Findings:
        """Nothing but its speed."""
        return []


class OtherRate(Regression):
    """Trains with another learning rate: the first loss agrees, the second does not."""

    rate = 0.101


class DiesInItsTurn(Regression):
    """Agrees, and is then killed as if memory had run out."""

    def turn(self) -> float:
        """Never returns."""
        os.kill(os.getpid(), 9)
        return 0.0


class NeverFits(Regression):
    """Its smallest batch is too large already."""

    fits = 32


class TooFast(Regression):
    """Says that its turns take no time."""

    def turn(self) -> float:
        """No time at all."""
        return 0.0


class Diverges(Regression):
    """Its losses are no numbers."""

    rate = float("inf")


FAULTY = {c.__name__.lower(): c for c in (OtherRate, DiesInItsTurn, NeverFits, TooFast, Diverges)}
PEERS = {"rowbyrow": RowByRow, **FAULTY}
SUBJECTS = {
    "sums": MeasuredSubject(SumParams, ("scaling", "quality"), f"{HERE}:Sums"),
    "regression": MeasuredSubject(
        RaceParams,
        ("throughput",),
        racers={"gem": f"{HERE}:Regression", **{name: f"{HERE}:{one.__name__}" for name, one in PEERS.items()}},
    ),
}


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make these subjects declarable, here and in the workers, for one test."""
    for name, subject in SUBJECTS.items():
        monkeypatch.setitem(measured_params.MEASURED, name, subject)
    for name in PEERS:
        monkeypatch.setitem(names.PEERS, name, names.Peer("a contestant", None, ("regression",)))
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
