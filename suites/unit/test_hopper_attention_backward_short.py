"""Jagged softmax attention in Gluon, backward for short keys: on the host in several orders, and compiled for sm_90.

Right against the float64 definition, and the same bits in every order of copies, products and arrivals. What guards
that: faults put into the kernels, each of which some order must show.
"""

import importlib.util
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
from compiled import SHARED_LIMIT, compiling_for
from gluon_emulated import emulating
from gluon_laws import LENGTHS, inputs
from machine_code import disassembled, unset_reads
from test_hopper_attention import ORDERS, SCALE, right, right_gradients

from gem.kernels.hopper import jfa_backward_short, sums
from gem.kernels.hopper.backward_short import Short
from gem.kernels.hopper.rows import of_rows
from gem.kernels.schedule import Batch

BF16, FP16 = torch.bfloat16, torch.float16
MANY = "many keys and queries"
FULL = (-1, -1)


class Case(NamedTuple):
    kernel: ModuleType
    variant: Any
    head_dim: int
    lengths: tuple[str, ...]


CASES = {
    "short": Case(jfa_backward_short, Short(4), 16, (MANY, "ragged", "shared")),
    "short, five places": Case(jfa_backward_short, Short(5), 32, ("few keys", "no keys but of one", "nobody's rows")),
    "short, more places": Case(jfa_backward_short, Short(10), 16, ("up to 256 keys", "one row", "a tile each")),
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
        case.kernel.run(
            x.d_out, x.q, x.k, x.v, rows, dq, dk, dv, batch, qk_scale=scale, sums=room, variant=case.variant
        )
    written = []
    wanted = right_gradients(lengths, case.head_dim, dtype, FULL, scale)
    lens = jagged.q_lens, jagged.k, jagged.k
    for name, got, good, ends in zip(("dq", "dk", "dv"), (dq, dk, dv), wanted, lens, strict=True):
        end = sum(ends)
        assert got[end:].isnan().all(), f"{name} behind the last offset is written"
        if end == 0:
            continue
        assert got[:end].isfinite().all(), name
        # Where queries see one key their gradient is 0, and what is rounded is all there is.
        size = max(1.0, float(good.abs().max()))
        assert float((got[:end].double() - good[:end]).abs().max()) <= 1e-2 * size, name
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


@pytest.mark.parametrize("case", ["short"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_scores_far_apart_and_far_below_those_of_no_key(case, dtype):
    """Up to 400 in base 2: nearly all weights are 0 or 1, and 2^-lse, the zeros' behind a sample's end, is infinite."""
    _, lse = right(MANY, CASES[case].head_dim, dtype, FULL, 30.0)
    assert lse.min() < -200
    assert gradients(CASES[case], MANY, dtype, False, ORDERS[1], 30.0).isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nothing_holds_it_up(head_dim, tmp_path):
    q_lens, k_lens = [900] * 2, [100] * 2
    q, d_out, dq = (torch.empty((sum(q_lens), 2, head_dim), dtype=BF16) for _ in range(3))
    k, v, dk, dv = (torch.empty((sum(k_lens), 2, head_dim), dtype=BF16) for _ in range(4))
    batch = Batch(offsets(q_lens), offsets(k_lens), q.shape[0], k.shape[0])
    rows = torch.empty((4096, 64))
    with compiling_for(90) as found:
        jfa_backward_short.run(d_out, q, k, v, rows, dq, dk, dv, batch, qk_scale=0.1)
    (kernel,) = found
    assert kernel.name == "_jfa_backward_short" and kernel.constants["D"] == head_dim
    assert kernel.shared <= SHARED_LIMIT[90] and kernel.spilled <= 64
    assert kernel.warnings == []  # C7512 to C7515 among them: products that wait for each other
    assert unset_reads(disassembled(kernel.cubin, tmp_path)) == []
