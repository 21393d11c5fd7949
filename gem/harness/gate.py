"""The regression gate: a change's documents against its base's, row by row (`gem gate`, `ci/gate`).

Judged are the rows of the subject's own contestants: times by the rounds' statistics (gate_stats.py), figures of what
is learnt or balanced by a fixed tolerance. What is derived from a time (tflops, roofline, mfu, ratios) is not judged a
second time; that it fails is a failure like any other. A row that was good in the base and is gone, fails, errs, runs
out of memory, is skipped or has no value in the change fails the gate; what is new is told.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gem.errors import RequestError
from gem.harness import names
from gem.harness.gate_pairs import Key, Pair, own_rows
from gem.harness.gate_stats import (
    ALPHA,
    LOOKS,
    THRESHOLD,
    Finding,
    judge,
    judge_suspect,
    next_look,
)
from gem.harness.results import Row
from gem.harness.timing import summarize

TIMED = ("ms", "qps", "samples_per_s")
# Relative changes for the worse that are no matter of chance: these figures repeat on one machine.
STEADY = {
    "ne": 0.002,
    "auc": 0.002,
    "max_over_mean": 0.01,
    "share_closed": 0.01,
    "bytes_moved": 0.01,
    "largest_batch": 0.01,
    "peak_memory": 0.05,
    # Of a model over ranks: what follows from its plan, to the byte and to the FLOP.
    "bytes_sent": 0.01,
    "memory_tables": 0.01,
    "memory_dense": 0.01,
    "memory_optimizer": 0.01,
    "tables_over_v1": 0.01,
    "flops_per_rank": 0.01,
}
BUSY_CORES = 0.3  # of other work: two runs one after the other then differ by more than any floor
Trouble = Literal["missing", "failing", "failing in both"]


@dataclass
class Line:
    """What became of one row: its values (medians over the rounds), the finding, or the trouble with it."""

    suite: str
    case: str
    impl: str
    direction: str
    metric: str
    base: float | None = None
    new: float | None = None
    finding: Finding | None = None
    trouble: Trouble | None = None
    reason: str = ""
    threshold: float = THRESHOLD
    threshold_of: Literal["declaration", "default", "no declaration"] = "no declaration"
    suspect: bool = False
    fresh: int = 0  # rounds of it beyond the screen

    @property
    def case_id(self) -> str:
        """``suites/throughput/gdpa.toml::name``."""
        return f"{self.suite}::{self.case}"

    @property
    def verdict(self) -> str:
        """better, same, worse, ambiguous, or the trouble."""
        return self.trouble or (self.finding.verdict if self.finding else "ambiguous")

    @property
    def fails(self) -> bool:
        """Whether it fails the gate."""
        return self.verdict in ("worse", "missing", "failing")


@dataclass
class Gate:
    """The verdict on a change: the judged rows, rows that only the change has, remarks, and whether it passes."""

    lines: list[Line]
    added: list[str] = field(default_factory=list)  # of rows that only the change has
    remarks: list[str] = field(default_factory=list)
    declarations: str = ""  # whose say the thresholds, for a reader; no absolute path
    skipped: int = 0  # rows skipped on both sides
    rounds: int = 0
    confirm_rounds: int = 0

    def count(self, verdict: str) -> int:
        """How many rows have this verdict."""
        return sum(line.verdict == verdict for line in self.lines)

    @property
    def compared(self) -> int:
        """Rows that were good on both sides."""
        return sum(line.finding is not None for line in self.lines)

    @property
    def told(self) -> bool:
        """Whether any row has a verdict: of those that are ambiguous nothing is known."""
        return any(line.verdict in ("same", "better") or line.fails for line in self.lines)

    def passed(self, strict: bool = False) -> bool:
        """Nothing is worse, missing or failing, and something was compared; `strict`: nothing is ambiguous either."""
        doubtful = strict and self.count("ambiguous") > 0
        return self.compared > 0 and not any(line.fails for line in self.lines) and not doubtful

    def open_cases(self) -> list[str]:
        """Ids of the cases of which more rounds are wanted: suspects that the looks so far leave ambiguous."""
        wanted = [
            line for line in self.lines
            if line.suspect and line.finding is not None
            and (line.fresh < LOOKS[0] or (line.verdict == "ambiguous" and next_look(line.fresh)))
        ]  # fmt: skip
        return list(dict.fromkeys(line.case_id for line in wanted))

    def __str__(self) -> str:
        kinds = ("worse", "missing", "failing", "ambiguous", "same", "better", "failing in both")
        counts = ", ".join(f"{self.count(kind)} {kind}" for kind in kinds if self.count(kind))
        if not self.compared:
            return f"nothing to compare: no row is good on both sides{f' ({counts})' if counts else ''}"
        return f"{row_count(self.compared)} over {self.rounds} round{'s' * (self.rounds > 1)}: {counts}"


def compare(
    pairs: Sequence[Pair],
    confirm: Sequence[Pair] = (),
    thresholds: Mapping[str, float | None] | None = None,
    declared: Iterable[str] = (),
) -> Gate:
    """The gate's verdict on rounds of base and change, and on fresh rounds of its suspects.

    `thresholds`: id of a declared case -> the share by which it may slow down, None where its declaration says none;
    then, and without a declaration, it is THRESHOLD. `declared`: ids of cases that must be there. Raises RequestError
    when there is no round.
    """
    if not pairs:
        raise RequestError("no round to judge; accepted: one or more documents of each side")
    screen, fresh = _Rounds(pairs), _Rounds(confirm)
    gate = Gate([], rounds=len(pairs), confirm_rounds=len(confirm))
    known = thresholds or {}
    timed: list[tuple[Key, Line]] = []
    for key in dict.fromkeys((*screen.base, *screen.new)):
        line = Line(*key)
        if line.case_id in known:
            line.threshold, line.threshold_of = known[line.case_id] or THRESHOLD, "default"
            if known[line.case_id] is not None:
                line.threshold_of = "declaration"
        line.base, line.new = screen.value("base", key), screen.value("new", key)
        if not _look_for_trouble(line, key, screen, fresh, gate):
            continue
        gate.lines.append(line)
        if line.trouble is None and line.metric in TIMED:
            timed.append((key, line))
        elif line.trouble is None:
            line.finding = _steady(line, screen.changes(key))
    level = ALPHA / max(1, len(timed))
    for key, line in timed:
        line.finding = _timed(line, screen, key, level)
        line.suspect = line.finding.verdict in ("worse", "ambiguous")
    suspects = [(key, line) for key, line in timed if line.suspect]
    if confirm:
        for key, line in suspects:
            changes = fresh.changes(key)
            line.fresh = len(changes)
            if line.verdict == "worse" and line.fresh < LOOKS[0]:  # too few to judge it are too few to clear it
                assert line.finding is not None
                why = f"{line.fresh} of the {LOOKS[0]} fresh rounds that could clear it; {line.finding.why}"
                line.finding = replace(line.finding, why=why.removesuffix("; "))
            elif changes:
                line.finding = judge_suspect(changes, line.threshold, len(suspects))
                line.base, line.new = fresh.value("base", key), fresh.value("new", key)
    gate.lines += _undeclared(declared, screen)
    gate.remarks += _remarks(pairs)
    return gate


def row_count(rows: int) -> str:
    """``1 row``, ``2 rows``."""
    return f"{rows} row{'s' * (rows != 1)}"


def round_changes(pairs: Sequence[Pair]) -> dict[Key, list[float]]:
    """The changes of each judged row, one a round in which it is good on both sides; see `gate_stats`."""
    rounds = _Rounds(pairs)
    return {key: rounds.changes(key) for key in rounds.base if _judged(key[-1])}


def _undeclared(declared: Iterable[str], screen: "_Rounds") -> list[Line]:
    """A line for each case that should be there and that no document of either side has."""
    there = {key[:2] for rows in (screen.base, screen.new) for key in rows}
    wanted = [(suite, case) for suite, _, case in (one.partition("::") for one in declared)]
    lines = []
    for suite, case in wanted:
        if (suite, case) not in there:
            line = Line(suite, case, "", "", "", trouble="missing")
            line.reason = _not_there(case, (one[1] for one in there if one[0] == suite and one not in wanted))
            lines.append(line)
    return lines


def _not_there(case: str, new_cases: Iterable[str]) -> str:
    near = names.nearest(case, list(new_cases)).replace("did you mean", "renamed to").rstrip("?")
    return f"the case is not there{near}"


class _Rounds:
    """The rows of several rounds by key. `base`, `new`: key -> its rows, one a round that has it."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs
        self._rows = [(own_rows(pair.base), own_rows(pair.new)) for pair in pairs]
        self.base: dict[Key, list[Row]] = {}
        self.new: dict[Key, list[Row]] = {}
        for old, new in self._rows:
            for key, row in old.items():
                self.base.setdefault(key, []).append(row)
            for key, row in new.items():
                self.new.setdefault(key, []).append(row)

    def absent(self, key: Key) -> int:
        """In how many rounds the base has the row and the change has not."""
        return sum(key in old and key not in new for old, new in self._rows)

    def value(self, side: str, key: Key) -> float | None:
        """Median over the rounds."""
        values = [row.value for row in getattr(self, side).get(key, []) if row.value is not None]
        return summarize(values).median if values else None

    def changes(self, key: Key) -> list[float]:
        """Of each round in which both are good, how much worse the change is: a logarithm, or of a value that may be 0
        or below a relative difference."""
        both = [(pair, old[key], new[key]) for pair, (old, new) in zip(self.pairs, self._rows, strict=True)
                if key in old and key in new and not (_bad(old[key]) or _bad(new[key]))]  # fmt: skip
        return [_change(old, new, pair.paired) for pair, old, new in both]

    def reach(self, key: Key) -> float:
        """How far the samples' own 95 % intervals let a round's logarithm be off, where turns did not alternate."""
        found = [0.0]
        for pair, (old, new) in zip(self.pairs, self._rows, strict=True):
            if not pair.paired and key in old and key in new and old[key].samples and new[key].samples:
                widths = [summarize(row.samples).half_width for row in (old[key], new[key])]
                found.append(math.hypot(*widths))
        return max(found)


def _change(old: Row, new: Row, paired: bool) -> float:
    known = names.metric(new.metric)  # a document may not say that slower is better
    sign = -1.0 if (known or new).better == "higher" else 1.0
    if old.metric not in TIMED:
        assert old.value is not None and new.value is not None
        difference = new.value - old.value
        if old.value == 0.0:
            return 0.0 if difference == 0.0 else sign * math.copysign(math.inf, difference)
        return sign * difference / abs(old.value)
    if paired:  # neighbours in time: what the machine did to one it did to the other
        count = min(len(old.samples), len(new.samples))
        ratios = [math.log(b / a) for a, b in zip(old.samples[:count], new.samples[:count], strict=True)]
        return sign * summarize(ratios).median
    assert old.value is not None and new.value is not None
    return sign * math.log(new.value / old.value)


def _bad(row: Row) -> str:
    """'' for a row that can be compared, else what is wrong with it."""
    if row.status != "pass":
        return f"{row.status}: {row.reason or 'no reason given'}"
    if row.metric and row.value is None:
        return "no value"
    if row.metric in TIMED and not row.samples:
        return "no samples"
    if row.metric in TIMED and not (row.value and row.value > 0 and min(row.samples) > 0):
        return f"a time or rate of {row.value}"
    return ""


def _judged(metric: str) -> bool:
    return metric in TIMED or metric in STEADY


def _look_for_trouble(line: Line, key: Key, screen: _Rounds, fresh: _Rounds, gate: Gate) -> bool:
    """Note in the line what is wrong with its row. Returns whether it belongs into the gate's lines.

    Of what is derived, and of rows that only say why a case has no others, a failure counts and an absence does not.
    """
    old, new = ([*one.get(key, []), *other.get(key, [])] for one, other in ((screen.base, fresh.base),
                                                                             (screen.new, fresh.new)))  # fmt: skip
    old_bad, new_bad = ([what for what in map(_bad, rows) if what] for rows in (old, new))
    broken = new_bad if _judged(line.metric) else [what for what in new_bad if not what.startswith("skipped")]
    if not old:
        if [what for what in broken if not what.startswith("skipped")]:
            line.trouble, line.reason = "failing", f"{broken[0]}; not in the base"
            return not _told_by_another(line, key, screen)
        if not new_bad and _judged(line.metric):
            gate.added.append(_name(line))
        return False
    if len(old_bad) == len(old):
        if not new_bad and new and _judged(line.metric):
            gate.added.append(f"{_name(line)}: good, was {old_bad[0]}")
        if not new_bad:
            return False  # or gone, and the rows that took its place say what there is
        if old_bad[0].startswith("skipped") and new_bad[0].startswith("skipped"):
            gate.skipped += 1
            return False
        was = "" if old_bad[0] == new_bad[0] else f"; was {old_bad[0]}"
        line.trouble = "failing" if old_bad[0].startswith("skipped") else "failing in both"
        line.reason = f"{new_bad[0]}{was}"
        return True
    gone = screen.absent(key) + fresh.absent(key)
    if gone and _judged(line.metric):
        line.trouble, line.reason = "missing", _where_it_went(line, screen, gone)
    elif broken and len(broken) / len(new) > len(old_bad) / len(old):
        of_rounds = f" (in {len(broken)} of {len(new)} rounds)" if len(broken) < len(new) else ""
        line.trouble, line.reason = "failing", f"{broken[0]}{of_rounds}"
    elif _judged(line.metric) and (turned := _turned(old, new)):
        line.trouble, line.reason = "failing", turned
    elif _judged(line.metric) and not screen.changes(key):
        line.trouble, line.reason = "failing", f"good on both sides in no round: {broken[0]}"
    return line.trouble is not None or _judged(line.metric)


def _turned(old: Sequence[Row], new: Sequence[Row]) -> str:
    """'' where all good rows are in one unit and have one better side, else what the change turned."""
    for what, of in (("unit", "unit"), ("direction", "better")):
        was, now = ({str(getattr(row, of)) for row in rows if not _bad(row)} for rows in (old, new))
        if was and now and len(was | now) > 1:
            told = [", ".join(f"{one!r}" for one in sorted(side)) for side in (was, now)]
            return f"changed its {what}: {told[0]} in the base, {told[1]} in the change"
    return ""


def _name(line: Line) -> str:
    return " ".join(filter(None, (line.case_id, line.impl, line.direction, line.metric)))


def _told_by_another(line: Line, key: Key, screen: _Rounds) -> bool:
    """Whether a row of a whole case only says why rows that the base has are missing: they tell it."""
    return not line.metric and any(one[:2] == key[:2] for one in screen.base)


def _where_it_went(line: Line, screen: _Rounds, gone: int) -> str:
    """Why a row may be missing: another row of the case says it, or a new case has a name like it."""
    here = [row for key, rows in screen.new.items() if key[:2] == (line.suite, line.case) for row in rows]
    said = next((_bad(row) for row in here if not row.metric and _bad(row)), "")
    if said:
        return said
    if not here:
        return _not_there(line.case, {key[1] for key in screen.new} - {key[1] for key in screen.base})
    rounds = len(screen.pairs)
    return "the case has no such row" if gone >= rounds else f"not there in {gone} of {rounds} rounds"


def _timed(line: Line, screen: _Rounds, key: Key, level: float) -> Finding:
    found = judge(screen.changes(key), line.threshold, level, screen.reach(key))
    busy = max((float(document.environment.get("busy_cores") or 0.0) for pair in screen.pairs
                for document in (pair.base, pair.new) if not pair.paired), default=0.0)  # fmt: skip
    if busy >= BUSY_CORES and found.why and found.verdict != "ambiguous":
        why = f"{found.rounds} rounds, and other work kept {busy:.1f} cores busy: tells nothing"
        return Finding("ambiguous", found.change, found.low, found.high, found.rounds, why)
    return found


def _steady(line: Line, changes: list[float]) -> Finding:
    """worse: in every round by more than the metric's tolerance."""
    tolerance = STEADY[line.metric]
    verdict = "worse" if min(changes) > tolerance else "better" if max(changes) < -tolerance else "same"
    change = summarize(changes).median if all(map(math.isfinite, changes)) else changes[0]
    return Finding(verdict, change, min(changes), max(changes), len(changes), f"tolerance {tolerance:.1%}")


def _remarks(pairs: Sequence[Pair]) -> list[str]:
    said = []
    if not all(pair.paired for pair in pairs):
        said.append("the runs were made one after the other: what the machine did meanwhile is in the differences")
    if len(pairs) == 1:
        said.append("one document a side: a drift between both runs is not seen; only what is far beyond it counts")
    commits = {
        (pair.base.environment.get("git_commit"), pair.new.environment.get("git_commit"),
         bool(pair.base.environment.get("git_dirty") or pair.new.environment.get("git_dirty")))
        for pair in pairs
    }  # fmt: skip
    if any(base and base == new and not dirty for base, new, dirty in commits):
        said.append("both sides are of one commit: any difference is noise")
    return said
