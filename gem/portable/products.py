"""Batched products and the arithmetic they run in.

CPU: half-precision inputs are computed in float32 (a bf16 product would be rounded to bf16). CUDA: half-precision
operands stay half for the tensor cores, products leave in float32.
"""

import torch
from torch import Tensor

# Elements of one score tile. CPU: tiles of 1.3 MB (scores, and their gradient) stay close to the cores; with 4 MB two
# cores of a Zen 5 server fell from 160 to 57 GFLOP/s. GPU: 256 MB.
_TILE_ELEMENTS = {"cpu": 320 * 1024, "cuda": 64 * 1024 * 1024}
_TILE_ROWS = {"cpu": (32, 256), "cuda": (128, 4096)}


def compute_dtype(x: Tensor) -> torch.dtype:
    """Type in which rows enter the products."""
    if x.dtype in (torch.bfloat16, torch.float16) and x.device.type != "cuda":
        return torch.float32
    return x.dtype


def score_dtype(x: Tensor) -> torch.dtype:
    """Type of scores, weights and accumulators."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def tile_elements(device: torch.device) -> int:
    """Elements that one score tile may have."""
    return _TILE_ELEMENTS.get(device.type, _TILE_ELEMENTS["cpu"])


def tile_rows(device: torch.device, heads: int, keys: int) -> int:
    """Query rows of a lone sample's tile, so that [heads, rows, keys] fits the tile budget."""
    low, high = _TILE_ROWS.get(device.type, _TILE_ROWS["cpu"])
    rows = tile_elements(device) // max(1, heads * keys)
    return min(high, max(low, rows // low * low))


class Workspace:
    """Reused score tiles: fresh buffers of a megabyte cost more in page faults than the arithmetic done on them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = 1
        for n in shape:
            size *= n
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:size].view(shape)


def product(a: Tensor, b: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """alpha * a @ b, batched, in the score type."""
    if _half(a) or _half(b):
        half = a.dtype if _half(a) else b.dtype
        result = torch.bmm(a.to(half), b.to(half), out_dtype=torch.float32)
        if out is None:
            return result if alpha == 1.0 else result.mul_(alpha)
        return torch.mul(result, alpha, out=out)
    if out is None:
        out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
    return torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)


def add_product(into: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """into += alpha * a @ b, batched."""
    if _half(a) or _half(b):
        into.add_(product(a, b), alpha=alpha)
    else:
        into.baddbmm_(a, b, alpha=alpha)


class KeySum:
    """Gradient of keys, [GH, LK, D], summed over query tiles; the first tile overwrites where it covers all keys."""

    def __init__(self, into_BLD: Tensor) -> None:
        self.into_BLD, self._empty = into_BLD, True

    def add(self, keys: slice, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
        """into[:, keys] += alpha * a @ b."""
        if self._empty and keys == slice(0, self.into_BLD.shape[1]):
            product(a, b, alpha, out=self.into_BLD)
        else:
            if self._empty:
                self.into_BLD.zero_()
            add_product(self.into_BLD[:, keys], a, b, alpha)
        self._empty = False


def _half(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)
