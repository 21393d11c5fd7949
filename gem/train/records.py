"""What a training run tells while it goes on, and what it leaves."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gem.efficiency import Part, Slice
from gem.train.metrics import TaskQuality


@dataclass(frozen=True)
class Progress:
    """Figures of the steps since the last report, of all ranks together."""

    step: int
    steps: int | None  # of the whole run; None: by epochs without end
    epoch: int
    loss: float
    quality: dict[str, TaskQuality]  # of the predictions before each step learnt from its batch
    samples_per_s: float
    mfu: float  # useful FLOPs over the measured peak
    wait: float  # share of the time spent waiting for input
    memory_bytes: int  # peak: of the GPU, or of the process
    norm: float | None  # of the last gradient, before clipping


@dataclass(frozen=True)
class Evaluation:
    """Quality on the validation data after a step; ``floor``: the lowest NE possible there, by task, where known."""

    step: int
    quality: dict[str, TaskQuality]
    floor: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepEfficiency:
    """Of the run's steps after the first window; a model that is cut over ranks has this alone."""

    peak: float  # FLOP/s of a matrix product in the run's precision, measured in the run
    e2e_mfu: float
    samples_per_s: float  # all ranks
    input_wait: float  # share of a step
    step_s: float
    waterfall: list[Slice]


@dataclass(frozen=True)
class Efficiency(StepEfficiency):
    """And of its layers, each alone. E2E MFU = Local MFU × Scaling Ratio."""

    local_mfu: float
    scaling_ratio: float
    parts: list[Part]


@dataclass
class Result:
    """Of a run, the same on every rank."""

    steps: int
    resumed_at: int | None
    evaluations: list[Evaluation]
    progress: list[Progress]
    efficiency: StepEfficiency | None  # None: too few steps to say
    parameters: dict[str, int]
    described: str  # what an epoch is

    def plain(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


class Listener:
    """What a run tells; override what is of interest. Called on the first rank alone."""

    def say(self, line: str) -> None:
        """A line for people."""

    def progress(self, now: Progress) -> None:
        """Every ``log_every`` steps."""

    def evaluated(self, found: Evaluation) -> None:
        """After each evaluation."""

    def saved(self, path: Path) -> None:
        """After each checkpoint."""
