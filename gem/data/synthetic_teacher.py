"""The teacher of synthetic data: the click and conversion probabilities of samples, and the NE nobody can go below.

A teacher is a fixed smooth function of what a sample shows, so the probability of any sample can be found again from
the sample alone. Its terms are of kinds that a GEM model is built of, each with few free values to learn:

    logit = intercept + strength * (history + audience + <user, item> + bias of the item + floats)

    history    weight * share of the history's events whose item is of the target item's category. An event counts
               gain[its signal], halved for every ``half_life`` events that came after it. An empty history has share 0
    audience   the same for members of the target user's cohort, order aside
    user, item low-rank vectors: those of cohort and category, and a little of each one's own
    floats     linear, and the square of the first

CVR has a logit of the same form with other values: P(conversion | click).

Legend: B samples, T events, F floats, R rank, Q quantiles.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from gem.data.samples import Events, Samples

Part = Literal["history", "audience"]
Kind = Literal["ctr", "cvr"]
PARTS: tuple[Part, ...] = ("history", "audience")
TASKS: tuple[Kind, ...] = ("ctr", "cvr")
# How strongly each task hears (history, audience, user × item, bias of the item, floats): conversions hang more on the
# item and less on what was seen before.
WEIGHTS = {"ctr": (4.0, 2.0, 0.4, 0.5, 0.5), "cvr": (2.0, 1.0, 0.4, 0.7, 0.5)}
_QUANTILES = 128
_TEACHER = 2**32  # second number of a stream's key; those of samples are smaller


class Draws:
    """Uniform numbers of one stream, a pure function of the key: numpy freezes raw Philox streams for all releases.

    Keys are numbers below 2**64. Each takes two words and a last one ends them, since to SeedSequence 2**32 is the
    same as (0, 1), and (7,) the same as (7, 0).
    """

    def __init__(self, *key: int) -> None:
        words = [word for number in key for word in (number & 0xFFFFFFFF, number >> 32)]
        self._bits = np.random.Philox(np.random.SeedSequence([*words, 1]))

    def words(self, n: int) -> np.ndarray:
        """uint32 [n]."""
        return np.asarray(self._bits.random_raw((n + 1) // 2)).astype("<u8", copy=False).view(np.uint32)[:n]

    def below(self, limit: int | np.ndarray, n: int) -> np.ndarray:
        """int64 [n] in 0 … limit - 1, limit < 2**31."""
        return (self.words(n).astype(np.int64) * limit) >> 32

    def chance(self, probability: float | np.ndarray, n: int) -> np.ndarray:
        """bool [n], true with that probability (in steps of 2**-32)."""
        return self.words(n) < np.asarray(probability) * 2.0**32

    def uniform(self, n: int) -> np.ndarray:
        """float64 [n] in [0, 1), steps of 2**-32."""
        return self.words(n) * 2.0**-32

    def spread(self, *shape: int) -> np.ndarray:
        """float64, uniform with mean 0 and variance 1."""
        return (self.uniform(math.prod(shape)).reshape(shape) * 2 - 1) * math.sqrt(3)


@dataclass(frozen=True, eq=False)
class TaskValues:
    """What one task's logit is made of, strength included."""

    history: float
    audience: float
    user: np.ndarray  # [users, R]
    item: np.ndarray  # [items, R]
    bias: np.ndarray  # [items]
    floats: np.ndarray  # [F + 1]; the last for the square of the first


@dataclass(frozen=True)
class Floor:
    """NE that no prediction can beat, of one task on one set of samples; NaN where it has no labels of both kinds.

    expected        by the teacher's probabilities alone: mean entropy of p over the entropy of mean p. For CVR the mean
                    over samples as they are clicked, so weighted by P(click)
    realised        log loss of p on the labels that were drawn over the entropy of their base rate: what a model's
                    measured NE is to be held against, since both share the luck of the draw
    blind, blind_realised  the same for the best prediction of one that cannot see the history
    """

    expected: float
    realised: float
    blind: float
    blind_realised: float
    samples: int  # that have a label
    positives: int


class Teacher:
    """P(click) and P(conversion | click) of samples. Values are a pure function of the arguments."""

    def __init__(
        self, *, users: int, items: int, cohorts: int, categories: int, signals: int, floats: int, rank: int,
        strength: float, history_strength: float, audience_strength: float, individual: float, half_life: float,
        seed: int,
    ) -> None:  # fmt: skip
        self._half_life = half_life
        self._category = (np.arange(items) % categories).astype(np.int32)
        self._cohort = (np.arange(users) % cohorts).astype(np.int32)
        self._gain = 2.0 ** np.linspace(-1, 1, signals)
        self._intercept = dict.fromkeys(TASKS, 0.0)
        self._shares: dict[Part, np.ndarray] = {"history": np.zeros(1), "audience": np.zeros(1)}
        self._values: dict[Kind, TaskValues] = {}
        for number, task in enumerate(TASKS):
            draws = Draws(seed, _TEACHER, number)
            history, audience, pair, bias, linear = (strength * weight for weight in WEIGHTS[task])
            user = _grouped(draws, self._cohort, cohorts, rank, individual)
            item = _grouped(draws, self._category, categories, rank, individual)
            self._values[task] = TaskValues(
                history * history_strength,
                audience * audience_strength,
                user,
                item * (pair / math.sqrt(rank)),
                _grouped(draws, self._category, categories, 1, individual)[:, 0] * bias,
                _unit(draws.spread(floats + 1)) * linear,
            )

    def calibrate(self, samples: Samples, rates: dict[Kind, float]) -> None:
        """Set the intercepts so that these samples have those base rates, and keep their shares for ``blind``."""
        shares = self._all_shares(samples)
        middles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
        self._shares = {part: np.quantile(share, middles) for part, share in shares.items()}
        self._intercept = dict.fromkeys(TASKS, 0.0)
        weight = np.ones(len(samples))
        for task in TASKS:
            logits = self._logits(task, samples, shares)
            low, high = -40.0, 40.0
            for _ in range(60):
                middle = (low + high) / 2
                mean = float((weight * _sigmoid(logits + middle)).sum() / weight.sum())
                low, high = (middle, high) if mean < rates[task] else (low, middle)
            # Rounded, so that the last bits of a library's exp cannot move it.
            self._intercept[task] = round((low + high) / 2, 6)
            weight = weight * _sigmoid(logits + self._intercept[task])  # who reaches the next task

    def __call__(self, samples: Samples) -> dict[str, np.ndarray]:
        """float64 [B] by task, of these samples alone: the same whatever else is in the batch."""
        shares = self._all_shares(samples)
        return {task: _sigmoid(self._logits(task, samples, shares)) for task in TASKS}

    def blind(self, samples: Samples, to: Iterable[Part] = ("history",)) -> dict[str, np.ndarray]:
        """Best predictions, float64 [B], of one that sees all but those parts.

        The mean of the teacher's probability over the shares of the calibration set (in 128 quantiles), which is exact
        up to that because generated histories are independent of everything but the target's category, and look alike
        to every category. For CVR the mean over those who would have clicked.
        """
        hidden = set(to)
        shares = self._all_shares(samples)
        known: dict[Part, np.ndarray] = {part: shares[part] * (part not in hidden) for part in PARTS}
        logits = {task: self._logits(task, samples, known) for task in TASKS}
        nothing = np.zeros(1)
        grids = np.meshgrid(*(self._shares[part] if part in hidden else nothing for part in PARTS))
        sums = {task: np.zeros(len(samples)) for task in TASKS}
        for history, audience in zip(*(grid.ravel() for grid in grids), strict=True):
            reached = 1.0
            for task in TASKS:
                values = self._values[task]
                reached = reached * _sigmoid(logits[task] + values.history * history + values.audience * audience)
                sums[task] += reached
        return {"ctr": sums["ctr"] / grids[0].size, "cvr": sums["cvr"] / sums["ctr"]}

    def floors(self, samples: Samples) -> dict[str, Floor]:
        """The floor of each task on these samples."""
        chance, blind = self(samples), self.blind(samples)
        found, reached = {}, np.ones(len(samples))
        for task in TASKS:
            labels = samples.labels[task].cpu().numpy().astype(np.float64)
            given = ~np.isnan(labels)
            drawn = np.where(given, labels, 0.0)
            found[task] = Floor(
                normalized_entropy(chance[task], chance[task], reached),
                normalized_entropy(drawn, chance[task], given),
                normalized_entropy(chance[task], blind[task], reached),
                normalized_entropy(drawn, blind[task], given),
                int(given.sum()),
                int(drawn.sum()),
            )
            reached = reached * chance[task]
        return found

    # -- terms ---------------------------------------------------------------------------------------------------------

    def _logits(self, task: Kind, samples: Samples, shares: dict[Part, np.ndarray]) -> np.ndarray:
        values = self._values[task]
        user, item = (samples.ids[name].cpu().numpy() for name in ("user", "item"))
        floats = samples.floats.cpu().numpy().astype(np.float64)
        logits = self._intercept[task] + values.bias[item]
        for r in range(values.user.shape[1]):  # one by one: a sum in fixed order, the same in a batch of any size
            logits = logits + values.user[user, r] * values.item[item, r]
        for f in range(floats.shape[1]):
            logits = logits + values.floats[f] * floats[:, f]
        if floats.shape[1]:
            logits = logits + values.floats[-1] * (floats[:, 0] ** 2 - 1)
        return logits + values.history * shares["history"] + values.audience * shares["audience"]

    def _all_shares(self, samples: Samples) -> dict[Part, np.ndarray]:
        history, audience = samples.sequences["history"], samples.sequences["audience"]
        user, item = (samples.ids[name].cpu().numpy() for name in ("user", "item"))
        return {
            "history": self._share(history, "item", self._category, item, self._half_life),
            "audience": self._share(audience, "user", self._cohort, user, None),
        }

    def _share(
        self, events: Events, feature: str, group: np.ndarray, target_B: np.ndarray, half_life: float | None
    ) -> np.ndarray:
        """float64 [B]: weighted share of events whose id is of the group that the sample's target is of."""
        offsets = events.offsets.cpu().numpy()
        lengths = np.diff(offsets)
        weight = self._gain[events.ids["signal"].cpu().numpy()]
        if half_life is not None and weight.size:
            decay = 2.0 ** (-np.arange(int(lengths.max())) / half_life)
            later = np.repeat(offsets[1:] - 1, lengths) - np.arange(len(weight))
            weight *= decay[later]
        same = group[events.ids[feature].cpu().numpy()] == np.repeat(group[target_B], lengths)
        total, matching = (_segment_sums(x, offsets) for x in (weight, weight * same))
        return np.divide(matching, total, out=np.zeros(len(lengths)), where=total > 0)


def normalized_entropy(target_B: np.ndarray, predicted_B: np.ndarray, weight_B: np.ndarray) -> float:
    """Weighted mean cross entropy of the predictions over that of the targets' mean; NaN where that mean is 0 or 1.

    Targets are labels, or probabilities for what labels cost on average.
    """
    total = float(weight_B.sum())
    rate = float((weight_B * target_B).sum()) / total if total else 0.0
    if not 0.0 < rate < 1.0:
        return float("nan")
    with np.errstate(divide="ignore", invalid="ignore"):  # the logarithm of 0 counts only where it is weighted
        loss = -np.where(target_B > 0, target_B * np.log(predicted_B), 0.0)
        loss -= np.where(target_B < 1, (1 - target_B) * np.log1p(-predicted_B), 0.0)
    entropy = -rate * math.log(rate) - (1 - rate) * math.log1p(-rate)
    return float(loss[weight_B > 0] @ weight_B[weight_B > 0]) / total / entropy


def as_tensors(found: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The same in torch's hands, sharing memory."""
    return {name: torch.from_numpy(x) for name, x in found.items()}


def _segment_sums(x_T: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[B] sums between offsets, each of its own events only; 0 where there are none."""
    sums, filled = np.zeros(len(offsets) - 1), np.diff(offsets) > 0
    if filled.any():
        sums[filled] = np.add.reduceat(x_T[: offsets[-1]], offsets[:-1][filled])
    return sums


def _grouped(draws: Draws, group: np.ndarray, groups: int, rank: int, individual: float) -> np.ndarray:
    """[rows, rank]: what each row's group has, standardised, and ``individual`` times something of its own."""
    return _unit(draws.spread(groups, rank))[group] + individual * draws.spread(len(group), rank)


def _unit(x: np.ndarray) -> np.ndarray:
    """Columns with mean square 1, so that no seed makes a term strong or weak by luck."""
    return x / np.sqrt((x**2).mean(0, keepdims=True))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))
