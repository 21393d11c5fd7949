"""The parameters of measured subjects, which are no op: load balance of readers, whole training runs. No torch."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from gem.harness import names
from gem.harness.params import Finite, Params, as_tuple

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class RaceParams(Params):
    """What every race takes: its contestants agree on losses first, then each runs at its own best batch size.

    Losses of `check_steps` batches of `check_batch` samples must be within `tolerance` of the project's own, relative.
    `batches`: sizes to try, ascending, until memory ends the search. A turn is `turn_steps` training steps.
    """

    batches: Annotated[tuple[Count, ...], BeforeValidator(as_tuple), Field(min_length=1)]
    check_batch: Count = 32
    check_steps: Count = 3
    tolerance: Annotated[Finite, Field(gt=0)] = 1e-3
    turn_steps: Count = 4
    seed: int = 0

    @model_validator(mode="after")
    def _ascending(self) -> "RaceParams":
        if list(self.batches) != sorted(set(self.batches)):
            raise ValueError(f"batches = {list(self.batches)}; accepted: sizes in ascending order, each once")
        return self


class BbsParams(Params):
    """Batches of jagged samples dealt to ranks, as `gem.data.balance` simulates them.

    `correlation` is that of lengths inside a base batch: 0 = independent, near 1 = one user's samples together.
    """

    correlation: Share = 0.0


class QualityParams(Params):
    """A training run on synthetic data whose lowest possible NE is known: `steps` of the model `preset`."""

    preset: str = "tiny"
    steps: Count = 200
    seed: int = 0


# ---- which code measures what


@dataclass(frozen=True)
class MeasuredSubject:
    """A subject that is no op: its parameters, the kinds of suites it belongs to, and the code (``module:attribute``).

    `target` is a Measured, or None where the subject is a race; then `racers` are the project's own contestants and
    its peers, by name.
    """

    params: type[Params]
    kinds: tuple[str, ...]
    target: str | None = None
    racers: dict[str, str] = field(default_factory=dict)

    @property
    def own(self) -> tuple[str, ...]:
        """The contestants of a race that are the project's own."""
        return tuple(name for name in self.racers if name not in names.PEERS)


MEASURED: dict[str, MeasuredSubject] = {}
