"""gem train --plan: under torchrun, by a plan, on from another plan's checkpoint; and what is refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gem import paths
from gem.errors import RequestError
from gem.sharding import start
from gem.sharding.sm_free import Offer
from gem.sharding.start import placed
from gem.train.config import PlanConfig, load_config, parse_config
from gem.train.loop import Run
from gem.train.world import World, join

CONFIG = """
steps = 6
log_every = 2
checkpoint_every = 3
warmup = 2
[data]
kind = "synthetic"
valid_samples = 100
[data.train]
samples = 512
items = 60
users = 40
history = {{ kind = "lognormal", median = 20.0, sigma = 1.0, min = 0, max = 128, seed = 0 }}
[reader]
batch = 16
base = 8
pool = 4
[model]
dim = 16
heads = 2
layers = 1
experts = 2
expert_hidden = 16
head_hidden = 16
{more}
"""
FIRST = 'expert = 2\ntables = "v3"\ntable_replicas = 2\n'
SECOND = 'replicate = 2\ntables = "v2"\ntable_replicas = 2\ncuts = { item = "column" }\n'


def train(folder: Path, name: str, *words: str, ranks: int = 2) -> tuple[str, dict]:
    """(what was said, the results document)."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "gem", "train"]
    document = folder / f"{name}.json"
    command = [*torchrun, "a.toml", "--out", name, "--json", str(document), "--device", "cpu", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr, json.loads(document.read_text())


def figures(said: str) -> list[str]:
    """Losses and NEs as they were told; without the speed."""
    return [line.split("samples/s")[0].rsplit("  ", 1)[0] for line in said.splitlines() if line.startswith("step ")]


def test_a_plan_trains_as_no_plan_and_another_plan_goes_on(tmp_path):
    (tmp_path / "a.toml").write_text(CONFIG.format(more=""))
    (tmp_path / "first.toml").write_text(FIRST)
    (tmp_path / "second.toml").write_text(SECOND)
    alone, document = train(tmp_path, "none")
    begun, _ = train(tmp_path, "plan", "--plan", "first.toml", "--set", "steps=3")
    gone_on, planned = train(tmp_path, "plan", "--plan", "second.toml")
    assert "going on from plan" in gone_on and "efficiency: no Local MFU or Scaling Ratio with a plan" in gone_on
    assert len(figures(alone)) == 4  # steps 2, 4, 6 and the validation
    wanted = [line.replace("/3 ", "/6 ") for line in figures(begun)[:1]] + figures(gone_on)[-2:]
    assert wanted == [figures(alone)[i] for i in (0, 2, 3)]

    def quality(of: dict) -> dict:
        names = ("ne", "auc", "calibration")
        return {(r["case"], r["metric"]): r["value"] for r in of["rows"] if r["metric"] in names}

    assert quality(planned) == pytest.approx(quality(document), rel=1e-4) and len(quality(document)) == 6
    assert planned["request"]["ranks"] == 2 and "dealt to 2 ranks" in planned["request"]["data"]
    speed = {r["metric"]: r["value"] for r in planned["rows"] if r["case"] == "a"}
    assert speed.keys() == {"qps", "e2e_mfu", "input_wait", "peak_memory"}  # the layers' own are cut over ranks
    ((_, parts),) = planned["waterfalls"].items()
    step_ms = sum(part["ms"] for part in parts)
    assert [part["of"] for part in parts] == ["input", "model", "model", "communication", "optimizer", "rest"]
    qps = 2 * 16 / (step_ms * 1e-3)  # two ranks, reader.batch
    assert speed["qps"] == pytest.approx(qps, rel=1e-6) and speed["e2e_mfu"] > 0
    assert speed["input_wait"] == pytest.approx(parts[0]["ms"] / step_ms, rel=1e-6)

    # On in one process without a plan; that it comes to what no interruption comes to is test_sharding_faults'.
    command = [sys.executable, "-m", "gem", "train", "a.toml", "--out", "plan", "--device", "cpu", "--set", "steps=8"]
    one = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert one.returncode == 0 and "dealt to 2 ranks, as the run began; now there are 1" in one.stderr, one.stderr
    assert len(figures(one.stderr)) == 2  # step 8 and the validation


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("replicas = 2", "unknown field 'replicas'; accepted: zones, gpus, replicate, shard, expert, tables"),
        ("expert = 0", "expert = 0: Input should be greater than or equal to 1"),
        ("tables = 'v4'", "tables = 'v4': Input should be 'v1', 'v2' or 'v3'"),
        (f"shard = {10**400}", "Input should be less than or equal to 2147483648"),
        ("expert = ", "plan.toml: Invalid value"),
    ],
)
def test_wrong_plans_are_refused_by_their_own_file(text, what, tmp_path):
    (tmp_path / "a.toml").write_text(CONFIG.format(more=""))
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(RequestError) as caught:
        load_config(tmp_path / "a.toml", (), tmp_path / "plan.toml")
    assert "plan.toml: " in str(caught.value) and what in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(
        RequestError, match=r"none\.toml: No such file or directory; accepted: a TOML file with the fields"
    ):
        load_config(tmp_path / "a.toml", (), tmp_path / "none.toml")


def test_the_plan_of_the_help_fits_its_ranks():
    training = paths.suites_dir().parent / "fixtures" / "training"
    config = load_config(training / "synthetic.toml", (), training / "plan.toml")
    assert config.plan is not None
    assert placed(config.plan, config.sizes().experts, 2)[0].expert == 2


def test_compile_and_a_plan_exclude_each_other(tmp_path):
    (tmp_path / "a.toml").write_text("compile = true\n" + CONFIG.format(more="[plan]\nexpert = 2"))
    with pytest.raises(RequestError, match="compile = true beside a plan; accepted: one of the two"):
        load_config(tmp_path / "a.toml")


def test_one_process_alone_has_no_plan(tmp_path):
    (tmp_path / "a.toml").write_text(CONFIG.format(more="[plan]\nexpert = 1"))
    command = [sys.executable, "-m", "gem", "train", "a.toml", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "plan: one process; accepted: two or more of torchrun's" in done.stderr
    assert load_config(tmp_path / "a.toml", ("plan=none",)).plan is None


def test_a_plan_is_refused_before_the_data_are_opened(tmp_path):
    """Samples of a log are made for hours; this one is not even there."""
    config = {"data": {"kind": "log", "path": "none.csv"}, "plan": {"expert": 2}}
    with join("cpu") as world, pytest.raises(RequestError, match=r"plan: one process; accepted: .* --set plan=none"):
        Run(parse_config(config, "test"), tmp_path / "run", world)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"expert": 3}, "plan.expert = 3 does not divide plan.shard = 4 (4 ranks: 1 zone, 1 host, 4 ranks a host)"),
        ({"expert": 4}, "plan.expert = 4 does not divide model.experts = 2"),
        ({"transport": "zero_cta"}, "plan.transport = 'zero_cta': the ranks are on cpu; it needs GPUs; accepted"),
        ({"transport": "copy_engine", "replicate": 4}, "each shard group is one rank, which gathers nothing"),
    ],
)
def test_what_needs_no_data_is_seen_first(plan, said, monkeypatch):
    there = Offer("gloo", "cpu", 4, 2, None, (), {}, True, True, True, "")
    monkeypatch.setattr(start.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(start, "offer", lambda group, device: there)
    config = parse_config({"data": {"kind": "synthetic"}, "plan": plan}, "test")
    with pytest.raises(RequestError, match=re.escape(said)):
        start.check_plan(config, World(0, 4, torch.device("cpu")))


def test_hosts_follow_from_the_ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert placed(PlanConfig(zones=2), 2, 16)[1].hosts == 2
    assert placed(PlanConfig(gpus=8), 2, 16)[1].gpus == 8
    with pytest.raises(
        RequestError, match=r"plan\.zones = 1 times plan\.gpus = 3 does not divide 16 ranks; accepted"
    ) as no:
        placed(PlanConfig(gpus=3, cuts={"item": "column"}), 2, 16)
    assert str(no.value).endswith('table_replicas = 1, cuts = { "item" = "column" }, gpus = 4')
    with pytest.raises(RequestError, match=r"plan\.zones = 3 times 4 ranks a host, as torchrun started them, does not"):
        placed(PlanConfig(zones=3), 2, 16)
