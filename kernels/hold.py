"""A copy kernel that holds multiprocessors, as a collective's kernel does: what other kernels lose by it is measured.

Each program takes all shared memory of an SM, so that nothing else runs there, and copies device memory round and round
at a given rate until a flag in device memory says stop. It ends by itself too: after a number of rounds, and after a
time. Each program tells which SM it has.

Legend: P programs, C elements of a chunk.
"""

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as device_clock

CHUNK = 32_768  # int32, 128 KiB: 8 loads of 16 bytes in flight a thread, what one SM takes to copy at some 60 GB/s
WARPS = 32
REGISTERS = 64  # of 1,024 threads: the whole register file, as NCCL's kernels have most of it
LONGEST_S = 2.0  # nanoseconds of it fit into 32 bits
MOST_ROUNDS = 2**30
BUFFER_BYTES = 1 << 28  # copied from, and as much to: far more than caches hold
TOLD = 4  # rounds, SM, begin and end in ns
START_S = 1.0  # a kernel that has not begun by then does not get its SMs


@triton.jit(do_not_specialize=["chunks", "most_rounds", "period_ns", "limit_ns"])
def _hold(
    source, target, stop, told, chunks, most_rounds, period_ns, limit_ns, CHUNK: tl.constexpr, MOVES: tl.constexpr,
    CLOCK: tl.constexpr,
):  # fmt: skip
    """Chunk number round * P + program, modulo ``chunks``, from source to target; a round every ``period_ns``.

    The flag is read once a round. CLOCK: False where there is none (interpreted): as fast as it goes, by rounds alone.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    inside_C = tl.arange(0, CHUNK)
    begin = tl.full((), 1, tl.int64)
    if CLOCK:
        begin = device_clock.globaltimer()
        tl.store(told + 4 * program + 1, device_clock.smid().to(tl.int64))
    tl.store(told + 4 * program + 2, begin)
    now = begin
    rounds = tl.full((), 0, tl.int32)
    going = tl.full((), 1, tl.int32)
    while going > 0:
        # Before the chunk: the read of the flag then waits together with those of the chunk.
        stopped = tl.load(stop, volatile=True)
        if MOVES:
            at_C = ((rounds.to(tl.int64) * programs + program) % chunks) * CHUNK + inside_C
            tl.store(target + at_C, tl.load(source + at_C))
        rounds += 1
        if CLOCK:
            due = begin + rounds.to(tl.int64) * period_ns
            now = device_clock.globaltimer()
            spins = tl.full((), 0, tl.int32)
            while (now < due) & (spins < 100_000):  # were the clock to stand still, this would not
                now = device_clock.globaltimer()
                spins += 1
        keep = (stopped == 0) & (rounds < most_rounds) & (now < begin + limit_ns)
        going = keep.to(tl.int32)
    tl.store(told + 4 * program, rounds.to(tl.int64))
    tl.store(told + 4 * program + 3, now)


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block may ask for, which with what the driver keeps is all of an SM's."""
    active: Any = triton.runtime.driver.active
    return active.utils.get_device_properties(device.index or 0)["max_shared_mem"]


def exclusive(compiled: Any, shared: int) -> Any:
    """A compiled kernel that is launched with ``shared`` bytes of shared memory, of which it uses none.

    By what Triton's launcher reads (triton 3.6); the kernel given stays as it is.
    """
    other = copy.copy(compiled)
    other.metadata = compiled.metadata._replace(shared=max(shared, compiled.metadata.shared))
    other.packed_metadata = (other.metadata.num_warps, other.metadata.num_ctas, other.metadata.shared)
    other.module = other.function = other._run = None
    return other


def period_ns(programs: int, gbps: float) -> int:
    """Of a round, so that ``programs`` together copy ``gbps`` GB/s; 1 where there is no bound."""
    return max(1, round(programs * CHUNK * 4 / gbps)) if gbps else 1


IDLE_NS = 2_000  # between two looks at the flag of a program that copies nothing


@dataclass(frozen=True)
class Held:
    """What a hold was."""

    copied: int  # bytes
    seconds: float
    sms: tuple[int, ...]

    @property
    def gbps(self) -> float:
        """GB/s copied: each byte read once and written once."""
        return self.copied / self.seconds / 1e9 if self.seconds > 0 else 0.0


def held(told_PT: Any, moves: bool) -> Held:
    """From what the programs told: int64 [P, 4], rounds, SM, begin and end in ns."""
    rows = [tuple(int(x) for x in row) for row in told_PT]
    seconds = (max(row[3] for row in rows) - min(row[2] for row in rows)) * 1e-9
    return Held(sum(row[0] for row in rows) * CHUNK * 4 * moves, seconds, tuple(row[1] for row in rows))


class Holder:
    """Holds SMs of the current GPU, one hold at a time.

    All that touches the device while SMs are held goes through copies, which need none: else nothing could let go of
    all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.chunks = BUFFER_BYTES // (CHUNK * 4)
        self.source, self.target = (torch.ones(self.chunks * CHUNK, dtype=torch.int32, device=device) for _ in range(2))
        count = torch.cuda.get_device_properties(device).multi_processor_count
        self._told_PT = torch.zeros(count, TOLD, dtype=torch.int64, device=device)
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._seen_PT = torch.zeros(count, TOLD, dtype=torch.int64).pin_memory()
        self._flags = torch.tensor([0, 1], dtype=torch.int32).pin_memory()
        self._empty_PT = torch.zeros(count, TOLD, dtype=torch.int64).pin_memory()
        self._stream, self._control = (torch.cuda.Stream(device) for _ in range(2))
        self._done = torch.cuda.Event()
        self._programs, self._moves = 0, False
        shared = shared_limit(device)
        with torch.cuda.device(device):
            self._kernels = {moves: exclusive(self._compile(moves), shared) for moves in (False, True)}
        torch.cuda.synchronize(device)

    def _compile(self, moves: bool) -> Any:
        return _hold.warmup(
            self.source, self.target, self._stop, self._told_PT, self.chunks, MOST_ROUNDS, 1, 1, CHUNK=CHUNK,
            MOVES=moves, CLOCK=True, grid=(1,), num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip

    def start(self, programs: int, gbps: float = 0.0, *, moves: bool = True, limit_s: float = LONGEST_S) -> None:
        """Hold ``programs`` SMs, for ``limit_s`` at most, and return when all are held.

        ``gbps``: what they copy together, at most; 0: as fast as they can. Nothing else may want the SMs at this
        moment. RuntimeError where they are not to be had, or two programs share one.
        """
        assert 0 < programs <= len(self._told_PT) and 0 < limit_s <= LONGEST_S
        self._programs, self._moves = programs, moves
        with torch.cuda.stream(self._stream):
            self._stop.copy_(self._flags[:1], non_blocking=True)
            self._told_PT.copy_(self._empty_PT, non_blocking=True)
            self._stream.synchronize()  # else the first look could be at what the last hold told
            self._kernels[moves][(programs, 1, 1)](
                self.source, self.target, self._stop, self._told_PT, self.chunks, MOST_ROUNDS,
                period_ns(programs, gbps) if moves else IDLE_NS, int(limit_s * 1e9), CHUNK, moves, True,
                stream=self._stream.cuda_stream,
            )  # fmt: skip
            self._done.record(self._stream)
        deadline = time.monotonic() + START_S
        while (running := sum(row[2] > 0 for row in self._look())) < programs:
            if time.monotonic() > deadline:
                self._let_go()
                raise RuntimeError(f"{running} of {programs} SMs could be held")
        if (count := len({row[1] for row in self._look()})) != programs:
            self._let_go()
            raise RuntimeError(f"{programs} programs are on {count} SMs")

    @property
    def holding(self) -> bool:
        """Whether the programs still run."""
        return not self._done.query()

    def stop(self) -> Held | None:
        """Let go, and say what it was; None where the hold had come to its own end before."""
        early = not self.holding
        self._let_go()
        return None if early else held(self._look(), self._moves)

    def _let_go(self) -> None:
        with torch.cuda.stream(self._control):
            self._stop.copy_(self._flags[1:], non_blocking=True)
        self._done.synchronize()  # within LONGEST_S, whatever happens
        self._control.synchronize()

    def _look(self) -> Any:
        with torch.cuda.stream(self._control):
            self._seen_PT[: self._programs].copy_(self._told_PT[: self._programs], non_blocking=True)
        self._control.synchronize()
        return self._seen_PT[: self._programs].tolist()
