"""Where the output goes does not matter to a run: terminals without colour or width, pipes, closed pipes, full disks.

Kinds: a progress bar's control characters in a log file; `| head` that cost the results.
"""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from robust_process import CHECKS, SKIPS, environment, run, start, suite

from gem.harness.results import read_document

COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-9]|4[0-9]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a suite of three cases that are skipped here, which takes no torch, and one of a case that passes."""
    (tmp_path / "s.toml").write_text(suite(SKIPS, 3))
    (tmp_path / "one.toml").write_text(suite(CHECKS, 1))
    return tmp_path


def on_terminal(folder: Path, *arguments: str, columns: int = 100, **variables: str) -> tuple[int, str]:
    """(exit code, all that appears) of the command line on a terminal of so many columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables.setdefault("TERM", "xterm-256color")
    env = environment(**variables)
    process = start(*arguments, cwd=folder, env=env, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    shown = b""
    while True:
        try:
            read = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not read:
            break
        shown += read
    os.close(ours)
    return process.wait(60), shown.decode().replace("\r\n", "\n")


def test_a_terminal_is_drawn_on_and_coloured(folder: Path) -> None:
    """Else the tests below could not fail."""
    code, shown = on_terminal(folder, "run", "s.toml", "--json", "r.json")
    assert code == 1 and COLOUR.search(shown) and "\x1b[2K" in shown  # lines of the bar, cleared
    assert "3 skipped: nothing ran" in shown


def test_no_color_is_obeyed(folder: Path) -> None:
    code, shown = on_terminal(folder, "run", "s.toml", NO_COLOR="1")
    assert code == 1 and not COLOUR.search(shown), COLOUR.findall(shown)
    assert "3 skipped: nothing ran" in shown


def test_a_dumb_terminal_gets_plain_lines(folder: Path) -> None:
    code, shown = on_terminal(folder, "run", "s.toml", TERM="dumb")
    assert code == 1 and not control_characters(shown)
    for number in (1, 2, 3):  # and not nothing: a bar that cannot be drawn is no reason to be silent
        assert f"[{number}/3] s.toml::elsewhere-{number - 1} skipped" in shown


def control_characters(text: str) -> set[str]:
    """But for the end of a line."""
    return {character for character in text if ord(character) < 32 and character != "\n"} | ({"\x7f"} & set(text))


def test_a_pipe_gets_lines_alone(folder: Path) -> None:
    for variables in ({}, {"TERM": "xterm-256color"}, {"TERM": "xterm-256color", "COLUMNS": "30"}):
        code, out, err = run("run", "s.toml", "--json", "r.json", cwd=folder, env=environment(**variables))
        assert code == 1 and not control_characters(out + err)
        lines = err.splitlines()
        assert [line.split()[0] for line in lines] == ["[1/3]", "[2/3]", "[3/3]"]  # a line a case, however long
        assert all("needs cuda:sm990: " in line for line in lines)
        assert "wrote r.json" in out


@pytest.mark.parametrize("columns", [12, 30, 60])
def test_a_narrow_terminal_breaks_nothing(folder: Path, columns: int) -> None:
    code, shown = on_terminal(folder, "run", "s.toml", "-v", columns=columns, TERM="dumb")
    assert code == 1
    squeezed = re.sub(r"[\s│┃─━┏┓└┘├┤┼┴┬┡┩╇┳]", "", shown)
    assert "0passed,0failed,0errored,3skipped" in squeezed
    if columns >= 60:
        for word in ("elsewhere-2", "skipped", "needs"):
            assert word in squeezed


def leave(folder: Path, *arguments: str, both: bool) -> tuple[int, str]:
    """(exit code, stderr) where nobody reads stdout, or neither."""
    read, write = os.pipe()
    os.close(read)
    given: dict[str, Any] = {"stdout": write} | ({"stderr": write} if both else {})
    process = start("run", *arguments, "--json", "r.json", cwd=folder, **given)
    os.close(write)
    _, err = process.communicate(timeout=120)
    return process.returncode, err or ""


def test_a_reader_that_leaves_changes_nothing(folder: Path) -> None:
    """As `| head -1` does: the document is written, the verdict stands, nobody sees a traceback."""
    code, err = leave(folder, "one.toml", "s.toml", "--device", "cpu", both=False)
    assert code == 0
    assert [line.split()[0] for line in err.splitlines()] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert len(read_document(folder / "r.json").rows) == 5 and not (folder / "r.json.partial").exists()


def test_one_that_leaves_the_progress_too_does_not_end_the_run(folder: Path) -> None:
    code, _ = leave(folder, "s.toml", both=True)
    assert code == 1 and len(read_document(folder / "r.json").rows) == 3  # 1: all are skipped


def test_head_of_the_output(folder: Path) -> None:
    command = f"{sys.executable} -m gem run s.toml --json r.json 2>&1 | head -1"
    found = subprocess.run(["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True)
    assert found.stdout.startswith("[1/3] s.toml::elsewhere-0 skipped") and found.stdout.count("\n") == 1
    assert found.stderr == "" and len(read_document(folder / "r.json").rows) == 3


@pytest.mark.parametrize(("stream", "code"), [("stdout", 2), ("stderr", 1)])
def test_output_to_a_full_disk_costs_no_document(folder: Path, stream: str, code: int) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        found, _, err = run("run", "s.toml", "--json", "r.json", cwd=folder, **{stream: full})
    assert found == code and len(read_document(folder / "r.json").rows) == 3
    if stream == "stdout":
        assert err.splitlines()[-1] == "gem: error: cannot write the output: No space left on device"


def test_ctrl_c_on_a_terminal_stops_the_bar_cleanly(folder: Path) -> None:
    """The cursor comes back, and the last lines are the command's own."""
    (folder / "long.toml").write_text(suite(SKIPS, 3000))
    ours, its = pty.openpty()
    env = environment(TERM="xterm-256color")
    arguments = ("run", "long.toml", "--json", "r.json")
    process = start(*arguments, cwd=folder, env=env, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    shown, told = b"", False
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:
            break
        if b"/3000" in shown and not told:
            told = True
            process.send_signal(signal.SIGINT)
    os.close(ours)
    assert process.wait(60) == 130
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") > 0
    assert b"Traceback" not in shown and b"gem: interrupted: " in shown
    assert read_document(folder / "r.json").request["interrupted"] is True
