"""What launchers share: grids, strides, precision, TMA descriptors."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.kernels.config import Config
from gem.kernels.device import INTERPRETED

# A tile has at most 256 rows: below this row stride its offsets fit into 32 bits.
_WIDE_STRIDE = 2**22
_MOST_TMA_ROWS = 2**30
_MOST_TMA_STRIDE = 2**34
_ANY = 0x7FFF0000


_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, key: Any = None, **options: Any) -> None:
    """Run a kernel on the device of its first tensor, or only compile it inside ``compiling_only``.

    ``key``: whatever decides how Triton specialises this launch, so that the next launch with an equal key runs what
    this one compiled. Triton's own way there looks at each argument anew, 60 to 100 us of Python for these kernels.
    None: Triton's way. The constants in ``options`` must come last in the kernel's signature and in its order.
    """
    if _compiling.get():
        kernel.warmup(*arguments, grid=grid, **options)
        return
    key = None if key is None or _hooked() else (kernel, key)
    ready = _ready.get(key)
    if ready is not None:
        compiled, constants, index = ready
        compiled.run(
            grid[0], grid[1], 1, torch._C._cuda_getCurrentRawStream(index), compiled.function, compiled.packed_metadata,
            None, None, None, *arguments, *constants,
        )  # fmt: skip
        return
    compiled = kernel[grid](*arguments, **options)
    if key is not None:
        constants = tuple(value for name, value in options.items() if name not in _OPTIONS)
        _ready[key] = compiled, constants, torch.cuda.current_device()


_OPTIONS = ("num_warps", "num_stages", "maxnreg")  # of a launch, no arguments of the kernel
# (kernel, key) -> what Triton compiled for it, its constants, the device.
_ready: dict[Any, tuple[Any, tuple, int]] = {}
# The shortcut calls what JITFunction.run calls, which is no public interface: only in versions where it was tried.
_SHORTCUT = triton.__version__.startswith("3.6.") and not INTERPRETED


def _hooked() -> bool:
    """Whether launches must go Triton's way: an untried version, or a profiler that wants to see them."""
    hooks = knobs.runtime
    return not _SHORTCUT or bool(hooks.launch_enter_hook.calls) or bool(hooks.launch_exit_hook.calls)


def key_of(*tensors: Tensor) -> tuple | None:
    """The part of a launch's key that its tensors decide; None where one does not start at 16 bytes."""
    starts = 0
    for x in tensors:
        starts |= x.data_ptr()
    if starts % 16:
        return None
    return (tensors[0].get_device(), *[(x.dtype, x.stride()) for x in tensors])


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Launches inside compile and do not run."""
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)


def grid_of(config: Config, tiles: Tensor, heads: int) -> tuple[int, int]:
    """Programs: one for each tile and head, or as many as the GPU holds at once where the grid is persistent."""
    count = tiles.shape[0] * heads
    if config.persistent:
        count = min(count, multiprocessors(tiles.device) * config.persistent)
    return count, 1


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; for the interpreter a few, so that programs get more than one turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def last_contiguous(x: Tensor) -> Tensor:
    """x with elements of a row's head beside each other: rows may have any stride, single elements may not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def tile_dim(head_dim: int) -> int:
    """Columns of a tile: a power of two, and 16 at least for the matrix units."""
    return max(16, 1 << (head_dim - 1).bit_length())


def wide(*tensors: Tensor) -> bool:
    """Whether offsets inside a tile may need 64 bits."""
    return any(x.stride(0) >= _WIDE_STRIDE for x in tensors)


def precision_of(x: Tensor) -> str:
    """Of products: full fp32 for fp32 inputs (tf32 keeps 10 bits), irrelevant for the 16-bit types."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def tma_fits(*tensors_THD: Tensor) -> bool:
    """Whether the copy engine can read tiles of these: 16-byte strides and starts, heads side by side, 2**30 rows.

    Not for fp32: its products run on the ordinary ALUs, whose operands from TMA tiles spilled 15 KB a thread (3.6).
    """
    return all(_tma_fits(x) for x in tensors_THD)


def _tma_fits(x: Tensor) -> bool:
    rows, _, head_dim = x.shape
    row_bytes = x.stride(0) * x.element_size()
    return (
        x.element_size() == 2 and head_dim == tile_dim(head_dim) and x.stride(2) == 1 and x.stride(1) == head_dim
        and row_bytes % 16 == 0 and 0 < row_bytes < _MOST_TMA_STRIDE
        and x.data_ptr() % 16 == 0 and 0 < rows <= _MOST_TMA_ROWS
    )  # fmt: skip


def ragged(x_THD: Tensor, block: int) -> TensorDescriptor:
    """A descriptor of x as [T, H * D] from which tiles of any sample are read with zeros behind its end.

    The trick is that of triton.tools.ragged_tma (addresses wrap at 64 bits): two leading dimensions shift the start so
    that the sample's end lies at row 2**30, where the hardware's bounds check cuts.
    """
    _, heads, head_dim = x_THD.shape
    stride = x_THD.stride(0)
    # Without its __init__, which checks what tma_fits has checked: 8 us a descriptor.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.padding = x_THD, "zero"
    descriptor.shape = [_ANY, _ANY, _MOST_TMA_ROWS, heads * head_dim]
    descriptor.strides = [2**34 - stride, stride, stride, 1]
    descriptor.block_shape = [1, 1, block, head_dim]
    return descriptor
