"""The harness's figures as pytest-benchmark's: a pytest of its own over a small suite, and what it must not pass over.

One test runs the real runner. Those of what pytest-benchmark compares have a stand-in for it, whose samples are given.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gem
from gem.data.lengths import load_profile

ROOT = Path(gem.__file__).resolve().parents[1]
pytest.importorskip("pytest_benchmark")

# Samples in ms of the implementation and of a peer; the peer fails where its file says so.
RUNNER = """
import contextlib, json, sys, types
from gem.harness.results import Row

def run_case(case, options, session):
    def row(impl, metric, value=None, samples=(), status="pass", unit="", reason=""):
        return Row(suite=str(case.suite), case=case.name, impl=impl, direction="forward", metric=metric, value=value,
                   samples=list(samples), status=status, unit=unit, reason=reason)
    told = json.load(open("told.json"))
    ms = told["ms"]
    rows = [row("torch", "ms", 2.0 * ms, [1.0 * ms, 2.0 * ms, 3.0 * ms], unit="ms"), row("torch", "tflops", 0.5)]
    if told["peer"] == "oom":
        return rows + [row("padded", "ms", status="oom", reason="out of memory")]
    return rows + [row("padded", "ms", 4.0, [4.0, 4.0], unit="ms")]

@contextlib.contextmanager
def open_session(options):
    yield "session"

module = types.ModuleType("gem.harness.runner")
module.run_case, module.open_session = run_case, open_session
module.RunOptions = lambda **given: types.SimpleNamespace(**given)
sys.modules[module.__name__] = module
"""
HEAD = '[suite]\nkind = "throughput"\nsubject = "gdpa"\n[suite.defaults]\nfixture = "single_token"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(RUNNER)
    tell(tmp_path)
    declare(tmp_path, "one", "two")
    return tmp_path


def declare(folder: Path, *cases: str, more: str = "") -> None:
    (folder / "a.toml").write_text(HEAD + "".join(f'[[case]]\nname = "{case}"\n{more}' for case in cases))


def tell(folder: Path, ms: float = 1.0, peer: str = "fine") -> None:
    (folder / "told.json").write_text(json.dumps({"ms": ms, "peer": peer}))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    off = ["cacheprovider", "hypothesispytest", *(["xdist"] if "-n2" not in arguments else [])]  # a second each
    plugins = [word for name in ("gem.harness.pytest_plugin", *(f"no:{one}" for one in off)) for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", *plugins, *arguments]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env = {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "GEM_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def saved(folder: Path, *arguments: str) -> None:
    """An earlier run, to compare with."""
    done = run(folder, "--benchmark-save=before", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def said(done: subprocess.CompletedProcess[str], start: str) -> list[str]:
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(start)]


def test_figures_are_the_runners_own(tmp_path: Path) -> None:
    """The real runner on one token: entries as its rows, with the place of the run."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    more = 'peers = ["padded", "fa4"]\ndirections = ["forward"]\nparams = { heads = 2, head_dim = 16 }\n'
    declare(tmp_path, "tiny", more=more)
    done = run(tmp_path, "--benchmark-json=out.json", "--benchmark-only")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    found = {one["name"]: one for one in document["benchmarks"]}
    assert sorted(found) == ["tiny[padded-forward]", "tiny[torch-forward]"]
    lengths = load_profile("single_token").draw()
    pairs = int((lengths.q * lengths.k).sum())
    ours, theirs = found["tiny[torch-forward]"], found["tiny[padded-forward]"]
    assert ours["fullname"] == "a.toml::tiny[torch-forward]" and ours["group"] == "a.toml::tiny forward"
    for entry in (ours, theirs):
        info, data = entry["extra_info"], entry["stats"]["data"]
        assert len(data) >= 3 and info["ms"] == pytest.approx(1e3 * statistics.median(data))
        assert entry["stats"]["median"] == pytest.approx(statistics.median(data))
        assert info["tflops"] == pytest.approx(4 * 2 * 16 * pairs / (info["ms"] * 1e9)) and info["roofline"] > 0
        assert info["status"] == info["case_status"] == "pass" and 0 <= info["max_error"] < 1e-3
        place = info["environment"]
        assert place["device"] == "cpu" and place["gpu"] is None and place["torch"].startswith("2.")
        assert {"driver", "triton", "git_commit", "git_dirty"} <= place.keys()
    ratio = theirs["extra_info"]["ms"] / ours["extra_info"]["ms"]
    assert ours["extra_info"]["ratio_to.padded"] == pytest.approx(ratio)
    assert list(document["gem"]["not_measured"]) == ["a.toml::tiny[fa4-forward]"]
    assert document["gem"]["not_measured"]["a.toml::tiny[fa4-forward]"].startswith("skipped: needs cuda:sm90")
    assert document["machine_info"]["gem"]["device"] == "cpu" and document["gem"]["environment"]["busy_cores"] >= 0


def test_a_slowdown_fails_and_the_same_passes(folder: Path) -> None:
    saved(folder)
    fine = run(folder, "--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert fine.returncode == 0 and not said(fine, "ERROR"), fine.stdout + fine.stderr
    tell(folder, ms=1.2)
    slow = run(folder, "--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert slow.returncode == 1 and "Performance has regressed" in slow.stdout + slow.stderr


@pytest.mark.parametrize(
    "how, options",
    [
        ("-n2", ("--benchmark-json=out.json",)),
        ("-n2", ("--benchmark-save=x",)),
        ("-n2", ("--benchmark-compare", "--benchmark-compare-fail=min:5%")),
        ("--benchmark-disable", ("--benchmark-autosave",)),
        ("--benchmark-skip", ("--benchmark-json=out.json",)),
    ],
)
def test_what_measures_nothing_is_a_usage_error(folder: Path, how: str, options: tuple[str, ...]) -> None:
    if how == "-n2":
        pytest.importorskip("xdist")
    done = run(folder, how, *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = said(done, "ERROR: ")
    assert options[0].partition("=")[0] in line and "nothing would be measured" in line
    assert ("xdist" if how == "-n2" else how) in line


def test_cases_run_beside_xdist_where_no_figures_are_asked_for(folder: Path) -> None:
    pytest.importorskip("xdist")
    done = run(folder, "-n2")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert "Benchmarks are automatically disabled because xdist plugin is active" in done.stderr


def test_a_renamed_benchmark_is_no_pass(folder: Path) -> None:
    saved(folder)
    declare(folder, "one", "zwei")
    what = "is in 0001_before.json and was not measured now"
    gone = [f"a.toml::two[{impl}-forward] {what}" for impl in ("torch", "padded")]
    warned = run(folder, "--benchmark-compare")
    assert warned.returncode == 0 and said(warned, "WARNING: ") == [f"WARNING: {line}" for line in gone]
    failed = run(folder, "--benchmark-compare", "--benchmark-compare-fail=min:500%")
    assert failed.returncode == 1 and said(failed, "ERROR: ") == [f"ERROR: {line}" for line in gone]


def test_a_peer_that_ran_out_of_memory_is_no_pass(folder: Path) -> None:
    saved(folder, "-k", "one")
    tell(folder, peer="oom")
    done = run(
        folder, "-k", "one", "--benchmark-compare", "--benchmark-compare-fail=min:500%", "--benchmark-json=o.json"
    )
    (line,) = said(done, "ERROR: ")
    assert done.returncode == 1 and line.endswith("was not measured now: oom: out of memory")
    document = json.loads((folder / "o.json").read_text())
    assert document["gem"]["not_measured"] == {"a.toml::one[padded-forward]": "oom: out of memory"}


def test_what_was_not_asked_for_is_not_missing(folder: Path) -> None:
    (folder / "b.toml").write_text((folder / "a.toml").read_text())
    saved(folder)
    compare = ("--benchmark-compare", "--benchmark-compare-fail=min:500%")
    for chosen in (("-k", "one"), ("a.toml::one",), ("b.toml",)):
        done = run(folder, *chosen, *compare)
        assert done.returncode == 0 and not said(done, "ERROR"), (chosen, done.stdout + done.stderr)
    (folder / "b.toml").unlink()
    assert len(said(run(folder, *compare), "ERROR: b.toml::")) == 4  # two cases of two contestants


def test_nothing_compared_is_no_pass(folder: Path) -> None:
    """A file under another name: none of its benchmarks is in the earlier run, whose own were not asked for."""
    saved(folder)
    (folder / "a.toml").rename(folder / "a2.toml")
    told = "--benchmark-compare: nothing was compared: none of the 4 benchmarks measured now is among the 4 of 0001_"
    warned = run(folder, "a2.toml", "--benchmark-compare")
    (line,) = said(warned, "WARNING: ")
    assert warned.returncode == 0 and line == f"WARNING: {told}before.json"
    failed = run(folder, "a2.toml", "--benchmark-compare", "--benchmark-compare-fail=median:500%")
    (line,) = said(failed, "ERROR: ")
    assert failed.returncode == 1 and line == f"ERROR: {told}before.json"


def test_nothing_measured_is_no_pass(folder: Path) -> None:
    declare(folder, "one", more='needs = "cuda:sm990"\n')
    done = run(folder, "--benchmark-json=out.json")
    assert done.returncode == 1 and said(done, "ERROR: ") == ["ERROR: --benchmark-json: nothing was measured"]
    assert run(folder, "--benchmark-json=out.json", "--collect-only").returncode == 0
    assert run(folder).returncode == 0  # a skip alone is fine


def test_compare_fail_without_a_run_to_compare_with(folder: Path) -> None:
    done = run(folder, "--benchmark-compare-fail=min:5%")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and len(said(done, "ERROR: ")) == 1


def entries_of(document: dict[str, Any]) -> list[str]:
    return [one["fullname"] for one in document["benchmarks"]]


def test_only_and_skip_know_the_cases(folder: Path) -> None:
    (folder / "test_other.py").write_text("def test_other():\n    pass\n")
    only = run(folder, "--benchmark-only", "--benchmark-json=out.json")
    assert "2 passed, 1 skipped" in only.stdout and len(entries_of(json.loads((folder / "out.json").read_text()))) == 4
    assert "1 passed, 2 skipped" in run(folder, "--benchmark-skip").stdout


def test_without_pytest_benchmark_the_cases_run(folder: Path) -> None:
    done = run(folder, "-p", "no:benchmark")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
