"""Training by hostile hands: runs that diverge, full disks, two runs in one folder, other data under the same names."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gem.errors import RequestError
from gem.train.config import parse_config
from gem.train.loop import Health, Run
from gem.train.records import Listener, Result
from gem.train.world import join

CONFIG = {
    "data": {
        "kind": "synthetic",
        "train": {
            "samples": 512, "chunk": 128, "audience": {"kind": "uniform", "min": 0, "max": 4, "seed": 0},
            "history": {"kind": "uniform", "min": 0, "max": 8, "seed": 0},
        },
        "valid_samples": 128,
    },
    "reader": {"batch": 32, "base": 16, "pool": 4}, "steps": 6, "log_every": 2, "checkpoint_every": 2, "warmup": 1,
    "model": {"layers": 1, "experts": 1, "dim": 32, "expert_hidden": 32},
}  # fmt: skip


class Told(Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def train(folder: Path, told: Listener | None = None, **changes: Any) -> Result:
    with join("cpu") as world:
        return Run(parse_config(CONFIG | changes, "test"), folder, world, told).train()


def refused(folder: Path, **changes: Any) -> str:
    with pytest.raises(RequestError) as caught:
        train(folder, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def gem(*arguments: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gem", "train", *arguments, "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, **changes)


def written(path: Path, **changes: Any) -> str:
    """A TOML file of CONFIG: JSON but for the outermost braces."""
    path.write_text("".join(f"{name} = {toml(value)}\n" for name, value in (CONFIG | changes).items()))
    return str(path)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)


# -- runs that diverge -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_run_that_diverges_ends_and_keeps_its_good_checkpoints(tmp_path, clip):
    train(tmp_path, steps=4, clip=clip)
    assert steps(tmp_path) == ["step-000002", "step-000004"]
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "lr": 1e30
    }  # the same run, as far as the folder says
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refused(tmp_path, steps=20, lr=1e30, clip=clip)
    assert "step 6: loss nan" in message and str(tmp_path / "checkpoints" / "step-000004") in message
    assert steps(tmp_path) == ["step-000002", "step-000004"]


def test_weights_that_overflow_in_the_last_step_are_not_saved(tmp_path):
    message = refused(tmp_path, steps=1, lr=1e38, clip=None)
    assert "weights after step 1 are not finite" in message and "no checkpoint was saved before" in message
    assert steps(tmp_path) == []


def test_health_names_the_first_step_and_its_figures():
    health, one = Health(torch.device("cpu")), torch.tensor(1.0)
    for loss, norm in ((1.0, 1.0), (2.0, 3.0), (4.0, float("inf")), (float("nan"), 1.0), (1.0, 1.0)):
        health.note(one * loss, one * norm)
    assert health.fault() == (2, 4.0, float("inf"))
    health = Health(torch.device("cpu"))
    health.note(one, None)
    assert health.fault() is None


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"lr": float("nan")}, "lr = nan"), ({"clip": float("inf")}, "clip = inf"),
        ({"model": {"feed_forward": float("nan")}}, "model.feed_forward = nan"),
        ({"data": {"kind": "synthetic", "train": {"drift": float("nan")}}}, "data.train.drift = nan"),
    ],
)  # fmt: skip
def test_a_number_that_is_none_is_refused(changes, field):
    with pytest.raises(RequestError, match=f"{field}; accepted: a finite number"):
        parse_config(CONFIG | changes, "test")


def test_a_figure_that_is_not_defined_is_exit_1(tmp_path):
    """Two samples to validate on: no AUC of labels of one kind."""
    data = CONFIG["data"] | {"valid_samples": 2}
    done = gem(written(tmp_path / "a.toml", data=data, steps=2), "--out", str(tmp_path / "out"))
    assert "errored" in done.stdout and done.returncode == 1, done.stderr
