"""Run by torchrun in tests of training: some steps of a Stepper on this rank's share of fixed batches.

    train_program.py OUT BATCH STEPS PIECES

Each rank's batch is learnt from in so many pieces. Rank 0 writes losses and final parameters to OUT.
"""

import sys
import weakref

import torch
from model_data import random_samples, small_schema

from gem.train.config import parse_config
from gem.train.step import Stepper
from gem.train.world import join

CONFIG = {"data": {"kind": "synthetic"}, "lr": 1e-3, "table_lr": 0.02, "clip": 0.05, "warmup": 2}


def batch(step: int, size: int):
    """The global batch of a step."""
    history = [(7 * i + 3 * step) % 40 for i in range(size)]
    return random_samples(history, [(i + step) % 6 for i in range(size)], seed=step)


def main(out: str, size: int, steps: int, pieces: int) -> None:
    with join("cpu") as world:
        stepper = Stepper(small_schema(), parse_config(CONFIG, "test"), world)
        ddp = weakref.ref(stepper._losses)
        share = size // world.size
        losses = []
        for step in range(steps):
            own = batch(step, size).take(world.rank * share, (world.rank + 1) * share)
            done = stepper.step(own.split(pieces) if pieces > 1 else own)
            assert all(logits.shape == (share,) for logits in done.logits.values())
            losses.append(float(done.loss))
        if world.first:
            torch.save({"losses": losses, "model": stepper.model.state_dict()}, out)
    if world.size > 1:  # while the stepper is still there: see World.before_leaving
        assert ddp() is None, "DDP outlives its process group, and its end may wait for ever"


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
