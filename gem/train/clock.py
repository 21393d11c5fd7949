"""Times of the stages of training steps, on the device that does the work, without making it wait."""

import time
from collections import defaultdict

import torch


class StageClock:
    """``start``, then ``mark(stage)`` at each stage's end, step after step; ``take`` gives means a step.

    A stage may come several times in a step: forward and backward of each piece of a batch.

    On a GPU marks are events in the stream: they are read when taken, after one wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps = 0
        self._last: float | torch.cuda.Event = 0.0
        self._spans: dict[str, list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]]] = defaultdict(list)

    def start(self) -> None:
        """A step begins."""
        self._steps += 1
        self._last = self._now()

    def mark(self, stage: str) -> None:
        """A stage ends, the next begins."""
        now = self._now()
        self._spans[stage].append((self._last, now))
        self._last = now

    def take(self) -> dict[str, float]:
        """Mean seconds a step of each stage since the last call."""
        if self._cuda:
            torch.cuda.synchronize()
        steps, self._steps = max(1, self._steps), 0
        means = {stage: sum(_seconds(a, b) for a, b in spans) / steps for stage, spans in self._spans.items()}
        self._spans.clear()
        return means

    def _now(self) -> "float | torch.cuda.Event":
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) * 1e-3
