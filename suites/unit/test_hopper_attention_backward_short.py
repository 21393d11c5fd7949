"""Jagged softmax attention in Gluon, backward for short keys: on the host in several orders, and compiled for sm_90.

Right against the float64 definition, and the same bits in every order of copies, products and arrivals. What guards
that: faults put into the kernels, each of which some order must show.
"""

import functools
import importlib
import importlib.util
import inspect
import os
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)
pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet, which is not installed")

from attention_laws import offsets
from compiled import SHARED_LIMIT, compiling_for, product_loops
from gluon_emulated import emulating
from gluon_faults import Fault, before, drop, fault, put, swap, with_changes
from gluon_laws import LENGTHS, inputs
from machine_code import disassembled, unset_reads
from test_hopper_attention import ORDERS, SCALE, right, right_gradients

from gem.kernels.hopper import jfa_backward_keep, jfa_backward_short, sums
from gem.kernels.hopper.backward_keep import Keep
from gem.kernels.hopper.backward_short import Short
from gem.kernels.hopper.rows import of_rows
from gem.kernels.schedule import Batch

BF16, FP16 = torch.bfloat16, torch.float16
MANY, FEW = "many keys and queries", "up to 256 keys"
FULL = (-1, -1)
MORE_ORDERS = [*ORDERS, *((seed, (2, 16, 3, 1, 7)[seed % 5]) for seed in range(4, 12))]


class Case(NamedTuple):
    kernel: ModuleType
    variant: Any
    head_dim: int
    lengths: tuple[str, ...]


CASES = {
    "short": Case(jfa_backward_short, Short(4), 16, (MANY, "ragged", "shared")),
    "short, five places": Case(jfa_backward_short, Short(5), 32, ("few keys", "no keys but of one", "nobody's rows")),
    "short, more places": Case(jfa_backward_short, Short(10), 16, ("up to 256 keys", "one row", "a tile each")),
    "keep": Case(jfa_backward_keep, Keep(4), 64, (FEW, "no keys but of one", "nobody's rows", "shared")),
    "keep, five places": Case(jfa_backward_keep, Keep(5), 64, ("a tile each", "one row")),
}


def gradients(
    case: Case, lengths: str, dtype: torch.dtype, wide: bool, order: tuple[int, int], scale: float = SCALE
) -> Tensor:
    """All of the right dq (in fp32 where ``wide``), dk and dv; what lies behind the last offsets is not written."""
    jagged, x = LENGTHS[lengths], inputs(LENGTHS[lengths], 2, case.head_dim, dtype)
    batch = jagged.batch()
    out, lse = (t.detach().float() for t in right(lengths, case.head_dim, dtype, FULL, scale))
    dq = torch.full_like(x.d_out, torch.nan, dtype=torch.float32 if wide or jagged.shared else dtype)
    dk, dv = torch.full_like(x.k, torch.nan), torch.full_like(x.v, torch.nan)
    room = torch.full_like(sums.room(dq.shape[0], batch.size, 2, case.head_dim, x.k.device), torch.nan)
    with emulating(*order):
        rows = of_rows(out, x.d_out, lse, batch)
        how = {"sums": room} if "sums" in inspect.signature(case.kernel.run).parameters else {}
        case.kernel.run(x.d_out, x.q, x.k, x.v, rows, dq, dk, dv, batch, qk_scale=scale, variant=case.variant, **how)
    written = []
    wanted = right_gradients(lengths, case.head_dim, dtype, FULL, scale)
    lens = jagged.q_lens, jagged.k, jagged.k
    for name, got, good, ends in zip(("dq", "dk", "dv"), (dq, dk, dv), wanted, lens, strict=True):
        end = sum(ends)
        assert got[end:].isnan().all(), f"{name} behind the last offset is written"
        if end == 0:
            continue
        # Where queries see one key their gradient is 0, and what is rounded is all there is. NaN is refused.
        most = 1e-2 * max(1.0, float(good[:end].abs().max()))
        torch.testing.assert_close(got[:end].double(), good[:end], rtol=0.0, atol=most, msg=name)
        written.append(got[:end].float().flatten())
    return torch.cat(written)


@pytest.mark.parametrize(("case", "lengths"), [(name, x) for name, case in CASES.items() for x in case.lengths])
def test_it_is_right_in_any_order(case, lengths):
    number = list(CASES).index(case) + list(LENGTHS).index(lengths)
    dtype = (BF16, FP16)[number % 2]
    first, *others = (
        gradients(CASES[case], lengths, dtype, number % 3 == 0, order) for order in ORDERS[number % 2 :: 2]
    )
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("case", "lengths", "dtype"), [("short", MANY, BF16), ("keep", "a tile each", FP16)])
def test_scores_far_apart_and_far_below_those_of_no_key(case, lengths, dtype):
    """Hundreds in base 2: nearly all weights are 0 or 1, and 2^-lse, the zeros' behind a sample's end, is infinite."""
    _, lse = right(lengths, CASES[case].head_dim, dtype, FULL, 30.0)
    assert lse.min() < -200
    gradients(CASES[case], lengths, dtype, False, ORDERS[1], 30.0)


# -- what the machine must see -----------------------------------------------------------------------------------------


class Put(NamedTuple):
    """A fault, and on what it shows."""

    fault: Fault
    lengths: str
    scale: float = SCALE


_CLAMP = put("gl.minimum(s * scale2 - lse, 0.0", "gl.minimum(s * scale2 - lse, float('inf')")
_GIVE = "give_back(empty, it, BUFFERS)"
_END = "dv, dk = warpgroup_mma_wait(0, deps=[dv_f, dk_f])"
FAULTS = {
    "weights above 1": Put(fault("short", "jfa_backward_short", _CLAMP), "ragged", 30.0),
    "no dot taken away": Put(fault("short", "jfa_backward_short", put("p * (dw - delta)", "p * dw")), "ragged"),
    "rows not waited for": Put(
        fault("short", "jfa_backward_short", put(" + rows_desc.block_type.nbytes", "")), "ragged"
    ),
    "rows overwritten": Put(
        fault(
            "short", "jfa_backward_short", put("index(it % ((BUFFERS + 1) // 2))", "index(0)"),
            put("rows_s.index(it % ROWS)", "rows_s.index(0)"),
        ), "ragged",
    ),
    "too few places for rows": Put(
        fault("short, five places", "jfa_backward_short", put("(BUFFERS + 1) // 2", "BUFFERS // 2")), "few keys"
    ),
    "nobody's rows read": Put(
        fault("short", "jfa_backward_short", drop("of_rows = gl.where(there > 0, of_rows, NOWHERE)")), "ragged"
    ),
    "rows walked one way": Put(
        fault("short", "jfa_backward_short", put("of_rows += step * heads", "of_rows += there * heads")), MANY
    ),
    "scores used early": Put(
        fault("short", "jfa_backward_short", put("wait(1, deps=[s_f])", "wait(2, deps=[s_f])")), "ragged"
    ),
    "their gradients used early": Put(
        fault("short", "jfa_backward_short", put("wait(1, deps=[dw_f])", "wait(2, deps=[dw_f])")), "ragged"
    ),
    "tile given back early": Put(
        fault("short", "jfa_backward_short", swap(_END, "give_back(empty, it")), "ragged"
    ),
    "ds not waited for": Put(
        fault("short", "jfa_backward_short", drop("mbarrier.wait(ds_full.index((it - 1) % DS)")), FEW
    ),
    "keep: rows of one tile for all": Put(
        fault("keep", "jfa_backward_keep", drop("of_rows += there * heads * 2")), FEW
    ),
    "keep: too few places for rows": Put(
        fault("keep, five places", "jfa_backward_keep", put("[(BUFFERS + 1) // 2, 2, 64]", "[BUFFERS // 2, 2, 64]")),
        "a tile each",
    ),
    "keep: nobody's rows read": Put(
        fault("keep", "jfa_backward_keep", put("gl.where(there > 0, (first_tile(", "gl.where(True, (first_tile(")),
        "no keys but of one",
    ),
    "keep: scores used early": Put(
        fault("keep", "jfa_backward_keep", put("s = warpgroup_mma_wait(1, deps", "s = warpgroup_mma_wait(2, deps")),
        FEW,
    ),
    "keep: tile given back early": Put(
        fault("keep", "jfa_backward_keep", drop("give_back(empty, it"), before("if both:", _GIVE)), FEW
    ),
}  # fmt: skip


@functools.cache
def right_bits(case: str, lengths: str, scale: float) -> Tensor:
    return gradients(CASES[case], lengths, BF16, True, ORDERS[0], scale)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, tmp_path):
    wrong, lengths, scale = FAULTS[name]
    good = right_bits(wrong.case, lengths, scale)
    module = importlib.import_module(f"gem.kernels.hopper.{wrong.module}")
    case = CASES[wrong.case]._replace(kernel=with_changes(module, wrong.changes, tmp_path))
    with pytest.raises(AssertionError):
        for order in MORE_ORDERS:
            assert torch.equal(gradients(case, lengths, BF16, True, order, scale), good)


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head_dim", "wide"), [("short", 64, False), ("short", 128, False), ("keep", 64, False), ("keep", 64, True)]
)
def test_nothing_holds_it_up(name, head_dim, wide, tmp_path):
    """``wide``: dq in fp32, for shared queries, whose stores take the most registers."""
    q_lens, k_lens = [900] * 2, [100] * 2
    q, d_out = (torch.empty((sum(q_lens), 2, head_dim), dtype=BF16) for _ in range(2))
    dq = torch.empty_like(q, dtype=torch.float32 if wide else BF16)
    k, v, dk, dv = (torch.empty((sum(k_lens), 2, head_dim), dtype=BF16) for _ in range(4))
    batch = Batch(offsets(q_lens), offsets(k_lens), q.shape[0], k.shape[0])
    rows = torch.empty((4096, 64))
    with compiling_for(90) as found:
        {"short": jfa_backward_short, "keep": jfa_backward_keep}[name].run(
            d_out, q, k, v, rows, dq, dk, dv, batch, qk_scale=0.1
        )
    (kernel,) = found
    assert kernel.name == f"_jfa_backward_{name}"
    assert kernel.shared <= SHARED_LIMIT[90] and kernel.spilled <= 64
    assert kernel.warnings == []  # C7512 to C7515 among them: products that wait for each other
    assert unset_reads(disassembled(kernel.cubin, tmp_path)) == []
    # The main loop: instructions beside products cost nearly a cycle each (docs/measured.md).
    most = {("short", 128): 640, ("short", 64): 520, ("keep", 64): 780}[name, head_dim]
    assert max(x for x in product_loops(kernel, tmp_path) if x < 800) <= most
