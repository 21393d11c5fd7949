"""What happens to the machine while a run goes on is a row, or nothing: killed workers, hung ones, a clock that is set.

Kinds: the out-of-memory killer took one process and the sweep with it; a clock step made a negative time.
"""

import ast
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from robust_process import CHECKS, environment, run

import gem
from gem.harness import names
from gem.harness.case import MeasuredCase
from gem.harness.measured import Metric
from gem.harness.measured_params import MEASURED
from gem.harness.results import Row, read_document
from gem.harness.runner import RunOptions
from gem.harness.runner import run as run_cases
from gem.harness.suites import load_suite
from gem.harness.worker import _LIVE


def rows_of(rows: list[Row], case: str, impl: str, metric: str = "ms") -> list[Row]:
    return [row for row in rows if (row.case, row.impl, row.metric) == (case, impl, metric)]


def test_a_worker_that_is_killed_is_a_row_and_the_run_goes_on(tmp_path: Path) -> None:
    """From outside, in the middle of its turns: contestant, then the oracle's own worker."""
    text = CHECKS.replace("correctness", "throughput") % "0, 1, 2"
    (tmp_path / "s.toml").write_text(
        text.replace('["torch"]', '["torch"]\npeers = ["sdpa_padded"]\ndirections = ["forward"]')
    )
    killed = []

    def on_event(event: Any) -> None:
        kill = {0: ("timing forward, round 2", "sdpa_padded"), 1: ("torch: prepare", "oracle")}.get(event.index)
        if event.kind == "step" and kill is not None and event.detail == kill[0]:
            (worker,) = [one for one in _LIVE if one.name == kill[1] and one.alive]
            os.kill(worker.pid, signal.SIGKILL)
            killed.append(kill[1])

    cases = load_suite(tmp_path / "s.toml")
    document = run_cases(cases, options=RunOptions(device="cpu", budget_s=0.05), on_event=on_event)
    assert killed == ["sdpa_padded", "oracle"]
    (dead,) = rows_of(document.rows, "c-0", "sdpa_padded")
    assert (dead.status, dead.value) == ("oom", None) and "killed by SIGKILL, most likely out of memory" in dead.reason
    (ratio,) = rows_of(document.rows, "c-0", "torch", "ratio_to.sdpa_padded")
    assert ratio.status == "skipped" and "no ratio: sdpa_padded oom" in ratio.reason
    for case in ("c-0", "c-1", "c-2"):
        assert [row.status for row in rows_of(document.rows, case, "torch")] == ["pass"]
    for case in ("c-1", "c-2"):  # with an oracle that was started again
        assert [row.status for row in rows_of(document.rows, case, "sdpa_padded")] == ["pass"]


class Hangs:
    """Measures for ever."""

    def measure(self, params: Any, device: str, report: Any) -> list[Metric]:
        time.sleep(300)
        return []


def test_a_measurement_that_hangs_ends_at_its_time_limit_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    (tmp_path / "s.toml").write_text(CHECKS % "0")
    subject = next(name for name, one in MEASURED.items() if one.target is not None)
    stuck = MEASURED[subject]
    monkeypatch.setitem(MEASURED, subject, type(stuck)(**{**vars(stuck), "target": "test_robust_run:Hangs"}))
    hung = MeasuredCase.model_construct(
        suite=Path("m.toml"), file=Path("m.toml"), kind="quality", subject=subject, name="hung", params=None,
        peers=[], needs=None, expect={}, timeout_s=1.0,
    )  # fmt: skip
    start = time.monotonic()
    document = run_cases([hung, *load_suite(tmp_path / "s.toml")], options=RunOptions(device="cpu"))
    assert time.monotonic() - start < 60
    first, *others = document.rows
    assert (first.status, first.reason) == ("error", "hung: no answer within 1 s")
    assert [row.status for row in others] == ["pass", "pass"]
    assert names.PEERS  # the declared ones are as they were


# ---- the clock

STEPS = """
import itertools, time
_real, _count = time.time, itertools.count()
def _stepping():
    return _real() + (-1) ** next(_count) * 86400.0
time.time = _stepping
time.time_ns = lambda: int(_stepping() * 1e9)
"""
PLACES = [Path(gem.__file__).parent / part for part in ("harness", "commands")]


def test_a_clock_that_is_set_while_a_run_goes_on_changes_no_time(tmp_path: Path) -> None:
    """By a day, forth and back, at every look, in the runner and in all of its workers."""
    (tmp_path / "sitecustomize.py").write_text(STEPS)
    (tmp_path / "s.toml").write_text(CHECKS.replace("correctness", "throughput") % "0")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    env = environment(PYTHONPATH=path)
    start = time.monotonic()
    arguments = ("run", "s.toml", "--device", "cpu", "--budget", "0.2", "--json", "r.json")
    code, out, err = run(*arguments, cwd=tmp_path, env=env)
    wall_s = time.monotonic() - start
    assert code == 0, out + err
    document = read_document(tmp_path / "r.json")
    timed = [row for row in document.rows if row.metric == "ms"]
    assert len(timed) == 2 and all(row.status == "pass" and len(row.samples) >= 3 for row in timed)
    assert all(ms > 0 for row in timed for ms in row.samples)
    assert sum(ms for row in timed for ms in row.samples) < 1e3 * wall_s
    told = float(err.split(" pass ")[1].split()[0])  # the progress line's seconds
    assert 0 <= told <= wall_s


def looks_at_the_clock(tree: ast.AST) -> list[str]:
    """``time.time`` and the like, wherever they are named: the time of day, which may be set."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in ("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.strftime"):
                found.append(name)
            if node.value.id in ("datetime", "date") and node.attr in ("now", "utcnow", "today"):
                found.append(name)
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"time.{alias.name}" for alias in node.names if alias.name not in ("monotonic", "perf_counter")]
    return found


def test_only_clocks_that_nobody_sets_are_used_for_times() -> None:
    wrong = "import time\nx = time.time\nfrom time import time_ns"
    assert sorted(looks_at_the_clock(ast.parse(wrong))) == ["time.time", "time.time_ns"]
    found: dict[str, list[str]] = {}
    files = sorted(file for place in PLACES for file in place.rglob("*.py"))
    assert len(files) > 30
    for file in files:
        looks = looks_at_the_clock(ast.parse(file.read_text(encoding="utf-8")))
        if looks:
            found[file.name] = looks
    # The one stamp of a run, which tells people when it was: nothing is computed from it.
    assert found == {"environment.py": ["datetime.now"]}
