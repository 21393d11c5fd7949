"""sm_90a's machine code of a kernel, looked at for what a compiler must not do: read a uniform register that some path
to the place has not set.

ptxas 12.8 did so once (docs/measured.md, "A miscompiled loop"): descriptors of products were set in the preheader of a
loop that short samples skip, and read behind it. Uniform registers hold the descriptors of all products and copies, and
nobody but the code itself sets them.
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compiled import TOOLS

_LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
# What has a uniform register as its first operand and sets none.
_SET_NONE = ("UTMA", "UBLKCP", "SYNCS", "HGMMA", "ST", "BRA", "EXIT", "ERRBAR", "UISETP", "USETMAXREG")


@dataclass(frozen=True)
class Instruction:
    """One of a kernel's. ``reads`` and ``sets``: numbers of uniform registers."""

    at: int
    text: str
    reads: frozenset[int]
    sets: frozenset[int]
    follows: bool  # whether the next instruction may come next
    target: int | None


def disassembled(cubin: bytes, folder: Path) -> list[Instruction]:
    """Of the one kernel in a binary. Files go to ``folder``."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(cubin)
    sass = subprocess.run([TOOLS / "cuobjdump", "-sass", binary], capture_output=True, text=True, check=True).stdout
    return parsed(sass)


def parsed(sass: str) -> list[Instruction]:
    """Of cuobjdump's listing."""
    return [_instruction(*found) for found in _LINE.findall(sass)]


def _instruction(at: str, guard: str, operation: str, operands: str) -> Instruction:
    parts = [part.strip() for part in operands.split(",")]
    while len(parts) > 1 and re.fullmatch(r"U?P\w", parts[0]):  # a predicate that is set beside the register
        parts = parts[1:]
    reads, sets = set(), set()
    wide = 2 if ".64" in operation or ".WIDE" in operation else 4 if ".128" in operation else 1
    first = _UNIFORM.fullmatch(parts[0])
    if first and not operation.startswith(_SET_NONE):
        sets |= set(range(int(first[1]), int(first[1]) + wide))
        parts = parts[1:]
    for part in parts:
        for number in map(int, _UNIFORM.findall(part)):
            if "gdesc" in part:  # of two operands in shared memory, or of the second alone
                one = len(parts) > 2 and re.match(r"R\d+", parts[1]) is not None and "gdesc" in parts[2]
                reads |= set(range(number + 2 * one, number + 4))
            else:  # a pair where all is 64 bits wide, but for addresses in shared memory
                pair = operation.endswith(".64") and not part.startswith("[")
                reads |= set(range(number, number + 1 + pair))
    jump = re.search(r"0x([0-9a-f]+)", operands) if operation.startswith("BRA") else None
    ends = operation.startswith(("EXIT", "BRA", "RET")) and guard in ("", "@PT")
    text = f"{guard} {operation} {operands}".strip()
    target = int(jump[1], 16) if jump else None
    return Instruction(int(at, 16), text, frozenset(reads), frozenset(sets), not ends, target)


def unset_reads(code: Sequence[Instruction]) -> list[tuple[str, list[int]]]:
    """(instruction, registers) where a uniform register is read that some path from the start has not set.

    What is set under a predicate counts as set: its reads are under the same one.
    """
    place = {one.at: i for i, one in enumerate(code)}
    before = [(1 << 64) - 1] * len(code)  # registers that are set on all paths so far
    before[0] = 0
    reached = [i == 0 for i in range(len(code))]
    waiting = [0]
    while waiting:
        i = waiting.pop()
        after = before[i]
        for number in code[i].sets:
            after |= 1 << number
        following = [i + 1] if code[i].follows and i + 1 < len(code) else []
        target = code[i].target
        if target is not None and target in place:
            following.append(place[target])
        for j in following:
            known = before[j] & after
            if known != before[j] or not reached[j]:
                before[j], reached[j] = known, True
                waiting.append(j)
    found = []
    for i, one in enumerate(code):
        lacking = sorted(number for number in one.reads if not before[i] >> number & 1)
        if lacking and reached[i]:
            found.append((f"{one.at:x}: {one.text}", lacking))
    return found
