"""Quality of predictions: NE, log loss, AUC and calibration, as sums that steps and ranks add up.

Everything is one float64 tensor of sums, so ranks all-reduce it and read the same figures. Samples whose label is NaN
are left out. What is not defined (no samples, one class only, predictions that are no numbers) is NaN with a reason.

Legend: B samples, K tasks, S sums a task, H bins of the logit, C bins of the probability.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from gem.errors import RequestError

LOGIT_BINS = 8192  # of equal width over ±LOGIT_RANGE, the outer ones open: the AUC takes predictions of a bin for ties
LOGIT_RANGE = 16.0
CALIBRATION_BINS = 15  # of equal width over 0 … 1
_SCALARS = ("samples", "positives", "log_loss", "prediction", "not_finite", "not_binary")
_WIDTH = len(_SCALARS) + 2 * LOGIT_BINS + 3 * CALIBRATION_BINS


class TaskQuality(TypedDict):
    """Figures of one task; NaN where ``undefined`` says why."""

    ne: float  # log loss over that of predicting the base rate of the same labels
    auc: float  # by bins of the logit
    auc_error: float  # the exact AUC lies within this of ``auc``
    calibration: float  # mean prediction over base rate
    ece: float  # expected calibration error: mean over samples of |mean prediction - base rate| of their bin
    log_loss: float  # mean, nats
    samples: int  # with a label
    positives: int
    undefined: dict[str, str]  # by figure


class Quality:
    """Sums over all samples seen, by task.

    ``update`` never waits for the device; ``compute`` does. Sums of counts are exact, those of losses as float64 adds.
    """

    def __init__(self, tasks: Sequence[str], device: torch.device | str = "cpu") -> None:
        self.tasks = tuple(tasks)
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise RequestError(f"quality: tasks {list(self.tasks)}; accepted: one or more, each once")
        self._sums_KS = torch.zeros(len(self.tasks), _WIDTH, dtype=torch.float64, device=device)

    @classmethod
    def from_state(cls, tasks: Sequence[str], state_KS: Tensor) -> "Quality":
        """The one that ``state`` was taken of, or the sum of several such states."""
        found = cls(tasks, state_KS.device)
        shape = list(found._sums_KS.shape)
        if list(state_KS.shape) != shape or state_KS.dtype != torch.float64:
            raise RequestError(f"quality: state {state_KS.dtype} {list(state_KS.shape)}; accepted: float64 {shape}")
        found._sums_KS = state_KS.clone()
        return found

    def state(self) -> Tensor:
        """float64 [K, S] on the device: a copy of all sums. Those of several ranks add up to the whole."""
        return self._sums_KS.clone()

    def merge(self, other: "Quality") -> None:
        """Take in what another has seen."""
        if other.tasks != self.tasks:
            raise RequestError(f"quality: tasks {list(other.tasks)} into {list(self.tasks)}; accepted: the same tasks")
        self._sums_KS += other._sums_KS.to(self._sums_KS.device)

    @torch.no_grad()
    def update(self, logits: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> None:
        """Add a batch: by task logits [B] of any float type and labels [B], 0, 1 or NaN (left out)."""
        for name, given in (("logits", logits), ("labels", labels)):
            if set(given) != set(self.tasks):
                raise RequestError(f"quality: {name} of {sorted(given)}; accepted: of {sorted(self.tasks)}")
        for number, task in enumerate(self.tasks):
            z, y = logits[task], labels[task]
            if z.shape != y.shape or z.dim() != 1:
                raise RequestError(
                    f"quality: {task}: logits {list(z.shape)}, labels {list(y.shape)}; accepted: both [B]"
                )
            _add(self._sums_KS[number], z, y)

    def compute(self) -> dict[str, TaskQuality]:
        """The figures of everything seen so far."""
        return {task: _figures(sums) for task, sums in zip(self.tasks, self._sums_KS.cpu(), strict=True)}

    def calibration_curve(self, task: str) -> tuple[Tensor, Tensor, Tensor]:
        """(base rate, mean prediction, samples) of each bin of the probability that has samples, float64."""
        if task not in self.tasks:
            raise RequestError(f"quality: task {task!r}; accepted: {', '.join(self.tasks)}")
        _, count, prediction, positives = _parts(self._sums_KS[self.tasks.index(task)].cpu())
        filled = count > 0
        return (positives / count)[filled], (prediction / count)[filled], count[filled]


def log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """float64, elementwise: -ln of the probability that the logit gives the label, without a ln 0 for any logit."""
    z, y = logits.double(), labels.double()
    return z.clamp_min(0) - z * y + torch.log1p(torch.exp(-z.abs()))


def auc(scores: Tensor, labels: Tensor) -> float:
    """Chance that a positive scores above a negative, ties half: exact, by mid-ranks. NaN where a class is missing.

    scores [B] of any float type, labels [B]: 0, 1 or NaN (left out).
    """
    given = ~labels.isnan()
    scores, positive = scores[given].double(), labels[given] == 1
    if scores.isnan().any():
        return math.nan
    order = scores.argsort()
    _, place, ties = torch.unique_consecutive(scores[order], return_inverse=True, return_counts=True)
    rank = ties.cumsum(0) - (ties - 1) / 2  # the mean of a tie's ranks, from 1
    p = int(positive.sum())
    n = len(scores) - p
    if not p or not n:
        return math.nan
    above = float(rank.double()[place][positive[order]].sum()) - p * (p + 1) / 2
    return above / p / n


def _add(sums_S: Tensor, logits_B: Tensor, labels_B: Tensor) -> None:
    device = sums_S.device
    z, y = logits_B.to(device).double(), labels_B.to(device).double()
    labelled = ~y.isnan()
    binary, finite = (y == 0) | (y == 1), z.isfinite()
    used = labelled & binary & finite
    z, y, one = torch.where(used, z, 0.0), torch.where(used, y, 0.0), used.double()
    p = torch.sigmoid(z)
    counts = (one, y, log_loss(z, y) * one, p * one, (labelled & ~finite).double(), (labelled & ~binary).double())
    start = len(_SCALARS)
    sums_S[:start] += torch.stack([x.sum() for x in counts])
    scaled = ((z + LOGIT_RANGE) * (LOGIT_BINS / (2 * LOGIT_RANGE))).floor().clamp(0, LOGIT_BINS - 1).long()
    sums_S.index_add_(0, start + scaled + LOGIT_BINS * y.long(), one)
    # As scikit-learn's bins: each with its upper edge.
    start += 2 * LOGIT_BINS
    edges = torch.linspace(0, 1, CALIBRATION_BINS + 1, dtype=torch.float64, device=device)[1:-1]
    at = start + torch.bucketize(p, edges)
    for part in (one, p * one, y):
        sums_S.index_add_(0, at, part)
        at = at + CALIBRATION_BINS


def _parts(sums_S: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(samples by label and bin of the logit [2, H]; samples, predictions, positives by bin of the probability [C])."""
    at = len(_SCALARS) + 2 * LOGIT_BINS
    count, prediction, positives = sums_S[at:].unflatten(0, (3, CALIBRATION_BINS))
    return sums_S[len(_SCALARS) : at].unflatten(0, (2, LOGIT_BINS)), count, prediction, positives


def _figures(sums_S: Tensor) -> TaskQuality:
    n, p, loss, prediction, not_finite, not_binary = sums_S[: len(_SCALARS)].tolist()
    by_label_2H, _, predicted, positives = _parts(sums_S)
    figures: dict[str, float] = dict.fromkeys(("ne", "auc", "auc_error", "calibration", "ece", "log_loss"), math.nan)
    undefined: dict[str, str] = {}
    if not_binary or not_finite:
        what = f"{not_binary:.0f} labels neither 0, 1 nor NaN" if not_binary else f"{not_finite:.0f} logits not finite"
        undefined = dict.fromkeys(figures, what)
    elif not n:
        undefined = dict.fromkeys(figures, "no samples")
    else:
        figures["log_loss"] = loss / n
        figures["ece"] = float((predicted - positives).abs().sum()) / n
        if p:
            figures["calibration"] = prediction / p
        else:
            undefined["calibration"] = "no positives"
        if 0 < p < n:
            rate = p / n
            figures["ne"] = loss / n / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
            negative, positive = by_label_2H
            below, ties = negative.cumsum(0) - negative, negative * positive
            figures["auc"] = float((positive * below + ties / 2).sum()) / p / (n - p)
            figures["auc_error"] = float(ties.sum()) / 2 / p / (n - p)
        else:
            undefined |= dict.fromkeys(("ne", "auc", "auc_error"), "no positives" if not p else "no negatives")
    return TaskQuality(**figures, samples=int(n), positives=int(p), undefined=undefined)  # type: ignore[typeddict-item]
