"""Jagged softmax attention in Gluon: its own Python on the host, in several orders of copies, products and arrivals."""

import functools
import importlib.util
import os
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)
pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet, which is not installed")

from attention_laws import offsets
from gluon_emulated import emulating
from gluon_laws import LENGTHS, assert_near, inputs

from gem import reference
from gem.kernels.hopper import jfa_backward
from gem.kernels.hopper.attention import attention_forward
from gem.kernels.hopper.backward import choose_backward
from gem.kernels.hopper.choose import Variant
from gem.kernels.ops import jagged_batch

BF16, FP16 = torch.bfloat16, torch.float16
ORDERS = [(0, 3), (1, 1), (2, 2), (3, 16)]  # seed, programs
SCALE = 0.3


class Case(NamedTuple):
    variant: Variant | None  # None: as calls get it
    window: tuple[int, int] = (-1, -1)


CASES = {
    "long": Case(Variant("long", 128, 16, 2, turns=1)),
    "turns between": Case(Variant("long", 128, 16, 3, turns=2)),
    "three, causal": Case(Variant("long", 192, 16, 5, consumers=3, q_slots=1, turns=1), (-1, 0)),
    "registers, window": Case(Variant("long", 128, 16, 2, turns=2, q_slots=1, q_registers=True), (20, 0)),
    "no turns, left": Case(Variant("long", 128, 16, 2), (9, -1)),
    "lanes": Case(Variant("long", 64, 16, 2, lanes=2)),
    "lanes, itself": Case(Variant("long", 64, 32, 4, lanes=2, q_slots=1), (0, 0)),
    "lanes, both sides": Case(Variant("long", 64, 16, 3, lanes=2), (30, 17)),
}


@functools.cache
def right(name: str, head_dim: int, dtype: torch.dtype, window: tuple[int, int], scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse in base 2) in float64."""
    jagged, x = LENGTHS[name], inputs(LENGTHS[name], 2, head_dim, dtype)
    q, k, v = (torch.nan_to_num(t.double()) for t in (x.q, x.k, x.v))
    if jagged.shared:
        q = q.repeat(len(jagged.k), 1, 1)
    ends = offsets(jagged.q_lens), offsets(jagged.k)
    out = reference.jagged_attention(q, k, v, *ends, window=window, scale=scale)
    # A value of 1 beside what is summed: the log-sum-exp by definition.
    lse = torch.full((2, q.shape[0]), torch.inf, dtype=torch.float64)
    for b, (q_len, k_len) in enumerate(zip(jagged.q_lens, jagged.k, strict=True)):
        if q_len == 0 or k_len == 0:
            continue
        q0, k0 = int(ends[0][b]), int(ends[1][b])
        s = scale * torch.einsum("ihd,jhd->hij", q[q0 : q0 + q_len], k[k0 : k0 + k_len])
        at = torch.arange(q_len)[:, None] + k_len - q_len - torch.arange(k_len)
        unseen = torch.zeros_like(at, dtype=torch.bool)
        if window[0] >= 0:
            unseen |= at > window[0]
        if window[1] >= 0:
            unseen |= -at > window[1]
        found = torch.logsumexp(s.masked_fill(unseen, -torch.inf), 2) / torch.log(torch.tensor(2.0)).double()
        lse[:, q0 : q0 + q_len] = torch.where(found == -torch.inf, torch.inf, found)
    return out, lse


def forward(
    name: str, head_dim: int, dtype: torch.dtype, case: Case, order: tuple[int, int], scale: float = SCALE
) -> Tensor:
    """The right output, and log-sum-exps behind it."""
    jagged, x = LENGTHS[name], inputs(LENGTHS[name], 2, head_dim, dtype)
    plain = jagged.batch()
    batch = jagged_batch(x.q, x.k, plain.q_offsets, plain.k_offsets, *case.window)
    with emulating(*order):
        out, lse = attention_forward(x.q, x.k, x.v, batch, qk_scale=scale, variant=case.variant)
    out_right, lse_right = right(name, head_dim, dtype, case.window, scale)
    assert_near(out, out_right, jagged.q_lens, "out")
    assert torch.equal(lse == torch.inf, lse_right == torch.inf)
    torch.testing.assert_close(lse, lse_right.float(), rtol=1e-4, atol=1e-4)
    return torch.cat([out.float().flatten(), lse.flatten()])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_right_in_any_order(case, lengths):
    number = list(CASES).index(case) + list(LENGTHS).index(lengths)
    orders = ORDERS if lengths == "ragged" else ORDERS[number % 2 :: 2]
    dtype = (BF16, FP16)[number % 2]
    first, *others = (forward(lengths, 16, dtype, CASES[case], order) for order in orders)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [(-1, -1), (20, 0)], ids=["full", "window"])
def test_the_variants_that_calls_get_are_right(window, head_dim):
    for lengths in ("ragged", "many keys"):
        assert not forward(lengths, head_dim, BF16, Case(None, window), ORDERS[0]).isnan().any()


@pytest.mark.parametrize("case", ["long", "lanes"])
def test_heads_of_queries_may_share_one_of_keys(case):
    """The same bits as with the keys and values copied for each of them."""
    jagged = LENGTHS["ragged"]
    q, kv = (inputs(jagged, heads, 16, BF16, seed=1) for heads in (4, 2))
    with emulating(*ORDERS[0]):
        shared = attention_forward(q.q, kv.k, kv.v, jagged.batch(), qk_scale=SCALE, variant=CASES[case].variant)
        k, v = (x.repeat_interleave(2, 1) for x in (kv.k, kv.v))
        copied = attention_forward(q.q, k, v, jagged.batch(), qk_scale=SCALE, variant=CASES[case].variant)
    for one, other in zip(shared, copied, strict=True):
        assert torch.equal(one, other) and one.abs().sum() > 0


# -- backward ----------------------------------------------------------------------------------------------------------

WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "left": (40, 0), "both": (30, 100), "itself": (0, 0), "wide": (200, -1)}


@functools.cache
def right_gradients(name: str, head_dim: int, dtype: torch.dtype, window: tuple[int, int], scale: float):
    """(dq, dk, dv) in float64; of shared queries dq of each sample."""
    jagged, x = LENGTHS[name], inputs(LENGTHS[name], 2, head_dim, dtype)
    q, k, v, d_out = (torch.nan_to_num(t.double()) for t in (x.q, x.k, x.v, x.d_out))
    if jagged.shared:
        q = q.repeat(len(jagged.k), 1, 1)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    ends = offsets(jagged.q_lens), offsets(jagged.k)
    out = reference.jagged_attention(q, k, v, *ends, window=window, scale=scale)
    return torch.autograd.grad(out, (q, k, v), d_out)


def backward(
    name: str, head_dim: int, dtype: torch.dtype, window: tuple[int, int], order: tuple[int, int], scale: float = SCALE,
    chosen: bool = False,
) -> Tensor:  # fmt: skip
    """The right dq, dk and dv, of the kernel for long keys alone or of those that are ``chosen``."""
    jagged, x = LENGTHS[name], inputs(LENGTHS[name], 2, head_dim, dtype)
    plain = jagged.batch()
    batch = jagged_batch(x.q, x.k, plain.q_offsets, plain.k_offsets, *window)
    out, lse = (t.detach() for t in right(name, head_dim, dtype, window, scale))
    q, k, v = (t.detach().clone() for t in (x.q, x.k, x.v))
    choose = choose_backward if chosen else lambda batch, head_dim: ("long", None)
    with emulating(*order), mock.patch.object(jfa_backward, "choose_backward", choose):
        dq, dk, dv = jfa_backward.attention_backward(
            x.d_out, q, k, v, out.to(dtype), lse.float(), batch, qk_scale=scale
        )
    dq_right, dk_right, dv_right = right_gradients(name, head_dim, dtype, window, scale)
    if jagged.shared:
        dq_right = dq_right.view(len(jagged.k), jagged.shared, 2, head_dim).sum(0)
    for label, got, wanted in (("dq", dq, dq_right), ("dk", dk, dk_right), ("dv", dv, dv_right)):
        # Where queries see one key their gradient is 0, and what is rounded is all there is.
        size = max(1.0, float(wanted.abs().max()))
        assert got.isfinite().all(), label
        assert float((got.double() - wanted).abs().max()) <= 1.5e-2 * size, label
    return torch.cat([t.float().flatten() for t in (dq, dk, dv)])


@pytest.mark.parametrize("lengths", ["ragged", "one row", "many keys and queries", "no keys but of one", "shared"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_backward_is_right_in_any_order(window, lengths):
    number = list(WINDOWS).index(window) + list(LENGTHS).index(lengths)
    dtype = (BF16, FP16)[number % 2]
    orders = ORDERS[number % 2 :: 2]
    first, *others = (backward(lengths, 64, dtype, WINDOWS[window], order) for order in orders)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("lengths", "head_dim"), [
    ("ragged", 64), ("many keys and queries", 64), ("up to 256 keys", 128), ("a tile each", 64), ("shared", 64),
])  # fmt: skip
def test_the_kernels_that_lengths_choose_leave_no_row_out(lengths, head_dim):
    """Few queries, all keys kept, short keys; beyond their limits and behind the last offsets that for long keys."""
    assert backward(lengths, head_dim, BF16, (-1, -1), ORDERS[0], chosen=True).isfinite().all()
