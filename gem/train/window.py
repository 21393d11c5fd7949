"""Sums over the training steps between two reports. Nothing waits for the device until the window is closed."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gem.data.samples import Samples
from gem.model import GemModel
from gem.model.work import TRAINING, Work
from gem.train.clock import StageClock
from gem.train.metrics import Quality
from gem.train.step import StepResult


@dataclass(frozen=True)
class Closed:
    """A window's sums, of this rank. Times in seconds."""

    steps: int
    samples: int
    flops: float  # useful, forward and backward
    seconds: float
    waited: float  # for input
    stages: dict[str, float]  # mean of a step: forward, backward, optimizer
    loss: float  # mean
    norm: float | None  # of the last gradient


class Window:
    """``waiting`` around what brings a batch, ``begin`` and ``end`` around a step, then ``close``."""

    def __init__(self, tasks: list[str], model: GemModel, device: torch.device) -> None:
        self.tasks, self.model, self.device, self.clock = tasks, model, device, StageClock(device)
        self.restart()

    def restart(self) -> None:
        """Begin anew, now: what came since the last step (an evaluation, a checkpoint) is in no window."""
        self._synchronize()
        self.clock.take()
        self.quality = Quality(self.tasks, self.device)
        self.steps, self.samples, self.flops, self.waited = 0, 0, 0.0, 0.0
        self._loss = torch.zeros((), device=self.device)
        self._norm: torch.Tensor | None = None
        self._start = time.perf_counter()

    def begin(self, batch: Samples) -> None:
        """A step begins; its batch still lies on the host."""
        self.samples += len(batch)
        self.flops += TRAINING * self.model.flops(Work.of(batch))
        self.clock.start()

    def end(self, done: StepResult, labels: Mapping[str, torch.Tensor]) -> None:
        """A step is queued; ``labels`` of its batch, on the device."""
        self.quality.update(done.logits, labels)
        self._loss += done.loss
        self._norm = done.norm
        self.steps += 1

    def close(self) -> Closed:
        """Wait for the device and sum up."""
        self._synchronize()
        seconds = time.perf_counter() - self._start
        norm = None if self._norm is None else float(self._norm)
        return Closed(
            self.steps, self.samples, self.flops, seconds, self.waited, self.clock.take(),
            float(self._loss) / max(self.steps, 1), norm,
        )  # fmt: skip

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def memory_bytes(device: torch.device) -> int:
    """Peak so far: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
