"""gem gate: a change's results against its base's, row by row."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gem.commands.common import check_outputs
from gem.errors import RequestError

if TYPE_CHECKING:
    from gem.harness.case import AnyCase


def gate(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Documents of the base: a file, a folder, or A,B,….")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Those of the change; paired by round, in order of names.")],
    confirm: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="BASE NEW", help="Fresh rounds of the suspects, which alone judge them."),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a summary for a pull request.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the verdict for programs.")] = None,
    suspects: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the ids of cases of which more rounds are wanted.")
    ] = None,
    declared: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ids of cases that the base declares; one gone is missing.")
    ] = None,
    declarations: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkout whose suites say the thresholds [the current directory]."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Ambiguous rows fail too.")] = False,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare other machines, versions, options; said in the verdict.")
    ] = False,
) -> None:
    """Judge a change: is any row slower, wrong, missing? ci/gate makes the documents and adds rounds where in doubt.

    A case may slow down by the threshold of its declaration ([case.gate], 5 % without one); the verdict says whose.

    Exit 0: passed. 1: a row is worse, failing or missing, or there is nothing to compare. 2: the request was wrong.
    """
    from gem.harness import table
    from gem.harness.gate import compare
    from gem.harness.gate_pairs import Pair, read_fresh, read_pairs
    from gem.harness.gate_report import conclusion, gate_json, gate_markdown, gate_table, remarks
    from gem.harness.results import write_text

    check_outputs(json, markdown)
    check_outputs(suspects, None)
    pairs, differing = read_pairs(base, new, allow_different)
    fresh: list[Pair] = []
    if confirm is not None:
        fresh, differing = read_fresh(*confirm, pairs, allow_different)
    if declarations is not None and not declarations.is_dir():
        raise RequestError(f"--declarations {declarations}: no directory; accepted: a checkout")
    thresholds, whose = _thresholds((row.suite for pair in pairs for row in pair.new.rows), declarations)
    verdict = compare(pairs, fresh, thresholds, _ids(declared))
    verdict.declarations = whose
    texts = {
        markdown: lambda: gate_markdown(verdict, pairs, differing, strict),
        json: lambda: gate_json(verdict, differing, strict),
        suspects: lambda: "".join(f"{one}\n" for one in verdict.open_cases()),
    }
    for target, text in texts.items():
        if target is not None:
            write_text(target, text())
    console = table.make_console()
    try:
        console.print(table.machine_text(pairs[0].base))
        if verdict.lines:
            console.print(gate_table(verdict))
        for line in remarks(verdict, differing):
            console.print(line)
        console.print(conclusion(verdict, strict))
    except SystemExit:  # rich's answer to a closed pipe: whoever has read enough does not change the verdict
        pass
    raise typer.Exit(0 if verdict.passed(strict) else 1)


def _ids(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file}: cannot be read; accepted: a file of case ids, one a line") from error
    return [line.strip() for line in lines if line.strip()]


def _thresholds(suites: Iterable[str], home: Path | None) -> tuple[dict[str, float | None], str]:
    """Id of each declared case of `suites` -> its threshold, None where it says none; and whose declarations these are.

    `home`: the checkout that declares; without one the current directory, and for what is not there gem's own suites.
    """
    from gem.harness.gate_cases import declared
    from gem.harness.suites import load_suites

    found: dict[str, float | None] = {}
    places: list[str] = []
    for suite in dict.fromkeys(suites):
        cases: dict[str, AnyCase] = {}
        if home is not None:
            place, path = f"the checkout {home.resolve().name}", Path(suite)
            if not path.is_absolute() and ".." not in path.parts:  # else it is none of that checkout
                cases = declared(home, [suite], None)
        else:
            place = "the current directory" if Path(suite).exists() else "gem's own suites"
            try:
                cases = {case.id: case for case in load_suites([suite])}
            except RequestError as error:
                if "no such file" not in str(error):
                    raise
        if cases and place not in places:
            places.append(place)
        found.update({name: case.gate.threshold if case.gate is not None else None for name, case in cases.items()})
    return found, f"declarations of {' and '.join(places)}" if places else ""
