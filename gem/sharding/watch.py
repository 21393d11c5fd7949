"""Each rank watches the others through the job's store, so that a fault of one ends all of them, soon, with one line.

What torch has ends a rank, and does not say why: a collective whose peer has died raises on gloo that a connection is
closed, one whose peer hangs raises or aborts after the process group's timeout on every rank that waits, and on NCCL a
dead peer looks like a slow one until then. Those stay as they are, behind this. In front of them a thread a rank says
through torch's store, every second, that it lives and where its main thread is. Rank 0 judges the others by that, the
others judge rank 0 (gem.sharding.verdict); whoever sees or has the fault first claims the verdict in the store, prints
it, and every rank ends with its code. Two small messages a rank and second, whatever the backend.

The store is torchrun's agent's, and outlives any rank. Without torchrun rank 0 keeps it: then its end is seen by all,
and the lowest rank of each host tells.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count

from torch.distributed import DistStoreError, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from gem.errors import RequestError
from gem.sharding.verdict import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_REQUEST,
    EXIT_TERMINATED,
    Beat,
    Limits,
    Verdict,
    code_of,
    is_consequence,
    place_of,
    silent,
    stuck,
    text_of,
)  # fmt: skip
from gem.sharding.word import leave_word, say

_NONE = "-"  # what a key holds before anything is said: reading it never waits
_ALIKE_S = 1.0  # how long is waited for the other ranks to raise what this one has


class Watch:
    """One rank's part. ``store``: a connection of its own. ``keeps``: this process keeps the store."""

    def __init__(
        self, store: Store, rank: int, ranks: int, timeout_s: float, *, keeps: bool = False, agent: bool = True
    ) -> None:
        self.store, self.rank, self.ranks, self.limits = store, rank, ranks, Limits.of(timeout_s)
        self.hint = "no checkpoint was saved yet"  # how to go on after a fault, for its line
        self._keeps, self._agent = keeps, agent
        self._who = f"process {os.getpid()} of {socket.gethostname()}"
        self._moved, self._place, self._patient = 0, "its start", False
        self._main = threading.current_thread().ident
        self._stop, self._ending, self._lock = threading.Event(), False, threading.Lock()
        self._told, self._left = False, False
        self._numbers, self._acts = count(1), count()
        # Of this thread's own time, in which it sees itself: a pause of the whole process is none of the others'.
        self._now, self._since, self._seen_moved, self._answered = 0.0, 0.0, 0, 0.0
        self._watched = [*range(ranks)] if rank == 0 else [0]
        self._beats: dict[int, Beat] = {}
        self._heard = dict.fromkeys(self._watched, 0.0)
        self._signal: tuple[int, float] | None = None  # which came, when
        self._pipe: tuple[int, int] | None = None
        self._before: tuple = ()
        self._threads: list[threading.Thread] = []
        for name in ("verdict", "suspect"):
            store.compare_set(name, "", _NONE)

    # -- for the main thread -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until all ranks are there, and watch from then on."""
        self.store.set(f"beat/{self.rank}", self._beat().dump())
        self._await_all()
        self._listen_to_signals()
        for work in (self._talk, self._mind):
            thread = threading.Thread(target=work, name=f"gem-watch{work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def at(self, place: str) -> None:
        """This rank has moved on, and is there now."""
        self._place = place
        self._moved += 1

    @contextmanager
    def patient(self, place: str) -> Iterator[None]:
        """Around work that may take as long as it likes, while the others wait."""
        self.at(place)
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
            self.at(f"what follows {place}")

    def after_first(self, act: Callable[[], None]) -> None:
        """Have rank 0 act, the others wait without a collective, whose time is short."""
        done = f"acted/{next(self._acts)}"
        if self.rank == 0:
            act()
            self.store.set(done, "1")
        while not self.store.check([done]):
            time.sleep(self.limits.beat)

    def leave(self) -> None:
        """This rank is done, and watches no more; rank 0 once all others are done, who else would go unjudged."""
        self._left = True
        with suppress(Exception):  # who left before may have taken the store along
            self.store.set(f"beat/{self.rank}", self._beat().dump())
            self.store.set(f"left/{self.rank}", "1")
            if self.rank == 0:
                self._wait_for("left", self.limits.still + 2 * self.limits.silent)
        self._stop_threads()
        self._unlisten()

    def end(self, error: BaseException) -> Verdict:
        """This rank ends by what it raised: why the job does. Whoever was the first to know has said it then.

        The process itself ends soon after, whatever its caller does.
        """
        self._ending = True
        self._listen_to_signals()
        try:
            verdict = self._judged(error)
            if verdict.rank == self.rank:  # this rank's other thread may have found it
                self._tell(verdict)
            self._until_told(verdict)
        except Exception as lost:  # the store's
            verdict = self._without_store(" ".join(str(lost).split()))
        self._finish(verdict)
        self._stop_threads()
        threading.Thread(target=_end_later, args=(10.0, verdict.code), daemon=True).start()
        return verdict

    def _judged(self, error: BaseException) -> Verdict:
        if is_consequence(error):
            # Not before the others have had the time to say what happened, or to be missed.
            self.store.compare_set("suspect", _NONE, str(self.rank))
            deadline = time.monotonic() + self.limits.gone + 4 * self.limits.beat
            while (found := self.store.get("verdict").decode()) == _NONE:
                if time.monotonic() > deadline:
                    break
                time.sleep(min(0.05, self.limits.beat))
            else:
                return Verdict.load(found)
        text = self.hint if isinstance(error, KeyboardInterrupt) else text_of(error, self._place)
        self.store.set(f"error/{self.rank}", text)
        whole = text if isinstance(error, KeyboardInterrupt) else f"rank {self.rank}: {text}"
        verdict = self._claim(whole, code_of(error))
        if verdict.rank == self.rank:
            if isinstance(error, RequestError) and self._all_say(text):
                verdict = Verdict(self.rank, text, verdict.code)
            self._tell(verdict, None if isinstance(error, (RequestError, OSError, KeyboardInterrupt)) else error)
        return verdict

    def _all_say(self, text: str) -> bool:
        if not self._wait_for("error", _ALIKE_S):
            return False
        return all(word.decode() == text for word in self.store.multi_get([f"error/{r}" for r in range(self.ranks)]))

    def _await_all(self) -> None:
        """RequestError on rank 0 that names who is missing; the others hear of it."""
        deadline = time.monotonic() + self.limits.still + (0 if self.rank == 0 else 2 * self.limits.gone)
        names = [f"beat/{rank}" for rank in range(self.ranks)] if self.rank == 0 else ["begun"]
        while True:
            with suppress(DistStoreError):
                self.store.wait(names, timedelta(seconds=min(1.0, self.limits.beat * 4)))
                break
            if (found := self.store.get("verdict").decode()) != _NONE:
                self._quit(Verdict.load(found))
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self.ranks) if not self.store.check([f"beat/{rank}"])]
                if self.rank == 0 or missing:
                    who = ", ".join(map(str, missing))
                    raise RequestError(
                        f"of {self.ranks} ranks these have not come within {self.limits.still:g} s: {who}; accepted: "
                        "all of them, or a longer timeout_s"
                    )
        if self.rank == 0:
            self.store.set("begun", "1")

    # -- threads -------------------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        try:
            while not self._stop.is_set():
                self._sleep()
                if not self._stop.is_set():
                    self._round()
        except Exception as lost:  # the store's
            if not self._stop.is_set():
                self._quit(self._without_store(" ".join(str(lost).split())))

    def _round(self) -> None:
        """Say where this rank is, and hear of the others."""
        self.store.set(f"beat/{self.rank}", self._beat().dump())
        words = self.store.multi_get(["verdict", "suspect", *(f"beat/{rank}" for rank in self._watched)])
        verdict, suspect, *beats = [word.decode() for word in words]
        self._answered = self._now
        if verdict != _NONE:
            self._obey(Verdict.load(verdict))
            return
        for rank, word in zip(self._watched, beats, strict=True):
            beat = Beat.load(word)
            if rank not in self._beats or beat.number != self._beats[rank].number:
                self._heard[rank] = self._now
            self._beats[rank] = beat
        if self._signal is not None and suspect == _NONE:
            self.store.compare_set("suspect", _NONE, str(self.rank))
        others = {rank: beat for rank, beat in self._beats.items() if rank != self.rank}
        quiet = {rank: self._now - self._heard[rank] for rank in others}
        found = silent(others, quiet, self.limits.silent if suspect == _NONE else self.limits.gone)
        if found is None and self.rank == 0:
            found = stuck(self._beats, self.limits.still)
        if found is not None:
            self._conclude(found, EXIT_FAULT)
        elif self._signal is not None and self._now - self._signal[1] > self.limits.gone + 2 * self.limits.beat:
            name = signal.Signals(self._signal[0]).name
            self._conclude(f"rank {self.rank}: told to end by {name} in {self._place}", EXIT_TERMINATED)

    def _mind(self) -> None:
        """The store may keep a thread waiting for ever."""
        last, before = time.monotonic(), self._now
        waited = 0.0
        while not self._stop.wait(self.limits.beat):
            now = time.monotonic()
            waited = 0.0 if self._now != before else waited + min(now - last, 2 * self.limits.beat)
            last, before = now, self._now
            if waited > self.limits.silent:
                self._quit(self._without_store(f"no answer for {waited:.0f} s"))

    def _sleep(self) -> None:
        """Until the next word is due, or a signal comes."""
        start = time.monotonic()
        if self._pipe is None:
            self._stop.wait(self.limits.beat)
        elif select.select([self._pipe[0]], [], [], self.limits.beat)[0]:
            came = os.read(self._pipe[0], 64)
            if signal.SIGTERM in came and self._signal is None:
                self._signal = (signal.SIGTERM, self._now)
        self._now += min(time.monotonic() - start, 2 * self.limits.beat)

    def _beat(self) -> Beat:
        moved = self._moved
        if moved != self._seen_moved:
            self._seen_moved, self._since = moved, self._now
        line, waits = place_of(sys._current_frames().get(self._main or 0))
        return Beat(
            next(self._numbers), moved, self._place, self._now - self._since, line, waits, self._patient, self._left,
            self._who,
        )  # fmt: skip

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def _claim(self, text: str, code: int) -> Verdict:
        """The job's verdict: this one, unless there is one."""
        if code not in (EXIT_REQUEST, EXIT_INTERRUPTED) and self.hint:
            text = f"{text}; {self.hint}"
        return Verdict.load(self.store.compare_set("verdict", _NONE, Verdict(self.rank, text, code).dump()))

    def _conclude(self, text: str, code: int) -> None:
        verdict = self._claim(text, code)
        if verdict.rank == self.rank and verdict.text.startswith(text):  # else it is what the main thread has raised
            self._tell(verdict)
        self._obey(verdict)

    def _obey(self, verdict: Verdict) -> None:
        self._until_told(verdict)
        if not self._ending:  # else that is for the main thread, which had the same to say
            self._quit(verdict)

    def _until_told(self, verdict: Verdict) -> None:
        """Ranks that end take along those that are about to tell why: torchrun's agent sees to that."""
        deadline = time.monotonic() + 2 * _ALIKE_S
        while verdict.rank != self.rank and time.monotonic() < deadline and not self.store.check(["told"]):
            time.sleep(min(0.05, self.limits.beat))

    def _tell(self, verdict: Verdict, error: BaseException | None = None) -> None:
        with self._lock:
            if self._told:
                return
            trace = "" if error is None else "".join(traceback.format_exception(error))
            say(verdict.text, verdict.code, trace)
            self._told = True
        with suppress(Exception):
            self.store.set("told", "1")

    def _finish(self, verdict: Verdict) -> None:
        leave_word(verdict, told=self._told)
        with suppress(Exception):
            self.store.set(f"left/{self.rank}", "1")
            if self._keeps:  # the others have to hear of it first
                self._wait_for("left", self.limits.gone + 4 * self.limits.beat)

    def _wait_for(self, what: str, seconds: float) -> bool:
        """Whether all ranks have said so in time. Asked again and again: the store's own waiting warns when it ends."""
        names, deadline = [f"{what}/{rank}" for rank in range(self.ranks)], time.monotonic() + seconds
        while not (there := self.store.check(names)) and time.monotonic() < deadline:
            time.sleep(min(0.05, self.limits.beat))
        return there

    def _quit(self, verdict: Verdict) -> None:
        """End this process, whatever its main thread does or waits for."""
        self._finish(verdict)
        os._exit(verdict.code)

    def _without_store(self, why: str) -> Verdict:
        """Nobody can be asked who tells it: the lowest rank of each host does."""
        local, why = int(os.environ.get("LOCAL_RANK", self.rank)), why.partition(".")[0]
        if self._agent:
            text, first = (
                f"torchrun's agent keeps the ranks together and answers no more ({why})",
                local == 0,
            )
        else:
            last = self._beats.get(0, Beat())
            text = f"rank 0: gone, and with it the ranks' store ({why}); last in {last.place}, {last.who}"
            first = local == (1 if self.rank == local else 0)  # rank 0 of the first host has no say
        verdict = Verdict(self.rank, f"{text}; {self.hint}" if self.hint else text, EXIT_FAULT)
        if first:
            self._tell(verdict)
        return verdict

    def _stop_threads(self) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self.limits.beat)

    def _unlisten(self) -> None:
        if self._before:
            before, wakeup = self._before
            self._before = ()
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, before)

    def _listen_to_signals(self) -> None:
        """SIGTERM, which torchrun sends to all when one has ended, is this thread's: the main one may never hear it."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._before = (signal.signal(signal.SIGTERM, _heard), wakeup)


def _heard(number: int, frame: object) -> None:
    """The watch's thread has been told by the wakeup file."""


def _let_go() -> None:
    """Of a reader's process: its signals are its own."""
    if signal.getsignal(signal.SIGTERM) is _heard:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_let_go)


def _end_later(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)


# -- before there is a watch -------------------------------------------------------------------------------------------

_joined = 0  # how often this process has; the ranks' keys of the last time are still in the store


def connect(timeout_s: float) -> tuple[Store, Watch]:
    """(the job's store, this rank's watch, which has not begun), as torchrun's environment says.

    RequestError where that leads to no store.
    """
    global _joined
    wait = timedelta(seconds=timeout_s)
    try:
        # Two connections: one that waits must not keep the other from saying that this rank lives.
        (store, rank, ranks), (own, _, _) = (next(rendezvous("env://", timeout=wait)) for _ in range(2))
    except (ValueError, OverflowError, TypeError, RuntimeError, OSError) as error:
        what = " ".join(str(error).partition("Exception raised from")[0].split())  # whose traces are C++
        at, port = (os.environ.get(name, "not set") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RequestError(
            f"the ranks' store, MASTER_ADDR {at}, MASTER_PORT {port}: {what}; accepted: "
            "torchrun's environment, or rank 0's host and a free port of it, in which rank 0 is started too"
        ) from None
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    _joined += 1
    # The agent's store may be that of the attempt before, whose addresses nobody answers at.
    store, own = (
        PrefixStore(f"gem/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_joined}/{use}", one)
        for use, one in (("group", store), ("watch", own))
    )
    return store, Watch(own, rank, ranks, timeout_s, keeps=rank == 0 and not agent, agent=agent)


def refuse(error: RequestError) -> int:
    """What this rank refuses before it joins the others, all of them most likely: said once. The exit code."""
    try:
        _, watch = connect(60.0)
    except RequestError:  # of two faults the first
        say(text_of(error, ""), EXIT_REQUEST)
        return EXIT_REQUEST
    return watch.end(error).code
