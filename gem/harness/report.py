"""The HTML report of one run: a single file with inline styles and drawings, readable without a network or scripts.

`render` turns a results document into views (plain dataclasses, below) that templates/report.html.j2 lays out. Every
row of the document ends in the tables, also those that failed or were skipped; jinja2 escapes every text.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from jinja2 import Environment, PackageLoader, StrictUndefined

from gem.errors import RequestError
from gem.harness import plots
from gem.harness.plots import Bar, Ceilings, Point
from gem.harness.report_lines import BAD, COLUMNS, Figure, Line, by_case, lines_of
from gem.harness.report_measured import measured_suites, waterfall_figures
from gem.harness.results import PART_OF, Document, case_status, write_text
from gem.harness.svg import number


@dataclass
class CaseView:
    """The lines of one case."""

    name: str
    lines: list[Line]


@dataclass
class SuiteView:
    """A table: its cases, and the columns that any of its lines fills."""

    name: str
    cases: list[CaseView]
    columns: dict[str, str]


def write_report(document: Document, path: str | Path, *, title: str | None = None) -> Path:
    """Write the report of `document` to `path`, whole or not at all. Raises RequestError when it cannot be written."""
    return write_text(path, render(document, title=title))


def render(document: Document, *, title: str | None = None) -> str:
    """The report as one HTML text that refers to nothing outside itself."""
    lines = lines_of(document.rows)
    measured = measured_suites(lines)
    of_ops = [line for line in lines if line.suite not in {suite.name for suite in measured}]
    ceilings = read_ceilings(document.ceilings)
    statuses = list(case_status(document.rows).values())
    environment = document.environment
    machine = environment.get("gpu") or environment.get("cpu") or environment.get("device") or "unknown machine"
    command = "gem train" if document.rows and all(row.suite == "train" for row in document.rows) else "gem run"
    return _template().render(
        title=title or f"{command} on {machine}",
        heading=title or command,
        subtitle=_subtitle(environment, machine),
        counts=[(status, statuses.count(status)) for status in ("pass", *BAD, "skipped") if status in statuses],
        cases=len(statuses),
        rows=sum(len(line.rows) for line in of_ops),
        problems=[line for line in lines if line.status in BAD],
        skipped=_skipped(lines),
        figures=_case_figures(lines),
        roofline=_roofline(lines, ceilings),
        fixtures=_fixture_figures(document.fixtures),
        suites=_suites(of_ops),
        measured=measured,
        waterfalls=waterfall_figures(document),
        parts=PART_OF,
        environment=flat(environment),
        request=flat(document.request),
        ceilings=flat(document.ceilings),
    )


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(name, text) of every value; nested names are joined by dots, None and empty are a dash."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        label = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            pairs += flat(value, f"{label}.")
        elif isinstance(value, bool) or value is None or value == "" or value == {}:
            pairs.append((label, "yes" if value is True else "no" if value is False else "–"))
        elif isinstance(value, int):
            pairs.append((label, f"{value:,}"))
        elif isinstance(value, float):
            pairs.append((label, number(value, 4)))
        elif isinstance(value, list | tuple):
            pairs.append((label, " ".join(str(one) for one in value) or "–"))
        else:
            pairs.append((label, str(value)))
    return pairs


def read_ceilings(ceilings: dict[str, Any]) -> Ceilings:
    """The measured ceilings {"tflops": {dtype: TFLOP/s}, "gbps": GB/s}, without what is no positive number."""
    peaks = ceilings.get("tflops")
    known = {str(k): float(v) for k, v in peaks.items() if _positive(v)} if isinstance(peaks, dict) else {}
    copy = ceilings.get("gbps")
    return Ceilings(known, float(copy) if _positive(copy) else None)


def _real(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any) -> TypeGuard[float]:
    return _real(value) and value > 0


def _subtitle(environment: dict[str, Any], machine: str) -> str:
    commit = str(environment.get("git_commit") or "")[:12]
    dirty = " with uncommitted changes" if environment.get("git_dirty") else ""
    torch = environment.get("torch")
    parts = [environment.get("time"), machine, f"torch {torch}" if torch else None]
    return " · ".join(str(part) for part in [*parts, f"commit {commit}{dirty}" if commit else None] if part)


def _skipped(lines: Iterable[Line]) -> list[tuple[str, list[str]]]:
    """Reason → what it skipped, the most frequent first."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.status == "skipped":
            what = " ".join(filter(None, (line.case, line.impl, line.direction)))
            found.setdefault(line.reason or "no reason given", []).append(what)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _suites(lines: Iterable[Line]) -> list[SuiteView]:
    suites: dict[str, list[CaseView]] = {}
    for (suite, case), own in by_case(lines).items():
        suites.setdefault(suite, []).append(CaseView(case, own))
    views = []
    for suite, cases in suites.items():
        filled = {name for case in cases for line in case.lines for name in line.cells}
        views.append(SuiteView(suite, cases, {name: head for name, head in COLUMNS.items() if name in filled}))
    return views


def _case_figures(lines: Iterable[Line]) -> list[Figure]:
    """Bars of every case in which anything was timed: its contestants side by side, a group a direction."""
    figures = []
    for (suite, case), own in by_case(lines).items():
        race = any(line.value("qps") is not None for line in own)
        if race and len(own) == 1:
            continue  # a training run by itself: nobody to compare it with
        timed = [line for line in own if line.value("qps" if race else "ms") is not None]
        if not timed:
            continue
        if race:
            figures.append(_race_figure(suite, case, own))
            continue
        # Work per second where all have it; a contestant without useful FLOPs can only be compared by its time.
        metric = "tflops" if all(_positive(line.value("tflops")) for line in timed) else "ms"
        small = metric == "tflops" and max(line.value("tflops") or 0 for line in timed) < 1
        factor, unit = (1000, "GFLOP/s") if small else (1, "TFLOP/s" if metric == "tflops" else "ms")
        groups: dict[str, list[Bar]] = {}
        for line in own:
            if line.row("ms") or line.row("tflops") or line.status in (*BAD, "skipped"):
                groups.setdefault(line.direction or "all directions", []).append(_bar(line, metric, factor))
        better = "lower" if metric == "ms" else "higher"
        plot = plots.bars(list(groups.items()), unit=unit, title=f"{case}: {unit} against peers", better=better)
        note = f"{suite} · {unit}, {better} is better; whisker: 95 % interval of the median"
        header = ["direction", "contestant", "status", "ms", COLUMNS["interval"], "TFLOP/s", "roofline"]
        keys = ("ms", "interval", "tflops", "roofline")
        table = [[o.direction, o.impl, o.status, *(o.cells.get(key, "–") for key in keys)] for o in own]
        figures.append(Figure(case, note, plot, header, table))
    return figures


def _race_figure(suite: str, case: str, lines: list[Line]) -> Figure:
    """Bars of a race: samples a second, each contestant at its own batch size."""
    bars = [_bar(line, "qps", 1.0) for line in lines if line.row("qps")]
    plot = plots.bars([("training", bars)], unit="samples/s", title=f"{case}: samples/s against peers")
    note = f"{suite} · samples/s, higher is better; whisker: 95 % interval of the median"
    header = ["contestant", "status", "samples/s", COLUMNS["interval"], "batch and remarks"]
    table = [
        [o.impl, o.status, number(o.value("qps")), o.cells.get("interval", "–"), row.reason]
        for o in lines
        if (row := o.row("qps"))
    ]
    return Figure(case, note, plot, header, table)


def _bar(line: Line, metric: str, factor: float) -> Bar:
    value, ms, span = line.value(metric), line.value("ms"), line.interval
    low = high = None
    if span and value is not None and (ms or metric == "qps") and min(span) > 0:
        # The interval is of the times; work per second goes with their inverse.
        low, high = span if metric in ("ms", "qps") else (value * (ms or 0) / span[1], value * (ms or 0) / span[0])
    note = f"{line.status}: {line.problem}" if line.problem else line.status
    scaled = [None if one is None else one * factor for one in (value, low, high)]
    return Bar(line.impl, *scaled, role=line.role, note=note, failed=line.status in BAD)


def _roofline(lines: Iterable[Line], ceilings: Ceilings) -> Figure | None:
    points: list[Point] = []
    for line in lines:
        tflops, gbps = line.value("tflops"), line.value("gbps")
        if tflops is not None and gbps is not None and tflops > 0 and gbps > 0:
            label = f"{line.case} {line.impl} {line.direction}"
            intensity = 1000 * tflops / gbps
            points.append(Point(label, intensity, tflops, line.role, line.direction, line.status in BAD))
    if not points:
        return None
    table = [[p.label, number(p.intensity), number(p.tflops), "failed" if p.failed else "–"] for p in points]
    return Figure(
        "Roofline",
        "Useful FLOPs and the bytes that must move at least once, against the ceilings measured in this run.",
        plots.roofline(points, ceilings, title="Roofline of all contestants"),
        ["contestant", "FLOP/byte", "TFLOP/s", "note"],
        table,
    )


def _fixture_figures(fixtures: dict[str, Any]) -> list[Figure]:
    """Length histograms of a fixture: one a side, or one for both where queries and keys have the same lengths."""
    figures = []
    for fixture, stats in fixtures.items():
        if not isinstance(stats, dict):
            continue
        sides = {side: own for side, own in stats.items() if isinstance(own, dict) and "histogram" in own}
        if len(sides) == 2 and len({repr(own) for own in sides.values()}) == 1:
            sides = {" = ".join(sides): next(iter(sides.values()))}
        batch = stats.get("batch")
        size = f"{batch:,} samples" if isinstance(batch, int) else ""
        for side, own in sides.items():
            key = " · ".join(
                f"{name} {number(own[name])}" for name in ("p50", "p90", "p99", "max") if _real(own.get(name))
            )
            note = ". ".join(filter(None, (" · ".join(filter(None, (size, key))), str(stats.get("source") or ""))))
            try:
                edges, counts = own["histogram"]["edges"], own["histogram"]["counts"]
                plot = plots.histogram(
                    edges, counts, title=f"{fixture}, {side}: lengths", axis=f"{side} rows per sample"
                )
            except (TypeError, KeyError, ValueError) as error:
                accepted = "edges (one more) and counts, both lists of numbers"
                where = f"fixtures.{fixture}.{side}.histogram"
                raise RequestError(f"{where}: {plots.shorten(repr(error), 120)}; accepted: {accepted}") from error
            about = {k: v for k, v in stats.items() if not isinstance(v, dict)}
            numbers = [[k, v] for k, v in flat(about | {k: v for k, v in own.items() if k != "histogram"})]
            bins = [[f"{a:g} to below {b:g}", str(n)] for a, b, n in zip(edges, edges[1:], counts, strict=False) if n]
            figures.append(Figure(f"{fixture}, {side}", note, plot, ["length", "value"], numbers + bins))
    return figures


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
