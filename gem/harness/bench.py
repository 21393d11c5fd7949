"""One case under way: a worker for each contestant, all checked against the oracle, the right ones timed in turns."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gem.data.lengths import Lengths
from gem.harness import names, session
from gem.harness.case import Case, Direction
from gem.harness.needs import check_needs
from gem.harness.score import Outcome, Work, useful_work
from gem.harness.session import RunOptions, Session
from gem.harness.timing import interleave
from gem.harness.worker import Worker, WorkerFailure

HOST = "gem.harness.contestant:Host"  # what runs in a contestant's worker
NOTHING_TO_COMPARE = "no implementation of gem's that was asked for can run here, so there is nothing to compare with"
WARM_UP_S = 0.5  # longest warm-up of one contestant, unless a single call takes longer
ORACLE_TIMEOUT_S = 120.0  # the budget of scores makes it a second; a busy machine gets time


class Bench:
    """One case under way: its contestants' workers and what has become of each in each direction."""

    def __init__(
        self, case: Case, lengths: Lengths, options: RunOptions, shared: Session, step: Callable[[str], None]
    ) -> None:
        self.case, self.lengths, self.options, self.session, self.step = case, lengths, options, shared, step
        self.workers: dict[str, Worker] = {}
        self.answers: dict[str, str] = {}
        self.outcomes: list[Outcome] = []
        self._computes: dict[str, str] = {}

    def outcome(self, name: str, direction: Direction) -> Outcome:
        """The one of this contestant and direction."""
        return next(o for o in self.outcomes if (o.impl, o.direction) == (name, direction))

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start a worker for everyone who can run here; the others are skipped with a reason."""
        from gem.harness import peers
        from gem.harness.contestant import Entry

        case, device = self.case, self.session.device
        refused = {name: reason for name, reason in self._implementations()}
        alone = bool(refused) and None not in refused.values()  # peers would run for nothing
        refused |= {
            name: NOTHING_TO_COMPARE if alone else check_needs(names.PEERS[name].needs, self.session.facts)
            for name in case.peers
        }
        for name, reason in refused.items():
            status = "pass" if reason is None else "skipped"
            self.outcomes += [Outcome(name, direction, status, reason or "") for direction in case.directions]
            if reason is None:
                is_peer = name in names.PEERS
                entry = Entry(name, is_peer, case.subject, case.params, self.lengths, device)
                worker = Worker(name, HOST, entry, memory_bytes=self.session.memory_bytes())
                self.workers[name] = stack.enter_context(worker)
                self._computes[name] = peers.computes(name, case.subject) if is_peer else "same"

    def _implementations(self) -> list[tuple[str, str | None]]:
        """Implementations to run, each with the reason why it cannot run here, or None."""
        import torch

        from gem.dispatch import Call, available, refusal

        params, device = self.case.params, self.session.device
        dtype = getattr(torch, params.dtype)
        if self.case.impls is None:
            # The oracle itself is no contestant unless it is named.
            chosen = [name for name in available(self.case.subject, device, dtype) if name != "reference"]
        else:
            chosen = self.case.impls
        call = Call(self.case.subject, device, dtype, params.heads, params.head_dim, params.masked, params.biased)
        return [(name, refusal(call, name)) for name in chosen]

    def check(self) -> None:
        """The oracle's answers, then everyone's verdict."""
        if not self.workers:
            return
        self.step("oracle")
        paths = {way: str(self.session.folder / f"{way}.pt") for way in dict.fromkeys(self._computes.values())}
        oracle = self.session.helper("oracle", session.ORACLE)
        directions = list(self.case.directions)
        try:
            oracle.call(
                "make", self.case.subject, self.case.params, self.lengths, self.session.device, directions, paths,
                timeout_s=ORACLE_TIMEOUT_S,
            )  # fmt: skip
        except WorkerFailure as failure:
            for name in self.workers:
                self._failed(name, self.case.directions, WorkerFailure("error", f"the oracle: {failure.reason}"))
            self.workers = {}
            return
        self.answers = paths
        for name in list(self.workers):
            self._check_one(name)

    def _check_one(self, name: str) -> None:
        self.step(f"{name}: prepare")
        try:
            self._call(name, "prepare")
        except WorkerFailure as failure:
            return self._failed(name, self.case.directions, failure)
        for direction in self.case.directions:
            self.step(f"{name}: check {direction}")
            repeat = self.case.kind == "correctness"
            try:
                verdict = self._call(name, "check", self.answers[self._computes[name]], direction, repeat)
            except WorkerFailure as failure:
                self._failed(name, [direction], failure)
            else:
                outcome = self.outcome(name, direction)
                outcome.max_error, outcome.error_note = verdict.error, verdict.reason()
                if not verdict.right:
                    outcome.status, outcome.reason = "fail", verdict.reason()

    def time(self) -> None:
        """Those that are right, direction by direction, in turns."""
        for direction in self.case.directions:
            self._time(direction)

    def _time(self, direction: Direction) -> None:
        turns: dict[str, Callable[[], float]] = {}
        for name in self.workers:
            if self.outcome(name, direction).status != "pass":
                continue
            self.step(f"{name}: warm up {direction}")
            try:
                self._call(name, "warm_up", self.answers[self._computes[name]], direction, WARM_UP_S)
            except WorkerFailure as failure:
                self._failed(name, [direction], failure)
            else:
                turns[name] = partial(self._call, name, "turn", direction)
        race = interleave(
            turns, self.options.budget_s, on_round=lambda number: self.step(f"timing {direction}, round {number}")
        )
        for name, failure in race.failures.items():
            self._failed(name, [direction], failure)
        for name, summary in race.summaries().items():
            outcome = self.outcome(name, direction)
            outcome.timing, outcome.remarks = summary, summary.remarks()
            if self._computes[name] == "softmax":
                outcome.remarks.append(f"softmax attention of equal FLOPs, not {self.case.subject}")
            elif self._computes[name] != "same":
                outcome.remarks.append(f"{self.case.subject} with {self._computes[name]}")
            self._finish(outcome, name, direction)

    def _finish(self, outcome: Outcome, name: str, direction: Direction) -> None:
        """After its turns: were they real work, and how fast did the GPU's clock run?"""
        try:
            verdict = self._call(name, "finish", self.answers[self._computes[name]], direction)
            clock = self._call(name, "clock")
        except WorkerFailure as failure:
            self._failed(name, [direction], failure)
            return
        if not verdict.right:
            outcome.status, outcome.reason = "fail", verdict.reason()
        if clock:
            outcome.remarks.append(f"SM clock {clock['sm_clock_mhz']} MHz")
            outcome.remarks += [f"held down: {reason}" for reason in clock["slowdowns"]]

    def work(self) -> dict[str, Work]:
        """Useful work by direction, with the roofline's time from the run's own ceilings."""
        if not any(o.timing for o in self.outcomes):
            return self._work(None, "nothing was timed")
        dtype = self.case.params.dtype
        try:
            self.step("ceilings")
            found = self._work(self.session.measured(dtype))
            if self.session.device == "cpu" and self._beats(found):
                self.step("ceilings, again")
                found = self._work(self.session.measured(dtype, again=True))
        except WorkerFailure as failure:
            return self._work(None, failure.reason)
        return found

    def _work(self, rates: tuple[float, float] | None, why: str = "") -> dict[str, Work]:
        from gem.harness.ceilings import least_ms

        found: dict[str, Work] = {}
        for direction in self.case.directions:
            flops, n_bytes = useful_work(self.case, self.lengths, direction)
            found[direction] = Work(flops, n_bytes, least_ms(flops, n_bytes, *rates) if rates else None, why)
        return found

    def _beats(self, work: dict[str, Work]) -> bool:
        """Whether someone was faster than the machine, as it was measured, can be."""
        timed = ((o.timing.median, work[o.direction].least_ms) for o in self.outcomes if o.timing)
        return any(least is not None and ms < least for ms, least in timed)

    def _call(self, name: str, method: str, *args: Any) -> Any:
        return self.workers[name].call(method, *args, timeout_s=self.case.timeout_s)

    def _failed(self, name: str, directions: Sequence[Direction], failure: WorkerFailure) -> None:
        for direction in directions:
            outcome = self.outcome(name, direction)
            outcome.status, outcome.reason = failure.status, failure.reason  # type: ignore[assignment]
