"""A trial of the gate: a throw-away copy of a commit, one kernel of which is slower by a known share.

    python -m gem.harness.gate_trial DIR [--slower 0.05] [--kernel softmax] [--commit HEAD]
    ./ci/gate HEAD --new DIR -- -k "jagged_attention and cpu_dense"

The forward of gem/portable/<kernel>.py works on for the given share of the time that it took, on the same core.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from gem import paths
from gem.errors import RequestError, exit_code_of

KERNELS = ("softmax", "pointwise", "block")
SLOWER = """

# ---- a trial of the gate: slower by a share of the time that a call takes

import time as _time  # noqa: E402

_forward = forward


def forward(*args, **named):  # type: ignore[no-redef]
    start = _time.perf_counter()
    result = _forward(*args, **named)
    end = _time.perf_counter()
    until = end + {share!r} * (end - start)
    while _time.perf_counter() < until:
        pass
    return result
"""


def make(folder: Path, slower: float, kernel: str = "softmax", commit: str = "HEAD") -> Path:
    """Put the files of `commit` into `folder`, which must not be there, and slow its kernel. Returns the folder.

    Raises RequestError outside a checkout, for a folder that is there, and when git cannot give the files.
    """
    root = paths.checkout_root()
    if root is None:
        raise RequestError("no checkout; accepted: run from one, whose commit is copied")
    if folder.exists():
        raise RequestError(f"{folder}: is there already; accepted: a new folder")
    folder.mkdir(parents=True)
    git = subprocess.run(["git", "-C", str(root), "archive", commit], capture_output=True)
    if git.returncode:
        raise RequestError(f"commit {commit}: {git.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=git.stdout, check=True)
    source = folder / "gem" / "portable" / f"{kernel}.py"
    source.write_text(source.read_text(encoding="utf-8") + SLOWER.format(share=slower), encoding="utf-8")
    return folder


def main(words: list[str]) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m gem.harness.gate_trial", allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slower", type=float, default=0.05)
    parser.add_argument("--kernel", choices=KERNELS, default="softmax")
    parser.add_argument("--commit", default="HEAD")
    given = parser.parse_args(words)
    print(make(given.folder, given.slower, given.kernel, given.commit))


if __name__ == "__main__":
    sys.exit(exit_code_of(main, sys.argv[1:]))
