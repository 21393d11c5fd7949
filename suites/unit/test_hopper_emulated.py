"""The Gluon kernels' own Python on the host, on a machine that copies, multiplies and arrives in any order.

Each case runs in several orders (seeds) and on as many programs: right against the float64 definition, and the same
bits each time. What guards that: faults put into the kernels, each of which some order must show.
"""

import functools
import importlib.util
import os
from functools import partial

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)
pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet, which is not installed")

import gluon_faults
from gluon_emulated import emulating
from gluon_faults import with_changes
from gluon_laws import LENGTHS, Inputs, Lengths, assert_near, gradients, inputs

from gem.kernels.hopper import backward_long, gdpa_long, gdpa_plain, gdpa_short, ops, parts
from gem.kernels.hopper.choose import _FEW, _LONG, _SHORT, Variant
from gem.kernels.hopper.gdpa_plain import PLAIN

BF16, FP16 = torch.bfloat16, torch.float16
SCALES = {"qk_scale": 0.3, "out_scale": 0.7}
ORDERS = [(0, 3), (1, 1), (2, 2), (3, 16)]  # seed, programs

# -- forward -----------------------------------------------------------------------------------------------------------

FORWARD = {
    "long": Variant("long", 128, 16, 2, turns=1),
    "long, turns between": Variant("long", 128, 16, 3, turns=2),
    "long, no turns": Variant("long", 128, 16, 2),
    "long, three": Variant("long", 192, 16, 5, consumers=3, q_slots=1, turns=1),
    "long, registers": Variant("long", 128, 16, 2, turns=1, q_slots=1, q_registers=True),
    "long, drained": Variant("long", 128, 16, 2, turns=1, pipelined=False),
    "lanes": Variant("long", 64, 16, 2, lanes=2),
    "lanes, straight": Variant("long", 64, 32, 4, lanes=2, q_slots=1, zigzag=False),
    "short": Variant("short", 128, 16, 4),
    "short, few stages": Variant("short", 256, 16, 2, q_slots=1),
    "short, three": Variant("short", 512, 16, 6, consumers=3),
    "short, values first": Variant("short", 128, 16, 3, values_first=True),
    "short, drained": Variant("short", 128, 16, 3, pipelined=False),
    "plain": Variant("plain", 128, 16, 3),
    "plain, two stages": Variant("plain", 128, 16, 2, zigzag=False),
}
KINDS = [(BF16, "silu"), (FP16, "gelu"), (BF16, "gelu_taylor"), (FP16, "relu_squared")]


@functools.cache
def _case(name: str, head_dim: int, dtype: torch.dtype, activation: str):
    lengths = LENGTHS[name]
    x = inputs(lengths, 2, head_dim, dtype)
    return lengths, x, gradients(lengths, x, activation, **SCALES)


def _forward(lengths: Lengths, x: Inputs, activation: str, variant: Variant, seed: int, programs: int) -> torch.Tensor:
    with emulating(seed, programs):
        return ops.gdpa_forward(x.q, x.k, x.v, lengths.batch(), activation=activation, variant=variant, **SCALES)


def _check_forward(lengths: str, head_dim: int, dtype: torch.dtype, activation: str, variant: Variant, orders) -> None:
    batch, x, (right, *_) = _case(lengths, head_dim, dtype, activation)
    outs = [_forward(batch, x, activation, variant, *order) for order in orders]
    assert_near(outs[0], right, batch.q_lens, "out")
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("lengths", [x for x in LENGTHS if x != "many keys and queries"])
@pytest.mark.parametrize("variant", FORWARD)
def test_a_forward_is_right_in_any_order(variant, lengths):
    number = list(FORWARD).index(variant) + list(LENGTHS).index(lengths)
    dtype, activation = KINDS[number % len(KINDS)]
    orders = ORDERS if lengths == "ragged" else ORDERS[number % 2 :: 2]
    _check_forward(lengths, 16, dtype, activation, FORWARD[variant], orders)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("table", [_LONG, _FEW, _SHORT, PLAIN], ids=["long", "few", "short", "plain"])
def test_the_variants_that_calls_get(table, head_dim):
    for lengths in ("ragged", "many keys"):
        _check_forward(lengths, head_dim, BF16, "gelu_taylor", table[head_dim], ORDERS[:1])


# -- backward ----------------------------------------------------------------------------------------------------------

# What runs it, its head_dim, and lengths; of backward_few see test_hopper_backward_few.py.
BACKWARD = {
    "long": (partial(backward_long.run, variant=backward_long.Variant(2, kv_slots=1)), 16, ("ragged", "shared")),
    "long, two tiles of keys": (
        partial(backward_long.run, variant=backward_long.Variant(4, kv_slots=2)), 16, ("many keys and queries",)
    ),
    "long, no lag": (
        partial(backward_long.run, variant=backward_long.Variant(2, lag=False)), 16,
        ("many keys and queries", "nobody's rows", "one row", "shared"),
    ),
    "long, not early": (
        partial(backward_long.run, variant=backward_long.Variant(3, kv_slots=2, early=False)), 32,
        ("many keys and queries", "no keys but of one"),
    ),
    "long, as calls get it": (backward_long.run, 64, ("many keys and queries",)),
    "long, as wide calls get it": (backward_long.run, 128, ("many keys and queries",)),
}  # fmt: skip


def _check_backward(run, head_dim: int, name: str, dtype: torch.dtype, activation: str, orders) -> None:
    """Every row is written, and in every order with the same bits."""
    lengths, x, right = _case(name, head_dim, dtype, activation)
    found = []
    for seed, programs in orders:
        dq = torch.full_like(x.d_out, torch.nan, dtype=torch.float32 if lengths.shared else dtype)
        dk, dv = torch.full_like(x.k, torch.nan), torch.full_like(x.v, torch.nan)
        with emulating(seed, programs):
            run(x.d_out, x.q, x.k, x.v, dq, dk, dv, lengths.batch(), activation=activation, **SCALES)
        assert_near(dq, right[1], lengths.q_lens, "dq")
        assert_near(dk, right[2], lengths.k, "dk")
        assert_near(dv, right[3], lengths.k, "dv")
        found.append((dq, dk, dv))
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize(("kernel", "lengths"), [(kernel, x) for kernel, case in BACKWARD.items() for x in case[2]])
def test_a_backward_is_right_in_any_order(kernel, lengths):
    run, head_dim, all_lengths = BACKWARD[kernel]
    number = list(BACKWARD).index(kernel) + all_lengths.index(lengths)
    dtype, activation = KINDS[number % len(KINDS)]
    orders = ORDERS[number % 4 :][:1] if head_dim >= 64 else ORDERS[number % 2 :: 2]
    _check_backward(run, head_dim, lengths, dtype, activation, orders)


# -- what the machine must see -----------------------------------------------------------------------------------------


def _seen(variant: Variant) -> str | None:
    """What tells of a fault, in the first order that does."""
    for order in [*ORDERS, *((seed, (2, 16, 3, 1, 7)[seed % 5]) for seed in range(4, 12))]:
        for lengths in ("ragged", "few keys" if variant.kernel == "short" else "many keys"):
            try:
                _check_forward(lengths, 16, BF16, "silu", variant, [order])
            except AssertionError as fault:
                return f"{type(fault).__name__}: {fault}"
    return None


@pytest.mark.parametrize("fault", gluon_faults.FORWARD)
def test_a_fault_in_a_forward_is_seen(fault, monkeypatch, tmp_path):
    fault = gluon_faults.FORWARD[fault]
    variant = FORWARD[fault.case]
    kernels = {"gdpa_long": gdpa_long, "gdpa_short": gdpa_short, "gdpa_plain": gdpa_plain}
    if fault.module == "parts":
        copy = with_changes(parts, fault.changes, tmp_path)
        for kernel in kernels.values():
            monkeypatch.setattr(kernel, "store_tile", copy.store_tile)
    else:
        copy = with_changes(kernels[fault.module], fault.changes, tmp_path)
        monkeypatch.setitem(ops._LAUNCH_OF, variant.kernel, copy.launch_of)
    seen = _seen(variant)
    print(seen)
    assert seen
