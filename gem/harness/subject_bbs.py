"""Base Batch Shuffling as a measured subject: how evenly it loads ranks, and how fast a reader merges samples."""

import math

from gem.data.balance import Study, correlated
from gem.data.reader_speed import merge_speed
from gem.harness.measured import Metric, Report
from gem.harness.measured_params import BbsParams


class Bbs:
    """Simulated ranks on the CPU, whatever the run's device."""

    def measure(self, params: BbsParams, device: str, report: Report) -> list[Metric]:
        """Of balance: max_over_mean, share_closed (where there is a gap), bytes_moved, largest_batch. Of merge_rate:
        samples_per_s."""
        return _merge_rate(params) if params.measure == "merge_rate" else _balance(params, report)


def _balance(params: BbsParams, report: Report) -> list[Metric]:
    report(0, 2)
    lengths = correlated(params.correlation, median=params.median, group=params.base, seed=params.seed)
    study = Study(
        lengths, ranks=params.ranks, batch=params.batch, base=params.base, pool=params.pool, cost=params.cost,
        judged=params.judged, steps=params.steps, seed=params.seed,
    )  # fmt: skip
    report(1, 2)
    found = study.balance(params.strategy)
    report(2, 2)
    against = f"random {found.random:.4f}, optimum {found.best:.4f}"
    metrics = [
        Metric("max_over_mean", found.max_over_mean, note=f"correlation {params.correlation:g}; {against}"),
        Metric("share_closed", found.share_closed),
        Metric("bytes_moved", found.bytes_moved),
        Metric("largest_batch", found.largest_batch),
    ]
    # Where random batches are as good as the best ones there is no gap to close a share of.
    return [one for one in metrics if not math.isnan(one.value)]


def _merge_rate(params: BbsParams) -> list[Metric]:
    assert params.strategy != "global"
    speed = merge_speed(params.median, params.strategy, batch=params.batch, pool=params.pool, seed=params.seed)
    note = f"median of {len(speed.epochs)} epochs on one core; {speed.bytes / 1e9:.2f} GB/s"
    return [Metric("samples_per_s", speed.samples, speed.epochs, note)]
