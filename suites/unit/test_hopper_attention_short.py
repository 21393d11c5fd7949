"""Jagged softmax attention in Gluon for short keys: its own Python on the host, in several orders; what it compiles to.

Hostile scores and faults put into the kernel besides: where scores lie decides which way a warp goes.
"""

import functools
import importlib.util
import os
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)
pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet, which is not installed")

import test_hopper_attention
from attention_laws import offsets
from compiled import SHARED_LIMIT, Resources, compiling_for, product_loops
from gluon_faults import Change, after, drop, put, with_changes
from gluon_laws import LENGTHS, Inputs, inputs
from test_hopper_attention import BF16, FP16, ORDERS, Case, forward
from torch import Tensor

from gem.kernels.hopper import attention, jfa_short, lazy_softmax
from gem.kernels.hopper.attention import attention_forward, choose
from gem.kernels.hopper.choose import Variant
from gem.kernels.schedule import Batch

CASES = {
    "two": Case(Variant("short", 128, 16, 4)),
    "few stages": Case(Variant("short", 256, 16, 3, q_slots=1)),
    "three": Case(Variant("short", 512, 16, 6, consumers=3, values_first=True)),
    "values first": Case(Variant("short", 128, 32, 3, values_first=True)),
}


BATCHES = {
    "ragged": CASES,
    "one row": ["two"],
    "a tile each": ["values first"],
    "many keys": ["few stages", "three"],
    "few keys": ["two", "values first"],
    "many keys and queries": ["three"],
    "no keys but of one": ["few stages", "values first"],
    "nobody's rows": ["three"],
    "shared": ["two", "three"],
}


@pytest.mark.parametrize(("lengths", "case"), [(lengths, case) for lengths in BATCHES for case in BATCHES[lengths]])
def test_it_is_right_in_any_order(lengths, case):
    number = list(CASES).index(case) + list(LENGTHS).index(lengths)
    dtype = (BF16, FP16)[number % 2]
    first, *others = (forward(lengths, 16, dtype, CASES[case], order) for order in ORDERS[number % 2 :: 2])
    assert all(torch.equal(first, other) for other in others)


# -- scores that try it ------------------------------------------------------------------------------------------------


def _ramp(count: int, step: float) -> Tensor:
    return step * torch.arange(count).remainder(40)[:, None, None]


HOSTILE = {
    "far below 0": lambda k: k - 80,
    "far above 0": lambda k: k + 80,
    "equal": lambda k: torch.full_like(k, 3),
    "rising": lambda k: k + _ramp(k.shape[0], 3),
    "falling": lambda k: k - _ramp(k.shape[0], 3),
    "large": lambda k: k * 2e4,
}


@pytest.fixture
def given(monkeypatch):
    """Has batches given other keys."""

    def give(change) -> None:
        def changed(*how) -> Inputs:
            x = inputs(*how)
            k = change(x.k.float()).to(x.k.dtype)
            return replace(x, q=x.q.float().abs().to(x.q.dtype), k=torch.where(x.k.isnan(), x.k, k))

        monkeypatch.setattr(test_hopper_attention, "inputs", changed)
        monkeypatch.setattr(test_hopper_attention, "right", functools.cache(test_hopper_attention.right.__wrapped__))

    return give


@pytest.mark.parametrize("scores", HOSTILE)
def test_it_is_right_wherever_scores_lie(scores, given):
    given(HOSTILE[scores])
    for number, (lengths, case) in enumerate([("ragged", "few stages"), ("many keys", "three")]):
        found = forward(lengths, 16, (FP16, BF16)[number], CASES[case], ORDERS[number])  # right, or it raises
        assert not found.isnan().any()


# -- what the machine must see -----------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, Change]] = {
    "keys not waited for": ("jfa_short", drop("mbarrier.wait(full.index(first), parity)")),
    "kept keys given back": ("jfa_short", put("pred=leaving", "pred=True")),
    "values used too early": ("jfa_short", put("wait(1, deps=[s_f])", "wait(2, deps=[s_f])")),
    "queries given back unused": (
        "jfa_short", after("q = q_s.index(slot)", "mbarrier.arrive(q_empty.index(slot), count=1)"),
    ),
    "keys summed twice": ("jfa_short", put("scale, LAST, N, S_L)", "scale, 0, N, S_L)")),
    "values summed twice": ("jfa_short", put("[0, k_start + j * N, k_len - n * N,", "[END, k_start + k_len, END - N,")),
    "sums of the block before": ("jfa_short", put("several = first, parity, n < 0", "several = first, parity, n > 0")),
    "sums that never shrink": ("jfa_short", put("shrunk(acc, shrink, D, O_L)", "acc")),
    "weights of any size": ("lazy_softmax", put('_LIMIT = "0f47000000"', '_LIMIT = "0f7F800000"')),
    "zeros among the keys": ("lazy_softmax", put('== 1.0, s, float("-inf"))', "== 1.0, s, s)")),
    "the other row's maximum": ("lazy_softmax", put("if j & 2 == i]", "if j & 2 != i]")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, monkeypatch, tmp_path, given):
    module, change = FAULTS[fault]
    copy = with_changes({"jfa_short": jfa_short, "lazy_softmax": lazy_softmax}[module], (change,), tmp_path)
    if module == "jfa_short":
        monkeypatch.setattr(attention, "jfa_short", copy)
    else:
        for name in ("weights_of_first", "weights_of_next", "shrunk", "averages"):
            monkeypatch.setattr(jfa_short, name, getattr(copy, name))
    given(HOSTILE["rising"])
    with pytest.raises(AssertionError):
        for order in [*ORDERS, *((seed, 2) for seed in range(4, 12))]:
            for lengths in ("ragged", "few keys"):
                forward(lengths, 16, FP16, CASES["few stages"], order)


# -- which calls get it, and what it compiles to -----------------------------------------------------------------------


def _call(q_len: int, k_len: int, head_dim: int, left: int = -1, right: int = -1) -> tuple[Tensor, Tensor, Batch]:
    q, k = torch.empty((4 * q_len, 2, head_dim), dtype=BF16), torch.empty((4 * k_len, 2, head_dim), dtype=BF16)
    batch = Batch(offsets([q_len] * 4), offsets([k_len] * 4), q.shape[0], k.shape[0], left, right)
    return q, k, batch


def test_few_keys_without_a_mask_get_it():
    kernels = {}
    for name, lengths in {
        "short": (900, 100),
        "long": (900, 1000),
        "few": (32, 100),
        "masked": (900, 100, 5, 0),
    }.items():
        q_len, k_len, *window = lengths
        kernels[name] = choose(_call(q_len, k_len, 128, *window)[2], 128).kernel
    assert kernels == {"short": "short", "long": "long", "few": "long", "masked": "long"}


def test_a_mask_is_refused():
    q, k, batch = _call(70, 20, 16, right=0)
    with pytest.raises(ValueError, match="short keys takes no mask, got a window of -1, 0; accepted"):
        attention_forward(q, k, k, batch, qk_scale=1.0, variant=CASES["two"].variant)


@functools.cache
def _compiled(head_dim: int) -> Resources:
    q, k, batch = _call(900, 100, head_dim)
    with compiling_for(90) as found:
        attention_forward(q, k, k, batch, qk_scale=0.1)
    (kernel,) = found
    return kernel


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nothing_holds_it_up(head_dim, tmp_path):
    kernel = _compiled(head_dim)
    assert kernel.name == "_jfa_short"
    assert kernel.shared <= SHARED_LIMIT[90]
    assert kernel.spilled <= 64  # bytes a thread
    assert kernel.warnings == []  # C7512 to C7515 among them: products that wait for each other
    # A consumer's inner loop. About half of it is what a warp skips unless its scores tell it not to.
    assert min(product_loops(kernel, tmp_path)) <= 420
