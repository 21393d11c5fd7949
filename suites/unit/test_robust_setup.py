"""ci/setup leaves alone what is another checkout's."""

import subprocess
from pathlib import Path

import pytest

from gem import paths

ROOT = paths.checkout_root()


@pytest.mark.skipif(ROOT is None, reason="no checkout: an installed package has no ci/")
@pytest.mark.parametrize("there", [True, False], ids=["there", "dangling"])
def test_a_linked_environment_is_refused_in_one_line(there: bool, tmp_path: Path) -> None:
    """A stand-in for another's: whatever is called in it leaves a trace."""
    assert ROOT is not None
    mine, other = tmp_path / "mine", tmp_path / "other"
    (mine / "ci").mkdir(parents=True)
    (mine / "ci" / "setup").write_bytes((ROOT / "ci" / "setup").read_bytes())
    if there:
        (other / "bin").mkdir(parents=True)
        python = other / "bin" / "python"
        python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\nexit 1\n')
        python.chmod(0o755)
    (mine / ".venv").symlink_to(other)
    # Without a PATH in which a Python could be found, a set-up that begins ends at once all the same.
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "no-such-python"}
    command = ["bash", str(mine / "ci" / "setup")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    told = f".venv is a link to {other}, whose packages would be replaced; accepted: a folder, or nothing"
    assert done.stderr == f"gem: error: {told}\n"
    assert not (tmp_path / "called").exists()
    assert sorted(path.name for path in mine.iterdir()) == [".venv", "ci"] and other.exists() == there
    assert not there or [path.name for path in other.iterdir()] == ["bin"]
