"""gem report: a saved document as tables and as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from gem.commands.common import Verbose, show


def report(
    document: Annotated[Path, typer.Argument(metavar="DOC.json", help="A document that gem run or gem train wrote.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML file.")] = None,
    verbose: Verbose = False,
) -> None:
    """Show a saved results document, and write its HTML report."""
    from gem.harness.results import read_document

    show(read_document(document), None, html, verbose)
