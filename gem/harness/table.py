"""Tables for people: the declared cases, and the results of a run."""

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gem.harness import names
from gem.harness.case import AnyCase, Case
from gem.harness.names import PEERS, RATIO_PREFIX, SENT_PREFIX
from gem.harness.needs import Facts, check_needs
from gem.harness.params import SubjectParams
from gem.harness.progress import STYLES
from gem.harness.results import Document, Row, Status, case_status, worst
from gem.harness.timing import summarize

TIMED = ("ms", "qps")  # metrics with the single measurements behind them
PLAIN_WIDTH = 200  # columns of a table that goes to a file or a pipe, where no window says how wide


def make_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or PLAIN_WIDTH elsewhere unless COLUMNS says otherwise.

    No markup: reasons and parameters hold square brackets, which rich would take for styles.
    """
    console = Console(stderr=stderr, markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=stderr, markup=False, highlight=False, width=PLAIN_WIDTH)
    return console


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False)
    for name in columns:
        # Names and numbers are read by their ends: fold them over lines, never cut them.
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


# ---- gem list


def list_tables(cases: list[AnyCase], facts: Facts) -> list[Table]:
    """One table a suite: its cases, what they run on, and whether this machine has what they need."""
    suites: dict[str, list[AnyCase]] = {}
    for case in cases:
        suites.setdefault(case.suite.as_posix(), []).append(case)
    return [_list_table(suite, of_suite, facts) for suite, of_suite in suites.items()]


def _list_table(suite: str, cases: list[AnyCase], facts: Facts) -> Table:
    title = f"{suite} · {cases[0].kind} of {cases[0].subject} · {len(cases)} case{'s' * (len(cases) > 1)}"
    op = isinstance(cases[0], Case)  # a suite has one subject, so all are, or none is
    middle = ("fixture", "params", "directions") if op else ("params",)
    told, common = ([params_text(case) for case in cases], "") if op else params_apart(cases)
    about = any(case.description for case in cases)
    table = _table(
        f"{title}\nof each: {common}" if common else title, "case", *middle, "peers", "needs", "here",
        *(("about",) if about else ()),
    )  # fmt: skip
    for case, params in zip(cases, told, strict=True):
        reason = check_needs(case.needs, facts)
        directions = (", ".join(case.directions),) if isinstance(case, Case) else ()
        table.add_row(
            case.name,
            *((fixture_text(case.fixture),) if isinstance(case, Case) else ()),
            params,
            *directions,
            ", ".join(case.peers),
            case.needs or "",
            Text("yes", style="green") if reason is None else Text(f"no: {reason}", style="yellow"),
            *((case.description,) if about else ()),
        )
    return table


@functools.cache
def fixture_text(fixture: str) -> str:
    """``self_long · B 32``. The tokens are drawn with torch, which a listing does not load."""
    from gem.data.lengths import load_profile

    return f"{fixture} · B {load_profile(fixture).size}"


def params_text(case: AnyCase) -> str:
    """What differs from the default; of an op the shape and the dtype in any case."""
    params = case.params
    if not isinstance(params, SubjectParams):
        return " ".join(_chosen(case).values())
    shown = [f"H {params.heads}", f"D {params.head_dim}", params.dtype]
    return " ".join(
        [*shown, *(text for name, text in _chosen(case).items() if name not in ("heads", "head_dim", "dtype"))]
    )


def params_apart(cases: list[AnyCase]) -> tuple[list[str], str]:
    """(of each case what differs from the default and is not all cases', what is all cases')."""
    told = [_chosen(case) for case in cases]
    several = len(cases) > 1
    common = {name: text for name, text in told[0].items() if several and all(one.get(name) == text for one in told)}
    apart = [" ".join(text for name, text in one.items() if name not in common) for one in told]
    return apart, " ".join(common.values())


def _chosen(case: AnyCase) -> dict[str, str]:
    """Name of each param that is not the default, of a table's each field -> name and value in words."""
    fields = type(case.params).model_fields.items()
    usual = _texts({name: info.get_default(call_default_factory=True) for name, info in fields})
    told = _texts({name: getattr(case.params, name) for name, _ in fields})
    return {name: text for name, text in told.items() if text != usual.get(name)}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """In words, tables field by field."""
    found = {}
    for name, value in values.items():
        if isinstance(value, bool):
            found[name] = name if value else f"no {name}"
        elif isinstance(value, dict):
            found |= _texts({f"{name}.{key}": one for key, one in value.items()})
        else:
            found[name] = f"{name} {','.join(map(str, value)) if isinstance(value, tuple | list) else value}"
    return found


# ---- gem run


@dataclass
class Line:
    """One contestant in one direction of one case: the row of the results table."""

    suite: str
    case: str
    impl: str
    direction: str
    values: dict[str, float | None] = field(default_factory=dict)  # metric → value
    samples: list[float] = field(default_factory=list)  # of ms, or of qps in a race
    statuses: list[Status] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # the reasons but those of a passing check

    @property
    def status(self) -> Status:
        """The worst of the rows behind the line."""
        return worst(self.statuses)

    def add(self, row: Row) -> None:
        """Take up one row of the document."""
        self.values[row.metric] = row.value
        self.statuses.append(row.status)
        if row.metric in TIMED:
            self.samples = row.samples
        if row.reason and row.reason not in self.reasons:
            self.reasons.append(row.reason)
            if not (row.metric == "max_error" and row.status == "pass"):
                self.remarks.append(row.reason)

    def drop(self, reason: str) -> None:
        """Forget a reason that another line of the table tells."""
        for told in (self.reasons, self.remarks):
            if reason in told:
                told.remove(reason)

    @property
    def few(self) -> bool:
        """Timed too few times for a 95 % interval: the extremes of five samples hold the median with 94 %."""
        return any(metric in self.values for metric in TIMED) and len(self.samples) < 6

    def timing(self, metric: str) -> str:
        """``12.3 ± 0.2``: the median and how far its 95 % interval reaches; ``12.3 (3 runs)`` where there is none."""
        value = self.values.get(metric)
        if value is None:
            return ""
        if self.few:
            return f"{number(value)} ({len(self.samples)} runs)" if self.samples else number(value)
        found = summarize(self.samples)
        reach = max(found.high - found.median, found.median - found.low)
        return f"{number(value)} ± {number(reach, digits=2)}"

    def metric(self, name: str) -> str:
        """The cell of a metric in a column of its own."""
        return self.timing(name) if name in TIMED and self.samples else quantity(name, self.values.get(name))


def lines_of(rows: list[Row]) -> list[Line]:
    """The lines of the results table, in the order of the rows. Every row is in one: nothing is left out."""
    lines: dict[tuple[str, str, str, str], Line] = {}
    for row in rows:
        key = (row.suite, row.case, row.impl, row.direction)
        lines.setdefault(key, Line(*key)).add(row)
    for row in rows:
        # Why a peer has no ratio stands in the peer's own line; repeated in each contestant's it would fill the page.
        peer = lines.get((row.suite, row.case, row.metric.removeprefix(RATIO_PREFIX), row.direction))
        if row.metric.startswith(RATIO_PREFIX) and row.status == "skipped" and peer is not None and peer.reasons:
            lines[row.suite, row.case, row.impl, row.direction].drop(row.reason)
    return list(lines.values())


def quantity(metric: str, value: float | None) -> str:
    """A metric's value as people read it: shares in per cent, bytes in B to GiB, the rest as a number."""
    known = names.metric(metric)
    if value is None or known is None:
        return number(value)
    if known.unit == "share":
        return f"{number(100 * value)} %"
    if known.unit == "B":
        size, unit = next(((s, u) for s, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if value >= 2**s), (0, "B"))
        return f"{number(value / 2**size)} {unit}" if size else f"{value:,.0f} B"
    return number(value, known.digits) if known.digits else f"{value:,.0f}"


def number(value: float | None, digits: int = 3) -> str:
    """`value` to `digits` significant digits: 0.0123, 1.50, 12,300; with an exponent below 0.001 and from a million."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    if not 1e-3 <= abs(rounded) < 1e6:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def results_tables(document: Document, verbose: bool = False, console: Console | None = None) -> list[Table | str]:
    """One table a suite: case × contestant × direction, the failing, skipped and erroneous ones among them.

    Unless ``verbose``, cases that only check correctness and pass are one line of text a suite, and what a passing
    check has to say (its worst tensor, the bound) stays in the document; so do bytes by collective and tier. Where
    ``console`` is too narrow for a table its notes follow as lines, then its frame goes, then it becomes text: no name
    and no number is broken.
    """
    suites: dict[str, list[Line]] = {}
    for line in lines_of(document.rows):
        if not verbose and line.status == "pass":
            line.values = {metric: x for metric, x in line.values.items() if not metric.startswith(SENT_PREFIX)}
        suites.setdefault(line.suite, []).append(line)
    shown: list[Table | str] = []
    for suite, lines in suites.items():
        quiet = set() if verbose else _quiet_cases(lines)
        if quiet:
            shown.append(_quiet_text(suite, lines, quiet))
        rest = [line for line in lines if line.case not in quiet]
        if rest:
            shown += _fitted(suite, rest, verbose, console)
    return shown


NOTES_WIDTH = 24  # a column of notes narrower than this is a tower of words


def _fitted(suite: str, lines: list[Line], verbose: bool, console: Console | None) -> list[Table | str]:
    """The table of a suite in the widest form that the console has room for."""
    whole = _suite_table(suite, lines, verbose)
    if console is None:
        return [whole]
    bare = _suite_table(suite, lines, verbose, notes=False)
    room, options = console.width, console.options.update(max_width=10_000)
    if console.measure(bare, options=options).maximum + NOTES_WIDTH <= room:
        return [whole]
    if console.measure(bare, options=options).maximum > room:
        bare = _suite_table(suite, lines, verbose, notes=False, framed=False)
        if console.measure(bare, options=options).maximum > room:
            return [suite, *_sentences(lines, verbose)]
    told: dict[str, list[str]] = {}
    for line in lines:
        note = _note(line, verbose)
        if note:
            told.setdefault(note, []).append(" ".join(filter(None, (line.case, line.impl, _short(line)))))
    return [bare, *(f"{', '.join(where)}: {note}" for note, where in told.items())]


def _sentences(lines: list[Line], verbose: bool) -> list[str]:
    """A line of text for each, which may be broken between any two figures."""
    told, previous, (factor, unit) = [], "", flops_unit(lines)
    for line in lines:
        figures = []
        for metric, value in line.values.items():
            if metric.startswith(RATIO_PREFIX):
                figures.append(f"{number(value) or '–'} × {metric.removeprefix(RATIO_PREFIX)}")
            elif metric == "ms":
                figures.append(f"{line.timing('ms')} ms" if value is not None else "")
            elif metric == "tflops":
                figures.append(f"{number(value and value * factor)} {unit}" if value is not None else "")
            elif metric and metric != "max_error":
                figures.append(f"{metric} {line.metric(metric)}")
        status = [] if line.status == "pass" else [line.status]
        told += [line.case] if line.case != previous else []
        who = " ".join(filter(None, (line.impl, _short(line))))
        told.append(f"  {who}: {' · '.join(filter(None, (*status, *figures, _note(line, verbose)))) or line.status}")
        previous = line.case
    return told


def _note(line: Line, verbose: bool) -> str:
    return "; ".join(line.reasons if verbose or line.status != "pass" else line.remarks)


def _short(line: Line) -> str:
    return _SHORT.get(line.direction, line.direction)


def _quiet_cases(lines: list[Line]) -> set[str]:
    """Cases in which nothing was timed or expected, and everything passed."""
    checks = {"max_error"}
    loud = {one.case for one in lines if one.status != "pass" or not one.direction or not set(one.values) <= checks}
    return {line.case for line in lines} - loud


def _quiet_text(suite: str, lines: list[Line], quiet: set[str]) -> str:
    checked = [line for line in lines if line.case in quiet]
    impls = ", ".join(dict.fromkeys(line.impl for line in checked))
    s = "s" * (len(quiet) > 1)
    return f"{suite}: {len(quiet)} case{s} right within the oracle's bounds ({impls}; {len(checked)} checks)"


_SHORT = {"forward": "fwd", "backward": "bwd"}


def _suite_table(suite: str, lines: list[Line], verbose: bool, notes: bool = True, framed: bool = True) -> Table:
    """``framed`` False: without lines; a case is a line of its own above its contestants'."""
    ratios = list(dict.fromkeys(m for line in lines for m in line.values if m.startswith(RATIO_PREFIX)))
    known = {"ms", "tflops", "gbps", "roofline", "max_error", ""}
    others = list(dict.fromkeys(m for line in lines for m in line.values if m not in known and m not in ratios))
    timed = any("ms" in line.values for line in lines)
    factor, unit = flops_unit(lines)
    heads = [f"× {ratio.removeprefix(RATIO_PREFIX)}" for ratio in ratios]
    directed = any(line.direction for line in lines)
    checked = framed and (directed or any("max_error" in line.values for line in lines))
    numeric = (*(("ms", unit, "roofline") if timed else ()), *heads, *(("max error",) if checked else ()), *others)
    where = ("contestant", "dir") if directed else ("contestant",)
    columns = (*(("case",) if framed else ()), *where, *numeric, "status", *(("notes",) if notes else ()))
    table = _table(suite, *columns, right=numeric)
    if not framed:
        table.box, table.padding = None, (0, 1, 0, 0)
    previous = ""
    for line in lines:
        if previous and previous != line.case:
            table.add_section()
        if previous != line.case and not framed:
            table.add_row(Text(line.case, style="bold"))
        share, flops = line.values.get("roofline"), line.values.get("tflops")
        timing = (line.timing("ms"), number(flops and flops * factor), "" if share is None else f"{share:.0%}")
        table.add_row(
            *((line.case if line.case != previous else "",) if framed else ()),
            Text(line.impl, style="dim" if line.impl in PEERS else ""),
            *((_short(line),) if directed else ()),
            *(timing if timed else ()),
            *(number(line.values.get(ratio)) for ratio in ratios),
            *((number(line.values.get("max_error"), digits=2),) if checked else ()),
            *(line.metric(metric) for metric in others),
            Text(line.status, style=STYLES[line.status]),
            *((_note(line, verbose),) if notes else ()),
        )
        previous = line.case
    return table


def flops_unit(lines: list[Line]) -> tuple[float, str]:
    """(factor, unit) in which the fastest of the lines has at least one figure before the point."""
    fastest = max((line.values.get("tflops") or 0.0 for line in lines), default=0.0)
    return (1.0, "TFLOP/s") if fastest >= 1 else (1000.0, "GFLOP/s")


@dataclass(frozen=True)
class Summary:
    """How many cases passed, failed, errored (out of memory counts here) and were skipped; what became of the peers."""

    passed: int
    failed: int
    errored: int
    skipped: int
    peers_in_trouble: int

    @property
    def exit_code(self) -> int:
        """0 when a case passed and none failed or errored, else 1: a run that skipped all has shown nothing."""
        return 1 if self.failed or self.errored or (self.skipped and not self.passed) else 0

    def __str__(self) -> str:
        text = f"{self.passed} passed, {self.failed} failed, {self.errored} errored, {self.skipped} skipped"
        if self.skipped and not (self.passed or self.failed or self.errored):
            text += ": nothing ran"
        return (
            f"{text}; {self.peers_in_trouble} of the peers' rows failed or errored" if self.peers_in_trouble else text
        )


def summarise(document: Document, selected: list[str] | None = None) -> Summary:
    """Count the cases by status. A case of `selected` (ids) without any row has errored: silence is no pass."""
    statuses = case_status(document.rows)
    for case in selected or []:
        statuses.setdefault(case, "error")
    found = list(statuses.values())
    peers = [line for line in lines_of(document.rows) if line.impl in PEERS]
    return Summary(
        passed=found.count("pass"),
        failed=found.count("fail"),
        errored=found.count("error") + found.count("oom"),
        skipped=found.count("skipped"),
        peers_in_trouble=sum(line.status in ("fail", "error", "oom") for line in peers),
    )


def machine_text(document: Document) -> str:
    """``AMD EPYC, 2 threads · torch 2.13.0+cpu · 3f2a1c9 (changed)``: the machine in one line, for above a table."""
    env = document.environment
    where = env.get("gpu") if env.get("device") == "cuda" else f"{env.get('cpu')}, {env.get('threads')} threads"
    parts = [str(where), f"torch {env.get('torch')}"]
    if env.get("git_commit"):
        parts.append(f"{str(env['git_commit'])[:10]}{' (changed)' if env.get('git_dirty') else ''}")
    if isinstance(env.get("busy_cores"), int | float) and env["busy_cores"] >= 0.3:
        parts.append(f"other work kept {number(env['busy_cores'])} of {env.get('cores')} cores busy when the run began")
    resumed = document.request.get("resumed")
    if isinstance(resumed, list) and resumed:
        parts.append(f"in {len(resumed) + 1} sessions (--resume)")
    tflops, gbps = document.ceilings.get("tflops"), document.ceilings.get("gbps")
    if isinstance(tflops, dict) and gbps:
        ceilings = ", ".join(f"{dtype} {number(value)} TFLOP/s" for dtype, value in tflops.items())
        parts.append(f"ceilings measured in this run: {ceilings}, copy {number(gbps)} GB/s")
    return " · ".join(parts)
