"""What a kernel's names hold when it runs on the host: whole numbers, tiles in registers, pointers, descriptors."""

import operator
from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from gluon_machine import Loaded, Product
from gluon_memory import Fault
from torch import Tensor

_LOW, _HIGH = -(2**31), 2**31


class Int(int):
    """A whole number as the GPU has it: 32 bits, and divisions round towards zero."""

    def to(self, dtype: torch.dtype) -> Any:
        if dtype == torch.float32:
            return float(self)
        return Long(self) if dtype == torch.int64 else Int(self)


class Long(Int):
    """The same in 64 bits."""


def _divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _whole(operation: Callable[[int, int], int], name: str) -> Callable[[Any, Any], Any]:
    def method(a: Any, b: Any) -> Any:
        if not isinstance(b, int):
            return NotImplemented
        result = operation(int(a), int(b))
        if isinstance(a, Long) or isinstance(b, Long):
            return Long(result)
        if not _LOW <= result < _HIGH:
            raise Fault(f"{int(a)} {name} {int(b)} does not fit into 32 bits")
        return Int(result)

    return method


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    name: getattr(operator, f"__{name}__") for name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift")
} | {"floordiv": _divide, "mod": lambda a, b: a - b * _divide(a, b)}
for _name, _operation in _OPERATIONS.items():
    _method = _whole(_operation, _name)
    setattr(Int, f"__{_name}__", _method)
    setattr(Int, f"__r{_name}__", lambda a, b, of=_method: of(b, a) if isinstance(b, int) else NotImplemented)


class Tile:
    """A tensor in registers, which no operation changes. What a load or a product gives may not be there yet."""

    __slots__ = ("source",)

    def __init__(self, source: Tensor | Loaded | Product) -> None:
        self.source = source

    @property
    def value(self) -> Tensor:
        return self.source if isinstance(self.source, Tensor) else self.source.value()

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.source.shape)

    def to(self, dtype: torch.dtype) -> "Tile":
        return Tile(self.value.to(dtype))

    def reshape(self, shape: Any) -> "Tile":
        return Tile(self.value.reshape(*shape))

    def permute(self, order: Any) -> "Tile":
        return Tile(self.value.permute(*order))

    def __getitem__(self, key: Any) -> "Tile":
        return Tile(self.value[key])

    def __neg__(self) -> "Tile":
        return Tile(-self.value)

    def __invert__(self) -> "Tile":
        return Tile(~self.value)

    __hash__ = None  # type: ignore[assignment]


def raw(x: Any) -> Any:
    """The torch tensor of a tile; anything else as it is."""
    return x.value if isinstance(x, Tile) else x


def _tiled(operation: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Tile, Any], Any]:
    def method(a: Tile, b: Any) -> Any:
        if isinstance(b, Pointer):
            return NotImplemented
        return Tile(operation(raw(b), a.value) if swapped else operation(a.value, raw(b)))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"):
    for _swapped in (False, True):
        setattr(Tile, f"__{'r' * _swapped}{_name}__", _tiled(getattr(operator, f"__{_name}__"), _swapped))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tile, f"__{_name}__", _tiled(getattr(operator, _name), False))


class PointerType:
    """What a pointer is of."""

    def __init__(self, element: torch.dtype) -> None:
        self.element_ty = element


class Pointer:
    """An element of a tensor in global memory, or a tile of them; as a number (``to``) it stays one."""

    def __init__(self, tensor: Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at
        self.dtype = self.type = PointerType(tensor.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        if isinstance(offset, int):
            offset = int(offset)
        return Pointer(self.tensor, self.at + offset)

    __radd__ = __add__

    def to(self, dtype: torch.dtype) -> "Pointer":
        if dtype != torch.int64:
            raise Fault(f"an address has 64 bits, not those of {dtype}")
        return self

    def item(self) -> Any:
        """Of one element."""
        if not 0 <= self.at < self.tensor.numel():
            raise Fault(f"element {self.at} of a tensor of {self.tensor.numel()}")
        return self.tensor.view(-1)[self.at].item()

    def elements(self, mask: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """(the tensor in one row, places in it, which of them count); refused where one lies outside."""
        flat = self.tensor.view(-1)
        at = torch.as_tensor(raw(self.at))
        wanted = None if mask is None else torch.as_tensor(raw(mask)).expand(at.shape)
        inside = (at >= 0) & (at < flat.numel())
        if not bool((inside if wanted is None else inside | ~wanted).all()):
            raise Fault(f"elements {int(at.min())} to {int(at.max())} of a tensor of {flat.numel()}")
        return flat, at, wanted


class Descriptor:
    """What the copy engine knows of a tensor: places are counted in elements and wrap as 64-bit addresses do."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block: list[int], layout: Any) -> None:
        self.base, self.sizes, self.strides, self.block_shape, self.layout = base, shape, strides, block, layout
        self.dtype = base.dtype
        nbytes = prod(block) * base.element_size()
        self.block_type = SimpleNamespace(nbytes=nbytes, shape=block, element_ty=base.dtype)
        self.type = SimpleNamespace(block_type=self.block_type)
        self._flat = base.as_strided((_extent(base),), (1,))

    def read(self, at: list[int]) -> Tensor:
        """A tile in fp32, zeros outside."""
        tile = torch.zeros(self.block_shape)
        part, region = self.region(at)
        if region is not None:
            tile[part] = region
        return tile

    def region(self, at: list[int]) -> tuple[tuple[slice, ...], Tensor | None]:
        """What of a tile lies inside, and that part of the tensor."""
        if len(at) != len(self.sizes) or not all(_LOW <= x < _HIGH for x in at):
            raise Fault(f"{at} is no place in a tensor of {self.sizes}")
        first = [-int(x) if x < 0 else 0 for x in at]
        last = [min(size - int(x), n) for x, size, n in zip(at, self.sizes, self.block_shape, strict=True)]
        part = tuple(slice(a, max(a, b)) for a, b in zip(first, last, strict=True))
        counts = [x.stop - x.start for x in part]
        if 0 in counts:
            return part, None
        wrap = 2**64 // self.base.element_size()
        start = sum((int(x) + a) * stride for x, a, stride in zip(at, first, self.strides, strict=True)) % wrap
        steps = [stride if count > 1 else 0 for stride, count in zip(self.strides, counts, strict=True)]
        end = start + sum(step * (count - 1) for step, count in zip(steps, counts, strict=True))
        if end >= self._flat.numel():
            raise Fault(f"a copy at {at} touches elements {start} to {end} of {self._flat.numel()}")
        return part, self._flat.as_strided(counts, steps, self._flat.storage_offset() + start)


def _extent(x: Tensor) -> int:
    """Elements from the first to the last, those between that are others' included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
