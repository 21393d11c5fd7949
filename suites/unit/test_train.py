"""Training: exact by seed, resumable to the bit from wherever it was killed, the same on ranks as on one."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from model_data import small_schema
from train_program import batch

from gem.efficiency import Part, local_mfu, mfu, waterfall
from gem.errors import RequestError
from gem.train.clock import StageClock
from gem.train.config import load_config, parse_config
from gem.train.local import measure_parts
from gem.train.loop import Run
from gem.train.records import Efficiency, Listener, Result
from gem.train.step import Stepper
from gem.train.world import World, join

HERE = Path(__file__).parent
DATA = {
    "kind": "synthetic",
    "train": {
        "samples": 2048, "chunk": 256, "audience": {"kind": "uniform", "min": 0, "max": 6, "seed": 0},
        "history": {"kind": "lognormal", "median": 6.0, "sigma": 0.7, "min": 0, "max": 20, "seed": 0},
    },
    "valid_samples": 256,
}  # fmt: skip
CONFIG = {
    "data": DATA, "reader": {"batch": 64, "base": 16, "pool": 16}, "steps": 12, "log_every": 4, "checkpoint_every": 5,
    "warmup": 3, "model": {"layers": 1, "experts": 1, "dim": 32, "expert_hidden": 32},
}  # fmt: skip


class Losses(Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def train(folder: Path, **changes: Any) -> tuple[Result, dict[str, torch.Tensor], Losses]:
    """(result, parameters after it, what was told)."""
    told = Losses()
    with join("cpu") as world:
        run = Run(parse_config(CONFIG | changes, "test"), folder, world, told)
        result = run.train()
    return result, {name: x.clone() for name, x in run.stepper.model.state_dict().items()}, told


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- exactness ---------------------------------------------------------------------------------------------------------


def test_one_seed_gives_one_run_to_the_bit_for_any_workers(tmp_path):
    first, weights, _ = train(tmp_path / "a")
    second, again, _ = train(tmp_path / "b", reader=CONFIG["reader"] | {"workers": 2})
    assert same(weights, again)
    assert [p.loss for p in first.progress] == [p.loss for p in second.progress]
    assert first.evaluations[-1].quality == second.evaluations[-1].quality
    _, other, _ = train(tmp_path / "c", seed=1)
    assert not same(weights, other)


def test_a_run_gone_on_with_is_the_run_that_was_not_stopped(tmp_path):
    _, whole, _ = train(tmp_path / "whole")
    for stop in (5, 7):  # at a checkpoint's step, and past one: the end of a run is saved too
        folder = tmp_path / str(stop)
        train(folder, steps=stop)
        result, resumed, told = train(folder)
        assert result.resumed_at == stop and result.steps == 12
        assert any("going on" in line for line in told.lines)
        assert same(whole, resumed)
    result, after, _ = train(tmp_path / "whole")  # nothing left to do
    assert result.resumed_at == 12 and result.progress == [] and same(whole, after)


def test_a_run_killed_at_any_moment_goes_on_to_the_same_end(tmp_path):
    """A real process and a real SIGKILL, each time a little later, until one comes through."""
    changes = {"checkpoint_every": 1, "steps": 6}
    _, whole, _ = train(tmp_path / "whole", **changes)
    config, folder = tmp_path / "run.json", tmp_path / "killed"
    config.write_text(json.dumps(CONFIG | changes))
    program = (
        "import json, sys; from pathlib import Path; from gem.train.config import parse_config; "
        "from gem.train.loop import Run; from gem.train.world import join\n"
        "with join('cpu') as world: Run(parse_config(json.loads(Path(sys.argv[1]).read_text()), 'test'), "
        "Path(sys.argv[2]), world).train()"
    )
    generator, kills = random.Random(1), 0
    checkpoints = folder / "checkpoints"
    for _ in range(20):
        child = subprocess.Popen([sys.executable, "-c", program, str(config), str(folder)])
        before = set(checkpoints.iterdir()) if checkpoints.is_dir() else set()
        while child.poll() is None and not (checkpoints.is_dir() and set(checkpoints.iterdir()) - before):
            time.sleep(0.01)
        time.sleep(generator.random())  # in the middle of steps and of saving them
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            kills += 1
        if child.wait() == 0:
            break
    else:
        pytest.fail("no process came through")
    assert kills >= 1
    result, resumed, _ = train(folder, **changes)
    assert result.resumed_at == 6
    assert same(whole, resumed)


def test_ranks_and_pieces_learn_what_one_batch_at_once_teaches(tmp_path):
    """Unequal lengths, clicks and rows touched on the ranks and in the pieces of a batch; clipping by one norm."""
    found = {}
    for ranks, pieces in ((1, 1), (2, 1), (2, 5)):
        out = tmp_path / f"{ranks}-{pieces}.pt"
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone",
            str(HERE / "train_program.py"), str(out), "24", "4", str(pieces),
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr[-2000:]
        found[ranks, pieces] = torch.load(out)
    counts = [batch(0, 24).take(i, i + 12).labels["ctr"].sum().item() for i in (0, 12)]
    assert counts[0] != counts[1]  # CVR has another number of labels on each rank
    whole = found.pop((1, 1))
    for how, other in found.items():
        assert other["losses"] == pytest.approx(whole["losses"], rel=2e-5), how
        for name, x in whole["model"].items():
            torch.testing.assert_close(other["model"][name], x, rtol=1e-3, atol=2e-5, msg=f"{how} {name}")


def test_a_run_in_pieces_learns_the_same(tmp_path):
    """63 pieces of 64 samples too: one of two, the others of one."""
    whole, weights, _ = train(tmp_path / "1", steps=5)
    for pieces in (3, 63):
        result, found, _ = train(tmp_path / str(pieces), steps=5, pieces=pieces)
        assert [p.loss for p in result.progress] == pytest.approx([p.loss for p in whole.progress], rel=1e-5)
        assert result.progress[-1].quality["ctr"]["ne"] == pytest.approx(
            whole.progress[-1].quality["ctr"]["ne"], rel=1e-5
        )
        for name, x in weights.items():
            torch.testing.assert_close(found[name], x, rtol=1e-3, atol=5e-5, msg=name)


def test_batches_split_into_what_they_are_made_of():
    whole = batch(0, 5)
    for pieces in (1, 2, 5, 9):
        cut = whole.split(pieces)
        assert [len(piece) for piece in cut] == {1: [5], 2: [2, 3], 5: [1] * 5, 9: [1] * 5}[pieces]
        assert torch.equal(torch.cat([piece.keys for piece in cut]), whole.keys)
        assert torch.equal(
            torch.cat([p.sequences["history"].ids["item"] for p in cut]), whole.sequences["history"].ids["item"]
        )


def test_learning_gets_below_the_base_rate(tmp_path):
    result, _, _ = train(tmp_path, steps=150, lr=3e-3, table_lr=0.1, checkpoint_every=None, log_every=50)
    found = result.evaluations[-1]
    assert found.quality["ctr"]["ne"] < 0.95
    assert found.floor["ctr"]["realised"] < found.quality["ctr"]["ne"]


# -- what a run says of its efficiency ---------------------------------------------------------------------------------


def test_the_waterfall_adds_up_to_the_step(tmp_path):
    result, _, _ = train(tmp_path)
    found = result.efficiency
    assert isinstance(found, Efficiency)
    assert sum(one.ms for one in found.waterfall) == pytest.approx(found.step_s * 1e3)
    assert found.e2e_mfu == pytest.approx(found.local_mfu * found.scaling_ratio)
    assert found.samples_per_s == pytest.approx(64 / found.step_s, rel=1e-6)
    assert {"tower.0", "interaction.0", "head.ctr"} <= {one.part for one in found.waterfall if one.of == "model"}
    assert all(part.flops > 0 and part.seconds > 0 for part in found.parts)


def test_stages_are_of_a_step_however_many_pieces_it_has():
    clock = StageClock(torch.device("cpu"))
    for _ in range(2):
        clock.start()
        for _ in range(3):  # pieces
            time.sleep(0.02)
            clock.mark("forward")
    assert clock.take()["forward"] == pytest.approx(0.06, rel=0.5)


def test_parts_are_timed_forward_and_backward():
    stepper = Stepper(
        small_schema(), parse_config({"data": {"kind": "synthetic"}}, "test"), World(0, 1, torch.device("cpu"))
    )
    seen = dict.fromkeys(stepper.model.parts(), 0)

    def count(name: str):
        def hook(module, inputs, outputs):
            seen[name] += 1

        return hook

    for name, part in stepper.model.parts().items():
        part.register_full_backward_hook(count(name))
    found = measure_parts(stepper, batch(0, 4), repeats=2)
    assert [part.name for part in found] == list(seen)
    assert set(seen.values()) == {3}  # one that is not counted, and two


def test_who_asks_for_compiled_parts_gets_them():
    alone = World(0, 1, torch.device("cpu"))
    for wanted in (False, True):
        config = parse_config({"data": {"kind": "synthetic"}, "compile": wanted}, "test")
        model = Stepper(small_schema(), config, alone).model
        compiled = [name for name, part in model.parts().items() if part._compiled_call_impl is not None]
        assert compiled == (["events.history", "events.audience", "tower.0", "tower.1"] if wanted else [])


def test_tables_learn_at_the_rate_of_the_schedule():
    config = parse_config({"data": {"kind": "synthetic"}, "warmup": 3, "table_lr": 0.4}, "test")
    stepper = Stepper(small_schema(), config, World(0, 1, torch.device("cpu")))
    rates = []
    for _ in range(5):
        stepper.step(batch(0, 4))
        rates.append(stepper.table_optimizer.lr)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    with pytest.raises(ValueError, match="a batch of no pieces; accepted"):
        stepper.step([])


def test_local_mfu_is_weighted_by_flops_and_slices_add_up():
    parts = [Part("a", 30.0, 1.0), Part("b", 10.0, 2.0)]
    # 3/4 of the FLOPs at 30 / 100, 1/4 at 5 / 100.
    assert local_mfu(parts, 100.0) == pytest.approx(0.75 * 0.30 + 0.25 * 0.05)
    assert mfu(40.0, 4.0, 100.0) == 0.1
    slices = waterfall(parts, step_s=5.0, wait_s=0.5, compute_s=3.5, optimizer_s=0.25, communication_s=0.125)
    by_name = {one.part: one.ms for one in slices}
    assert by_name["lookups, loss, between"] == 500.0
    assert by_name["rest"] == 625.0
    assert sum(by_name.values()) == 5000.0
    with pytest.raises(ValueError, match="no part has FLOPs"):
        local_mfu([Part("a", 0.0, 1.0)], 1.0)


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lr": -1.0}, "lr = -1.0: Input should be greater than 0"),
        ({"learning_rate": 1.0}, "unknown field 'learning_rate'"),
        ({"data": {"kind": "csv"}}, "data.kind = 'csv'; accepted: 'synthetic', 'parquet', 'log'"),
        ({"data": {}}, "missing field 'data.kind'"),
        ({"model": {"preset": "huge"}}, "model preset 'huge'; accepted: tiny"),
        ({"model": {"heads": 0}}, "heads"),
        ({"reader": {"batch": 100, "base": 64}}, "reader.batch 100 is no multiple of reader.base 64"),
        ({"decay": "cosine", "steps": None}, "falls over steps"),
        ({"precision": "fp8"}, "precision = 'fp8'"),
    ],
)
def test_a_wrong_configuration_is_one_line(changes, message):
    with pytest.raises(RequestError) as caught:
        parse_config(CONFIG | changes, "run.toml")
    assert str(caught.value).startswith("run.toml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_word_none_for_what_may_be_nothing():
    nothing = {"data": {"kind": "synthetic"}, "clip": "none", "checkpoint_every": "none", "model": {"keys": "none"}}
    config = parse_config(nothing, "test")
    assert (config.clip, config.checkpoint_every, config.sizes().keys, config.sizes().history) == (
        None,
        None,
        None,
        "history",
    )
    assert parse_config(json.loads(config.model_dump_json()), "test") == config
    assert parse_config({"data": {"kind": "synthetic"}, "plan": "none"}, "test").plan is None
    with pytest.raises(RequestError, match="lr = 'none'"):
        parse_config({"data": {"kind": "synthetic"}, "lr": "none"}, "test")
    assert (
        parse_config({"data": {"kind": "synthetic"}, "reader": {"strategy": "none"}}, "test").reader.strategy == "none"
    )


def test_files_and_changes(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('lr = 0.5\n[data]\nkind = "synthetic"\n')
    assert load_config(path, ("lr=0.25", "reader.batch=256", "precision=bf16")).reader.batch == 256
    assert load_config(path, ("precision=bf16",)).precision == "bf16"
    for change in ("lr", "=1", "lr.x=1"):
        with pytest.raises(RequestError, match="accepted: NAME=VALUE"):
            load_config(path, (change,))
    with pytest.raises(RequestError, match="accepted: a TOML file"):
        load_config(tmp_path / "none.toml")
    path.write_text("lr = ")
    with pytest.raises(RequestError, match="accepted: TOML"):
        load_config(path)


def test_a_folder_keeps_to_its_run(tmp_path):
    train(tmp_path, steps=4)
    with pytest.raises(RequestError, match=r"has a run with lr = 0.001, not 0.01; accepted: the same, or another"):
        train(tmp_path, lr=0.01)
    with join("cpu") as world, pytest.raises(RequestError, match="there is a run already"):
        Run(parse_config(CONFIG, "test"), tmp_path, world).train(resume=False)


def test_too_few_samples_for_a_batch(tmp_path):
    data = DATA | {"train": DATA["train"] | {"samples": 32}}
    with pytest.raises(RequestError, match="32 samples in batches of 64 on 1 ranks; accepted: 64 samples or more"):
        train(tmp_path, data=data)


# -- the command -------------------------------------------------------------------------------------------------------


def test_gem_train_on_a_log_leaves_documents_and_events(tmp_path):
    log, config = tmp_path / "log.csv", tmp_path / "films.toml"
    rows = [(i * 7 % 23, i * 5 % 17, 1 + i * 3 % 5, 1_000_000 + i // 2) for i in range(600)]
    log.write_text("userId,movieId,rating,timestamp\n" + "".join(f"{u},{m},{r},{t}\n" for u, m, r, t in rows))
    config.write_text(
        f'steps = 8\nlog_every = 2\nmodel = {{ layers = 1 }}\n[data]\nkind = "log"\npath = "{log}"\n'
        "[reader]\nbatch = 32\nbase = 8\npool = 8\n"
    )
    out, json_file, html = tmp_path / "out", tmp_path / "r.json", tmp_path / "r.html"
    command = [
        sys.executable, "-m", "gem", "train", str(config), "--out", str(out), "--json", str(json_file), "--html",
        str(html), "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert "step 8/8" in done.stderr and "saved" in done.stderr and "validation" in done.stderr

    from gem.harness.results import read_document

    document = read_document(json_file)
    metrics = {(row.case, row.metric): row.value for row in document.rows}
    assert metrics["films", "qps"] and 0 < (metrics["films", "e2e_mfu"] or 0) < 10
    assert 0 < (metrics["films.ctr", "auc"] or 0) < 1
    assert list(document.waterfalls) == ["train::films/gem"]
    assert "tower.0" in html.read_text()
    told = document.request
    assert (told["steps"], told["from_step"], told["config"]["reader"]["batch"]) == (8, 0, 32)
    assert (told["model"]["layers"], told["model"]["dim"], told["ranks"]) == (1, 64, 1)
    assert "steps an epoch, dealt to 1 rank, batches of" in told["data"]

    again = subprocess.run(command, capture_output=True, text=True, timeout=180, env=os.environ | {"COLUMNS": "200"})
    assert "all 8 steps are done: the results have no speed" in again.stderr
    assert read_document(json_file).request["from_step"] == 8
    one_file = [*command[:7], "--json", str(json_file), "--html", str(json_file)]
    refused = subprocess.run(one_file, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "--json and --html are one file" in refused.stderr

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("train/loss")] == [2, 4, 6, 8]
    assert all(math.isfinite(one.value) for one in events.Scalars("valid/ne_ctr"))


def test_gem_train_refuses_in_one_line(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('[data]\nkind = "parquet"\ntrain = "nowhere"\n')
    command = [sys.executable, "-m", "gem", "train", str(config), "--out", str(tmp_path / "out"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 2
    assert "nowhere" in done.stderr and "Traceback" not in done.stderr
