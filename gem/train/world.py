"""The processes of a training run: alone, or as torchrun started them."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gem.errors import RequestError


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    _last: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' sum of x, in x itself."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def before_leaving(self, act: Callable[[], None]) -> None:
        """Have ``act`` called before the ranks part: let go of what holds their process group.

        DDP's reducer must not be its last holder. It frees the group with Python's lock held and waits for gloo's
        threads, which need the lock to free their tensors: a rank in five or so hung for ever (torch 2.13).
        """
        self._last.append(act)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: str = "auto") -> Iterator[World]:
    """Join the ranks that torchrun started, or be alone. ``device``: auto, cpu or cuda.

    NCCL between GPUs, gloo between CPUs. RequestError where CUDA is asked for and not there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device {device!r}; accepted: auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"device cuda: torch {torch.__version__} sees no GPU; accepted: cpu, or a machine with one")
    kind = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    where = torch.device(kind)
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise RequestError(
                f"rank {rank}: no GPU number {local}; accepted: at most {torch.cuda.device_count()} a host"
            )
        where = torch.device("cuda", local)
        torch.cuda.set_device(where)
    if size > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    world = World(rank, size, where)
    try:
        yield world
    finally:
        for act in world._last:
            act()
        if size > 1:
            gc.collect()  # what was let go of may be held in a cycle
            dist.destroy_process_group()
