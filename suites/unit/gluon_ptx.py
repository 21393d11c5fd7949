"""Assembly of a kernel that speaks for a whole thread, run on the host: the text itself, warp by warp.

For blocks that take all that a thread holds of a tile of 64 rows, in the layout that wgmma gives
(``gem.kernels.hopper.lazy_softmax.lanes``): tiles [64, 4, n], of which a thread holds 2 n numbers. What stands here is
what such blocks use: arithmetic in fp32, votes and exchanges over all lanes, branches that a warp takes together.

Legend: W warps, R registers of a thread, L lanes (32).
"""

import functools
import re
import struct

import torch
from gluon_memory import Fault
from torch import Tensor

_LANES = torch.arange(32)
_ARITHMETIC = {
    "add.f32": lambda a, b: a + b,
    "sub.f32": lambda a, b: a - b,
    "mul.f32": lambda a, b: a * b,
    "max.f32": torch.fmax,  # the other number where one is NaN
    "neg.f32": lambda a: -a,
    "mov.f32": lambda a: a,
    "fma.rn.f32": lambda a, b, c: (a.double() * b + c).float(),
    "ex2.approx.ftz.f32": torch.exp2,
}
_COMPARISONS = {"gt": lambda a, b: a > b, "neu": lambda a, b: (a != b) | a.isnan() | b.isnan()}


def run(text: str, constraints: str, args: list[Tensor], pack: int) -> list[Tensor]:
    """What the block gives for tiles [64, 4, n]; NaN where it sets nothing."""
    places = constraints.split(",")
    given = sum(place.startswith("=") for place in places)
    taken = [_by_threads(x.float()) for x in args]
    if given % pack or any(x.shape[1] != pack for x in taken) or len(places) != given + pack * len(taken):
        raise Fault(f"{len(places)} operands, of {pack} each, for tiles of {[x.shape[1] for x in taken]} a thread")
    registers: dict[str, Tensor] = {}
    for i, place in enumerate(places[given:]):
        value = taken[i // pack][:, i % pack]
        registers[f"${given + i}"] = value
        if place.isdigit():  # the same register as that of a number given
            registers[f"${place}"] = value
    _run(_parsed(text), 0, registers)
    unset = torch.full((4, 32), torch.nan)
    found = [registers.get(f"${i}", unset) for i in range(given)]
    return [_by_rows(torch.stack(found[i : i + pack], 1)) for i in range(0, given, pack)]


def _by_threads(tile: Tensor) -> Tensor:
    """[W, R, L] of [64, 4, n]."""
    n = tile.shape[2]
    return tile.reshape(4, 2, 8, 4, n // 2, 2).permute(0, 4, 1, 5, 2, 3).reshape(4, 2 * n, 32)


def _by_rows(threads_WRL: Tensor) -> Tensor:
    n = threads_WRL.shape[1] // 2
    return threads_WRL.reshape(4, n // 2, 2, 2, 8, 4).permute(0, 2, 4, 5, 1, 3).reshape(64, 4, n)


@functools.cache
def _parsed(text: str) -> list[list[str]]:
    lines = (x.strip() for x in re.split(r"[;\n]", text.strip().removeprefix("{").removesuffix("}")))
    return [re.split(r"[\s,]+", x) for x in lines if x and not x.startswith(".reg")]


def _run(code: list[list[str]], at: int, registers: dict[str, Tensor]) -> None:
    """From line ``at`` to the end. Registers are [W, L]."""
    warps = next(iter(registers.values())).shape[0]
    while at < len(code):
        operation, *operands = code[at]
        at += 1
        if operation.endswith(":"):
            continue
        if operation.startswith("@!"):
            said = registers[operation.removeprefix("@!")]
            if bool((said.any(1) != said.all(1)).any()):
                raise Fault(f"lanes of a warp part at {' '.join(code[at - 1])}")
            stay = said.any(1)
            there = code.index([f"{operands[1]}:"])
            if not bool(stay.all()) and bool(stay.any()):
                _run_apart(code, ((at, stay), (there, ~stay)), registers)
                return
            at = at if bool(stay.all()) else there
            continue
        target, *sources = operands
        registers[target] = _result(operation, [_value(x, registers) for x in sources]).expand(warps, 32)


def _run_apart(code: list[list[str]], ways: tuple[tuple[int, Tensor], ...], registers: dict[str, Tensor]) -> None:
    """Some warps from one line, the others from another."""
    results = []
    for at, warps in ways:
        own = {name: x[warps] for name, x in registers.items()}
        _run(code, at, own)
        results.append((warps, own))
    for name in {name for _, own in results for name in own}:
        both = torch.full((4, 32), torch.nan)
        for warps, own in results:
            if name in own and own[name].dtype == torch.float32:
                both[warps] = own[name]
        registers[name] = both


def _result(operation: str, x: list[Tensor]) -> Tensor:
    if operation in _ARITHMETIC:
        return _ARITHMETIC[operation](*x)
    compared = re.fullmatch(r"setp\.(\w+)(\.or)?\.f32", operation)
    if compared:
        found = _COMPARISONS[compared[1]](x[0], x[1])
        return found | x[2] if compared[2] else found
    if operation == "vote.sync.any.pred":
        return x[0].any(1, keepdim=True).expand_as(x[0])
    if operation == "shfl.sync.bfly.b32":
        return x[0][:, _LANES ^ int(x[1])]
    raise Fault(f"suites/unit/gluon_ptx.py has nothing that stands for {operation}")


def _value(name: str, registers: dict[str, Tensor]) -> Tensor:
    if name in registers:
        return registers[name]
    if name.startswith("0f"):
        return torch.tensor(struct.unpack(">f", bytes.fromhex(name[2:]))[0])
    if re.fullmatch(r"\d+|0x\w+", name):
        return torch.tensor(int(name, 0))
    raise Fault(f"{name} is read before it is set")
