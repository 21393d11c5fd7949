"""Races: contestants that compute the same, in turns, each at its own best batch size; who does not gets no ratio."""

import math
from pathlib import Path
from typing import Any

import measured_subjects
import pytest

from gem.harness import measured_params
from gem.harness.case import MeasuredCase, build_cases
from gem.harness.measured import DoesNotFit, best_batch
from gem.harness.race import beside_it, widest_gap
from gem.harness.results import Document, Row, case_status, own_status
from gem.harness.runner import RunOptions, open_session, run, run_case
from gem.harness.table import summarise
from gem.harness.timing import summarize
from gem.harness.worker import Worker

FILE = Path("suites/throughput/regression.toml")
PARAMS = {"batches": [16, 64, 256], "check_batch": 8, "tolerance": 1e-4, "turn_steps": 2}


@pytest.fixture(autouse=True)
def subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own subjects, here and in the workers."""
    measured_subjects.register(monkeypatch)


def declare(*peers: str, params: dict[str, Any] | None = None, **given: Any) -> MeasuredCase:
    case = {"name": "a", "params": PARAMS | (params or {}), "peers": list(peers), **given}
    document = {"suite": {"kind": "throughput", "subject": "regression"}, "case": [case]}
    (built,) = build_cases(document, file=FILE, label=FILE, fixtures=frozenset())
    assert isinstance(built, MeasuredCase)
    return built


def rows_of(case: MeasuredCase, steps: list[str] | None = None) -> list[Row]:
    options = RunOptions(device="cpu", budget_s=0.1)
    with open_session(options) as session:
        return run_case(case, options, session, (steps if steps is not None else []).append)


def pick(rows: list[Row], impl: str, metric: str) -> Row:
    (found,) = [row for row in rows if (row.impl, row.metric) == (impl, metric)]
    return found


def test_contestants_race_each_at_its_own_batch_size() -> None:
    steps: list[str] = []
    rows = rows_of(declare("rowbyrow", expect={"ratio_to.rowbyrow": ">= 1.5", "qps": "> 0"}), steps)
    ours, theirs = (pick(rows, name, "qps") for name in ("gem", "rowbyrow"))
    assert {row.status for row in rows} == {"pass"} and {row.direction for row in rows} == {""}
    for row in (ours, theirs):
        assert row.value == summarize(row.samples).median and len(row.samples) >= 3 and row.unit == "1/s"
    # The pause of 4 ms a step bounds the slow one: two of three steps of a turn are timed, each of 64 samples at most.
    assert theirs.value is not None and 0 < theirs.value < 64 / 0.004
    ratio = pick(rows, "gem", "ratio_to.rowbyrow")
    assert ours.value is not None and ratio.value == pytest.approx(ours.value / theirs.value)
    assert ratio.better == "higher"
    # The pause costs the less the larger the batch; the largest did not fit.
    assert theirs.reason.startswith("batch 64 (others: 16 ") and "256 does not fit" in theirs.reason
    own = pick(rows, "gem", "ms").value
    batch = int(ours.reason.split()[1])
    assert own is not None and batch in (16, 64, 256)
    assert ours.value == pytest.approx(1e3 * batch / own, rel=0 if len(ours.samples) % 2 else 0.2)
    gap = pick(rows, "rowbyrow", "max_error")
    assert gap.value is not None and 0 <= gap.value < 1e-4 and "allowed 0.0001 relative" in gap.reason
    assert pick(rows, "gem", "peak_memory").value == 256.0
    told = [step.partition(" ")[0] for step in steps]
    assert told.index("gem:") < told.index("rowbyrow:") < told.index("timing,")
    assert "rowbyrow: find the batch size 3/3" in steps
    rounds = [int(step.removeprefix("timing, round ")) for step in steps if step.startswith("timing, round ")]
    assert rounds == list(range(1, len(rounds) + 1)) and len(rounds) >= 3


FAULTS = {
    "otherrate": ("fail", "does not compute the same: loss of batch"),
    "diesinitsturn": ("oom", "killed by SIGKILL"),
    "neverfits": ("oom", "out of memory"),
    "toofast": ("error", "a turn took 0.0 s"),
    "diverges": ("error", "losses are not finite numbers"),
}


def test_every_faulty_peer_is_a_row_without_a_ratio_and_the_others_race_on() -> None:
    params = {"batches": [64, 256]}
    rows = rows_of(declare(*FAULTS, "rowbyrow", params=params))
    assert own_status(rows) == "pass" and pick(rows, "gem", "ratio_to.rowbyrow").status == "pass"
    for name, (status, reason) in FAULTS.items():
        qps, ratio = pick(rows, name, "qps"), pick(rows, "gem", f"ratio_to.{name}")
        assert (qps.status, qps.value, qps.samples) == (status, None, []) and reason in qps.reason, qps
        assert (ratio.status, ratio.value) == ("skipped", None) and f"no ratio: {name} {status}: " in ratio.reason
    assert pick(rows, "otherrate", "max_error").status == "fail"
    assert summarise(Document(rows=rows)).peers_in_trouble == len(FAULTS)


def test_who_fails_in_its_turn_is_gone_before_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a contestant holds, on a GPU gigabytes of what it had got to, is the next one's to use."""
    told: list[tuple[str, str]] = []
    call, kill = Worker.call, Worker.kill

    def called(worker: Worker, method: str, *args: Any, **given: Any) -> Any:
        told.append((method, worker.name))
        return call(worker, method, *args, **given)

    def killed(worker: Worker) -> None:
        told.append(("kill", worker.name))
        kill(worker)

    monkeypatch.setattr(Worker, "call", called)
    monkeypatch.setattr(Worker, "kill", killed)
    rows = rows_of(declare("toofast", "rowbyrow", params={"batches": [16]}))
    assert pick(rows, "toofast", "qps").status == "error" and pick(rows, "rowbyrow", "qps").status == "pass"
    at = told.index(("turn", "toofast"))
    assert told[at + 1 : at + 4] == [("kill", "toofast"), ("settle", "gem"), ("turn", "rowbyrow")]
    # Who waits has given back what it can before anybody's turn, search or last steps.
    for at, (method, name) in enumerate(told):
        if method in ("setup", "turn", "finish"):
            others = {"gem", "toofast", "rowbyrow"} - {name} - {who for what, who in told[:at] if what == "kill"}
            assert set(told[at - len(others) : at]) == {("settle", other) for other in others}


def test_who_runs_out_of_memory_names_who_held_what_beside_it() -> None:
    assert beside_it({"gem": 3 << 30, "flex": 0, "padded": 3 << 29}) == "; beside it: gem 3.0 GiB, padded 1.5 GiB"
    assert beside_it({"gem": 0}) == beside_it({}) == ""


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_number_is_the_widest_gap_wherever_it_stands(bad: float) -> None:
    fine = {"a": 1.0, "b": 2.0, "c": 4.0}
    assert widest_gap({"a": 1.5, "b": 2.0, "c": 4.0}, fine) == ("a", 0.5)
    for what in fine:
        for losses, wanted in ((fine | {what: bad}, fine), (fine, fine | {what: bad}), (fine | {what: bad},) * 2):
            name, gap = widest_gap(losses, wanted)
            assert name == what and not gap < math.inf


def test_a_ratio_that_was_expected_and_does_not_exist_fails_the_case() -> None:
    rows = rows_of(declare("otherrate", expect={"ratio_to.otherrate": ">= 0.1"}, params={"batches": [16]}))
    (bad,) = [row for row in rows if row.impl == "gem" and row.status == "fail"]
    assert bad.metric == "ratio_to.otherrate" and "does not compute the same" in bad.reason


def test_the_tolerance_decides() -> None:
    rows = rows_of(declare("otherrate", params={"tolerance": 0.5, "batches": [16]}))
    assert pick(rows, "otherrate", "qps").status == "pass"


def test_without_the_projects_own_nobody_races(monkeypatch: pytest.MonkeyPatch) -> None:
    regression = measured_subjects.SUBJECTS["regression"]
    broken = regression.racers | {"gem": f"{measured_subjects.HERE}:Diverges"}
    monkeypatch.setitem(
        measured_params.MEASURED,
        "regression",
        measured_params.MeasuredSubject(regression.params, regression.kinds, racers=broken),
    )
    rows = rows_of(declare("rowbyrow"))
    assert pick(rows, "gem", "qps").status == "error" and own_status(rows) == "error"
    peer = pick(rows, "rowbyrow", "qps")
    assert peer.status == "skipped" and "nothing to compare with" in peer.reason


def test_peers_asked_for_replace_those_declared() -> None:
    case = declare("otherrate", expect={"ratio_to.otherrate": ">= 0.1", "qps": "> 0"}, params={"batches": [16]})
    document = run([case], options=RunOptions(device="cpu", peers=["rowbyrow", "flex"], budget_s=0.05))
    assert case_status(document.rows) == {case.id: "pass"}
    assert {row.impl for row in document.rows} == {"gem", "rowbyrow"}
    assert list(document.waterfalls) == [f"{case.id}/gem"]


def test_the_best_size_is_the_fastest_that_fits() -> None:
    told: list[tuple[int, int]] = []

    def rate(size: int) -> float:
        if size > 64:
            raise DoesNotFit("it needs 9 GiB of 8")
        if size > 32:
            raise MemoryError
        return {8: 10.0, 16: 30.0, 32: 20.0}[size]

    ready = best_batch([8, 16, 32, 64, 128], rate, lambda done, total: told.append((done, total)))
    assert (ready.batch, ready.tried, ready.note) == (16, {8: 10.0, 16: 30.0, 32: 20.0}, "64 does not fit")
    assert told[0] == (0, 5) and told[-1] == (5, 5)
    told_why = best_batch([8, 32, 128], rate, lambda done, total: None)
    assert (told_why.batch, told_why.note) == (32, "128 does not fit: it needs 9 GiB of 8")
    with pytest.raises(MemoryError):
        best_batch([64], rate, lambda done, total: None)
    with pytest.raises(KeyError):  # a mistake is no out-of-memory
        best_batch([8, 9], rate, lambda done, total: None)
