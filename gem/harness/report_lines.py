"""What the views of the report are made of: rows as lines, tables of cells, cards with a drawing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from markupsafe import Markup

from gem.harness import names
from gem.harness.results import Row, Status, worst
from gem.harness.svg import Role
from gem.harness.table import TIMED, flops_unit
from gem.harness.table import lines_of as table_lines
from gem.harness.timing import CONFIDENCE, Summary, summarize

BAD: tuple[Status, ...] = ("fail", "oom", "error")  # from harmless to worst, as results.SEVERITY

TERA = (1.0, "TFLOP/s")


@dataclass
class Line:
    """All rows of one contestant in one direction of one case of run number `run`: one line of a table."""

    run: int
    suite: str
    case: str
    direction: str
    impl: str
    rows: list[Row] = field(default_factory=list)
    flops: tuple[float, str] = TERA  # factor from TFLOP/s and unit, one for all lines of its document

    @property
    def subject(self) -> str:
        """``jagged_attention`` of suites/throughput/jagged_attention.toml."""
        return PurePath(self.suite).stem

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
    def timed(self) -> Row | None:
        """The row with the single measurements behind it: ms, or qps of a race."""
        return next((row for metric in TIMED if (row := self.row(metric)) and row.value is not None), None)

    @property
    def summary(self) -> Summary | None:
        """Of those measurements; None where there are too few for the interval of the median."""
        row = self.timed
        found = summarize(row.samples, CONFIDENCE) if row is not None and row.samples else None
        return found if found is not None and found.confidence >= CONFIDENCE else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """What holds the true median with 95 % confidence, in ms, or in 1/s for a race; None with too few timings."""
        found = self.summary
        return (found.low, found.high) if found is not None else None

    @property
    def wrong(self) -> bool:
        """Whether what it did itself is at fault, not alone how it stands to a peer."""
        return any(row.status in BAD for row in self.rows if not row.metric.startswith(names.RATIO_PREFIX))

    @property
    def reason(self) -> str:
        """The reasons of its rows, each once."""
        return reasons(self.rows)

    @property
    def problem(self) -> str:
        """The reasons of the rows that decide its status, without the notes of those that passed."""
        return reasons([row for row in self.rows if row.status == self.status])


@dataclass(frozen=True)
class Column:
    """A column of a table.

    `before` and `after` are what a copied number stands between (``roofline `` 69.1 % ); `first` is the way that a
    first click sorts it: the best on top. `kind`: number, text, status, bar or notes.
    """

    head: str
    kind: str = "number"
    title: str = ""
    before: str = ""
    after: str = ""
    first: str = "ascending"


@dataclass(frozen=True)
class Cell:
    """`text` as shown, `value` to sort by, `more` what a copy says after it, `failed`: a bound is broken."""

    text: str | Markup = ""
    value: float | None = None
    more: str = ""
    failed: bool = False
    role: str = ""


@dataclass(frozen=True)
class TableRow:
    """Cells under their columns. `key` finds the case and its command, `name` says the rest of who it is."""

    cells: list[Cell]
    key: int
    name: str
    status: str = ""
    role: str = ""


@dataclass(frozen=True)
class Table:
    """A table with its caption; `groups` is (heading or "", rows), one group where it can be sorted."""

    caption: str
    columns: list[Column]
    groups: list[tuple[str, list[TableRow]]]
    sortable: bool = True
    figures: int = 0  # values of the documents behind it, where it holds results

    @property
    def size(self) -> int:
        """Rows in it."""
        return sum(len(rows) for _, rows in self.groups)


@dataclass(frozen=True)
class Card:
    """A case, a fixture or a plot: a drawing (or none) and the numbers, `folded` where the drawing comes first."""

    heading: str
    note: str
    table: Table | None
    plot: Markup | None = None
    about: str = ""  # what the filter looks into beside the table's rows
    folded: bool = True


@dataclass(frozen=True)
class Section:
    """Cards and tables under a heading of their own, as claims or scaling are."""

    id: str
    heading: str
    note: str
    parts: list[tuple[str, list[Card], Table | None]]  # heading, cards, table


def reasons(rows: Iterable[Row]) -> str:
    """Each reason once, after the metrics that gave it where the rows do not agree."""
    told: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            told.setdefault(row.reason, []).append(row.metric)
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{', '.join(filter(None, metrics))}: {text}".lstrip(": ") for text, metrics in told.items())


def lines_of(rows: Sequence[Row], run: int = 0) -> list[Line]:
    """One line a case, direction and contestant, in the order of the rows: all those of a document."""
    flops = flops_unit(table_lines(list(rows)))
    found: dict[tuple[str, str, str, str], Line] = {}
    for row in rows:
        key = (row.suite, row.case, row.direction, row.impl)
        found.setdefault(key, Line(run, *key, flops=flops)).rows.append(row)
    return list(found.values())


def by_case(lines: Iterable[Line]) -> dict[tuple[int, str, str], list[Line]]:
    """(run, suite, case) → its lines."""
    cases: dict[tuple[int, str, str], list[Line]] = {}
    for line in lines:
        cases.setdefault((line.run, line.suite, line.case), []).append(line)
    return cases


def by_suite(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Suite → its lines, of all runs."""
    suites: dict[str, list[Line]] = {}
    for line in lines:
        suites.setdefault(line.suite, []).append(line)
    return suites


KINDS = ("claim", "ablation", "scaling", "quality", "correctness", "throughput", "train")


def kind_of(suite: str) -> str:
    """The kind in a suite's path, or '': ``scaling`` of suites/scaling/bbs.toml, ``claim`` of suites/claims.toml.

    ``ablation`` of suites/throughput/gdpa_ablation.toml: what a suite is for goes before the folder that it lies in.
    """
    path = PurePath(suite)
    words = [*path.parts[:-1], path.stem, *path.stem.split("_")]
    return next((kind for kind in KINDS for word in words if word in (kind, f"{kind}s")), "")
