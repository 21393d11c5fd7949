"""Clears up after a process that was killed: ends its workers' process groups, removes its temporary folders.

``kill -9`` lets nobody tidy up. So each process that keeps something here starts a small second one (this file, run as
a script), which waits for the end of a pipe that only the first holds open. The kernel closes it, however the first
ends; what is still kept then is cleared. After a proper end nothing is, and the janitor just leaves.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

TRIES, PAUSE_S = 20, 0.1  # a killed group may still write into a folder that is being removed

_pipes: dict[int, int] = {}  # process id → write end: a fork is not its parent


def keep_folder(path: Path | str) -> None:
    """Remove the folder ``path`` when this process is gone, unless it was let go before."""
    _tell(f"+ folder {Path(path).absolute()}")


def let_folder(path: Path | str) -> None:
    """It is gone, or none of the janitor's business any more."""
    _tell(f"- folder {Path(path).absolute()}")


def keep_group(pid: int) -> None:
    """Kill the process group of the process ``pid`` when this process is gone, unless it was let go before."""
    _tell(f"+ group {pid} {_start_of(pid)}")


def let_group(pid: int) -> None:
    """It has ended: its number may soon be another's."""
    _tell(f"- group {pid} ")


def _tell(line: str) -> None:
    # Where no second process can be started, or it was killed itself, a proper end still clears up everything.
    with contextlib.suppress(OSError):
        if os.getpid() not in _pipes:
            _pipes[os.getpid()] = _start()
        os.write(_pipes[os.getpid()], f"{line}\n".encode())


def _start() -> int:
    """Start the second process; the end of the pipe that it listens to."""
    read, write = os.pipe()
    nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    try:
        # In a process group of its own: Ctrl-C and hang-ups of the terminal are not meant for it.
        os.posix_spawn(
            sys.executable, [sys.executable, "-I", "-S", __file__], os.environ, setpgroup=0,
            file_actions=[(os.POSIX_SPAWN_DUP2, read, 0), *nothing],
        )  # fmt: skip
    finally:
        os.close(read)
    return write


# ---- the second process


def clear(lines: Iterable[str]) -> None:
    """Follow the messages to their end, then clear what is kept."""
    groups: dict[int, str] = {}
    folders: dict[str, None] = {}
    for line in lines:
        sign, what, name = line.rstrip("\n").split(" ", 2)
        if what == "folder":
            folders.pop(name, None)
            if sign == "+":
                folders[name] = None
        else:
            pid, start = name.split(" ")
            groups.pop(int(pid), None)
            if sign == "+":
                groups[int(pid)] = start
    for pid, start in groups.items():
        if _start_of(pid) in (start, ""):  # gone, its children perhaps not; or still the one that was meant
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
    for _ in range(TRIES):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not any(os.path.lexists(folder) for folder in folders):
            break
        time.sleep(PAUSE_S)


def _start_of(pid: int) -> str:
    """When the process started, in ticks since the machine did; "" when there is none, or no /proc to tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


if __name__ == "__main__":
    os.chdir("/")
    clear(open(0, encoding="utf-8"))  # noqa: SIM115 - ends with the process
