"""Checkpoints: killed while they save, damaged, on other numbers of ranks, and training that goes on bit by bit."""

import copy
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_program
import numpy as np
import pytest
import torch
from checkpoint_program import fails, state_of, value_of
from torch import nn
from torch.nn import Parameter

from gem.train import checkpoint_plans
from gem.train.checkpoint import Checkpoints, rng_state, set_rng_state
from gem.train.optimizers import DenseState, RowwiseAdagrad, clip, dense_optimizer, lookup

# -- save and load -----------------------------------------------------------------------------------------------------


def test_what_was_saved_is_loaded_in_place(tmp_path):
    checkpoints, state = Checkpoints(tmp_path), state_of(0)
    assert checkpoints.load(state) is None and checkpoints.latest() is None and checkpoints.steps() == []
    path = checkpoints.save(7, state_of(7))
    assert path == checkpoints.latest() == tmp_path / "step-000007"
    weight = state["model"]["weight"]
    assert checkpoints.load(state) == 7
    assert value_of(state) == 7 and state["model"]["weight"] is weight and weight[0, 0] == 7


def test_the_newest_stay_and_any_can_be_named(tmp_path):
    checkpoints, state = Checkpoints(tmp_path, keep=3), state_of(0)
    for step in (1, 5, 9, 1_000_000, 1_000_001):
        checkpoints.save(step, state_of(step))
    assert checkpoints.steps() == [9, 1_000_000, 1_000_001]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000009", "step-1000000", "step-1000001"]
    assert checkpoints.load(state, step=9) == 9 and value_of(state) == 9
    assert checkpoints.load(state) == 1_000_001 and value_of(state) == 1_000_001
    fails(lambda: checkpoints.load(state, step=5), "no checkpoint of step 5; accepted: 9, 1000000, 1000001")


def test_a_step_can_be_saved_again_and_an_earlier_one_after_forgetting(tmp_path):
    checkpoints, state = Checkpoints(tmp_path, keep=2), state_of(0)
    for step, value in ((3, 3), (4, 4), (4, 40)):
        checkpoints.save(step, state_of(value))
    assert checkpoints.load(state) == 4 and value_of(state) == 40 and checkpoints.steps() == [3, 4]
    fails(lambda: checkpoints.save(3, state_of(3)), "save of step 3; accepted: 4 or more", "forget_after(3)")
    checkpoints.forget_after(3)
    assert checkpoints.steps() == [3]
    checkpoints.save(3, state_of(30))
    assert checkpoints.load(state) == 3 and value_of(state) == 30
    fails(lambda: checkpoints.save(-1, state_of(1)), "step -1; accepted: 0 or more")
    fails(lambda: Checkpoints(tmp_path, keep=0), "keep 0")


def test_what_one_rank_cannot_read_back_fails_on_all_and_leaves_nothing(tmp_path, monkeypatch):
    """As on two ranks: what this one tells, and what it does when the other has told."""
    fault, told = OSError(5, "Input/output error"), []

    def seal(path: Path) -> list[int]:
        raise fault

    def gather(checkpoints: Checkpoints, value: Any) -> list[Any]:
        told.append(value)
        return [({}, None), value]

    with monkeypatch.context() as patch:
        patch.setattr("gem.train.checkpoint._seal", seal)
        patch.setattr(Checkpoints, "_gather", gather)
        fails(lambda: Checkpoints(tmp_path).save(1, state_of(1)), "cannot be written: Input/output error")
    assert told == [({}, fault)] and list(tmp_path.iterdir()) == []


def test_what_a_kill_leaves_is_never_loaded_and_removed_by_the_next_save(tmp_path):
    checkpoints, state = Checkpoints(tmp_path), state_of(0)
    shutil.copytree(checkpoints.save(1, state_of(1)), tmp_path / "step-000002.part")
    assert checkpoints.load(state) == 1
    # Between the two renames of a replacement there is only the old one.
    (tmp_path / "step-000001").rename(tmp_path / "step-000001.old")
    assert checkpoints.load(state) == 1 and value_of(state) == 1
    checkpoints.save(3, state_of(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001.old", "step-000003"]
    checkpoints.save(4, state_of(4))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_what_is_half_removed_is_no_checkpoint(tmp_path, monkeypatch):
    """As a kill would, stop after one file of each folder that is to go: of an old, a replaced and a forgotten one."""
    checkpoints, remove = Checkpoints(tmp_path, keep=1), shutil.rmtree

    def stopped(path: Path, **_: Any) -> None:
        if path.exists():
            next(p for p in path.iterdir() if p.name.endswith(".distcp")).unlink()
            raise InterruptedError

    def left(act: Callable[[], Any]) -> list[int]:
        monkeypatch.setattr(shutil, "rmtree", stopped)
        with pytest.raises(InterruptedError):
            act()
        monkeypatch.setattr(shutil, "rmtree", remove)
        found = checkpoints.steps()
        assert [checkpoints.load(state_of(0), step=step) for step in found] == found
        return found

    checkpoints.save(1, state_of(1))
    assert left(lambda: checkpoints.save(2, state_of(2))) == [2]
    remove(tmp_path / "step-000001.part")
    assert left(lambda: checkpoints.save(2, state_of(3))) == [2]
    checkpoints.save(2, state_of(4))
    assert left(lambda: checkpoints.forget_after(1)) == []


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damage_is_named_before_anything_is_loaded(tmp_path, file, damage):
    checkpoints, state = Checkpoints(tmp_path), state_of(0)
    checkpoints.save(1, state_of(1))
    path = checkpoints.save(2, state_of(2)) / file
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "flip":
        data[len(data) // 2 if file != "manifest.json" else data.index(b'"step"') + 8] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    fails(
        lambda: checkpoints.load(state),
        f"{tmp_path}/step-000002: damaged: {file}",
        "accepted: that of step 1: load(step=1)",
    )
    assert value_of(state) == 0
    assert checkpoints.load(state, step=1) == 1 and value_of(state) == 1
    checkpoints.forget_after(1)
    assert checkpoints.load(state) == 1
    (tmp_path / "step-000001" / "__0_0.distcp").unlink()
    fails(lambda: checkpoints.load(state), "__0_0.distcp is missing", "none is before it")


def test_a_state_that_does_not_match_is_refused_untouched(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_of(1))
    more, less, shape, dtype, kind = (state_of(0) for _ in range(5))
    more["model"]["other"] = torch.zeros(1)
    del less["model"]["bias"]
    shape["model"]["weight"] = torch.zeros(300, 9, dtype=torch.int64)
    dtype["model"]["weight"] = torch.zeros(300, 8)
    kind["reader"]["position"] = torch.zeros(())
    for state, words in (
        (more, "model.other only in the state"), (less, "model.bias.deep only in the checkpoint"),
        (shape, "torch.int64 [300, 8] was saved; accepted: the same in the state, not torch.int64 [300, 9]"),
        (dtype, "not torch.float32 [300, 8]"), (kind, "reader.position: no tensor was saved"),
    ):  # fmt: skip
        fails(lambda state=state: checkpoints.load(state), "step-000001", words)
        assert not state["model"]["weight"].any()
    plain = torch.optim.AdamW([parameter := Parameter(torch.ones(2))])
    parameter.grad = torch.ones(2)
    plain.step()
    for bad, words in (
        ({"a": {0: torch.zeros(1)}}, "state.a: key 0; accepted: names"), ({"a": plain}, "DenseState"),
        ({"a": {"deep": plain}}, "state.a.deep: AdamW; accepted: its state_dict()"),
        ({"a": 3}, "state.a: int; accepted: a dict, or an object with state_dict"),
    ):  # fmt: skip
        fails(lambda bad=bad: checkpoints.save(2, bad), words)


def test_tensors_of_all_kinds_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_plans, "PIECE_BYTES", 64)
    draw = torch.Generator().manual_seed(0)
    kinds = {
        "matrix": torch.randn(37, 5, generator=draw), "view": torch.randn(8, 60, generator=draw).t()[3:40],
        "half": torch.randn(100, generator=draw).bfloat16(), "deep": torch.randn(9, 2, 3, 2),
        "whole": torch.arange(100), "flags": torch.arange(90) % 3 == 0, "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4), "flat": torch.zeros(4, 0),
    }  # fmt: skip
    path = Checkpoints(tmp_path).save(
        1, {"t": {name: x.clone() for name, x in kinds.items()} | {"view": kinds["view"]}}
    )
    loaded = {"t": {name: torch.zeros_like(x) for name, x in kinds.items()}}
    assert Checkpoints(tmp_path).load(loaded) == 1
    for name, x in kinds.items():
        assert torch.equal(loaded["t"][name], x), name
    metadata = entries_of(path)
    assert len(metadata["t.matrix"].chunks) == 13 and len(metadata["t.scalar"].chunks) == 1


def entries_of(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(path).read_metadata().state_dict_metadata


def test_values_of_this_rank_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_of(1), own={"rng": {"a": (1, [2], np.arange(3))}, "reader": {0: "x"}})
    own: dict[str, Any] = {}
    assert checkpoints.load(state_of(0), own) == 1
    assert own["reader"] == {0: "x"} and own["rng"]["a"][2].tolist() == [0, 1, 2]
    assert checkpoints.load(state_of(0)) == 1


def test_random_numbers_go_on_where_they_were():
    def draw() -> list[float]:
        return [
            random.random(),
            float(np.random.rand()),
            float(torch.rand(())),
            float(torch.nn.Dropout()(torch.ones(99)).sum()),
        ]

    state = copy.deepcopy(rng_state())
    first = draw()
    assert draw() != first
    set_rng_state(state)
    assert draw() == first
    if not torch.cuda.is_available():
        fails(lambda: set_rng_state({**state, "cuda": torch.zeros(16, dtype=torch.uint8)}), "no GPU here")


# -- exact resume ------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A table, dropout and a head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = Parameter(torch.randn(50, 8).to(dtype))
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 1))


class Run:
    """A small training run of everything that has a state."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model = Tiny(dtype)
        self.tables = RowwiseAdagrad({"table": self.model.table}, lr=0.1)
        self.dense = dense_optimizer(self.model.head.named_parameters(), lr=0.01)
        self.metrics = {"loss": torch.zeros((), dtype=torch.float64)}
        self.checkpoints, self.position = Checkpoints(folder), 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "tables": self.tables, "dense": DenseState(self.dense), "metrics": self.metrics}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            ids = torch.randint(50, (32, 3))
            self.tables.zero_grad()
            self.dense.zero_grad()
            loss = (
                self.model.head(lookup(ids, self.model.table, torch.float32).mean(1)).square().mean() * random.random()
            )
            loss.backward()
            _, scale = clip(self.model.head.parameters(), 0.1, self.tables)
            self.tables.step(scale)
            self.dense.step()
            self.metrics["loss"] += loss.detach().double()
            self.position += 1

    def save(self) -> None:
        self.checkpoints.save(
            self.position, self.state(), own={"rng": rng_state(), "reader": {"position": self.position}}
        )

    def resume(self) -> None:
        own: dict[str, Any] = {}
        assert self.checkpoints.load(self.state(), own) == own["reader"]["position"]
        self.position = own["reader"]["position"]
        set_rng_state(own["rng"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_bit_by_bit(tmp_path, dtype):
    straight = Run(tmp_path, dtype)
    straight.train(4)
    straight.save()
    straight.train(4)

    again = Run(tmp_path, dtype)
    owned = [again.model.table.data_ptr(), again.tables.sums["table"].data_ptr()]
    again.resume()
    assert again.position == 4
    assert owned == [again.model.table.data_ptr(), again.tables.sums["table"].data_ptr()]
    again.train(4)

    assert torch.equal(straight.metrics["loss"], again.metrics["loss"])
    for (name, a), b in zip(straight.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for name in ("sums", "rests"):
        for a, b in zip(getattr(straight.tables, name).values(), getattr(again.tables, name).values(), strict=True):
            assert torch.equal(a, b)

    fresh = Run(tmp_path, dtype)  # without what the checkpoint held it would have gone elsewhere
    fresh.train(4)
    assert not torch.equal(fresh.model.table, straight.model.table)


# -- whole processes ---------------------------------------------------------------------------------------------------


def program(*arguments: object, timeout: float = 120) -> str:
    """Output of checkpoint_program.py."""
    command = [sys.executable, checkpoint_program.__file__, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_at_any_moment_a_usable_checkpoint_is_left(tmp_path):
    """60 kills; most strike in the middle of a save, as the folders that they leave show."""
    said = program("kill", tmp_path, 60)
    found = re.search(r"kills 60 in-save (\d+) reached (\d+)", said)
    assert found, said
    assert int(found[1]) >= 15 and int(found[2]) >= 30


def test_ranks_save_and_load_on_other_numbers_of_ranks(tmp_path):
    program("ranks", tmp_path)
    written = list((tmp_path / "two" / "step-000005").glob("*.distcp"))
    assert len(written) == 2  # each tensor once, by either rank
    assert sum(p.stat().st_size for p in written) < 1.5 * 4 * 1000 * 100


def test_no_second_copy_in_memory(tmp_path):
    """400 MB are saved and loaded with less than 150 MB more than they take."""
    more = [int(x) for x in program("memory", tmp_path).split()]
    assert max(more) < 150, more
