"""The processes of a training run: alone, or as torchrun started them."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from gem.errors import RequestError
from gem.train.starter import place, told

if TYPE_CHECKING:
    from gem.sharding.watch import Watch

_T = TypeVar("_T")


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    watch: "Watch | None" = field(default=None, repr=False)  # over the other ranks
    # Of all, for what only the host asks of them, which then waits for no kernel; None: the default group.
    host: "dist.ProcessGroup | None" = field(default=None, repr=False)
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

    def part(self) -> None:
        """Do what was to be done before."""
        for act in self._last:
            act()

    def at(self, place: str) -> None:
        """This rank has moved on, and is there now: what is said of it where it goes no further."""
        if self.watch is not None:
            self.watch.at(place)

    def hint(self, how: str) -> None:
        """How to go on after a fault of any rank, for its line."""
        if self.watch is not None:
            self.watch.hint = how

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, a few plain ones."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.host)
        return found

    def all_have(self, something: bool) -> bool:
        """Whether every rank has; on the host, so that no device is waited for."""
        if self.size == 1:
            return something
        count = torch.tensor(int(something))
        dist.all_reduce(count, group=self.host)
        return int(count) == self.size

    def first_alone(self, place: str, act: Callable[[], None]) -> None:
        """Have the first rank act, for as long as it likes; the others wait, while it lives."""
        if self.watch is None:
            if self.first:
                act()
            self.barrier()
            return
        with self.watch.patient(place if self.first else f"waiting for rank 0: {place}"):
            self.watch.after_first(act)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


TIMEOUT_S = 600.0  # as long as NCCL's own


@contextmanager
def join(device: str = "auto", timeout_s: float = TIMEOUT_S) -> Iterator[World]:
    """Join the ranks that torchrun started, or be alone. ``device``: auto, cpu or cuda.

    NCCL between GPUs, gloo between CPUs and on the host. RequestError where CUDA is asked for and not there.

    With other ranks whatever is raised in here, and whatever another rank raises or suffers, ends all of them within
    ``timeout_s`` (gem.sharding.watch); here that is an ``Ended``, and the process ends soon after.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device {device!r}; accepted: auto, cpu, cuda")
    rank, size = place()
    if size == 1:
        world = World(rank, size, _device(device, rank))
        try:
            yield world
        finally:
            world.part()
        return
    from gem.sharding.verdict import Ended
    from gem.sharding.watch import connect

    store, watch = connect(timeout_s)
    try:
        watch.begin()
        where = _device(device, rank)
        watch.at("joining the other ranks")
        # The watch comes before it: what runs into this has been missed there.
        wait, gpu = timedelta(seconds=timeout_s + 60), where.type == "cuda"
        dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=size, timeout=wait)
        host = dist.new_group(backend="gloo", timeout=wait) if gpu else None
        assert not isinstance(host, int)  # every rank is in it
        yield (world := World(rank, size, where, watch, host))
        world.part()
        gc.collect()  # what was let go of may be held in a cycle
        dist.destroy_process_group()
        watch.leave()
    except GeneratorExit:
        raise
    except BaseException as error:
        raise Ended(watch.end(error)) from error


def _device(device: str, rank: int) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"device cuda: torch {torch.__version__} sees no GPU; accepted: cpu, or a machine with one")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = told("LOCAL_RANK", 0)
    if local >= torch.cuda.device_count():
        raise RequestError(f"rank {rank}: no GPU number {local}; accepted: at most {torch.cuda.device_count()} a host")
    where = torch.device("cuda", local)
    torch.cuda.set_device(where)
    return where
