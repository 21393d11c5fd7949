"""The project's Gluon kernels run on the host: their own Python, on a machine that copies, multiplies and waits.

``emulating`` takes the place of launches, so that the real launchers run on CPU tensors. A kernel's names (gl, tma,
mbarrier and so on) are bound to what stands here; where a kernel needs more, it says what is missing. Layouts say
nothing: values only. Products are fp32 over operands rounded as the kernel rounds them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import gluon_ptx
import torch
import triton.language as tl
from gluon_machine import Barrier, Loaded, Machine, Product, Store, copy_in, wait_products, wait_stores, wait_written
from gluon_memory import Fault, Shared
from gluon_values import Descriptor, Int, Pointer, PointerType, Tile, raw
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.jit import JITFunction

from gem.kernels.hopper.parts import LOGISTIC4
from gem.kernels.launch import PLANS, Launch

_running: list[Machine] = []


@contextmanager
def emulating(seed: int, programs: int = 3) -> Iterator[None]:
    """Inside, launches run here, persistent ones on ``programs`` multiprocessors, and fresh tensors are NaN."""
    functions: dict[int, Any] = {}

    def launch(self: Launch, grid: tuple[int, ...], *arguments: Any) -> None:
        constants = dict(zip(self.kernel.arg_names[-len(self.constants) :], self.constants, strict=True))
        given = [_given(self._given(i, x)) for i, x in enumerate(arguments)]
        _run(_on_host(self.kernel, functions), grid[0], given, constants, seed)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    try:
        with (
            mock.patch.object(Launch, "__call__", launch),
            mock.patch("gem.kernels.launch.multiprocessors", lambda device: programs),
            mock.patch.dict(PLANS, clear=True),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def _run(kernel: Callable[..., None], programs: int, given: list[Any], constants: dict[str, Any], seed: int) -> None:
    machine = Machine(seed, programs)
    _running.append(machine)
    try:
        for program in range(programs):
            machine.spawn(f"program {program}", program, lambda: kernel(*given, **constants))
        machine.run()
    finally:
        _running.pop()


def _given(x: Any) -> Any:
    if hasattr(x, "block_shape"):
        return Descriptor(x.base, list(x.shape), list(x.strides), list(x.block_shape), x.layout)
    if isinstance(x, Tensor):
        return Pointer(x)
    return Int(x) if isinstance(x, int) else x


def _on_host(kernel: JITFunction, known: dict[int, Any]) -> Any:
    """A kernel's function whose names are bound to what stands here. ``known``: functions and modules so far."""
    if id(kernel) not in known:
        fn = kernel.fn
        names = known.get(id(fn.__globals__))
        if names is None:
            names = known[id(fn.__globals__)] = {}
            names.update({name: _bound(value, known) for name, value in fn.__globals__.items()})
        known[id(kernel)] = FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
    return known[id(kernel)]


def _bound(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, JITFunction):
        return _on_host(value, known)
    if isinstance(value, tl.constexpr):
        return value.value
    for real, here in _STANDS_FOR:
        if value is real:
            return here
    if getattr(value, "__triton_builtin__", False):  # of the kernel's own module
        return getattr(_OWN_BUILTINS, value.__name__.strip("_"))
    return value


def _machine() -> Machine:
    return _running[-1]


# -- gl ----------------------------------------------------------------------------------------------------------------


class _Names(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"suites/unit/gluon_emulated.py has nothing that stands for {name}")


def _no_layout(*_: Any, **__: Any) -> None:
    return None


_BARRIERS = object()  # layout of barriers


class _Buffer(Shared):
    """Shared memory with a kernel's instructions on it."""

    def load(self, layout: Any) -> Tile:
        machine = _machine()
        return Tile(Loaded(machine, machine.turn(), self))

    def store(self, value: Tile) -> None:
        self.write(_machine().turn(), value.value)


class _Barriers:
    """Barriers in shared memory."""

    def __init__(self, name: Callable[[], str], count: int) -> None:
        self.all = [Barrier(lambda i=i: f"{name()}[{i}]") for i in range(count)]

    def index(self, at: int) -> Barrier:
        if not 0 <= at < len(self.all):
            raise Fault(f"{self.all[0].name()} is one of {len(self.all)}: there is no [{at}]")
        return self.all[at]


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    frame: FrameType = sys._getframe(1)
    made: list[Any] = []

    def name() -> str:
        return next((name for name, value in frame.f_locals.items() if value is made[0]), "an allocation")

    shape = [int(x) for x in shape]
    made.append(
        _Barriers(name, shape[0])
        if layout is _BARRIERS and dtype == torch.int64
        else _Buffer.allocate(name, shape, dtype, layout)
    )
    return made[0]


def _warp_specialize(parts: list[tuple[Any, tuple]], warps: list[int], registers: list[int]) -> Any:
    """The first partition goes on as the program itself, the others beside it."""
    if not len(parts) - 1 == len(warps) == len(registers):
        raise Fault(f"{len(parts) - 1} partitions beside the first, warps for {len(warps)}, registers {len(registers)}")
    machine = _machine()
    main = machine.turn()
    program = main.name
    main.name = f"{program}, partition 0 ({parts[0][0].__name__})"
    others = [
        machine.spawn(f"{program}, partition {i} ({fn.__name__})", main.program, lambda fn=fn, given=given: fn(*given))
        for i, (fn, given) in enumerate(parts[1:], start=1)
    ]
    result = parts[0][0](*parts[0][1])
    for other in others:
        machine.wait(main, other.ended, lambda other=other: other.done, lambda other=other: f"the end of {other.name}")
    return result


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Any:
    if isinstance(pointer.at, int):
        value = pointer.item() if mask is None or mask else other
        return Int(value) if isinstance(value, int) else value
    flat, at, wanted = pointer.elements(mask)
    value = flat[at if wanted is None else torch.where(wanted, at, 0)]
    return Tile(value if wanted is None else torch.where(wanted, value, raw(other)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    _machine().turn()
    flat, at, wanted = pointer.elements(mask)
    value = torch.as_tensor(raw(value), dtype=flat.dtype).expand(at.shape)
    if wanted is None:
        flat[at] = value
    else:
        flat[at[wanted]] = value[wanted]


def _atomic_add(pointer: Pointer, value: Any, sem: str = "acq_rel") -> Int:
    _machine().turn()
    flat, at, _ = pointer.elements(None)
    before = int(flat[at])
    flat[at] = before + value
    return Int(before)


def _reduce(of: str) -> Callable[[Tile, int], Any]:
    """Along a dimension; to a number if there was no other."""

    def function(x: Tile, axis: int) -> Any:
        value = getattr(x.value, of)(axis)
        return Tile(value) if value.dim() else Int(value) if not value.is_floating_point() else float(value)

    return function


def _where(condition: Any, a: Any, b: Any) -> Any:
    if any(isinstance(x, Tile) for x in (condition, a, b)):
        return Tile(torch.where(torch.as_tensor(raw(condition)), raw(a), raw(b)))
    return a if condition else b


def _broadcast(*all: Any) -> tuple[Tile, ...]:
    return tuple(Tile(x) for x in torch.broadcast_tensors(*(torch.as_tensor(raw(x)) for x in all)))


def _extreme(of_numbers: Any, of_tiles: Any, of_tiles_with_nan: Any) -> Any:
    def function(a: Any, b: Any, propagate_nan: Any = None) -> Any:
        if not isinstance(a, Tile) and not isinstance(b, Tile):
            return of_numbers(a, b)
        a, b = torch.broadcast_tensors(torch.as_tensor(raw(a)), torch.as_tensor(raw(b)))
        return Tile((of_tiles if propagate_nan is None else of_tiles_with_nan)(a, b))

    return function


def _assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise Fault(f"static_assert: {message}")


def _assume(condition: Any) -> None:
    if not condition:
        raise Fault("what is assumed does not hold")


def _each(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Tile]:
    return lambda x: Tile(function(torch.as_tensor(raw(x))))


def _logistic4(z: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp2(torch.fmin(z, torch.tensor(31.0))))


def _read_flag(flag: Pointer) -> Int:
    return _load(flag)


def _raise_flag(flag: Pointer, value: int) -> Int:
    flat, at, _ = flag.elements(None)
    flat[at] = value
    return Int(0)


# By a piece of its text: what an assembly block does with its arguments.
_ASSEMBLY: dict[str, Callable[..., Any]] = {
    LOGISTIC4.value: _logistic4,
    "rcp.approx.ftz.f32 $0, $1;": torch.reciprocal,
    "lg2.approx.ftz.f32 $0, $1;": torch.log2,
    "mov.b32 $0, $1;": lambda x: x,
    "ld.acquire.gpu.global.b32 seen, [$1];": _read_flag,
    "st.release.gpu.global.b32 [$1], $2;": _raise_flag,
}


def _assembly(text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    if "vote.sync" in text:
        tiles = [Tile(x) for x in gluon_ptx.run(text, constraints, [raw(x) for x in args], pack)]
        return tuple(tiles) if isinstance(dtype, tuple) else tiles[0]
    found = [function for piece, function in _ASSEMBLY.items() if piece in text]
    if len(found) != 1:
        raise Fault(f"suites/unit/gluon_emulated.py has {len(found)} things that stand for this assembly:\n{text}")
    if not is_pure:
        machine = _machine()
        worker = machine.turn(polls="ld.acquire" in text)
        if "cp.async.bulk.wait_group 0;" in text:
            wait_written(machine, worker)
    result = found[0](*(raw(x) for x in args))
    return Tile(result) if isinstance(result, Tensor) else result


_GL = _Names(
    bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32, int1=torch.bool, int32=torch.int32,
    int64=torch.int64, pointer_type=PointerType, constexpr=None,
    NVMMADistributedLayout=_no_layout, NVMMASharedLayout=_no_layout, DotOperandLayout=_no_layout,
    SliceLayout=_no_layout, BlockedLayout=_no_layout, SwizzledSharedLayout=_no_layout,
    program_id=lambda axis: Int(_machine().running().program if axis == 0 else 0),
    num_programs=lambda axis: Int(_machine().programs if axis == 0 else 1),
    zeros=lambda shape, dtype, layout=None: Tile(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, value, dtype, layout=None: Tile(torch.full(shape, value, dtype=dtype)),
    arange=lambda start, end, layout=None: Tile(torch.arange(start, end)),
    allocate_shared_memory=_allocate, warp_specialize=_warp_specialize, thread_barrier=lambda: _machine().turn(),
    load=_load, store=_store, where=_where, static_range=range, static_assert=_assert, assume=_assume,
    to_tensor=lambda x: Int(x) if type(x) is int else x,
    broadcast=_broadcast, expand_dims=lambda x, axis: Tile(x.value.unsqueeze(axis)),
    split=lambda x: tuple(Tile(part) for part in x.value.unbind(-1)),
    convert_layout=lambda x, layout, assert_trivial=False: x, inline_asm_elementwise=_assembly,
    maximum=_extreme(max, torch.fmax, torch.maximum), minimum=_extreme(min, torch.fmin, torch.minimum),
    PropagateNan=tl.PropagateNan, exp=_each(torch.exp), exp2=_each(torch.exp2), log2=_each(torch.log2),
    erf=_each(torch.erf), sum=_reduce("sum"), max=_reduce("amax"), atomic_add=_atomic_add,
)  # fmt: skip


# -- mbarrier, tma, products -------------------------------------------------------------------------------------------


def _on_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of machine and worker as an instruction before which others may go."""

    def instruction(*args: Any, **how: Any) -> Any:
        machine = _machine()
        return function(machine, machine.turn(), *args, **how)

    return instruction


def _init(machine, worker, barrier: Barrier, count: int) -> None:
    barrier.init(count)
    worker.started.append(barrier)


def _arrive(machine, worker, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.arrive(count)


def _expect(machine, worker, barrier: Barrier, count: int, pred: Any = True) -> None:
    if pred:
        barrier.expect(count)


def _wait(machine: Machine, worker, barrier: Barrier, phase: int, pred: Any = True, deps: Any = ()) -> None:
    if phase not in (0, 1):
        raise Fault(f"{worker.name} waits for phase {phase} of {barrier.name()}: it has a parity, 0 or 1")
    if pred:
        machine.wait(
            worker, barrier.flipped, lambda: barrier.passed(phase), lambda: f"parity {phase} of {barrier.text()}"
        )


def _copy_in(
    machine, worker, desc: Descriptor, at: list[int], barrier: Barrier, into: Shared, pred: Any = True
) -> None:
    _check_tile(desc, into)
    if pred:
        copy_in(machine, into, barrier, lambda: desc.read(at), desc.block_type.nbytes)


def _copy_out(machine, worker, desc: Descriptor, at: list[int], source: Shared, add: bool = False) -> None:
    _check_tile(desc, source)
    inside, region = desc.region(at)
    part = source
    for dim, (x, size) in enumerate(zip(inside, source.shape, strict=True)):
        if x.stop - x.start < size:
            part = part.slice(x.start, x.stop - x.start, dim)

    def put(value: Tensor) -> None:
        if region is not None:
            region.copy_(region.float() + value if add else value)

    Store(machine, worker, part, put)


def _add_out(machine, worker, desc: Descriptor, at: list[int], source: Shared) -> None:
    _copy_out(machine, worker, desc, at, source, add=True)


def _check_tile(desc: Descriptor, shared: Shared) -> None:
    if shared.shape != desc.block_shape or shared.dtype != desc.dtype:
        raise Fault(
            f"a descriptor of {desc.dtype} {desc.block_shape} and {shared.name()} of {shared.dtype} {shared.shape}"
        )


def _fence(machine, worker) -> None:
    for shared in worker.unfenced:
        shared.fence()
    for barrier in worker.started:
        barrier.fenced = True
    worker.unfenced.clear()
    worker.started.clear()


def _multiply(
    machine: Machine, worker, a: Any, b: Shared, acc: Tile, *, use_acc: Any = True, is_async: bool = False
) -> Tile:
    rows, columns = acc.source.shape if isinstance(acc.source, Product) else acc.shape
    if [rows, b.shape[0]] != a.shape or b.shape[1] != columns or a.dtype != b.dtype:
        raise Fault(f"{worker.name} multiplies {a.dtype} {a.shape} by {b.dtype} {b.shape} into {[rows, columns]}")
    operand = a if isinstance(a, Shared) else lambda: a.value
    before = acc.source if isinstance(acc.source, Product) else acc.value
    product = Tile(Product(machine, worker, operand, b, before if use_acc else None, [rows, columns]))
    return product if is_async else _wait_products(machine, worker, 0, [product])


def _wait_products(machine: Machine, worker, num_outstanding: int = 0, deps: Any = None) -> Any:
    wait_products(machine, worker, num_outstanding)
    done = tuple(Tile(x.value) if _ended(x) else x for x in deps)
    return done[0] if len(done) == 1 else done


def _ended(x: Any) -> bool:
    return isinstance(x, Tile) and isinstance(x.source, Product) and x.source.waited


_MBARRIER = _Names(
    MBarrierLayout=lambda: _BARRIERS, init=_on_turn(_init), arrive=_on_turn(_arrive), expect=_on_turn(_expect),
    wait=_on_turn(_wait), invalidate=_on_turn(lambda machine, worker, barrier: barrier.invalidate()),
)  # fmt: skip
_TMA = _Names(
    async_copy_global_to_shared=_on_turn(_copy_in), async_copy_shared_to_global=_on_turn(_copy_out),
    store_wait=_on_turn(wait_stores),
)  # fmt: skip
_OWN_BUILTINS = _Names(add_to_global=_on_turn(_add_out))
_STANDS_FOR = [
    (gl, _GL), (tl, _GL), (hopper.mbarrier, _MBARRIER), (hopper.tma, _TMA),
    (hopper.fence_async_shared, _on_turn(_fence)), (hopper.warpgroup_mma, _on_turn(_multiply)),
    (hopper.warpgroup_mma_wait, _on_turn(_wait_products)),
]  # fmt: skip
