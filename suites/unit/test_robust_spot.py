"""Results of timed calls are held against the oracle's on some rows: on all where they are few, else on enough."""

from typing import Any

import numpy as np
import pytest

from gem.data.lengths import Lengths
from gem.harness.check import Answer, Spot, make_answer
from gem.harness.params import JaggedAttentionParams
from gem.harness.subjects import Inputs, build_inputs


def asked(*lengths: int) -> tuple[Inputs, Answer]:
    """Inputs of samples so long, and the oracle's answer on all of them."""
    rows = np.array(lengths, dtype=np.int64)
    params = JaggedAttentionParams(heads=1, head_dim=8)
    inputs = build_inputs("jagged_attention", params, Lengths("test", rows, rows, "self"), "cpu")
    return inputs, make_answer(inputs, "same", list(range(len(rows))), ["forward", "backward"])


FEW = asked(3, 0, 5)
MANY = asked(50, 30)


def found(case: tuple[Inputs, Answer], direction: str, name: str, wrong: Any) -> list[str]:
    """What a Spot says of two turns, the second with these rows of one tensor wrong."""
    inputs, answer = case
    spot = Spot(answer, inputs, direction)
    names = ["out"] if direction == "forward" else ["q", "k", "v"]
    right = {one: answer.tensors[one].float() for one in names}
    for results in (right, {**right, name: right[name].clone()}):
        if results is not right:
            results[name][wrong] += 1.0
        spot.keep(results.items())
        spot.judge()
    return spot.problems


@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize(("direction", "name"), [("forward", "out"), ("backward", "q"), ("backward", "v")])
def test_one_wrong_row_of_eight_is_found_at_once(direction: str, name: str, row: int) -> None:
    (problem,) = found(FEW, direction, name, [row])
    assert problem.startswith("out: " if name == "out" else f"d{name}: ") and problem.endswith(" in turn 2")


def test_what_is_right_is_right() -> None:
    for case in (FEW, MANY):
        assert not found(case, "forward", "out", []) and not found(case, "backward", "k", [])


def test_of_many_rows_one_in_eight_that_is_wrong_is_seldom_missed() -> None:
    """Sixteen rows of 80 miss all ten wrong ones in one Spot of eleven: C(70, 16) / C(80, 16) = 0.092.

    Of 300, 28 miss, with a deviation of 5; were one row looked at, 262 would.
    """
    missed = sum(not found(MANY, "forward", "out", slice(3, None, 8)) for _ in range(300))
    assert missed < 60


def test_every_run_looks_at_other_rows() -> None:
    """Else a contestant could know which rows count."""
    inputs, answer = MANY
    looked_at = {tuple(Spot(answer, inputs, "forward")._wanted["out"][0].tolist()) for _ in range(4)}
    assert len(looked_at) > 1 and all(len(set(rows)) == 16 for rows in looked_at)
