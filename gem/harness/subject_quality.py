"""What a training run learns, as a measured subject: NE held to the lowest that is possible, AUC and calibration."""

import math
import tempfile
from pathlib import Path

from gem.harness.measured import Metric, Report
from gem.harness.measured_params import QualityParams
from gem.train.config import TrainConfig, parse_config
from gem.train.loop import Run
from gem.train.records import Listener, Progress, Result
from gem.train.world import join

_REPORTS = 50  # of a run, at most


class TrainedModel:
    """A run from its seed to its last step, on each sample once; its checkpoint is thrown away."""

    def measure(self, params: QualityParams, device: str, report: Report) -> list[Metric]:
        """ne, ne_floor, ne_above_floor, auc and calibration of the task, on samples that were not trained on."""
        with join(device) as world, tempfile.TemporaryDirectory(prefix="gem-quality-") as folder:
            return _metrics(Run(config_of(params), Path(folder), world, _Reporter(report)).train(), params.task)


def config_of(params: QualityParams) -> TrainConfig:
    """What `gem train` would be told. RequestError where a table of sizes says what there is not."""
    base = math.gcd(params.batch, 128)
    document = {
        "data": {
            "kind": "synthetic",
            "train": {"samples": params.steps * params.batch, "seed": params.seed} | params.data,
            "valid_samples": params.valid_samples,
        },
        "model": {"preset": params.preset} | params.model,
        "reader": {"batch": params.batch, "base": base, "pool": 8 * params.batch // base},
        "steps": params.steps, "lr": params.lr, "table_lr": params.table_lr, "warmup": params.warmup,
        "decay": "cosine", "precision": params.precision, "seed": params.seed, "checkpoint_every": None,
        "log_every": max(1, params.steps // _REPORTS),
    }  # fmt: skip
    return parse_config(document, "params")


class _Reporter(Listener):
    """Tells the harness how far the run is."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def progress(self, now: Progress) -> None:
        self._report(now.step, now.steps or now.step)


def _metrics(result: Result, task: str) -> list[Metric]:
    """Of the evaluation after the last step. What is not defined is NaN with a reason, and so an error of the case."""
    last = result.evaluations[-1]
    quality, floor = last.quality[task], last.floor[task]["realised"]
    why = quality["undefined"]
    trained = f"{result.parameters['dense']:,} dense parameters; {quality['samples']:,} samples judged"
    return [
        Metric("ne", quality["ne"], note=why.get("ne", trained)),
        Metric("ne_floor", floor),
        Metric("ne_above_floor", quality["ne"] / floor - 1),
        Metric("auc", quality["auc"], note=why.get("auc", "")),
        Metric("calibration", abs(quality["calibration"] - 1), note=why.get("calibration", "")),
    ]
