"""Ranks of a gloo group in processes of their own: what the tests of sharding share.

They fork from a server that has imported what they need: eight ranks that import torch for themselves take half a
minute of two cores.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


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
    multiprocessing.get_context("forkserver").set_forkserver_preload(["sharding_program", "gem.sharding.start"])
    start_processes(_join, (ranks, work, str(folder), arguments), nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
