"""Ways between jagged values and other forms: round trips, gradients, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gem.jagged import from_keyed, from_padded, lengths_to_offsets, to_padded


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(0, 3), st.sampled_from([torch.int32, torch.int64]))
def test_padding_and_back_is_the_identity(lens, spare, dtype):
    lengths = torch.tensor(lens, dtype=dtype)
    offsets = lengths_to_offsets(lengths)
    assert offsets.dtype == dtype and offsets.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]
    values = torch.randn(sum(lens), 2, 3)
    padded = to_padded(values, offsets, max([*lens, 0]) + spare, fill=-5.0)
    back, again = from_padded(padded, lengths)
    assert torch.equal(back, values) and torch.equal(again, offsets)
    assert (padded == -5.0).sum() == padded.numel() - values.numel()


def test_gradients_flow_through_both_ways():
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([2, 0, 3])
    offsets = lengths_to_offsets(lengths)
    assert torch.autograd.gradcheck(lambda x: to_padded(x, offsets, 4), values)
    padded = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: from_padded(x, lengths)[0], padded)


def test_rows_behind_the_last_offset_are_left_out():
    padded = to_padded(torch.arange(5.0), torch.tensor([0, 1, 3]), 2)
    assert padded.tolist() == [[0.0, 0.0], [1.0, 2.0]]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="sample 1 has 3 rows, more than max_len = 2"):
        to_padded(torch.zeros(4, 2), torch.tensor([0, 1, 4]), 2)
    with pytest.raises(ValueError, match=r"lengths must be in \[0, 2\], got 1 to 3"):
        from_padded(torch.zeros(2, 2, 5), torch.tensor([1, 3]))
    with pytest.raises(ValueError, match=r"lengths must be \[2\], got shape \(3,\)"):
        from_padded(torch.zeros(2, 2, 5), torch.tensor([1, 1, 1]))


def test_a_feature_of_a_keyed_jagged_tensor():
    """TorchRec's own class, not a stand-in."""
    torchrec = pytest.importorskip(
        "torchrec", reason="torchrec is not installed (ci/setup installs it beside torch 2.13)"
    )
    keyed = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["clicks", "views"], values=torch.arange(6), lengths=torch.tensor([1, 0, 2, 3])
    )
    values, offsets = from_keyed(keyed, "views")
    assert values.tolist() == [1, 2, 3, 4, 5] and offsets.tolist() == [0, 2, 5]
    with pytest.raises(ValueError, match="no feature 'likes'; the KeyedJaggedTensor has: clicks, views"):
        from_keyed(keyed, "likes")
