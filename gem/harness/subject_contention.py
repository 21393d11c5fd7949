"""Work on one GPU beside copies, as a measured subject: what SMs that a copy holds cost, and what a copy engine costs.

Alone and beside every neighbour in turns: in each round each has one turn, another first. A turn begins when the
neighbour runs and counts only if it still does at the end, and copied what it should. Nothing here waits for the whole
device, which would wait for the neighbour too.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

from gem.data.lengths import load_profile
from gem.harness.contention import (
    ALONE,
    ENGINE,
    UNPACED,
    Copied,
    gain_metrics,
    held_name,
    ideal,
    in_waves,
    slowdown_metric,
    slowdowns,
)
from gem.harness.measured import Metric, Report
from gem.harness.measured_params import ContentionParams
from gem.harness.nvml import Gpu
from gem.harness.paced import Pacer
from gem.harness.params import GdpaParams
from gem.harness.subjects import Subject, build_inputs
from gem.harness.timing import MIN_ROUNDS
from gem.harness.worker import Unsupported
from gem.sharding.copy_engine import CopyEngine, NoCopyEngine

COPY_BYTES = 64 << 20  # a copy of the copy engine, unpaced
# Of one that is paced: 35 us at 240 GB/s, several times what it takes to queue it, and a fraction of a tile's work.
PIECE_BYTES = 8 << 20
PIECES = 32  # of a round through memory: far more than caches hold
LEAST_RATE = 0.9  # of what is asked of the copy engine; a turn in which it copied less does not count
WARM_UP = 3  # turns of each before those that count
PROOF_S = 0.2  # how long all SMs are held while a copy has to arrive
TILE = 128, 256  # of a large product on Hopper, as libraries mostly choose
BACKLOG_US = 200  # of sleep before a turn, in which its launches are queued


class Neighbour(Protocol):
    """What runs beside a turn."""

    missed: str  # why a turn did not count

    def start(self, expected_ms: float) -> None:
        """Begin, and return when it runs; it goes on for longer than ``expected_ms``."""
        ...

    def stop(self) -> Copied | None:
        """End. None where it was not there for the whole turn, which then does not count."""
        ...


class Contention:
    """On a CUDA GPU alone."""

    def measure(self, params: ContentionParams, device: str, report: Report) -> list[Metric]:
        """ms alone, slowdown.<neighbour> of each, sm_free_gain and engine_gain."""
        if device != "cuda":
            raise Unsupported(f"SMs are held on a GPU; this run is on {device}")
        bench = _Bench(params)
        return bench.run(report)


class _Bench:
    def __init__(self, params: ContentionParams) -> None:
        from gem.kernels.hold import Holder

        self.params = params
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        most = max([*params.sms, *params.idle])
        if most >= self.sms:
            raise Unsupported(f"{most} SMs to hold; this GPU has {self.sms}")
        self.work = _gemm(params, self.device) if params.work == "gemm" else _gdpa(params)
        self.holder = Holder(self.device)
        self.neighbours: dict[str, Neighbour] = {}
        for count in params.sms:
            self.neighbours[held_name(count)] = _Holding(self.holder, count, params.gbps, True)
        for count in params.idle:
            self.neighbours[held_name(count, False)] = _Holding(self.holder, count, params.gbps, False)
        self.engine_note = ""
        if params.engine:
            self._add_engine()
        self.calls, self.alone_ms = 1, 1.0
        self.expected: dict[str, float] = {}  # ms of a turn beside each
        self.copies: dict[str, list[Copied]] = {name: [] for name in self.neighbours}
        self.repeated: dict[str, int] = {}  # turns that did not count, by neighbour
        self.clocks: list[int] = []
        self._gpu = Gpu(str(torch.cuda.get_device_properties(self.device).uuid))
        self._edges = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def _add_engine(self) -> None:
        try:
            engine = CopyEngine()
            self.engine_note = prove(engine, self.holder, self.sms)
            self.neighbours[ENGINE] = _PacedCopying(engine, self.device, self.params.gbps)
            if self.params.unpaced:
                self.neighbours[UNPACED] = _Copying(engine, self.device)
        except NoCopyEngine as reason:
            self.engine_note = f"no copy engine: {reason}"

    def run(self, report: Report) -> list[Metric]:
        p = self.params
        for _ in range(WARM_UP):
            self.work()
        torch.cuda.synchronize()
        self.alone_ms = self._window(5)
        self.calls = max(1, round(p.turn_ms / self.alone_ms))
        self._window(self.calls)
        turns: dict[str, Callable[[], float]] = {ALONE: lambda: self._window(self.calls)}
        turns |= {name: (lambda name=name: self._beside(name)) for name in self.neighbours}
        for name in self.neighbours:
            for _ in range(WARM_UP):
                self._beside(name)
            self.copies[name].clear()
        self.repeated.clear()
        self.clocks.clear()
        # Whole rounds alone, since slowdowns are of pairs.
        samples: dict[str, list[float]] = {name: [] for name in turns}
        start, order = time.monotonic(), list(turns)
        for number in range(p.rounds):
            if number >= MIN_ROUNDS and time.monotonic() - start > p.budget_s:
                break
            report(number, p.rounds)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                samples[name].append(turns[name]())
        report(p.rounds, p.rounds)
        return self._metrics(samples)

    def _metrics(self, samples: dict[str, list[float]]) -> list[Metric]:
        p, alone = self.params, samples[ALONE]
        clock = f", SM clock {min(self.clocks)} to {max(self.clocks)} MHz" if self.clocks else ""
        note = f"alone; {len(alone)} rounds of {self.calls} calls a turn, {self.sms} SMs{clock}"
        if ENGINE not in self.neighbours and self.engine_note:
            note += f"; {self.engine_note}"
        found = [Metric("ms", statistics.median(alone), tuple(alone), note)]
        told = {held_name(n): self._by_size(n) for n in p.sms}
        told |= {held_name(n, False): f"nothing copied; {self._by_size(n)}" for n in p.idle}
        told[ENGINE] = f"in pieces of {PIECE_BYTES >> 20} MiB; {self.engine_note}"
        told[UNPACED] = "as fast as it goes"
        slowed: dict[str, tuple[float, ...]] = {}
        for name in self.neighbours:
            slowed[name] = slowdowns(alone, samples[name])
            copies = [one for one in self.copies[name] if one.copied]
            again = f"{self.repeated[name]} turns repeated" if name in self.repeated else ""
            text = "; ".join(filter(None, (told[name], again)))
            found.append(slowdown_metric(name, alone, samples[name], copies, text))
        return found + gain_metrics(slowed, p.sms)

    def _by_size(self, held: int) -> str:
        """What fewer SMs alone would make of it."""
        split = f"split evenly {ideal(self.sms, held):.3f}"
        if self.params.impl == "gluon" and self.params.work == "gdpa":  # which has as many programs as there are SMs
            return f"{split}, a program an SM in waves {in_waves(self.sms, self.sms, held):.3f}"
        if self.params.work != "gemm":
            return split
        M, N, _ = self.params.shape
        tiles = math.ceil(M / TILE[0]) * math.ceil(N / TILE[1])
        waves = in_waves(tiles, self.sms, held)
        return f"{split}, {tiles} tiles of {TILE[0]} x {TILE[1]} in waves {waves:.3f}"

    def _beside(self, name: str) -> float:
        """ms of a call beside the neighbour; RuntimeError where it is never there for a whole turn."""
        neighbour = self.neighbours[name]
        expected = self.expected.get(name, 4.0 * self.alone_ms * self.calls)
        for _ in range(4):
            neighbour.start(expected)
            try:
                ms = self._window(self.calls)
            finally:
                copied = neighbour.stop()
            if copied is not None:
                self.expected[name] = ms * self.calls
                self.copies[name].append(copied)
                return ms
            expected *= 2
            self.repeated[name] = self.repeated.get(name, 0) + 1
        raise RuntimeError(f"{name}: {neighbour.missed}, four times")

    def _window(self, calls: int) -> float:
        """ms of a call, of so many back to back on the current stream."""
        begin, end = self._edges
        torch.cuda._sleep(BACKLOG_US * 2000)  # cycles
        begin.record()
        for _ in range(calls):
            self.work()
        end.record()
        clock = self._gpu.sm_clock_mhz()
        end.synchronize()
        self.clocks += [] if clock is None else [clock]
        return begin.elapsed_time(end) / calls


class _Holding:
    """SMs held by gem.kernels.hold, which ends by itself."""

    missed = "it ended before the turn did"

    def __init__(self, holder, count: int, gbps: float, moves: bool) -> None:
        self.holder, self.count, self.gbps, self.moves = holder, count, gbps, moves

    def start(self, expected_ms: float) -> None:
        if self.count:
            limit_s = min(2.0, 0.2 + 4e-3 * expected_ms)
            self.holder.start(self.count, self.gbps, moves=self.moves, limit_s=limit_s)

    def stop(self) -> Copied | None:
        if not self.count:
            return Copied(0, 0.0)
        held = self.holder.stop()
        return None if held is None else Copied(held.copied, held.seconds)


class _Copying:
    """Copies by the copy engine, one after the other, a number of them."""

    missed = "it ended before the turn did"

    def __init__(self, engine: CopyEngine, device: torch.device) -> None:
        self.engine = engine
        self.stream = torch.cuda.Stream(device)
        self.source, self.target = (torch.ones(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        self._edges = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._count, self._ms = 4, 0.0
        torch.cuda.synchronize()
        for _ in range(2):
            self._queue()
            self._edges[1].synchronize()
            self._ms = self._edges[0].elapsed_time(self._edges[1]) / self._count

    def _queue(self) -> None:
        begin, end = self._edges
        # Small, so that what follows it runs as soon as ``begin`` has come.
        self.engine.copy(self.target[:4096], self.source[:4096], self.stream.cuda_stream)
        begin.record(self.stream)
        for _ in range(self._count):
            self.engine.copy(self.target, self.source, self.stream.cuda_stream)
        end.record(self.stream)

    def start(self, expected_ms: float) -> None:
        self._count = 2 + math.ceil(1.2 * (expected_ms + BACKLOG_US * 1e-3) / self._ms)
        self._queue()
        self._edges[0].synchronize()

    def stop(self) -> Copied | None:
        begin, end = self._edges
        early = end.query()
        end.synchronize()
        return None if early else Copied(self._count * COPY_BYTES, begin.elapsed_time(end) * 1e-3)


class _PacedCopying:
    """Copies by the copy engine, of as many bytes a second as SMs are to copy, until told to stop."""

    def __init__(self, engine: CopyEngine, device: torch.device, gbps: float) -> None:
        self.engine, self.gbps, self._pacer = engine, gbps, Pacer()
        self.missed = f"it copied less than {LEAST_RATE:g} of {gbps:g} GB/s"
        self.stream = torch.cuda.Stream(device)
        both = (torch.ones(PIECES, PIECE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        self._pieces = list(zip(*both, strict=True))
        self._edges = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()

    def _queue(self, number: int) -> None:
        if not number:
            # A call of CUDA's runtime first: it gives the thread its context, which the driver's own calls do not.
            self._edges[0].record(self.stream)
        target, source = self._pieces[number % PIECES]
        self.engine.copy(target, source, self.stream.cuda_stream)

    def start(self, expected_ms: float) -> None:
        self._pacer.start(self._queue, PIECE_BYTES / self.gbps * 1e-9, lambda: self._edges[1].record(self.stream))
        self._edges[0].synchronize()

    def stop(self) -> Copied | None:
        pace = self._pacer.stop()
        begin, end = self._edges
        end.synchronize()
        copied = Copied(pace.pieces * PIECE_BYTES, begin.elapsed_time(end) * 1e-3, pace.latest_s)
        return copied if copied.gbps >= LEAST_RATE * self.gbps else None


def prove(engine: CopyEngine, holder, sms: int) -> str:
    """That copies need no SM: one arrives while all are held. NoCopyEngine where it does not.

    A plain copy within the device, tried the same way, waits, which shows that nothing was left for a kernel.
    """
    device = holder.source.device
    source, target, other = (torch.ones(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(3))
    streams = [torch.cuda.Stream() for _ in range(2)]
    arrived = [torch.cuda.Event() for _ in range(2)]
    for _ in range(2):  # once before: what is loaded at first use must not wait for SMs
        engine.copy(target, source, streams[0].cuda_stream)
        with torch.cuda.stream(streams[1]):
            other.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def by_engine() -> None:
        engine.copy(target, source, streams[0].cuda_stream)

    def plainly() -> None:
        with torch.cuda.stream(streams[1]):
            other.copy_(source, non_blocking=True)

    found = []
    for queue, stream, event in zip((by_engine, plainly), streams, arrived, strict=True):
        try:
            holder.start(sms, moves=False, limit_s=4 * PROOF_S)
        except RuntimeError as reason:
            raise NoCopyEngine(f"it cannot be tried: {reason}") from None
        queue()
        event.record(stream)
        came = _comes(event)
        found.append(came if holder.stop() is not None else None)
        torch.cuda.synchronize()
    if not found[0]:
        what = "the SMs were let go too early to tell" if found[0] is None else "a copy did not arrive"
        raise NoCopyEngine(f"cuMemcpyBatchAsync while all {sms} SMs were held: {what}")
    plain = {True: "did too", False: "did not", None: "was not tried long enough"}[found[1]]
    return f"a copy arrived while all {sms} SMs were held, a plain one {plain}"


def _comes(event: torch.cuda.Event) -> bool:
    """Whether it does within PROOF_S."""
    deadline = time.monotonic() + PROOF_S
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-4)
    return True


def _gemm(params: ContentionParams, device: torch.device) -> Callable[[], object]:
    generator = torch.Generator(device).manual_seed(params.seed)
    M, N, K = params.shape
    # Random values: zeros draw less power and run faster.
    a_MK, b_KN = (
        torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in ((M, K), (K, N))
    )
    out_MN = torch.empty(M, N, device=device, dtype=torch.bfloat16)
    return lambda: torch.matmul(a_MK, b_KN, out=out_MN)


def _gdpa(params: ContentionParams) -> Callable[[], object]:
    op = GdpaParams(
        heads=params.heads, head_dim=params.head_dim, dtype="bfloat16", activation="gelu_taylor",
        qk_scale=params.head_dim**-0.5, seed=params.seed,
    )  # fmt: skip
    subject = Subject(build_inputs("gdpa", op, load_profile(params.fixture).draw(), "cuda"), params.impl)

    def forward() -> None:
        with torch.no_grad():
            subject.forward()

    return forward
