"""What the report's views are made of: the rows of a document as lines of a table, and figures with their numbers."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from markupsafe import Markup

from gem.harness import names
from gem.harness.results import Row, Status, worst
from gem.harness.svg import Role, number
from gem.harness.table import TIMED
from gem.harness.timing import CONFIDENCE, summarize

# Metrics with a column of their own, and its heading; all others share the column "other".
COLUMNS = {
    "ms": "ms",
    "interval": "95 % interval",
    "tflops": "TFLOP/s",
    "gbps": "GB/s",
    "roofline": "roofline",
    "ratios": "speed-up over",
    "max_error": "max error",
    "other": "other",
}
BAD: tuple[Status, ...] = ("fail", "error", "oom")


@dataclass
class Line:
    """All rows of one contestant in one direction of one case: one line of a table."""

    suite: str
    case: str
    direction: str
    impl: str
    rows: list[Row] = field(default_factory=list)

    @property
    def role(self) -> Role:
        """A declared peer is one; every other contestant is the subject of its case."""
        return "peer" if self.impl in names.PEERS else "subject"

    @property
    def status(self) -> Status:
        """The worst of its rows."""
        return worst([row.status for row in self.rows])

    def row(self, metric: str) -> Row | None:
        """The first row of that metric."""
        return next((row for row in self.rows if row.metric == metric), None)

    def value(self, metric: str) -> float | None:
        """Its value, None where there is no such row or no value."""
        row = self.row(metric)
        return row.value if row else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """What holds the true median with 95 % confidence, in ms, or in 1/s for a race; None with too few timings."""
        row = next(filter(None, map(self.row, TIMED)), None)
        if row is None or not row.samples:
            return None
        found = summarize(row.samples, CONFIDENCE)
        return (found.low, found.high) if found.confidence >= CONFIDENCE else None

    @property
    def reason(self) -> str:
        """The reasons of its rows, each once."""
        return _reasons(self.rows)

    @property
    def problem(self) -> str:
        """The reasons of the rows that decide its status, without the notes of those that passed."""
        return _reasons([row for row in self.rows if row.status == self.status])

    @property
    def cells(self) -> dict[str, str]:
        """Column of COLUMNS → its text; every row is in one of them."""
        shown = {name: number(row.value) for name in COLUMNS if (row := self.row(name))}
        if span := self.interval:
            shown["interval"] = f"{number(span[0])} to {number(span[1])}"
        ratios, other = [], []
        for row in self.rows:
            if row is self.row(row.metric) and row.metric in COLUMNS:
                continue
            if row.metric.startswith(names.RATIO_PREFIX):
                times = "–" if row.value is None else f"{number(row.value)}×"
                ratios.append(f"{row.metric.removeprefix(names.RATIO_PREFIX)} {times}")
            elif row.metric:
                other.append(f"{row.metric} {number(row.value)} {row.unit}".strip())
        if ratios:
            shown["ratios"] = ", ".join(ratios)
        if other:
            shown["other"] = ", ".join(other)
        return shown


@dataclass
class Figure:
    """A plot and the numbers behind it."""

    heading: str
    note: str
    plot: Markup
    header: list[str]
    table: list[list[str]]


def _reasons(rows: Iterable[Row]) -> str:
    """Each reason once, after the metrics that gave it where the rows do not agree."""
    told: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            told.setdefault(row.reason, []).append(row.metric)
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{', '.join(filter(None, metrics))}: {text}".lstrip(": ") for text, metrics in told.items())


def lines_of(rows: Iterable[Row]) -> list[Line]:
    """One line a case, direction and contestant, in the order of the rows."""
    found: dict[tuple[str, str, str, str], Line] = {}
    for row in rows:
        key = (row.suite, row.case, row.direction, row.impl)
        found.setdefault(key, Line(*key)).rows.append(row)
    return list(found.values())


def by_case(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """(suite, case) → its lines."""
    cases: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        cases.setdefault((line.suite, line.case), []).append(line)
    return cases
