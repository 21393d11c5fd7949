"""Run declared cases: every contestant in its own worker, checked against the oracle, then timed in turns.

Whatever a contestant does becomes a row. Only a wrong request (an unknown peer, no case, a fixture that does not suit
the subject) raises, and does so before anything runs.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gem.data.lengths import Lengths, load_profile, with_history
from gem.data.logs import LogLengths
from gem.errors import RequestError
from gem.harness import environment, names
from gem.harness.case import Case, Direction
from gem.harness.events import Event
from gem.harness.needs import Facts, check_needs
from gem.harness.results import Document, Row
from gem.harness.score import (
    Outcome,
    Work,
    apply_expectations,
    correctness_rows,
    row,
    throughput_rows,
    useful_work,
)
from gem.harness.timing import interleave
from gem.harness.worker import Worker, WorkerFailure, start_server

__all__ = ["RunOptions", "Session", "open_session", "run", "run_case"]

# What runs in the workers.
HOST = "gem.harness.contestant:Host"
ORACLE = "gem.harness.check:Oracle"
OnEvent = Callable[[Event], None]
WARM_UP_S = 0.5  # longest warm-up of one contestant, unless a single call takes longer
CEILINGS_TIMEOUT_S = 120.0
ORACLE_TIMEOUT_S = 120.0  # the budget of scores makes it a second; a busy machine gets time


@dataclass(frozen=True)
class RunOptions:
    """What a run was asked for. ``peers`` None = those declared; ``budget_s`` of timing a case and direction."""

    device: str = "auto"
    peers: list[str] | None = None
    lengths: LogLengths | None = None
    batch: int | None = None
    budget_s: float = 3.0


@dataclass
class Session:
    """What the cases of a run share: facts, the oracle's worker, measured ceilings, the lengths drawn so far."""

    options: RunOptions
    facts: Facts
    folder: Path
    fixtures: dict[str, dict[str, Any]] = field(default_factory=dict)
    ceilings: dict[str, Any] = field(default_factory=dict)
    _lengths: dict[str, Lengths] = field(default_factory=dict)
    _helpers: dict[str, Worker] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self.facts.device

    def lengths(self, case: Case) -> Lengths:
        """The case's lengths: as its profile draws them, or with the history of the run's log in it."""
        if case.fixture not in self._lengths:
            self._lengths[case.fixture] = self._draw(case.fixture)
        return self._lengths[case.fixture]

    def check(self, case: Case) -> None:
        """RequestError unless the case's lengths suit its subject."""
        lengths = self.lengths(case)
        if case.subject == "block_attention" and lengths.pattern != "self":
            raise RequestError(
                f"{case.file}: case {case.name!r}: fixture {case.fixture!r} has pattern {lengths.pattern}; "
                "accepted for block_attention: a fixture of pattern self"
            )

    def _draw(self, fixture: str) -> Lengths:
        profile, log = load_profile(fixture), self.options.lengths
        if log is None:
            return profile.draw(self.options.batch)
        chosen = log.draw(self.options.batch if self.options.batch is not None else profile.size)
        return with_history(profile, chosen.lengths, f"{profile.name}+{log.name}", chosen.source)

    def helper(self, name: str, target: str) -> Worker:
        """A worker for the run's own code (the oracle, the ceilings), started again after it died."""
        worker = self._helpers.get(name)
        if worker is None or not worker.alive:
            worker = self._helpers[name] = Worker(name, target, memory_bytes=self.memory_bytes())
        return worker

    def memory_bytes(self) -> int | None:
        """What a worker may allocate on a CPU: less than is free, so that it fails and the machine does not."""
        return None if self.device == "cuda" else int(0.9 * available_memory())

    def measured(self, dtype: str) -> tuple[float, float]:
        """(TFLOP/s of a GEMM in ``dtype``, GB/s of a copy), measured once a run. WorkerFailure when they cannot be."""
        rates = self.ceilings.setdefault("tflops", {})
        if dtype not in rates:
            worker = self.helper("ceilings", "gem.harness.ceilings:Ceilings")
            found = worker.call(
                "measure", self.device, dtype, "gbps" not in self.ceilings, timeout_s=CEILINGS_TIMEOUT_S
            )
            rates[dtype] = found["tflops"]
            if "gbps" in found:
                self.ceilings["gbps"] = found["gbps"]
        return rates[dtype], self.ceilings["gbps"]

    def close(self) -> None:
        """End the shared workers."""
        for worker in self._helpers.values():
            worker.close()


@contextlib.contextmanager
def open_session(options: RunOptions) -> Iterator[Session]:
    """A session; its workers and files are gone when the block is left, however it is left."""
    # What the server has imported, every worker has: gem's ops, and what torch imports at the first call of a custom op
    # (1.5 s a worker otherwise). None of it may initialise CUDA.
    start_server(["torch._dynamo", "gem.harness.contestant"])
    with tempfile.TemporaryDirectory(prefix="gem-run-") as folder:
        session = Session(options, environment.facts(options.device), Path(folder))
        try:
            yield session
        finally:
            session.close()


def run(cases: Sequence[Case], *, options: RunOptions, on_event: OnEvent = lambda event: None) -> Document:
    """Run ``cases`` and return the document. Raises RequestError before anything runs when the request is wrong."""
    if not cases:
        raise RequestError("no case selected; gem list shows the declared cases")
    cases = [_with_peers(case, options.peers) for case in cases]
    document = Document(environment=environment.capture(options.device), request=_request(options))
    with open_session(options) as session:
        for case in cases:
            session.check(case)
        same_as = _duplicates(cases, session)
        on_event(Event("run_started", total=len(cases)))
        for index, case in enumerate(cases):
            on_event(Event("case_started", case.id, index, len(cases)))

            def step(detail: str, case: Case = case, index: int = index) -> None:
                on_event(Event("step", case.id, index, len(cases), detail))

            if case.id in same_as:
                reason = f"the same as {same_as[case.id]} on these lengths"
                rows = [row(case, status="skipped", reason=reason)]
            else:
                rows = run_case(case, options, session, step)
            document.rows += rows
            on_event(Event("case_finished", case.id, index, len(cases), rows=tuple(rows)))
        document.fixtures, document.ceilings = session.fixtures, session.ceilings
        on_event(Event("run_finished", total=len(cases)))
    return document


def _with_peers(case: Case, peers: list[str] | None) -> Case:
    """The case with the run's peers in place of its own. A case that measures no time keeps its own."""
    if peers is None:
        return case
    for name in peers:
        if name not in names.PEERS:
            near = names.nearest(name, names.PEERS)
            raise RequestError(f"unknown peer {name!r}; accepted: {', '.join(names.PEERS)}{near}")
    if case.kind != "throughput":
        return case
    chosen = [name for name in peers if case.subject in names.PEERS[name].subjects]
    # A bound on the ratio to a peer that was not asked for cannot be judged.
    kept = {
        key: bound
        for key, bound in case.expect.items()
        if names.RATIO_PREFIX not in key or key.partition(names.RATIO_PREFIX)[2] in chosen
    }
    return case.model_copy(update={"peers": chosen, "expect": kept})


def _request(options: RunOptions) -> dict[str, Any]:
    log = options.lengths
    return {
        "device": options.device,
        "peers": options.peers,
        "lengths": None if log is None else log.stats(),
        "batch": options.batch,
        "budget_s": options.budget_s,
    }


def _duplicates(cases: Sequence[Case], session: Session) -> dict[str, str]:
    """Case id -> id of the earlier case that it equals once --lengths has replaced what they differed in."""
    if session.options.lengths is None:
        return {}
    seen: dict[Any, str] = {}
    same: dict[str, str] = {}
    for case in cases:
        lengths = session.lengths(case)
        key = (
            case.kind, case.subject, case.params, tuple(case.directions), tuple(case.impls or ()), tuple(case.peers),
            case.needs, lengths.pattern, lengths.queries, lengths.tail_q, lengths.tail_k,
            lengths.q.tobytes(), lengths.k.tobytes(),
        )  # fmt: skip
        first = seen.setdefault(key, case.id)
        if first != case.id:
            same[case.id] = first
    return same


# ---- one case


def run_case(
    case: Case, options: RunOptions, session: Session, step: Callable[[str], None] = lambda detail: None
) -> list[Row]:
    """The rows of one case. Nothing that a contestant does is raised; RequestError when the case makes no sense."""
    reason = check_needs(case.needs, session.facts)
    if reason is not None:
        return [row(case, status="skipped", reason=reason)]
    session.check(case)
    lengths = session.lengths(case)
    session.fixtures.setdefault(lengths.name, lengths.stats())
    bench = Bench(case, lengths, options, session, step)
    try:
        with contextlib.ExitStack() as stack:
            bench.start(stack)
            bench.check()
            if case.kind == "throughput":
                bench.time()
    finally:
        for path in bench.answers.values():
            Path(path).unlink(missing_ok=True)
    if case.kind == "throughput":
        rows = throughput_rows(case, bench.outcomes, bench.work())
    else:
        rows = correctness_rows(case, bench.outcomes)
    return apply_expectations(case, rows, bench.outcomes)


class Bench:
    """One case under way: its contestants' workers and what has become of each in each direction."""

    def __init__(
        self, case: Case, lengths: Lengths, options: RunOptions, session: Session, step: Callable[[str], None]
    ) -> None:
        self.case, self.lengths, self.options, self.session, self.step = case, lengths, options, session, step
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
        refused |= {name: check_needs(names.PEERS[name].needs, self.session.facts) for name in case.peers}
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
        call = Call(self.case.subject, device, dtype, params.heads, params.head_dim)
        return [(name, refusal(call, name)) for name in chosen]

    def check(self) -> None:
        """The oracle's answers, then everyone's verdict."""
        if not self.workers:
            return
        self.step("oracle")
        paths = {way: str(self.session.folder / f"{way}.pt") for way in dict.fromkeys(self._computes.values())}
        oracle = self.session.helper("oracle", ORACLE)
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
                self._call(name, "warm_up", direction, WARM_UP_S)
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
        from gem.harness.ceilings import least_ms

        rates, why = None, "nothing was timed"
        if any(o.timing for o in self.outcomes):
            self.step("ceilings")
            try:
                rates = self.session.measured(self.case.params.dtype)
            except WorkerFailure as failure:
                why = failure.reason
        found: dict[str, Work] = {}
        for direction in self.case.directions:
            flops, n_bytes = useful_work(self.case, self.lengths, direction)
            least = least_ms(flops, n_bytes, *rates) if rates else None
            found[direction] = Work(flops, n_bytes, least, why)
        return found

    def _call(self, name: str, method: str, *args: Any) -> Any:
        return self.workers[name].call(method, *args, timeout_s=self.case.timeout_s)

    def _failed(self, name: str, directions: Sequence[Direction], failure: WorkerFailure) -> None:
        for direction in directions:
            outcome = self.outcome(name, direction)
            outcome.status, outcome.reason = failure.status, failure.reason  # type: ignore[assignment]


def available_memory() -> int:
    """Bytes that processes here may still allocate: free memory of the machine, cut by the container's limit."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="utf-8"))  # "max" is no number: no limit
        free = min(free, limit - int((group / "memory.current").read_text(encoding="utf-8")))
    return max(free, 1 << 28)
