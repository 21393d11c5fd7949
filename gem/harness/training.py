"""What ``gem train`` shows while a run goes on, and the documents it leaves: results, TensorBoard events."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gem.harness import names
from gem.harness.results import Document, Row, WaterfallPart, waterfall_key
from gem.train.config import TrainConfig
from gem.train.records import Evaluation, Listener, Result
from gem.train.records import Progress as Figures

SUITE = "train"


class TrainingConsole(Listener):
    """A live line on a terminal, a plain line a report elsewhere; TensorBoard events in the run's folder."""

    def __init__(self, console: Console, folder: Path) -> None:
        self.console = console
        self._events, self._board = folder / "tensorboard", None  # opened by the first figures: the run may be refused
        self._bar: Progress | None = None
        self._task: Any = None
        self._boards = importlib.util.find_spec("tensorboard") is not None
        if not self._boards:
            console.print("no TensorBoard events: tensorboard is not installed (pip install 'gem-recsys[train]')")
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
                TimeRemainingColumn(), TextColumn("{task.fields[detail]}", markup=False), console=console,
                transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=None, detail="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._board is not None:
            self._board.close()

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, markup=False, highlight=False)

    def progress(self, now: Figures) -> None:
        """The figures of some steps."""
        text = figures_text(now)
        if self._bar is not None:
            self._bar.update(self._task, total=now.steps, completed=now.step, detail=text)
        else:
            self.say(f"step {now.step}/{now.steps}  {text}")
        scalars = {
            "train/loss": now.loss, "train/gradient_norm": now.norm, "speed/samples_per_s": now.samples_per_s,
            "speed/mfu": now.mfu, "speed/input_wait": now.wait, "memory/peak_bytes": now.memory_bytes,
        }  # fmt: skip
        scalars |= {f"train/ne_{task}": found["ne"] for task, found in now.quality.items()}
        self._write(now.step, scalars)

    def evaluated(self, found: Evaluation) -> None:
        """Quality on the validation data."""
        self.say(f"step {found.step}: {evaluation_text(found)}")
        scalars = {f"valid/{figure}_{task}": one[figure] for task, one in found.quality.items()
                   for figure in ("ne", "auc", "calibration")}  # fmt: skip
        self._write(found.step, scalars)

    def saved(self, path: Path) -> None:
        """A checkpoint is whole."""
        self.say(f"saved {path}")

    def _write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        if self._boards and self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._events))
        if self._board is not None:
            for name, value in scalars.items():
                if value is not None and math.isfinite(value):
                    self._board.add_scalar(name, value, step)
            self._board.flush()


def figures_text(now: Figures) -> str:
    """One line of figures."""
    ne = "  ".join(f"NE {task} {_number(found['ne'])}" for task, found in now.quality.items())
    return (
        f"loss {now.loss:.4f}  {ne}  {now.samples_per_s:,.0f} samples/s  MFU {now.mfu:.1%}  "
        f"waiting {now.wait:.1%}  {now.memory_bytes / 2**30:.2f} GiB"
    )


def evaluation_text(found: Evaluation) -> str:
    """One line of quality; beside NE its floor, where it is known."""
    parts = []
    for task, one in found.quality.items():
        floor = found.floor.get(task, {}).get("realised")
        least = "" if floor is None else f" (lowest possible {floor:.4f})"
        parts.append(f"{task}: NE {_number(one['ne'])}{least}, AUC {_number(one['auc'])}, "
                     f"calibration {_number(one['calibration'])}")  # fmt: skip
    return "validation  " + ";  ".join(parts)


def document_of(result: Result, config: TrainConfig, name: str, environment: dict[str, Any], ranks: int) -> Document:
    """The results of a run of ``ranks`` processes: case ``name`` has its speed, ``name.<task>`` the quality of the last
    evaluation."""
    rows: list[Row] = []

    def add(case: str, metric: str, value: float, reason: str = "", samples: Sequence[float] = ()) -> None:
        known = names.METRICS[metric]
        rows.append(
            Row(suite=SUITE, case=case, impl="gem", direction="", metric=metric, value=value, unit=known.unit,
                better=known.better, status="pass", reason=reason, samples=list(samples))
        )  # fmt: skip

    waterfalls = {}
    speed = result.efficiency
    if speed is not None:
        for metric in ("samples_per_s", "local_mfu", "e2e_mfu", "scaling_ratio", "input_wait"):
            if (value := getattr(speed, metric, None)) is not None:  # what is of layers is not there with a plan
                if metric == "samples_per_s":  # of each report but the first, which warms up
                    add(name, "qps", value, samples=[one.samples_per_s for one in result.progress[1:]])
                else:
                    add(name, metric, value)
        key = waterfall_key(f"{SUITE}::{name}", "gem")
        waterfalls[key] = [WaterfallPart.model_validate(asdict(one)) for one in speed.waterfall]
    if result.progress:
        add(name, "peak_memory", float(max(one.memory_bytes for one in result.progress)))
    for task, one in result.evaluations[-1].quality.items() if result.evaluations else ():
        case, why = f"{name}.{task}", "; ".join(one["undefined"].values())
        add(case, "ne", one["ne"], why)
        floor = result.evaluations[-1].floor.get(task, {}).get("realised")
        if floor is not None:
            add(case, "ne_floor", floor)
            add(case, "ne_above_floor", one["ne"] / floor - 1)
        # By bins of the logit, the outer ones open: said where that may show.
        near = f"the exact AUC is within {one['auc_error']:.2g}" if one["auc_error"] > 1e-3 else ""
        add(case, "auc", one["auc"], why or near)
        add(case, "calibration", abs(one["calibration"] - 1), why)
    request = {
        "steps": result.steps, "from_step": result.resumed_at or 0, "ranks": ranks, "parameters": result.parameters,
        "data": result.described, "config": config.model_dump(mode="json"),
        "model": config.sizes().model_dump(mode="json"),
    }  # fmt: skip
    ceilings = {} if speed is None else {"tflops": {"peak": speed.peak / 1e12}}
    return Document(environment=environment, request=request, rows=rows, ceilings=ceilings, waterfalls=waterfalls)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"
