"""The model trained by DeepSpeed learns what plain torch makes it learn: the same losses and norms, step by step.

DeepSpeed runs in processes of its own, which stay apart from those of other tests: this file is also their program.
"""

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_data import random_samples, small_schema

from gem.baselines.deepspeed_zero import DeepSpeedTrainer, Precision, Stage
from gem.baselines.padded import Padded, pad
from gem.data.samples import Samples, merge
from gem.errors import RequestError
from gem.model import GemModel, ModelConfig
from gem.train.optimizers import decays

STEPS = 5
LR, WEIGHT_DECAY = 2e-4, 20.0  # so much that five steps show it
RUNS: dict[int, list[tuple[Stage, Precision]]] = {
    1: [(2, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16"), (2, "autocast")],
    2: [(2, "fp32"), (3, "fp32")],
}
ALL_SPLIT = {
    "zero_optimization": {"stage3_param_persistence_threshold": 0}
}  # else ZeRO-3 leaves small parameters whole


def model_of(**arguments) -> GemModel:
    torch.manual_seed(0)
    return GemModel(small_schema(), ModelConfig(), **arguments)


def batches(rank: int) -> list[Samples]:
    """One a step, two of them in turn so that learning is seen. Ranks have unlike lengths and numbers of clicks."""
    lengths = [[70, 0, 5, 130], [3, 9, 0, 1]] if rank == 0 else [[1, 64, 40, 0], [0, 20, 2, 5]]
    return [random_samples(*lengths, seed=2 * (step % 2) + rank) for step in range(STEPS)]


def program(answer: str, ranks: int, rank: int, clip: float) -> None:
    """Train in each way, write the losses and norms: one process of ``ranks``."""
    torch.set_num_threads(1)
    if ranks > 1:
        torch.distributed.init_process_group("gloo", f"file://{answer}.store", rank=rank, world_size=ranks)
    found = {}
    for stage, precision in RUNS[ranks]:
        trainer = DeepSpeedTrainer(
            model_of(layout=Padded), stage, precision=precision, lr=LR, weight_decay=WEIGHT_DECAY, clip=clip,
            overrides=ALL_SPLIT,
        )  # fmt: skip
        with trainer:
            steps = []
            for number, samples in enumerate(batches(rank)):
                # Every other batch in pieces of unlike numbers of clicks, accumulated.
                cut = [samples.take(0, 1), samples.take(1, 4)] if number % 2 else [samples]
                loss = trainer.step([pad(piece) for piece in cut]).item()
                steps.append((loss, float(trainer.engine.get_global_grad_norm())))
        found[f"{stage} {precision}"] = list(zip(*steps, strict=True))
    if ranks > 1:
        torch.distributed.destroy_process_group()
    Path(f"{answer}.{rank}").write_text(json.dumps(found))


def run(folder: Path, ranks: int, clip: float) -> list[dict[str, list[list[float]]]]:
    """The answers of ``ranks`` processes: by run, losses and norms."""
    answer = folder / "answer"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"log.{rank}").open("w+") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(answer), str(ranks), str(rank), str(clip)], env=env, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process, log in zip(processes, logs, strict=True):
            code = process.wait(timeout=300)
            log.seek(0)
            assert code == 0, log.read()[-3000:]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    return [json.loads(Path(f"{answer}.{rank}").read_text()) for rank in range(ranks)]


def torch_alone(ranks: int, clip: float = math.inf) -> tuple[list[float], list[float]]:
    """Losses and norms of the packed model under torch's own AdamW, in fp32, the ranks' samples as one batch."""
    model = model_of()
    named = {n: (p, decays(n, p) and not n.startswith("tables.")) for n, p in model.named_parameters()}
    groups = [
        {"params": [p for p, decayed in named.values() if decayed is wanted], "weight_decay": WEIGHT_DECAY * wanted}
        for wanted in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    losses, norms = [], []
    for parts in zip(*(batches(rank) for rank in range(ranks)), strict=True):
        loss = model.losses(merge(parts)).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: ci/requirements-deepspeed.txt"
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeed_learns_what_torch_alone_learns(ranks, tmp_path):
    """fp32 to its rounding; in bf16 the first loss, and that the first batch is learnt as well."""
    clip = statistics.median(torch_alone(ranks)[1])
    losses, norms = torch_alone(ranks, clip)
    assert min(norms) < clip < max(norms), "norms on one side of the limit would not show how gradients are clipped"
    for rank, answer in enumerate(run(tmp_path, ranks, clip)):
        assert len(answer) == len(RUNS[ranks])
        for name, (got_losses, got_norms) in answer.items():
            where = f"rank {rank} of {ranks}, ZeRO-{name}: {got_losses}, {got_norms}"
            if name.endswith("fp32"):
                assert got_losses == pytest.approx(losses, abs=1e-4), where
                assert got_norms == pytest.approx(norms, rel=1e-3), where
            else:
                assert got_losses[0] == pytest.approx(losses[0], abs=1e-2), where
                assert got_losses[-1] - got_losses[0] == pytest.approx(losses[-1] - losses[0], rel=0.5), where


def test_parameters_that_deepspeed_cannot_hold_are_named():
    model = model_of()
    model.register_parameter("temperature", torch.nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(RequestError, match=r"'temperature' has no dimension; accepted: one or more"):
        DeepSpeedTrainer(model, 2)


def test_without_deepspeed_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(RequestError, match=r"accepted: pip install --no-deps -r ci/requirements-deepspeed.txt"):
        DeepSpeedTrainer(model_of(), 2)


if __name__ == "__main__":
    program(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
