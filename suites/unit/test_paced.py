"""Pieces on a schedule: by a clock that the test moves, and with real copies by a real thread."""

import time
from collections.abc import Callable

import pytest
import torch

from gem.harness.paced import Pace, Pacer, keep_pace


class Clock:
    """Time that passes by sleeping, ``over`` longer than asked for, and by what is queued."""

    def __init__(self, over: float = 0.0) -> None:
        self.now, self.over, self.at = 100.0, over, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """At least so long."""
        assert seconds > 0
        self.now += seconds + self.over

    def queue(self, takes: dict[int, float]) -> Callable[[int], None]:
        """Notes when each piece was queued; some take time."""

        def one(number: int) -> None:
            assert number == len(self.at)
            self.at.append(self.now - 100.0)
            self.now += takes.get(number, 0.0)

        return one


def test_pieces_follow_an_absolute_schedule() -> None:
    """Exact sleep: piece n at n periods. A pause of three and a half periods: what was due in it comes at once behind
    it, and the schedule is kept again. Sleeps that last too long do not add up."""
    clock = Clock()
    pace = keep_pace(clock.queue({4: 3.5}), 1.0, lambda: clock.now >= 110.0, clock, clock.sleep)
    assert clock.at == [0, 1, 2, 3, 4, 7.5, 7.5, 7.5, 8, 9] and pace == Pace(10, 2.5)
    clock = Clock(over=0.75)
    pace = keep_pace(clock.queue({}), 1.0, lambda: clock.now >= 120.0, clock, clock.sleep)
    assert clock.at == [0.0, *(n + 0.75 for n in range(1, 20))] and pace == Pace(20, 0.75)
    assert keep_pace(lambda number: None, 1.0, lambda: True).pieces == 1


def test_a_thread_keeps_the_pace_until_told_to_stop() -> None:
    """Real copies at a real clock: never ahead of the schedule, each piece once and whole, and the end behind all."""
    source = torch.arange(8 * 4096, dtype=torch.int32).view(8, -1)
    target, done, period = torch.zeros_like(source), list[int](), 2e-4
    pacer = Pacer()

    def copy(number: int) -> None:
        target[number % 8].copy_(source[number % 8])
        done.append(number)

    for _ in range(2):  # once more with the same
        done.clear()
        target.zero_()
        begin = time.perf_counter()
        pacer.start(copy, period, lambda: done.append(-1))
        assert done[0] == 0
        while len(done) < 20:
            time.sleep(1e-3)
        pace = pacer.stop()
        elapsed = time.perf_counter() - begin
        assert done == [*range(pace.pieces), -1] and torch.equal(target, source)
        assert 20 <= pace.pieces <= elapsed / period + 1 and pace.latest_s > 0

    def fail(number: int) -> None:
        raise ValueError(number)

    pacer.start(fail, period, lambda: None)
    with pytest.raises(ValueError, match="0"):
        pacer.stop()
