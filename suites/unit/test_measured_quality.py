"""The declared quality of training: what a case says is what is trained, and its metrics are those of the run."""

from pathlib import Path
from typing import Any

import pytest

from gem.errors import RequestError
from gem.harness.case import MeasuredCase, build_cases
from gem.harness.measured import Metric
from gem.harness.measured_params import QualityParams
from gem.harness.results import Row
from gem.harness.runner import RunOptions, run
from gem.harness.subject_quality import TrainedModel, config_of
from gem.harness.suites import load_suite
from gem.train.config import SyntheticData

SUITE = Path(__file__).resolve().parents[1] / "quality" / "quality.toml"
SMALL: dict[str, Any] = {
    "model": {
        "dim": 16, "heads": 1, "head_dim": 16, "layers": 1, "experts": 1, "interactions": ["products"],
        "expert_hidden": 16, "pooled": 1, "head_hidden": 16,
    },
    "data": {"history": {"kind": "uniform", "min": 0, "max": 8, "seed": 0}, "users": 16, "items": 16},
    "batch": 64, "valid_samples": 512, "warmup": 5, "lr": 0.01,
}  # fmt: skip


def measure(told: list[tuple[int, int]] | None = None, **params: Any) -> dict[str, Metric]:
    reports = told if told is not None else []
    found = TrainedModel().measure(
        QualityParams(**(SMALL | params)), "cpu", lambda done, total: reports.append((done, total))
    )
    return {one.name: one for one in found}


def declare(params: dict[str, Any]) -> MeasuredCase:
    document = {"suite": {"kind": "quality", "subject": "quality"}, "case": [{"name": "a", "params": params}]}
    (case,) = build_cases(document, file=SUITE, label=SUITE, fixtures=frozenset())
    assert isinstance(case, MeasuredCase)
    return case


def test_what_is_declared_is_what_is_trained() -> None:
    config = config_of(QualityParams(**SMALL, steps=7, seed=3, precision="bf16"))
    assert (config.steps, config.reader.batch, config.seed, config.precision, config.lr) == (7, 64, 3, "bf16", 0.01)
    assert isinstance(config.data, SyntheticData)
    assert (config.data.train.samples, config.data.train.users, config.data.valid_samples) == (7 * 64, 16, 512)
    assert config.data.train.seed == 3 != config.data.valid().seed and config.sizes().dim == 16
    assert QualityParams().preset == "tiny" and config_of(QualityParams()).sizes().dim == 64


def test_training_comes_nearer_to_the_floor_and_says_so() -> None:
    told: list[tuple[int, int]] = []
    short, long = measure(steps=2), measure(told, steps=60)
    for found in (short, long):
        assert list(found) == ["ne", "ne_floor", "ne_above_floor", "auc", "calibration"]
        above = found["ne"].value / found["ne_floor"].value - 1
        assert found["ne_above_floor"].value == pytest.approx(above) and above > -0.05
        assert 0 <= found["auc"].value <= 1 and found["calibration"].value >= 0
    assert long["ne_floor"].value == short["ne_floor"].value < 1  # of the same samples, whatever was learnt
    assert long["ne"].value < short["ne"].value and long["auc"].value > 0.6
    assert told[-1] == (60, 60) and len(told) >= 10 and [done for done, _ in told] == sorted(done for done, _ in told)
    assert "512 samples judged" in long["ne"].note


def test_the_same_seed_learns_the_same_and_another_does_not() -> None:
    assert measure(steps=3)["ne"].value == measure(steps=3)["ne"].value
    assert measure(steps=3)["ne"].value != measure(steps=3, seed=1)["ne"].value


def test_the_task_decides() -> None:
    assert measure(steps=2, task="cvr")["ne_floor"].value != measure(steps=2)["ne_floor"].value


def rows_of(params: dict[str, Any]) -> list[Row]:
    return run([declare(params)], options=RunOptions(device="cpu")).rows


def test_sizes_that_there_are_not_are_one_line_of_a_row() -> None:
    (bad,) = rows_of(SMALL | {"steps": 1, "model": {"dims": 16}})
    assert bad.status == "error" and "dims" in bad.reason and "\n" not in bad.reason
    (bad,) = rows_of(SMALL | {"steps": 1, "preset": "tyni"})
    assert bad.status == "error" and "tyni" in bad.reason and "tiny" in bad.reason


def test_what_is_not_defined_is_no_pass() -> None:
    rows = rows_of(SMALL | {"steps": 1, "valid_samples": 1})  # one sample has one class: no NE, no AUC
    assert {row.metric: row.status for row in rows if row.metric in ("ne", "auc")} == {"ne": "error", "auc": "error"}
    assert all(row.value is None for row in rows if row.metric in ("ne", "auc", "ne_above_floor"))
    assert any("no positives" in row.reason or "no negatives" in row.reason for row in rows)


def test_a_param_is_said_once() -> None:
    for params, text in (({"model": {"preset": "tiny"}}, "model.preset"), ({"data": {"samples": 4}}, "data.samples")):
        with pytest.raises(RequestError, match=text):
            declare(params)


@pytest.mark.parametrize("suite", ["quality", "floor"])
def test_the_suites_are_declared(suite: str) -> None:
    for case in load_suite(SUITE.with_stem(suite)):
        assert isinstance(case, MeasuredCase) and isinstance(case.params, QualityParams)
        config_of(case.params)  # its sizes exist
