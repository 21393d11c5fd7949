"""The report's cards of ops: bars of every case against its peers, roofline, work against length, lengths."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from gem.errors import RequestError
from gem.harness import plots, report_curve
from gem.harness.plots import Bar, Ceilings, Point
from gem.harness.report_commands import Commands
from gem.harness.report_lines import BAD, TERA, Card, Cell, Column, Line, Table, TableRow, by_case
from gem.harness.report_tables import cell_of, flops_column, shown, who
from gem.harness.svg import number
from gem.harness.table import number as figure


@dataclass(frozen=True)
class Cards:
    """Cards under a heading: those of one subject of one run."""

    heading: str
    cards: list[Card]


def real(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def positive(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number above 0."""
    return real(value) and value > 0


def read_ceilings(ceilings: dict[str, Any]) -> Ceilings:
    """The measured ceilings {"tflops": {dtype: TFLOP/s}, "gbps": GB/s}, without what is no positive number."""
    peaks = ceilings.get("tflops")
    known = {str(k): float(v) for k, v in peaks.items() if positive(v)} if isinstance(peaks, dict) else {}
    copy = ceilings.get("gbps")
    return Ceilings(known, float(copy) if positive(copy) else None)


def case_cards(lines: Iterable[Line], commands: Commands, runs: Sequence[str]) -> list[Cards]:
    """Bars of every case with somebody to compare with: its contestants under each other, a group a direction."""
    found: dict[tuple[int, str], list[Card]] = {}
    for (run, suite, case), own in by_case(lines).items():
        race = any(line.value("qps") is not None for line in own)
        timed = [line for line in own if line.value("qps" if race else "ms") is not None]
        if timed and len({line.impl for line in own if line.impl}) > 1:
            key = commands.of_case(run, suite, case, f"{own[0].subject} {case}")
            found.setdefault((run, suite), []).append(_race_card(key, own) if race else _case_card(key, own, timed))
    return [Cards(_of_run(suite, runs[run]), cards) for (run, suite), cards in found.items()]


def _of_run(suite: str, run: str) -> str:
    return f"{suite} · {run}" if run else suite


def _case_card(key: int, own: list[Line], timed: list[Line]) -> Card:
    # Work per second where all have it; a contestant without useful FLOPs can only be compared by its time.
    metric = "tflops" if all(positive(line.value("tflops")) for line in timed) else "ms"
    factor, unit = own[0].flops if metric == "tflops" else (1.0, "ms")
    groups: dict[str, list[Line]] = {}
    for line in own:
        if line.row("ms") or line.row("tflops") or line.status in (*BAD, "skipped"):
            groups.setdefault(line.direction or "all directions", []).append(line)
    better = "lower" if metric == "ms" else "higher"
    return _bar_card(key, groups, metric, factor, unit, better)


def _race_card(key: int, own: list[Line]) -> Card:
    return _bar_card(key, {"training": [line for line in own if line.row("qps")]}, "qps", 1.0, "samples/s", "higher")


def _bar_card(key: int, groups: dict[str, list[Line]], metric: str, factor: float, unit: str, better: str) -> Card:
    limit = plots.bar_limit([bar_of(line, metric, factor) for lines in groups.values() for line in lines])
    columns = [Column("contestant", "text"), Column("", "bar"), Column(unit, after=f" {unit}")]
    columns += [] if metric in ("ms", "qps") else [Column("ms", after=" ms")]
    rows: list[tuple[str, list[TableRow]]] = []
    for direction, lines in groups.items():
        made = []
        for line in lines:
            bar = bar_of(line, metric, factor)
            absent = line.problem or "not measured" if bar.value is None else ""
            spread = cell_of(line, metric).more if metric in ("ms", "qps") else cell_of(line, "ms").more
            cells = [Cell(line.impl or "–", role=line.role)]
            if bar.value is None:
                cells.append(Cell(f"{line.status}: {absent}" if line.status != "pass" else absent, role="absent"))
            else:
                cells.append(Cell(plots.bar(bar, limit, unit)))
            cells.append(Cell("–" if bar.value is None else figure(bar.value), bar.value, spread, bar.failed))
            if metric not in ("ms", "qps"):
                cells.append(Cell(shown("ms", line.value("ms")), line.value("ms"), spread))
            made.append(TableRow(cells, key, who(line), line.status, line.role))
        rows.append((direction, made))
    some = next(line for lines in groups.values() for line in lines)
    table = Table(f"{some.case}: {unit}, {better} is better", columns, rows, sortable=False)
    return Card(some.case, f"{unit}, {better} is better", table, about=f"{some.suite} {some.case}", folded=False)


def bar_of(line: Line, metric: str, factor: float = 1.0) -> Bar:
    """The bar of a line's metric; its interval is of the times, and work per second goes with their inverse."""
    value, ms, span = line.value(metric), line.value("ms"), line.interval
    low = high = None
    if span and value is not None and min(span) > 0:
        if line.timed is line.row(metric):
            low, high = span
        elif metric == "tflops" and ms:
            low, high = value * ms / span[1], value * ms / span[0]
    scaled = [None if one is None else one * factor for one in (value, low, high)]
    note = f"{line.status}: {line.problem}" if line.problem else line.status
    return Bar(line.impl, *scaled, role=line.role, note=note, failed=line.wrong)


def rooflines(
    lines: Sequence[Line], ceilings: Sequence[Ceilings], commands: Commands, runs: Sequence[str]
) -> list[Card]:
    """A roofline a run, since each has measured its own ceilings."""
    cards = []
    for run, roofs in enumerate(ceilings):
        points: list[Point] = []
        rows: list[TableRow] = []
        factor, unit = next((line.flops for line in lines if line.run == run), TERA)
        for line in lines:
            tflops, gbps = line.value("tflops"), line.value("gbps")
            if line.run != run or not positive(tflops) or not positive(gbps):
                continue
            intensity = 1000 * tflops / gbps
            failed = line.wrong
            label = f"{line.case} {line.impl} {line.direction}"
            points.append(Point(label, intensity, tflops, line.role, line.direction, failed))
            key = commands.of_case(run, line.suite, line.case, f"{line.subject} {line.case}")
            cells = [Cell(line.subject), Cell(line.case), Cell(line.impl, role=line.role), Cell(line.direction or "–")]
            cells += [Cell(number(intensity), intensity), Cell(number(tflops * factor), tflops, failed=failed)]
            rows.append(TableRow(cells, key, who(line), line.status, line.role))
        if points:
            heads = ("subject", "case", "contestant", "direction")
            columns = [*(Column(head, "text") for head in heads), Column("FLOP/byte", after=" FLOP/byte")]
            columns.append(flops_column([(factor, unit)]))
            table = Table(f"Roofline{f' of {runs[run]}' if runs[run] else ''}: its points", columns, [("", rows)])
            note = (
                "Useful FLOPs, and the bytes that must move at least once, against the ceilings measured in this run."
            )
            title = f"Roofline of all contestants {runs[run]}".strip()
            plot = plots.roofline(points, roofs, title=title, flops=(factor, unit))
            cards.append(Card(runs[run] or "All contestants", note, table, plot))
    return cards


def curve_cards(lines: Iterable[Line], fixtures: Sequence[dict[str, Any]], runs: Sequence[str]) -> list[Card]:
    """Work per second against the fixture's mean length, a card a family of cases and direction."""
    lines = list(lines)
    units = {line.run: line.flops for line in lines}
    cards = []
    for (run, suite, family, direction), curves in report_curve.families(lines, fixtures).items():
        heading = " ".join(filter(None, (Line(run, suite, "", "", "").subject, family, direction)))
        joined, lone = (
            ", ".join(f"{name} {number(round(length))}" for length, name in sorted(points))
            for points in (
                {(length, name) for one in curves for length, _, name in one.points},
                {(length, name) for one in curves for length, _, name in one.lone},
            )
        )
        told = f"Mean lengths: {joined}{f'; all of one length: {lone}' if lone else ''}"
        plot = report_curve.plot(curves, title=f"{heading}: work per second against length", flops=units[run])
        cards.append(Card(heading, _of_run(told, runs[run]), None, plot))
    return cards


def fixture_cards(fixtures: Sequence[dict[str, Any]], commands: Commands, runs: Sequence[str]) -> list[Card]:
    """Length histograms of all runs' fixtures; those that several runs share once, with the names of the runs."""
    found: dict[tuple[str, str], list[int]] = {}
    for run, own in enumerate(fixtures):
        for name, stats in own.items():
            if isinstance(stats, dict):
                found.setdefault((name, repr(stats)), []).append(run)
    cards = []
    for (name, _), shared in found.items():
        told = ", ".join(filter(None, (runs[run] for run in shared)))
        cards += _sides(name, fixtures[shared[0]][name], shared[0], commands, told)
    return cards


def _sides(fixture: str, stats: dict[str, Any], run: int, commands: Commands, told: str) -> list[Card]:
    """A card a side, or one for both where queries and keys have the same lengths."""
    cards = []
    sides = {side: own for side, own in stats.items() if isinstance(own, dict) and "histogram" in own}
    if len(sides) == 2 and len({repr(own) for own in sides.values()}) == 1:
        sides = {" = ".join(sides): next(iter(sides.values()))}
    batch = stats.get("batch")
    size = f"{batch:,} samples" if isinstance(batch, int) else ""
    for side, own in sides.items():
        key = " · ".join(f"{one} {number(own[one])}" for one in ("p50", "p90", "p99", "max") if real(own.get(one)))
        note = ". ".join(filter(None, (" · ".join(filter(None, (size, key))), str(stats.get("source") or ""), told)))
        try:
            edges, counts = own["histogram"]["edges"], own["histogram"]["counts"]
            plot = plots.histogram(edges, counts, title=f"{fixture}, {side}: lengths", axis=f"{side} rows per sample")
        except (TypeError, KeyError, ValueError) as error:
            accepted = "edges (one more) and counts, both lists of numbers"
            where = f"fixtures.{fixture}.{side}.histogram"
            raise RequestError(f"{where}: {plots.shorten(repr(error), 120)}; accepted: {accepted}") from error
        about = {k: v for k, v in stats.items() if not isinstance(v, dict)}
        pairs = flat(about | {k: v for k, v in own.items() if k != "histogram"})
        pairs += [(f"{a:g} to below {b:g}", f"{n:,}") for a, b, n in zip(edges, edges[1:], counts, strict=False) if n]
        number_of = commands.of_run(run, f"lengths of {fixture}, {side}:")
        rows = [TableRow([Cell(one), Cell(value)], number_of, one) for one, value in pairs]
        columns = [Column("length", "text"), Column("value")]
        table = Table(f"{fixture}, {side}", columns, [("", rows)], sortable=False)
        cards.append(Card(f"{fixture}, {side}", note, table, plot, about=fixture))
    return cards


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(name, text) of every value; nested names are joined by dots and numbered from 1, None and empty are a dash."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        label = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            pairs += flat(value, f"{label}.")
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            pairs += flat({str(k): one for k, one in enumerate(value, 1)}, f"{label}.")
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
