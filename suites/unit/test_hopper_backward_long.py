"""What the Gluon backward of GDPA for long sequences compiles to for sm_90, through its real launcher; nothing runs.

Its own Python runs on the host in test_hopper_emulated.py.
"""

import functools
import importlib.util
import os
import re

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: there is nothing to compile with", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set: Triton interprets and compiles nothing", allow_module_level=True)

from attention_laws import offsets
from compiled import SHARED_LIMIT, Resources, compiling_for, product_loops
from machine_code import disassembled, unset_reads

from gem.kernels.hopper import backward_long
from gem.kernels.schedule import Batch

BF16, FP16 = torch.bfloat16, torch.float16
MOST_SPILLED = {BF16: 64, FP16: 128}  # bytes a thread; in fp16 the exact gelu is the longest of all
CASES = [(128, BF16, "gelu_taylor"), (128, FP16, "gelu"), (64, BF16, "gelu_taylor"), (64, BF16, "silu")]
WIDE, NARROW = CASES[0], CASES[2]
CONSUMERS, WRITERS = 2, 2  # of a program
TILES = 3  # in its code: the first, those between, the last


@functools.cache
def compiled(head_dim: int, dtype: torch.dtype, activation: str) -> tuple[Resources, Resources]:
    """The two kernels of a call: that of the products, and that of dq's rows."""
    lens, heads = [2000, 1000], 2
    q, k, v, d_out, dq, dk, dv = (torch.empty((sum(lens), heads, head_dim), dtype=dtype) for _ in range(7))
    batch = Batch(offsets(lens), offsets(lens), q.shape[0], k.shape[0])
    with compiling_for(90) as found:
        backward_long.run(d_out, q, k, v, dq, dk, dv, batch, activation=activation, qk_scale=0.1)
    products, rows = found
    return products, rows


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}".replace("torch.", ""))
def test_nothing_holds_it_up(case, tmp_path):
    head_dim, dtype, _ = case
    for kernel, name in zip(compiled(*case), ("_backward_long", "_dq_rows"), strict=True):
        assert kernel.name == name
        assert (kernel.constants["D"], kernel.constants["FOLD"]) == (head_dim, dtype == FP16)
        assert kernel.shared <= SHARED_LIMIT[90]
        assert kernel.spilled <= MOST_SPILLED[dtype]
        assert kernel.warnings == []  # C7512 to C7515 among them: products that wait for each other
        assert unset_reads(disassembled(kernel.cubin, tmp_path)) == []


@pytest.mark.parametrize("case", [WIDE, NARROW], ids=["128", "64"])
def test_five_products_of_each_tile_on_the_tensor_cores(case):
    """None is computed twice: as many of each kind as of each other, and those of dq half as wide."""
    head_dim = case[0]
    ptx = compiled(*case)[0].ptx
    shapes = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ptx)
    found = [int(n) for n in shapes]
    wanted = [64] * 2 * (head_dim // 16)  # scores and gradients of weights, over head_dim
    wanted += [head_dim] * 2 * (64 // 16)  # dk and dv, over queries
    wanted += [head_dim // 2] * (128 // 16)  # dq, over the keys of both consumers
    assert sorted(found) == sorted(wanted * TILES * CONSUMERS)
    assert "mma.sync" not in ptx


def test_copies_and_sums_go_through_the_copy_engine():
    ptx = compiled(*WIDE)[0].ptx
    assert "cp.async.bulk.tensor.4d.shared" in ptx  # queries, keys and so on come
    assert ptx.count("cp.async.bulk.tensor.4d.global") == 2 * CONSUMERS  # dk, dv leave
    assert ptx.count("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add") == 2 * WRITERS  # a consumer's half each
    assert ptx.count("cp.async.bulk.tensor.2d.global.shared::cta") == 2 * WRITERS  # the first share is stored
    # Shares of dq enter shared memory 16 bytes at a time: 64 x 64 numbers of 128 threads.
    assert ptx.count("st.shared.v4.b32") == TILES * CONSUMERS * 64 * 64 // (128 * 4)
    assert ptx.count("setmaxnreg") >= 5


def test_what_is_summed_has_a_fixed_order():
    """The one atomic is on the counter of jobs. A flag is raised when the additions are done, not only read."""
    ptx = compiled(*WIDE)[0].ptx
    atomics = re.findall(r"^\s*(?:@\S+\s+)?((?:atom|red)\.\S+)", ptx, re.MULTILINE)
    assert atomics == ["atom.global.gpu.relaxed.add.u32"]
    steps = re.findall(
        r"ld\.acquire\.gpu\.global|cp\.reduce\.async\.bulk|wait_group \t?0;|st\.release\.gpu\.global", ptx
    )  # fmt: skip
    raised = [i for i, step in enumerate(steps) if step.startswith("st.release")]
    assert len(raised) == WRITERS
    assert all(steps[i - 1].startswith("wait_group") for i in raised)
    assert steps.count("cp.reduce.async.bulk") == 2 * WRITERS and steps.count("ld.acquire.gpu.global") == 2 * WRITERS


@pytest.mark.parametrize(("case", "most"), [(WIDE, 560), (NARROW, 490)], ids=["128", "64"])
def test_instructions_of_the_main_loop(case, most, tmp_path):
    """They are issued beside the products and bound them (docs/measured.md). 256 compute weights and slopes."""
    loops = product_loops(compiled(*case)[0], tmp_path)[:CONSUMERS]
    assert 300 < min(loops) <= max(loops) <= most
