"""The study of balance: it is what readers do, loses no sample, and its figures stand in the order they must."""

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from gem.data.balance import ALL_STRATEGIES, Study, correlated, simulate
from gem.data.distributions import Constant, Explicit
from gem.data.reader_cost import Cost
from gem.data.reader_speed import merge_speed
from gem.data.readers import READER_STRATEGIES, MemorySource, Reader
from gem.data.samples import Events, Samples
from gem.data.schema import Schema
from gem.errors import RequestError

SMALL: dict[str, Any] = {"ranks": 16, "steps": 16, "batch": 256, "base": 32, "pool": 32}
SCHEMA = Schema.model_validate({
    "tables": [{"name": "items", "rows": 2}],
    "sequences": [{"name": "seen", "features": [{"name": "item", "table": "items"}], "longest": 99999}],
    "tasks": [{"name": "ctr"}],
})  # fmt: skip


@pytest.mark.parametrize("strategy", READER_STRATEGIES)
@pytest.mark.parametrize("cost", ["tokens", "pairs"])
def test_the_simulated_readers_are_the_readers(strategy, cost):
    lengths = correlated(0.5, median=20, min=0, max=400, group=8, seed=2)
    study = Study(lengths, ranks=3, steps=5, batch=32, base=8, pool=8, cost=cost, seed=7)
    length = torch.from_numpy(lengths.draw(3 * 5 * 32))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)])
    events = Events(offsets, {"item": torch.zeros(int(offsets[-1]), dtype=torch.int64)})
    keys = torch.arange(len(length))
    source = MemorySource(SCHEMA, Samples(keys, {}, torch.zeros(len(keys), 0), {"seen": events}, {}), 32)
    for rank, simulated in enumerate(study.batches(strategy)):
        reader = Reader(
            source, batch=32, base=8, pool=8, cost=cost, seed=7, strategy=strategy, shuffle="chunks", rank=rank, ranks=3
        )
        assert [batch.keys.tolist() for batch in reader] == [one.tolist() for one in simulated]


@pytest.mark.parametrize("strategy", READER_STRATEGIES)
def test_no_sample_is_lost(strategy):
    study = Study(correlated(0.8, group=32), **SMALL)
    batches = study.batches(strategy)
    assert [len(mine) for mine in batches] == [16] * 16
    every = itertools.chain.from_iterable(one.tolist() for mine in batches for one in mine)
    assert sorted(every) == list(range(16 * 16 * 256))


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("cost", ["tokens", "pairs", Cost(tokens=1.0, pairs=0.001, samples=300.0)])
def test_the_strategies_stand_in_order(rho, cost):
    study = Study(correlated(rho, group=32), **SMALL, cost=cost)
    found = {strategy: study.balance(strategy) for strategy in ALL_STRATEGIES}
    at = {strategy: one.max_over_mean for strategy, one in found.items()}
    chance = 1.02  # pools are as heavy whatever becomes of them; which of their batches meet is chance
    assert 1 <= at["global"] <= at["budget"] < at["samples"] <= at["lpt"] * chance <= at["bbs"] * chance**2
    assert at["bbs"] * chance < at["random"]
    assert at["none"] == pytest.approx(at["random"], rel=0.1)
    assert found["random"].share_closed == 0.0 and found["global"].share_closed == 1.0
    assert found["budget"].share_closed > 0.9
    # Dealt by cost alone, a sample stays on its rank by chance.
    assert found["global"].bytes_moved * 16 == pytest.approx(study.bytes_N.sum() * 15 / 16, rel=0.02)
    for strategy, one in found.items():
        assert (one.bytes_moved > 0) == (strategy == "global")
        assert (one.largest_batch > 1) == (strategy == "budget") and one.largest_batch < 4
        assert one.share_closed == pytest.approx((one.random - one.max_over_mean) / (one.random - one.best))


def test_correlated_lengths_need_more_than_base_batches():
    """Zigzag of base batches closes half of the gap at most, whatever the pool; what closes it sends nothing."""
    lengths = correlated(0.5)
    near, far = (Study(lengths, ranks=16, steps=64, pool=pool) for pool in (64, 512))
    assert near.balance("random").max_over_mean > 1.4
    for study in (near, far):
        assert 0.3 < study.balance("bbs").share_closed < 0.65
    assert 0.6 < near.balance("samples").share_closed < 0.85 < far.balance("samples").share_closed
    assert near.balance("budget").share_closed > 0.99 and near.balance("budget").max_over_mean < 1.01


def test_balanced_by_tokens_is_not_balanced_by_pairs():
    study = Study(correlated(0.5, group=32), **SMALL, cost="tokens", judged="pairs")
    by_pairs = simulate(correlated(0.5, group=32), "budget", **SMALL, cost="pairs")
    assert study.balance("budget").max_over_mean > by_pairs.max_over_mean + 0.1
    assert study.balance("global").max_over_mean == by_pairs.best


def test_lengths_have_the_correlation_they_are_asked_for():
    for rho in (0.0, 0.3, 0.8):
        logs = np.log(correlated(rho, min=0, max=10**9, group=16, seed=1).draw(16 * 20_000)).reshape(-1, 16)
        within = logs.var(axis=1, ddof=1).mean()
        between = logs.mean(axis=1).var(ddof=1) - within / 16
        assert between / (between + within) == pytest.approx(rho, abs=0.02)
        assert logs.std() == pytest.approx(1.0, abs=0.02)


def test_global_by_hand():
    """Dealt 8 | 3, then 2 to the lighter and 1 to the other: {8, 1} and {3, 2} as stored; ranks keep or swap them."""
    for seed in range(4):
        study = Study(
            Explicit(kind="explicit", values=[8, 1, 3, 2]), ranks=2, steps=1, batch=2, base=1, pool=2, seed=seed,
            token_bytes=10, sample_bytes=1,
        )  # fmt: skip
        one = study.balance("global")
        assert one.max_over_mean == pytest.approx(9 / 7)
        assert one.bytes_moved in {0, 10 * 14 + 4}


def test_equal_samples_leave_nothing_to_close():
    one = simulate(Constant(kind="constant", value=5), "bbs", **SMALL)
    assert one.max_over_mean == one.random == one.best == 1.0 and math.isnan(one.share_closed)


@pytest.mark.parametrize(("how", "words"), [
    ({"ranks": 0}, "ranks 0; accepted: 1 or more"),
    ({"base": 100}, "a batch of whole bases"),
    ({"cost": "time"}, "accepted: tokens, pairs, or a Cost"),
    ({"strategy": "best"}, "accepted: none, random, bbs, lpt, samples, budget, global"),
])  # fmt: skip
def test_bad_requests_say_what_is_accepted(how, words):
    with pytest.raises(RequestError, match=re.escape(words)):
        simulate(correlated(0.0), **{"strategy": "bbs", **SMALL, **how})
    with pytest.raises(RequestError, match="correlation 2; accepted: 0 to 1"):
        correlated(2)


def test_a_million_samples_a_second_are_merged():
    """Of short histories, on one core; half of that here, since a test shares its caches with other work."""
    before = torch.get_num_threads()
    speed = merge_speed(8, "bbs", samples=2**16)
    assert speed.samples > 0.5e6 and speed.bytes > speed.samples * 8 * 8
    assert torch.get_num_threads() == before
