"""Useful work, counted by brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gem.efficiency import attention_bytes, attention_flops, attention_pairs, block_pairs

side = st.one_of(st.just(-1), st.integers(0, 12))


def brute(q_len: int, k_len: int, causal: bool, window: tuple[int, int]) -> int:
    i = np.arange(q_len)[:, None] + k_len - q_len
    j = np.arange(k_len)[None, :]
    seen = np.ones((q_len, k_len), bool)
    if causal:
        seen &= j <= i
    if window[0] >= 0:
        seen &= j >= i - window[0]
    if window[1] >= 0:
        seen &= j <= i + window[1]
    return int(seen.sum())


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6), st.booleans(), st.tuples(side, side))
def test_pairs_are_those_that_a_mask_keeps(lens, causal, window):
    q = np.array([a for a, _ in lens], dtype=np.int64)
    k = np.array([b for _, b in lens], dtype=np.int64)
    assert attention_pairs(q, k, causal, window) == sum(brute(a, b, causal, window) for a, b in lens)


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 80))
def test_block_pairs_are_those_of_equal_block_numbers(lens, block):
    expected = 0
    for n in lens:
        number = np.arange(n) // block
        expected += int((number[:, None] == number[None, :]).sum())
    assert block_pairs(np.array(lens, dtype=np.int64), block) == expected


def test_counts_do_not_overflow_on_long_histories():
    assert attention_pairs([228_000] * 1000, [228_000] * 1000) == 228_000**2 * 1000


def test_flops_and_bytes_of_a_hand_counted_case():
    # 2 queries x 3 keys, one head of 4: q k^T is 6 dots of 4 multiply-adds (48 FLOPs), P v as many.
    assert attention_flops(6, 1, 4, "forward") == 96
    assert attention_flops(6, 1, 4, "backward") == 240  # five such products instead of two
    # bf16 rows of 4 elements are 8 bytes: q 2, out 2, k 3, v 3 rows; backward q, d_out, dq 2 and k, v, dk, dv 3 each.
    assert attention_bytes(2, 3, 1, 4, 2, "forward") == 8 * (2 + 2 + 3 + 3)
    assert attention_bytes(2, 3, 1, 4, 2, "backward") == 8 * (2 + 2 + 2 + 3 * 4)
    # Shared queries are read once, however many samples write outputs.
    assert attention_bytes(64, 30, 1, 4, 2, "forward", shared_queries=2) == 8 * (2 + 64 + 60)


def test_one_length_a_sample_on_both_sides():
    with pytest.raises(ValueError, match="one length a sample"):
        attention_pairs([1, 2], [1])
