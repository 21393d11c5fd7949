"""Collectives on rows, of any number a rank, each counted by the bytes that it sends.

gloo and NCCL alike move bytes: what they do not know (float8, bf16 on some of gloo's) goes as uint8. Bytes are those
that a rank has to send to others, whichever way the backend goes about it; gem.sharding.counting counts them once more,
beneath torch.distributed, and with them those of FSDP.

Legend: N rows of this rank, D columns, G ranks of the group.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

SUMS = "sums"  # of a few numbers: counts, norms, losses


@dataclass
class Traffic:
    """Bytes that this rank sent to others, by what it was for."""

    sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, what: str, count: int) -> None:
        """Note ``count`` bytes."""
        self.sent[what] += count


_now = threading.local()  # what this thread's collectives are for


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Collectives within are for ``what``, for who watches."""
    before = told()
    _now.what = what
    try:
        yield
    finally:
        _now.what = before


def told() -> str | None:
    """What the collective that this thread is about to start is for; None: its caller did not say."""
    return getattr(_now, "what", None)


def sum_bytes(elements: int, size: int, ranks: int) -> int:
    """What a rank sends in an all-reduce of elements of ``size`` bytes: a reduce-scatter and an all-gather of parts."""
    return 2 * (ranks - 1) * -(-elements // ranks) * size


@dataclass(frozen=True, eq=False)
class Wire:
    """One group and its counter. Every rank of the group makes the same calls."""

    group: dist.ProcessGroup | None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        """G."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return dist.get_rank(self.group)

    def transpose(self, counts_GX: Tensor, what: str) -> Tensor:
        """Row g of each rank's counts [G, X] goes to rank g: row g of the result is what rank g has for this one."""
        received_GX = torch.empty_like(counts_GX)
        if self.size == 1:
            return counts_GX
        with telling(what):
            dist.all_to_all_single(received_GX, counts_GX.contiguous(), group=self.group)
        self.traffic.add(what, counts_GX.nbytes // self.size * (self.size - 1))
        return received_GX

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int], what: str) -> Tensor:
        """The first ``send[0]`` rows of x [N, …] go to rank 0, the next ``send[1]`` to rank 1, …; back come theirs."""
        return self.start_all_to_all(x, send, receive, what)()

    def start_all_to_all(
        self, x: Tensor, send: list[int], receive: list[int], what: str, out: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """``all_to_all`` that is under way; what it gives waits for it. ``out``: where to, contiguous."""
        if self.size == 1:
            return lambda: x
        raw_NB = _bytes(x)
        found_NB = raw_NB.new_empty(sum(receive), raw_NB.shape[1]) if out is None else _bytes(out)
        with telling(what):
            work = dist.all_to_all_single(found_NB, raw_NB, receive, send, group=self.group, async_op=True)
        self.traffic.add(what, (sum(send) - send[self.rank]) * raw_NB.shape[1])

        def wait() -> Tensor:
            assert work is not None, "not a rank of the group"
            work.wait()
            return _like(found_NB, x)

        return wait

    def all_gather(self, x: Tensor, what: str, lengths: list[int] | None = None) -> list[Tensor]:
        """Every rank's x [N, …], whose N may differ, in the order of the ranks. ``lengths``: these N, if known."""
        if self.size == 1:
            return [x]
        if lengths is None:
            counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(self.size)]
            with telling(what):
                dist.all_gather(counts, torch.tensor([len(x)], device=x.device), group=self.group)
            self.traffic.add(what, counts[0].nbytes * (self.size - 1))
            lengths = [int(count) for count in counts]
        raw_NB = _bytes(x)
        padded_NB = raw_NB.new_zeros(max(lengths), raw_NB.shape[1])
        padded_NB[: len(x)] = raw_NB
        parts = [torch.empty_like(padded_NB) for _ in lengths]
        with telling(what):
            dist.all_gather(parts, padded_NB, group=self.group)
        self.traffic.add(what, padded_NB.nbytes * (self.size - 1))
        return [_like(part[:n], x) for part, n in zip(parts, lengths, strict=True)]

    def gather_padded(self, x: Tensor, room: int, what: str) -> Tensor:
        """[G room, …]: every rank's x [N, …] and rows of zeros up to ``room`` of each."""
        padded = x.new_zeros(room, *x.shape[1:])
        padded[: len(x)] = x
        if self.size == 1:
            return padded
        found = x.new_empty(self.size * room, *x.shape[1:])
        self.gather_into(found, padded, what)
        return found

    def gather_into(self, found: Tensor, x: Tensor, what: str, *, async_op: bool = False) -> dist.Work | None:
        """Every rank's x [N, …], alike in shape, into ``found`` [G N, …]; ``async_op``: once the work is waited for."""
        with telling(what):
            work = dist.all_gather_into_tensor(found, x, group=self.group, async_op=async_op)
        self.traffic.add(what, x.nbytes * (self.size - 1))
        return work

    def reduce_scatter(self, x: Tensor, what: str) -> Tensor:
        """This rank's part [N / G, …] of the ranks' sum of x [N, …]."""
        if self.size == 1:
            return x
        found = x.new_empty(len(x) // self.size, *x.shape[1:])
        with telling(what):
            dist.reduce_scatter_tensor(found, x.contiguous(), group=self.group)
        self.traffic.add(what, found.nbytes * (self.size - 1))
        return found

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' sum of x, in x itself."""
        if self.size > 1:
            with telling(SUMS):
                dist.all_reduce(x, group=self.group)
            self.traffic.add(SUMS, sum_bytes(x.numel(), x.itemsize, self.size))
        return x


def _bytes(x: Tensor) -> Tensor:
    """x [N, …] as uint8 [N, B]."""
    return x.contiguous().reshape(len(x), x.shape[1:].numel()).view(torch.uint8)


def _like(raw_NB: Tensor, x: Tensor) -> Tensor:
    return raw_NB.view(x.dtype).reshape(len(raw_NB), *x.shape[1:])
