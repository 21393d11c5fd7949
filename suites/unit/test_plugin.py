"""Declared cases as pytest items: a pytest of its own over a small directory, with a stand-in for the runner."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gem

ROOT = Path(gem.__file__).resolve().parents[1]
# Passes, fails, errors or skips a case by its name, and writes down what the plugin asked of it.
RUNNER = """
import contextlib, os, sys, types
from gem.harness.results import Row

def run_case(case, options, session):
    log(f"run {case.name} {options.device} {session}")
    row = lambda status, **more: Row(suite=str(case.suite), case=case.name, impl="torch", direction="forward",
                                     metric="max_error", status=status, **more)
    if case.name == "crash":
        raise RuntimeError("the runner itself broke")
    if case.name == "silent":
        return []
    peer = row("oom", reason="peer out of memory").model_copy(update={"impl": "flex"})
    return {
        "good": [row("pass", value=1e-6), peer],
        "wrong": [row("pass", value=1e-6), row("fail", value=0.5, reason="dq: bound 2e-05")],
        "away": [row("skipped", reason="no implementation here")],
    }[case.name]

@contextlib.contextmanager
def open_session(options):
    log("open")
    yield "session"
    log("close")

def log(text):
    with open("log", "a") as file:
        print(text, file=file)

module = types.ModuleType("gem.harness.runner")
module.run_case, module.open_session = run_case, open_session
module.RunOptions = lambda **given: types.SimpleNamespace(**given)
sys.modules[module.__name__] = module
"""


def suite(*cases: str) -> str:
    head = '[suite]\nkind = "correctness"\nsubject = "gdpa"\n[suite.defaults]\nfixture = "pma_q32"\n'
    return head + "".join(f'[[case]]\nname = "{case}"\n' for case in cases)


def run_pytest(folder: Path, *arguments: str, plugin: bool = True) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(RUNNER)
    (folder / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "gem.harness.pytest_plugin"] if plugin else []
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "-rs", "-v", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "COLUMNS": "150", "GEM_DEVICE": "cpu"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_cases_are_items_with_their_own_outcome(tmp_path: Path) -> None:
    folder = tmp_path / "suites" / "correctness"
    folder.mkdir(parents=True)
    gpu = '[[case]]\nname = "gpu"\nneeds = "cuda:sm990"\n'
    (folder / "gdpa.toml").write_text(suite("good", "wrong", "away", "silent", "crash") + gpu)
    (tmp_path / "tool.toml").write_text("[tool]\nname = 'no suite'\n")
    found = run_pytest(tmp_path)
    out = found.stdout
    assert found.returncode == 1, out + found.stderr
    node = "suites/correctness/gdpa.toml::"
    for case, outcome in [("good", "PASSED"), ("wrong", "FAILED"), ("away", "SKIPPED"), ("gpu", "SKIPPED")]:
        assert any(line.startswith(f"{node}{case} {outcome}") for line in out.splitlines()), (case, out)
    assert "3 failed, 1 passed, 2 skipped" in out
    # The failing row in one readable line, without a traceback; the passing one is not among the wrong.
    assert f"{node}wrong: 1 of 2 rows are not right" in out
    assert "  fail    torch forward max_error = 0.5: dq: bound 2e-05\n" in out
    assert f"{node}silent: 0 of 0 rows are not right\n  no row of the subject: the runner returned nothing" in out
    assert "no implementation here" in out and "needs cuda:sm990: " in out
    # A runner that breaks is a bug, shown with its traceback.
    assert "RuntimeError: the runner itself broke" in out and 'raise RuntimeError("the runner' in out
    log = (tmp_path / "log").read_text().splitlines()
    assert log[0] == "open" and log[-1] == "close" and log.count("open") == log.count("close") == 1
    assert log[1:-1] == [f"run {case} cpu session" for case in ("good", "wrong", "away", "silent", "crash")]


def test_one_case_is_asked_for_by_its_id_or_by_k(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(suite("good", "wrong"))
    by_id = run_pytest(tmp_path, "a.toml::good")
    assert by_id.returncode == 0 and "1 passed" in by_id.stdout, by_id.stdout
    by_name = run_pytest(tmp_path, "-k", "good and correctness and pma_q32")
    assert by_name.returncode == 0 and "1 passed, 1 deselected" in by_name.stdout, by_name.stdout


def test_a_wrong_declaration_is_a_collection_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(suite("good") + "params = { head = 4 }\n")
    (tmp_path / "fine.toml").write_text(suite("good"))
    found = run_pytest(tmp_path)
    assert found.returncode == 2
    assert "ERROR collecting bad.toml" in found.stdout and "Traceback" not in found.stdout
    (line,) = [line for line in found.stdout.splitlines() if "unknown param 'head' of gdpa" in line]
    assert line.startswith(f"{tmp_path}/bad.toml: case 'good': ") and line.endswith("did you mean 'heads'?")


def test_nothing_runs_and_no_session_opens_for_a_listing(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(suite("good"))
    found = run_pytest(tmp_path, "--collect-only", "-qq")
    assert found.returncode == 0 and "a.toml::good" in found.stdout
    assert not (tmp_path / "log").exists()


def test_the_projects_suites_are_collected_by_their_conftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every TOML file there is a suite: one whose [suite] is misspelt is an error, not a file passed over."""
    import types

    from gem.harness import pytest_plugin

    monkeypatch.setattr("gem.paths.suites_dir", lambda: tmp_path)
    namespace = types.ModuleType("conftest")
    exec((ROOT / "suites" / "conftest.py").read_text(), namespace.__dict__)
    taken = []
    monkeypatch.setattr(pytest_plugin.SuiteFile, "from_parent", lambda parent, path: taken.append(path) or path)
    for name in ("throughput/a.toml", "unit/b.toml", "throughput/c.txt", "claims.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("[suit]\n")
        namespace.__dict__["pytest_collect_file"](tmp_path / name, None)
    assert [path.name for path in taken] == ["a.toml", "claims.toml"]
