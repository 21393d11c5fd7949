"""The sections of measured subjects: a table of metrics a suite, bars of what counts, where a step went."""

from collections.abc import Iterable, Sequence

from gem.harness import names, plots, report_scaling
from gem.harness.report_commands import Commands
from gem.harness.report_figures import bar_of
from gem.harness.report_lines import Card, Cell, Column, Line, Section, Table, TableRow, by_suite, kind_of
from gem.harness.report_tables import column_of, results_table, shown, who
from gem.harness.results import Document, WaterfallPart, waterfall_key
from gem.harness.svg import number
from gem.harness.table import quantity

# Of which metric bars are drawn, the first that several cases of a suite have.
HEADLINES = ("share_closed", "scaling_ratio", "e2e_mfu", "mfu", "qps", "samples_per_s", "ne_above_floor", "ne", "auc")
# Kind of suite → heading and note of its section, in the order of the page. Those of no such kind come last.
SECTIONS = {
    "claim": ("Claims", "What is claimed, and whether the run bore it out."),
    "throughput": ("End to end", "Training from the reader to the optimiser; useful work alone counts."),
    "scaling": ("Scaling", "How evenly and how well the work spreads over ranks."),
    "ablation": ("Ablation", "What each part contributes: the same run with it changed or left out."),
    "quality": ("Quality", "What is learnt: normalised entropy against the lowest possible, ranking, calibration."),
    "train": ("Training", "The run's speed, and the quality at its last evaluation."),
    "": ("Measured", "One line a case and contestant."),
}


def is_measured(lines: Iterable[Line]) -> bool:
    """Whether a suite has rows with a metric and no direction: it has one subject, so all of its lines go along."""
    return any(not line.direction and any(row.metric for row in line.rows) for line in lines)


def measured_sections(lines: Sequence[Line], commands: Commands, runs: Sequence[str]) -> list[Section]:
    """A section a kind of suite that is there: bars of the headline metric and the table of all, suite by suite."""
    kinds: dict[str, list[tuple[str, list[Line]]]] = {}
    for suite, own in by_suite(lines).items():
        kind = kind_of(suite)
        if is_measured(own) or kind in ("claim", "ablation"):
            kinds.setdefault(kind if kind in SECTIONS else "", []).append((suite, own))
    sections = []
    for kind, (heading, note) in SECTIONS.items():
        parts = []
        for suite, own in kinds.get(kind, []):
            scaled = report_scaling.cards(suite, own, commands, runs)
            table = results_table(report_scaling.without_parts(own), commands, runs, f"Metrics of {suite}")
            cards = scaled or _headline_cards(suite, own, commands, runs)
            if kind == "ablation":
                cards += _gain_cards(suite, own, commands, runs)
            parts.append((suite, cards, table))
        if parts:
            sections.append(Section(kind or "measured", heading, note, parts))
    return sections


def _headline_cards(suite: str, lines: Sequence[Line], commands: Commands, runs: Sequence[str]) -> list[Card]:
    """Bars of one metric over the cases of a suite, a card a run."""
    cards = []
    for run, name in enumerate(runs):
        own = [line for line in lines if line.run == run]
        for metric in HEADLINES:
            there = [line for line in own if line.value(metric) is not None]
            if len({line.case for line in there}) > 1:
                cards.append(_headline_card(suite, metric, there, commands, name))
                break
    return cards


def _headline_card(suite: str, metric: str, lines: Sequence[Line], commands: Commands, run: str) -> Card:
    known = names.METRICS[metric]
    share = known.unit == "share"
    factor, unit = (100.0, "%") if share else (1.0, known.unit)
    limit = plots.bar_limit([bar_of(line, metric, factor) for line in lines])
    contestants = len({line.impl for line in lines}) > 1
    column = column_of(metric)
    columns = [Column("case", "text")] + [Column("contestant", "text")] * contestants
    columns += [Column("", "bar"), Column(column.head, before=column.before, after=column.after)]
    rows = []
    for line in lines:
        bar = bar_of(line, metric, factor)
        key = commands.of_case(line.run, suite, line.case, f"{line.subject} {line.case}")
        cells = [Cell(line.case)] + [Cell(line.impl, role=line.role)] * contestants
        cells += [Cell(plots.bar(bar, limit, unit)), Cell(shown(metric, line.value(metric)), line.value(metric))]
        rows.append(TableRow(cells, key, who(line), line.status, line.role))
    table = Table(f"{metric} of {suite}: {known.better} is better", columns, [("", rows)], sortable=False)
    return Card(" · ".join(filter(None, (metric, run))), f"{known.better} is better", table, about=suite, folded=False)


def _gain_cards(suite: str, lines: Sequence[Line], commands: Commands, runs: Sequence[str]) -> list[Card]:
    """Bars of what each part gains, a card a run: time without it over time with it, part by part."""
    cards = []
    for run, name in enumerate(runs):
        bars: dict[str, list[tuple[Line, plots.Bar]]] = {}
        for line in lines:
            for row in line.rows:
                if line.run == run and row.metric.startswith(names.RATIO_PREFIX) and row.value is not None:
                    bar = plots.Bar(line.case, row.value, role=line.role, failed=line.wrong)
                    bars.setdefault(row.metric.removeprefix(names.RATIO_PREFIX), []).append((line, bar))
        if bars:
            cards.append(_gain_card(suite, bars, commands, name))
    return cards


def _gain_card(suite: str, bars: dict[str, list[tuple[Line, plots.Bar]]], commands: Commands, run: str) -> Card:
    limit = plots.bar_limit([bar for own in bars.values() for _, bar in own])
    columns = [Column("case", "text"), Column("", "bar"), Column("gain", after=" ×")]
    groups: list[tuple[str, list[TableRow]]] = []
    for peer, own in bars.items():
        rows = []
        for line, bar in own:
            key = commands.of_case(line.run, suite, line.case, f"{line.subject} {line.case}")
            told = f"{line.case}, {line.direction}" if line.direction == "backward" else line.case
            cells = [Cell(told), Cell(plots.bar(bar, limit, "×")), Cell(number(bar.value), bar.value)]
            rows.append(TableRow(cells, key, f"{who(line)} {peer}", line.status, line.role))
        about = names.PEERS.get(peer)
        groups.append((f"{peer}: {about.what}" if about else peer, rows))
    note = "time of the changed form over the unchanged one's: above 1 the part gains"
    return Card(" · ".join(filter(None, ("gain", run))), note, Table(f"Gains of {suite}: {note}", columns, groups,
        sortable=False), about=suite, folded=False)  # fmt: skip


def waterfall_cards(run: int, document: Document, commands: Commands, name: str) -> list[Card]:
    """A card a contestant; those of one case on one scale. Above the slices: the step, and the MFU that it came to."""
    cards = []
    cases = {waterfall_key(row.case_id, row.impl): (row.suite, row.case, row.impl) for row in document.rows}
    found = {(row.case_id, row.impl, row.metric): row.value for row in document.rows}
    longest: dict[str, float] = {}
    for key, parts in document.waterfalls.items():
        case_id = "::".join(cases[key][:2])
        longest[case_id] = max(longest.get(case_id, 0.0), sum(part.ms for part in parts))
    for key, parts in document.waterfalls.items():
        suite, case, impl = cases[key]
        step = sum(part.ms for part in parts)
        told = [f"step {number(step)} ms"]
        for metric in ("e2e_mfu", "local_mfu", "scaling_ratio"):
            value = found.get((f"{suite}::{case}", impl, metric))
            told += [f"{metric.replace('_', ' ')} {quantity(metric, value)}"] if value is not None else []
        number_of = commands.of_case(run, suite, case, f"{Line(run, suite, case, '', '').subject} {case}")
        table = _slices(f"{case}, {impl}: a step's time", parts, longest[f"{suite}::{case}"], number_of, impl)
        note = " · ".join(filter(None, (*told, suite, name)))
        cards.append(Card(f"{case}, {impl}", note, table, about=f"{suite} {case} {impl}", folded=False))
    return cards


def _slices(caption: str, parts: Sequence[WaterfallPart], limit: float, key: int, impl: str) -> Table:
    step = sum(part.ms for part in parts)
    drawn = plots.slices([(part.part, part.ms, part.of) for part in parts], limit)
    columns = [
        Column("part", "text"),
        Column("", "bar"),
        Column("ms", after=" ms"),
        Column("share", after=" of the step"),
    ]
    rows = []
    for part, strip in zip(parts, drawn, strict=True):
        share = f"{number(100 * part.ms / step)} %" if step > 0 else "–"
        cells = [Cell(part.part), Cell(strip), Cell(number(part.ms), part.ms), Cell(share, part.ms)]
        rows.append(TableRow(cells, key, f"{impl} {part.part}"))
    total = [Cell("step", role="subject"), Cell(), Cell(number(step), step), Cell("100 %" if step > 0 else "–", step)]
    return Table(caption, columns, [("", [*rows, TableRow(total, key, f"{impl} step")])], sortable=False)
