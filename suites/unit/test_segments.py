"""Sums over samples of a jagged batch: against numpy's in float64, for any lengths, in pieces and out of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.model.segments import PIECE, segment_sum

LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(PIECE - 1, PIECE + 1), st.just(3 * PIECE + 5)), max_size=6)


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=dtype)


@given(LENGTHS, st.integers(0, PIECE + 1), st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=60, deadline=None)
def test_sums_are_those_of_numpy(lengths, behind, dtype):
    """Empty samples are 0, rows behind the last offset are nobody's."""
    rows = np.random.default_rng(len(lengths)).standard_normal((sum(lengths) + behind, 3))
    found = segment_sum(torch.from_numpy(rows), offsets_of(lengths, dtype))
    ends = np.cumsum(lengths)
    wanted = np.array([rows[end - n : end].sum(0) for end, n in zip(ends, lengths, strict=True)]).reshape(-1, 3)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_added_in_thirty_two(dtype):
    """1,000 ones: bf16 stops growing at 256, fp16 at 2,048."""
    found = segment_sum(torch.ones(5000, 2, dtype=dtype), offsets_of([1000, 4000]))
    assert found.dtype == dtype
    assert found.tolist() == [[1000, 1000], [4000, 4000]]


def test_nothing_follows_from_what_lies_behind_the_end():
    rows = torch.ones(PIECE + 20, 1)
    rows[PIECE + 10 :] = torch.nan
    assert segment_sum(rows, offsets_of([PIECE + 10])).tolist() == [[PIECE + 10]]


def test_the_registered_op_is_whole():
    torch.library.opcheck(segment_sum, (torch.randn(700, 4), offsets_of([300, 0, 400])))
