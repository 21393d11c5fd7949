"""Ranks of a gloo group in processes of their own: what the tests of sharding share."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def _join(rank: int, ranks: int, work: Callable[..., Any], folder: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        torch.save(work(*arguments), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # What it had to do is done and stored. An interpreter that comes to its own end frees what libraries still hold in
    # an order of its own, and some abort then (DeepSpeed, where threads of gloo live): a rank lost for no reason.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def on_ranks(ranks: int, folder: Path, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``work(*arguments)`` gives on each rank; it is a function of a module, and what it gives can be saved."""
    (folder / "store").unlink(missing_ok=True)
    spawn(_join, (ranks, work, str(folder), arguments), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
