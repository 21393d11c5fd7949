"""What the Gluon forwards of GDPA compile to for sm_90, through their real launcher; nothing runs."""

import functools
import importlib.util
import os
import re
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: there is nothing to compile with", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set: Triton interprets and compiles nothing", allow_module_level=True)

from attention_laws import offsets
from compiled import SHARED_LIMIT, Resources, compiling_for, product_loops
from machine_code import disassembled, unset_reads

from gem.kernels.hopper.choose import Variant, choose
from gem.kernels.hopper.gdpa_plain import PLAIN
from gem.kernels.hopper.ops import gdpa_forward
from gem.kernels.schedule import Batch

BF16, FP16 = torch.bfloat16, torch.float16
# Lengths of queries and keys, and shared queries, that get each kernel.
LENGTHS = {
    "long": ([2000, 1000], [2000, 1000], 0),
    "few": ([], [1000] * 8, 32),
    "short": ([900] * 4, [100] * 4, 0),
}
KERNEL = {"long": ("_gdpa_long", 1), "few": ("_gdpa_long", 2), "short": ("_gdpa_short", None)}
MOST_SPILLED = 64  # bytes a thread
# Each takes 2 to 12 seconds. What is measured most is compiled for all, the others where registers are scarce: by three
# consumers (head_dim 64), and for exact gelu, the longest, beside a whole tile of keys.
CASES = [
    *((name, head_dim, BF16, "gelu_taylor") for name in LENGTHS for head_dim in (64, 128)),
    *((name, 64, dtype, act) for name in ("long", "short") for dtype, act in ((BF16, "silu"), (FP16, "gelu"))),
    ("long", 128, FP16, "gelu"),
]
SMALL = {"keys": 16}  # a tile whose weights are few instructions, where it is these that are looked at


@functools.cache
def compiled(name: str, head_dim: int, dtype: torch.dtype, activation: str, **changed: int) -> Resources:
    """The one kernel of a call; ``changed``: of its variant, or plain = that without warp specialisation."""
    q_lens, k_lens, shared = LENGTHS[name]
    q = torch.empty((shared or sum(q_lens), 2, head_dim), dtype=dtype)
    k = torch.empty((sum(k_lens), 2, head_dim), dtype=dtype)
    q_offsets = None if shared else offsets(q_lens)
    batch = Batch(q_offsets, offsets(k_lens), q.shape[0], k.shape[0], shared=shared)
    variant: Variant | None = None
    if changed:
        variant = PLAIN[head_dim] if changed.pop("plain", False) else choose(batch, head_dim)
        variant = replace(variant, **changed)
    with compiling_for(90) as found:
        out = gdpa_forward(q, k, torch.empty_like(k), batch, activation=activation, qk_scale=0.1, variant=variant)
    assert out.shape == (sum(q_lens) or shared * len(k_lens), 2, head_dim)
    (kernel,) = found
    return kernel


def identify(value) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("name", "head_dim", "dtype", "activation"), CASES, ids=identify)
def test_a_call_gets_its_kernel_and_nothing_holds_it_up(name, head_dim, dtype, activation, tmp_path):
    kernel = compiled(name, head_dim, dtype, activation)
    assert (kernel.name, kernel.constants.get("LANES")) == KERNEL[name]
    assert kernel.constants["FOLD"] == (dtype == FP16)
    assert kernel.shared <= SHARED_LIMIT[90]
    assert kernel.spilled <= MOST_SPILLED
    assert kernel.warnings == []  # C7512 to C7515 among them: products that wait for each other
    assert unset_reads(disassembled(kernel.cubin, tmp_path)) == []


@pytest.mark.parametrize("name", LENGTHS)
def test_products_and_copies_run_on_the_units_made_for_them(name):
    kernel = compiled(name, 128, BF16, "gelu_taylor")
    ptx = kernel.ptx
    for columns in (kernel.constants["N"], 128):  # scores, and what they weigh
        assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16" in ptx
    assert "cp.async.bulk.tensor.4d.shared" in ptx  # loads
    assert "cp.async.bulk.tensor.4d.global" in ptx  # stores
    assert ptx.count("setmaxnreg") >= 3  # a share of the registers for each kind of warp
    assert "mma.sync" not in ptx and "ld.global.v4" not in ptx
    # The same bits every run: nothing is summed by atomics, but jobs are claimed.
    assert {x for x in re.findall(r"\b(?:atom|red)\.[\w.:]+", ptx)} == {"atom.global.gpu.relaxed.add.u32"}


@pytest.mark.parametrize("activation", ["relu", "relu_squared"])
def test_no_bound_hides_nan(activation):
    """A GPU's plain max takes the other number where one is NaN."""
    assert "max.NaN.f32" in compiled("few", 64, BF16, activation, **SMALL).ptx


@pytest.mark.parametrize(("activation", "tile"), [("identity", SMALL), ("gelu_tanh", {})], ids=str)
def test_every_activation_compiles(activation, tile):
    assert compiled("long", 64, BF16, activation, **tile).spilled <= MOST_SPILLED


@pytest.mark.parametrize(("dtype", "fitted"), [(BF16, True), (FP16, False)])
def test_bf16_alone_takes_the_fitted_gelu(dtype, fitted):
    """It is good to 8 bits. The exact one has no reciprocal."""
    assert ("rcp.approx.ftz.f32" in compiled("few", 64, dtype, "gelu", **SMALL).ptx) is fitted


# -- with one thing changed, for suites/throughput/gdpa_ablation.toml --------------------------------------------------


def queued(ptx: str) -> int:
    """Places where a product is waited for while another stands behind it in the tensor core's queue."""
    return len(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+1;", ptx))


def instructions(ptx: str) -> int:
    return sum(bool(re.match(r"\s+(@\S+\s+)?[a-z][\w.]*\s.*;", line)) for line in ptx.splitlines())


@pytest.mark.parametrize(("name", "head_dim"), [("long", 128), ("long", 64), ("few", 128), ("short", 128)])
def test_a_drained_kernel_has_both_products_queued_inside_a_job_alone(name, head_dim):
    whole = compiled(name, head_dim, BF16, "gelu_taylor")
    drained = compiled(name, head_dim, BF16, "gelu_taylor", pipelined=False)
    assert (whole.constants["PIPELINED"], drained.constants["PIPELINED"]) == (1, 0)
    consumers = whole.constants["CONSUMERS"]
    assert (queued(whole.ptx), queued(drained.ptx)) == (2 * consumers, consumers)
    assert drained.ptx.count("wgmma.mma_async") == whole.ptx.count("wgmma.mma_async")
    assert drained.warnings == [] and drained.spilled <= MOST_SPILLED and drained.shared == whole.shared


@pytest.mark.parametrize("name", ["long", "short"])
def test_jobs_in_the_batches_order_are_dealt_and_nothing_else_changes(name):
    """A consumer then reads the list itself: an instruction or two a field instead of one, wherever a job begins."""
    claimed = compiled(name, 128, BF16, "gelu_taylor")
    straight = compiled(name, 128, BF16, "gelu_taylor", zigzag=False)
    assert [(x.constants["ZIGZAG"], x.constants["CLAIMS"]) for x in (claimed, straight)] == [(1, 1), (0, 0)]
    assert "atom." in claimed.ptx and "atom." not in straight.ptx
    assert abs(instructions(claimed.ptx) - instructions(straight.ptx)) < 150
    assert queued(straight.ptx) == queued(claimed.ptx)
    assert straight.warnings == [] and straight.spilled <= MOST_SPILLED


def test_what_can_be_changed_costs_the_main_loop_nothing(tmp_path):
    """Its instructions beside the products are what bounds it (docs/measured.md)."""
    changed: list[dict[str, int]] = [{}, {"pipelined": False}, {"zigzag": False}]
    kernels = [compiled("long", 128, BF16, "gelu_taylor", **one) for one in changed]
    # The main loop of each of two consumers; loops with more products in them are longer.
    whole, *others = (product_loops(kernel, tmp_path)[:2] for kernel in kernels)
    assert 300 < min(whole) <= max(whole) <= 365
    assert all(max(loops) <= max(whole) + 1 for loops in others)  # one more or less is ptxas's mood


@pytest.mark.parametrize("head_dim", [64, 128])
def test_without_warp_specialisation_all_warps_are_of_one_kind(head_dim):
    plain = compiled("long", head_dim, BF16, "gelu_taylor", plain=True)
    assert plain.name == "_gdpa_plain" and ".reqntid 256" in plain.ptx and "setmaxnreg" not in plain.ptx
    assert queued(plain.ptx) == 2 and plain.shared <= SHARED_LIMIT[90]
    assert "cp.async.bulk.tensor.4d.shared" in plain.ptx and "cp.async.bulk.tensor.4d.global" in plain.ptx
    assert plain.warnings == [] and plain.spilled <= MOST_SPILLED
