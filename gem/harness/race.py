"""Run one race: contestants that do the same work, each in a worker of its own, checked against each other, in turns.

The project's own contestant and its peers train on the same batches first; who disagrees about the losses is not timed.
Then each finds its best batch size while the others wait, and all take turns of a few training steps, so that a clock
that drifts or a noisy neighbour hits all alike. `qps` is a median over turns; ratios are of it, ours over theirs.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gem.harness import names
from gem.harness.bench import NOTHING_TO_COMPARE
from gem.harness.case import MeasuredCase
from gem.harness.measured import Findings, Ready
from gem.harness.measured_params import MEASURED, RaceParams
from gem.harness.measuring import keep_waterfall, metric_rows, progress_of
from gem.harness.needs import check_needs
from gem.harness.results import Row
from gem.harness.score import Outcome, apply_expectations, row
from gem.harness.session import Session
from gem.harness.timing import Summary, interleave, summarize
from gem.harness.worker import Worker, WorkerFailure

HOST = "gem.harness.measured:RacerHost"


@dataclass
class Lane:
    """What became of one contestant. `outcome` pass = its losses agree and it was timed."""

    outcome: Outcome
    ready: Ready | None = None
    qps: Summary | None = None  # samples/s, one a turn
    found: Findings = field(default_factory=lambda: Findings([]))
    gap: float | None = None  # largest relative difference of its losses from the own contestant's
    gap_note: str = ""


def run_race(case: MeasuredCase, session: Session, step: Callable[[str], None]) -> list[Row]:
    """The rows of one race. Nothing that a contestant does is raised."""
    race = _Race(case, session, step)
    with contextlib.ExitStack() as stack:
        race.start(stack)
        race.check()
        race.set_up()
        race.time()
    for name, lane in race.lanes.items():
        keep_waterfall(case, name, lane.found, session)
    rows = [one for name, lane in race.lanes.items() for one in _lane_rows(case, name, lane)]
    return apply_expectations(case, rows + _ratios(case, race.lanes), [lane.outcome for lane in race.lanes.values()])


class _Race:
    """One race under way."""

    def __init__(self, case: MeasuredCase, session: Session, step: Callable[[str], None]) -> None:
        assert isinstance(case.params, RaceParams), f"{case.subject}: the parameters of a race are a RaceParams"
        self.case, self.params, self.session, self.step = case, case.params, session, step
        self.subject = MEASURED[case.subject]
        self.lanes = {name: Lane(Outcome(name, "")) for name in (*self.subject.own, *case.peers)}
        self.workers: dict[str, Worker] = {}

    def start(self, stack: contextlib.ExitStack) -> None:
        """A worker for everyone who can run here."""
        for name, lane in self.lanes.items():
            peer = names.PEERS.get(name)
            reason = check_needs(peer.needs, self.session.facts) if peer else None
            if reason is not None:
                lane.outcome.status, lane.outcome.reason = "skipped", reason
                continue
            target = self.subject.racers[name]
            memory = self.session.memory_bytes()
            worker = Worker(name, HOST, target, self.params, self.session.device, memory_bytes=memory)
            self.workers[name] = stack.enter_context(worker)

    def _running(self) -> list[str]:
        return [name for name in self.workers if self.lanes[name].outcome.status == "pass"]

    def _call(self, name: str, what: str, method: str, *args: Any) -> Any:
        """Call a contestant's method, or note how it failed and return None."""
        self.step(f"{name}: {what}")
        try:
            return self._ask(name, what, method, *args)
        except WorkerFailure as failure:
            self._failed(name, failure)
            return None

    def _ask(self, name: str, what: str, method: str, *args: Any) -> Any:
        progress = progress_of(name, what, self.step)
        return self.workers[name].call(method, *args, timeout_s=self.case.timeout_s, on_report=progress)

    def _failed(self, name: str, failure: WorkerFailure, beside: str = "") -> None:
        outcome = self.lanes[name].outcome
        outcome.status, outcome.reason = failure.status, failure.reason + beside  # type: ignore[assignment]
        # It may hold memory that the others need.
        self.workers[name].kill()

    def _settle(self, waiting: list[str]) -> dict[str, int]:
        """Have who waits hold as little of the device as it can; bytes by name."""
        held: dict[str, int] = {}
        for name in waiting:
            try:
                held[name] = self._ask(name, "settle", "settle")
            except WorkerFailure as failure:
                self._failed(name, failure)
        return held

    def check(self) -> None:
        """Everyone's losses on the same batches, against those of the first own contestant that has some."""
        reference: tuple[str, dict[str, float]] | None = None
        for name in self._running():
            if reference is None and name in names.PEERS:
                self.lanes[name].outcome.status, self.lanes[name].outcome.reason = "skipped", NOTHING_TO_COMPARE
                continue
            losses = self._call(name, "check losses", "losses")
            if losses is None:
                continue
            if reference is None:
                reference = name, losses
                continue
            self._judge(name, losses, *reference)

    def _judge(self, name: str, losses: dict[str, float], other: str, wanted: dict[str, float]) -> None:
        lane, wrong = self.lanes[name], ""
        if losses.keys() != wanted.keys():
            wrong = f"{len(losses)} losses against {len(wanted)} of {other}"
        else:
            worst, lane.gap = widest_gap(losses, wanted)
            at = f"{worst}: {losses[worst]:.6g} against {wanted[worst]:.6g} of {other}"
            lane.gap_note = f"{at}, allowed {self.params.tolerance:g} relative"
            if not lane.gap <= self.params.tolerance:
                wrong = f"does not compute the same: {lane.gap_note}"
        if wrong:
            lane.outcome.status, lane.outcome.reason = "fail", wrong
            self.workers[name].kill()

    def set_up(self) -> None:
        """Each at its own best batch size, alone on the device."""
        for name in self._running():
            self._settle([other for other in self._running() if other != name])
            if self.lanes[name].outcome.status == "pass":
                self.lanes[name].ready = self._call(name, "find the batch size", "setup")

    def time(self) -> None:
        """Turns, then what else they found."""

        def turn(name: str) -> float:
            held = self._settle([other for other in self._running() if other != name])
            outcome = self.lanes[name].outcome
            if outcome.status != "pass":  # it failed when it was to settle
                raise WorkerFailure(outcome.status, outcome.reason)
            try:
                return 1e3 * self._ask(name, "turn", "turn") / self.params.turn_steps
            except WorkerFailure as failure:
                # Before the next one's turn, which may need its memory.
                self._failed(name, failure, beside_it(held) if failure.status == "oom" else "")
                raise

        turns = {name: partial(turn, name) for name in self._running()}
        if not turns:
            return
        race = interleave(
            turns, self.session.options.budget_s, on_round=lambda number: self.step(f"timing, round {number}")
        )
        for name in self._running():
            lane = self.lanes[name]
            assert lane.ready is not None
            lane.qps = summarize([1e3 * lane.ready.batch / ms for ms in race.samples[name]])
            lane.outcome.remarks = [str(lane.ready), *lane.qps.remarks()]
            self._settle([other for other in self._running() if other != name])
            found = self._call(name, "finish", "finish")
            if found is not None:
                lane.found = found


def widest_gap(losses: Mapping[str, float], wanted: Mapping[str, float]) -> tuple[str, float]:
    """Which figure is farthest off, relatively, and how far: one that is no number is the farthest."""
    gaps = {what: abs(losses[what] - x) / max(abs(x), 1e-12) for what, x in wanted.items()}
    worst = max(gaps, key=lambda what: (not math.isfinite(gaps[what]), gaps[what]))  # max alone passes over NaN
    return worst, gaps[worst]


def beside_it(held: Mapping[str, int]) -> str:
    """What others held of the device while one ran out of memory: a half sentence, empty where nobody held any."""
    told = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in held.items() if size)
    return f"; beside it: {told}" if told else ""


# ---- rows


def _lane_rows(case: MeasuredCase, name: str, lane: Lane) -> list[Row]:
    o = lane.outcome
    rows = []
    if lane.gap is not None:
        wrong = lane.qps is None and o.status == "fail"
        status, note = ("fail", o.reason) if wrong else ("pass", lane.gap_note)
        value = lane.gap if math.isfinite(lane.gap) else None
        rows.append(row(case, name, "", "max_error", status, value=value, reason=note))  # type: ignore[arg-type]
    if o.status != "pass" or lane.qps is None:
        return [*rows, row(case, name, "", "qps", o.status, reason=o.reason)]
    samples, remarks = list(lane.qps.samples), "; ".join(o.remarks)
    rows.append(row(case, name, "", "qps", value=lane.qps.median, samples=samples, reason=remarks))
    return rows + metric_rows(case, name, lane.found, told=("qps", "max_error"))


def _ratios(case: MeasuredCase, lanes: dict[str, Lane]) -> list[Row]:
    rows = []
    for name in (one for one in lanes if one not in names.PEERS):
        for peer in case.peers:
            metric = f"{names.RATIO_PREFIX}{peer}"
            ours, theirs = lanes[name], lanes[peer]
            lacking = next((lane.outcome for lane in (ours, theirs) if lane.outcome.status != "pass"), None)
            if lacking is not None:
                reason = f"no ratio: {lacking.impl} {lacking.status}: {lacking.reason}"
                rows.append(row(case, name, "", metric, "skipped", reason=reason))
            elif ours.qps and theirs.qps:
                rows.append(row(case, name, "", metric, value=ours.qps.median / theirs.qps.median))
    return rows
