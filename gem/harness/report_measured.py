"""The report's views of measured cases: a table of metrics a suite, and where the time of a training step went."""

from collections.abc import Iterable
from dataclasses import dataclass

from gem.harness import names, plots
from gem.harness.report_lines import BAD, Figure, Line, by_case
from gem.harness.results import Document, waterfall_key
from gem.harness.svg import number
from gem.harness.table import TIMED, quantity


@dataclass
class MeasuredLine:
    """One contestant of one case: its cells by metric, those whose bound is broken among `failed`."""

    line: Line
    cells: dict[str, str]
    failed: frozenset[str]


@dataclass
class MeasuredSuite:
    """A table: metric → heading, and the lines of each case."""

    name: str
    columns: dict[str, str]
    cases: list[tuple[str, list[MeasuredLine]]]


def measured_suites(lines: Iterable[Line]) -> list[MeasuredSuite]:
    """The suites whose rows have a metric and no direction; a suite has one subject, so all of its lines go with it."""
    suites: dict[str, list[Line]] = {}
    for line in lines:
        suites.setdefault(line.suite, []).append(line)
    views = []
    for suite, own in suites.items():
        metrics = dict.fromkeys(row.metric for line in own for row in line.rows if row.metric)
        if any(not line.direction and any(row.metric for row in line.rows) for line in own):
            cases = [(case, [_measured(line) for line in of_case]) for (_, case), of_case in by_case(own).items()]
            views.append(MeasuredSuite(suite, {metric: _heading(metric) for metric in metrics}, cases))
    return views


def _heading(metric: str) -> str:
    """``max_over_mean ↓``: the arrow says which way is better."""
    known = names.metric(metric)
    shown = metric.replace(names.RATIO_PREFIX, "× ")
    if known is None:
        return shown
    unit = "" if known.unit in ("", "share", "x", "B") else f" {known.unit}"
    return f"{shown}{unit} {'↑' if known.better == 'higher' else '↓'}"


def _measured(line: Line) -> MeasuredLine:
    cells: dict[str, list[str]] = {}
    for row in line.rows:
        if row.metric:
            cells.setdefault(row.metric, []).append("–" if row.value is None else quantity(row.metric, row.value))
    span = line.interval
    for metric in TIMED:
        if metric in cells and span:
            cells[metric].append(f"({number(span[0])} to {number(span[1])})")
    failed = frozenset(row.metric for row in line.rows if row.status in BAD and row.metric)
    return MeasuredLine(line, {metric: " ".join(texts) for metric, texts in cells.items()}, failed)


def waterfall_figures(document: Document) -> list[Figure]:
    """A figure a contestant; those of one case on one scale."""
    figures = []
    cases = {waterfall_key(row.case_id, row.impl): (row.case_id, row.case, row.impl) for row in document.rows}
    longest: dict[str, float] = {}
    for key, parts in document.waterfalls.items():
        case_id = cases[key][0]
        longest[case_id] = max(longest.get(case_id, 0.0), sum(part.ms for part in parts))
    for key, parts in document.waterfalls.items():
        case_id, case, impl = cases[key]
        step = sum(part.ms for part in parts)
        slices = [(part.part, part.ms, part.of) for part in parts]
        plot = plots.waterfall(slices, title=f"{case}, {impl}: a step's time", limit=longest[case_id])
        header = ["part", "of", "ms", "share of the step"]
        table = [
            [part.part, part.of, number(part.ms), f"{number(100 * part.ms / step)} %" if step > 0 else "–"]
            for part in parts
        ]
        figures.append(Figure(f"{case}, {impl}", case_id.rpartition("::")[0], plot, header, table))
    return figures
