"""ci/gate from end to end: a change with a slow kernel is found, and nothing is left behind, however it ends.

The slowdown is large and the rounds are few, so that a busy machine decides nothing; docs/gate.md has the figures of
5 %, and test_gate_simulation.py holds them on recorded noise.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from gem import paths
from gem.errors import RequestError
from gem.harness import gate_cases, gate_trial
from gem.harness.gate_rounds import Side, run_round
from gem.harness.gate_stats import LOOKS, SCREEN_ROUNDS

ROOT = paths.checkout_root()
HERE = ROOT is not None and (ROOT / ".venv").is_dir() and (ROOT / ".git").exists()
pytestmark = pytest.mark.skipif(not HERE, reason="not run from a checkout with its .venv")
CHEAP = ("suites/throughput/jagged_attention.toml", "-k", "cpu_dense_512", "--budget", "0.2")


def environment(folder: Path) -> dict[str, str]:
    """Temporary files below `folder`; one thread, since other tests run beside."""
    (folder / "tmp").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "GEM_COMMIT")}
    return {**kept, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def worktrees() -> str:
    assert ROOT is not None
    return subprocess.run(
        ["git", "-C", str(ROOT), "worktree", "list"], capture_output=True, text=True, check=True
    ).stdout


def gate(folder: Path, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    assert ROOT is not None
    command = [str(ROOT / "ci" / "gate"), *map(str, words)]
    return subprocess.run(command, env=environment(folder) | variables, capture_output=True, text=True, timeout=400)


def left_in(folder: Path) -> list[str]:
    """Of the gate's; workers' logs and torch's caches are others' business."""
    return [one.name for one in (folder / "tmp").iterdir() if one.name.startswith("gem-gate")]


def test_a_slow_kernel_fails_the_gate_and_nothing_is_left(tmp_path: Path) -> None:
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    change = gate_trial.make(tmp_path / "change", slower=1.5, commit=head)
    out = tmp_path / "out" / "gate"
    done = gate(tmp_path, head, "--new", change, "--rounds", "1", "--limit", "0", "--out", out, "--", *CHEAP)
    assert done.returncode == 1, done.stderr + done.stdout
    verdict = json.loads(out.with_suffix(".json").read_text())
    found = {row["direction"]: row for row in verdict["rows"]}
    assert found["forward"]["verdict"] == "worse", done.stdout
    assert found["forward"]["finding"]["change"] > 0.6
    assert verdict["declarations"] == "declarations of the checkout change"
    assert found["forward"]["threshold_of"] != "no declaration"
    assert "❌ worse" in out.with_suffix(".md").read_text()
    base, new = (json.loads((out / side / "001.json").read_text()) for side in ("base", "new"))
    assert base["request"]["turns_with"] == new["request"]["turns_with"]
    (a,), (b,) = (
        [len(row["samples"]) for row in one["rows"] if (row["metric"], row["direction"]) == ("ms", "forward")]
        for one in (base, new)
    )
    assert a == b
    assert base["environment"]["git_commit"] == head
    assert base["environment"]["git_dirty"] is False
    assert str(tmp_path) not in worktrees()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_stopped_half_way_it_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    assert ROOT is not None
    (tmp_path / "out.md").write_text("the verdict of another day")
    command = [str(ROOT / "ci" / "gate"), "HEAD", "--out", str(tmp_path / "out"), "--", *CHEAP]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, env=environment(tmp_path), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not _running(tmp_path) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert process.poll() is None, (tmp_path / "log").read_text()
        process.send_signal(how)
        assert process.wait(60) == 128 + how
        told = (tmp_path / "out.md").read_text()
        assert told.startswith("### ⛔ gate: ended before its verdict") and str(128 + how) in told
        assert not (tmp_path / "out.json").exists()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert str(tmp_path) not in worktrees()
    assert left_in(tmp_path) == []
    for _ in range(50):
        if not _running(tmp_path):
            break
        time.sleep(0.1)
    assert _running(tmp_path) == []


def _running(folder: Path) -> list[str]:
    """Processes of a round, known by the folder that their documents go to."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any("gate_turns.py" in word for word in words) and any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--round", "3"], "unknown option --round"),
        (["HEAD", "HEAD~1"], "two bases"),
        (["--rounds", "many"], "--rounds many; accepted: a whole number"),
        (["--rounds"], "--rounds without a value"),
        (["--new", "/nowhere"], "no checkout"),
        (["no-such-branch"], "no commit no-such-branch"),
        (["HEAD", "--", "--json", "x"], "--json: the gate gives that itself"),
        (["HEAD", "--", "-k", "nothing_like_it"], "no case"),
    ],
)
def test_wrong_requests_exit_2(words: list[str], said: str, tmp_path: Path) -> None:
    done = gate(tmp_path, "--out", tmp_path / "out", *words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert left_in(tmp_path) == []


def test_the_script_looks_when_the_gate_judges_and_by_the_changes_declarations() -> None:
    assert ROOT is not None
    text = (ROOT / "ci" / "gate").read_text()
    assert f"for look in {' '.join(map(str, LOOKS))}; do" in text
    assert f"rounds={SCREEN_ROUNDS} limit={LOOKS[-1]} " in text
    assert '--declarations "$new"' in text
    assert f"({LOOKS[-1]}; judged after {LOOKS[0]}, {LOOKS[1]} and {LOOKS[2]})" in text


# ---- whose declarations


SUITE = """
[suite]
kind = "throughput"
subject = "gdpa"
[[case]]
name = "one"
fixture = "cpu_self_s050"
{more}
"""


def test_the_change_declares_the_cases_where_the_base_can_read_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, new = gate_trial.make(tmp_path / "base", 0.0), gate_trial.make(tmp_path / "new", 0.0)
    more = '[[case]]\nname = "two"\nfixture = "cpu_self_s050"\nparams = { heads = 2 }'
    for home, text in ((base, '[[case]]\nname = "gone"\nfixture = "cpu_self_s050"'), (new, more)):
        (home / "suites" / "throughput" / "mine.toml").write_text(SUITE.format(more=text))
    words = ["--base", str(base), "--new", str(new), "--out", str(tmp_path / "out"), "suites/throughput/mine.toml"]
    gate_cases.main(words)
    assert capsys.readouterr().out == "new\n"
    label = "suites/throughput/mine.toml::"
    assert (tmp_path / "out" / "cases").read_text().split() == [f"{label}one", f"{label}two"]
    assert (tmp_path / "out" / "declared").read_text().split() == [f"{label}one", f"{label}gone"]

    # A base whose gem does not know a word of the declaration runs its own, of what both declare alike.
    case = base / "gem" / "harness" / "case.py"
    case.write_text(case.read_text().replace("    gate: GateParams | None", "    gates: GateParams | None"))
    text = more + '\n[[case]]\nname = "gone"\nfixture = "cpu_self_longtail"\ngate = { threshold = 0.1 }'
    (new / "suites" / "throughput" / "mine.toml").write_text(SUITE.format(more=text))
    gate_cases.main(words)
    out, err = capsys.readouterr()
    assert out == "own\n"
    assert "unknown field 'gate'" in err
    assert (tmp_path / "out" / "cases").read_text().split() == [f"{label}one"]
    assert f"not compared: {label}two: only in the change" in err
    assert f"not compared: {label}gone: declared otherwise" in err


def test_a_round_whose_side_cannot_run_says_which_and_why(tmp_path: Path) -> None:
    assert ROOT is not None
    lost = tmp_path / "lost"
    lost.mkdir()
    shutil.copytree(ROOT / "gem", lost / "gem", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    sides = [Side("base", lost, ROOT), Side("new", ROOT, ROOT)]
    with pytest.raises(RequestError, match=r"round 1: gem run of the base ended with \d+: .*"):
        run_round(sides, 1, tmp_path / "out", ["suites/throughput/none.toml"])


def test_a_python_that_is_named_is_used_as_it_is(tmp_path: Path) -> None:
    """A GPU machine without a network has torch and no .venv: nothing is set up then, and gem need not be installed."""
    assert ROOT is not None
    words = ("HEAD", "--out", tmp_path / "out", "--", "-k", "nothing_like_it")
    done = gate(tmp_path, *words, PYTHON=str(ROOT / ".venv/bin/python"))
    assert done.returncode == 2 and "no case" in done.stderr and "[setup]" not in done.stderr
    (tmp_path / "empty").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "empty").chmod(0o755)
    for python, said in (("/nowhere/python", "no such program"), (str(tmp_path / "empty"), "has not the packages")):
        done = gate(tmp_path, *words, PYTHON=python)
        assert done.returncode == 2 and said in done.stderr
