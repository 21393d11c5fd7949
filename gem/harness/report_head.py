"""What a reader looks for first: what was run and on what, how it ended, what went wrong, which peers were beaten."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gem.harness.names import RATIO_PREFIX
from gem.harness.report_commands import Commands, run_command
from gem.harness.report_lines import BAD, Cell, Column, Line, Table, TableRow, by_case
from gem.harness.results import SEVERITY, Document, Status, case_status
from gem.harness.table import number


@dataclass(frozen=True)
class RunView:
    """One document: `facts` are (text, whether to warn)."""

    name: str
    command: list[str]  # its words, quoted for a shell
    machine: str
    facts: list[tuple[str, bool]]
    verdict: str
    verdict_kind: str  # good, bad or none
    counts: Sequence[tuple[str, int]]
    cases: int
    interrupted: bool


def run_view(document: Document, name: str) -> RunView:
    """The head of one document."""
    statuses = list(case_status(document.rows).values())
    counts = [(status, statuses.count(status)) for status in ("pass", "fail", "error", "oom", "skipped")]
    interrupted = document.request.get("interrupted") is True
    verdict, kind = _verdict(statuses)
    shown = [(status, count) for status, count in counts if count or status != "oom"]
    return RunView(
        name=name,
        command=[shlex.quote(word) for word in shlex.split(run_command(document.request))],
        machine=machine_of(document.environment),
        facts=_facts(document),
        verdict=f"Interrupted. {verdict}" if interrupted else verdict,
        verdict_kind="bad" if interrupted else kind,
        counts=shown,
        cases=len(statuses),
        interrupted=interrupted,
    )


def machine_of(environment: dict[str, Any]) -> str:
    """The GPU, or the CPU where none was used."""
    found = environment.get("gpu") or environment.get("cpu") or environment.get("device")
    return str(found) if found else "unknown machine"


def title_of(documents: Sequence[Document]) -> str:
    """``gem run on NVIDIA H200``, ``gem report: 3 runs on NVIDIA H200 and AMD EPYC``."""
    machines = list(dict.fromkeys(machine_of(one.environment) for one in documents))
    if len(documents) == 1:
        rows = documents[0].rows
        command = "gem train" if rows and all(row.suite == "train" for row in rows) else "gem run"
        return f"{command} on {machines[0]}"
    return f"gem report: {len(documents)} runs on {' and '.join(machines)}" if documents else "gem report: no runs"


def _verdict(statuses: Sequence[Status]) -> tuple[str, str]:
    bad, skipped = sum(status in BAD for status in statuses), statuses.count("skipped")
    ran = len(statuses) - skipped
    also = f", {skipped} skipped" if skipped else ""
    if not statuses:
        return "Nothing was run.", "none"
    if bad:
        return f"{f'{bad} of {ran} cases' if ran > 1 else 'The case'} did not pass{also}.", "bad"
    if not ran:
        return f"Nothing ran: {skipped} case{'s' * (skipped != 1)} skipped.", "bad"
    return (f"All {ran} cases passed{also}." if ran > 1 else f"The case passed{also}."), "good"


def _facts(document: Document) -> list[tuple[str, bool]]:
    """What the figures depend on, the machine apart, in the order in which people ask."""
    env, request = document.environment, document.request
    facts: list[tuple[str, bool]] = []
    if env.get("gpu") and (env.get("gpu_count") or 1) != 1:
        facts.append((f"{env['gpu_count']} GPUs", False))
    if not env.get("gpu") and env.get("threads"):
        facts.append((f"{env['threads']} threads", False))
    facts += [(f"{name} {env[key]}", False) for name, key in VERSIONS if env.get(key)]
    commit = str(env.get("git_commit") or "")[:12]
    if commit:
        dirty = env.get("git_dirty")
        state = " with uncommitted changes" if dirty else ", clean" if dirty is False else ""
        facts.append((f"commit {commit}{state}", bool(dirty)))
    elif env:
        facts.append(("commit not recorded", False))
    if env.get("time"):
        facts.append((str(env["time"]).replace("T", " ").replace("+00:00", " UTC"), False))
    lengths = request.get("lengths")
    if lengths:
        facts.append((f"lengths of {lengths.get('name', lengths) if isinstance(lengths, dict) else lengths}", False))
    if request.get("batch"):
        facts.append((f"batch {request['batch']}", False))
    busy = env.get("busy_cores")
    if isinstance(busy, int | float) and busy >= 0.3:
        facts.append((f"other work kept {number(busy)} of {env.get('cores')} cores busy when the run began", True))
    resumed = request.get("resumed")
    if isinstance(resumed, list) and resumed:
        lists = [one.get("cases") for one in resumed if isinstance(one, dict)]
        kept = sum(len(cases) for cases in lists if isinstance(cases, list))
        what = f"{kept} case{'s' * (kept != 1)} kept" if kept else "cases kept"  # how many it may not tell
        facts.append((f"{what} from {_earlier(len(resumed))}", True))
    if request.get("interrupted") is True:
        facts.append(("interrupted: what was finished is here", True))
    return facts


def _earlier(count: int) -> str:
    return "an earlier, unfinished run" if count == 1 else f"{count} earlier, unfinished runs"


VERSIONS = (("torch", "torch"), ("triton", "triton"), ("CUDA", "cuda"), ("driver", "driver"))


@dataclass(frozen=True)
class Problem:
    """A reason and where it struck."""

    status: Status
    reason: str
    places: list[str]


def problems(lines: Sequence[Line], runs: Sequence[str], role: str) -> list[Problem]:
    """What did not pass of the subjects or of the peers, the worst first, then the most frequent."""
    found: dict[tuple[Status, str], list[str]] = {}
    for line in lines:
        if line.status in BAD and line.role == role:
            found.setdefault((line.status, line.problem), []).append(_place(line, runs))
    made = [Problem(status, reason or "no reason given", places) for (status, reason), places in found.items()]
    return sorted(made, key=lambda one: (-SEVERITY.index(one.status), -len(one.places)))


def _place(line: Line, runs: Sequence[str]) -> str:
    run = runs[line.run]
    words = (f"{run}:" if run else "", line.subject, line.case, line.impl, line.direction)
    return " ".join(filter(None, words))


def skipped(lines: Sequence[Line], runs: Sequence[str]) -> list[Problem]:
    """What was skipped and why, the most frequent reason first."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.status == "skipped":
            found.setdefault(line.reason or "no reason given", []).append(_place(line, runs))
    made = [Problem("skipped", reason, places) for reason, places in found.items()]
    return sorted(made, key=lambda one: -len(one.places))


@dataclass
class _Against:
    """The ratios of one own contestant to one peer."""

    ratios: list[tuple[float, str]]
    ahead: int = 0
    level: int = 0
    behind: int = 0
    without: int = 0

    @property
    def mean(self) -> float | None:
        """The geometric mean, None where a ratio is not above 0."""
        values = [value for value, _ in self.ratios]
        return math.exp(sum(map(math.log, values)) / len(values)) if values and min(values) > 0 else None


@dataclass(frozen=True)
class Record:
    """How the project's contestants stand against each peer: one sentence, and the table, the worst on top."""

    sentence: str
    kind: str
    table: Table


def record(lines: Sequence[Line], commands: Commands, runs: Sequence[str]) -> Record | None:
    """None where nothing was compared. Level: the 95 % intervals of the two medians overlap."""
    found: dict[tuple[int, str, str, str, str], _Against] = {}
    for (run, _, _), own in by_case(lines).items():
        known = {(line.impl, line.direction): line for line in own}
        for line in own:
            for row in line.rows:
                if not row.metric.startswith(RATIO_PREFIX):
                    continue
                peer = row.metric.removeprefix(RATIO_PREFIX)
                one = found.setdefault((run, line.subject, line.impl, line.direction, peer), _Against([]))
                if row.value is None:
                    one.without += 1
                    continue
                one.ratios.append((row.value, line.case))
                other = known.get((peer, line.direction))
                if _overlap(line.interval, other.interval if other else None):
                    one.level += 1
                elif row.value > 1:
                    one.ahead += 1
                else:
                    one.behind += 1
    if not any(one.ratios for one in found.values()):
        return None
    for one in found.values():
        one.ratios.sort()
    several = len(runs) > 1
    columns = [Column("subject", "text")] + [Column("run", "text")] * several
    columns += [Column(head, "text") for head in ("gem's", "direction", "peer")]
    columns += [Column(head, after=f" {head}", first="descending") for head in ("ahead", "level", "behind")]
    columns += [
        Column("no ratio", after=" without a ratio"),
        Column("mean", title=MEAN, after="× in the geometric mean"),
    ]
    columns += [Column("worst", after="×, the worst"), Column("of", "text"), Column("best", after="×, the best")]
    columns += [Column("of", "text")]
    rows: list[tuple[float, TableRow]] = []
    for (run, subject, impl, direction, peer), one in found.items():
        mean, ratios = one.mean, one.ratios
        kind = "" if mean is None else "ahead" if mean > 1 else "behind"
        cells = [Cell(subject)] + [Cell(runs[run])] * several
        cells += [Cell(impl, role="subject"), Cell(direction or "training"), Cell(peer, role="peer")]
        cells += [Cell(str(count) if count else "", float(count)) for count in (one.ahead, one.level)]
        cells.append(
            Cell(str(one.behind) if one.behind else "", float(one.behind), role="behind" if one.behind else "")
        )
        cells.append(Cell(str(one.without) if one.without else "", float(one.without)))
        cells.append(Cell(_times(mean), mean, role=kind))
        for value, case in (ratios[0], ratios[-1]) if ratios else ((None, ""), (None, "")):
            cells += [Cell(_times(value), value), Cell(case)]
        key = commands.of_run(run, f"{subject} {impl} {direction}".strip())
        rows.append((math.inf if mean is None else mean, TableRow(cells, key, f"against {peer}")))
    rows.sort(key=lambda pair: pair[0])
    table = Table("Against each peer", columns, [("", [row for _, row in rows])])
    sentence, kind = _sentence(found, runs)
    return Record(sentence, kind, table)


MEAN = "geometric mean of the peer's time over gem's: above 1, gem is faster"


def _times(value: float | None) -> str:
    return "–" if value is None else number(value)


def _overlap(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def _sentence(found: dict[tuple[int, str, str, str, str], _Against], runs: Sequence[str]) -> tuple[str, str]:
    ahead, level, behind = (sum(getattr(one, name) for one in found.values()) for name in ("ahead", "level", "behind"))
    text = f"Faster than the peer in {ahead} of {ahead + level + behind} comparisons"
    text += f", level in {level}" if level else ""
    if not behind:
        return f"{text}, slower in none.", "good"
    (value, case), key = min((one.ratios[0], key) for key, one in found.items() if one.ratios)
    text += f", slower in {behind}; the worst is {_versus(key, runs, case)}, {number(value)}×."
    lost = sorted((one.mean, key) for key, one in found.items() if one.mean is not None and one.mean < 1)
    if lost:
        told = [f"{_versus(key, runs)} ({number(mean)}×)" for mean, key in lost]
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        text += f" Behind in the mean: {', '.join(told[:3])}{more}."
    return text, "bad"


def _versus(key: tuple[int, str, str, str, str], runs: Sequence[str], case: str = "") -> str:
    run, subject, impl, direction, peer = key
    words = (f"{runs[run]}:" if runs[run] else "", subject, case, impl, direction, "against", peer)
    return " ".join(filter(None, words))
