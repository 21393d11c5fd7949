"""The Gluon backward of GDPA for few queries: what it compiles to for sm_90, and its own Python on the host.

On the host (gluon_emulated) each case runs in several orders of copies, products and arrivals: right against the
float64 definition, and the same bits each time. What guards that: faults put into the kernel, each of which some order
must show.
"""

import functools
import importlib.util
import os
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: there is nothing to compile with", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set: Triton interprets and compiles nothing", allow_module_level=True)

from attention_laws import offsets
from compiled import SHARED_LIMIT, Resources, compiling_for, product_loops
from gluon_faults import after, before, drop, put, with_changes
from gluon_laws import Lengths, assert_near, gradients, inputs
from machine_code import disassembled, unset_reads
from triton.compiler.errors import CompilationError

from gem.kernels.hopper import backward_few
from gem.kernels.hopper.backward_few import VARIANTS, Few
from gem.kernels.schedule import Batch

BF16, FP16 = torch.bfloat16, torch.float16
MOST_SPILLED = 64  # bytes a thread
# Tiles, head_dim, type, activation, whether the queries are shared.
CASES = [
    (VARIANTS[64, 128], 128, BF16, "gelu_taylor", True),
    (VARIANTS[32, 128], 128, BF16, "silu", True),
    (VARIANTS[32, 64], 64, FP16, "gelu", False),
    (replace(VARIANTS[64, 64], claims=False), 64, BF16, "silu", False),
]


@functools.cache
def compiled(tiles: Few, head_dim: int, dtype: torch.dtype, activation: str, shared: bool) -> Resources:
    """The one kernel of a call."""
    k_lens, heads, rows = [1000] * 4, 2, tiles.rows
    q_rows = rows if shared else rows * len(k_lens)
    q = torch.empty((q_rows, heads, head_dim), dtype=dtype)
    k = torch.empty((sum(k_lens), heads, head_dim), dtype=dtype)
    d_out = torch.empty((rows * len(k_lens), heads, head_dim), dtype=dtype)
    dq = torch.empty_like(d_out, dtype=torch.float32 if shared else dtype)
    q_offsets = None if shared else offsets([rows] * len(k_lens))
    batch = Batch(q_offsets, offsets(k_lens), q_rows, k.shape[0], shared=rows if shared else 0)
    v, dk, dv = (torch.empty_like(k) for _ in range(3))
    with compiling_for(90) as found:
        backward_few.run(d_out, q, k, v, dq, dk, dv, batch, activation=activation, qk_scale=0.1, variant=tiles)
    (kernel,) = found
    return kernel


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].rows}-{case[1]}-{case[2]}-{case[3]}")
def test_nothing_holds_it_up(case, tmp_path):
    tiles, head_dim, dtype, _, _ = case
    kernel = compiled(*case)
    assert kernel.name == "_backward_few"
    assert kernel.constants["M"] == tiles.rows
    assert (kernel.constants["D"], kernel.constants["FOLD"]) == (head_dim, dtype == FP16)
    assert kernel.shared <= SHARED_LIMIT[90]
    assert kernel.spilled <= MOST_SPILLED
    assert kernel.warnings == []  # C7512 to C7515 among them: products that wait for each other
    assert unset_reads(disassembled(kernel.cubin, tmp_path)) == []


@pytest.mark.parametrize("case", CASES[:2], ids=["64", "32"])
def test_products_and_copies_run_on_the_units_made_for_them(case):
    rows = case[0].rows
    ptx = compiled(*case).ptx
    found = [int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ptx)]
    steps, lanes = 128 // 16, 2
    wanted = [rows] * 2 * steps  # scores, d_weights
    wanted += [128] * 2 * (rows // 16)  # dv, dk
    wanted += [128] * (64 // 16)  # dq, of 64 rows for 32 queries too
    assert sorted(found) == sorted(wanted * lanes)
    assert "cp.async.bulk.tensor.4d.shared" in ptx  # loads
    assert ptx.count("cp.async.bulk.tensor.4d.global") == 2 * lanes  # stores: dv, dk
    assert ptx.count("setmaxnreg") >= 3  # a share of the registers for each kind of warp
    assert "mma.sync" not in ptx


@pytest.mark.parametrize("case", CASES, ids=lambda case: "claims" if case[0].claims else "dealt")
def test_the_one_atomic_counts_jobs(case):
    """What is summed is summed in one lane, in order: the same bits every run."""
    atomics = re.findall(r"^\s*(?:@\S+\s+)?((?:atom|red)\.\S+)", compiled(*case).ptx, re.MULTILINE)
    assert atomics == ["atom.global.gpu.relaxed.add.u32"] * (2 if case[0].claims else 0)


def test_the_main_loop_stays_short(tmp_path):
    """Of each of two consumers. Loops with more products in them are longer."""
    assert max(product_loops(compiled(*CASES[0]), tmp_path)[:2]) <= 800


def test_a_ring_of_fewer_than_two_tiles_is_refused():
    """A tile's buffers come back when the next one's products have begun: with one tile's place nothing would."""
    with pytest.raises(CompilationError, match="BUFFERS"):
        compiled(Few(64, 1, 3), *CASES[0][1:])


# -- on the host -------------------------------------------------------------------------------------------------------

LENGTHS = {
    "ragged": Lengths((32, 0, 3, 64, 1, 17, 0, 65), (200, 5, 0, 130, 64, 1, 0, 9), rest_q=5, rest_k=3),
    "shared": Lengths((), (0, 70, 1, 64, 300, 0), rest_k=4, shared=7),
    "more jobs than lanes": Lengths((20,) * 9, (10, 300, 70, 129, 64, 65, 1, 128, 5)),
    "nobody's rows": Lengths((0, 0), (0, 9), rest_q=27, rest_k=80),
    "one row": Lengths((1,), (1,)),
}
TILES = {
    "two tiles": Few(64, 1, 4),
    "two and a half": Few(32, 1, 5),
    "two jobs' queries": Few(64, 2, 6),
    "dealt": Few(32, 2, 5, claims=False),
}
KINDS = [(BF16, "silu"), (FP16, "gelu"), (BF16, "gelu_taylor"), (FP16, "relu_squared")]
ORDERS = [(0, 3), (1, 1), (2, 2), (3, 16)]  # seed, programs
SCALES = {"qk_scale": 0.3, "out_scale": 0.7}


@functools.cache
def case(name: str, dtype: torch.dtype, activation: str):
    x = inputs(LENGTHS[name], 2, 64, dtype)
    return x, gradients(LENGTHS[name], x, activation, **SCALES)[1:]


def emulated(name: str, dtype: torch.dtype, activation: str, tiles: Few, seed: int, programs: int, kernel=backward_few):
    """(dq, dk, dv), NaN wherever nothing was written."""
    pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet")
    from gluon_emulated import emulating

    x, _ = case(name, dtype, activation)
    with emulating(seed, programs):
        dq = torch.empty_like(x.d_out, dtype=torch.float32 if LENGTHS[name].shared else dtype)
        dk, dv = torch.empty_like(x.k), torch.empty_like(x.v)
        kernel.run(
            x.d_out, x.q, x.k, x.v, dq, dk, dv, LENGTHS[name].batch(), activation=activation, variant=tiles,
            **SCALES,
        )  # fmt: skip
    return dq, dk, dv


def check(name: str, dtype: torch.dtype, activation: str, rows: int, got) -> None:
    lengths = LENGTHS[name]
    _, right = case(name, dtype, activation)
    q_lens, k_lens = lengths.q_lens, lengths.k
    for label, x, expected, lens in zip(("dq", "dk", "dv"), got, right, (q_lens, k_lens, k_lens), strict=True):
        ends = offsets(lens).tolist()
        left = [*(q_len > rows for q_len in q_lens), True]  # and what lies behind the last offsets
        for b, (start, end) in enumerate(pairwise([*ends, x.shape[0]])):
            if left[b]:
                assert bool(x[start:end].isnan().all()), f"{label} of sample {b} is another kernel's"
                x, expected = x.clone(), expected.clone()
                x[start:end] = expected[start:end] = 0
        assert_near(x, expected, lens, label)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("tiles", TILES)
def test_it_is_right_in_any_order(tiles, name):
    dtype, activation = KINDS[(list(TILES).index(tiles) + list(LENGTHS).index(name)) % len(KINDS)]
    results = [emulated(name, dtype, activation, TILES[tiles], *order) for order in ORDERS]
    check(name, dtype, activation, TILES[tiles].rows, results[0])
    for result in results[1:]:
        assert all(torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)) for a, b in zip(results[0], result, strict=True))


WAIT = "mbarrier.wait("
GIVE = "mbarrier.arrive(q_empty.index(slot), count=1)"
FAULTS = {
    "keys not waited for": drop(WAIT + "full.index(k_at)"),
    "values not waited for": drop(WAIT + "full.index(v_at)"),
    "queries not waited for": drop(WAIT + "q_full.index(slot)"),
    "buffers filled while they are read": drop(WAIT + "empty.index(at)"),
    "queries filled while they are read": drop(WAIT + "q_empty.index(slot)"),
    "wrong phase of buffers": put("((number // BUFFERS) & 1) ^ 1", "(number // BUFFERS) & 1"),
    "buffers given back on their way out": put(" " * 12 + "tma.store_wait(0)", " " * 12 + "pass"),
    "stores not waited for at the end": lambda lines: ["" if x == "    tma.store_wait(0)" else x for x in lines],
    "queries given back before their last product": (drop(GIVE), before("dk_f = warpgroup_mma(", GIVE)),
    "ds not fenced": put(" " * 12 + "fence_async_shared()", " " * 12 + "pass"),
    "gradients not fenced": after("def send", "    fence_async_shared = int"),
    "a tile twice": put("in range(1, key_tiles(k_len, N))", "in range(0, key_tiles(k_len, N))"),
    "a job that nobody claims": put("4 * programs + ", "4 * programs + 1 + "),
    "another slot's job": put("  tell(job_s, slot, row", "  tell(job_s, slot ^ 1, row"),
    "no end of jobs": put("tell(job_s, slot, 0, -1", "tell(job_s, slot, 0, 0"),
    "queries without keys": put("gl.where(k_len > 0, END - q_len, END)", "END - q_len"),
    "keys without queries": put("gl.where(q_len > 0, END - k_len, END)", "END - k_len"),
    "rows of another sample": put("mask=m < q_len", "mask=m < M"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, tmp_path):
    changes = FAULTS[fault]
    kernel = with_changes(backward_few, changes if isinstance(changes, tuple) else (changes,), tmp_path)
    tiles = TILES["two tiles"]
    for order in [*ORDERS, *((seed, 2) for seed in range(4, 12))]:
        for name in ("ragged", "more jobs than lanes"):
            try:
                check(name, BF16, "silu", tiles.rows, emulated(name, BF16, "silu", tiles, *order, kernel=kernel))
            except AssertionError as seen:
                print(seen)
                return
    pytest.fail("no order showed it")
