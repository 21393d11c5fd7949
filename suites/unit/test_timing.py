"""Timing: the interval holds the median it claims to hold, turns are fair, timed calls run on cold caches.

Kinds: a warm-up too short was 30 % off; long repeats throttle; caches not flushed; timed calls that were no-ops.
"""

import itertools
import math
import random
import time

import pytest

from gem.errors import RequestError
from gem.harness import timing
from gem.harness.environment import settings
from gem.harness.session import RunOptions, open_session
from gem.harness.timing import FEW_ROUNDS, MIN_ROUNDS, Timer, interleave, last_level_cache_bytes, summarize
from gem.harness.worker import WorkerFailure


@pytest.mark.parametrize("n", [6, 7, 12, 25])
def test_interval_of_the_median_covers_it_as_often_as_it_says(n):
    """Against a skewed distribution (latencies are), where mean ± deviations would miss."""
    draw = random.Random(n)
    truth = math.exp(0.0)  # the median of a lognormal
    summaries = [summarize([draw.lognormvariate(0.0, 1.0) for _ in range(n)]) for _ in range(3000)]
    covered = sum(s.low <= truth <= s.high for s in summaries) / len(summaries)
    assert summaries[0].confidence >= 0.95
    # Binomial error of 3000 trials: 3 * sqrt(0.05 * 0.95 / 3000) = 0.012.
    assert covered == pytest.approx(summaries[0].confidence, abs=0.012)


def test_interval_by_hand():
    """n = 12: 1 - 2 * (1 + 12 + 66) / 4096 = 0.9614 with the 3rd and 10th; one further in would be 0.854."""
    summary = summarize([float(x) for x in (12, 1, 11, 2, 10, 3, 9, 4, 8, 5, 7, 6)])
    assert (summary.median, summary.low, summary.high) == (6.5, 3.0, 10.0)
    assert summary.confidence == pytest.approx(1 - 2 * 79 / 4096)
    few = summarize([5.0, 1.0, 3.0])
    assert (few.median, few.low, few.high, few.confidence) == (3.0, 1.0, 5.0, 0.75)


def test_remarks_say_few_noisy_and_drifting():
    assert summarize([1.0] * 9).remarks() == []
    assert summarize([1.0, 1.0, 1.0]).remarks() == ["few samples (3)"]
    throttled = summarize([1.0] * 10 + [1.0] * 10 + [1.12] * 10)
    assert throttled.drift == pytest.approx(0.12)
    wide = [1 + 0.2 * (-1) ** i for i in range(30)]
    assert any(text.startswith("noisy") for text in summarize(wide).remarks())
    # Noise alone is no drift.
    draw = random.Random(0)
    assert not any("while timed" in t for t in summarize([draw.gauss(1, 0.05) for _ in range(60)]).remarks())
    stepped = [1.0] * 14 + [1.3] * 7
    assert "slowed by 30% while timed" in summarize(stepped).remarks()


class Clock:
    """Time that passes only when a turn is taken."""

    def __init__(self):
        self.now = 0.0
        self.order: list[str] = []

    def turn(self, name, ms):
        values = itertools.cycle(ms if isinstance(ms, list) else [ms])

        def take():
            self.order.append(name)
            value = next(values)
            self.now += value / 1e3
            return value

        return take

    def __call__(self):
        return self.now


def test_each_round_another_one_starts():
    clock = Clock()
    race = interleave({n: clock.turn(n, [0.9, 1.1]) for n in "abc"}, 0.01, clock=clock)
    rounds = ["".join(clock.order[i : i + 3]) for i in range(0, 9, 3)]
    assert rounds == ["abc", "bca", "cab"]
    assert all(len(samples) == race.rounds for samples in race.samples.values())


def test_stops_when_every_median_is_known_else_when_the_budget_is_spent():
    clock = Clock()
    steady = interleave({"a": clock.turn("a", 10.0), "b": clock.turn("b", 20.0)}, 100.0, clock=clock)
    assert steady.rounds == MIN_ROUNDS
    clock = Clock()
    noisy = interleave({"a": clock.turn("a", 10.0), "b": clock.turn("b", [10.0, 30.0])}, 2.0, clock=clock)
    assert noisy.rounds > 3 * MIN_ROUNDS and clock.now == pytest.approx(2.0, rel=0.1)
    assert len(noisy.samples["a"]) == noisy.rounds  # all go on, so that they stay paired


def test_a_slow_contestant_sits_out_after_few_turns_and_the_others_do_not():
    clock = Clock()
    race = interleave({"a": clock.turn("a", [10.0, 12.0]), "b": clock.turn("b", 5000.0)}, 1.0, clock=clock)
    assert len(race.samples["b"]) == FEW_ROUNDS
    # "a" is noisy: it goes on for its share of the budget, half a second of turns of 10 to 12 ms.
    assert 42 <= len(race.samples["a"]) <= 50
    steady = interleave({"a": clock.turn("a", 10.0), "b": clock.turn("b", 5000.0)}, 1.0, clock=clock)
    assert len(steady.samples["a"]) == MIN_ROUNDS
    assert race.summaries()["b"].remarks() == ["few samples (3)"]
    assert clock.order[:6] == ["a", "b", "b", "a", "a", "b"]  # in turns while it runs
    clock = Clock()
    many = interleave({name: clock.turn(name, [100.0, 140.0]) for name in "abcd"}, 1.0, clock=clock)
    assert many.rounds == MIN_ROUNDS  # seven turns of one fit into the budget: everyone gets them


def test_one_that_fails_leaves_and_the_others_finish():
    clock = Clock()
    bad = clock.turn("bad", 10.0)

    def failing():
        if clock.order.count("bad") == 2:
            raise WorkerFailure("oom", "killed by SIGKILL, most likely out of memory")
        return bad()

    race = interleave({"bad": failing, "good": clock.turn("good", 10.0)}, 100.0, clock=clock)
    assert race.failures["bad"].status == "oom"
    assert len(race.samples["good"]) == MIN_ROUNDS
    assert set(race.summaries()) == {"good"}  # two samples of a dead contestant are no result


def test_cache_size_is_read_from_the_machine(tmp_path, monkeypatch):
    """Two sockets with one 16 MiB L3 each, of four cores; this process may use three of them."""
    for core in range(4):
        socket = core // 2
        for index, (level, size, shared) in enumerate([(1, "32K", core), (2, "1024K", core), (3, "16384K", socket)]):
            folder = tmp_path / f"cpu{core}/cache/index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    monkeypatch.delenv("GEM_LLC_MIB", raising=False)
    monkeypatch.setattr(timing.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert last_level_cache_bytes(tmp_path) == 2 * (16 << 20)
    monkeypatch.setattr(timing.os, "sched_getaffinity", lambda pid: {0, 1})
    assert last_level_cache_bytes(tmp_path) == 16 << 20
    assert last_level_cache_bytes(tmp_path / "none") == 32 << 20


def test_timer_measures_the_call_alone():
    timer = Timer("cpu")
    calls = []

    def call():
        calls.append("call")
        time.sleep(0.005)

    def before():
        calls.append("before")
        time.sleep(0.01)

    samples = timer.time(call, before, 3)
    assert calls == ["before", "call"] * 3
    assert all(ms >= 5.0 for ms in samples) and min(samples) < 9.0  # with what comes before it would be 15


def test_timer_flushes_before_every_call(monkeypatch):
    timer = Timer("cpu")
    assert timer._flush_buffer.numel() * 4 >= min(2 * last_level_cache_bytes(), Timer.FLUSH_LIMIT)
    events = []
    monkeypatch.setattr(timer, "flush", lambda: events.append("flush"))
    timer.time(lambda: events.append("call"), lambda: None, 2)
    assert events == ["flush", "call", "flush", "call"]


def test_warm_up_goes_on_while_the_call_gets_faster(monkeypatch):
    """A contestant that compiles or tunes on its first calls: 40, 34, 28 … ms down to 4, where it stays."""
    timer = Timer("cpu")
    scripted = itertools.chain(range(40, 4, -6), itertools.repeat(4.0))
    monkeypatch.setattr(timer, "time", lambda call, before, calls: [next(scripted) for _ in range(calls)])
    assert timer.warm_up(lambda: None, cap_s=60.0) == 4.0
    assert timer.calls == 3  # a turn is some 10 ms of work


def test_warm_up_ends_for_one_that_never_settles():
    timer = Timer("cpu")
    waits = (0.002 * 1.3**i for i in itertools.count())
    start = time.perf_counter()
    timer.warm_up(lambda: time.sleep(min(0.1, next(waits))), cap_s=0.2)
    assert time.perf_counter() - start < 1.0


def test_a_virtual_machine_may_be_told_its_share_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GEM_LLC_MIB", "48")
    assert last_level_cache_bytes(tmp_path) == 48 << 20
    assert settings()["GEM_LLC_MIB"] == "48"
    monkeypatch.setenv("GEM_LLC_MIB", "8M")
    with pytest.raises(RequestError, match=r"^GEM_LLC_MIB='8M'"), open_session(RunOptions(device="cpu")):
        pytest.fail("a run began")
    with pytest.raises(RequestError, match=r"^GEM_LLC_MIB='8M'; accepted: MiB, a whole number from 1 to 99999$"):
        last_level_cache_bytes(tmp_path)
