"""What a run is guarded by: a lock on its folder, and an eye on its losses.

Both are the loop's; neither makes a step wait for the device.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import torch

from gem.errors import RequestError

_held: set[int] = set()  # files of this process's locks


def _let_go() -> None:
    """A reader's process would hold the lock for a while after a killed run. Closing frees nothing of the parent's."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


class Lock:
    """A run's folder for one run at a time. The kernel frees it when the process ends, however it does."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self._say, self._handle = folder, say, -1

    def take(self) -> None:
        """RequestError where another run has it, or the folder cannot be made or written."""
        path = self.folder / "lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise RequestError(f"{self.folder}: is a file; accepted: a folder for the run, or nothing yet") from None
        except OSError as error:
            raise RequestError(
                f"{self.folder}: cannot be written: {error.strerror}; accepted: a folder for the run that can"
            ) from None
        _held.add(self._handle)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.free()
            raise RequestError(
                f"{self.folder}: another run is at work in it; accepted: another folder, or wait for its end"
            ) from None
        except OSError as error:
            self._say(f"{path}: not locked: {error.strerror}: nothing keeps a second run out of the folder")

    def free(self) -> None:
        """Let another run have it."""
        if self._handle in _held:
            _held.remove(self._handle)
            os.close(self._handle)

    def __del__(self) -> None:
        self.free()


class Health:
    """The first step whose loss or gradient norm was not finite. Nothing waits for the device until it is asked."""

    def __init__(self, device: torch.device) -> None:
        self._fine = torch.ones((), dtype=torch.bool, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)  # noted and fine
        self._figures = torch.zeros(2, device=device)  # of the first step that is not, else of the last

    def note(self, loss: torch.Tensor, norm: torch.Tensor | None) -> None:
        """A step's figures, fp32 []."""
        now = torch.stack([loss, loss if norm is None else norm]).float()
        self._figures = torch.where(self._fine, now, self._figures)
        self._fine = self._fine & now.isfinite().all()
        self._steps += self._fine

    def fault(self) -> tuple[int, float, float] | None:
        """(steps noted before it, its loss, its norm); waits for the device."""
        if bool(self._fine):
            return None
        loss, norm = self._figures.tolist()
        return int(self._steps), loss, norm
