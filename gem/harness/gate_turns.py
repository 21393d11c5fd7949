"""Two `gem run` of two checkouts at once, their timed turns dealt out in turn: one turns, then the other.

Run whole, one after the other, two runs of one kernel lie half a minute apart, and what the machine does meanwhile
(a neighbour, a clock) is larger than what a gate looks for. Here both go through the same cases side by side: only the
one that holds the turn runs, and it hands over at each timed turn. So each turn of one lies next to one of the other.

    PYTHONPATH=<checkout> python -P gem/harness/gate_turns.py HEAD <read fd> <write fd> run suites/throughput ...

runs the `gem` of <checkout>, whatever version that is: nothing of gem is imported but what PYTHONPATH names, and of
that one function is replaced, the one by which a run deals its contestants' turns (`interleave`, in bench and race).
HEAD: the directory that `gem` must come from. The descriptors are a pair of pipes to the other run. `--first` holds
the turn at the start.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Turns of each contestant in a meeting: more than 40 tell little more; 20 are worth three times the budget; of what is
# slower still, 3 must do.
FEW_TURNS, MIN_TURNS, MAX_TURNS = 3, 20, 40
PATIENCE = 3
DEALERS = ("gem.harness.bench", "gem.harness.race")  # modules whose `interleave` deals turns


class Turnstile:
    """The one turn that two processes share, handed over through a pair of pipes; JSON, one line a message.

    A *meeting* is one race of a run (a case and direction), counted from 1. A message says which meeting its sender has
    reached and how many rounds it has run in it. When the other run has ended, or died, the turn is kept.
    """

    def __init__(self, read_fd: int, write_fd: int, first: bool) -> None:
        self._in, self._out = os.fdopen(read_fd, "r"), os.fdopen(write_fd, "w")
        self.meeting = 0
        self.other_at, self.other_rounds = 0, 0
        self.alone = False
        if not first:
            self._take()

    def _take(self) -> None:
        line = self._in.readline()
        if line:
            told = json.loads(line)
            self.other_at, self.other_rounds = told["at"], told["rounds"]
        else:
            self.alone = True

    def give(self, rounds: int = 0) -> None:
        """Hand over the turn, and wait until it is back: at once where the other has ended."""
        if self.alone:
            return
        try:
            self._out.write(json.dumps({"at": self.meeting, "rounds": rounds}) + "\n")
            self._out.flush()
        except OSError:  # a broken pipe
            self.alone = True
        else:
            self._take()

    def meet(self) -> None:
        """Begin the next meeting: wait until the other has reached it too, passed it, or ended."""
        self.meeting += 1
        while not self.alone and self.other_at < self.meeting:
            self.give()

    @property
    def together(self) -> bool:
        """Whether the other is in this meeting too."""
        return not self.alone and self.other_at == self.meeting


def shared_interleave(turnstile: Turnstile, race_type: Callable[..., Any], failure: type[Exception]) -> Callable:
    """An `interleave` (see gem.harness.timing) whose rounds alternate with those of the other run.

    One round each: so each follows the other's, and none finds what its own last round left warm. Who begins is left to
    the caller, who lets them take that in turns too. Both stop at one number of rounds, when twice the budget (they
    share the clock) is spent; neither stops because its own median is known.
    """

    def interleave(
        turns: Mapping[str, Callable[[], float]],
        budget_s: float,
        *,
        on_round: Callable[[int], None] = lambda number: None,
        clock: Callable[[], float] = time.perf_counter,
        **_: Any,
    ) -> Any:
        race = race_type(samples={name: [] for name in turns})
        turnstile.meet()
        start, spent = clock(), 0.0

        def one_round() -> None:
            nonlocal spent
            running = [name for name in turns if name not in race.failures]
            first = race.rounds % len(running)
            before = clock()
            for name in running[first:] + running[:first]:
                try:
                    race.samples[name].append(turns[name]())
                except failure as failed:
                    race.failures[name] = failed
            spent += clock() - before
            race.rounds += 1
            on_round(race.rounds)

        def enough() -> bool:
            if race.rounds >= MAX_TURNS:
                return True
            affordable = PATIENCE * budget_s * race.rounds / spent if spent > 0 else MIN_TURNS
            least = max(FEW_TURNS, min(MIN_TURNS, affordable))
            gone = turnstile.alone or turnstile.other_at > turnstile.meeting
            return race.rounds >= least and (gone or clock() - start >= 2 * budget_s)

        while len(race.failures) < len(turns):
            # Where both have run as many rounds is where to stop.
            if enough() and not (turnstile.together and race.rounds != turnstile.other_rounds):
                break
            one_round()
            if turnstile.together:
                turnstile.give(race.rounds)
        return race

    return interleave


def main(arguments: list[str]) -> None:
    """See the module's text."""
    first = "--first" in arguments
    home, read_fd, write_fd, *command = [word for word in arguments if word != "--first"]
    for fd in (int(read_fd), int(write_fd)):
        os.set_inheritable(fd, False)  # a worker that held an end would keep the other run from seeing that this ended
    turnstile = Turnstile(int(read_fd), int(write_fd), first)
    gem = importlib.import_module("gem")
    found = Path(str(gem.__file__)).resolve().parent.parent
    if found != Path(home).resolve():
        print(f"gem: error: gem comes from {found}; accepted here: {home}", file=sys.stderr)
        sys.exit(2)
    timing, worker = importlib.import_module("gem.harness.timing"), importlib.import_module("gem.harness.worker")
    shared = shared_interleave(turnstile, timing.Race, worker.WorkerFailure)
    for name in DEALERS:
        module = importlib.import_module(name)
        if not callable(getattr(module, "interleave", None)):
            print(f"gem: error: {name} of {home} has no interleave to deal its turns by", file=sys.stderr)
            sys.exit(2)
        module.interleave = shared  # type: ignore[attr-defined]
    importlib.import_module("gem.cli").main(command)


if __name__ == "__main__":
    main(sys.argv[1:])
