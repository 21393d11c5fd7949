"""Shared by the tests of rank processes: ranks that fail in each way, and a worker's object that starts them."""

import os
import signal
import time

import torch
import torch.distributed as dist

from gem.harness import sharding_ranks
from gem.harness.sharding_ranks import Ranks


class Rank:
    """Answers, or does not."""

    def __init__(self, rank: int, ranks: int, ill: int = -1) -> None:
        self.rank, self.ranks = rank, ranks
        if rank == ill:
            raise ValueError(f"rank {rank} cannot be built")

    def add(self, number: int) -> tuple[int, int, int]:
        """Process, group's size, and the ranks' sum of ``number`` + rank."""
        x = torch.tensor([number + self.rank])
        dist.all_reduce(x)
        return os.getpid(), int(os.environ["LOCAL_RANK"]), int(x)

    def fail(self, how: str, ill: int) -> None:
        """One goes wrong, the others wait for it in a collective."""
        if self.rank == ill:
            if how == "raise":
                raise ValueError("a table\nhas no rows")
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(3)
            if how == "hang":
                time.sleep(3600)
        dist.all_reduce(torch.zeros(1))


class Host:
    """In a worker."""

    def add(self, ranks: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Two calls of one group."""
        with Ranks(ranks, Rank, gpus=2) as group:
            return group.call("add", 1), group.call("add", 10)

    def fail(self, how: str, ranks: int, ill: int, patience_s: float = 60.0) -> None:
        """Ranks of which one is ill."""
        sharding_ranks.PATIENCE_S = patience_s
        with Ranks(ranks, Rank) as group:
            group.call("fail", how, ill)

    def built_ill(self) -> None:
        """One that cannot be built."""
        with Ranks(2, Rank, 1):
            pass

    def pids(self, folder: str) -> None:
        """Start ranks, tell who they are, and hang."""
        group = Ranks(2, Rank)
        pids = [pid for pid, _, _ in group.call("add", 0)]
        with open(f"{folder}/part", "w") as file:
            file.write(" ".join(map(str, pids)))
        os.rename(f"{folder}/part", f"{folder}/pids")
        time.sleep(3600)
