"""Synthetic data with a known answer: labels are drawn from a teacher, so the lowest possible NE is known.

A sample is a user who was shown an item: ids, a few floats, the user's history (items with signals, timed, oldest
first), the item's audience (users with signals), and whether the user clicked and, given that, bought. Each sample has
interests of its own that neither the user's nor the item's id betrays, so a model has to read the sequences.
gem/data/synthetic_teacher.py says what labels hang on.

Legend: B samples, T events of all samples, F floats.
"""

from dataclasses import replace
from typing import Annotated, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from gem.data.batch import offsets_of
from gem.data.distributions import AnyDistribution, Constant, Distribution, Explicit, Lognormal, Seed, Uniform
from gem.data.lengths import load_profile
from gem.data.samples import Events, Samples
from gem.data.schema import Feature, Schema, SequenceSchema, Table, Task
from gem.data.synthetic_teacher import TASKS, Draws, Floor, Part, Teacher, as_tensors
from gem.errors import RequestError

__all__ = ["Synthetic", "SyntheticConfig"]

Rows = Annotated[int, Field(ge=2, lt=2**31)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Strength = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]

_CALIBRATION = 8192  # samples that set the intercepts: base rates come out within about half a per cent of one
# Streams of random numbers have keys (seed, calibration or not, chunk, which of these).
_SAMPLES, _LABELS, _HISTORY, _AUDIENCE = range(4)
_START = 1_700_000_000  # seconds; sample n is shown n seconds later


class SyntheticConfig(BaseModel):
    """Sizes, lengths and difficulty. Data of one ``teacher_seed`` and unlike seeds share the answer: train and test.

    The defaults are easy: what a model has to learn are a few dozen numbers, and labels of both kinds are plenty.
    More categories, cohorts or rows, rarer labels, longer histories and ``drift`` make it harder; the floor says by
    how much less can be known, not by how much longer it takes to learn.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    samples: Annotated[int, Field(ge=1, lt=2**40)] = 65_536
    chunk: Annotated[int, Field(ge=1, le=2**20)] = 4096  # samples drawn together
    users: Rows = 128
    items: Rows = 128
    cohorts: Rows = 2  # of users
    categories: Rows = 4  # of items
    signals: Rows = 3
    floats: Annotated[int, Field(ge=0, le=1024)] = 3
    rank: Annotated[int, Field(ge=1, le=64)] = 2  # of user × item
    # A distribution of lengths, or the name of a profile (fixtures/lengths, or a .toml): of it the history is the long
    # side, the audience the keys of pattern cross. The distributions' own seeds count beside ``seed``.
    history: AnyDistribution | str = Lognormal(kind="lognormal", median=12.0, sigma=0.6, min=0, max=64, seed=0)
    audience: AnyDistribution | str = Uniform(kind="uniform", min=4, max=16, seed=0)
    ctr: Rate = 0.4
    cvr: Rate = 0.4  # of clicked samples
    strength: Strength = 1.0  # of all terms together; 0: labels are noise, and the floor is 1
    history_strength: Strength = 1.0
    audience_strength: Strength = 1.0
    individual: Share = 0.1  # how far a row differs from its cohort or category
    # Events after which one counts half. Where that is few beside the histories' length, order matters; more so with
    # drift, the chance that the interests changed halfway through the history.
    half_life: Annotated[float, Field(gt=0)] = 32.0
    drift: Share = 0.0
    skew: Annotated[float, Field(ge=0, le=8)] = 1.0  # of popularity; 0: none
    seed: Seed = 0
    teacher_seed: Seed = 0

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        for rows, groups in (("users", "cohorts"), ("items", "categories")):
            if getattr(self, groups) > getattr(self, rows):
                raise ValueError(f"{groups} {getattr(self, groups)} is above {rows} {getattr(self, rows)}")
        return self


class Synthetic:
    """A source of samples: ``read_chunk(i)`` is a pure function of the configuration and i."""

    def __init__(self, config: SyntheticConfig) -> None:
        """RequestError where a length profile does not exist or has no such side."""
        self.config = config
        self._history, self._audience = _history_lengths(config.history), _audience_lengths(config.audience)
        self.schema = _schema(config, _longest(self._history), _longest(self._audience))
        same = ("users", "items", "cohorts", "categories", "signals", "floats", "rank", "individual", "half_life",
                "strength", "history_strength", "audience_strength")  # fmt: skip
        self._teacher = Teacher(seed=config.teacher_seed, **{name: getattr(config, name) for name in same})
        calibration = self._draw((config.teacher_seed, 1, 0), np.arange(_CALIBRATION))
        self._teacher.calibrate(calibration, {"ctr": config.ctr, "cvr": config.cvr})

    def __len__(self) -> int:
        return self.config.samples

    @property
    def chunks(self) -> int:
        """How many there are; the last may be smaller."""
        return -(-self.config.samples // self.config.chunk)

    def read_chunk(self, index: int) -> Samples:
        """Samples index * chunk … of the dataset. A longer dataset begins with the shorter one of the same seed."""
        size, first = self._size(index), index * self.config.chunk
        key = (self.config.seed, 0, index)
        unlabelled = self._draw(key, np.arange(first, first + self.config.chunk))
        samples = replace(unlabelled, labels=self._labels(key, unlabelled))
        return samples.take(0, size)

    def chunk_sizes(self) -> list[int]:
        """Samples of each chunk."""
        whole, rest = divmod(self.config.samples, self.config.chunk)
        return [self.config.chunk] * whole + [rest] * (rest > 0)

    def chunk_lengths(self, index: int) -> dict[str, np.ndarray]:
        """By sequence, int64 [B]: events of each sample of a chunk, without drawing the events."""
        size, n = self._size(index), self.config.chunk
        return {
            "history": _drawn(self._history, (self.config.seed, 0, index, _HISTORY), n)[:size],
            "audience": _drawn(self._audience, (self.config.seed, 0, index, _AUDIENCE), n)[:size],
        }

    def teacher(self, samples: Samples) -> dict[str, Tensor]:
        """By task float64 [B]: P(click) and P(conversion | click), recomputed from the samples alone."""
        return as_tensors(self._teacher(samples))

    def blind(self, samples: Samples, to: tuple[Part, ...] = ("history",)) -> dict[str, Tensor]:
        """By task float64 [B]: the best prediction of a model that cannot see those sequences."""
        return as_tensors(self._teacher.blind(samples, to))

    def floors(self, samples: Samples) -> dict[str, Floor]:
        """By task: the lowest NE possible on these samples, and the lowest without sight of the history."""
        return self._teacher.floors(samples)

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _size(self, index: int) -> int:
        if not 0 <= index < self.chunks:
            raise RequestError(f"synthetic data: chunk {index}; accepted: 0 to {self.chunks - 1}")
        return min(self.config.chunk, self.config.samples - index * self.config.chunk)

    def _labels(self, key: tuple[int, ...], samples: Samples) -> dict[str, Tensor]:
        draws, chance = Draws(*key, _LABELS), self._teacher(samples)
        clicked, bought = (draws.chance(chance[task], len(samples)) for task in TASKS)
        return as_tensors(
            {"ctr": clicked.astype(np.float32), "cvr": np.where(clicked, bought, np.nan).astype(np.float32)}
        )

    def _draw(self, key: tuple[int, ...], keys: np.ndarray) -> Samples:
        """Samples without labels."""
        config, draws, n = self.config, Draws(*key, _SAMPLES), len(keys)
        cohort = draws.below(config.cohorts, n)
        liked, earlier = draws.below(config.categories, n), draws.below(config.categories, n)
        earlier = np.where(draws.chance(config.drift, n), earlier, liked)
        # Half of the items shown are of the category that the history is about.
        category = np.where(draws.chance(0.5, n), liked, draws.below(config.categories, n))
        user = self._pick(draws, cohort, config.cohorts, config.users)
        item = self._pick(draws, category, config.categories, config.items)
        floats = draws.spread(n, config.floats).astype(np.float32)

        lengths = _drawn(self._history, (*key, _HISTORY), n)
        offsets = offsets_of(lengths)
        older = np.arange(offsets[-1]) < np.repeat(offsets[:-1] + lengths // 2, lengths)
        favoured = np.where(older, np.repeat(earlier, lengths), np.repeat(liked, lengths))
        category_T, item_T = self._events(draws, lengths, favoured, config.categories, config.items)
        gap = np.cumsum(1 + draws.below(3600, len(favoured)))
        until = np.concatenate([np.zeros(1, np.int64), gap])[offsets[1:]]
        times = gap + np.repeat(_START + keys - 1 - until, lengths)
        history = Events(
            torch.from_numpy(offsets),
            as_tensors({"item": item_T, "category": category_T, "signal": draws.below(config.signals, len(item_T))}),
            torch.from_numpy(times),
        )
        lengths = _drawn(self._audience, (*key, _AUDIENCE), n)
        favoured = np.repeat(draws.below(config.cohorts, n), lengths)
        cohort_T, user_T = self._events(draws, lengths, favoured, config.cohorts, config.users)
        audience = Events(
            torch.from_numpy(offsets_of(lengths)),
            as_tensors({"user": user_T, "cohort": cohort_T, "signal": draws.below(config.signals, len(user_T))}),
        )
        return Samples(
            torch.from_numpy(keys),
            as_tensors({"user": user, "item": item, "category": category, "cohort": cohort}),
            torch.from_numpy(floats),
            {"history": history, "audience": audience},
            {},
        )

    def _events(
        self, draws: Draws, lengths: np.ndarray, favoured_T: np.ndarray, groups: int, rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """int64 [T] groups, and rows of them: the favoured one with a chance that is each sample's own, or any."""
        loyal = np.repeat(draws.uniform(len(lengths)), lengths)
        n = len(favoured_T)
        group = np.where(draws.chance(loyal, n), favoured_T, draws.below(groups, n))
        return group, self._pick(draws, group, groups, rows)

    def _pick(self, draws: Draws, group: np.ndarray, groups: int, rows: int) -> np.ndarray:
        """int64, one row of each group: rows group, group + groups, … with the first ones the most popular."""
        place = draws.uniform(len(group))
        if self.config.skew:
            place = place ** (1 + self.config.skew)
        return group + groups * (place * ((rows - 1 - group) // groups + 1)).astype(np.int64)


def _schema(config: SyntheticConfig, longest_history: int, longest_audience: int) -> Schema:
    rows = {
        "user": config.users, "item": config.items, "category": config.categories, "cohort": config.cohorts,
        "signal": config.signals,
    }  # fmt: skip

    def features(*names: str) -> list[Feature]:
        return [Feature(name=name, table=name) for name in names]

    return Schema(
        tables=[Table(name=name, rows=n) for name, n in rows.items()],
        ids=features("user", "item", "category", "cohort"),
        floats=[f"float_{i}" for i in range(config.floats)],
        sequences=[
            SequenceSchema(
                name="history", features=features("item", "category", "signal"), longest=longest_history, timed=True
            ),
            SequenceSchema(name="audience", features=features("user", "cohort", "signal"), longest=longest_audience),
        ],
        tasks=[Task(name="ctr"), Task(name="cvr", given="ctr")],
    )


# -- lengths -----------------------------------------------------------------------------------------------------------


def _history_lengths(declared: Distribution | str) -> Distribution:
    if isinstance(declared, Distribution):
        return declared
    profile = load_profile(declared)
    found = profile.k if profile.pattern == "pma" else profile.q
    assert found is not None  # kept by the profile
    return found


def _audience_lengths(declared: Distribution | str) -> Distribution:
    if isinstance(declared, Distribution):
        return declared
    profile = load_profile(declared)
    if profile.pattern != "cross" or profile.k is None:
        raise RequestError(f"audience: profile {declared!r} of pattern {profile.pattern}; accepted: pattern cross")
    return profile.k


def _drawn(lengths: Distribution, key: tuple[int, ...], n: int) -> np.ndarray:
    """int64 [n]; declared lengths (explicit, constant) are the same in every chunk."""
    own = getattr(lengths, "seed", None)
    if own is None:
        return lengths.draw(n)
    high, low = (int(word) for word in Draws(own, *key).words(2))
    seed = (high << 32 | low) >> 1
    return lengths.model_copy(update={"seed": seed}).draw(n)


def _longest(lengths: Distribution) -> int:
    """The most events a sample can have, at least 1."""
    if isinstance(lengths, Constant):
        return max(1, lengths.value)
    if isinstance(lengths, Explicit):
        return max([1, *lengths.values])
    return max(1, int(getattr(lengths, "max")))  # noqa: B009 - the others all have it, the base class has not
