"""What balance is worth and what closes it: readers of many ranks simulated on the lengths of samples alone.

    python -m gem.data.balance              a table of all strategies, and how fast a reader merges

Every rank waits for the heaviest one, so a step takes as long as its max/mean says. The readers are simulated with the
code that readers run; base batches stay as they are stored (``shuffle="chunks"``), the hard case where lengths within
them are correlated. Two strategies are judged against:

    random      base batches merged at random: what a step costs without balancing
    global      all samples of all ranks of a step dealt anew, the heaviest first to the lightest rank: the optimum, at
                the price of an all-to-all of the samples. ``bytes_moved`` is that price; the others send nothing

Legend: N samples, R ranks, S steps.
"""

import argparse
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from gem.data.distributions import Distribution, Lognormal, UserCorrelated
from gem.data.reader_cost import Cost, as_cost, bounds
from gem.data.reader_plan import Plan, steps_of
from gem.data.reader_source import weights_of
from gem.data.shuffling import READER_STRATEGIES, ReaderStrategy, deal, divide, imbalance, share_closed
from gem.errors import RequestError

AnyStrategy = ReaderStrategy | Literal["global"]
ALL_STRATEGIES: tuple[AnyStrategy, ...] = (*READER_STRATEGIES, "global")


@dataclass(frozen=True)
class Balance:
    """What a strategy reaches."""

    max_over_mean: float  # of the ranks' costs, mean over steps
    share_closed: float  # of the gap between random and global; NaN where there is none
    bytes_moved: float  # between ranks, a step
    random: float  # max_over_mean of that strategy
    best: float  # of global
    largest_batch: float  # samples of the largest batch over the mean: what per-sample memory must allow for


def correlated(
    rho: float,
    *,
    median: float = 700.0,
    sigma: float = 1.0,
    min: int = 16,
    max: int = 16384,
    group: int = 128,
    seed: int = 0,
) -> Distribution:
    """Lognormal lengths whose logs have the intra-class correlation ``rho`` among ``group`` neighbours (0: none)."""
    if not 0 <= rho <= 1:
        raise RequestError(f"correlation {rho}; accepted: 0 to 1")
    if rho == 0:
        return Lognormal(kind="lognormal", median=median, sigma=sigma, min=min, max=max, seed=seed)
    between, within = sigma * rho**0.5, sigma * (1 - rho) ** 0.5
    return UserCorrelated(
        kind="user_correlated", group=group, median=median, sigma_between=between, sigma_within=within, min=min,
        max=max, seed=seed,
    )  # fmt: skip


class Study:
    """Ranks that read a dataset of ``ranks * steps * batch`` samples with these lengths, for one epoch.

    cost        what strategies balance
    judged      what their balance is measured in; None: the same
    """

    def __init__(
        self,
        lengths: Distribution,
        *,
        ranks: int = 64,
        batch: int = 1024,
        base: int = 128,
        pool: int = 64,
        cost: Cost | str = "tokens",
        judged: Cost | str | None = None,
        steps: int = 64,
        seed: int = 0,
        token_bytes: int = 8,
        sample_bytes: int = 0,
    ) -> None:
        for name, value in (("ranks", ranks), ("steps", steps), ("batch", batch), ("base", base), ("pool", pool)):
            if value < 1:
                raise RequestError(f"{name} {value}; accepted: 1 or more")
        if batch % base or pool % (batch // base):
            raise RequestError(
                f"batch {batch}, base {base}, pool {pool}; accepted: a batch of whole bases, a pool of whole batches"
            )
        self.ranks, self.batch, self.base, self.pool, self.steps, self.seed = ranks, batch, base, pool, steps, seed
        length_N = lengths.draw(ranks * steps * batch)
        self.cost_N = as_cost(cost)({"": length_N}, len(length_N))
        self.judged_N = self.cost_N if judged is None else as_cost(judged)({"": length_N}, len(length_N))
        self.bytes_N = length_N * token_bytes + sample_bytes

    def batches(self, strategy: ReaderStrategy) -> list[list[np.ndarray]]:
        """For each rank the batches of its steps: which samples they hold."""
        if strategy not in READER_STRATEGIES:  # "global" is no reader's
            raise RequestError(f"strategy {strategy!r}; accepted: {', '.join(ALL_STRATEGIES)}")
        size_C = np.full(self.ranks * self.steps, self.batch, dtype=np.int64)  # any size would do for a chunk
        limits, weight_C = None, size_C
        if strategy == "budget":
            limits = bounds(self.cost_N, self.batch)
            weight_C = weights_of(np.split(self.cost_N, len(size_C)), limits)
        steps = steps_of(len(self.cost_N), self.batch, self.ranks, True)
        found = []
        for rank in range(self.ranks):
            plan = Plan(
                weight_C, self.batch, self.pool * self.base // self.batch, steps, rank, self.ranks, self.seed, "chunks",
                limits is not None,
            )  # fmt: skip
            mine = []
            for pool in range(plan.pools):
                at = []
                for piece in plan.pieces(0, pool):
                    first = piece.chunk * self.batch
                    cost = self.cost_N[first : first + self.batch]
                    start, stop = piece.range(None if limits is None else np.clip(cost, *limits), self.batch)
                    at.append(np.arange(first + start, first + stop))
                in_pool = np.concatenate(at)
                per_batch, generator = self.batch // self.base, plan.generator(0, pool)
                divided = divide(self.cost_N[in_pool], plan.batches(pool), per_batch, strategy, generator)
                mine += [in_pool[one] for one in divided]
            found.append(mine)
        return found

    def balance(self, strategy: AnyStrategy) -> Balance:
        """What the strategy reaches on this dataset."""
        if strategy == "global":
            cost_RS, moved = self._global
            largest = 1.0
        else:
            batches = self._random if strategy == "random" else self.batches(strategy)
            cost_RS, moved = self._cost(batches), 0.0
            largest = max(len(one) for mine in batches for one in mine) / self.batch
        random, best = imbalance(self._cost(self._random)), imbalance(self._global[0])
        reached = imbalance(cost_RS)
        return Balance(reached, share_closed(random, reached, best), moved, random, best, largest)

    def _cost(self, batches: list[list[np.ndarray]]) -> np.ndarray:
        """float64 [R, S]."""
        return np.array([[self.judged_N[one].sum() for one in mine] for mine in batches])

    @cached_property
    def _random(self) -> list[list[np.ndarray]]:
        return self.batches("random")

    @cached_property
    def _global(self) -> tuple[np.ndarray, float]:
        """(float64 [R, S] costs, bytes a step that change ranks)."""
        generator = np.random.default_rng(self.seed)
        costs, moved = [], 0
        for step in zip(*self._random, strict=True):
            all_N = np.concatenate(step)
            owner_N = np.repeat(np.arange(self.ranks), [len(one) for one in step])
            dealt = deal(self.judged_N[all_N], self.ranks, generator)
            costs.append([self.judged_N[all_N[one]].sum() for one in dealt])
            moved += sum(int(self.bytes_N[all_N[one[owner_N[one] != rank]]].sum()) for rank, one in enumerate(dealt))
        return np.array(costs).T, moved / self.steps


def simulate(lengths: Distribution, strategy: AnyStrategy, **how: Any) -> Balance:
    """:meth:`Study.balance` of one strategy; ``how``: the arguments of :class:`Study`."""
    return Study(lengths, **how).balance(strategy)


def main() -> None:
    """Print the study."""
    summary, _, described = (__doc__ or "").partition("\n\n")
    argparse.ArgumentParser(
        prog="python -m gem.data.balance", description=summary, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""{described}
Columns: correlation of lengths inside a base batch; the cost that is balanced; the cost that max/mean is judged by;
pool, in base batches; strategy; max/mean; closed, the share of the gap from random to global; MiB moved between ranks a
step; largest, the largest batch's samples over the mean.""",
    ).parse_args()  # fmt: skip
    from gem.data.reader_speed import merge_speed

    columns = ("correlation", "cost", "judged", "pool", "strategy", "max/mean", "closed", "MiB moved", "largest")
    print(*(f"{name:>11}" for name in columns))
    for rho in (0.0, 0.5, 0.8):
        for cost, judged in (("tokens", "tokens"), ("pairs", "pairs"), ("tokens", "pairs"), ("pairs", "tokens")):
            for pool in (64, 512):
                study = Study(correlated(rho), cost=cost, judged=judged, pool=pool)
                for strategy in ALL_STRATEGIES:
                    one = study.balance(strategy)
                    words = (rho, cost, judged, pool, strategy)
                    figures = (one.max_over_mean, one.share_closed, one.bytes_moved / 2**20, one.largest_batch)
                    print(*(f"{word:>11}" for word in words), *(f"{x:11.3f}" for x in figures), flush=True)
    for median in (8, 700):
        for strategy in READER_STRATEGIES:
            speed = merge_speed(median, strategy)
            print(
                f"merged by one core, median length {median}, {strategy}: {speed.samples / 1e6:.2f} M samples/s, "
                f"{speed.bytes / 1e9:.2f} GB/s"
            )


if __name__ == "__main__":
    main()
