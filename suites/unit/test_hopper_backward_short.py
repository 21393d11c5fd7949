"""What the Gluon backwards of GDPA for short keys compile to for sm_90; nothing runs. On the host they do in
test_hopper_emulated.py.
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
from triton.compiler.errors import CompilationError

from gem.kernels.hopper import backward_keep, backward_short
from gem.kernels.hopper.backward_short import Short
from gem.kernels.schedule import Batch

BF16, FP16 = torch.bfloat16, torch.float16
MOST_SPILLED = 64  # bytes a thread
KERNELS = {"short": backward_short, "keep": backward_keep}
# Kernel, head_dim, type, activation.
CASES = [("short", 128, BF16, "gelu_taylor"), ("short", 64, BF16, "silu"), ("keep", 64, BF16, "gelu_taylor")]
CONSUMERS = 2


@functools.cache
def compiled(name: str, head_dim: int, dtype: torch.dtype, activation: str, variant: Short | None = None) -> Resources:
    """The one kernel of a call."""
    q, k = (torch.empty((4 * rows, 2, head_dim), dtype=dtype) for rows in (700, 200))
    batch = Batch(offsets([700] * 4), offsets([200] * 4), q.shape[0], k.shape[0])
    d_out, dq = (torch.empty_like(q) for _ in range(2))
    v, dk, dv = (torch.empty_like(k) for _ in range(3))
    with compiling_for(90) as found:
        KERNELS[name].run(d_out, q, k, v, dq, dk, dv, batch, activation=activation, qk_scale=0.1, variant=variant)
    (kernel,) = found
    return kernel


def identify(value) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("name", "head_dim", "dtype", "activation"), CASES, ids=identify)
def test_nothing_holds_it_up(name, head_dim, dtype, activation, tmp_path):
    kernel = compiled(name, head_dim, dtype, activation)
    assert kernel.name == f"_backward_{name}"
    assert kernel.shared <= SHARED_LIMIT[90]
    assert kernel.spilled <= MOST_SPILLED
    assert kernel.warnings == []  # C7512 to C7515 among them: products that wait for each other
    assert unset_reads(disassembled(kernel.cubin, tmp_path)) == []


@pytest.mark.parametrize(("name", "head_dim", "dtype", "activation"), CASES, ids=identify)
def test_products_and_copies_run_on_the_units_made_for_them(name, head_dim, dtype, activation):
    """A tile is five products of a consumer. The last one's, dq's, have half the columns."""
    ptx = compiled(name, head_dim, dtype, activation).ptx
    found = [int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ptx)]
    keys = {64, head_dim, head_dim // 2}  # of scores, of dk and dv, of dq
    assert set(found) == keys
    assert "cp.async.bulk.tensor.4d.shared" in ptx  # loads
    assert "cp.async.bulk.tensor.4d.global" in ptx  # stores: dq, dk, dv
    assert ptx.count("setmaxnreg") >= 3  # a share of the registers for each kind of warp
    assert "mma.sync" not in ptx


def test_parts_of_dq_move_16_bytes_at_a_time():
    ptx = compiled(*CASES[0]).ptx
    wide = re.findall(r"(?:ld|st)\.global\.(?:cg\.)?v4\.b32", ptx)
    # 32 numbers a thread, read and written in three places of each consumer: inside a pass, at its end, without keys.
    assert len(wide) == CONSUMERS * 3 * 2 * 32 // 4
    assert not re.search(r"st\.global\.(?!v4)", ptx)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=identify)
def test_the_atomics_count_jobs(case):
    """What is summed is summed in one thread, in order: the same bits every run."""
    atomics = re.findall(r"^\s*(?:@\S+\s+)?((?:atom|red)\.\S+)", compiled(*case).ptx, re.MULTILINE)
    assert atomics == ["atom.global.gpu.relaxed.add.u32"] * 2


def test_main_loops_stay_short(tmp_path):
    """Instructions beside products cost nearly a cycle each (docs/measured.md)."""
    short, keep = (product_loops(compiled(*case), tmp_path) for case in (CASES[0], CASES[2]))
    assert max(x for x in short if x < 900) <= 690  # a tile of 128 keys
    assert max(x for x in keep if x < 1100) <= 970  # up to 256 keys, two blocks a consumer


def test_a_ring_of_fewer_than_two_tiles_is_refused():
    with pytest.raises(CompilationError, match="BUFFERS"):
        compiled(*CASES[0], Short(3))
