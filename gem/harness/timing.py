"""How contestants are timed: in turns, each call on cold caches, medians with an interval that assumes no distribution.

Rules kept here, and why:
- *interleaved*: contestants take turns, a rotating one first, so that a clock that drifts or a noisy neighbour hits all
  alike (ratios stay right when absolute figures move);
- *cold caches*: a buffer larger than the last-level cache is rewritten before every call;
- *GPU time*: device events, with work queued ahead so that a short kernel is not timed by its launches;
- *warm-up* until two successive medians agree: a fixed short one was 30 % off in public reports;
- *medians*: the interval of the median comes from order statistics; noise and drift are reported, not hidden.

Statistics and ``interleave`` run in the parent and need no torch; ``Timer`` runs in the worker.
"""

import contextlib
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gem.errors import RequestError
from gem.harness.nvml import Gpu
from gem.harness.worker import WorkerFailure

MIN_ROUNDS = 7  # one more than the fewest whose extremes hold the median with 95 % (6: 1 - 2 * 0.5 ** 6 = 96.9 %)
FEW_ROUNDS = 3  # for a contestant so slow that MIN_ROUNDS of its turns alone exceed the budget
TARGET = 0.02  # stop when the median is known to +- 2 %
CONFIDENCE = 0.95


# ---- statistics


@dataclass(frozen=True)
class Summary:
    """Of samples in ms: the median; an interval [low, high] that holds the true median with ``confidence``."""

    samples: tuple[float, ...]
    median: float
    low: float
    high: float
    confidence: float

    @property
    def half_width(self) -> float:
        """Half the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median if self.median > 0 else math.inf

    @property
    def noise(self) -> float:
        """Spread of single samples, relative: the interquartile range over the median."""
        if len(self.samples) < 4:
            return (max(self.samples) - min(self.samples)) / self.median if self.median > 0 else math.inf
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.median if self.median > 0 else math.inf

    @property
    def drift(self) -> float:
        """Median of the last third over that of the first, minus 1: above 0 = it became slower while being timed.

        0.0 unless the two thirds are apart: below 3 %, or where the middle halves of both overlap, it is noise.
        """
        third = len(self.samples) // 3
        if third < 4:
            return 0.0
        (low_a, a, high_a), (low_b, b, high_b) = (
            statistics.quantiles(part, n=4) for part in (self.samples[:third], self.samples[-third:])
        )
        return b / a - 1 if (low_b > high_a or high_b < low_a) and abs(b / a - 1) > 0.03 else 0.0

    def remarks(self) -> list[str]:
        """What a reader must know before believing the median; empty when there is nothing."""
        found = []
        if len(self.samples) < MIN_ROUNDS:
            found.append(f"few samples ({len(self.samples)})")
        if self.half_width > TARGET:
            found.append(f"noisy: median ± {self.half_width:.0%}")
        if self.drift:
            found.append(f"{'slowed' if self.drift > 0 else 'sped up'} by {abs(self.drift):.0%} while timed")
        return found


def summarize(samples: Sequence[float], confidence: float = CONFIDENCE) -> Summary:
    """Median and its distribution-free interval: the narrowest pair of order statistics that reaches ``confidence``.

    The number of samples below the true median is binomial(n, 1/2) whatever the distribution, so the k-th smallest and
    k-th largest hold it between them with probability 1 - 2 P(fewer than k below). Below 6 samples no pair reaches
    95 %; then the extremes are given with the confidence that they have.
    """
    if not samples:
        raise ValueError("no samples to summarize")
    ordered, n = sorted(samples), len(samples)
    k, tail = 1, 0.5**n
    while k < n // 2:
        wider_tail = tail + math.comb(n, k) * 0.5**n
        if 1 - 2 * wider_tail < confidence:
            break
        k, tail = k + 1, wider_tail
    return Summary(tuple(samples), statistics.median(ordered), ordered[k - 1], ordered[n - k], max(0.0, 1 - 2 * tail))


# ---- turns, handed out by the parent


@dataclass
class Race:
    """What came of ``interleave``: per contestant its samples in ms, or how it failed; and why it ended."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, WorkerFailure] = field(default_factory=dict)
    rounds: int = 0

    def summaries(self) -> dict[str, Summary]:
        """Of those that did not fail."""
        return {name: summarize(ms) for name, ms in self.samples.items() if name not in self.failures and ms}


def interleave(
    turns: Mapping[str, Callable[[], float]],
    budget_s: float,
    *,
    target: float = TARGET,
    max_rounds: int = 200,
    on_round: Callable[[int], None] = lambda number: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Race:
    """Let contestants take turns until every median is known to ± ``target`` or ``budget_s`` is spent.

    A turn returns one sample in ms, or raises WorkerFailure: then that contestant is out and the others go on. Each
    round starts with another contestant. Everyone gets MIN_ROUNDS turns, but a contestant whose MIN_ROUNDS turns alone
    exceed the budget sits out after FEW_ROUNDS. Where such slow ones have spent the budget, the others go on for their
    own share of it, unless their medians are known.
    """
    race = Race(samples={name: [] for name in turns})
    start = clock()
    longest, spent = dict.fromkeys(turns, 0.0), dict.fromkeys(turns, 0.0)

    def known(name: str) -> bool:
        return summarize(race.samples[name]).half_width <= target

    def due(name: str) -> bool:
        slow = longest[name] * MIN_ROUNDS > budget_s
        if len(race.samples[name]) < (FEW_ROUNDS if slow else MIN_ROUNDS) or clock() - start <= budget_s:
            return True
        return spent[name] <= budget_s / len(turns) and not known(name)

    for number in range(max_rounds):
        running = [name for name in turns if name not in race.failures and due(name)]
        if not running:
            break
        first = number % len(running)
        for name in running[first:] + running[:first]:
            before = clock()
            try:
                race.samples[name].append(turns[name]())
            except WorkerFailure as failure:
                race.failures[name] = failure
            took = clock() - before
            longest[name], spent[name] = max(longest[name], took), spent[name] + took
        race.rounds = number + 1
        on_round(race.rounds)
        if race.rounds >= MIN_ROUNDS and all(known(name) for name in running if name not in race.failures):
            break
    return race


# ---- timing calls, in the worker


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of all last-level caches that this process's cores can use; 32 MiB where the machine does not say.

    GEM_LLC_MIB says it instead: a virtual machine of two cores names its host's cache, of hundreds of MiB, and to
    rewrite twice that before each timed call takes longer than the calls. It stands in every document's settings.
    """
    if told := os.environ.get("GEM_LLC_MIB"):
        if not re.fullmatch(r"[1-9]\d{0,4}", told):
            raise RequestError(f"GEM_LLC_MIB={told!r}; accepted: MiB, a whole number from 1 to 99999")
        return int(told) << 20
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    caches: dict[tuple[int, str], int] = {}
    for core in cores:
        for index in root.glob(f"cpu{core}/cache/index*"):
            with contextlib.suppress(OSError, ValueError):
                level = int((index / "level").read_text())
                text = (index / "size").read_text().strip()
                scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
                shared = (index / "shared_cpu_list").read_text().strip()
                caches[level, shared] = int(text.rstrip("KMG")) * scale
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last) or 32 << 20


class Timer:
    """Times calls of one function on one device, each on cold caches and after ``before()``, which is not timed."""

    FLUSH_LIMIT = 1 << 30  # servers have up to a GiB of last-level cache over all sockets

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self.device = device
        self.calls = 1
        self.sm_clocks_mhz: list[int] = []
        self.slowdowns: set[str] = set()
        self._enqueue_ms = 0.0
        if device == "cuda":
            self._gpu = Gpu(str(torch.cuda.get_device_properties(0).uuid))
            size = 2 * torch.cuda.get_device_properties(0).L2_cache_size
        else:
            size = 2 * last_level_cache_bytes()
        self._flush_buffer = torch.zeros(min(size, self.FLUSH_LIMIT) // 4, dtype=torch.int32, device=device)

    def flush(self) -> None:
        """Rewrite twice the last-level cache, with all threads, so that each core's own caches go too."""
        self._flush_buffer.add_(1)

    def turn(self, call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
        """One sample in ms: the median of ``calls`` timed calls (one, unless they are short)."""
        return statistics.median(self.time(call, before, self.calls))

    def warm_up(self, call: Callable[[], Any], before: Callable[[], Any] = lambda: None, cap_s: float = 1.0) -> float:
        """Call until two successive medians agree within 3 % or ``cap_s`` is spent. Returns the last median in ms.

        Then sets ``calls`` so that a turn is some 10 ms of work: a message to the worker costs 0.1 ms.
        """
        start = time.perf_counter()
        previous = math.nan  # agrees with nothing
        while True:
            batch = self.time(call, before, 1)
            while sum(batch) < 20.0 and len(batch) < 20 and time.perf_counter() - start < cap_s:
                batch += self.time(call, before, 1 if self.device == "cpu" else 5)
            median = statistics.median(batch)
            if abs(median - previous) <= 0.03 * previous or time.perf_counter() - start > cap_s:
                break
            previous = median
        self.calls = max(1, min(20, math.ceil(10.0 / max(median, 1e-3))))
        return median

    def time(self, call: Callable[[], Any], before: Callable[[], Any], calls: int) -> list[float]:
        """Milliseconds of ``calls`` calls, one by one."""
        return self._time_cuda(call, before, calls) if self.device == "cuda" else self._time_cpu(call, before, calls)

    def _time_cpu(self, call: Callable[[], Any], before: Callable[[], Any], calls: int) -> list[float]:
        samples = []
        for _ in range(calls):
            before()
            self.flush()
            start = time.perf_counter()
            result = call()
            samples.append((time.perf_counter() - start) * 1e3)
            del result  # freeing is not part of the call: its user keeps the output
        return samples

    def _time_cuda(self, call: Callable[[], Any], before: Callable[[], Any], calls: int) -> list[float]:
        cuda = self._torch.cuda
        events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(calls)]
        # A backlog as long as queueing all calls takes: the device then never waits for a launch. Capped, because a
        # contestant that synchronises inside drains it anyway, and its users pay for that too.
        cuda.synchronize()
        if self._enqueue_ms:
            cuda._sleep(int(min(50.0, 1.2 * self._enqueue_ms * calls) * 1e-3 * self._clock_hz()))
        queued = time.perf_counter()
        for start, end in events:
            before()
            self.flush()
            start.record()
            result = call()
            end.record()
            del result
        # The least so far: a contestant that synchronises inside makes a later queueing as long as its work.
        enqueue_ms = (time.perf_counter() - queued) * 1e3 / calls
        self._enqueue_ms = min(self._enqueue_ms or enqueue_ms, enqueue_ms)
        clock = self._gpu.sm_clock_mhz()  # now, while the device works
        self.sm_clocks_mhz += [] if clock is None else [clock]
        self.slowdowns |= self._gpu.slowdowns()
        cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def _clock_hz(self) -> float:
        """Of cuda._sleep's counter: the SM clock; the highest that the device may run at, so never too short a wait."""
        return getattr(self._torch.cuda.get_device_properties(0), "clock_rate", 2_000_000) * 1e3
