"""What launchers share: grids, strides, precision, TMA descriptors."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from gem.kernels.config import Config
from gem.kernels.device import INTERPRETED
from gem.kernels.schedule import Batch

# A tile has at most 256 rows: below this row stride its offsets fit into 32 bits.
_WIDE_STRIDE = 2**22
MOST_TMA_ROWS = 2**30
_MOST_TMA_STRIDE = 2**34  # ragged() subtracts a row from it, and a descriptor's strides end at 2**40 bytes
_ANY = 0x7FFF0000  # a dimension whose bounds nothing meets


_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


class Launch:
    """A kernel with its constants, for arguments of one kind (``kind_of``).

    The first two runs go Triton's way, which looks at each argument to decide what to compile: 60 to 100 us of Python
    for these kernels. Arguments of one kind decide the same, so later runs call at once what these compiled.
    Constants come last in the kernel's signature and in its order. ``ragged``: which of the tensors the kernel takes as
    descriptors (``ragged()``), and the rows of the tiles that it reads from them; ``layout``: a Gluon kernel's, of such
    tiles in shared memory.
    """

    def __init__(
        self, kernel: Any, *, warps: int, stages: int = 1, registers: int | None = None,
        ragged: dict[int, int] | None = None, layout: Any = None, **constants: Any,
    ) -> None:  # fmt: skip
        if tuple(kernel.arg_names[-len(constants) :]) != tuple(constants):
            raise TypeError(f"{kernel.__name__} does not end in {', '.join(constants)}: they are passed by position")
        self.kernel, self.constants = kernel, tuple(constants.values())
        self.options = constants | {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
        self.ragged, self.layout = ragged or {}, layout
        self.ran = False  # once before: those that nobody remembers never run again
        self.ready: _Ready | None = None

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run it on the current device, or only compile it inside ``compiling_only``."""
        if self.ready is not None and not _hooked() and not _compiling.get():
            self.ready.run(grid[0], arguments)
            return
        given = tuple(self._given(i, x) for i, x in enumerate(arguments))
        if _compiling.get():
            self.kernel.warmup(*given, grid=grid, **self.options)
        else:
            compiled = self.kernel[grid](*given, **self.options)
            if self.ran and len(grid) == 1 and not _hooked():
                self.ready = _Ready.of(compiled, given, self.constants)
            self.ran = True

    def _given(self, position: int, x: Any) -> Any:
        return ragged(x, self.ragged[position], self.layout) if position in self.ragged else x


@dataclass(frozen=True)
class _Ready:
    """A compiled kernel on its device, run past Triton's wrapper, which goes through every argument once more."""

    launch: Callable[..., None]  # in C
    function: int
    device: int
    # What stands between them and the arguments: how to launch, no scratch memory, the kernel's resources, no hooks.
    options: tuple[Any, ...]
    constants: tuple[Any, ...]
    descriptors: tuple[tuple[int, Callable[[int], Any], tuple[int, ...]], ...]  # position, encoder, shape and strides

    @classmethod
    def of(cls, compiled: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> "_Ready | None":
        """None where the kernel needs what is not prepared here."""
        launcher, wrapper = compiled.run, compiled.run.launch
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        at = [i for i, x in enumerate(arguments) if hasattr(x, "block_shape")]  # Triton's descriptors and Gluon's
        descriptors = []
        if at:
            hidden = inspect.getclosurevars(wrapper).nonlocals
            wrapper = hidden["launcher"]
            for i, meta in zip(at, hidden["tensordesc_meta"], strict=True):
                shape, strides = arguments[i].shape, arguments[i].strides
                descriptors.append((i, _encoder(meta, shape, strides), (*shape, *strides)))
        options = (
            launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata, None, None,
            None,
        )  # fmt: skip
        return cls(
            wrapper, compiled.function, torch.cuda.current_device(), options, constants, tuple(descriptors)
        )  # fmt: skip

    def run(self, programs: int, arguments: tuple[Any, ...]) -> None:
        """Launch on the current stream; tensors stand where the kernel takes descriptors."""
        if self.descriptors:
            given, done = [], 0
            for position, encode, rest in self.descriptors:
                given += arguments[done:position]
                given.append(encode(arguments[position].data_ptr()))
                given += rest
                done = position + 1
            arguments = (*given, *arguments[done:])
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        self.launch(programs, 1, 1, stream, self.function, *self.options, *arguments, *self.constants)


def _encoder(meta: dict[str, Any], shape: list[int], strides: list[int]) -> Callable[[int], Any]:
    """What makes the hardware's descriptor of memory at an address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    active: Any = triton.runtime.driver.active
    fill = active.utils.fill_tma_descriptor
    swizzle, size, block = meta["swizzle"], meta["elem_size"], meta["block_size"]
    kind, zeros = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], 0
    return lambda address: fill(address, swizzle, size, kind, block, shape, strides, zeros)


@dataclass(frozen=True)
class Plan:
    """What a launcher has decided for calls of one kind."""

    config: Config
    fold: bool
    strides: tuple[int, ...]
    launch: Launch


# What launchers have prepared, by kernel, kind of the arguments and whatever else decides.
PLANS: dict[Any, Any] = {}
_MOST_PLANS = 4096


def remember(key: Any, plan: Any) -> None:
    """Keep a plan. Shapes that never come again must not fill the memory: past a bound all are made anew."""
    if len(PLANS) >= _MOST_PLANS:
        PLANS.clear()
    PLANS[key] = plan


# The shortcut calls what JITFunction.run calls, which is no public interface: only in versions where it was tried.
_SHORTCUT = triton.__version__.startswith("3.6.") and not INTERPRETED


def _hooked() -> bool:
    """Whether launches must go Triton's way: an untried version, or a profiler that wants to see them."""
    hooks = knobs.runtime
    return not _SHORTCUT or bool(hooks.launch_enter_hook.calls) or bool(hooks.launch_exit_hook.calls)


def kind_of(batch: Batch, *tensors_THD: Tensor) -> tuple | None:
    """What of a call's tensors and lengths decides how its kernels are compiled and which tiles they use.

    Type (one for all), strides, device, mask, and the class of lengths (config.Shape). None where a tensor does not
    start at 16 bytes: Triton then compiles for just those that do, so that such a call is prepared anew.
    """
    starts, fits = 0, 0
    for x in tensors_THD:
        starts |= x.data_ptr()
        fits = 2 * fits + (0 < x.shape[0] <= MOST_TMA_ROWS)
    if starts % 16:
        return None
    samples = batch.size or 1
    first = tensors_THD[0]
    return (
        first.dtype, first.shape[1:], first.get_device(), fits, batch.left, batch.right, batch.q_offsets is None,
        ((batch.shared or batch.q_rows // samples) - 1).bit_length(), (batch.k_rows // samples - 1).bit_length(),
        *[x.stride() for x in tensors_THD],
    )  # fmt: skip


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Launches inside compile and do not run."""
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)


def grid_of(config: Config, tiles: Tensor, heads: int) -> tuple[int]:
    """Programs: one for each tile and head, or as many as the GPU holds at once where the grid is persistent."""
    count = tiles.shape[0] * heads
    if config.persistent:
        count = min(count, multiprocessors(tiles.device) * config.persistent)
    return (count,)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; for the interpreter a few, so that programs get more than one turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of x's shape, contiguous whatever x's strides are."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@functools.cache
def nothing(device: torch.device) -> Tensor:
    """An empty fp32 tensor, where a kernel or a caller asks for one and nobody looks: not an allocation a call."""
    return torch.empty(0, dtype=torch.float32, device=device)


def last_contiguous(x: Tensor) -> Tensor:
    """x with elements of a row's head beside each other: rows may have any stride, single elements may not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def tile_dim(head_dim: int) -> int:
    """Columns of a tile: a power of two, and 16 at least for the matrix units."""
    return max(16, 1 << (head_dim - 1).bit_length())


def wide(*tensors: Tensor) -> bool:
    """Whether offsets inside a tile may need 64 bits."""
    return any(x.stride(0) >= _WIDE_STRIDE for x in tensors)


def folds(activation: str, x: Tensor) -> bool:
    """Whether GDPA's weights take out_scale before they are rounded, not the product with them after.

    fp16 ends at 65,504, which weights may pass where out_scale times them does not (1 / N, as HSTU has it).
    """
    return activation != "softmax" and x.dtype == torch.float16


def precision_of(x: Tensor) -> str:
    """Of products: full fp32 for fp32 inputs (tf32 keeps 10 bits), irrelevant for the 16-bit types."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def tma_fits(*tensors_THD: Tensor) -> bool:
    """Whether the copy engine can read tiles of these: 16-byte strides and starts, heads side by side, 2**30 rows.

    Not for fp32: its products run on the ordinary ALUs, whose operands from TMA tiles spilled 15 KB a thread (3.6).
    """
    return all(_tma_fits(x) for x in tensors_THD)


def _tma_fits(x: Tensor) -> bool:
    rows, heads, head_dim = x.shape
    row_bytes = x.stride(0) * x.element_size()
    return (
        x.element_size() == 2 and head_dim == tile_dim(head_dim) and x.stride(2) == 1
        and (x.stride(1) == head_dim or heads == 1) and row_bytes % 16 == 0 and 0 < row_bytes < _MOST_TMA_STRIDE
        and x.data_ptr() % 16 == 0 and 0 < rows <= MOST_TMA_ROWS
    )  # fmt: skip


def ragged(x_THD: Tensor, block: int, layout: Any = None) -> Any:
    """A descriptor of x as [T, H * D] from which tiles of any sample are read with zeros behind its end.

    Gluon's kind with a ``layout``, else Triton's. What is stored through it stops at the sample's end likewise.

    The trick is that of triton.tools.ragged_tma (addresses wrap at 64 bits): two leading dimensions shift the start so
    that the sample's end lies at row 2**30, where the hardware's bounds check cuts.
    """
    _, heads, head_dim = x_THD.shape
    stride = x_THD.stride(0)
    # Without its __init__, which checks what tma_fits has checked: 8 us a descriptor.
    descriptor: Any = object.__new__(TensorDescriptor if layout is None else _gluon_descriptor())
    descriptor.base, descriptor.padding = x_THD, "zero"
    descriptor.shape = [_ANY, _ANY, MOST_TMA_ROWS, heads * head_dim]
    descriptor.strides = [2**34 - stride, stride, stride, 1]
    descriptor.block_shape = [1, 1, block, head_dim]
    if layout is not None:
        descriptor.layout = layout
    return descriptor


@functools.cache
def _gluon_descriptor() -> type:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor
