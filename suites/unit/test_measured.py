"""Measured cases: declared without lengths or directions, run in a worker, judged like any other; a fault is a row."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import measured_subjects
import numpy as np
import pytest
from rich.console import Console

from gem.data.logs import LogLengths
from gem.errors import RequestError
from gem.harness import measured_params, names
from gem.harness.case import MeasuredCase, build_cases
from gem.harness.measured import Metric
from gem.harness.needs import Facts
from gem.harness.results import Row, own_status, read_document, write_document
from gem.harness.runner import RunOptions, open_session, run, run_case
from gem.harness.table import list_tables

FILE = Path("suites/scaling/sums.toml")


@pytest.fixture(autouse=True)
def subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own subjects, here and in the workers."""
    measured_subjects.register(monkeypatch)


def declare(*cases: dict[str, Any], kind: str = "scaling", subject: str = "sums", **head: Any) -> list[MeasuredCase]:
    document = {"suite": {"kind": kind, "subject": subject, **head}, "case": [{"name": "a"} | one for one in cases]}
    built = build_cases(document, file=FILE, label=FILE, fixtures=frozenset())
    return [case for case in built if isinstance(case, MeasuredCase)]


def rows_of(case: MeasuredCase, steps: list[str] | None = None) -> list[Row]:
    options = RunOptions(device="cpu", budget_s=0.05)
    with open_session(options) as session:
        return run_case(case, options, session, (steps if steps is not None else []).append)


# ---- declarations


def test_a_measured_case_needs_no_lengths_and_no_directions() -> None:
    first, second, third = declare(
        {"params": {"n": 7}, "expect": {"max_error": "<= 1e-3", "samples_per_s": "> 0"}, "timeout_s": 5},
        {"name": "b", "matrix": {"n": [1, 2]}},
        defaults={"needs": "cpu"},
    )
    assert isinstance(first.params, measured_subjects.SumParams) and first.params.n == 7
    assert [str(bound) for bound in first.expectations] == ["max_error <= 0.001", "samples_per_s > 0"]
    assert (first.id, first.kind, first.needs, first.timeout_s) == (f"{FILE.as_posix()}::a", "scaling", "cpu", 5.0)
    assert [second.name, third.name] == ["b-1", "b-2"]


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "fixture": ({"fixture": "longtail"}, "unknown field 'fixture'", "expect"),
    "directions": ({"directions": ["forward"]}, "unknown field 'directions'", "params"),
    "direction of a bound": ({"expect": {"forward.ms": "< 1"}}, "the case has no directions", "max_over_mean"),
    "metric": ({"expect": {"max_over_men": "< 1"}}, "unknown metric 'max_over_men'", "did you mean 'max_over_mean'?"),
    "bound": ({"expect": {"max_error": "=< 1"}}, "'max_error' = '=< 1'", ">= 1.5"),
    "param": ({"params": {"m": 1}}, "unknown param 'm' of sums", "n, fault"),
    "matrix": ({"matrix": {"fixture": ["a"]}}, "matrix: unknown param 'fixture' of sums", "n, fault"),
    "peer": ({"peers": ["flex"]}, "'flex' does not compute sums", "jagged_attention"),
    "ratio": ({"expect": {"ratio_to.flex": "> 1"}}, "'flex' is not among the case's peers", "none"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line(mistake: str) -> None:
    case, what, accepted = WRONG[mistake]
    with pytest.raises(RequestError) as caught:
        declare(case)
    message = str(caught.value)
    assert message.startswith(f"{FILE}: case 'a': ") and what in message and accepted in message, message
    assert "\n" not in message


def test_a_subject_has_its_kinds_and_a_race_its_sizes() -> None:
    with pytest.raises(RequestError, match="kind = 'throughput'; accepted of subject sums: scaling, quality"):
        declare({}, kind="throughput")
    with pytest.raises(RequestError, match="sizes in ascending order"):
        declare({"params": {"batches": [8, 4]}}, kind="throughput", subject="regression")


def test_the_lists_of_names_agree() -> None:
    """Every subject that is declarable has code; peers of a race are those that are declared as its peers."""
    from gem.harness.worker import load

    for name, subject in measured_params.MEASURED.items():
        assert set(subject.kinds) <= set(names.KINDS)
        assert (subject.target is None) == bool(subject.racers), name
        peers = {peer for peer, about in names.PEERS.items() if name in about.subjects}
        assert set(subject.racers) - set(subject.own) == peers, name
        if subject.racers:
            assert subject.own and issubclass(subject.params, measured_params.RaceParams)
        for target in filter(None, (subject.target, *subject.racers.values())):
            assert callable(load(target))


def test_metrics_have_one_unit_each() -> None:
    assert (Metric("bytes_moved", 1.0).unit, Metric("bytes_moved", 1.0).better) == ("B", "lower")
    with pytest.raises(ValueError, match="did you mean 'share_closed'"):
        Metric("share_closd", 1.0)


def test_a_list_shows_what_a_measured_case_says() -> None:
    cases = [*declare({"params": {"n": 7}}), *declare({"name": "b", "needs": "cuda"})]
    console = Console(record=True, width=160, file=io.StringIO())
    for table in list_tables([*cases], Facts()):
        console.print(table)
    text = console.export_text()
    assert "scaling of sums · 2 cases" in text and "n 7" in text and "no: needs cuda" in text
    assert "fixture" not in text and "directions" not in text


def test_a_list_says_once_what_all_cases_have_and_what_each_is_about() -> None:
    """Of a scaling suite model and data are those of the suite: a row has what is its own."""
    sizes = {"scaling": "weak", "model": {"dim": 32, "interactions": ["mlp"]}, "data": {"history": {"min": 0}}}
    suite = {"kind": "scaling", "subject": "sharding", "defaults": {"params": sizes}}
    cases = [{"name": "a", "description": "the first", "params": {"ranks": 4}}, {"name": "b", "params": {"expert": 2}}]
    made = build_cases({"suite": suite, "case": cases}, file=Path("x"), label=Path("x.toml"), fixtures=frozenset())
    (table,) = list_tables(made, Facts())
    common = "scaling weak model.dim 32 model.interactions mlp data.history.min 0"
    assert str(table.title).endswith(f"\nof each: {common}")
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["params"] == ["ranks 4", "expert 2"] and columns["about"] == ["the first", ""]
    (alone,) = list_tables(made[:1], Facts())
    assert [*alone.columns[1].cells] == [f"ranks 4 {common}"] and "of each" not in str(alone.title)


# ---- runs


def test_metrics_become_rows_and_bounds_are_judged() -> None:
    steps: list[str] = []
    (case,) = declare({"params": {"n": 2000}, "expect": {"max_error": "< 1e-3", "samples_per_s": ">= 1e12"}})
    error, rate = rows_of(case, steps)
    assert (error.impl, error.direction, error.metric, error.status) == ("gem", "", "max_error", "pass")
    assert error.value is not None and 0 < error.value < 1e-3 and error.reason == "of 2000 numbers"
    assert (rate.metric, rate.unit, rate.better, rate.status) == ("samples_per_s", "1/s", "higher", "fail")
    assert rate.reason.startswith("expected samples_per_s >= 1e+12, is ")
    assert "gem: measure 2,000/2,000" in steps  # live, and the last one is never dropped


def test_an_expected_metric_that_is_missing_fails() -> None:
    (case,) = declare({"params": {"n": 10}, "expect": {"auc": "> 0.5"}})
    (bad,) = [row for row in rows_of(case) if row.status != "pass"]
    assert (bad.metric, bad.status, bad.reason) == ("auc", "fail", "expected auc > 0.5, there is no value")


FAULTS = {
    "segfault": ("error", "killed by SIGSEGV"),
    "hang": ("error", "hung: no answer within 2 s"),
    "oom": ("oom", "out of memory"),
    "unsupported": ("skipped", "needs more than there is"),
    "raises": ("error", "unknown metric 'max_eror'"),
    "nan": ("error", "max_error is nan"),
    "twice": ("error", "max_error is told twice"),
    "nothing": ("error", "it returned no metric"),
    "bad_waterfall": ("error", "waterfall"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_a_row_with_its_reason(fault: str) -> None:
    status, reason = FAULTS[fault]
    (case,) = declare({"params": {"n": 3, "fault": fault}, "timeout_s": 2})
    rows = rows_of(case)
    assert own_status(rows) == status
    assert any(row.status == status and reason in row.reason.replace("WaterfallPart", "waterfall") for row in rows)
    assert all(row.value is None for row in rows if row.status == "error" and fault == "nan")


def test_a_run_goes_on_after_a_fault_and_keeps_waterfalls(tmp_path: Path) -> None:
    cases = declare(
        {"name": "broken", "params": {"fault": "segfault"}},
        {"name": "away", "needs": "cuda:sm990"},
        {"name": "good", "params": {"n": 50}},
    )
    document = run(cases, options=RunOptions(device="cpu"), on_event=lambda event: None)
    assert [(row.case, row.status) for row in document.rows] == [
        ("broken", "error"),
        ("away", "skipped"),
        ("good", "pass"),
        ("good", "pass"),
    ]
    again = read_document(write_document(document, tmp_path / "r.json"))
    (parts,) = again.waterfalls.values()
    assert list(again.waterfalls) == [f"{FILE.as_posix()}::good/gem"]
    assert [(one.part, one.ms, one.of) for one in parts] == [("adding", 3.0, "model"), ("waiting", 1.0, "input")]


def test_options_that_concern_ops_leave_measured_cases_as_they_are() -> None:
    (case,) = declare({"params": {"n": 5}, "expect": {"max_error": "< 1e-9"}})
    document = run([case], options=RunOptions(device="cpu", impls=["torch"], peers=["flex"]))
    assert {row.status for row in document.rows if row.metric == "max_error"} <= {"pass", "fail"}
    assert len(document.rows) == 2
    mine = LogLengths("log", np.array([3, 9]), "lengths", 2, "two users")
    on_lengths = {"--lengths": RunOptions(device="cpu", lengths=mine), "--batch": RunOptions(device="cpu", batch=4)}
    for name, options in on_lengths.items():  # its rows would stand in a report on lengths that are not theirs
        (left_out,) = run([case], options=options).rows
        assert left_out.status == "skipped"
        assert left_out.reason == f"{name} concerns ops alone; this case has samples of its own"


# ---- as pytest items

CONFTEST = """
import sys
sys.path.insert(0, {here!r})
import measured_subjects
import pytest
measured_subjects.register(pytest.MonkeyPatch())
"""
SUITE = """
[suite]
kind = "quality"
subject = "sums"
[[case]]
name = "good"
params = { n = 100 }
expect = { max_error = "< 1e-3" }
[[case]]
name = "missed"
params = { n = 100 }
expect = { max_error = "< 1e-12" }
[[case]]
name = "crashes"
params = { fault = "segfault" }
[[case]]
name = "away"
params = { fault = "unsupported" }
"""


def test_a_measured_case_is_a_pytest_item_that_runs_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(here=str(Path(__file__).parent)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "sums.toml").write_text(SUITE)
    root = str(Path(names.__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "PYTEST_ADDOPTS": "", "COLUMNS": "150", "GEM_DEVICE": "cpu"}
    command = [sys.executable, "-m", "pytest", "-p", "gem.harness.pytest_plugin", "-p", "no:cacheprovider", "-rs", "-v"]
    done = subprocess.run(
        [*command, "-k", "quality and sums"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    out = done.stdout
    outcomes = {"good": "PASSED", "missed": "FAILED", "crashes": "FAILED", "away": "SKIPPED"}
    for case, outcome in outcomes.items():
        assert any(line.startswith(f"sums.toml::{case} {outcome}") for line in out.splitlines()), out + done.stderr
    assert "  fail    gem max_error = " in out and "expected max_error < 1e-12, is " in out
    assert "  error   gem: killed by SIGSEGV" in out and "needs more than there is" in out
