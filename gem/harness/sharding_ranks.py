"""Rank processes of one case: forked from its worker, joined in a gloo group, called all at once.

A worker has imported torch and computed nothing, so a fork is cheap and safe. Ranks are of the worker's process group
and die with the worker, however it ends (worker.py, janitor.py). One that raises, dies or hangs ends all of them, with
one message that says which rank it was: the others wait in a collective for it and could not answer.
"""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from gem.harness import worker
from gem.harness.worker import Unsupported

_CONTEXT = get_context("fork")
GRACE_S = 1.0  # how long others' failures are waited for once there is one: the first of them is the cause
PATIENCE_S = 30.0  # of a collective: how long a rank waits for one that does not come


class RankFailure(RuntimeError):
    """What ended the ranks: ``rank 3 of 8: ValueError: …``."""


@dataclass(frozen=True)
class _Failed:
    """What a rank tells of its end. ``at``: on the machine's monotonic clock."""

    at: float
    kind: str
    text: str
    details: str = ""

    @property
    def follows(self) -> bool:
        """Whether it is what a rank says when another has gone."""
        signs = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused")
        return any(sign in self.text.lower() for sign in signs)

    @property
    def late(self) -> bool:
        """Whether it waited in a collective for longer than it may."""
        return "timed out" in self.text.lower()


class Ranks:
    """``build(rank, ranks, *args)`` makes an object in each of ``count`` processes; ``call`` a method of all of them.

    ``gpus``: ranks a host, as torchrun would tell them. A context manager, or ``close`` it.
    """

    def __init__(self, count: int, build: Callable[..., Any], *args: Any, gpus: int | None = None) -> None:
        self.count = count
        store = os.path.join(tempfile.mkdtemp(prefix="gem-ranks-"), "store")  # in the worker's folder
        self._processes: list[BaseProcess] = []
        self._pipes: list[connection.Connection] = []
        parent = os.getpid()
        for rank in range(count):
            here, there = _CONTEXT.Pipe()
            local = gpus or count
            process = _CONTEXT.Process(
                target=_serve, args=(there, rank, count, local, store, parent, build, args), name=f"rank {rank}"
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._answers()  # that it was built

    def call(self, method: str, *args: Any) -> list[Any]:
        """``object.method(*args)`` on every rank, in the order of the ranks. RankFailure, and all are ended."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is found below
                pipe.send((method, args))
        return self._answers()

    def _answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        failed: dict[int, _Failed] = {}
        waiting = set(range(self.count))
        deadline: float | None = None
        while waiting and (deadline is None or time.monotonic() < deadline):
            of = {self._pipes[rank]: rank for rank in waiting} | {self._processes[r].sentinel: r for r in waiting}
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for rank in {of[one] for one in connection.wait(list(of), left)}:  # type: ignore[index]
                answer = self._receive(rank)
                waiting.discard(rank)
                if not isinstance(answer, _Failed):
                    found[rank] = answer[0]
                    continue
                failed[rank] = answer
                deadline = deadline or time.monotonic() + GRACE_S
        if failed:
            self.kill()
            raise self._told(failed, sorted(waiting))
        return [found[rank] for rank in range(self.count)]

    def _receive(self, rank: int) -> "tuple[Any] | _Failed":
        try:
            if self._pipes[rank].poll(0):
                return self._pipes[rank].recv()
        except (EOFError, OSError):
            pass
        self._processes[rank].join(5)
        code = self._processes[rank].exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            memory = ", most likely out of memory" if code == -signal.SIGKILL else ""
            return _Failed(0.0, "", f"killed by {name}{memory}")
        return _Failed(0.0, "", f"ended by itself with exit code {code}")

    def _told(self, failed: dict[int, _Failed], silent: list[int]) -> Exception:
        """The cause: the first that is no mere consequence of another's end; ranks that were waited for in vain."""
        rank, first = min(failed.items(), key=lambda one: (one[1].follows, one[1].at))
        if first.details:
            print(first.details, file=sys.stderr)  # into the worker's log
        if first.kind == "Unsupported":
            return Unsupported(first.text)
        what = f"{first.kind}: {first.text}" if first.kind else first.text
        if silent and first.late:
            hung = ", ".join(map(str, silent))
            return RankFailure(f"rank {hung} of {self.count} hung: rank {rank} waited for it, {what}")
        return RankFailure(f"rank {rank} of {self.count}: {what}")

    def close(self) -> None:
        """Let them leave their group, then make sure that they are gone."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
        self.kill()

    def kill(self) -> None:
        """End them at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if error is None:
            self.close()
        else:
            self.kill()


# ---- in a rank


def _serve(
    pipe: connection.Connection, rank: int, count: int, local: int, store: str, parent: int,
    build: Callable[..., Any], args: Sequence[Any],
) -> None:  # fmt: skip
    """Answer until None comes. Never returns: what its parent would do at its end is the parent's alone."""
    _isolate(parent)
    try:
        subject = build_joined(rank, count, local, store, build, args)
        pipe.send((None,))
        while (message := pipe.recv()) is not None:
            method, arguments = message
            pipe.send((getattr(subject, method)(*arguments),))
        del subject
        _leave()
    except EOFError:  # the worker is gone
        os._exit(1)
    except BaseException as error:
        text = str(error) or "no message"
        with contextlib.suppress(OSError):
            pipe.send(_Failed(time.monotonic(), type(error).__name__, text, traceback.format_exc()))
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _isolate(parent: int) -> None:
    worker._parent = None  # what it reports is no message of the worker's
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it went before that
            os._exit(1)


def build_joined(rank: int, count: int, local: int, store: str, build: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Join the group of this process's ranks, then build."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # As torchrun tells them, for who reads them. The store is a file: no port that another may have.
    told = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    os.environ.update({name: str(value) for name, value in told.items()})
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=PATIENCE_S)
    )
    return build(rank, count, *args)


def _leave() -> None:
    import gc

    import torch.distributed as dist

    gc.collect()  # what holds the group may be held in a cycle
    dist.barrier()
    dist.destroy_process_group()
