"""The gate's statistics against enumeration of all signs, and its verdicts against what they promise."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gem.harness.gate_stats import (
    ALPHA,
    BETA,
    LOOKS,
    SCREEN_ROUNDS,
    SHARES,
    Finding,
    can_tell,
    interval,
    judge,
    judge_suspect,
    next_look,
    p_worse,
)

LEVEL = ALPHA / 28
FIVE = math.log(1.05)
changes_of = st.lists(st.floats(-0.3, 0.3).filter(lambda x: abs(x) > 1e-6), min_size=1, max_size=9, unique_by=abs)


def enumerated(changes: list[float]) -> float:
    """P(signed ranks at least so far above 0), by trying all signs; equal sizes share their mean rank."""
    sizes = [abs(c) for c in changes]
    ranks = [sum(s < size for s in sizes) + (sum(s == size for s in sizes) + 1) / 2 for size in sizes]
    seen = sum(rank for rank, change in zip(ranks, changes, strict=True) if change > 0)
    sums = [
        sum(r for r, up in zip(ranks, signs, strict=True) if up)
        for signs in itertools.product((0, 1), repeat=len(ranks))
    ]
    return sum(total >= seen - 1e-9 for total in sums) / len(sums)


@given(changes_of)
def test_the_p_value_is_that_of_all_signs(changes: list[float]) -> None:
    assert p_worse(changes) == pytest.approx(enumerated(changes), abs=1e-12)


@given(st.lists(st.sampled_from([-0.2, -0.1, 0.1, 0.2, 0.3]), min_size=1, max_size=9))
def test_ties_too(changes: list[float]) -> None:
    assert p_worse(changes) == pytest.approx(enumerated(changes), abs=1e-12)


def test_changes_of_nothing_prove_nothing() -> None:
    assert p_worse([0.0] * 20) == 1.0
    assert p_worse([]) == 1.0
    assert judge([0.0] * 20, 0.05, LEVEL).verdict == "same"


@given(changes_of.filter(lambda x: len(x) >= 6))
def test_the_interval_holds_what_the_test_does_not_reject(changes: list[float]) -> None:
    low, middle, high = interval(changes)
    assert low <= middle <= high
    # The centres that are not rejected from above end at `high`: a little beyond, the test says "lower than that".
    assert p_worse([high + 1e-9 - c for c in changes]) <= BETA
    assert p_worse([high - 1e-9 - c for c in changes]) > BETA
    assert p_worse([c - (low - 1e-9) for c in changes]) <= BETA
    assert p_worse([c - (low + 1e-9) for c in changes]) > BETA


def test_too_few_rounds_have_no_interval() -> None:
    low, middle, high = interval([0.1] * (SCREEN_ROUNDS - 1))
    assert (low, high) == (-math.inf, math.inf)
    assert middle == pytest.approx(0.1)
    assert math.isfinite(interval([0.1] * SCREEN_ROUNDS)[2])


def noisy(true: float, spread: float, rounds: int, seed: int = 0) -> list[float]:
    return list(true + spread * np.random.default_rng(seed).standard_normal(rounds))


def test_verdicts() -> None:
    assert judge(noisy(FIVE, 0.005, 14), 0.05, LEVEL).verdict == "worse"
    assert judge(noisy(-FIVE, 0.005, 14), 0.05, LEVEL).verdict == "better"
    assert judge(noisy(0.0, 0.005, 14), 0.05, LEVEL).verdict == "same"
    assert judge(noisy(0.0, 0.3, 14), 0.05, LEVEL).verdict == "ambiguous"
    # Proven, and too little to matter.
    assert judge(noisy(0.01, 0.0005, 14), 0.05, LEVEL).verdict == "same"
    # What is little for one case is much for another.
    assert judge(noisy(0.02, 0.0005, 14), 0.02, LEVEL).verdict == "worse"


def test_a_round_gone_wild_decides_nothing() -> None:
    changes = noisy(0.0, 0.002, 12)
    changes[3] = 2.0
    found = judge(changes, 0.05, ALPHA)
    assert found.verdict == "same"
    assert abs(found.change) < 0.01


def test_few_rounds_tell_only_what_is_gross() -> None:
    one = judge([math.log(1.10)], 0.05, LEVEL)
    assert one.verdict == "ambiguous"
    assert "1 round" in one.why
    assert judge([math.log(1.3)], 0.05, LEVEL).verdict == "worse"
    assert judge([math.log(0.5)], 0.05, LEVEL).verdict == "better"
    # The samples of the round are themselves that uncertain.
    assert judge([math.log(1.3)], 0.05, LEVEL, spread=0.1).verdict == "ambiguous"
    # Each of four rounds must show it, not their mean.
    assert judge([0.3, 0.3, 0.3, 0.01], 0.05, LEVEL).verdict == "ambiguous"
    assert judge([0.14, 0.2, 0.3, 0.14], 0.05, LEVEL).verdict == "worse"


def test_as_many_rounds_as_the_level_wants() -> None:
    assert not can_tell(11, LEVEL)
    assert can_tell(12, LEVEL)
    # At a look, for one suspect and for as many as 150.
    assert can_tell(LOOKS[0], ALPHA * SHARES[0] / 150)
    assert sum(SHARES) == 1.0


def test_a_suspect_is_judged_at_looks_and_keeps_its_verdict() -> None:
    early = noisy(FIVE, 0.005, LOOKS[0])
    assert judge_suspect(early[:-1], 0.05, 1).verdict == "ambiguous"
    assert "15 of the 16" in judge_suspect(early[:-1], 0.05, 1).why
    assert judge_suspect(early, 0.05, 1).verdict == "worse"
    later = judge_suspect([*early, *noisy(-1.0, 0.1, 48)], 0.05, 1)
    assert (later.verdict, later.rounds) == ("worse", LOOKS[0])
    assert judge_suspect(noisy(0.0, 0.4, LOOKS[1]), 0.05, 1).rounds == LOOKS[1]
    assert [next_look(n) for n in (0, 16, 17, 32, 64)] == [16, 32, 32, 64, None]
    assert next_look(16, limit=16) is None


@pytest.mark.parametrize("noise", ["normal", "heavy", "two speeds", "bursts"])
def test_false_alarms_over_all_looks_stay_below_alpha(noise: str) -> None:
    """Of one suspect, whatever symmetric noise: the looks' levels add up to less than ALPHA."""
    random = np.random.default_rng(5)

    def draw(count: int) -> np.ndarray:
        if noise == "normal":
            return 0.05 * random.standard_normal(count)
        if noise == "heavy":
            return 0.02 * random.standard_t(1.5, count)
        if noise == "two speeds":
            speeds = random.integers(2, size=count) - random.integers(2, size=count)
            return 0.08 * speeds + 1e-4 * random.standard_normal(count)
        return 0.002 * random.standard_normal(count) + random.choice((-1, 0, 0, 0, 0, 1), count) * 0.5

    runs = 1500
    alarms = sum(judge_suspect(list(draw(LOOKS[-1])), 0.02, 1).verdict == "worse" for _ in range(runs))
    assert alarms / runs <= ALPHA + 3 * math.sqrt(ALPHA / runs)


def test_a_finding_is_plain_data() -> None:
    assert Finding("same", 0.0, -0.1, 0.1, 6).why == ""
