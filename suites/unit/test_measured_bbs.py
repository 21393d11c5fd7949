"""The declared study of load balance: what its parameters mean, and that its figures follow their laws."""

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from gem.data.balance import ALL_STRATEGIES, correlated
from gem.errors import RequestError
from gem.harness.case import MeasuredCase, build_cases
from gem.harness.measured import Metric
from gem.harness.measured_params import BalanceStrategy, BbsParams
from gem.harness.runner import RunOptions, run
from gem.harness.subject_bbs import Bbs
from gem.harness.suites import load_suite

SUITE = Path(__file__).resolve().parents[1] / "scaling" / "bbs.toml"
SMALL: dict[str, Any] = {"ranks": 8, "steps": 8, "batch": 256, "base": 32, "pool": 64}


def measure(**params: Any) -> dict[str, Metric]:
    found = Bbs().measure(BbsParams(**(SMALL | params)), "cpu", lambda done, total: None)
    return {one.name: one for one in found}


def test_every_strategy_can_be_declared() -> None:
    assert get_args(BalanceStrategy) == ALL_STRATEGIES


def test_strategies_are_judged_between_random_and_the_optimum() -> None:
    found = {strategy: measure(strategy=strategy, correlation=0.5) for strategy in ALL_STRATEGIES}
    reached = {strategy: one["max_over_mean"].value for strategy, one in found.items()}
    assert all(1.0 <= value < 8 for value in reached.values())
    for strategy, one in found.items():
        closed = (reached["random"] - reached[strategy]) / (reached["random"] - reached["global"])
        assert one["share_closed"].value == pytest.approx(closed), strategy
        assert (one["bytes_moved"].value > 0) == (strategy == "global")
    assert reached["global"] < reached["budget"] < reached["samples"] < reached["bbs"] < reached["random"]
    assert found["bbs"]["largest_batch"].value == 1.0 < found["budget"]["largest_batch"].value


def test_max_over_mean_of_no_strategy_follows_from_the_lengths_alone() -> None:
    """Batches as they arrive: each rank's step is a stretch of some order of whole chunks, here as large as a batch."""
    params = BbsParams(**SMALL, strategy="none")
    lengths = correlated(0.0, median=params.median, group=params.base, seed=0).draw(8 * 8 * 256).reshape(64, 256).sum(1)
    mean = measure(strategy="none")["max_over_mean"].value
    # The heaviest of 8 batches drawn without replacement, over the mean: simulated from the batches' sums.
    draw = np.random.default_rng(0)
    steps = np.array([draw.permutation(lengths).reshape(8, 8) for _ in range(500)])
    expected = steps.max(1) / steps.mean(1)
    assert mean == pytest.approx(expected.mean(), abs=4 * expected.mean(1).std())


def test_pairs_are_harder_to_balance_than_tokens_and_what_is_judged_may_differ() -> None:
    tokens, pairs = (measure(strategy="random", cost=cost)["max_over_mean"].value for cost in ("tokens", "pairs"))
    assert pairs > tokens
    own = measure(strategy="budget", cost="pairs")["max_over_mean"].value
    other = measure(strategy="budget", cost="tokens", judged="pairs")["max_over_mean"].value
    assert own < other  # who balances tokens leaves pairs uneven


def test_a_reader_merges_samples() -> None:
    params = BbsParams(measure="merge_rate", median=8.0)
    (rate,) = Bbs().measure(params, "cpu", lambda done, total: None)
    assert (rate.name, rate.unit) == ("samples_per_s", "1/s") and rate.value > 1e4


WRONG = {
    "strategy": ({"strategy": "bss"}, "did you mean 'bbs'?"),
    "pool": ({"pool": 7}, "whole batches in a pool"),
    "base": ({"base": 100}, "whole base batches in a batch"),
    "ranks of a reader": ({"measure": "merge_rate", "ranks": 4}, "ranks with measure"),
    "global reader": ({"measure": "merge_rate", "strategy": "global"}, "accepted: what one reader knows of"),
    "correlation": ({"correlation": 1.5}, "less than or equal to 1"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line(mistake: str) -> None:
    params, text = WRONG[mistake]
    document = {"suite": {"kind": "scaling", "subject": "bbs"}, "case": [{"name": "a", "params": params}]}
    with pytest.raises(RequestError) as caught:
        build_cases(document, file=SUITE, label=SUITE, fixtures=frozenset())
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_the_suite_runs_through_the_harness() -> None:
    small = {**SMALL, "strategy": "budget"}
    case = next(case for case in load_suite(SUITE) if case.name == "correlated-budget")
    assert isinstance(case, MeasuredCase)
    case = case.model_copy(update={"params": BbsParams(**small, correlation=0.8), "expect": {"share_closed": ">= 0.9"}})
    rows = run([case], options=RunOptions(device="cpu")).rows
    assert [(row.metric, row.status, row.impl) for row in rows] == [
        (name, "pass", "gem") for name in ("max_over_mean", "share_closed", "bytes_moved", "largest_batch")
    ]
    assert "correlation 0.8; random " in rows[0].reason


def test_listing_it_loads_no_torch() -> None:
    code = f"import sys; from gem.harness.suites import load_suite; assert len(load_suite({str(SUITE)!r}, [])) > 15; "
    code += "assert 'torch' not in sys.modules and 'gem.data.balance' not in sys.modules"
    code = code.replace(
        f"load_suite({str(SUITE)!r}, [])", f"load_suite(__import__('pathlib').Path({str(SUITE)!r}), [])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
