"""Base Batch Shuffling: which base batches of a reader make up each training batch, so that batches cost alike.

A reader emits base batches of 128 samples; a training batch merges several. With jagged histories a batch costs what
its lengths make it, and every rank waits for the heaviest one. BBS (GEM, Meta 2026) sorts a pool of base batches by
cost and deals the heavy beside the light ones. Each reader does so for itself: nothing is sent between ranks.

Dealing single samples instead (:func:`deal`) balances finer, at the price of a gather where base batches are copied.

Legend: N base batches (deal: samples) of a pool, M of them to a training batch, K training batches, S steps, R ranks.
"""

import heapq
from typing import Literal, get_args

import numpy as np

from gem.errors import RequestError

Strategy = Literal["none", "random", "bbs", "lpt"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
ReaderStrategy = Literal[Strategy, "samples", "budget"]  # flat, so that a config's message names all of them
READER_STRATEGIES: tuple[ReaderStrategy, ...] = get_args(ReaderStrategy)

_GREEDY = 32  # rounds of deal that go by the batches' totals; by then what is left is too light to matter


def group(cost_N: np.ndarray, per_batch: int, strategy: Strategy, generator: np.random.Generator) -> list[np.ndarray]:
    """Indices of the base batches of each training batch; every base batch is in exactly one.

    none    in the order of arrival
    random  any of them together
    bbs     sorted by cost and dealt in zigzag: the heaviest of one round goes where the lightest of the last one went
    lpt     longest processing time first: each, the heaviest first, goes to the lightest batch that has room. No
            partition into equal parts is known to be much better, so it stands for the optimum; a heap in Python, slow

    Costs are in any unit, finite and at least 0. Training batches come in random order (but for "none"), or the heavy
    ones of all ranks would meet. Where ``per_batch`` does not divide N, the base batches that arrived last make one
    smaller batch, the last.
    """
    cost = _costs(cost_N)
    if per_batch < 1:
        raise RequestError(f"base batches to a training batch: {per_batch}; accepted: 1 or more")
    batches = len(cost) // per_batch
    whole = batches * per_batch
    found = _partition(cost[:whole], batches, per_batch, strategy, generator) if batches else []
    return found if whole == len(cost) else [*found, np.arange(whole, len(cost))]


def deal(cost_N: np.ndarray, batches: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Indices of the samples of each of ``batches`` batches of like cost, whose sizes differ by one at most.

    Sorted by cost and dealt in rounds, one sample to each batch. The first rounds, where one sample weighs most, give
    the heaviest to the lightest batch so far; the others are dealt in zigzag. Batches come in random order, their
    samples the heaviest first. RequestError where there are fewer samples than batches.
    """
    cost = _costs(cost_N)
    if not 1 <= batches <= len(cost):
        raise RequestError(f"{len(cost)} samples dealt to {batches} batches; accepted: 1 batch or more, none empty")
    order = np.argsort(-cost, kind="stable")
    rounds = len(cost) // batches
    dealt_MK, rest = order[: rounds * batches].reshape(rounds, batches), order[rounds * batches :]
    total = np.zeros(batches)
    for i in range(min(rounds, _GREEDY)):
        lightest = np.argsort(total, kind="stable")
        dealt_MK[i, lightest] = dealt_MK[i].copy()
        total += cost[dealt_MK[i]]
    zigzag = dealt_MK[_GREEDY:]
    zigzag[1::2] = zigzag[1::2, ::-1].copy()
    found = list(dealt_MK.T)
    for index, batch in zip(rest, np.argsort(cost[dealt_MK].sum(0), kind="stable")[: len(rest)], strict=True):
        found[batch] = np.append(found[batch], index)
    return [found[i] for i in generator.permutation(batches)]


def divide(
    cost_N: np.ndarray, batches: int, per_batch: int, strategy: ReaderStrategy, generator: np.random.Generator
) -> list[np.ndarray]:
    """Indices of the samples of each of a pool's batches, by any strategy of a reader.

    Those of base batches cut the pool into ``batches * per_batch`` of them, neighbours together, sizes differing by one
    at most; the others deal single samples.
    """
    if strategy == "samples" or strategy == "budget":
        return deal(cost_N, batches, generator)
    edges = np.arange(batches * per_batch + 1) * len(cost_N) // (batches * per_batch)
    before = np.concatenate([[0.0], np.cumsum(cost_N)])
    found = group(np.maximum(np.diff(before[edges]), 0), per_batch, strategy, generator)
    return [np.concatenate([np.arange(edges[i], edges[i + 1]) for i in one]) for one in found]


def _costs(cost_N: np.ndarray) -> np.ndarray:
    cost = np.asarray(cost_N, dtype=np.float64)
    if cost.ndim != 1 or not np.isfinite(cost).all() or (cost < 0).any():
        raise RequestError(f"costs to balance: shape {cost.shape}; accepted: one finite number >= 0 each")
    return cost


def _partition(
    cost: np.ndarray, batches: int, per_batch: int, strategy: Strategy, generator: np.random.Generator
) -> list[np.ndarray]:
    if strategy == "none":
        return list(np.arange(len(cost)).reshape(batches, per_batch))
    if strategy == "random":
        return list(generator.permutation(len(cost)).reshape(batches, per_batch))
    heaviest_first = np.argsort(-cost, kind="stable")
    if strategy == "bbs":
        rounds = heaviest_first.reshape(per_batch, batches)
        rounds[1::2] = rounds[1::2, ::-1].copy()
        found = list(rounds.T)
    elif strategy == "lpt":
        found = _lightest_with_room(cost, heaviest_first, batches, per_batch)
    else:
        raise RequestError(f"strategy {strategy!r}; accepted: {', '.join(STRATEGIES)}")
    return [found[i] for i in generator.permutation(batches)]


def _lightest_with_room(cost: np.ndarray, order: np.ndarray, batches: int, per_batch: int) -> list[np.ndarray]:
    members: list[list[int]] = [[] for _ in range(batches)]
    lightest = [(0.0, batch) for batch in range(batches)]  # a heap as it stands
    for index in order.tolist():
        total, batch = heapq.heappop(lightest)
        members[batch].append(index)
        if len(members[batch]) < per_batch:
            heapq.heappush(lightest, (total + float(cost[index]), batch))
    return [np.array(found) for found in members]


# -- what it is worth --------------------------------------------------------------------------------------------------


def imbalance(cost_RS: np.ndarray) -> float:
    """Mean over steps of the heaviest rank's cost over the ranks' mean: 1.15 = the step takes 15 % longer than it need.

    ``cost_RS``: what rank r's batch of step s costs. Steps that cost nothing anywhere count as balanced.
    """
    cost = np.asarray(cost_RS, dtype=np.float64)
    if cost.ndim != 2 or not cost.size:
        raise ValueError(f"costs must be [ranks, steps], at least one of each; got shape {cost.shape}")
    mean = cost.mean(0)
    return float(np.where(mean > 0, cost.max(0) / np.where(mean > 0, mean, 1.0), 1.0).mean())


def share_closed(random: float, shuffled: float, best: float) -> float:
    """Share of the gap between random batches and the best ones that a strategy closes; NaN where there is no gap."""
    return (random - shuffled) / (random - best) if random > best else float("nan")
