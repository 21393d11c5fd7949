"""Shared memory of the emulated GPU: what may not be read holds a NaN of a kind that no arithmetic makes (``Trap``).

It is held twice, as ordinary instructions see it and as the asynchronous units (copies, tensor cores) see it: what the
former write reaches the latter with a fence. Buffers of floating-point types are kept in fp32, rounded to their type,
whole numbers in 64 bits, in which a trap lies below all of theirs.
"""

from collections.abc import Callable
from enum import IntEnum
from math import prod
from typing import Any

import torch
from torch import Tensor


class Fault(AssertionError):
    """The kernel did what the hardware punishes: never, sometimes or always."""


class Race(Fault):
    """Something is read that is not there yet, or not any more."""


class Trap(IntEnum):
    """The last bits of what shared memory holds that must not be read."""

    FRESH = 1
    COPYING = 2
    UNFENCED = 3


_MEANS = {
    Trap.FRESH: "nothing was ever written there",
    Trap.COPYING: "a copy into it is under way",
    Trap.UNFENCED: "no fence_async_shared stands behind the instructions that wrote it",
}
_NAN, _BELOW_ALL = 0x7FC00A00, -(2**40)
_NOBODYS = 1234567890


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32) if x.is_floating_point() else x


def _trap(x: Tensor, kind: Trap) -> None:
    _bits(x).fill_((_NAN if x.is_floating_point() else _BELOW_ALL) + kind)


def _holds(x: Tensor, kind: Trap) -> bool:
    return bool((_bits(x) == (_NAN if x.is_floating_point() else _BELOW_ALL) + kind).any())


def _refuse_trapped(x: Tensor, who: Callable[[], str], where: Callable[[], str]) -> None:
    if x.is_floating_point():
        total = float(x.sum())
        if total == total:  # no NaN of any kind
            return
    for kind, meaning in _MEANS.items():
        if _holds(x, kind):
            raise Race(f"{who()} reads {where()}: {meaning}")


class Shared:
    """A view of shared memory: ``own`` as instructions see it, ``seen`` as the asynchronous units do."""

    def __init__(self, name: Callable[[], str], own: Tensor, seen: Tensor, dtype: torch.dtype, layout: Any) -> None:
        self.name, self.own, self.seen, self.dtype, self.layout = name, own, seen, dtype, layout

    @classmethod
    def allocate(cls, name: Callable[[], str], shape: list[int], dtype: torch.dtype, layout: Any) -> "Shared":
        own, seen = (torch.zeros(shape, dtype=torch.float32 if dtype.is_floating_point else torch.int64) for _ in "12")
        _trap(own, Trap.FRESH)
        _trap(seen, Trap.FRESH)
        return cls(name, own, seen, dtype, layout)

    @property
    def shape(self) -> list[int]:
        return list(self.own.shape)

    @property
    def rank(self) -> int:
        return self.own.dim()

    @property
    def numel(self) -> int:
        return self.own.numel()

    def index(self, at: int) -> "Shared":
        if not 0 <= at < self.own.shape[0]:
            raise Fault(f"{self.name()} has {self.own.shape[0]} entries: there is no [{at}]")
        return type(self)(lambda: f"{self.name()}[{at}]", self.own[at], self.seen[at], self.dtype, self.layout)

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        if not 0 <= start <= start + length <= self.own.shape[dim]:
            raise Fault(f"{self.name()} is {self.shape}: there is no {start}:{start + length} in its dimension {dim}")
        return self._view(lambda x: x.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return self._view(lambda x: x.permute(*order))

    def reshape(self, shape: list[int]) -> "Shared":
        return self._view(lambda x: x.view(shape))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        """The same memory from its start. Nothing may be read that was written through another view."""
        count = prod(shape)
        if dtype != self.dtype or count > self.numel:
            raise Fault(f"{self.name()}, {self.dtype} {self.shape}, is no {dtype} {shape}")
        return self._view(lambda x: x.view(-1)[:count].view(shape))

    def _view(self, of: Callable[[Tensor], Tensor]) -> "Shared":
        return type(self)(self.name, of(self.own), of(self.seen), self.dtype, self.layout)

    def read(self, who: Callable[[], str]) -> Tensor:
        """What an instruction gets. Numbers that nobody wrote are none of use, which a kernel may read and not use."""
        if self.own.is_floating_point():
            return self._copy(self.own, who)
        fresh = self.own == _BELOW_ALL + Trap.FRESH
        return self._copy(torch.where(fresh, _NOBODYS, self.own), who)

    def read_async(self, who: Callable[[], str]) -> Tensor:
        """What an asynchronous unit gets, if this is ``unchanged`` when it is done."""
        return self._copy(self.seen, who)

    def unchanged(self, since: Tensor, who: Callable[[], str]) -> None:
        """Refused if this is not what ``read_async`` gave."""
        if not torch.equal(_bits(self.seen), _bits(since)):
            self._copy(self.seen, who)
            raise Race(f"{who()} reads {self.name()}: something else was written there in the meantime")

    def _copy(self, x: Tensor, who: Callable[[], str]) -> Tensor:
        copy = x.clone(memory_format=torch.contiguous_format)
        _refuse_trapped(copy, who, self.name)
        return copy

    def write(self, worker: Any, value: Tensor) -> None:
        """By an instruction."""
        if value.dtype != self.dtype or list(value.shape) != self.shape:
            raise Fault(
                f"{worker.name} stores {value.dtype} {list(value.shape)} to {self.name()}, "
                f"which is {self.dtype} {self.shape}"
            )
        self.refuse_copying(lambda: f"{worker.name} writes")
        self.own.copy_(value)
        _trap(self.seen, Trap.UNFENCED)
        worker.unfenced.append(self)

    def refuse_copying(self, what: Callable[[], str]) -> None:
        if _holds(self.own, Trap.COPYING):
            raise Race(f"{what()} {self.name()} while a copy into it is under way")

    def begin_copy(self) -> None:
        self.refuse_copying(lambda: "a copy is asked for into")
        _trap(self.own, Trap.COPYING)
        _trap(self.seen, Trap.COPYING)

    def end_copy(self, value: Tensor) -> None:
        self.own.copy_(value)
        self.seen.copy_(value)

    def fence(self) -> None:
        self.seen.copy_(self.own)
