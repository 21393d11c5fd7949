"""How often the gate cries wolf, and how often it sees one: simulated on recorded noise.

    python -m gem.harness.gate_simulation [ci/measured/cpu/gate-noise.json] [--runs 2000] [--by-row]

A simulated gate run draws its rounds from those recorded, of all rows at once (what hits one row of a round often hits
its neighbours), and lets a coin name the sides, since identical code has none. Slow rows have the logarithm of their
slowdown added. What judges them is what judges real runs: gate_stats.py.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gem.errors import exit_code_of
from gem.harness.gate_noise import read_noise
from gem.harness.gate_stats import ALPHA, LOOKS, SCREEN_ROUNDS, THRESHOLD, judge, judge_suspect

DEFAULT = "ci/measured/cpu/gate-noise.json"


@dataclass(frozen=True)
class Outcome:
    """Of one simulated gate run: rows found worse, rows left ambiguous, suspects, and rounds run beyond the screen."""

    worse: frozenset[int]
    ambiguous: int
    suspects: int
    fresh_rounds: int


class Machine:
    """Draws rounds of `rows` rows of identical code from recorded changes [recorded rows, recorded rounds].

    More rows than were recorded are filled from further rounds drawn independently. `scale`: so many times the noise.
    """

    def __init__(self, recorded: np.ndarray, rows: int, seed: int, scale: float = 1.0) -> None:
        self._recorded, self._rows, self._scale = recorded, rows, scale
        self._random = np.random.default_rng(seed)

    def rounds(self, count: int) -> np.ndarray:
        """[rows, count] changes."""
        series, recorded = self._recorded.shape
        blocks = -(-self._rows // series)
        picked = self._random.integers(recorded, size=(blocks, count))
        sides = self._random.choice((-1.0, 1.0), size=(blocks, count))
        drawn = self._recorded[:, picked] * sides  # [series, blocks, count]
        return self._scale * drawn.transpose(1, 0, 2).reshape(-1, count)[: self._rows]


def gate_run(
    machine: Machine, slow: Sequence[float], screen_rounds: int = SCREEN_ROUNDS, limit: int = LOOKS[-1]
) -> Outcome:
    """One run of ci/gate; `slow[row]`: by what share the change is slower, 0 where the code is the same."""
    truth = np.log1p(np.asarray(slow))[:, None]
    rows = len(slow)
    screen = machine.rounds(screen_rounds) + truth
    first = [judge(list(screen[row]), THRESHOLD, ALPHA / rows) for row in range(rows)]
    suspects = [row for row in range(rows) if first[row].verdict in ("worse", "ambiguous")]
    if limit < LOOKS[0]:
        worse = frozenset(row for row in suspects if first[row].verdict == "worse")
        return Outcome(worse, len(suspects) - len(worse), len(suspects), 0)
    fresh, waiting, used = np.empty((rows, 0)), suspects, 0
    verdicts: dict[int, str] = {}
    for look in LOOKS:
        if look > limit or not waiting:
            break
        fresh = np.hstack((fresh, machine.rounds(look - used) + truth))
        used = look
        for row in waiting:
            verdicts[row] = judge_suspect(list(fresh[row]), THRESHOLD, len(suspects)).verdict
        waiting = [row for row in waiting if verdicts[row] == "ambiguous"]
    return Outcome(frozenset(r for r, v in verdicts.items() if v == "worse"), len(waiting), len(suspects), used)


@dataclass(frozen=True)
class Rates:
    """Of many gate runs with one slow row (or none): shares of the runs, and means."""

    runs: int
    caught: float  # the slow row is found worse
    false_alarm: float  # another row is
    ambiguous: float  # rows left so, a run
    suspects: float  # a run
    fresh_rounds: float  # a run


def rates(recorded: np.ndarray, rows: int, slow: float, runs: int, seed: int = 0, scale: float = 1.0,
          **how: int) -> Rates:  # fmt: skip
    """What becomes of `runs` gate runs of `rows` rows, one of which, another each time, is slower by `slow`."""
    machine = Machine(recorded, rows, seed, scale)
    outcomes = []
    for number in range(runs):
        slows = [0.0] * rows
        slows[number % rows] = slow
        outcomes.append((number % rows, gate_run(machine, slows, **how)))
    mean = lambda values: float(np.mean(list(values)))  # noqa: E731
    return Rates(
        runs,
        mean(slow > 0 and row in one.worse for row, one in outcomes),
        mean(bool(one.worse - ({row} if slow > 0 else set())) for row, one in outcomes),
        mean(one.ambiguous for _, one in outcomes),
        mean(one.suspects for _, one in outcomes),
        mean(one.fresh_rounds for _, one in outcomes),
    )


def caught_by_row(recorded: np.ndarray, rows: int, slow: float, runs: int, seed: int = 0) -> list[float]:
    """Of each recorded row: in what share of `runs` gate runs, in which it is the one slower by `slow`, it is found."""
    shares = []
    for row in range(min(rows, len(recorded))):
        machine = Machine(recorded, rows, seed + row)
        slows = [slow if one == row else 0.0 for one in range(rows)]
        shares.append(float(np.mean([row in gate_run(machine, slows).worse for _ in range(runs)])))
    return shares


def upper(hits: float, runs: int) -> float:
    """Upper end of the 95 % interval of a share that was `hits` in `runs` (Wilson)."""
    z = 1.96
    middle, spread = hits + z * z / (2 * runs), z * math.sqrt(hits * (1 - hits) / runs + z * z / (4 * runs * runs))
    return (middle + spread) / (1 + z * z / runs)


def recorded_changes(path: str) -> np.ndarray:
    """[rows, rounds] of a file of gate_noise.py."""
    return np.array([row.changes for row in read_noise(path).rows])


def main(words: list[str]) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m gem.harness.gate_simulation", allow_abbrev=False)
    parser.add_argument("noise", nargs="?", default=DEFAULT)
    parser.add_argument("--runs", type=int, default=2000, help="gate runs a line")
    parser.add_argument("--rows", type=int, default=28, help="rows of the suite")
    parser.add_argument("--by-row", action="store_true", help="only how often 5 %% is caught in each recorded row")
    given = parser.parse_args(words)
    recorded = recorded_changes(given.noise)
    if given.by_row:
        shares = caught_by_row(recorded, given.rows, THRESHOLD, given.runs)
        for row, share in zip(read_noise(given.noise).rows, shares, strict=False):
            print(f"{share:6.1%} {row.row}")
        return
    spread = np.median(np.abs(recorded), axis=1) * 1.4826
    print(f"{given.noise}: {recorded.shape[0]} rows, {recorded.shape[1]} rounds; a round's change is off by (robust "
          f"standard deviation) {100 * spread.min():.1f} to {100 * spread.max():.1f} %, "
          f"{100 * np.mean(np.abs(recorded) > 0.05):.0f} % of them by more than 5 %")  # fmt: skip
    print(
        f"{given.rows} rows, {given.runs} gate runs a line; {SCREEN_ROUNDS} rounds of all, looks at {LOOKS} of suspects"
    )
    print("| noise | one row slower by | caught | false alarms (95 %) | suspects | fresh rounds | ambiguous rows |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for scale in (0.5, 1.0, 2.0):
        for slow in (0.0, 0.03, 0.05, 0.07, 0.1):
            found = rates(recorded, given.rows, slow, given.runs, scale=scale)
            print(f"| × {scale:g} | {f'{slow:.0%}' if slow else 'none'} | {f'{found.caught:.1%}' if slow else ''} "
                  f"| {found.false_alarm:.2%} (≤ {upper(found.false_alarm, given.runs):.2%}) | {found.suspects:.1f} "
                  f"| {found.fresh_rounds:.1f} | {found.ambiguous:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(exit_code_of(main, sys.argv[1:]))
