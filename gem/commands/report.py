"""gem report: saved documents as tables and as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from gem.commands.common import Verbose, check_outputs, show
from gem.errors import RequestError


def report(
    documents: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="Documents that gem run or gem train wrote.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", "--html", metavar="FILE", help="Write the report as one HTML file.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Show saved results documents, or write them as one HTML report.

    The report needs no network and no server: open it from the disk, send it, commit it.
    """
    from gem.harness import table
    from gem.harness.results import read_document

    check_outputs(None, output)
    found = [(path, read_document(path)) for path in documents]
    for path in documents:
        if output is not None and path.resolve() == output.resolve():
            raise RequestError(f"{output}: is a document to read; accepted: another file to write the report to")
    if output is None or len(found) == 1:
        console = table.make_console()
        for path, document in found:
            if len(found) > 1:
                console.print(f"{path}:")
            show(document, None, output, verbose)
        return
    from gem.harness.report import run_names, write_report

    names = run_names([path for path, _ in found])
    write_report(list(zip(names, (document for _, document in found), strict=True)), output)
    console = table.make_console()
    for (_, document), name in zip(found, names, strict=True):
        console.print(f"{name}: {table.summarise(document)}")
    console.print(f"wrote {output}", soft_wrap=True)
