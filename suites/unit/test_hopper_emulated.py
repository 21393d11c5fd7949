"""The Gluon kernels' own Python on the host, on a machine that copies, multiplies and arrives in any order.

Each case runs in several orders (seeds) and on as many programs: right against the float64 definition, and the same
bits each time. What guards that: faults put into the kernels, each of which some order must show.
"""

import functools
import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)
pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet, which is not installed")

from gluon_emulated import emulating
from gluon_laws import LENGTHS, Inputs, Lengths, assert_near, gradients, inputs, with_fault
from gluon_memory import Fault

from gem.kernels.hopper import gdpa_long, ops
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
    "short, three": Variant("short", 256, 16, 6, consumers=3),
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


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", FORWARD)
def test_a_forward_is_right_in_any_order(variant, lengths):
    dtype, activation = KINDS[(list(FORWARD).index(variant) + list(LENGTHS).index(lengths)) % len(KINDS)]
    _check_forward(lengths, 16, dtype, activation, FORWARD[variant], ORDERS)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("table", [_LONG, _FEW, _SHORT, PLAIN], ids=["long", "few", "short", "plain"])
def test_the_variants_that_calls_get(table, head_dim):
    for lengths in ("ragged", "many keys"):
        _check_forward(lengths, head_dim, BF16, "gelu_taylor", table[head_dim], ORDERS[:1])


# -- what the machine must see -----------------------------------------------------------------------------------------

_WAIT_FULL = "mbarrier.wait(full.index(stage), (it // STAGES) & 1)\n"
FAULTS = [
    ("long", gdpa_long, "mbarrier.wait(q_full.index(W * SLOTS), 0)", "pass"),
    ("long", gdpa_long, "mbarrier.wait(q_full.index(slot), (t // SLOTS) & 1)", "pass"),
]


def _caught(kernel: str, variant: str, copy, monkeypatch) -> str | None:
    monkeypatch.setitem(ops._LAUNCH_OF, kernel, copy.launch_of)
    for lengths in ("ragged", "many keys"):
        for order in [*ORDERS, *((seed, 2) for seed in range(4, 12))]:
            batch, x, (right, *_) = _case(lengths, 16, BF16, "silu")
            try:
                out = _forward(batch, x, "silu", FORWARD[variant], *order)
                assert_near(out, right, batch.q_lens, "out")
            except (Fault, AssertionError) as fault:
                return f"{type(fault).__name__}: {fault}"
    return None


@pytest.mark.parametrize(("variant", "module", "old", "new"), FAULTS)
def test_a_fault_is_seen(variant, module, old, new, monkeypatch, tmp_path):
    copy = with_fault(module, old, new, tmp_path)
    assert _caught(FORWARD[variant].kernel, variant, copy, monkeypatch)
