"""Pieces queued one by one at a rate that a host's clock sets, by a thread of their own, until told to stop.

A copy engine has no rate of its own to set, and nothing on the device may keep the time, since that would take a
multiprocessor. The schedule is absolute: a piece is due at the first one's time plus its number times the period, and
what is late is made up for at once, so that a sleep that lasts too long moves pieces together and not the rate.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_TIMER_SLACK = 29  # PR_SET_TIMERSLACK


@dataclass(frozen=True)
class Pace:
    """What was kept of a schedule."""

    pieces: int
    latest_s: float  # how late the latest piece was


def keep_pace(
    queue: Callable[[int], None],
    period_s: float,
    stopped: Callable[[], bool],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Pace:
    """Queue piece 0, 1, …, none before it is due, until stopped; the first in any case."""
    begin, count, latest = clock(), 0, 0.0
    while not count or not stopped():
        late = clock() - begin - count * period_s
        if late < 0:
            # Not a loop that looks at the clock: it would hold Python's lock while others queue their kernels.
            sleep(-late)
            continue
        latest = max(latest, late)
        queue(count)
        count += 1
    return Pace(count, latest)


class Pacer:
    """A thread that keeps a pace, one at a time."""

    def __init__(self) -> None:
        self._stop, self._begun = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._result: Pace | BaseException = Pace(0, 0.0)

    def start(self, queue: Callable[[int], None], period_s: float, end: Callable[[], None]) -> None:
        """Return behind the first piece. ``end``: called in the thread, behind the last."""
        assert self._thread is None, "it runs"
        self._stop.clear()
        self._begun.clear()
        # A daemon: where nobody comes to stop it, the process ends all the same.
        self._thread = threading.Thread(target=self._run, args=(queue, period_s, end), name="gem-pacer", daemon=True)
        self._thread.start()
        self._begun.wait()

    def stop(self) -> Pace:
        """End behind the piece that is being queued. Raises what the thread has raised."""
        assert self._thread is not None, "it does not run"
        self._stop.set()
        self._thread.join()
        self._thread = None
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def _run(self, queue: Callable[[int], None], period_s: float, end: Callable[[], None]) -> None:
        _sleep_exactly()

        def one(number: int) -> None:
            queue(number)
            self._begun.set()

        try:
            self._result = keep_pace(one, period_s, self._stop.is_set)
            end()
        except BaseException as error:  # for who stops it
            self._result = error
        finally:
            self._begun.set()


def _sleep_exactly() -> None:
    """Linux wakes a thread up to 50 us late by default, to wake several at once: longer than a piece is to take."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)
