"""The gate's statistics: what rounds of base and change, side by side, say about one row.

A round gives one *change* of a row: the logarithm of new over base, signed so that above 0 is worse. On identical code
base and change could swap names, so a round's change is as likely +x as -x whatever the noise looks like (neighbours,
two speeds of one kernel, bursts). Nothing more is assumed: the test is Wilcoxon's signed ranks, exact; the estimate is
the median of the pairwise means (Hodges and Lehmann 1963), which a third of the rounds gone wild does not carry away;
the interval is the one that belongs to the test.

Verdicts are made in two steps. *Screen*: few rounds of every row; a row is cleared when its interval excludes a
slowdown of the threshold. *Confirm*: fresh rounds of those not cleared, judged at LOOKS; the rounds that made a row a
suspect are not used against it, so that only as many tests count as there are suspects. Over all rows and looks a
false alarm has a probability of at most ALPHA.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal["better", "same", "worse", "ambiguous"]

ALPHA = 0.01  # false alarms on identical code: at most so many gate runs, all rows together
BETA = 0.025  # of each end of an interval: how often it excludes what is true
THRESHOLD = 0.05  # a slowdown by this share must be found, unless the case says otherwise
SCREEN_ROUNDS = 6  # the fewest whose largest change is above the true one with 1 - BETA: 1 - 0.5 ** 6 = 98.4 %
# Rounds of a suspect at which it is judged, and what share of ALPHA, and of BETA, each look spends.
LOOKS, SHARES = (16, 32, 64), (0.25, 0.25, 0.5)
# Where there are too few rounds for the test, only what dwarfs the noise between runs counts: each round must show more
# than this share over the root of their number.
BLUNT = 0.25


@dataclass(frozen=True)
class Finding:
    """What was found of one row. Changes are shares of the base, above 0 worse; `low` and `high` may be infinite."""

    verdict: Verdict
    change: float
    low: float
    high: float
    rounds: int
    why: str = ""


@functools.lru_cache(maxsize=4096)
def _tail(ranks: tuple[int, ...]) -> np.ndarray:
    """[w] -> probability that those of the ranks whose coin shows heads add up to at most w."""
    chance = np.zeros(sum(ranks) + 1)
    chance[0] = 1.0
    for rank in ranks:
        heads = np.zeros_like(chance)
        heads[rank:] = chance[: len(chance) - rank]
        chance = (chance + heads) / 2.0
    return np.cumsum(chance)


def p_worse(changes: Sequence[float]) -> float:
    """Probability of signed ranks at least so far above 0 when each change is as likely +x as -x.

    Changes of 0 are left out; equal sizes share their mean rank, and the probability is exact with them too.
    """
    told = np.array([c for c in changes if c != 0.0])
    if not len(told):
        return 1.0
    size = np.abs(told)
    below, upto = (np.searchsorted(np.sort(size), size, side) for side in ("left", "right"))
    ranks = below + upto + 1  # twice the mean rank, which may be a half
    return float(_tail(tuple(sorted(ranks.tolist())))[int(ranks[told < 0].sum())])


def pairwise_means(changes: Sequence[float]) -> np.ndarray:
    """The n (n + 1) / 2 means of two changes, a change with itself included, ascending."""
    x = np.asarray(changes, dtype=float)
    i, j = np.triu_indices(len(x))
    return np.sort((x[i] + x[j]) / 2.0)


def interval(changes: Sequence[float], beta: float = BETA) -> tuple[float, float, float]:
    """(low, estimate, high): each end excludes the true change with probability `beta` at most.

    An end is infinite where so few changes cannot promise that.
    """
    means = pairwise_means(changes)
    tail = _tail(tuple(range(1, len(changes) + 1)))
    beyond = int(np.searchsorted(tail, beta, side="right"))  # so many sums of ranks w have P(at most w) <= beta
    if beyond == 0:
        return -math.inf, float(np.median(means)), math.inf
    return float(means[beyond - 1]), float(np.median(means)), float(means[-beyond])


def can_tell(rounds: int, level: float) -> bool:
    """Whether so many rounds, all on one side, are proof at `level`."""
    return 0.5**rounds <= level


def _share(log_change: float) -> float:
    return math.expm1(log_change) if abs(log_change) < 700 else log_change  # infinite: not known


def judge(changes: Sequence[float], threshold: float, level: float, spread: float = 0.0, beta: float = BETA) -> Finding:
    """The verdict on one row from its rounds' changes (logarithms).

    worse: proven slower at `level`, by an estimated half of `threshold` or more. better: likewise faster. same: not
    slower by `threshold`, with 1 - `beta`, and by an estimate below its half. ambiguous: the rest. `spread`: how far a
    single change may be off for what is known inside its round (the samples' intervals); it matters only where rounds
    are too few to tell themselves.
    """
    low, middle, high = interval(changes)
    half, n = math.log1p(threshold) / 2.0, len(changes)
    found: Verdict = "same" if interval(changes, beta)[2] < 2.0 * half and middle < half else "ambiguous"
    why = ""
    if can_tell(n, level):
        if middle >= half and p_worse(changes) <= level:
            found = "worse"
        elif middle <= -half and p_worse([-c for c in changes]) <= level:
            found = "better"
        elif found == "ambiguous":
            why = "the interval holds the threshold" if high >= 2.0 * half else "half the threshold, and not proven"
    else:
        floor = math.log1p(max(BLUNT / math.sqrt(n), threshold)) + spread
        if min(changes) > floor:
            found = "worse"
        elif max(changes) < -floor:
            found = "better"
        if found in ("worse", "better"):
            why = f"each of {n} round{'s' * (n > 1)} beyond {math.expm1(floor):.0%}"
        elif found == "ambiguous":
            why = f"{n} round{'s' * (n > 1)}: tells only what is beyond {math.expm1(floor):.0%}"
    return Finding(found, _share(middle), _share(low), _share(high), n, why)


def judge_suspect(changes: Sequence[float], threshold: float, suspects: int) -> Finding:
    """The verdict on one of `suspects` from its fresh rounds: that of the first of LOOKS which is not ambiguous."""
    found = None
    for rounds, share in zip(LOOKS, SHARES, strict=True):
        if len(changes) >= rounds:
            found = judge(changes[:rounds], threshold, ALPHA * share / max(1, suspects), beta=BETA * share)
            if found.verdict != "ambiguous":
                return found
    if found is None:
        low, middle, high = interval(changes)
        why = f"{len(changes)} of the {LOOKS[0]} rounds at which a suspect is judged"
        return Finding("ambiguous", _share(middle), _share(low), _share(high), len(changes), why)
    return found


def next_look(rounds: int, limit: int = LOOKS[-1]) -> int | None:
    """How many rounds the next look at a suspect needs in all, or None where there is none within `limit`."""
    return next((look for look in LOOKS if rounds < look <= limit), None)
