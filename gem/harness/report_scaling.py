"""Scaling in the report: a rank's work, bytes and memory against the number of ranks, a line a plan.

A case is a plan on so many ranks, ``fsdp-4``: it has a row ``ranks``. Bytes by collective and tier, which would be a
column each, stand in a table of their own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from markupsafe import Markup

from gem.harness import names, svg
from gem.harness.report_commands import Commands
from gem.harness.report_lines import BAD, Card, Cell, Column, Line, Table, TableRow
from gem.harness.report_tables import shown, who
from gem.harness.svg import number, shorten

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 308, 56, 34, 118, 42
LABEL_GAP = 15  # between the labels at the ends of two lines
COLOURS = 8  # of lines: classes k0, k1, … of the page
# What is drawn: metric, factor, unit, and what it is.
DRAWN: tuple[tuple[str, float, str, str], ...] = (
    (
        "work_ratio", 100.0, "%",
        "the Scaling Ratio in CPU time: one process's, for a rank's share of the work, over the heaviest rank's. "
        "No speed-up: it knows no waiting and no network, and the ranks share what cores there are",
    ),
    ("cpu_ms", 1.0, "ms", "CPU time of a step, of the rank that needs most"),
    ("bytes_sent", 2**-20, "MiB", "to other ranks in a step, of the rank that sends most"),
    ("memory_tables", 2**-20, "MiB", "weights and optimizer state of the tables, of the rank that holds most"),
    ("memory_dense", 2**-20, "MiB", "dense parameters between steps, of the rank that holds most"),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One line of a plot: a plan's cases by their number of ranks."""

    label: str
    colour: int
    cases: dict[int, Line]

    def points(self, metric: str) -> list[tuple[int, float]]:
        """(ranks, value), ascending; of cases that failed nothing is joined."""
        values = ((ranks, one.value(metric)) for ranks, one in sorted(self.cases.items()) if not one.wrong)
        return [(ranks, value) for ranks, value in values if value is not None and math.isfinite(value)]


def plans(lines: Iterable[Line]) -> list[Plan]:
    """Of one suite of one run, those that ran on several numbers of ranks."""
    found: dict[str, dict[int, Line]] = {}
    for line in lines:
        ranks = line.value("ranks")
        if ranks is not None and ranks >= 1:
            found.setdefault(line.case.removesuffix(f"-{ranks:.0f}"), {})[round(ranks)] = line
    several = {name: cases for name, cases in found.items() if len(cases) > 1}
    return [Plan(name, place % COLOURS, cases) for place, (name, cases) in enumerate(several.items())]


def cards(suite: str, lines: Sequence[Line], commands: Commands, runs: Sequence[str]) -> list[Card]:
    """A plot a metric, and the bytes by collective and tier; for each run."""
    made = []
    for run, name in enumerate(runs):
        found = plans(line for line in lines if line.run == run)
        for metric, factor, unit, about in DRAWN:
            drawn = [plan for plan in found if plan.points(metric)]
            if drawn:
                heading = " · ".join(filter(None, (metric, name)))
                picture = plot(drawn, metric, factor, unit, f"{metric} of {suite} against ranks")
                table = _numbers(suite, metric, drawn, commands)
                better = names.METRICS[metric].better
                made.append(Card(heading, f"{about}; {better} is better", table, picture, about=suite))
        if any(_sent(line) for plan in found for line in plan.cases.values()):
            made.append(_bytes_card(suite, found, commands, name))
    return made


def without_parts(lines: Sequence[Line]) -> list[Line]:
    """The lines, without rows that a card of ``cards`` shows each with its number."""
    several = {id(line) for run in {line.run for line in lines} for line in _drawn(lines, run)}
    return [
        replace(line, rows=[row for row in line.rows if not (_is_part(row.metric) and row.status not in BAD)])
        if id(line) in several
        else line
        for line in lines
    ]


def _drawn(lines: Sequence[Line], run: int) -> list[Line]:
    return [line for plan in plans(one for one in lines if one.run == run) for line in plan.cases.values()]


def _is_part(metric: str) -> bool:
    return metric.startswith(names.SENT_PREFIX)


def _sent(line: Line) -> dict[str, float]:
    """Bytes by collective and tier."""
    rows = (row for row in line.rows if _is_part(row.metric) and row.value is not None)
    return {row.metric.removeprefix(names.SENT_PREFIX): row.value or 0.0 for row in rows}


def _numbers(suite: str, metric: str, found: Sequence[Plan], commands: Commands) -> Table:
    ranks = sorted({count for plan in found for count in plan.cases})
    columns = [Column("plan", "text"), *(Column(_ranks(count)) for count in ranks)]
    rows = []
    for plan in found:
        cells = [Cell(plan.label)]
        for count in ranks:
            line = plan.cases.get(count)
            value = line.value(metric) if line else None
            cells.append(Cell(shown(metric, value), value, failed=line is not None and line.wrong))
        rows.append(_row(suite, plan, cells, commands))
    return Table(f"{metric} of {suite} by ranks", columns, [("", rows)], sortable=False)


def _bytes_card(suite: str, found: Sequence[Plan], commands: Commands, run: str) -> Card:
    ranks = sorted({count for plan in found for count in plan.cases if count > 1})
    columns = [Column("sent for", "text"), Column("tier", "text"), *(Column(f"{_ranks(n)}, B") for n in ranks)]
    groups = []
    for plan in found:
        sent = {count: _sent(line) for count, line in plan.cases.items()}
        rows = []
        for kind in dict.fromkeys(kind for of_one in sent.values() for kind in of_one):
            what, _, tier = kind.rpartition(".")
            values = [sent.get(count, {}).get(kind) for count in ranks]
            cells = [Cell(what.replace("_", " ")), Cell(tier)]
            cells += [Cell("–" if value is None else f"{value:,.0f}", value) for value in values]
            rows.append(_row(suite, plan, cells, commands))
        if rows:
            groups.append((plan.label, rows))
    note = "by what it was for and the slowest tier that it crosses; each of the rank that sends most of it"
    heading = " · ".join(filter(None, ("bytes a rank sends in a step", run)))
    table = Table(f"Bytes of {suite}: {note}", columns, groups, sortable=False)
    return Card(heading, note, table, about=suite, folded=True)


def _row(suite: str, plan: Plan, cells: list[Cell], commands: Commands) -> TableRow:
    line = plan.cases[max(plan.cases)]
    key = commands.of_case(line.run, suite, line.case, f"{line.subject} {line.case}")
    return TableRow(cells, key, f"{who(line)} {plan.label}", line.status, line.role)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def plot(found: Sequence[Plan], metric: str, factor: float, unit: str, title: str) -> Markup:
    """Ranks on a log axis, the metric times ``factor`` from 0; a label at the end of each line."""
    counts = sorted({ranks for plan in found for ranks, _ in plan.points(metric)})
    peak = max(value for plan in found for _, value in plan.points(metric)) * factor
    low, high = math.log2(counts[0]), max(math.log2(counts[-1]), math.log2(counts[0]) + 1)

    def px(ranks: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(ranks) - low) / (high - low)

    ticks = svg.ticks(peak)

    def py(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value * factor / ticks[-1])

    parts = svg.height_axis(ticks, lambda tick: py(tick / factor), LEFT, WIDTH - RIGHT)
    parts += [svg.text(px(count), HEIGHT - BOTTOM + 16, number(count), "tick middle") for count in counts]
    parts.append(svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, "ranks", "axis middle"))
    parts.append(svg.text(4, TOP - 17, unit, "axis"))
    ends = []
    for plan in found:
        points, kind = plan.points(metric), f"k{plan.colour}"
        path = "".join(f"{'L' if i else 'M'}{px(r):.1f} {py(v):.1f}" for i, (r, v) in enumerate(points))
        parts.append(f'<path class="curve plan {kind}" d="{path}"/>')
        for ranks, value in points:
            tip = escape(f"{plan.label}, {_ranks(ranks)}: {number(value * factor)} {unit}")
            place = f'cx="{px(ranks):.1f}" cy="{py(value):.1f}"'
            parts.append(f'<circle class="point plan {kind}" {place} r="3.5"><title>{tip}</title></circle>')
        ends.append((py(points[-1][1]), px(points[-1][0]), plan))
    previous, near = -math.inf, WIDTH - RIGHT + 14
    for y, x, plan in sorted(ends, key=lambda end: end[0]):
        at = max(y + 4, previous + LABEL_GAP)
        previous = at
        parts.append(svg.line(x + 5, y, near - 3, at - 4, "leader"))
        parts.append(svg.text(near, at, shorten(plan.label, 16), f"label plan k{plan.colour}", plan.label))
    told = "; ".join(
        f"{plan.label}: " + ", ".join(f"{number(v * factor)} on {r}" for r, v in plan.points(metric)) for plan in found
    )
    return svg.drawing(WIDTH, max(HEIGHT, math.ceil(previous + 6)), title, f"{unit} by ranks. {told}.", parts)
