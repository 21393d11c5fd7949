"""A run's data on its disk: what a killed run left of a log's samples goes; a disk without room is told of by path."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gem.data.build import BuildConfig
from gem.train.config import LogData, TrainConfig
from gem.train.sources import open_sources
from gem.train.world import World, join

_BUILD = """
import sys
from gem.data.build import build_dataset
from gem.errors import RequestError
try:
    build_dataset(sys.argv[1], sys.argv[2])
except RequestError as error:
    print(error)
"""


def log_of(path: Path, rows: int = 400) -> Path:
    each = ((i * 7 % 23, i * 5 % 17, 1 + i * 3 % 5, 1_000_000 + i // 2) for i in range(rows))
    path.write_text("userId,movieId,rating,timestamp\n" + "".join(f"{u},{m},{r},{t}\n" for u, m, r, t in each))
    return path


def config_of(log: Path, **build: Any) -> TrainConfig:
    return TrainConfig(data=LogData(kind="log", path=str(log), build=BuildConfig(**build)))


@pytest.fixture
def world():
    with join("cpu") as found:
        yield found


def test_what_a_killed_run_left_of_a_logs_samples_goes_with_the_next_build(tmp_path, world: World):
    log, out = log_of(tmp_path / "log.csv"), tmp_path / "out"
    # Killed while it writes, as SIGKILL does it: nothing of Python runs any more.
    killed = (
        "import os, sys, signal\nimport gem.data.build as build\nfrom gem.data.build import build_dataset\n"
        "write = build.write_samples\n"
        "def once(*a, **k):\n    write(*a, **k)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "build.write_samples = once\nbuild_dataset(sys.argv[1], sys.argv[2])\n"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(log), str(out / "data" / "0123")], timeout=120)
    (left,) = (out / "data").iterdir()
    assert done.returncode == -9 and left.name.startswith(".0123.") and list(left.rglob("*.parquet"))
    sources = open_sources(config_of(log), out, world)
    (built,) = (out / "data").iterdir()
    assert len(sources.train) == 320 and not built.name.startswith(".")
    open_sources(config_of(log, history=4), out, world)  # another build leaves the first one
    assert built.is_dir() and len(list((out / "data").iterdir())) == 2


def test_a_full_disk_is_told_with_the_path_and_leaves_nothing(tmp_path):
    """A real file system of 1 MiB in a mount namespace of its own."""
    log, place = log_of(tmp_path / "log.csv", 40_000), tmp_path / "disk"
    place.mkdir()
    shell = f'mount -t tmpfs -o size=1m none {place} && "$@"; ls -A {place}'
    command = ["unshare", "-rm", "sh", "-c", shell, "sh", sys.executable, "-c", _BUILD, str(log), str(place / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no mount namespaces here")
    (message,) = done.stdout.splitlines()
    told = rf"{place}/\.data\.\w+\.partial/train: cannot be written: No space left on device; free on its disk: 0\.00 "
    assert re.match(told, message), done
    assert message.endswith("accepted: a disk that can be written, with room for it")


def test_a_limit_on_files_is_told_with_the_path_too(tmp_path):
    """As above where nothing can be mounted: the kernel refuses to make a file as long."""
    log = log_of(tmp_path / "log.csv", 40_000)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
    command = [sys.executable, "-c", limit + _BUILD, str(log), str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.match(rf"{tmp_path}/\.data\.\w+\.partial/train: cannot be written: File too large; free", done.stdout), (
        done
    )
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_folder_that_cannot_be_made_is_told_with_the_path(tmp_path):
    log = log_of(tmp_path / "log.csv")
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(log), str(tmp_path / "file" / "data")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith(f"{tmp_path}/file/data: cannot be written: "), done
