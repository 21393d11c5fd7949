"""The account of training on two ranks: known sleeps in compute and exchange come back as skew and communication.

What is expected follows from the sleeps alone. They are many times what the model's own work takes; ``noise`` is what
that work, the exchange itself and other processes on the cores may add or take away: as the sleeps, it is the longer
the busier the cores are.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import efficiency_program
import pytest
from efficiency_program import SCENARIOS

NOISE = 0.1  # seconds a step, where sleeps are as declared
PATH = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # this tree's gem, not an installed one
Account = dict[str, Any]


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Account]]:
    """By scenario, what each of the ranks found."""
    out = tmp_path_factory.mktemp("accounts")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
        efficiency_program.__file__, str(out),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in SCENARIOS}


def seconds(account: Account, of: str) -> float:
    """A step's, in all slices of that kind."""
    return sum(one["ms"] for one in account["efficiency"]["waterfall"] if one["of"] == of) * 1e-3


def noise(account: Account) -> float:
    return NOISE * account["scale"]


def steps(account: Account) -> int:
    return sum(window["steps"] for window in account["windows"])


def slept(account: Account, where: str) -> float:
    """Seconds that a step slept, on the mean."""
    return account["slept"][where] / steps(account)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# -- skew and communication --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unequal", "heavier"])
def test_skew_is_the_slowest_rank_above_the_mean(accounts, name):
    """Heavier: 4 times the samples on rank 1, and the batch that is measured has half the samples of the mean one."""
    compute = [slept(one, "computed") for one in accounts[name]]
    expected = max(compute) - mean(compute)
    assert expected == pytest.approx(0.15 * accounts[name][0]["scale"])
    found = [seconds(one, "skew") for one in accounts[name]]
    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected, rel=0.4)  # the mean itself is 1.5 times that or more


@pytest.mark.parametrize("name", ["unequal", "heavier", "input"])
def test_waiting_for_the_slowest_rank_is_no_communication(accounts, name):
    for one in accounts[name]:
        assert 0 <= seconds(one, "communication") < noise(one)


@pytest.mark.parametrize("name", ["exchange", "hidden", "tables", "input"])
def test_equal_ranks_have_no_skew(accounts, name):
    for one in accounts[name]:
        assert 0 <= seconds(one, "skew") < noise(one) / 2


@pytest.mark.parametrize("name", ["exchange", "tables"])
def test_an_exchange_at_the_backwards_end_is_communication_in_full(accounts, name):
    """That of the tables' rows, after it, too."""
    for one in accounts[name]:
        assert slept(one, "exchanged") == pytest.approx(0.3 * one["scale"])
        assert seconds(one, "communication") == pytest.approx(0.3 * one["scale"], abs=noise(one))


def test_an_exchange_beside_the_backward_is_communication_where_it_outlasts_it(accounts):
    for one in accounts["hidden"]:
        compute, exchange = slept(one, "computed"), slept(one, "exchanged")
        assert (compute, exchange) == pytest.approx((0.25 * one["scale"], 0.5 * one["scale"]))
        assert seconds(one, "communication") == pytest.approx(exchange - compute, abs=noise(one))


# -- compute -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_compute_is_the_ranks_mean_without_exchange(accounts, name):
    """The model's parts with lookups, losses and what is between them."""
    named = {"lookups, loss, between"}
    for one in accounts[name]:
        slices = one["efficiency"]["waterfall"]
        compute = sum(s["ms"] for s in slices if s["of"] == "model" or s["part"] in named) * 1e-3
        assert compute == pytest.approx(mean([slept(rank, "computed") for rank in accounts[name]]), abs=noise(one))


def test_a_layer_that_is_slow_on_one_rank_is_found(accounts):
    """Its mean over the ranks, and on no rank more than the slow one's."""
    found, scale = [], accounts["unequal"][0]["scale"]
    for one in accounts["unequal"]:
        parts = {part["name"]: part["seconds"] for part in one["efficiency"]["parts"]}
        found.append(parts.pop("tower.0"))
        assert sum(parts.values()) < noise(one)
    tower = [scale * one for one in SCENARIOS["unequal"].tower]
    assert mean(found) == pytest.approx(mean(tower), abs=NOISE * scale)
    assert max(found) < max(tower) + NOISE * scale


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_slices_add_up_to_the_step_and_none_counts_twice(accounts, name):
    for one in accounts[name]:
        found, count = one["efficiency"], steps(one)
        assert count == 3
        assert sum(s["ms"] for s in found["waterfall"]) == pytest.approx(found["step_s"] * 1e3, rel=1e-9)
        rest = next(s["ms"] for s in found["waterfall"] if s["part"] == "rest") * 1e-3
        assert -1e-6 < rest < noise(one)
        wait = max(SCENARIOS[name].wait) * one["scale"]
        assert wait * 0.99 <= seconds(one, "input") < wait + noise(one)
        assert found["input_wait"] == pytest.approx(seconds(one, "input") / found["step_s"])
    # The stages of the steps, all of them and nothing else, are what is told between input and rest. Windows of unequal
    # numbers of steps weigh by these.
    told, timed = 0.0, 0.0
    for one in accounts[name]:
        known = [s["ms"] for s in one["efficiency"]["waterfall"] if s["part"] not in ("input wait", "rest")]
        told += sum(known) * 1e-3
        stages = [sum(t for s, t in w["stages"].items() if s != "others") for w in one["windows"]]
        timed += sum(w["steps"] * t for w, t in zip(one["windows"], stages, strict=True)) / steps(one)
    assert told == pytest.approx(timed, rel=1e-6)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_the_account_is_the_same_on_every_rank(accounts, name):
    assert accounts[name][0]["efficiency"] == accounts[name][1]["efficiency"]


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_speed_and_mfu_are_of_all_the_work_of_all_ranks(accounts, name):
    ranks = accounts[name]
    samples = sum(sum(sum(sizes) for sizes in rank[1:]) for rank in SCENARIOS[name].windows)
    useful, layers = [], []
    for one in ranks:
        found = one["efficiency"]
        assert found["samples_per_s"] * found["step_s"] == pytest.approx(samples / steps(one), rel=1e-9)
        assert found["e2e_mfu"] == pytest.approx(found["local_mfu"] * found["scaling_ratio"])
        assert 0 < found["e2e_mfu"] < found["local_mfu"] <= 1
        layers.append(sum(part["flops"] for part in found["parts"]))
        useful.append(found["e2e_mfu"] * found["peak"] * found["step_s"])
    flops = mean([one["flops"] for one in ranks])
    assert mean(useful) == pytest.approx(flops, rel=1e-6)
    # All layers but the projections of ids and floats; of the mean batch, whatever the last one was.
    assert 0.8 < mean(layers) / flops < 1
    # Ranks step together.
    assert ranks[0]["efficiency"]["step_s"] == pytest.approx(ranks[1]["efficiency"]["step_s"], abs=noise(ranks[0]) / 2)
