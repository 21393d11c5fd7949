"""The copy kernel that holds SMs, interpreted: what it copies, and that it ends."""

from typing import Any

import pytest
import torch
from interpreted import quiet
from torch import Tensor

from gem.kernels import hold

pytestmark = quiet
CHUNK = 64  # elements


def held(programs: int, chunks: int, rounds: int, stop: int = 0, moves: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(source, target, told) of a hold that ends after so many rounds."""
    source = torch.arange(1, chunks * CHUNK + 1, dtype=torch.int32)
    target = torch.zeros_like(source)
    told = torch.zeros(programs, hold.TOLD, dtype=torch.int64)
    flag = torch.tensor([stop], dtype=torch.int32)
    constants: dict[str, Any] = {"CHUNK": CHUNK, "MOVES": moves, "CLOCK": False}
    hold._hold[(programs,)](source, target, flag, told, chunks, rounds, 1, 1_000_000, **constants)
    return source, target, told


@pytest.mark.parametrize(("programs", "chunks", "rounds"), [(1, 4, 3), (3, 12, 4), (3, 12, 2), (2, 5, 7), (4, 3, 1)])
def test_programs_copy_chunks_in_turn(programs: int, chunks: int, rounds: int) -> None:
    source, target, told = held(programs, chunks, rounds)
    wanted = torch.zeros_like(source)
    for number in range(rounds):
        for program in range(programs):
            at = (number * programs + program) % chunks
            wanted[at * CHUNK : (at + 1) * CHUNK] = source[at * CHUNK : (at + 1) * CHUNK]
    assert torch.equal(target, wanted) and wanted.any()
    assert told[:, 0].tolist() == [rounds] * programs and (told[:, 2] > 0).all()


def test_a_program_ends_when_told() -> None:
    _, target, told = held(2, 8, 1_000, stop=1)
    assert told[:, 0].tolist() == [1, 1]  # the flag is read once a round
    assert int((target > 0).sum()) == 2 * CHUNK


def test_idle_programs_copy_nothing() -> None:
    _, target, told = held(2, 8, 5, moves=False)
    assert not target.any() and told[:, 0].tolist() == [5, 5]
