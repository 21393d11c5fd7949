"""How the lengths of a profile are drawn: one model a distribution, each exact by its own seed.

Every `draw(n)` returns int64 `[n]`. Only drawing imports torch, so that listing profiles stays cheap. torch's CPU
generator is the source because the published shapes were drawn with it, and numpy's would give other lengths.
"""

import math
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    import torch

Length = Annotated[int, Field(ge=0, le=2**31 - 1)]  # a sample longer than int32 has no int32 offsets
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Sigma = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]


def _generator(seed: int) -> "torch.Generator":
    import torch

    return torch.Generator(device="cpu").manual_seed(seed)


def _normal(n: int, generator: "torch.Generator") -> "torch.Tensor":
    """Standard normal float32 [n]; dtype and device are named so that torch's global defaults cannot change a draw."""
    import torch

    return torch.randn(n, generator=generator, dtype=torch.float32, device="cpu")


def _uniform(low: int, high: int, n: int, seed: int) -> np.ndarray:
    """int64 [n], uniform in low..high-1."""
    import torch

    return torch.randint(low, high, (n,), generator=_generator(seed), dtype=torch.int64, device="cpu").numpy()


class Distribution(BaseModel):
    """What all distributions share: unknown fields are refused, and "12" or true is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def draw(self, n: int) -> np.ndarray:
        """int64 [n] lengths, the same ones for the same fields and n."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def describe(self) -> str:
        """One phrase for a table or a source line, such as `lognormal(median 2048, sigma 1.0, ...)`."""
        fields = ", ".join(f"{k} {v}" for k, v in self.model_dump(exclude={"kind"}).items())
        return f"{getattr(self, 'kind', type(self).__name__)}({fields})"


class _Bounded(Distribution):
    min: Length
    max: Length

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; min <= max")
        return self


class Lognormal(_Bounded):
    """exp(N(ln median, sigma)), rounded, clamped to min..max: the long tail of user histories."""

    kind: Literal["lognormal"]
    median: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sigma: Sigma
    seed: Seed

    def draw(self, n: int) -> np.ndarray:
        logs = _normal(n, _generator(self.seed)) * self.sigma + math.log(self.median)
        # This order of operations, in float32, is the one the shapes of the measured anchors were drawn in.
        return logs.exp().round().clamp(self.min, self.max).long().numpy()


class Uniform(_Bounded):
    """Uniform integers, both ends included."""

    kind: Literal["uniform"]
    seed: Seed

    def draw(self, n: int) -> np.ndarray:
        return _uniform(self.min, self.max + 1, n, self.seed)


class Sparsity(Distribution):
    """The public GDPA and HSTU benchmarks' lengths: uniform with mean `sparsity * max`.

    In those benchmarks (`generate_sparse_seq_len` of generative-recommenders and tritonbench) sparsity is the *filled*
    share of the padded batch: 1.0 means every sample has `max` rows, 0.5 means uniform in 0..max-1.
    """

    kind: Literal["sparsity"]
    max: Annotated[Length, Field(ge=1)]
    sparsity: Annotated[float, Field(ge=0, le=1)]
    seed: Seed

    def draw(self, n: int) -> np.ndarray:
        if self.sparsity == 1.0:
            return np.full(n, self.max, dtype=np.int64)
        if self.sparsity >= 0.5:
            return _uniform(int((2 * self.sparsity - 1.0) * self.max), self.max, n, self.seed)
        high = int(2 * self.sparsity * self.max)
        return _uniform(0, high, n, self.seed) if high else np.zeros(n, dtype=np.int64)


class Constant(Distribution):
    """Every sample has `value` rows."""

    kind: Literal["constant"]
    value: Length

    def draw(self, n: int) -> np.ndarray:
        return np.full(n, self.value, dtype=np.int64)


class Explicit(Distribution):
    """The lengths themselves, for hostile batches; repeated from the start when more are asked for (none: zeros)."""

    kind: Literal["explicit"]
    values: list[Length]

    def draw(self, n: int) -> np.ndarray:
        return np.resize(np.array(self.values, dtype=np.int64), n)

    def describe(self) -> str:
        shown = ", ".join(map(str, self.values[:8])) + (", ..." if len(self.values) > 8 else "")
        return f"explicit({shown})"


class UserCorrelated(_Bounded):
    """Lognormal lengths in sub-batches of `group` samples that share one user factor.

    ln length = ln median + sigma_between * u[sub-batch] + sigma_within * e[sample], u and e standard normal, so the
    lengths (in logs) have intra-class correlation sigma_between^2 / (sigma_between^2 + sigma_within^2).
    Independent lengths flatter load balancing; samples of one user that sit together do not average out.
    """

    kind: Literal["user_correlated"]
    group: Annotated[int, Field(ge=1)] = 128
    median: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sigma_between: Sigma
    sigma_within: Sigma
    seed: Seed

    @property
    def correlation(self) -> float:
        """Intra-class correlation of the log lengths, 0..1."""
        between, within = self.sigma_between**2, self.sigma_within**2
        return between / (between + within) if between + within else 0.0

    def draw(self, n: int) -> np.ndarray:
        generator = _generator(self.seed)
        users = _normal(-(-n // self.group), generator).repeat_interleave(self.group)[:n]
        logs = users * self.sigma_between + _normal(n, generator) * self.sigma_within + math.log(self.median)
        return logs.exp().round().clamp(self.min, self.max).long().numpy()

    def describe(self) -> str:
        return f"{super().describe()[:-1]}, intra-class correlation {self.correlation:.2f})"


AnyDistribution = Annotated[
    Lognormal | Uniform | Sparsity | Constant | Explicit | UserCorrelated, Field(discriminator="kind")
]
