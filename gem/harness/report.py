"""The HTML report of one run or of several: a single file that needs no network and opens from a disk.

`render` turns results documents into views (plain dataclasses of report_lines.py and report_head.py) that
templates/report.html.j2 lays out. Every row of the documents ends in the tables, also those that failed or were
skipped; jinja2 escapes every text. The page's one script is named by its hash in the page's content policy, which
allows nothing else to run and nothing to be fetched.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gem.harness import report_figures, report_head, report_measured
from gem.harness.report_commands import Commands
from gem.harness.report_figures import flat, read_ceilings
from gem.harness.report_lines import BAD, Line, by_suite, kind_of, lines_of
from gem.harness.report_tables import results_table
from gem.harness.results import PART_OF, SEVERITY, Document, write_text

Documents = Document | Sequence[tuple[str, Document]]  # one, or several with the names of their runs


def write_report(documents: Documents, path: str | Path, *, title: str | None = None) -> Path:
    """Write the report to `path`, whole or not at all. Raises RequestError when it cannot be written."""
    return write_text(path, render(documents, title=title))


def run_names(paths: Sequence[Path]) -> list[str]:
    """A name a file, as short as keeps them apart: its stem, or with the folders before it; never two the same.

    With their suffixes where two files differ in them alone; a file that is given again gets a number.
    """
    whole = [path.resolve().parts for path in paths]
    stems = [path.resolve().with_suffix("").parts for path in paths]
    if len(set(stems)) == len(set(whole)):
        whole = stems
    found: list[str] = []
    for parts in whole:
        name = "/".join(_apart(parts, [other for other in whole if other != parts]))
        called = (name, *(f"{name} ({number})" for number in range(2, len(whole) + 2)))
        found.append(next(one for one in called if one not in found))
    return found


def _apart(parts: tuple[str, ...], others: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    for count in range(1, len(parts)):
        if all(other[-count:] != parts[-count:] for other in others):
            return parts[-count:]
    return parts


def render(documents: Documents, *, title: str | None = None) -> str:
    """The report as one HTML text that refers to nothing outside itself."""
    named = [("", documents)] if isinstance(documents, Document) else list(documents)
    runs = [name for name, _ in named] if len(named) > 1 else [""] * len(named)
    found = [document for _, document in named]
    commands = Commands([one.request for one in found], runs)
    lines = [line for run, one in enumerate(found) for line in lines_of(one.rows, run)]
    sections = report_measured.measured_sections(lines, commands, runs)
    elsewhere = {suite for section in sections for suite, _, _ in section.parts}
    of_ops = [line for line in lines if line.suite not in elsewhere]
    tables = [
        (suite, kind_of(suite), results_table(own, commands, runs, f"Results of {suite}"))
        for suite, own in by_suite(of_ops).items()
    ]
    each = list(enumerate(found))
    return _template().render(
        title=title or report_head.title_of(found),
        # The worst news first; within each kind as they were given.
        runs=sorted(
            (report_head.run_view(one, runs[run]) for run, one in each), key=lambda view: view.verdict_kind != "bad"
        ),
        problems=report_head.problems(lines, runs, "subject"),
        peer_problems=report_head.problems(lines, runs, "peer"),
        skipped=report_head.skipped(lines, runs),
        record=report_head.record(lines, commands, runs),
        statuses=_statuses(lines),
        figures=report_figures.case_cards(lines, commands, runs),
        rooflines=report_figures.rooflines(lines, [read_ceilings(one.ceilings) for one in found], commands, runs),
        curves=report_figures.curve_cards(of_ops, [one.fixtures for one in found], runs),
        waterfalls=[
            card for run, one in each for card in report_measured.waterfall_cards(run, one, commands, runs[run])
        ],
        sections=sections,
        tables=tables,
        fixtures=report_figures.fixture_cards([one.fixtures for one in found], commands, runs),
        parts=PART_OF,
        environments=[(runs[run], flat(one.environment), flat(one.request), flat(one.ceilings)) for run, one in each],
        commands=_json(commands.listed),
        script=script(),
        script_hash=script_hash(),
        rows=sum(len(one.rows) for one in found),
        bad=BAD,
    )


def _statuses(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """How many lines have each status, the worst first: the choices of the filter."""
    statuses = [line.status for line in lines]
    return [(status, statuses.count(status)) for status in reversed(SEVERITY) if status in statuses]


def _json(value: object) -> Markup:
    """JSON that stays inside its script element: no '<' is left that could close it."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@cache
def script() -> Markup:
    """The page's script."""
    return Markup((resources.files("gem.harness") / "templates" / "report.js").read_text(encoding="utf-8"))


@cache
def script_hash() -> str:
    """The script's SHA-256 as a content policy wants it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()


@cache
def _template():
    environment = Environment(
        loader=PackageLoader("gem.harness", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")
