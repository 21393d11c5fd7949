"""Run declared cases: every contestant in its own worker, checked against the oracle, then timed in turns.

Cases of subjects that measure themselves, or race each other, are run by measuring.py and race.py.

Whatever a contestant does becomes a row. Only a wrong request (an unknown peer, no case, a fixture that does not suit
the subject) raises, and does so before anything runs.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gem.errors import RequestError
from gem.harness import environment, names
from gem.harness.bench import Bench
from gem.harness.case import AnyCase, Case, MeasuredCase, ops_only
from gem.harness.events import Event
from gem.harness.journal import Journal
from gem.harness.measuring import run_measured
from gem.harness.needs import check_needs
from gem.harness.results import Document, Interrupted, Row, waterfall_key
from gem.harness.score import apply_expectations, correctness_rows, row, throughput_rows
from gem.harness.session import RunOptions, Session, open_session

__all__ = ["RunOptions", "Session", "open_session", "run", "run_case"]

OnEvent = Callable[[Event], None]


def run(
    cases: Sequence[AnyCase],
    *,
    options: RunOptions,
    on_event: OnEvent = lambda event: None,
    journal: Journal | None = None,
) -> Document:
    """Run ``cases`` and return the document. Raises RequestError before anything runs when the request is wrong.

    ``journal`` gets each finished case; those finished in it already are taken over, without an event, and not run.
    """
    if not cases:
        raise RequestError("no case selected; gem list shows the declared cases")
    cases = [_with_peers(case, options.peers) for case in cases]
    if options.lengths is not None:  # what is expected on a fixture is not promised on other lengths
        cases = [case.model_copy(update={"expect": {}}) if isinstance(case, Case) else case for case in cases]
    if options.impls is not None:
        unknown = [name for name in options.impls if name not in names.IMPLEMENTATIONS]
        if unknown or not options.impls:
            raise RequestError(f"impls: {unknown or options.impls}; accepted: {', '.join(names.IMPLEMENTATIONS)}")
        chosen = {"impls": options.impls}
        cases = [case.model_copy(update=chosen) if isinstance(case, Case) else case for case in cases]
    document = Document(environment=environment.capture(options.device), request=_request(options))
    if document.environment["device"] == "cpu" and any(case.kind != "correctness" for case in cases):
        document.environment["busy_cores"] = environment.busy_cores()
    taken = dict(journal.finished) if journal else {}
    if journal is not None and taken:
        document.request["resumed"] = journal.earlier()
    facts = environment.facts(options.device)
    ahead = any(case.id not in taken and check_needs(case.needs, facts) is None for case in cases)
    with open_session(options, ahead) as session:
        if journal is not None:
            session.take_over(journal.fixtures, journal.ceilings, journal.waterfalls)
        for case in ops_only(cases):
            session.check(case)
        same_as = _duplicates(ops_only(cases), session)
        on_event(Event("run_started", total=len(cases)))
        try:
            for index, case in enumerate(cases):
                if case.id in taken:
                    document.rows += taken[case.id]
                    continue
                on_event(Event("case_started", case.id, index, len(cases)))

                def step(detail: str, case: AnyCase = case, index: int = index) -> None:
                    on_event(Event("step", case.id, index, len(cases), detail))

                if case.id in same_as:
                    reason = f"the same as {same_as[case.id]} on these lengths"
                    rows = [row(case, status="skipped", reason=reason)]
                else:
                    rows = run_case(case, options, session, step)
                document.rows += rows
                if journal is not None:
                    journal.keep(case.id, rows, session.fixtures, session.ceilings, session.waterfalls)
                on_event(Event("case_finished", case.id, index, len(cases), rows=tuple(rows)))
        except KeyboardInterrupt as stop:
            raise Interrupted(document) from stop
        finally:
            document.fixtures, document.ceilings = session.fixtures, session.ceilings
            told = {waterfall_key(one.case_id, one.impl) for one in document.rows}  # of a case cut short there are none
            document.waterfalls = {key: parts for key, parts in session.waterfalls.items() if key in told}
        on_event(Event("run_finished", total=len(cases)))
    return document


def _with_peers(case: AnyCase, peers: list[str] | None) -> AnyCase:
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
        "impls": options.impls,
        "lengths": None if log is None else log.stats(),
        "batch": options.batch,
        "budget_s": options.budget_s,
    }


def _of_ops_alone(options: RunOptions) -> str:
    """The option of the run that means nothing to a case that is no op, or ''."""
    told = {"--lengths": options.lengths, "--batch": options.batch}
    return next((name for name, value in told.items() if value is not None), "")


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
    case: AnyCase, options: RunOptions, session: Session, step: Callable[[str], None] = lambda detail: None
) -> list[Row]:
    """The rows of one case. Nothing that a contestant does is raised; RequestError when the case makes no sense."""
    reason = check_needs(case.needs, session.facts)
    if reason is not None:
        return [row(case, status="skipped", reason=reason)]
    if isinstance(case, MeasuredCase):
        alien = _of_ops_alone(options)
        if alien:
            return [row(case, status="skipped", reason=f"{alien} concerns ops alone; this case has samples of its own")]
        return run_measured(case, session, step)
    session.check(case)
    lengths = session.lengths(case)
    session.fixtures.setdefault(lengths.name, lengths.stats())
    if case.kind == "throughput" and not int((lengths.q * lengths.k).sum()):
        return [row(case, status="skipped", reason="nothing to time: no query meets a key on these lengths")]
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
