"""The Gluon kernels' own Python on the host, on a machine that copies, multiplies and arrives in any order.

Each case runs in several orders (seeds) and on as many programs: right against the float64 definition, and the same
bits each time. What guards that: faults put into the kernels, each of which some order must show.
"""

import functools
import importlib
import importlib.util
import inspect
import os
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)
pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet, which is not installed")

import gluon_faults
from gluon_emulated import emulating
from gluon_laws import LENGTHS, Inputs, Lengths, assert_near, gradients, inputs
from triton.runtime.jit import JITFunction

from gem.kernels.hopper import (
    backward_keep,
    backward_long,
    backward_short,
    gdpa_long,
    gdpa_plain,
    gdpa_short,
    ops,
    sums,
)
from gem.kernels.hopper.backward_keep import Keep
from gem.kernels.hopper.backward_short import Short
from gem.kernels.hopper.choose import _FEW, _LONG, _SHORT, Variant
from gem.kernels.hopper.gdpa_plain import PLAIN

BF16, FP16 = torch.bfloat16, torch.float16
SCALES = {"qk_scale": 0.3, "out_scale": 0.7}
ORDERS = [(0, 3), (1, 1), (2, 2), (3, 16)]  # seed, programs
KINDS = [(BF16, "silu"), (FP16, "gelu"), (BF16, "gelu_taylor"), (FP16, "relu_squared")]


@functools.cache
def _given(name: str, head_dim: int, dtype: torch.dtype, activation: str) -> tuple[Lengths, Inputs, tuple[Tensor, ...]]:
    """Lengths, inputs, and right (out, dq, dk, dv)."""
    x = inputs(LENGTHS[name], 2, head_dim, dtype)
    return LENGTHS[name], x, gradients(LENGTHS[name], x, activation, **SCALES)


# -- forward -----------------------------------------------------------------------------------------------------------

FORWARD = {
    "long": Variant("long", 128, 16, 2, turns=1),
    "long, turns between": Variant("long", 128, 16, 3, turns=2),
    "long, no turns": Variant("long", 128, 16, 2),
    "long, three": Variant("long", 192, 16, 5, consumers=3, q_slots=1, turns=1),
    "long, registers": Variant("long", 128, 16, 2, turns=1, q_slots=1, q_registers=True),
    "long, drained": Variant("long", 128, 16, 2, turns=1, pipelined=False),
    "long, dealt": Variant("long", 128, 16, 2, turns=2, claims=False),
    "lanes": Variant("long", 64, 16, 2, lanes=2),
    "lanes, straight": Variant("long", 64, 32, 4, lanes=2, q_slots=1, zigzag=False),
    "short": Variant("short", 128, 16, 4),
    "short, dealt": Variant("short", 256, 16, 4, claims=False),
    "short, few stages": Variant("short", 256, 16, 2, q_slots=1),
    "short, three": Variant("short", 512, 16, 6, consumers=3),
    "short, values first": Variant("short", 128, 16, 3, values_first=True),
    "short, drained": Variant("short", 128, 16, 3, pipelined=False),
    "plain": Variant("plain", 128, 16, 3),
    "plain, two stages": Variant("plain", 128, 16, 2, zigzag=False),
}
MANY, FEW = "many keys and queries", "up to 256 keys"  # for backwards


def _out(
    lengths: str, head_dim: int, dtype: torch.dtype, activation: str, variant: Variant, order: tuple[int, int]
) -> Tensor:
    """The right output."""
    jagged, x, right = _given(lengths, head_dim, dtype, activation)
    with emulating(*order):
        out = ops.gdpa_forward(x.q, x.k, x.v, jagged.batch(), activation=activation, variant=variant, **SCALES)
    assert_near(out, right[0], jagged.q_lens, "out")
    return out


@pytest.mark.parametrize("lengths", [x for x in LENGTHS if x not in (MANY, FEW)])
@pytest.mark.parametrize("case", FORWARD)
def test_a_forward_is_right_in_any_order(case, lengths):
    number = list(FORWARD).index(case) + list(LENGTHS).index(lengths)
    orders = ORDERS if lengths == "ragged" else ORDERS[number % 2 :: 2]
    first, *others = (_out(lengths, 16, *KINDS[number % len(KINDS)], FORWARD[case], order) for order in orders)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("table", [_LONG, _FEW, _SHORT, PLAIN], ids=["long", "few", "short", "plain"])
def test_the_variants_that_calls_get_are_right(table, head_dim):
    for lengths in ("ragged", "many keys"):
        out = _out(lengths, head_dim, BF16, "gelu_taylor", table[head_dim], ORDERS[0])
        assert out.shape[1:] == (2, head_dim) and out.isfinite().all()


# -- backward ----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    kernel: ModuleType
    variant: Any  # None: as calls get it
    head_dim: int
    lengths: tuple[str, ...]


LONG = backward_long.Variant(2, rows=64, kv_slots=1, kv_registers=False)
# Of backward_few see test_hopper_backward_few.py.
BACKWARD = {
    "long": Case(backward_long, LONG, 16, (MANY, "ragged", "shared")),
    "long, two places": Case(backward_long, replace(LONG, kv_slots=2), 16, (MANY, "nobody's rows", "one row")),
    "long, more stages": Case(backward_long, replace(LONG, stages=3), 16, (MANY,)),
    "long, wide": Case(backward_long, replace(LONG, rows=128), 32, (MANY, "no keys but of one")),
    "long, keys in registers": Case(backward_long, replace(LONG, kv_slots=2, kv_registers=True), 16, (MANY, "shared")),
    "long at 64": Case(backward_long, None, 64, (MANY,)),
    "long at 128": Case(backward_long, None, 128, (MANY,)),
    "short": Case(backward_short, Short(4), 16, (MANY, "ragged", "shared", "few keys")),
    "short, more places": Case(backward_short, Short(10), 32, (MANY, "no keys but of one", "nobody's rows", "one row")),
    "short at 64": Case(backward_short, None, 64, (MANY,)),
    "short at 128": Case(backward_short, None, 128, (MANY,)),
    "keep": Case(backward_keep, Keep(4), 64, (FEW, "no keys but of one", "nobody's rows", "one row", "shared")),
    "keep, a tile each": Case(backward_keep, Keep(4), 64, ("a tile each",)),
    "keep at 64": Case(backward_keep, None, 64, (FEW,)),
}


def _gradients(
    case: Case, lengths: str, dtype: torch.dtype, activation: str, wide: bool, order: tuple[int, int]
) -> Tensor:
    """All of the right dq (in fp32 where ``wide``), dk and dv.

    Every row is written, except by kernels with LIMITS what lies behind the last offsets.
    """
    jagged, x, right = _given(lengths, case.head_dim, dtype, activation)
    dq = torch.full_like(x.d_out, torch.nan, dtype=torch.float32 if wide or jagged.shared else dtype)
    dk, dv = torch.full_like(x.k, torch.nan), torch.full_like(x.v, torch.nan)
    batch = jagged.batch()
    limited = hasattr(case.kernel, "LIMITS")
    how: dict[str, Any] = {"activation": activation, "variant": case.variant, **SCALES}
    if limited and "sums" in inspect.signature(case.kernel.run).parameters:
        room, _ = sums.buffers(dq.shape[0], batch.size, x.k.shape[1], case.head_dim, x.k.device)
        how["sums"] = torch.full_like(room, torch.nan)
    with emulating(*order):
        case.kernel.run(x.d_out, x.q, x.k, x.v, dq, dk, dv, batch, **how)
    written = []
    for i, (name, got, lens) in enumerate((("dq", dq, jagged.q_lens), ("dk", dk, jagged.k), ("dv", dv, jagged.k)), 1):
        end = sum(lens) if limited else got.shape[0]
        assert got[end:].isnan().all(), f"{name} behind the last offset is written"
        assert_near(got[:end], right[i][:end], lens, name)
        written.append(got[:end].float().flatten())
    return torch.cat(written)


@pytest.mark.parametrize(("case", "lengths"), [(name, x) for name, case in BACKWARD.items() for x in case.lengths])
def test_a_backward_is_right_in_any_order(case, lengths):
    number = list(BACKWARD).index(case) + list(LENGTHS).index(lengths)
    orders = ORDERS[number % 4 :][:1] if BACKWARD[case].head_dim >= 64 else ORDERS[number % 2 :: 2]
    first, *others = (
        _gradients(BACKWARD[case], lengths, *KINDS[number % len(KINDS)], number % 3 == 0, order) for order in orders
    )
    assert all(torch.equal(first, other) for other in others)


# -- what the machine must see -----------------------------------------------------------------------------------------

MORE_ORDERS = [*ORDERS, *((seed, (2, 16, 3, 1, 7)[seed % 5]) for seed in range(4, 12))]
KERNELS = (gdpa_long, gdpa_short, gdpa_plain, backward_long, backward_short, backward_keep)


@pytest.fixture
def put_in(monkeypatch, tmp_path):
    """Makes a copy of a module with a fault, which kernels that use the module then have in its place."""

    def put(fault: gluon_faults.Fault) -> ModuleType:
        module = importlib.import_module(f"gem.kernels.hopper.{fault.module}")
        copy = gluon_faults.with_changes(module, fault.changes, tmp_path)
        for user in KERNELS:
            for name, value in vars(user).items():
                if user is not module and isinstance(value, JITFunction) and value is vars(module).get(name):
                    monkeypatch.setattr(user, name, getattr(copy, name))
        return copy

    return put


@pytest.mark.parametrize("name", gluon_faults.FORWARD)
def test_a_fault_in_a_forward_is_seen(name, put_in, monkeypatch):
    fault = gluon_faults.FORWARD[name]
    variant = FORWARD[fault.case]
    copy = put_in(fault)
    if fault.module.startswith("gdpa"):
        monkeypatch.setitem(ops._LAUNCH_OF, variant.kernel, copy.launch_of)
    with pytest.raises(AssertionError):
        for order in MORE_ORDERS:
            for lengths in ("ragged", "few keys" if variant.kernel == "short" else "many keys"):
                _out(lengths, 16, BF16, "silu", variant, order)


@functools.cache
def _right_bits(case: str) -> Tensor:
    return _gradients(BACKWARD[case], BACKWARD[case].lengths[0], BF16, "silu", True, ORDERS[0])


@pytest.mark.parametrize("name", gluon_faults.BACKWARD)
def test_a_fault_in_a_backward_is_seen(name, put_in):
    fault = gluon_faults.BACKWARD[name]
    case = BACKWARD[fault.case]
    right = _right_bits(fault.case)
    copy = put_in(fault)
    if fault.module == case.kernel.__name__.split(".")[-1]:
        case = case._replace(kernel=copy)
    with pytest.raises(AssertionError):
        for order in MORE_ORDERS:
            assert torch.equal(_gradients(case, case.lengths[0], BF16, "silu", True, order), right)
