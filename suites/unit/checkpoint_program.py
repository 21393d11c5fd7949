"""What the tests of checkpoints run as a program: it saves and is killed, forks ranks, and measures memory.

The process of the tests must not fork: it has threads.
"""

import os
import random
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn import Parameter

from gem.errors import RequestError
from gem.train import checkpoint_plans
from gem.train.checkpoint import Checkpoints, rng_state


def state_of(value: int) -> dict[str, Any]:
    """Every part of it tells its value."""
    return {
        "model": {"weight": torch.full((300, 8), value), "bias": {"deep": torch.full((), float(value))}},
        "reader": {"position": value, "name": str(value)},
    }


def value_of(state: dict[str, Any]) -> int:
    """The one value that all parts of it tell."""
    model, reader = state["model"], state["reader"]
    found = {*model["weight"].flatten().tolist(), int(model["bias"]["deep"]), reader["position"], int(reader["name"])}
    assert len(found) == 1, f"parts of different checkpoints: {found}"
    return found.pop()


def fails(act: Callable[[], Any], *words: str) -> None:
    with pytest.raises(RequestError) as error:
        act()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def kill(folder: Path, kills: int) -> None:
    """Fork a process that saves all the time, kill it, look at what is left; so many times."""
    chance, in_save, reached = random.Random(0), 0, 0
    for _ in range(kills):
        source, sink = os.pipe()
        child = os.fork()
        if child == 0:
            save_for_ever(folder, sink)
        os.close(sink)
        os.read(source, 8)  # until its first save is done
        time.sleep(chance.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = b""
        while block := os.read(source, 2**16):
            told += block
        os.close(source)
        in_save += any(folder.glob("*.part")) or any(folder.glob("*.old"))
        state = state_of(-1)
        step = Checkpoints(folder).load(state)
        last = struct.unpack("q", told[-8:])[0] if told else 0
        assert step is not None and step >= max(last, reached + 1), f"step {step} after {last} was saved"
        assert value_of(state) // 2 == step, f"step {step} holds {value_of(state)}"
        reached = step
    print(f"kills {kills} in-save {in_save} reached {reached}")


def save_for_ever(folder: Path, sink: int) -> None:
    checkpoints = Checkpoints(folder, keep=1)
    step = (checkpoints.load(state_of(-1)) or 0) + 1
    while True:
        checkpoints.save(step, state_of(2 * step))
        os.write(sink, struct.pack("q", step))
        if step % 3 == 0:
            checkpoints.save(step, state_of(2 * step + 1))  # in the place of the one before
        step += 1


def on_ranks(folder: Path) -> None:
    for count, name, act in (
        (2, "two", "save"), (2, "two", "load"), (1, "two", "elsewhere"),
        (1, "one", "save"), (2, "one", "elsewhere"), (2, "bad", "errors"),
    ):  # fmt: skip
        ranks(count, folder / name, act)


def ranks(count: int, folder: Path, act: str) -> None:
    """Fork ``count`` processes in one gloo group, each of which acts."""
    store, children = folder.with_suffix(f".{act}{count}"), []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                dist.init_process_group("gloo", store=FileStore(str(store), count), rank=rank, world_size=count)
                rank_acts(rank, count, Checkpoints(folder), act)
                dist.destroy_process_group()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count


def rank_acts(rank: int, count: int, checkpoints: Checkpoints, act: str) -> None:
    checkpoint_plans.PIECE_BYTES = 100_000
    weight = torch.arange(100_000.0).view(1000, 100)
    if act == "save":
        model = nn.ParameterDict({"weight": Parameter(weight.clone())})
        checkpoints.save(5, {"model": model, "progress": {"step": 5}}, own={"rank": rank, "rng": rng_state()})
    elif act == "errors":
        model = nn.ParameterDict({"weight": Parameter(weight.clone())})
        path = checkpoints.save(1, {"model": model})
        if rank == 0:
            victim = path / "__1_0.distcp"
            victim.write_bytes(victim.read_bytes()[:-1])
        dist.barrier()
        fails(lambda: checkpoints.load({"model": model}), "damaged: __1_0.distcp", "none is before it")
        fails(lambda: checkpoints.save(0, {"model": model}), "accepted: 1 or more")
        checkpoints.forget_after(0)
        checkpoints.save(1, {"model": model})
        wrong = nn.ParameterDict({"weight": Parameter(torch.zeros(1000, 101 if rank else 100))})
        fails(lambda: checkpoints.load({"model": wrong}), "model.weight")
    else:
        model = nn.ParameterDict({"weight": Parameter(torch.zeros(1000, 100))})
        state, own = {"model": model, "progress": {"step": 0}}, {}
        if act == "load":
            assert checkpoints.load(state, own) == 5 and own["rank"] == rank
        else:
            fails(lambda: checkpoints.load(state, own), f"saved by {3 - count} ranks", f"not {count}")
            assert checkpoints.load(state) == 5 and not own
        assert torch.equal(model["weight"], weight) and state["progress"] == {"step": 5}


def memory(folder: Path) -> None:
    def most() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    table = torch.ones(1_000_000, 100)
    Checkpoints(folder).save(1, state_of(1))
    Checkpoints(folder).load(state_of(0))
    before = most()
    Checkpoints(folder).save(2, {"t": {"table": table}})
    saved = most()
    Checkpoints(folder).load({"t": {"table": table}})
    print(saved - before, most() - saved)


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, *rest = sys.argv[1:]
    if command == "kill":
        kill(Path(rest[0]), int(rest[1]))
    elif command == "ranks":
        on_ranks(Path(rest[0]))
    else:
        memory(Path(rest[0]))
