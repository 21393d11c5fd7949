"""The command line: gem run · list · train · doctor · report. A wrong request is one line on stderr and exit 2.

torch is imported by `gem run` and `gem doctor` only, and only once the request is known to be right.
"""

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gem import __version__
from gem.errors import RequestError

EXIT_REQUEST, EXIT_INTERRUPTED = 2, 130

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
# typer carries its own click from 0.16 on and used the click package before; its public errors share one ancestor.
_UsageError: Any = typer.BadParameter.__mro__[2]

Paths = Annotated[
    list[str] | None, typer.Argument(metavar="[PATHS]...", help="Suites: files, directories, FILE::case.")
]
Expression = Annotated[str | None, typer.Option("-k", metavar="EXPR", help="Only ids that match, as in pytest -k.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show passing checks one by one too.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.")]


@app.callback(invoke_without_command=True)
def _gem(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Ops of GEM-style recommendation training, and the harness that proves them."""
    if version:
        typer.echo(f"gem {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
def list_cases(paths: Paths = None, k: Expression = None, device: Device = "auto") -> None:
    """Show the declared cases, and whether this machine has what they need."""
    from gem.harness import environment, table
    from gem.harness.suites import load_suites

    cases = load_suites(paths or [], k)
    facts = environment.facts(device)
    console = table.make_console()
    for one in table.list_tables(cases, facts):
        console.print(one)
        console.print()
    lacking = sum(table.check_needs(case.needs, facts) is not None for case in cases)
    console.print(f"{len(cases)} cases, {len(cases) - lacking} of them can run here on {facts.device}")


@app.command()
def doctor(paths: Paths = None, device: Device = "auto") -> None:
    """Say what this machine can run, and of the rest why not."""
    from gem.harness import doctor as doctor_
    from gem.harness import environment, table
    from gem.harness.suites import load_suites

    console = table.make_console()
    cases = []
    try:
        cases = load_suites(paths or [])
    except RequestError as error:
        if paths:
            raise
        # Asked about the machine, not about the suites: theirs is one more line of the answer.
        console.print(f"suites: {error}")
    doctor_.report(cases, environment.facts(device), console)


@app.command()
def report(
    document: Annotated[Path, typer.Argument(metavar="DOC.json", help="A document that gem run or gem train wrote.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML file.")] = None,
    verbose: Verbose = False,
) -> None:
    """Show a saved results document, and write its HTML report."""
    from gem.harness.results import read_document

    _show(read_document(document), None, html, verbose)


@app.command()
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
    verbose: Verbose = False,
) -> None:
    """Run the declared cases: check every contestant against the oracle, then time them in turns.

    Exit 0: all passed. 1: a case failed or errored. 2: the request was wrong. 130: interrupted; what was finished is
    shown and written, with request.interrupted = true.
    """
    from gem.harness import environment, table
    from gem.harness.suites import load_suites

    if not budget > 0:
        raise RequestError(f"--budget {budget:g}; accepted: seconds above 0")
    if column is not None and lengths is None:
        raise RequestError(f"--column {column!r} without --lengths; accepted: the column of a --lengths FILE")
    if log_format is not None and lengths is None:
        raise RequestError(f"--format {log_format!r} without --lengths; accepted: the format of a --lengths FILE")
    chosen_peers, chosen_impls = _peers(peers), _impls(impls)
    _check_outputs(json, html)
    cases = load_suites(paths or [], k)
    facts = environment.facts(device)
    if environment.version("torch") is None:
        raise RequestError("torch is not installed; accepted: torch >= 2.11 (pip install torch)")
    errors = table.make_console(stderr=True)
    log = _read_lengths(lengths, column, log_format, errors) if lengths is not None else None

    from gem.harness.progress import LiveProgress
    from gem.harness.results import Interrupted
    from gem.harness.runner import RunOptions
    from gem.harness.runner import run as run_cases

    options = RunOptions(
        device=facts.device, peers=chosen_peers, impls=chosen_impls, lengths=log, batch=batch, budget_s=budget
    )
    interrupted = False
    with LiveProgress(len(cases), errors) as progress:
        try:
            document = run_cases(cases, options=options, on_event=progress)
        except KeyboardInterrupt as stop:
            interrupted = True
            document = stop.document if isinstance(stop, Interrupted) else _finished(progress.finished, facts.device)
    # Of an absolute path the name: the rest says where somebody's files lie, and nothing about the run.
    document.request["argv"] = [re.sub(r"(^|=)/(?:.*/)?", r"\1", word) for word in context.obj]
    if interrupted:
        document.request["interrupted"] = True
        errors.print(f"gem: interrupted: {len(progress.finished)} of {len(cases)} cases finished")
    summary = _show(document, json, html, verbose, None if interrupted else [case.id for case in cases])
    raise typer.Exit(EXIT_INTERRUPTED if interrupted else summary.exit_code)


def _show(document: Any, json: Path | None, html: Path | None, verbose: bool, selected: list[str] | None = None) -> Any:
    """Write the files, print the table, and return the summary. The files first: a closed pipe must not cost them."""
    from gem.harness import table
    from gem.harness.results import write_document

    console = table.make_console()
    if json is not None:
        write_document(document, json)
    if html is not None:
        from gem.harness.report import write_report

        write_report(document, html)
    summary = table.summarise(document, selected)
    console.print(table.machine_text(document))
    for part in table.results_tables(document, verbose):
        console.print(part)
    for target in (json, html):
        if target is not None:
            console.print(f"wrote {target}")
    console.print(str(summary))
    return summary


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


def _check_outputs(json: Path | None, html: Path | None) -> None:
    """Refuse what could not be written, and two documents in one file, before anything runs."""
    for target in (json, html):
        _check_writable(target)
    if json is not None and html is not None and json.resolve() == html.resolve():
        raise RequestError(f"--json and --html are one file, {json}; accepted: two")


def _check_writable(target: Path | None) -> None:
    """Refuse before the run what could not be written after it."""
    if target is None:
        return
    if target.is_dir():
        raise RequestError(f"{target}: is a directory; accepted: the path of a file to write")
    if target.exists() and not target.is_file():
        # Renaming onto a device node (/dev/null, say) would replace it.
        raise RequestError(f"{target}: is no regular file; accepted: the path of a file to write")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.resolve().parent):
            pass
    except OSError as error:
        raise RequestError(f"{target}: cannot be written: {error.strerror or error}") from error


def _read_lengths(file: Path, column: str | None, log_format: str | None, console: Any) -> Any:
    from gem.data.logs import read_lengths
    from gem.harness.progress import ReadProgress

    with ReadProgress(str(file), console) as progress:
        chosen = int(column) if column and column.isdigit() else column
        log = read_lengths(file, format=log_format, column=chosen, progress=progress)
    console.print(log.source)
    return log


@app.command()
def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file that says what to train, on what data.")],
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The run's folder.  [default: results/<name of CONFIG>]"),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Over the file's: --set reader.batch=512.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Refuse a folder that holds a run; without it a run is gone on with.")
    ] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results document.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report with the step's waterfall.")] = None,
    device: Device = "auto",
) -> None:
    """Train the GEM model, alone or as torchrun's processes: torchrun --nproc-per-node 8 -m gem train CONFIG.

    A folder with a checkpoint is gone on with, as if the run had not been stopped. Exit 1: a figure of the results is
    not defined. 2: the request was wrong, or the run diverged. 130: interrupted; the last checkpoint stays.
    """
    from gem.train.config import load_config

    _check_outputs(json, html)
    checked = load_config(config, tuple(changes or ()))

    from gem.harness import environment, table, training
    from gem.train.checkpoint import Checkpoints
    from gem.train.loop import Run
    from gem.train.world import join

    place = Path("results") / config.stem if folder is None else folder
    try:
        with join(device) as world:
            if not world.first:
                Run(checked, place, world).train(resume=not fresh)
                return
            with training.TrainingConsole(table.make_console(stderr=True), place) as console:
                result = Run(checked, place, world, console).train(resume=not fresh)
            document = training.document_of(result, checked, config.stem, environment.capture(world.device.type))
    except KeyboardInterrupt:
        latest = Checkpoints(place / "checkpoints").latest()
        kept = f"the last checkpoint is {latest}; the same command goes on from it" if latest is not None else ""
        typer.echo(f"gem: interrupted: {kept or 'no checkpoint was saved yet'}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    document.request["argv"] = [re.sub(r"(^|=)/(?:.*/)?", r"\1", word) for word in context.obj]
    summary = _show(document, json, html, verbose=True)
    raise typer.Exit(1 if summary.failed or summary.errored else 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `gem`: runs the command line and exits with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=given, obj=given, prog_name="gem", standalone_mode=False)
    except RequestError as error:
        code = _complain(str(error))
    except _UsageError as error:  # click's: an unknown option, a value of the wrong type
        code = _complain(f"{error.format_message()} (gem --help)")
    except OSError as error:  # the table's own way out: a full disk behind a redirection
        code = _complain(f"cannot write the output: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("gem: interrupted", err=True)
        code = EXIT_INTERRUPTED
    sys.exit(code or 0)


def _complain(message: str) -> int:
    typer.echo(f"gem: error: {' '.join(message.split())}", err=True)
    return EXIT_REQUEST
