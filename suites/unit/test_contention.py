"""Contention on one GPU, as far as a CPU can tell: the kernel that holds SMs as compiled for sm_90, statistics, and
turns beside neighbours on a stand-in of a GPU."""

import importlib.util
import math
import os
import random
import re
import statistics
import threading
import time
import tomllib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem import paths
from gem.harness import contention, names
from gem.harness.contention import Copied, gain_metrics, held_name, ideal, in_waves, slowdown_metric
from gem.harness.measured_params import ContentionParams
from gem.harness.worker import Unsupported

compiles = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"),
    reason="triton is not there, or interprets: nothing is compiled",
)

# ---- the kernel that holds SMs


@pytest.fixture(scope="module")
def kernels():
    """(resources, compiled) of the idle and of the copying kernel for sm_90."""
    from compiled import compiling_for

    from gem.kernels import hold

    rows = torch.zeros(hold.CHUNK * 2, dtype=torch.int32)
    told, flag = torch.zeros(4, hold.TOLD, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with compiling_for(90) as found:
        made = [
            hold._hold.warmup(
                rows, rows, flag, told, 2, hold.MOST_ROUNDS, 1, 1, CHUNK=hold.CHUNK, MOVES=moves, CLOCK=True, grid=(1,),
                num_warps=hold.WARPS, maxnreg=hold.REGISTERS,
            )
            for moves in (False, True)
        ]  # fmt: skip
    return found, made


@compiles
def test_the_kernel_looks_at_flag_and_clock_and_waits_for_no_other_warp(kernels) -> None:
    for resources, moves in zip(kernels[0], (0, 1), strict=True):
        assert resources.spilled == 0 and resources.shared == 0 and resources.registers <= 64
        assert "ld.volatile.global.b32" in resources.ptx  # else it would be read once for all rounds
        assert "%globaltimer" in resources.ptx and "%smid" in resources.ptx
        assert len(re.findall(r"\bld\.global\.v4", resources.ptx)) == 8 * moves  # 16 bytes a load, 128 KiB a round
        # Warps may see the flag a round apart: a barrier in the loop would be a deadlock.
        assert not re.search(r"\bbar\.|barrier", resources.ptx)


@compiles
def test_numbers_that_change_from_hold_to_hold_are_not_compiled_in(kernels) -> None:
    signature = kernels[1][1].src.signature
    assert [signature[name] for name in ("chunks", "most_rounds", "period_ns", "limit_ns")] == ["i32"] * 4


@compiles
def test_a_kernel_takes_all_shared_memory(kernels) -> None:
    from compiled import SHARED_LIMIT

    from gem.kernels.hold import exclusive

    given = kernels[1][1]
    taken = exclusive(given, SHARED_LIMIT[90])
    # What a block gets and the KiB that the driver keeps of each are all that an SM has, 228 KiB.
    assert taken.packed_metadata[2] + 1024 == 228 * 1024
    assert taken.metadata.shared == taken.packed_metadata[2] and taken.function is None
    assert given.packed_metadata[2] == given.metadata.shared == 0
    assert taken.packed_metadata[:2] == given.packed_metadata[:2] == (32, 1)


@compiles
@pytest.mark.parametrize(("programs", "gbps"), [(1, 240.0), (8, 240.0), (24, 240.0), (24, 80.0)])
def test_a_round_takes_as_long_as_its_share_of_the_rate(programs: int, gbps: float) -> None:
    from gem.kernels.hold import CHUNK, LONGEST_S, period_ns

    period = period_ns(programs, gbps)
    assert programs * CHUNK * 4 / period == pytest.approx(gbps, rel=1e-3)
    assert period_ns(programs, 0.0) == 1
    assert LONGEST_S * 1e9 < 2**31 and period < 2**31


@compiles
def test_what_programs_told() -> None:
    from gem.kernels.hold import CHUNK, held

    told = [[10, 5, 1_000, 2_000], [30, 9, 500, 2_500]]
    found = held(told, moves=True)
    assert found.sms == (5, 9) and found.copied == 40 * CHUNK * 4
    assert found.seconds == pytest.approx(2e-6) and found.gbps == pytest.approx(40 * CHUNK * 4 / 2e-6 / 1e9)
    assert held(told, moves=False).copied == 0


# ---- statistics


def test_slowdowns_are_of_rounds() -> None:
    """A clock that falls to half amid the turns slows both alike: the ratio stays, that of the medians does not."""
    draw = random.Random(1)
    alone = [draw.uniform(0.98, 1.02) * (1 if i < 12 else 2) for i in range(25)]
    beside = [1.25 * one for one in alone[:20]]
    copies = [Copied(10**9, 0.01), Copied(10**9, 0.02, late_s=3e-4)]
    metric = slowdown_metric("24_sms", alone, beside, copies, "told")
    assert metric.value == pytest.approx(1.25) and len(metric.samples) == 20 and metric.name == "slowdown.24_sms"
    assert statistics.median(beside) / statistics.median(alone) != pytest.approx(1.25, rel=0.01)
    assert re.search(r"1\.250 to 1\.250 \(9[5-9]%\); .* ms; 75 GB/s copied \(50 to 100\); .* told$", metric.note)
    assert "behind its schedule by 0.3 ms at most" in metric.note
    assert metric.better == "lower" and metric.unit == "x"


def test_gains_are_against_the_most_that_were_held() -> None:
    slowed = {"0_sms": (1.0,) * 8, "1_sm": (1.1,) * 8, "8_sms": (1.2,) * 8, "24_sms": (1.32,) * 8}
    found = {one.name: one for one in gain_metrics(slowed | {contention.ENGINE: (1.01,) * 8}, (0, 1, 8, 24))}
    assert found["sm_free_gain"].value == pytest.approx(0.2)
    assert found["engine_gain"].value == pytest.approx(1.32 / 1.01 - 1)
    assert "24_sms -> 1_sm" in found["sm_free_gain"].note and "up to 0.15" in found["engine_gain"].note
    assert [one.name for one in gain_metrics(slowed, (0, 1, 8, 24))] == ["sm_free_gain"]
    assert gain_metrics(slowed, (0,)) == [] and gain_metrics({"0_sms": (1.0,)}, (0, 24)) == []


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.integers(2, 200), st.data())
def test_waves(tiles: int, total: int, data) -> None:
    """By handing tiles out, one to a free SM at a time."""
    taken = data.draw(st.integers(0, total - 1))

    def waves(sms: int) -> int:
        rest, count = tiles, 0
        while rest > 0:
            rest, count = rest - sms, count + 1
        return count

    assert in_waves(tiles, total, taken) == waves(total - taken) / waves(total)
    assert ideal(total, taken) == pytest.approx(total / (total - taken)) and ideal(total, total) == math.inf


def test_one_sm_of_132_doubles_a_product_of_one_wave() -> None:
    assert in_waves(132, 132, 1) == in_waves(132, 132, 24) == 2.0 and in_waves(132, 132, 0) == 1.0


# ---- as a subject


def test_it_is_declared() -> None:
    root = paths.checkout_root()
    assert root is not None
    document = tomllib.loads((root / "suites/scaling/sm_contention.toml").read_text())
    shape = document["case"][1]["params"]["shape"]
    assert math.ceil(shape[0] / 128) * math.ceil(shape[1] / 256) == 132
    for case in document["case"]:
        for key in case["expect"]:
            assert names.metric(key) is not None
    assert document["suite"]["defaults"]["params"]["unpaced"]
    held = {held_name(n) for n in document["suite"]["defaults"]["params"]["sms"]}
    assert held == {"0_sms", "1_sm", "8_sms", "24_sms"} and held_name(24, False) == "24_sms_idle"


def test_names_of_slowdowns() -> None:
    found = names.metric("slowdown.24_sms")
    assert found is not None and found.better == "lower" and names.metric("slowdown.") is None


def test_params_are_checked() -> None:
    with pytest.raises(ValueError, match=r"sms = .*accepted: numbers of SMs in ascending order"):
        ContentionParams(sms=(24, 1))
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        ContentionParams(sms=(-1,))


def test_it_runs_on_a_gpu_alone() -> None:
    pytest.importorskip("triton")
    from gem.harness.subject_contention import Contention

    with pytest.raises(Unsupported, match="this run is on cpu"):
        Contention().measure(ContentionParams(), "cpu", lambda done, total: None)


# ---- turns, on a stand-in: streams are threads, a hold is a function that waits for its flag


class Stream:
    """Runs what is queued, one after the other."""

    made = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        self.cuda_stream, self.pool = Stream.made, ThreadPoolExecutor(1)
        STREAMS[self.cuda_stream] = self

    def submit(self, call: Any) -> Future:
        """Queue it."""
        return self.pool.submit(call)

    def synchronize(self) -> None:
        """Wait for what is queued."""
        self.submit(lambda: None).result(10)


STREAMS: dict[int, Stream] = {}
PIECE = 24_000_000  # 1 ms at 24 GB/s


class Event:
    """The moment when a stream comes to it."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at: Future = Future()

    def record(self, stream: Stream | None = None) -> None:
        """On a stream, or now."""
        if stream is None:
            self.at = Future()
            self.at.set_result(time.perf_counter())
        else:
            self.at = stream.submit(time.perf_counter)

    def query(self) -> bool:
        """Whether it has come."""
        return self.at.done()

    def synchronize(self) -> None:
        """Wait for it."""
        self.at.result(10)

    def elapsed_time(self, end: "Event") -> float:
        """ms."""
        return (end.at.result(10) - self.at.result(10)) * 1e3


class Gpu:
    """Holds run in threads; ``free``: SMs that they find; ``lasts_s``: after which one ends by itself."""

    def __init__(self, free: int = 132, lasts_s: float = 9.0) -> None:
        self.free, self.lasts_s, self.running = free, lasts_s, threading.Event()
        properties = SimpleNamespace(multi_processor_count=132, uuid="GPU-0")
        cuda = SimpleNamespace(
            Stream=Stream, Event=Event, stream=lambda one: nullcontext(), device=lambda one: nullcontext(),
            current_device=lambda: 0, get_device_properties=lambda one: properties, synchronize=lambda one=None: None,
            _sleep=lambda cycles: None,
        )  # fmt: skip

        class Torch:
            def __getattr__(self, name: str) -> Any:
                return {"cuda": cuda, "device": lambda *_: torch.device("cpu")}.get(name) or getattr(torch, name)

        self.torch = Torch()

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        """The compiled kernel."""

        def launch(source, target, stop, told, chunks, most, period, limit_ns, size, moves, clock, stream) -> None:
            from gem.kernels.hold import CHUNK

            def hold() -> None:
                begin = time.perf_counter()
                for program in range(min(grid[0], self.free)):
                    told[program, 1], told[program, 2] = program, 1
                self.running.set()
                while not stop[0] and time.perf_counter() - begin < min(limit_ns * 1e-9, self.lasts_s):
                    time.sleep(1e-4)
                self.running.clear()
                # As many rounds as the period allows.
                passed = int((time.perf_counter() - begin) * 1e9)
                told[: grid[0], 0], told[: grid[0], 3] = passed // period, passed

            assert size == CHUNK
            STREAMS[stream].submit(hold)

        return launch


class Engine:
    """A copy takes its time on its stream; a piece of a paced one none, or it would be a clock of its own."""

    def __init__(self, takes_s: float = 2e-3, piece_s: float = 0.0) -> None:
        self.takes_s, self.piece_s, self.copying = takes_s, piece_s, threading.Event()

    def copy(self, target: Any, source: Any, stream: int) -> None:
        """Queue it."""

        def one() -> None:
            self.copying.set()
            time.sleep(self.piece_s if len(target) == PIECE else self.takes_s if len(target) > 4096 else 0)
            self.copying.clear()

        STREAMS[stream].submit(one)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a bench on a stand-in: (gpu, engine, parameters) to bench. Its work takes 1 ms, 2 while SMs are held.

    ``least_rate`` 0: on busy cores threads may fall behind any schedule.
    """
    pytest.importorskip("triton")
    from gem.harness import subject_contention as subject
    from gem.kernels import hold

    def make(gpu: Gpu, copies: Engine, least_rate: float = 0.0, **params: Any) -> Any:
        for module in (hold, subject):
            monkeypatch.setattr(module, "torch", gpu.torch)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        monkeypatch.setattr(hold, "BUFFER_BYTES", 1 << 18)
        monkeypatch.setattr(hold, "START_S", 0.1)
        monkeypatch.setattr(hold, "shared_limit", lambda device: 0)
        monkeypatch.setattr(hold, "exclusive", lambda kernel, shared: kernel)
        monkeypatch.setattr(hold.Holder, "_compile", lambda self, moves: gpu)
        monkeypatch.setattr(subject, "COPY_BYTES", 1 << 16)
        monkeypatch.setattr(subject, "PIECE_BYTES", PIECE)
        monkeypatch.setattr(subject, "PIECES", 1)
        monkeypatch.setattr(subject, "LEAST_RATE", least_rate)
        monkeypatch.setattr(subject, "CopyEngine", lambda: copies)
        monkeypatch.setattr(subject, "PROOF_S", 0.05)

        def work() -> None:
            time.sleep(2e-3 if gpu.running.is_set() else 1e-3)

        monkeypatch.setattr(subject, "_gemm", lambda p, device: work)
        monkeypatch.setattr(subject, "_gdpa", lambda p: work)
        return subject._Bench(ContentionParams(turn_ms=4.0, budget_s=0.01, gbps=24.0, **params))

    return make


def test_every_neighbour_gets_its_turns(bench) -> None:
    one = bench(Gpu(), Engine(), idle=(24,), unpaced=True)
    found = {metric.name: metric for metric in one.run(lambda done, total: None)}
    engines = ["copy_engine", "copy_engine_unpaced"]
    names_of = [f"slowdown.{name}" for name in ("0_sms", "1_sm", "8_sms", "24_sms", "24_sms_idle", *engines)]
    assert list(found) == ["ms", *names_of, "sm_free_gain", "engine_gain"]
    assert {len(metric.samples) for metric in found.values()} == {7}
    for name in ("0_sms", *engines):
        assert found[f"slowdown.{name}"].value == pytest.approx(1.0, abs=0.3)
    for name in ("1_sm", "8_sms", "24_sms", "24_sms_idle"):
        assert found[f"slowdown.{name}"].value == pytest.approx(1.8, abs=0.4)
    assert found["engine_gain"].value > 0.3
    assert re.search(r"2[34] GB/s copied", found["slowdown.8_sms"].note)
    assert "GB/s copied" in found["slowdown.copy_engine"].note and "schedule" in found["slowdown.copy_engine"].note
    assert "as fast as it goes" in found["slowdown.copy_engine_unpaced"].note
    assert "GB/s" not in found["slowdown.24_sms_idle"].note and "nothing copied" in found["slowdown.24_sms_idle"].note
    assert "a copy arrived while all 132 SMs were held" in found["slowdown.copy_engine"].note
    assert "split evenly 1.222, 2048 tiles of 128 x 256 in waves 1.188" in found["slowdown.24_sms"].note


def test_a_grid_of_a_program_an_sm_is_told_apart(bench) -> None:
    persistent = bench(Gpu(), Engine(), work="gdpa", impl="gluon", engine=False)
    assert persistent._by_size(1) == "split evenly 1.008, a program an SM in waves 2.000"
    assert bench(Gpu(), Engine(), work="gdpa", engine=False)._by_size(24) == "split evenly 1.222"


def test_a_turn_that_outlasts_its_neighbour_does_not_count(bench) -> None:
    one = bench(Gpu(lasts_s=2e-3), Engine(), sms=(8,), engine=False)
    with pytest.raises(RuntimeError, match="8_sms: it ended before the turn did, four times"):
        one.run(lambda done, total: None)


def test_a_turn_in_which_the_engine_copied_too_little_does_not_count(bench) -> None:
    """Pieces that take 5 ms, one due every ms."""
    one = bench(Gpu(), Engine(piece_s=5e-3), least_rate=0.9, sms=(0,))
    with pytest.raises(RuntimeError, match=r"copy_engine: it copied less than 0\.9 of 24 GB/s, four times"):
        one.run(lambda done, total: None)


def test_an_engine_that_refuses_a_piece_ends_the_bench(bench) -> None:
    engine = Engine()
    one = bench(Gpu(), engine, sms=(0,))

    def refuse(target: Any, source: Any, stream: int) -> None:
        raise RuntimeError("cuMemcpyBatchAsync: CUDA error 1")

    engine.copy = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        one.run(lambda done, total: None)


def test_sms_that_cannot_be_held_are_told(bench) -> None:
    one = bench(Gpu(free=5), Engine(), sms=(8,), engine=False)
    with pytest.raises(RuntimeError, match="5 of 8 SMs could be held"):
        one.run(lambda done, total: None)
    assert not one.holder.holding


def test_an_engine_that_waits_for_sms_is_none(bench) -> None:
    """Copies that do not arrive while all SMs are held are a kernel's: nothing is told of them, and the reason is."""
    one = bench(Gpu(), Engine(takes_s=0.2), sms=(0, 1))
    found = {metric.name: metric for metric in one.run(lambda done, total: None)}
    assert "slowdown.copy_engine" not in found and "engine_gain" not in found
    assert "no copy engine: cuMemcpyBatchAsync while all 132 SMs were held: a copy did not arrive" in found["ms"].note
