"""Two runs that deal their turns in turn: order, counts, and what becomes of one whose partner fails or dies."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from gem.harness import gate_turns
from gem.harness.gate_turns import FEW_TURNS, MAX_TURNS, MIN_TURNS, Turnstile, shared_interleave
from gem.harness.timing import Race
from gem.harness.worker import WorkerFailure

Turns = dict[str, Callable[[], float]]
Meeting = tuple[Turns, float]  # contestants, and the budget


class Pair:
    """Two runs, each a thread, connected as two processes are; `log` has who did what, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.races: dict[str, list[Race]] = {"a": [], "b": []}
        self.together = 0
        self.at_work = 0

    def turn(self, name: str, ms: float = 0.2) -> Callable[[], float]:
        """A turn that notes itself and whether the other works meanwhile."""

        def take() -> float:
            self.at_work += 1
            self.together += self.at_work > 1
            self.log.append(name)
            time.sleep(ms * 1e-3)
            self.at_work -= 1
            return ms

        return take

    def run(self, a: Sequence[Meeting], b: Sequence[Meeting], dies_after: int | None = None) -> dict[str, list[Race]]:
        """Both go through their meetings; `dies_after`: b ends after so many of them without a word."""
        ends = [os.pipe(), os.pipe()]

        def side(name: str, meetings: Sequence[Meeting], read: int, write: int, first: bool) -> None:
            stile = Turnstile(read, write, first)
            deal = shared_interleave(stile, Race, WorkerFailure)
            for number, (turns, budget) in enumerate(meetings):
                if name == "b" and dies_after is not None and number >= dies_after:
                    break
                self.at_work += 1  # set-up: nobody else may work
                self.together += self.at_work > 1
                time.sleep(0.002)
                self.at_work -= 1
                self.races[name].append(deal(turns, budget))
            stile._in.close()
            stile._out.close()

        threads = [
            threading.Thread(target=side, args=("a", a, ends[0][0], ends[1][1], True), daemon=True),
            threading.Thread(target=side, args=("b", b, ends[1][0], ends[0][1], False), daemon=True),
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(30)
        assert not any(one.is_alive() for one in threads), "they wait for each other"
        return self.races


def test_each_turn_lies_beside_one_of_the_other() -> None:
    pair = Pair()
    races = pair.run([({"x": pair.turn("a")}, 0.02)], [({"x": pair.turn("b")}, 0.02)])
    a, b = (races[name][0].samples["x"] for name in "ab")
    assert MIN_TURNS <= len(a) == len(b) <= MAX_TURNS
    assert pair.together == 0
    first, second = pair.log[:2]
    assert {first, second} == {"a", "b"}
    assert pair.log == [first, second] * len(a), "one has two turns in a row"


def test_every_case_is_met_anew() -> None:
    pair = Pair()

    def plan(name: str) -> list[Meeting]:
        fast, slow = pair.turn(name), pair.turn(name, 5.0)
        return [({"x": fast}, 0.01), ({}, 0.01), ({"x": slow, "y": fast}, 0.01)]

    meetings = {name: plan(name) for name in "ab"}
    races = pair.run(meetings["a"], meetings["b"])
    assert pair.together == 0
    for a, b in zip(races["a"], races["b"], strict=True):
        assert {name: len(s) for name, s in a.samples.items()} == {name: len(s) for name, s in b.samples.items()}
    assert races["a"][1].samples == {}
    # So slow that twenty turns would exceed three times its budget.
    assert FEW_TURNS <= len(races["a"][2].samples["y"]) < MIN_TURNS


def test_who_has_enough_goes_on_as_long_as_the_other_does() -> None:
    """The second in each round has no budget at all, and would stop after three turns of its own."""
    pair = Pair()
    races = pair.run([({"x": pair.turn("a")}, 0.0)], [({"x": pair.turn("b")}, 0.02)])
    a, b = (races[name][0].samples["x"] for name in "ab")
    assert len(a) == len(b) >= MIN_TURNS


def test_they_stop_at_the_cap() -> None:
    pair = Pair()
    races = pair.run([({"x": pair.turn("a", 0.0)}, 60.0)], [({"x": pair.turn("b", 0.0)}, 60.0)])
    assert len(races["a"][0].samples["x"]) == len(races["b"][0].samples["x"]) == MAX_TURNS


def test_one_goes_on_when_the_other_has_died() -> None:
    pair = Pair()
    plan = {name: [({"x": pair.turn(name)}, 0.01)] * 3 for name in "ab"}
    races = pair.run(plan["a"], plan["b"], dies_after=1)
    assert len(races["b"]) == 1
    assert [len(race.samples["x"]) >= MIN_TURNS for race in races["a"]] == [True] * 3


def test_a_contestant_that_fails_leaves_the_other_run_its_turns() -> None:
    pair = Pair()

    def dies() -> float:
        raise WorkerFailure("oom", "no memory")

    races = pair.run(
        [({"x": pair.turn("a"), "y": dies}, 0.02), ({"x": pair.turn("a")}, 0.01)],
        [({"x": dies, "y": dies}, 0.02), ({"x": pair.turn("b")}, 0.01)],
    )
    assert [sorted(races[name][0].failures) for name in "ab"] == [["y"], ["x", "y"]]
    assert len(races["a"][0].samples["x"]) >= MIN_TURNS
    assert len(races["a"][1].samples["x"]) == len(races["b"][1].samples["x"]) >= MIN_TURNS


def test_a_run_that_lacks_a_case_is_not_waited_for() -> None:
    pair = Pair()
    races = pair.run([({"x": pair.turn("a")}, 0.01)] * 2, [({"x": pair.turn("b")}, 0.01)])
    assert [len(races["a"]), len(races["b"])] == [2, 1]


def test_another_gem_is_refused() -> None:
    """Whichever gem the environment gives, the one that was asked for is run, or none."""
    command = [sys.executable, "-P", gate_turns.__file__, "--first", "/nowhere", "0", "1", "run"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "accepted here: /nowhere" in done.stderr
