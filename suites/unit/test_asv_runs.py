"""ci/asv for real: commits of a small repository measured in worktrees, and sources that have no repository."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gem import paths

ROOT = paths.checkout_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="not run from a checkout")
pytest.importorskip("asv")

SUITE = """
[suite]
kind = "scaling"
subject = "bbs"
[[case]]
name = "small"
params = { batch = 64, base = 32, pool = 8, ranks = 4, steps = 2 }
expect = { max_over_mean = ">= 1" }
"""
BENCHMARK = "benchmarks.bbs__small.track_max_over_mean"
SUBJECT = "gem/harness/subject_bbs.py"


def git(here: Path, *words: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    return subprocess.run(
        ["git", "-C", str(here), *who, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def copy(here: Path) -> None:
    """Sources as a checkout has them, with one declared case that is quick."""
    assert ROOT is not None
    junk = shutil.ignore_patterns("__pycache__")
    for folder in ("gem", "kernels", "fixtures", "suites/asv"):
        shutil.copytree(ROOT / folder, here / folder, symlinks=True, ignore=junk)
    (here / "ci").mkdir()
    for file in ("pyproject.toml", "asv.conf.json", "ci/asv"):
        shutil.copy(ROOT / file, here / file)
    (here / "suites" / "scaling").mkdir()
    (here / "suites" / "scaling" / "small.toml").write_text(SUITE, encoding="utf-8")


def run(here: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "GEM_"))}
    own = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "GEM_DEVICE": "cpu", "TMPDIR": str(here.parent)}
    return subprocess.run(
        [str(here / "ci" / "asv"), *words], cwd=here.parent, env=kept | own | env, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def results(here: Path, commit: str) -> dict[str, Any]:
    (path,) = (here / "ci" / "measured" / "asv" / "cpu").glob(f"{commit[:8]}-*.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Three commits: as it is; whose code cannot be imported; that finds one more. And a change that no commit has."""
    here = tmp_path_factory.mktemp("asv") / "checkout"
    copy(here)
    git(here.parent, "init", "-q", str(here))
    plain = (here / SUBJECT).read_text(encoding="utf-8")
    more = plain.replace('"max_over_mean", found.max_over_mean', '"max_over_mean", found.max_over_mean + 1')
    assert more != plain
    commits = []
    case = (here / "gem" / "harness" / "case.py").read_text(encoding="utf-8")
    for subject, check in ((plain, case), (plain, "raise ImportError('half done')\n"), (more, case)):
        (here / SUBJECT).write_text(subject, encoding="utf-8")
        (here / "gem" / "harness" / "case.py").write_text(check, encoding="utf-8")
        git(here, "add", "-A")
        git(here, "commit", "-q", "-m", "a commit")
        commits.append(git(here, "rev-parse", "HEAD"))
    (here / SUBJECT).write_text("raise ImportError('not committed')\n", encoding="utf-8")
    return here, commits


def test_each_commit_of_a_range_is_measured_in_its_own_tree(repository: tuple[Path, list[str]]) -> None:
    here, (first, broken, last) = repository
    before = git(here, "status", "--porcelain")
    done = run(here, "-b", "max_over_mean", f"{last}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "what is not committed is not measured" in done.stderr
    done = run(here, "--skip-existing", "-b", "max_over_mean", "HEAD~2..HEAD")  # the broken one, and one that is there
    assert done.returncode == 2, done.stdout + done.stderr
    done = run(here, "-b", "max_over_mean", first)
    assert done.returncode == 0, done.stdout + done.stderr
    # The workers that measured had the commit's code, not that of the folder nor that which is installed.
    values = [results(here, one)["results"][BENCHMARK][0][0] for one in (first, last)]
    assert values[0] >= 1 and values[1] == pytest.approx(values[0] + 1, rel=1e-4)
    told = (here / "ci" / "measured" / "asv" / "cpu" / "not-measured.txt").read_text()
    assert told == f"{broken[:10]} ImportError: half done\n"
    # Nothing is left of it but the results.
    assert git(here, "worktree", "list").count("\n") == 0
    assert not list(here.parent.glob("gem-asv-*"))
    assert {*git(here, "status", "--porcelain").splitlines()} - {*before.splitlines()} == {"?? ci/measured/"}
    assert str(here) not in (here / "ci" / "measured" / "asv" / "benchmarks.json").read_text(encoding="utf-8")
    assert BENCHMARK in json.loads((here / "ci" / "measured" / "asv" / "benchmarks.json").read_text(encoding="utf-8"))


def test_sources_without_their_repository_and_the_way_home(repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    here, (first, *_) = repository
    away = tmp_path / "away"
    copy(away)
    out = tmp_path / "out"
    refused = run(away, "--out", str(out))
    assert refused.returncode == 1 and "no repository here; accepted: GEM_COMMIT=" in refused.stderr
    done = run(away, "--out", str(out), "--machine", "other", "-b", "max_over_mean", GEM_COMMIT=first[:7])
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (out / "other").glob("*-*.json")
    assert path.name.startswith(first[:7])
    index = here / "ci" / "measured" / "asv" / "benchmarks.json"
    index.unlink(missing_ok=True)
    home = run(here, "adopt", str(out))
    assert home.returncode == 0, home.stdout + home.stderr
    assert BENCHMARK in json.loads(index.read_text(encoding="utf-8"))  # else their pages would not show it
    (path,) = (here / "ci" / "measured" / "asv" / "other").glob("*-*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["commit_hash"] == first and found["params"]["machine"] == "other"
    assert found["date"] == 1000 * int(git(here, "show", "-s", "--format=%at", first))
    assert found["results"][BENCHMARK][0][0] >= 1


def test_nothing_is_left_of_a_run_that_was_stopped(repository: tuple[Path, list[str]]) -> None:
    """By Ctrl-C, which a terminal sends to all processes of a command."""
    here, (first, *_) = repository
    command = [str(here / "ci" / "asv"), "-b", "max_over_mean", first]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "GEM_"))}
    env = kept | {"PYTHON": sys.executable, "GEM_DEVICE": "cpu", "TMPDIR": str(here.parent)}
    with subprocess.Popen(
        command, cwd=here, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        said = []
        for line in running.stdout:
            said.append(line)
            if "Discovering" in line:
                break
        assert len(list(here.parent.glob("gem-asv-*/tree/gem"))) == 1, said
        os.killpg(running.pid, signal.SIGINT)
        running.stdout.read()
        assert running.wait(60) == 130
    assert git(here, "worktree", "list").count("\n") == 0 and not list(here.parent.glob("gem-asv-*"))


def test_what_is_asked_wrongly_is_said_in_a_line(repository: tuple[Path, list[str]]) -> None:
    here, _ = repository
    for words, said in (
        (["no-such-branch"], "no-such-branch: no commit"),
        (["--what"], "unknown option --what"),
        (["HEAD..HEAD"], "HEAD..HEAD: no commit in it"),
        (["--machine", "A B"], "accepted: lower-case letters"),
    ):
        done = run(here, *words)
        assert done.returncode == 1 and said in done.stderr, (words, done.stderr)
        assert len([line for line in done.stderr.splitlines() if "asv" in line]) == 1, done.stderr
