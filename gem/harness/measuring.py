"""Run one measured case: its code in a worker of its own, its metrics as rows, its expectations judged.

Whatever the code does (a crash, a hang, an out-of-memory, a metric that is no number) is a row with its reason.
"""

from collections.abc import Callable, Iterable

from gem.harness.case import MeasuredCase
from gem.harness.measured import Findings
from gem.harness.measured_params import MEASURED
from gem.harness.results import Row, WaterfallPart, waterfall_key
from gem.harness.score import Outcome, apply_expectations, row
from gem.harness.session import Session
from gem.harness.worker import Worker, WorkerFailure

HOST = "gem.harness.measured:MeasuredHost"
OWN = "gem"  # who is measured where there are no contestants


def run_measured(case: MeasuredCase, session: Session, step: Callable[[str], None]) -> list[Row]:
    """The rows of one case that measures itself, or of a race. Nothing that the measured code does is raised."""
    target = MEASURED[case.subject].target
    if target is None:
        from gem.harness.race import run_race

        return run_race(case, session, step)
    step(f"{OWN}: measure")
    try:
        with Worker(OWN, HOST, target, case.params, session.device, memory_bytes=session.memory_bytes()) as worker:
            found = worker.call("measure", timeout_s=case.timeout_s, on_report=progress_of(OWN, "measure", step))
    except WorkerFailure as failure:
        return [row(case, OWN, status=failure.status, reason=failure.reason)]  # type: ignore[arg-type]
    rows = metric_rows(case, OWN, found)
    keep_waterfall(case, OWN, found, session)
    if not rows:
        return [row(case, OWN, status="error", reason="it returned no metric")]
    return apply_expectations(case, rows, [Outcome(OWN, "")])


def progress_of(who: str, what: str, step: Callable[[str], None]) -> Callable[[int, int], None]:
    """What a worker's reports become: ``gem: measure 40/200``."""
    return lambda done, total: step(f"{who}: {what} {done:,}/{total:,}")


def metric_rows(case: MeasuredCase, impl: str, found: Findings, told: Iterable[str] = ()) -> list[Row]:
    """One row a metric, in the order given; a metric told twice is an error, since only one of both can be meant.

    `told`: those that have a row already.
    """
    rows: list[Row] = []
    for one in found.metrics:
        again = one.name in told or any(earlier.metric == one.name for earlier in rows)
        status, note = ("error", f"{one.name} is told twice") if again else ("pass", one.note)
        rows.append(row(case, impl, "", one.name, status, value=one.value, samples=list(one.samples), reason=note))  # type: ignore[arg-type]
    return rows


def keep_waterfall(case: MeasuredCase, impl: str, found: Findings, session: Session) -> None:
    """Put the contestant's waterfall, if it has one, where the run's document takes it from."""
    if found.waterfall:
        parts = [part for part in found.waterfall if isinstance(part, WaterfallPart)]  # as the worker checked them
        session.waterfalls[waterfall_key(case.id, impl)] = parts
