"""What commands share: their arguments, exit codes, and how a document is written and shown."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gem.errors import RequestError

EXIT_REQUEST, EXIT_INTERRUPTED = 2, 130
JOURNAL = ".partial"  # how the name ends of the file where gem run keeps finished cases: see gem/harness/journal.py

Paths = Annotated[list[str] | None, typer.Argument(metavar="PATHS", help="Suites: files, directories, FILE::case.")]
Expression = Annotated[str | None, typer.Option("-k", metavar="EXPR", help="Only ids that match, as in pytest -k.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show passing checks one by one too.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.")]


def show(
    document: Any,
    json: Path | None,
    html: Path | None,
    verbose: bool,
    selected: list[str] | None = None,
    on_json: Callable[[], None] = lambda: None,
) -> Any:
    """Write the files, print the table, and return the summary. The files first: a closed pipe must not cost them.

    ``on_json`` is called once the document is written. A file that cannot be written does not cost the table either:
    RequestError comes after it.
    """
    from gem.harness import table

    trouble = _write(document, json, html, on_json)
    console = table.make_console()
    summary = table.summarise(document, selected)
    written = [target for target in (json, html) if target is not None and target not in trouble]
    try:
        console.print(table.machine_text(document))
        for part in table.results_tables(document, verbose, console):
            console.print(part)
        for target in written:
            console.print(f"wrote {target}", soft_wrap=True)
        console.print(str(summary))
    except SystemExit:  # rich's answer to a closed pipe: whoever has read enough does not change the verdict
        pass
    if trouble:
        raise RequestError("; ".join(trouble.values()))
    return summary


def _write(document: Any, json: Path | None, html: Path | None, on_json: Callable[[], None]) -> dict[Path, str]:
    """Write what was asked for; what could not be written, and why."""
    trouble = {}
    for target, writer, then in ((json, _json_writer, on_json), (html, _html_writer, lambda: None)):
        if target is None:
            continue
        try:
            writer()(document, target)
        except OSError as error:
            # Without the number, with the file it speaks of: it may be another than the target.
            trouble[target] = f"{target}: cannot be written: {str(error).rpartition('] ')[2]}"
        except RequestError as error:
            trouble[target] = str(error)
        else:
            then()
    return trouble


def _json_writer() -> Callable[[Any, Path], Any]:
    from gem.harness.results import write_document

    return write_document


def _html_writer() -> Callable[[Any, Path], Any]:
    from gem.harness.report import write_report

    return write_report


def check_outputs(json: Path | None, html: Path | None) -> None:
    """Refuse what could not be written, and two documents in one file, before anything runs."""
    for target in (json, html):
        _check_writable(target)
    if json is not None and html is not None and json.resolve() == html.resolve():
        raise RequestError(f"--json and --html are one file, {json}; accepted: two")


def _check_writable(target: Path | None) -> None:
    """Refuse before the run what could not be written after it."""
    if target is None:
        return
    if any(path.name.endswith(JOURNAL) for path in (target, target.resolve())):
        # It may be that of a run that goes on now: what is written over it cannot be gone on with.
        raise RequestError(f"{target}: *{JOURNAL} are journals of unfinished runs; accepted: a name without it")
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
