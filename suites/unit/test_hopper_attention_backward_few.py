"""The Gluon backward of jagged softmax attention for few queries: compiled for sm_90, and its own Python on the host.

On the host (gluon_emulated) each case runs in several orders of copies, products and arrivals: right against the
float64 definition, and the same bits each time. What guards that: faults put into the kernel, each of which some order
must show.
"""

import functools
import importlib.util
import os
import re
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)
pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet, which is not installed")

from attention_laws import offsets
from compiled import SHARED_LIMIT, Resources, compiling_for, product_loops
from gluon_emulated import emulating
from gluon_faults import after, before, drop, put, with_changes
from gluon_laws import LENGTHS, Inputs, Lengths, inputs
from test_hopper_attention import right, right_gradients

from gem.kernels.hopper import jfa_backward_few
from gem.kernels.hopper.backward_few import Few
from gem.kernels.hopper.rows import of_rows
from gem.kernels.schedule import Batch

BF16, FP16 = torch.bfloat16, torch.float16
MOST_SPILLED = 64  # bytes a thread
# Queries, head_dim, type, whether the queries are shared.
COMPILED = [(32, 64, FP16, True), (64, 64, BF16, False), (32, 128, BF16, False), (64, 128, BF16, True)]


@functools.cache
def compiled(queries: int, head_dim: int, dtype: torch.dtype, shared: bool) -> Resources:
    """The one kernel of a call."""
    k_lens, heads = [1000] * 4, 2
    d_out = torch.empty((queries * len(k_lens), heads, head_dim), dtype=dtype)
    q = d_out[:queries] if shared else torch.empty_like(d_out)
    k = torch.empty((sum(k_lens), heads, head_dim), dtype=dtype)
    dq = torch.empty_like(d_out, dtype=torch.float32 if shared else dtype)
    q_offsets = None if shared else offsets([queries] * len(k_lens))
    batch = Batch(q_offsets, offsets(k_lens), q.shape[0], k.shape[0], shared=queries if shared else 0)
    v, dk, dv = (torch.empty_like(k) for _ in range(3))
    with compiling_for(90) as found:
        jfa_backward_few.run(
            d_out, q, k, v, torch.empty((64, 64)), dq, dk, dv, batch, qk_scale=0.1, queries=queries
        )  # fmt: skip
    (kernel,) = found
    return kernel


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: f"{case[0]}-{case[1]}")
def test_nothing_holds_it_up(case):
    kernel = compiled(*case)
    assert kernel.name == "_jfa_backward_few"
    assert (kernel.constants["M"], kernel.constants["D"]) == case[:2]
    assert kernel.shared <= SHARED_LIMIT[90]
    assert kernel.spilled <= MOST_SPILLED
    assert kernel.warnings == []  # C7512 to C7515 among them: products that wait for each other
    # Nothing is summed by atomics: in each of two lanes a first job is claimed, and one behind each.
    atomics = re.findall(r"^\s*(?:@\S+\s+)?((?:atom|red)\.\S+)", kernel.ptx, re.MULTILINE)
    assert atomics == ["atom.global.gpu.relaxed.add.u32"] * 4


def test_the_main_loop_stays_short(tmp_path):
    """Of each of two consumers. Loops with more products in them are longer."""
    kernel = compiled(*COMPILED[-1])
    assert max(product_loops(kernel, tmp_path)[:2]) <= 650
    assert "min.NaN.f32" in kernel.ptx  # a plain one takes the other number where one is NaN


# -- on the host -------------------------------------------------------------------------------------------------------

OWN = {
    "few": Lengths((32, 0, 3, 64, 1, 17, 0, 65), (200, 5, 0, 130, 64, 1, 0, 9), rest_q=5, rest_k=3),
    "more jobs than lanes": Lengths((20,) * 9, (10, 300, 70, 129, 64, 65, 1, 128, 5)),
}
NAMES = [*OWN, "shared", "nobody's rows", "one row"]
TILES = {"two tiles": Few(64, 1, 4), "two and a half": Few(32, 1, 5), "two jobs' queries": Few(64, 2, 6)}
ORDERS = [(0, 3), (1, 1), (2, 2), (3, 16)]  # seed, programs
SCALE, HOSTILE = 0.3, 30.0  # with the latter nearly all of a row's weight is on one key
HEADS, HEAD_DIM = 2, 64


@functools.cache
def case(name: str, dtype: torch.dtype, scale: float) -> tuple[Lengths, Inputs, Tensor, Tensor, tuple[Tensor, ...]]:
    """(lengths, inputs, output, log-sum-exps, right gradients), the last three in float64."""
    with mock.patch.dict(LENGTHS, OWN):
        what = name, HEAD_DIM, dtype, (-1, -1), scale
        out, lse = (x.detach() for x in right(*what))
        return LENGTHS[name], inputs(LENGTHS[name], HEADS, HEAD_DIM, dtype), out, lse, right_gradients(*what)


def emulated(
    name: str, dtype: torch.dtype, tiles: Few, order: tuple[int, int], scale: float = SCALE, kernel=jfa_backward_few
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), NaN wherever nothing was written. The output is given in fp32: its rounding is not judged."""
    lengths, x, out, lse, _ = case(name, dtype, scale)
    batch = lengths.batch()
    out, lse = out.float(), lse.float()
    with emulating(*order):
        rows = of_rows(_with_rows(out, x.d_out), x.d_out, _with_rows(lse.T, x.d_out).T.contiguous(), batch)
        dq = torch.empty_like(x.d_out, dtype=torch.float32 if lengths.shared else dtype)
        dk, dv = torch.empty_like(x.k), torch.empty_like(x.v)
        kernel.run(x.d_out, x.q, x.k, x.v, rows, dq, dk, dv, batch, qk_scale=scale, variant=tiles)
    return dq, dk, dv


def _with_rows(x: Tensor, like: Tensor) -> Tensor:
    """As many rows, those behind the last NaN."""
    found = x.new_full((like.shape[0], *x.shape[1:]), torch.nan)
    found[: x.shape[0]] = x
    return found


def check(name: str, dtype: torch.dtype, queries: int, got: tuple[Tensor, ...], scale: float = SCALE) -> None:
    lengths, _, _, _, wanted = case(name, dtype, scale)
    q_lens, k_lens = lengths.q_lens, lengths.k
    others = [*(q_len > queries for q_len in q_lens), True]  # and what lies behind the last offsets
    for label, x, expected, lens in zip(("dq", "dk", "dv"), got, wanted, (q_lens, k_lens, k_lens), strict=True):
        ends = [*offsets(lens).tolist(), x.shape[0]]
        for b, (start, end) in enumerate(pairwise(ends)):
            here, right_here = x[start:end].double(), expected[start:end]
            if others[b]:
                assert bool(here.isnan().all()), f"{label} of sample {b} is another kernel's"
            elif here.numel():
                assert bool(here.isfinite().all()), f"{label} of sample {b} is not finite"
                # Where queries see one key their gradient is 0, and what is rounded is all there is.
                error = float((here - right_here).abs().max()) / max(1.0, float(right_here.abs().max()))
                assert error <= 1e-2, f"{label} of sample {b} is off by {error:.1e}"


def run_and_check(
    name: str, dtype: torch.dtype, tiles: Few, orders: list[tuple[int, int]], scale: float = SCALE
) -> None:  # fmt: skip
    first, *others = (emulated(name, dtype, tiles, order, scale) for order in orders)
    check(name, dtype, tiles.rows, first, scale)
    for other in others:
        assert all(torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tiles", TILES)
def test_it_is_right_in_any_order(tiles, name):
    number = list(TILES).index(tiles) + NAMES.index(name)
    run_and_check(name, (BF16, FP16)[number % 2], TILES[tiles], ORDERS)


@pytest.mark.parametrize("name", OWN)
def test_scores_far_apart_are_right(name):
    """Zeros behind a sample's end then lie far above rows whose keys all score low."""
    lse = case(name, BF16, HOSTILE)[3]
    assert float(lse.min()) < -200.0
    run_and_check(name, BF16, TILES["two tiles"], ORDERS, HOSTILE)


def test_a_nan_is_not_hidden():
    """Of a query: in its row of dq, in all dk and dv of its sample, and nowhere else."""
    lengths, x, *_ = case("few", BF16, SCALE)
    clean = emulated("few", BF16, TILES["two tiles"], ORDERS[0])
    row = 32 + 3 + 5  # of the sample of 64 queries and 130 keys
    kept, x.q[row] = x.q[row].clone(), torch.nan
    try:
        dq, dk, dv = emulated("few", BF16, TILES["two tiles"], ORDERS[0])
    finally:
        x.q[row] = kept
    start, end = offsets(lengths.k)[3:5].tolist()
    assert bool(dq[row].isnan().all() and dk[start:end].isnan().all() and dv[start:end].isnan().all())
    dq[row], dk[start:end], dv[start:end] = clean[0][row], clean[1][start:end], clean[2][start:end]
    assert all(torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)) for a, b in zip((dq, dk, dv), clean, strict=True))


def test_masks_are_refused():
    x = torch.zeros((4, 1, 64), dtype=BF16)
    batch = Batch(offsets([4]), offsets([4]), 4, 4, right=0)
    with pytest.raises(ValueError, match="right 0; accepted: -1"):
        jfa_backward_few.run(x, x, x, x, torch.zeros((8, 64)), x, x, x, batch, qk_scale=1.0)


GIVE = "mbarrier.arrive(q_empty.index(slot), count=1"
CLAMP = "gl.minimum(s * scale2 - lse, 0.0, propagate_nan=tl.PropagateNan.ALL)"
FAULTS = {
    "numbers of another head": put("shared) * heads + head) * 2", "shared) * heads) * 2"),
    "numbers that nobody wrote": drop("of_queries = gl.where("),
    "numbers not expected": put(" + rows_desc.block_type.nbytes", ""),
    "log-sum-exps for dots": put("rows_s.slice(1, 1, dim=0)", "rows_s.slice(0, 1, dim=0)"),
    "weights above 1": put(CLAMP, "s * scale2 - lse"),
    "numbers given back before they are read": (drop(GIVE), before("w, dx = _weigh(", GIVE + ", pred=j + 1 == n)")),
    "keys not waited for": drop("mbarrier.wait(full.index(k_at)"),
    "buffers given back on their way out": put(" " * 12 + "tma.store_wait(0)", " " * 12 + "pass"),
    "ds not fenced": put(" " * 12 + "fence_async_shared()", " " * 12 + "pass"),
    "a job that nobody takes": after("next_job = claim(claimed)", "claim(claimed)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, tmp_path):
    changes = FAULTS[fault]
    kernel = with_changes(jfa_backward_few, changes if isinstance(changes, tuple) else (changes,), tmp_path)
    tiles = TILES["two tiles"]
    for order in [*ORDERS, *((seed, 2) for seed in range(4, 12))]:
        for name in OWN:
            try:
                check(name, BF16, tiles.rows, emulated(name, BF16, tiles, order, HOSTILE, kernel=kernel), HOSTILE)
            except AssertionError as seen:
                print(seen)
                return
    pytest.fail("no order showed it")
