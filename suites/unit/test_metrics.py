"""NE, AUC, calibration and log loss against scikit-learn, hand values and laws: any split merges to the same."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from sklearn.calibration import calibration_curve
from torch import Tensor

from gem.errors import RequestError
from gem.train.metrics import LOGIT_BINS, LOGIT_RANGE, Quality, TaskQuality, auc, log_loss

FIGURES = ("ne", "auc", "auc_error", "calibration", "ece", "log_loss")


def quality(logits: Tensor, labels: Tensor) -> TaskQuality:
    found = Quality(["ctr"])
    found.update({"ctr": logits}, {"ctr": labels})
    return found.compute()["ctr"]


def drawn(n: int, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits that say something of their labels, and labels of which every eleventh is missing."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=draw) * spread - 1
    labels = (torch.rand(n, generator=draw) < torch.sigmoid(0.7 * logits + 0.2)).float()
    labels[::11] = math.nan
    return logits, labels


@st.composite
def batches(draw) -> tuple[Tensor, Tensor]:
    n = draw(st.integers(0, 60))
    logit = st.floats(-30, 30, width=32) | st.integers(-3, 3).map(float)
    logits = torch.tensor(draw(st.lists(logit, min_size=n, max_size=n)), dtype=torch.float32)
    labels = draw(st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=n, max_size=n))
    return logits, torch.tensor(labels, dtype=torch.float32)


# -- against scikit-learn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_agrees_with_scikit_learn(dtype):
    logits, labels = drawn(20_000)
    logits = logits.to(dtype)
    found = quality(logits, labels)
    known = ~labels.isnan()
    y, p = labels[known].numpy(), torch.sigmoid(logits[known].double()).numpy()
    loss, base = metrics.log_loss(y, p), metrics.log_loss(y, np.full(len(y), y.mean(dtype=np.float64)))
    assert found["log_loss"] == pytest.approx(loss, rel=1e-12)
    assert found["ne"] == pytest.approx(loss / base, rel=1e-9)
    assert found["calibration"] == pytest.approx(p.mean() / y.mean(dtype=np.float64), rel=1e-12)
    assert (found["samples"], found["positives"]) == (len(y), int(y.sum()))
    exact = metrics.roc_auc_score(y, p)
    assert auc(logits, labels) == pytest.approx(exact, abs=1e-12)
    assert abs(found["auc"] - exact) <= found["auc_error"] < 5e-4
    assert found["undefined"] == {}


def test_calibration_curve_is_scikit_learns():
    logits, labels = drawn(5000, spread=4.0)
    found = Quality(["ctr"])
    found.update({"ctr": logits}, {"ctr": labels})
    rate, mean, count = found.calibration_curve("ctr")
    known = ~labels.isnan()
    y, p = labels[known].numpy(), torch.sigmoid(logits[known].double()).numpy()
    rate_sk, mean_sk = calibration_curve(y, p, n_bins=15)
    np.testing.assert_allclose(rate.numpy(), rate_sk, rtol=1e-12)
    np.testing.assert_allclose(mean.numpy(), mean_sk, rtol=1e-12)
    assert int(count.sum()) == len(y)
    ece = float((count * (rate - mean).abs()).sum()) / len(y)
    assert found.compute()["ctr"]["ece"] == pytest.approx(ece, rel=1e-9)


@given(batches())
def test_auc_is_exact_and_the_binned_one_within_its_bound(batch):
    logits, labels = batch
    known = ~labels.isnan()
    y, z = labels[known], logits[known]
    found = quality(logits, labels)
    if len(set(y.tolist())) < 2:
        assert math.isnan(auc(logits, labels)) and math.isnan(found["auc"])
        return
    above = (z[y == 1, None] > z[y == 0]).double() + 0.5 * (z[y == 1, None] == z[y == 0]).double()
    assert auc(logits, labels) == pytest.approx(float(above.mean()), abs=1e-12)
    assert abs(found["auc"] - float(above.mean())) <= found["auc_error"] + 1e-12


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_hand_values():
    """p = 3/4, 3/4, 1/4 with labels 1, 0, 0; a fourth has no label."""
    found = quality(
        torch.tensor([math.log(3), math.log(3), -math.log(3), 50.0], dtype=torch.float64),
        torch.tensor([1, 0, 0, math.nan]),
    )
    loss = (math.log(4 / 3) + math.log(4) + math.log(4 / 3)) / 3
    base = (math.log(3) + 2 * math.log(3 / 2)) / 3
    assert found["log_loss"] == pytest.approx(loss) and found["ne"] == pytest.approx(loss / base)
    assert found["auc"] == 0.75 and found["auc_error"] == 0.25  # the tie is a real one, which bins cannot know
    assert found["calibration"] == pytest.approx((3 / 4 + 3 / 4 + 1 / 4) / 1)
    # Two of mean prediction 3/4 and rate 1/2; one of prediction 1/4 and rate 0.
    assert found["ece"] == pytest.approx((2 * 0.25 + 0.25) / 3)


@pytest.mark.parametrize("positives, n", [(1, 2), (3, 1000), (999, 1000), (17, 40)])
def test_predicting_the_base_rate_has_ne_1(positives, n):
    labels = (torch.arange(n) < positives).float()
    rate = positives / n
    found = quality(torch.full((n,), math.log(rate / (1 - rate)), dtype=torch.float64), labels)
    assert found["ne"] == pytest.approx(1, rel=1e-12) and found["calibration"] == pytest.approx(1, rel=1e-12)
    assert found["auc"] == 0.5 and found["ece"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_extreme_logits_cost_what_they_say(dtype):
    logits = torch.tensor([1e4, -1e4, 1e4, -1e4]).to(dtype)
    right = log_loss(logits, torch.tensor([1.0, 0, 1, 0]))
    wrong = log_loss(logits, torch.tensor([0.0, 1, 0, 1]))
    assert right.tolist() == [0.0] * 4 and wrong.tolist() == logits.double().abs().tolist()
    found = quality(logits, torch.tensor([0.0, 1, 1, 0]))
    assert found["log_loss"] == pytest.approx(float(logits[0]) / 2) and math.isfinite(found["ne"])
    assert found["auc"] == 0.5  # one pair right, one wrong, two ties
    small = log_loss(torch.tensor([30.0], dtype=torch.float64), torch.tensor([1.0]))
    assert float(small) == pytest.approx(math.exp(-30), rel=1e-12)  # not lost beside 1


def test_low_precision_sums_are_not():
    """A million small losses of bf16 logits add up as if each were kept."""
    n = 1_000_000
    found = quality(torch.full((n,), -6.0, dtype=torch.bfloat16), torch.arange(n) % 400 == 0)
    assert found["log_loss"] == pytest.approx(math.log1p(math.exp(-6)) + 6 / 400, rel=1e-10)


# -- what is not defined -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "logits, labels, undefined, reason",
    [
        ([], [], set(FIGURES), "no samples"),
        ([1.0, 2.0], [math.nan, math.nan], set(FIGURES), "no samples"),
        ([1.0, 2.0], [0, 0], {"ne", "auc", "auc_error", "calibration"}, "no positives"),
        ([1.0, 2.0], [1, 1], {"ne", "auc", "auc_error"}, "no negatives"),
        ([1.0, math.nan, 2.0], [1, 0, 0], set(FIGURES), "1 logits not finite"),
        ([1.0, math.inf, 2.0], [1, 1, 0], set(FIGURES), "1 logits not finite"),
        ([1.0, 2.0, 3.0], [1, 0, 0.5], set(FIGURES), "1 labels neither 0, 1 nor NaN"),
    ],
)
def test_undefined_is_nan_with_a_reason(logits, labels, undefined, reason):
    found = quality(torch.tensor(logits), torch.tensor(labels, dtype=torch.float32))
    assert {name for name in FIGURES if math.isnan(found[name])} == undefined
    assert found["undefined"] == dict.fromkeys(undefined, reason)


def test_a_logit_without_a_label_may_be_anything():
    found = quality(torch.tensor([math.nan, 1.0, -1.0]), torch.tensor([math.nan, 1, 0]))
    assert found["auc"] == 1.0 and found["undefined"] == {} and found["samples"] == 2


# -- merging -----------------------------------------------------------------------------------------------------------


def assert_same(one: TaskQuality, other: TaskQuality) -> None:
    assert (one["samples"], one["positives"], one["undefined"]) == (
        other["samples"], other["positives"], other["undefined"]
    )  # fmt: skip
    for name in FIGURES:
        assert one[name] == pytest.approx(other[name], rel=1e-12, abs=1e-15, nan_ok=True), name


@given(batches(), st.lists(st.integers(0, 60), max_size=5), st.booleans())
def test_any_split_merges_to_the_same(batch, cuts, reduced):
    logits, labels = batch
    whole = Quality(["ctr", "cvr"])
    whole.update({"ctr": logits, "cvr": -logits}, {"ctr": labels, "cvr": 1 - labels})
    edges = sorted({0, len(labels), *(min(cut, len(labels)) for cut in cuts)})
    ranks = []
    for low, high in zip([0, *edges], edges, strict=False):
        z, y = logits[low:high], labels[low:high]
        ranks.append(Quality(["ctr", "cvr"]))
        ranks[-1].update({"ctr": z, "cvr": -z}, {"ctr": y, "cvr": 1 - y})
    if reduced:
        total = Quality.from_state(["ctr", "cvr"], torch.stack([rank.state() for rank in ranks]).sum(0))
    else:
        total = Quality(["ctr", "cvr"])
        for rank in ranks:
            total.merge(rank)
    for task in ("ctr", "cvr"):
        assert_same(total.compute()[task], whole.compute()[task])


def test_the_state_is_a_copy():
    found = Quality(["ctr"])
    state = found.state()
    found.update({"ctr": torch.zeros(3)}, {"ctr": torch.ones(3)})
    assert float(state.sum()) == 0 and Quality.from_state(["ctr"], found.state()).compute()["ctr"]["samples"] == 3


def test_bins_are_fine_enough_to_tell_neighbours():
    width = 2 * LOGIT_RANGE / LOGIT_BINS
    found = quality(torch.tensor([0.5 * width, 1.5 * width]), torch.tensor([0.0, 1]))
    assert (found["auc"], found["auc_error"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "ask, said",
    [
        (lambda: Quality([]), "tasks"),
        (lambda: Quality(["a", "a"]), "each once"),
        (lambda: Quality(["a"]).update({"b": torch.zeros(1)}, {"a": torch.zeros(1)}), "logits of"),
        (lambda: Quality(["a"]).update({"a": torch.zeros(2)}, {"a": torch.zeros(1)}), "both [B]"),
        (lambda: Quality(["a"]).merge(Quality(["b"])), "the same tasks"),
        (lambda: Quality.from_state(["a"], Quality(["a", "b"]).state()), "accepted: float64"),
        (lambda: Quality(["a"]).calibration_curve("b"), "task 'b'"),
    ],
)
def test_requests_that_make_no_sense(ask, said):
    with pytest.raises(RequestError, match="quality: ") as refused:
        ask()
    assert said in str(refused.value) and "accepted" in str(refused.value)
