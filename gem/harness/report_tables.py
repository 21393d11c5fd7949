"""The report's tables of results: one line a contestant and direction, of ops and of measured subjects alike."""

import math
from collections.abc import Collection, Iterable, Sequence

from gem.harness import names
from gem.harness.names import RATIO_PREFIX
from gem.harness.report_commands import Commands
from gem.harness.report_lines import BAD, Cell, Column, Line, Table, TableRow, by_case, reasons
from gem.harness.table import TIMED, number, quantity

FIRST = ("ms", "qps", "tflops", "roofline", "gbps")  # then ratios, then all others, errors last
HEADS = {"ms": "ms", "gbps": "GB/s", "max_error": "max error"}
SELF_TOLD = ("ms", "tflops", "gbps", "qps")  # whose unit says what they are


NBSP = "\u00a0"  # an arrow stays with its word where a heading folds


def results_table(lines: Sequence[Line], commands: Commands, runs: Sequence[str], caption: str) -> Table:
    """All rows of these lines: a column a metric that any of them has, and the notes."""
    metrics = _ordered(dict.fromkeys(row.metric for line in lines for row in line.rows if row.metric))
    directed = any(line.direction for line in lines)
    several = len(runs) > 1
    # Which run a line is of stands in front only where that alone tells two lines apart.
    twice = several and len({(line.suite, line.case, line.direction, line.impl) for line in lines}) < len(lines)
    front, back = [Column("run", "text")] * twice, [Column("run", "text")] * (several and not twice)
    # The numbers stand next to what names them: a phone shows few columns at once.
    columns = [Column("case", "text"), Column("contestant", "text")] + [Column("direction", "text")] * directed + front
    units = {line.flops for line in lines}
    for metric in metrics:
        columns.append(flops_column(units) if metric == "tflops" else column_of(metric))
        if metric in TIMED:
            columns.append(Column("±", title="half of the 95 % interval of the median, relative to it", before="± "))
    columns += [Column("status", "status"), *back, Column("notes", "notes")]
    rows = []
    for (run, suite, case), own in by_case(lines).items():
        told = {line.impl for line in own if line.problem}
        for line in own:
            cells = [Cell(case), Cell(line.impl or "–", role=line.role)] + [Cell(line.direction or "–")] * directed
            cells += [Cell(runs[run])] * len(front)
            for metric in metrics:
                cells.append(cell_of(line, metric, mixed=len(units) > 1))
                if metric in TIMED:
                    cells.append(_spread(line, metric))
            cells += [Cell(line.status, role=line.status)] + [Cell(runs[run])] * len(back) + [Cell(_notes(line, told))]
            key = commands.of_case(run, suite, case, f"{line.subject} {case}")
            rows.append(TableRow(cells, key, who(line), line.status, line.role))
    figures = sum(row.value is not None for line in lines for row in line.rows)
    return Table(caption, columns, [("", rows)], figures=figures)


def who(line: Line) -> str:
    """``triton forward``."""
    return " ".join(filter(None, (line.impl, line.direction)))


def column_of(metric: str) -> Column:
    """Its heading: an arrow says which way is better where the name does not."""
    known = names.metric(metric)
    first = "descending" if known is not None and known.better == "higher" else "ascending"
    if metric.startswith(RATIO_PREFIX):
        peer = metric.removeprefix(RATIO_PREFIX)
        title = f"how many times faster than {peer}"
        return Column(f"×{NBSP}{peer}", title=title, before="", after=f"× over {peer}", first=first)
    if known is None:
        return Column(metric, before=f"{metric} ", first=first)
    unit = "" if known.unit in ("", "share", "x", "B") else f" {known.unit}"
    arrow = f"{NBSP}{'↑' if known.better == 'higher' else '↓'}"
    head = HEADS.get(metric, f"{metric}{unit}{arrow if metric not in ('roofline',) else ''}")
    return Column(head, before="" if metric in SELF_TOLD else f"{metric} ", after=unit, first=first)


def flops_column(units: Collection[tuple[float, str]]) -> Column:
    """The column of work per second in the unit of the document; of several, the cells say G or T themselves."""
    unit = next(iter(units))[1] if len(units) == 1 else "FLOP/s"
    return Column(unit, after=f" {unit}" if len(units) == 1 else unit, first="descending")


def cell_of(line: Line, metric: str, mixed: bool = False) -> Cell:
    """What the line's rows of that metric say, the first one's value to sort by.

    `mixed`: the column holds lines of documents whose unit of work per second differs.
    """
    own = [row for row in line.rows if row.metric == metric]
    if not own:
        return Cell()
    known = names.metric(metric)
    texts = []
    for row in own:
        # A unit that no heading tells stands beside the number.
        unit = f" {row.unit}" if known is None and row.unit and row.value is not None else ""
        ratio = metric.startswith(RATIO_PREFIX)
        factor, prefix = (line.flops[0], f" {line.flops[1][0]}" * mixed) if metric == "tflops" else (1.0, "")
        value = row.value and row.value * factor
        told = number(value) if ratio else shown(metric, value)
        texts.append(told + (prefix if told != "–" else "") + unit)
    spread = _spread(line, metric).text if metric in TIMED else ""
    more = f" ± {spread}" if spread and "run" not in spread else f" ({spread})" if spread else ""
    failed = any(row.status in BAD for row in own)
    return Cell(", ".join(texts), own[0].value, more, failed)


def shown(metric: str, value: float | None) -> str:
    """The value as the report shows it, '–' where there is none."""
    return "–" if value is None or not math.isfinite(value) else quantity(metric, value)


def _spread(line: Line, metric: str) -> Cell:
    row = line.timed
    if row is None or row.metric != metric:
        return Cell()
    if line.summary is None:
        count = len(row.samples)
        return Cell(f"{count} run{'s' * (count != 1)}" if count else "", role="few")
    width = 100 * line.summary.half_width
    return Cell(f"{number(width, 2)} %", width) if math.isfinite(width) else Cell()


def _notes(line: Line, told: Iterable[str]) -> str:
    """Its reasons; why a peer has no ratio stands in the peer's own line, where it has one."""

    def elsewhere(metric: str, status: str) -> bool:
        return metric.startswith(RATIO_PREFIX) and status == "skipped" and metric.removeprefix(RATIO_PREFIX) in told

    return reasons([row for row in line.rows if not elsewhere(row.metric, row.status)])


def _ordered(metrics: Iterable[str]) -> list[str]:
    """The metrics that people look for first come first."""
    found = list(metrics)
    ratios = [metric for metric in found if metric.startswith(RATIO_PREFIX)]
    first = [metric for metric in FIRST if metric in found]
    rest = [metric for metric in found if metric not in (*first, *ratios, "max_error")]
    return [*first, *ratios, *rest, *(["max_error"] if "max_error" in found else [])]
