"""The gate's verdict for people: a table on the terminal, Markdown for a pull request, JSON for programs."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from gem.harness.gate import STEADY, TIMED, Gate, Line, row_count
from gem.harness.gate_pairs import Pair
from gem.harness.gate_stats import LOOKS, THRESHOLD
from gem.harness.table import machine_text, quantity

STYLES = {
    "worse": "bold red", "missing": "bold red", "failing": "bold red", "failing in both": "yellow",
    "ambiguous": "yellow", "better": "green", "same": "",
}  # fmt: skip
_ORDER = ("worse", "missing", "failing", "failing in both", "ambiguous", "better", "same")
_SAYS = {
    "declaration": "of its own",
    "default": f"declared without ({THRESHOLD:.0%})",
    "no declaration": f"not declared there ({THRESHOLD:.0%})",
}
_SHORT = {"forward": "fwd", "backward": "bwd"}
_HEAD = ("case", "", "metric", "base", "new", "worse by", "95 % interval", "rounds", "verdict", "")
_MARK = {"worse": "❌", "missing": "❌", "failing": "❌", "failing in both": "⚠️", "ambiguous": "⚠️", "better": "🟢"}


def _sorted(gate: Gate) -> list[Line]:
    return sorted(gate.lines, key=lambda line: _ORDER.index(line.verdict))


def _percent(share: float) -> str:
    return "?" if not math.isfinite(share) else f"{round(100 * share, 1) + 0.0:+.1f} %"  # no -0.0


def _cells(line: Line) -> list[str]:
    who = " ".join(filter(None, (line.impl, _SHORT.get(line.direction, line.direction))))
    found = line.finding
    moved = ["", "", ""]
    notes = [line.reason]
    if found is not None:
        span = f"{_percent(found.low)} … {_percent(found.high)}" if line.metric not in STEADY else ""
        moved = [_percent(found.change), span, str(found.rounds)]
        notes.append(found.why)
    if line.threshold_of == "declaration":
        notes.append(f"threshold {line.threshold:.1%}")
    elif line.threshold_of == "no declaration" and line.metric in TIMED:
        notes.append(f"no declaration: threshold {line.threshold:.1%}")
    values = [quantity(line.metric, value) for value in (line.base, line.new)]
    name = f"{Path(line.suite).stem} {line.case}"
    return [name, who, line.metric, *values, *moved, line.verdict, "; ".join(filter(None, notes))]


def gate_table(gate: Gate) -> Table:
    """One line a judged row, what fails the gate first."""
    table = Table(title="gate: the change against its base", title_justify="left", title_style="bold", pad_edge=False)
    for number, name in enumerate(_HEAD):
        table.add_column(name, justify="right" if 3 <= number <= 7 else "left", overflow="fold")
    for line in _sorted(gate):
        *cells, verdict, notes = _cells(line)
        table.add_row(*cells, Text(verdict, style=STYLES[line.verdict]), notes)
    return table


def remarks(gate: Gate, differing: list[str]) -> list[str]:
    """What a reader must know beside the table, a line each."""
    said = [f"DIFFERENT ON BOTH SIDES: {what}" for what in differing] + list(gate.remarks)
    said.append(_thresholds(gate))
    if gate.confirm_rounds:
        judging = "only those judge them" if gate.confirm_rounds >= LOOKS[0] else f"{LOOKS[0]} are wanted to judge them"
        said.append(f"suspects were run for {gate.confirm_rounds} fresh rounds, and {judging}")
    if gate.count("ambiguous"):
        said.append(
            f"ambiguous: too noisy, or too few rounds, to tell ({row_count(gate.count('ambiguous'))}); no failure"
        )
    if gate.skipped:
        said.append(f"{row_count(gate.skipped)} skipped on both sides")
    return said + [f"new: {what}" for what in gate.added]


def _thresholds(gate: Gate) -> str:
    """``thresholds: declarations of the current directory: 2 of its own, 5 declared without (5%)``: cases."""
    cases = {line.case_id: line.threshold_of for line in gate.lines if line.metric in TIMED}
    said = [f"{count} {what}" for of, what in _SAYS.items() if (count := list(cases.values()).count(of))]
    return f"thresholds: {gate.declarations or 'no declarations read'}: {', '.join(said) or 'no case has one'}"


def conclusion(gate: Gate, strict: bool) -> str:
    """``gate: passed: 28 rows over 6 rounds: 28 same``."""
    passed = "passed" if gate.told else "no failure, and nothing known"
    return f"gate: {passed if gate.passed(strict) else 'FAILED'}: {gate}"


def gate_markdown(gate: Gate, pairs: list[Pair], differing: list[str], strict: bool) -> str:
    """A summary for a pull request: the verdict, rows that say something, the others folded away."""
    telling = [line for line in _sorted(gate) if line.verdict != "same"]
    quiet = [line for line in _sorted(gate) if line.verdict == "same"]
    base, new = (
        f"`{commit[:10]}`" if (commit := one.environment.get("git_commit")) else "sources of no known commit"
        for one in (pairs[0].base, pairs[0].new)
    )
    changed = " with uncommitted changes" if pairs[0].new.environment.get("git_dirty") else ""
    mark = ("✅" if gate.told else "⚠️") if gate.passed(strict) else "❌"
    parts = [
        f"### {mark} {conclusion(gate, strict)}",
        f"`{new}`{changed} against `{base}` on {machine_text(pairs[0].base)}",
    ]
    parts += [_markdown_table(telling)] if telling else []
    if quiet:
        rows = "1 row is" if len(quiet) == 1 else f"{len(quiet)} rows are"
        fold = f"<details><summary>{rows} the same</summary>"
        parts += [fold, _markdown_table(quiet), "</details>"]
    parts += ["\n".join(f"- {_escape(one)}" for one in told)] if (told := remarks(gate, differing)) else []
    return "\n\n".join(parts) + "\n"


def _markdown_table(lines: list[Line]) -> str:
    rule = ["---:" if 3 <= number <= 7 else "---" for number in range(len(_HEAD))]
    rows = [list(_HEAD), rule]
    for line in lines:
        *cells, verdict, notes = map(_escape, _cells(line))
        rows.append([*cells, " ".join(filter(None, (_MARK.get(line.verdict, ""), verdict))), notes])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _escape(text: str) -> str:
    """A reason may hold anything: it must neither end a cell nor become markup."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return text.replace("|", "\\|").replace("`", "\\`").replace("@", "@\u200b")


def gate_json(gate: Gate, differing: list[str], strict: bool) -> str:
    """The whole verdict; an infinite end of an interval is null."""
    told = {
        "passed": gate.passed(strict),
        "summary": str(gate),
        "rounds": gate.rounds,
        "confirm_rounds": gate.confirm_rounds,
        "declarations": gate.declarations,
        "rows": [{**asdict(line), "verdict": line.verdict} for line in gate.lines],
        "new": gate.added,
        "remarks": remarks(gate, differing),
    }
    return json.dumps(_finite(told), indent=1, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
