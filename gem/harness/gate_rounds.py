"""One round of the gate: the base's `gem run` and the change's side by side, turn by turn; a document of each.

    python -m gem.harness.gate_rounds --base DIR --new DIR --out DIR --number 3 [--suites new|own] -- GEM_RUN_ARGUMENTS

writes OUT/base/<number>.json and OUT/new/<number>.json. Both run in one environment; PYTHONPATH says whose `gem` is
imported, and each refuses another (see gate_turns.py). Base and change take the first turn in alternate rounds.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem.errors import RequestError, exit_code_of
from gem.harness import gate_turns
from gem.harness.results import write_text

PAIRED = "turns_with"  # in a document's request: the id of the round; its samples lie beside the other document's


@dataclass(frozen=True)
class Side:
    """One of both runs: `home` is the checkout whose gem it runs, `where` the directory that it runs in.

    `commit`: the one that its document must name, where that is known.
    """

    name: str
    home: Path
    where: Path
    commit: str | None = None


def run_round(sides: Sequence[Side], number: int, out: Path, arguments: Sequence[str]) -> list[Path]:
    """Run both sides' `gem run ARGUMENTS`; returns the documents, `out`/<side>/<number>.json, in the order of `sides`.

    Raises RequestError when a side refuses the request (exit 2) or ends without a document.
    """
    _share_cores()
    ends = [os.pipe() for _ in sides]  # ends[i]: what side i reads, and where the other writes
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in sides]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gem-gate-")))
        running: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, running)
        # Identical code must have no place of its own: who starts, and who turns, first goes round.
        order = (0, 1) if number // 2 % 2 else (1, 0)
        for i in order:
            side, (read_fd, write_fd) = sides[i], (ends[i][0], ends[1 - i][1])
            first = ["--first"] if number % 2 == i else []
            program = [sys.executable, "-P", gate_turns.__file__, *first, str(side.home), str(read_fd), str(write_fd)]
            command = [*program, "run", *arguments, "--json", str(folder / f"{i}.json")]
            env = {**os.environ, "PYTHONPATH": str(side.home)}
            running.append(
                subprocess.Popen(
                    command, cwd=side.where, env=env, pass_fds=(read_fd, write_fd),
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=logs[i],
                )
            )  # fmt: skip
        for pair in ends:
            for fd in pair:
                os.close(fd)
        codes = [running[order.index(i)].wait() for i in range(len(sides))]
        documents = [_document(folder / f"{i}.json") for i in range(len(sides))]
        for side, code, document, log in zip(sides, codes, documents, logs, strict=True):
            if code not in (0, 1) or document is None:
                raise RequestError(f"round {number}: gem run of the {side.name} ended with {code}: {_last_line(log)}")
            measured = document["environment"].get("git_commit")
            if side.commit is not None and measured not in (None, side.commit):
                raise RequestError(f"round {number}: the {side.name} measured commit {measured}, not {side.commit}")
        return [
            _keep(document or {}, out / side.name / f"{number:03d}.json", number)
            for side, document in zip(sides, documents, strict=True)
        ]


def _share_cores() -> None:
    """Where one thread or a few are to be used, keep both runs on the same cores: one may be busier than another."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if hasattr(os, "sched_setaffinity") and threads.isdigit():
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[-max(1, int(threads)) :])


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _document(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _last_line(log: Any) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "it said nothing"
    )


def _keep(document: dict[str, Any], path: Path, number: int) -> Path:
    """The document as the other commit's schema wrote it, and that its turns alternated with its partner's."""
    document.setdefault("request", {})[PAIRED] = f"round {number}"
    return write_text(path, json.dumps(document, indent=1) + "\n")


def main(words: list[str]) -> None:
    """See the module's text."""
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="python -m gem.harness.gate_rounds", allow_abbrev=False)
    parser.add_argument("--base", type=Path, required=True, help="checkout of the base")
    parser.add_argument("--new", type=Path, required=True, help="checkout of the change")
    parser.add_argument("--out", type=Path, required=True, help="folder for base/*.json and new/*.json")
    parser.add_argument("--base-commit", help="commit that the base must be")
    parser.add_argument("--number", type=int, required=True, help="number of the round")
    parser.add_argument("--suites", choices=("new", "own"), default="new", help="whose declarations the base runs")
    given = parser.parse_args(words[:split])
    base, new = given.base.resolve(), given.new.resolve()
    where = new if given.suites == "new" else base
    started = time.monotonic()
    sides = [Side("base", base, where, given.base_commit), Side("new", new, new)]
    run_round(sides, given.number, given.out, words[split + 1 :])
    print(f"round {given.number}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that both runs are ended, and folders removed
    sys.exit(exit_code_of(main, sys.argv[1:]))
