"""The race of whole training steps: what a step is of, for whom, and that who learns otherwise is found."""

import importlib.util
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_data import random_samples

from gem.baselines.padded import pad
from gem.data.samples import Samples
from gem.harness import subject_e2e
from gem.harness.measured import Findings
from gem.harness.measured_params import E2eParams
from gem.harness.subject_e2e import DeepSpeedPadded, Gem, TorchPadded, config_of, cut, expected_peak, rows_of
from gem.harness.worker import Worker
from gem.model.work import Work

DATA = {"history": {"kind": "lognormal", "median": 40.0, "sigma": 1.0, "min": 0, "max": 300, "seed": 0}}
SIZES = {"dim": 32, "heads": 1, "layers": 1, "experts": 1, "expert_hidden": 32, "head_hidden": 16}


def params(**changes) -> E2eParams:
    given = {"batches": [8, 32], "step_samples": 32, "check_batch": 8, "turn_steps": 1, "row_steps": 2, "data": DATA}
    return E2eParams.model_validate(given | {"model": SIZES} | changes)


@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=24), st.integers(1, 24), st.sampled_from(["samples", "rows"]),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_pieces_are_the_batch_and_of_the_size_that_was_asked_for(lengths, size, of, padded):
    batch = random_samples(lengths, [i % 3 for i in range(len(lengths))])
    pieces = cut(batch, size, of, padded)
    assert sorted(key for piece in pieces for key in piece.keys.tolist()) == batch.keys.tolist()
    for piece in pieces:
        longest, ids = int(piece.sequences["history"].lengths.max()), piece.sequences["history"].ids["item"]
        rows = len(piece) * longest if padded else len(ids)
        assert len(piece) <= size if of == "samples" else rows <= 1024 * size or len(piece) == 1
        if padded:
            assert len(piece) == len(ids) and longest <= ids.shape[1] < longest + 64
        taken = batch.ids["item"][piece.keys]  # keys count from 0 here
        assert torch.equal(piece.ids["item"], taken)
    if padded:  # like beside like
        edges = [piece.sequences["history"].lengths for piece in pieces]
        assert all(int(a.min()) >= int(b.max()) for a, b in pairwise(edges))
    # No piece could have taken the next one's first sample.
    full = [len(piece) == size if of == "samples" else None for piece in pieces[:-1]]
    assert all(full) or of == "rows"


def test_a_step_is_of_the_same_samples_for_all():
    ours, theirs = Gem(params(), "cpu"), TorchPadded(params(), "cpu")

    def keys(stream, steps: int = 6) -> list[list[int]]:
        return [sorted(key for piece in next(stream) for key in piece.keys.tolist()) for _ in range(steps)]

    wanted = keys(ours._batches(32))
    assert keys(theirs._batches(8)) == wanted
    assert all(len(set(step)) == 32 for step in wanted)


def test_losses_agree_and_the_table_rate_comes_back():
    ours, theirs = Gem(params(lr=1e-3), "cpu"), TorchPadded(params(lr=1e-3), "cpu")
    tables = {name: table.clone() for name, table in ours.model.tables.items()}
    found = ours.losses()
    assert found == pytest.approx(theirs.losses(), rel=1e-5)
    assert len(set(found.values())) == len(found) == 3 * 3
    assert all(found[f"gradient norm of batch {i}"] > found[f"tables' norm of batch {i}"] > 0 for i in (1, 2, 3))
    assert all(torch.equal(table, tables[name]) for name, table in ours.model.tables.items()), "tables were to rest"
    dense = [p.grad is None for p in ours.model.dense_parameters()]
    assert all(dense)  # a step's gradients are gone
    ours._step(next(ours._batches(32)))
    assert not all(torch.equal(table, tables[name]) for name, table in ours.model.tables.items())


def test_another_learning_rate_is_seen_in_the_losses():
    """What the race refuses: the check is of training, not of one forward."""
    right, wrong = Gem(params(lr=1e-3), "cpu").losses(), TorchPadded(params(lr=2e-3), "cpu").losses()
    assert right["loss of batch 1"] == pytest.approx(wrong["loss of batch 1"], rel=1e-5)
    assert right["loss of batch 3"] != pytest.approx(wrong["loss of batch 3"], rel=1e-3)


def test_tables_that_get_no_gradient_are_seen(monkeypatch):
    right, wrong = Gem(params(), "cpu"), TorchPadded(params(), "cpu")
    monkeypatch.setattr(wrong.model, "lookup", lambda ids, table: table.detach()[ids].requires_grad_())
    name = "tables' norm of batch 1"
    assert wrong.losses()[name] != pytest.approx(right.losses()[name], rel=1e-2)


class DeepSpeedProbe:
    """In a process of its own: DeepSpeed leaves traces in one."""

    def look(self, given: dict) -> dict:
        """What it is made of, its figures, and which rates the tables' rate changes."""
        racer = DeepSpeedPadded(params(**given), "cpu")
        found = racer.losses()
        groups = racer.trainer.engine.optimizer.param_groups
        before = [group["lr"] for group in groups]
        racer._set_table_rate(0.5)
        changed = [group["lr"] / lr for group, lr in zip(groups, before, strict=True)]
        sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        tables = sum(t.numel() for t in racer.model.tables.values())
        return {"layout": racer.model.layout.__name__, "found": found, "changed": changed, "last": sizes[-1] == tables}


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="ci/requirements-deepspeed.txt")
def test_deepspeed_learns_the_padded_model_with_rates_of_its_own_for_tables():
    with Worker("deepspeed", "test_e2e:DeepSpeedProbe") as worker:
        seen = worker.call("look", {"lr": 1e-3}, timeout_s=120)
    assert seen["layout"] == "Padded"
    assert seen["found"] == pytest.approx(Gem(params(lr=1e-3), "cpu").losses(), rel=1e-4)
    assert seen["changed"] == [1.0, 1.0, 0.5]


class Steps(Gem):
    """Counts steps; each size of pieces takes its own time."""

    def __init__(self, given: E2eParams) -> None:
        super().__init__(given, "cpu")
        self.count = 0
        self.seconds = {8: 0.03, 16: 0.01, 32: 0.02}

    def _step(self, pieces: list[Samples]) -> torch.Tensor:
        self.count += 1
        time.sleep(self.seconds[max(map(len, pieces))])
        return torch.zeros(())

    def _marked(self, window, pieces: list[Samples]) -> None:
        self._step(pieces)
        window.clock.mark("forward")
        for stage in ("backward", "optimizer"):
            window.clock.mark(stage)


def test_the_fastest_size_is_taken_and_a_turn_is_as_long_as_it_says():
    racer = Steps(params(batches=[8, 16, 32], turn_steps=5))
    ready = racer.setup(lambda done, total: None)
    assert "pieces of 16" in str(ready) and ready.batch == 32
    assert max(map(len, next(racer._stream))) == 16
    before = racer.count
    assert racer.turn() == pytest.approx(5 * 0.01, rel=0.9)
    assert racer.count - before == racer._ahead + 5


def test_a_turn_begins_behind_all_that_two_readers_hold_ready(tmp_path, monkeypatch):
    """Against what they have read and nobody took, as they note it themselves."""
    racer, notes, how = Steps(params(batches=[32], turn_steps=2, workers=2)), tmp_path / "read", subject_e2e.cut

    def noted(*given, **named):
        with open(notes, "ab", 0) as file:
            file.write(b".")
        return how(*given, **named)

    monkeypatch.setattr(subject_e2e, "cut", noted)
    stream = racer._batches(32)
    next(stream)
    until = time.monotonic() + 60
    while notes.stat().st_size < 3 and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.5)  # would they read more, they had
    held = notes.stat().st_size - 1
    assert held == 2
    racer._timed(stream)
    assert racer.count == held + 1 + 2  # the timed two are of what was read since the device woke


def test_figures_of_steps_are_of_the_work_and_of_the_waiting(monkeypatch):
    """Against FLOPs counted apart and a wait that is known."""
    racer = Steps(params(batches=[32], row_steps=4))
    batch = racer.source.read_chunk(0).take(0, 32)

    def slow():
        while True:
            time.sleep(0.06)
            yield [batch]

    racer._stream = slow()
    monkeypatch.setattr(subject_e2e, "measure_peak", lambda device, precision: 1e12)
    monkeypatch.setattr(Steps, "_in_depth", lambda self, metrics, window, heaviest, peak: Findings(metrics))
    value = {metric.name: metric.value for metric in racer.finish().metrics}
    assert value["input_wait"] == pytest.approx(0.06 / 0.08, abs=0.2)
    step_s = 3 * racer.model.flops(Work.of(batch)) / (value["e2e_mfu"] * 1e12)
    assert 0.08 <= step_s < 0.2
    assert racer.count == racer._ahead + 4


def test_what_is_asked_for_is_what_is_trained():
    chosen = config_of(params(precision="bf16", preset="small", model={}), "gem")
    assert chosen.precision == "bf16" and chosen.sizes().dim == 128


def test_figures_of_steps_in_a_row_add_up():
    racer = Gem(params(), "cpu")
    assert racer.setup(lambda done, total: None).batch == 32
    assert racer.turn() > 0
    found = racer.finish()
    value = {metric.name: metric.value for metric in found.metrics}
    assert value["scaling_ratio"] == pytest.approx(value["e2e_mfu"] / value["local_mfu"], rel=0.2)
    assert 0 < value["e2e_mfu"] < 1 and 0 <= value["input_wait"] < 1
    assert {"input", "model", "optimizer"} <= {piece.of for piece in found.waterfall}


def test_who_is_compiled():
    chosen = params(compile=["torch_padded"])
    assert config_of(chosen, "torch_padded").compile
    assert not config_of(chosen, "gem").compile
    with pytest.raises(ValueError, match="'ours'; accepted: gem, torch_padded, deepspeed_padded"):
        params(compile=["ours"])


def test_pieces_larger_than_a_step_are_refused():
    with pytest.raises(ValueError, match="batches of 64; accepted: up to step_samples = 32"):
        params(batches=[8, 64])
    assert params(batches=[8, 64], pieces="rows").batches == (8, 64)


def test_contestants_have_the_names_that_are_declared():
    assert [one.name for one in (Gem, TorchPadded, DeepSpeedPadded)] == ["gem", "torch_padded", "deepspeed_padded"]


def test_padding_by_length_wastes_little():
    """Why the baselines' pieces are sorted: rows of padding over rows in all."""
    lengths = np.random.default_rng(0).lognormal(np.log(300), 1.2, 256).astype(int).tolist()
    batch = random_samples(lengths, [1] * 256)

    def rows(pieces: list[Samples]) -> int:
        return sum(map(rows_of, pieces))

    by_length, by_rows = rows(cut(batch, 16, "samples", True)), rows(cut(batch, 16, "rows", True))
    as_they_come = rows([pad(batch.take(i, i + 16)) for i in range(0, 256, 16)])
    assert sum(lengths) < by_rows < 1.4 * sum(lengths) < by_length < 2.2 * sum(lengths) < as_they_come


def test_memory_is_foretold_from_smaller_pieces():
    assert expected_peak(100, 5.0, []) == 0.0  # the first size is tried
    assert expected_peak(200, 5.0, [(100, 15.0)]) == 25.0
    # What a step takes whatever its rows (3 here) is not doubled once there are two sizes.
    assert expected_peak(400, 5.0, [(100, 18.0), (200, 28.0)]) == 48.0
    assert expected_peak(200, 5.0, [(100, 18.0), (200, 28.0)]) == 28.0  # the whole step already
    assert expected_peak(200, 5.0, [(200, 28.0), (200, 28.0)]) == 28.0


@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_those_of_the_histories(padded):
    batch = random_samples([5, 0, 17], [1, 2, 3])
    assert rows_of(pad(batch) if padded else batch) == (3 * 24 if padded else 22)
