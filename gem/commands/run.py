"""gem run: the declared cases, checked against the oracle and timed in turns."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gem.commands.common import EXIT_INTERRUPTED, Device, Expression, Paths, Verbose, check_outputs, show
from gem.errors import RequestError

if TYPE_CHECKING:
    from gem.harness.journal import Journal


def run(
    context: typer.Context,
    paths: Paths = None,
    k: Expression = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results document.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML file.")] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Real history lengths, or an interaction log to count them in.")
    ] = None,
    column: Annotated[
        str | None,
        # Named, since typer 0.27.2 takes a metavar that equals the name for the name: --COLUMN.
        typer.Option(
            "--column", metavar="COLUMN", help="User (or length) column of --lengths: name, or number from 1."
        ),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="Format of --lengths where it cannot be told.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=2**31 - 1, metavar="N", help="Samples a batch instead of the fixture's.")
    ] = None,
    peers: Annotated[str | None, typer.Option(metavar="A,B|none", help="Compare with these instead.")] = None,
    impls: Annotated[str | None, typer.Option(metavar="A,B", help="Run only these implementations of the ops.")] = None,
    device: Device = "auto",
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Timing budget a case and direction.")] = 3.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the unfinished run of --json FILE, the same otherwise.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Run the declared cases: check every contestant against the oracle, then time them in turns.

    Each finished case is kept in FILE.partial at once: after a kill or Ctrl-C the same command with --resume goes on.
    Exit 0: all passed. 1: a case failed or errored. 2: the request was wrong, or a file could not be written. 130:
    interrupted; what was finished is shown and written, with request.interrupted = true.
    """
    from gem.harness import environment, table
    from gem.harness.suites import load_suites

    if not budget > 0:
        raise RequestError(f"--budget {budget:g}; accepted: seconds above 0")
    if column is not None and lengths is None:
        raise RequestError(f"--column {column!r} without --lengths; accepted: the column of a --lengths FILE")
    if resume and json is None:
        raise RequestError("--resume without --json; accepted: the --json FILE of the unfinished run")
    if log_format is not None and lengths is None:
        raise RequestError(f"--format {log_format!r} without --lengths; accepted: the format of a --lengths FILE")
    chosen_peers, chosen_impls = _peers(peers), _impls(impls)
    check_outputs(json, html)
    cases = load_suites(paths or [], k)
    facts = environment.facts(device)
    if environment.version("torch") is None:
        raise RequestError("torch is not installed; accepted: torch >= 2.11 (pip install torch)")
    errors = table.make_console(stderr=True)
    with _journal(json, resume, errors) as journal:
        log = _read_lengths(lengths, column, log_format, errors) if lengths is not None else None
        asked = {
            "device": facts.device, "peers": chosen_peers, "impls": chosen_impls, "lengths": log, "batch": batch,
            "budget_s": budget,
        }  # fmt: skip
        if journal is not None:
            _begin(journal, cases, asked, resume, errors)
        document, interrupted = _run(cases, asked, journal, errors)
        # Of an absolute path the name: the rest says where somebody's files lie, and nothing about the run.
        document.request["argv"] = [re.sub(r"(^|=)/(?:.*/)?", r"\1", word) for word in context.obj]
        if interrupted:
            document.request["interrupted"] = True
        selected = None if interrupted else [case.id for case in cases]
        # An interrupted run is not done: its journal stays.
        written = journal.done if journal is not None and not interrupted else lambda: None
        summary = show(document, json, html, verbose, selected, written)
    raise typer.Exit(EXIT_INTERRUPTED if interrupted else summary.exit_code)


@contextlib.contextmanager
def _journal(json: Path | None, resume: bool, console: Any) -> "Iterator[Journal | None]":
    """The journal beside the document, locked; None for a run that writes no document."""
    if json is None:
        yield None
        return
    from gem.harness.journal import Journal

    journal = Journal(json, resume, lambda text: _say(console, f"gem: warning: {text}"))
    try:
        yield journal
    finally:
        journal.close()


def _begin(journal: "Journal", cases: list[Any], asked: dict[str, Any], resume: bool, console: Any) -> None:
    from gem.harness import environment
    from gem.harness.journal import identity

    here = environment.capture(asked["device"])
    journal.begin(identity(cases, asked, here), {key: here[key] for key in ("time", "host")})
    if journal.finished:
        _say(console, f"gem: resuming the run of {journal.sessions[0]['time']}: {journal.progress}")
    elif resume:
        _say(console, f"gem: no unfinished run of {journal.target}: a new one begins")


def _run(cases: list[Any], asked: dict[str, Any], journal: "Journal | None", console: Any) -> tuple[Any, bool]:
    """The document, and whether Ctrl-C came before its end."""
    from gem.harness.progress import LiveProgress
    from gem.harness.results import Interrupted
    from gem.harness.runner import RunOptions
    from gem.harness.runner import run as run_cases

    progress = LiveProgress(len(cases), console, journal.finished if journal is not None else None)
    try:
        with progress:
            options = RunOptions(**asked)
            return run_cases(cases, options=options, on_event=progress, journal=journal), False
    except KeyboardInterrupt as stop:
        found = stop.document if isinstance(stop, Interrupted) else _finished(progress.finished, asked["device"])
    # The journal has a case before it is shown: between lies a write to the disk.
    finished = max(progress.finished, journal.finished if journal is not None else {}, key=len)
    told = f"gem: interrupted: {len(finished)} of {len(cases)} cases finished"
    _say(console, f"{told}; the same command with --resume goes on" if journal and journal.finished else told)
    return found, True


def _say(console: Any, text: str) -> None:
    from gem.harness.progress import say

    say(console, text)


def _finished(finished: dict[str, list[Any]], device: str) -> Any:
    """A document of the cases that were done before Ctrl-C."""
    from gem.harness import environment
    from gem.harness.results import Document

    rows = [row for rows in finished.values() for row in rows]
    return Document(environment=environment.capture(device), rows=rows)


def _peers(text: str | None) -> list[str] | None:
    from gem.harness import names

    if text is None:
        return None
    chosen = [] if text in ("", "none") else [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in names.PEERS:
            near = names.nearest(name, names.PEERS)
            raise RequestError(
                f"--peers: unknown peer {name!r}; accepted: {names.accepted_list(names.PEERS)}, none{near}"
            )
    return list(dict.fromkeys(chosen))


def _impls(text: str | None) -> list[str] | None:
    from gem.harness import names

    if text is None:
        return None
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in names.IMPLEMENTATIONS:
            near, known = names.nearest(name, names.IMPLEMENTATIONS), names.accepted_list(names.IMPLEMENTATIONS)
            raise RequestError(f"--impls: unknown implementation {name!r}; accepted: {known}{near}")
    return list(dict.fromkeys(chosen))


def _read_lengths(file: Path, column: str | None, log_format: str | None, console: Any) -> Any:
    from gem.data.logs import read_lengths
    from gem.harness.progress import ReadProgress

    with ReadProgress(str(file), console) as progress:
        chosen = int(column) if column and column.isdigit() else column
        log = read_lengths(file, format=log_format, column=chosen, progress=progress)
    _say(console, log.source)
    return log
