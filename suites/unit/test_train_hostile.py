"""Training by hostile hands: runs that diverge, full disks, two runs in one folder, other data under the same names."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gem.data.parquet import write_samples
from gem.data.synthetic import Synthetic, SyntheticConfig
from gem.errors import RequestError
from gem.model.work import Work
from gem.train.config import load_config, parse_config
from gem.train.guard import Health, Lock
from gem.train.loop import Run
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


# -- what may change when a run goes on --------------------------------------------------------------------------------


def test_a_run_from_before_a_field_goes_on_with_other_pieces_and_workers(tmp_path):
    train(tmp_path, steps=2)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["pieces"], config["compile"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = CONFIG["model"] | {"preset": "tiny", "heads": 2}  # the defaults, said aloud
    reader = CONFIG["reader"] | {"workers": 1}
    assert train(tmp_path, steps=4, pieces=2, reader=reader, model=model).resumed_at == 2
    assert train(tmp_path, steps=6).resumed_at == 4
    assert "has a run with reader.pool = 4, not 8;" in refused(tmp_path, reader=CONFIG["reader"] | {"pool": 8})
    assert "has a run with compile = False, not True;" in refused(tmp_path, compile=True)


def test_a_configuration_that_is_none_is_named(tmp_path):
    train(tmp_path, steps=2)
    for text, what in (("[1]", "holds no object"), ("{", "Expecting"), ('{"lr": 1}', "missing field 'data'")):
        (tmp_path / "config.json").write_text(text)
        assert refused(tmp_path).startswith(f"{tmp_path}/config.json: {what}")


# -- efficiency --------------------------------------------------------------------------------------------------------


def test_efficiency_is_measured_on_the_heaviest_piece_and_its_failure_costs_no_results(tmp_path, monkeypatch):
    seen = []

    def fail(stepper, windows, batch, peak):
        seen.append((stepper, batch, windows))
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 TiB")

    monkeypatch.setattr("gem.train.loop.measure_efficiency", fail)
    told = Told()
    result = train(tmp_path, told, pieces=3)
    assert result.efficiency is None and result.evaluations and result.steps == 6
    assert "efficiency: not measured: OutOfMemoryError: CUDA out of memory. Tried to allocate 1 TiB" in told.lines
    (stepper, piece, windows), = seen  # fmt: skip
    assert [one.loss for one in windows] == [one.loss for one in result.progress[1:]]  # the first report warms up
    with join("cpu") as world:
        run = Run(parse_config(CONFIG, "test"), tmp_path / "b", world)
        last = [batch for _, batch in zip(range(6), run.batches, strict=False)][-1]
    cut = last.split(3)
    work = [stepper.model.flops(Work.of(one)) for one in cut]
    assert torch.equal(piece.keys, cut[work.index(max(work))].keys) and len(piece) < 32


# -- disks -------------------------------------------------------------------------------------------------------------

_FULL = """
import sys, torch
from gem.data.parquet import write_samples
from gem.data.synthetic import Synthetic, SyntheticConfig
from gem.errors import RequestError
from gem.train.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
state = lambda rows: {"model": {name: torch.ones(rows, 64) for name in "abc"}}
checkpoints.save(1, state(64))
try:
    checkpoints.save(2, state(2**14))
except RequestError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_older_checkpoints_and_nothing_half_written(tmp_path):
    """A real file system of 4 MiB in a mount namespace of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    shell = f'mount -t tmpfs -o size=4m none {place} && "$@"; ls {place}/c; df --output=used {place} | tail -1'
    command = ["unshare", "-rm", "sh", "-c", shell, "sh", sys.executable, "-c", _FULL, str(place / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no mount namespaces here")
    message, *left, used = done.stdout.splitlines()
    assert message.startswith(f"{place}/c/step-000002.part: cannot be written: "), (done.stdout, done.stderr)
    assert "No space left on device" in message and "free on its disk: 0.0" in message
    assert left == ["step-000001"] and int(used) < 1024
    assert "Traceback" not in done.stderr


def test_a_limit_on_files_is_one_line_too(tmp_path):
    """As above where nothing can be mounted: the kernel refuses to make a file as long."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
    command = [sys.executable, "-c", limit + _FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"{tmp_path}/step-000002.part: cannot be written: File too large; free"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


# -- folders -----------------------------------------------------------------------------------------------------------


def test_two_runs_do_not_share_a_folder(tmp_path):
    """A real process holds it; killed, with readers' processes that outlive it for a while, it holds it no more."""
    config = written(tmp_path / "a.toml", steps=100_000, checkpoint_every=1, reader=CONFIG["reader"] | {"workers": 1})
    out = tmp_path / "out"
    command = [sys.executable, "-m", "gem", "train", config, "--out", str(out), "--device", "cpu"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: steps(out), first)
        done = gem(config, "--out", str(out))
        assert done.returncode == 2
        assert f"gem: error: {out}: another run is at work in it; accepted: another folder" in done.stderr
        assert done.stderr.count("\n") == 1 and len(list((out / "tensorboard").iterdir())) == 1
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    Lock(out, print).take()


def test_ctrl_c_is_one_line_that_names_the_last_checkpoint(tmp_path):
    config, out = written(tmp_path / "a.toml", steps=100_000), tmp_path / "out"
    command = [sys.executable, "-m", "gem", "train", config, "--out", str(out), "--device", "cpu"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: [path for path in steps(out) if not path.endswith(".part")], run)
    run.send_signal(signal.SIGINT)
    errors = run.communicate(timeout=60)[1]
    assert run.returncode == 130
    last = max(path for path in steps(out) if not path.endswith(".part"))
    message = f"gem: interrupted: the last checkpoint is {out}/checkpoints/{last}; the same command goes on from it"
    assert errors.splitlines()[-1] == message and "Traceback" not in errors
    assert sum("interrupted" in line for line in errors.splitlines()) == 1


def wait_for(there: Callable[[], Any], process: subprocess.Popen) -> None:
    for _ in range(1200):
        if there():
            return
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    pytest.fail("nothing came")


def test_a_lock_is_taken_once_and_freed(tmp_path):
    first = Lock(tmp_path / "new", print)
    first.take()
    with pytest.raises(RequestError, match="another run is at work in it"):
        Lock(tmp_path / "new", print).take()
    first.free()
    Lock(tmp_path / "new", print).take()


def test_a_place_that_is_no_folder_is_named_before_the_first_step(tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    assert refused(place) == f"{place}: is a file; accepted: a folder for the run, or nothing yet"
    assert refused(place / "inner").startswith(f"{place}/inner: cannot be written: Not a directory; accepted:")
    assert refused(Path("/proc/run")).startswith("/proc/run: cannot be written: ")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    assert refused(tmp_path / "run").startswith(f"{tmp_path}/run/checkpoints: is no folder; accepted: ")
    done = gem(written(tmp_path / "a.toml"), "--out", "/proc/run")
    assert done.returncode == 2 and "/proc/run: cannot be written: " in done.stderr and "Traceback" not in done.stderr


def test_damage_is_told_in_words_that_a_command_can_follow(tmp_path):
    train(tmp_path, steps=4)
    for step, then in ((4, "from step 2"), (2, "from the first step")):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        (folder / "manifest.json").write_text("{}")
        message = refused(tmp_path)
        assert message.startswith(f"{folder}: damaged: manifest.json") and message.endswith(f"goes on {then}")
        assert "load(" not in message
        shutil.rmtree(folder)
    assert train(tmp_path).resumed_at is None


@pytest.mark.parametrize(
    "change, message",
    [
        ("model.foo=1", "unknown field 'model.foo'; accepted: preset, table_dim, dim"),
        ("model.dim=0", "model.dim = 0: Input should be greater than or equal to 1"),
        ("reader.foo=1", "unknown field 'reader.foo'; accepted: batch, base, pool"),
        ("reader.workers=100000", "reader.workers = 100000: Input should be less than or equal to 256"),
        (
            "reader.strategy=magic",
            "reader.strategy = 'magic': Input should be 'none', 'random', 'bbs', 'lpt', 'samples' or 'budget'",
        ),
        ("foo=1", "unknown field 'foo'; accepted: data, model, reader"),
        ("data.x=1", "unknown field 'data.x'; accepted: kind, train, valid_samples"),
        ("data.train.x=1", "unknown field 'data.train.x'; accepted: samples, chunk, "),
        ("data.train.history.x=1", "unknown field 'data.train.history.x'; accepted: min, max, kind"),
        ("data.train.history.min=a", "data.train.history.min = 'a': Input should be a valid integer"),
        ("data.train.history.kind=odd", "data.train.history.kind = 'odd'; accepted: 'lognormal', 'uniform', "),
        ("data.train.history={min = 1}", "missing field 'data.train.history.kind'; accepted: 'lognormal', 'uniform', "),
        ('data={kind = "parquet", train = "a", x = 1}', "unknown field 'data.x'; accepted: kind, train, valid"),
        ('data={kind = "parquet", train = 3}', "data.train = 3: Input should be a valid string"),
        ('data={kind = "parquet"}', "missing field 'data.train'"),
        ('data={kind = "log", path = "a", build = {x = 1}}', "unknown field 'data.build.x'; accepted: "),
        (
            'data={kind = "log", path = "a", build = {labels = [{x = 1, name = "a", column = "b"}]}}',
            "unknown field 'data.build.labels.0.x'; accepted: name, ",
        ),
        ("data={}", "missing field 'data.kind'; accepted: 'synthetic', 'parquet', 'log'"),
    ],
)
def test_a_wrong_field_is_named_in_full_with_what_is_accepted(tmp_path, change, message):
    path = tmp_path / "a.toml"
    written(path)
    with pytest.raises(RequestError) as caught:
        load_config(path, (change,))
    assert str(caught.value).startswith(f"{path}: {message}")


# -- other data under the same names -----------------------------------------------------------------------------------


def log_of(path: Path, change: int = 0) -> None:
    rows = [(i * 7 % 23, i * 5 % 17, 1 + (i * 3 + change) % 5, 1_000_000 + i // 2) for i in range(400)]
    path.write_text("userId,movieId,rating,timestamp\n" + "".join(f"{u},{m},{r},{t}\n" for u, m, r, t in rows))


def test_another_log_under_the_same_path_is_refused(tmp_path):
    log, out = tmp_path / "log.csv", tmp_path / "out"
    log_of(log)
    data = {"kind": "log", "path": str(log)}
    reader = {"batch": 32, "base": 8, "pool": 8}
    train(out, data=data, reader=reader, steps=2)
    os.utime(log, (1, 1))  # touched, copied: the same data
    assert train(out, data=data, reader=reader, steps=4).resumed_at == 2
    log_of(log, 1)  # as many rows and bytes
    assert "has a run on other data of the same name: not the same content of the files;" in refused(
        out, data=data, reader=reader
    )


def test_other_files_in_the_same_folder_are_refused_and_copies_are_not(tmp_path):
    place, out = tmp_path / "samples", tmp_path / "out"
    drawn = Synthetic(SyntheticConfig.model_validate(CONFIG["data"]["train"]))
    write_samples(place, drawn.schema, (drawn.read_chunk(i) for i in range(drawn.chunks)))
    data = {"kind": "parquet", "train": str(place)}
    train(out, data=data, steps=2)
    shutil.copytree(place, tmp_path / "copy")
    shutil.rmtree(place)
    (tmp_path / "copy").rename(place)
    assert train(out, data=data, steps=4).resumed_at == 2
    shutil.rmtree(place)
    write_samples(place, drawn.schema, (drawn.read_chunk(i) for i in range(drawn.chunks - 1)))
    assert "not the same training samples, bytes, content" in refused(out, data=data)
    shutil.rmtree(place)
    other = Synthetic(SyntheticConfig.model_validate(CONFIG["data"]["train"] | {"seed": 1}))
    write_samples(place, drawn.schema, (other.read_chunk(i) for i in range(other.chunks)))
    assert "has a run on other data of the same name" in refused(out, data=data)


@pytest.mark.parametrize("whole", [8 * 2**30, 1000], ids=["whole", "too much to read"])
def test_an_edit_amid_a_large_file_is_refused(tmp_path, monkeypatch, whole):
    monkeypatch.setattr("gem.train.sources.WHOLE", whole)
    place, out = tmp_path / "samples", tmp_path / "out"
    drawn = Synthetic(SyntheticConfig.model_validate(CONFIG["data"]["train"]))
    write_samples(place, drawn.schema, (drawn.read_chunk(i) for i in range(drawn.chunks)))
    (file,) = place.glob("*.parquet")
    # As others may write it: plain values without checksums, in a file of several times what its ends are taken to be.
    table = pq.read_table(file)
    floats = np.arange(len(table) * 2000, dtype=np.float32)
    table = table.append_column("own", pa.FixedSizeListArray.from_arrays(pa.array(floats), 2000))
    pq.write_table(table, file, compression="none", use_dictionary=False, write_statistics=False)
    data = {"kind": "parquet", "train": str(place)}
    train(out, data=data, steps=2)
    assert train(out, data=data, steps=3).resumed_at == 2
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    assert min(len(content) // 2, len(content) - len(content) // 2) > 2**20
    file.write_bytes(content)
    what = "content of the files" if whole > 2**20 else "times, first and last bytes of the files (more than 8 GiB"
    assert f"has a run on other data of the same name: not the same {what}" in refused(out, data=data, steps=4)


def test_a_run_whose_fingerprint_is_of_the_files_ends_is_held_to_their_sizes_and_says_so(tmp_path):
    log, out = tmp_path / "log.csv", tmp_path / "out"
    log_of(log)
    of = {"data": {"kind": "log", "path": str(log)}, "reader": {"batch": 32, "base": 8, "pool": 8}}
    train(out, steps=2, **of)
    config = json.loads((out / "config.json").read_text())
    del config["fingerprint"]["content of the files"]
    config["fingerprint"]["first and last bytes of the files"] = "0" * 64
    (out / "config.json").write_text(json.dumps(config))
    told = Told()
    assert train(out, told, steps=4, **of).resumed_at == 2
    assert [line for line in told.lines if "has a fingerprint" in line] == [
        f"{out}/config.json: has a fingerprint of before files were read whole; only sizes are held to it"
    ]
    assert "content of the files" in json.loads((out / "config.json").read_text())["fingerprint"]
    (out / "config.json").write_text(json.dumps(config))
    log.write_text(log.read_text().replace(",1000000\n", ",10000000\n", 1))
    assert ", bytes; accepted" in refused(out, steps=6, **of)


def test_a_run_from_before_fingerprints_goes_on_and_says_so(tmp_path):
    train(tmp_path, steps=2)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["fingerprint"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = Told()
    assert train(tmp_path, told, steps=4).resumed_at == 2
    assert any("has no fingerprint of the data" in line for line in told.lines)
    assert "fingerprint" in json.loads((tmp_path / "config.json").read_text())
