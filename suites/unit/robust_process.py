"""The command line as a process that can be watched, stopped and killed; shared by the tests of its robustness."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gem
from gem.harness.journal import Journal
from gem.harness.results import Row

ROOT = Path(gem.__file__).resolve().parents[1]
CHECKS = """
[suite]
kind = "correctness"
subject = "jagged_attention"
[[case]]
name = "c"
fixture = "empty_middle"
impls = ["torch"]
params = { heads = 2, head_dim = 16 }
matrix = { seed = [%s] }
"""
SKIPS = """
[suite]
kind = "correctness"
subject = "jagged_attention"
[[case]]
name = "elsewhere"
fixture = "empty_middle"
needs = "cuda:sm990"
matrix = { seed = [%s] }
"""


def suite(template: str, cases: int) -> str:
    """The text of a suite of so many cases."""
    return template % ", ".join(map(str, range(cases)))


def environment(**more: str) -> dict[str, str]:
    """Of a process: nothing of the test runner's that says what its output goes to."""
    hidden = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    inherited = {key: value for key, value in os.environ.items() if key not in hidden}
    # Without the commit's own: a commit made while the tests run would be another one.
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GEM_COMMIT": "tested", **more}


def start(*arguments: object, cwd: Path, **given: Any) -> subprocess.Popen[str]:
    """The command line, started; its outputs are pipes unless told otherwise."""
    given.setdefault("env", environment())
    given.setdefault("stdout", subprocess.PIPE)
    given.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-m", "gem", *map(str, arguments)], cwd=cwd, text=True, **given)


def run(*arguments: object, cwd: Path, **given: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command line, when it has ended."""
    process = start(*arguments, cwd=cwd, **given)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def until(condition: Callable[[], Any], what: str, within_s: float = 300.0) -> Any:
    """What the condition gives once it gives something; fails when it does not in time."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.01)
    return found


def entries(journal: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal that may be written just now."""
    if not journal.exists():
        return []
    return [json.loads(line) for line in journal.read_bytes().split(b"\n")[:-1]]


def finished(journal: Path) -> list[str]:
    """Ids of the cases in it."""
    return [entry["case"] for entry in entries(journal) if "case" in entry]


def descendants(pid: int) -> set[int]:
    """Ids of the processes that it started, and they."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(words[1]), []).append(int(stat.parent.name))
    found, todo = set(), [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found.update(children)
        todo += children
    return found


def alive(pid: int) -> bool:
    """Neither gone nor waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def left(folder: Path) -> list[str]:
    """Names in the folder of temporary files, without what compilers keep there for the next time."""
    return [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")]


def mounted(folder: Path, *options: str) -> bool:
    """Whether this user may mount, and did."""
    command = ["mount", *options, str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


# ---- journals


def rows(case: str, count: int = 1) -> list[Row]:
    """Rows as a case leaves them."""
    return [
        Row(
            suite="s.toml",
            case=case,
            impl="torch",
            direction="forward",
            metric="ms",
            value=n,
            samples=[n],
            status="pass",
        )
        for n in range(count)
    ]


IDENTITY: dict[str, Any] = {
    "request": {"device": "cpu", "peers": None, "impls": ["torch"], "lengths": None, "batch": 7, "budget_s": 3.0},
    "cases": {"s.toml::one": "1", "s.toml::two": "2"},
    "code": "abc",
    "environment": {"torch": "2.13.0", "git_commit": "f00", "git_dirty": False, "device": "cpu", "gpu": None},
}


def begun(target: Path, resume: bool = False, warn: Any = print, identity: Any = None, time: str = "t1") -> Journal:
    journal = Journal(target, resume, warn)
    try:
        journal.begin(identity or IDENTITY, {"time": time, "host": "h"})
    except BaseException:
        journal.close()
        raise
    return journal
