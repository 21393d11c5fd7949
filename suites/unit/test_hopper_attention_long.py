"""Jagged softmax attention in Gluon, long keys: what it compiles to for sm_90, and faults that must be seen."""

import importlib
import importlib.util
import os
from types import FunctionType

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)
pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet, which is not installed")

from attention_laws import offsets
from compiled import SHARED_LIMIT, Resources, compiling_for
from gluon_faults import Change, drop, put, with_changes
from machine_code import disassembled, unset_reads
from test_hopper_attention import BF16, CASES, ORDERS, backward, forward
from triton.runtime.jit import JITFunction

from gem.kernels.hopper import attention, jfa_backward, jfa_backward_long, jfa_long
from gem.kernels.hopper.attention import attention_forward
from gem.kernels.schedule import Batch

# Bytes a thread. With three consumers, and with edges, some of what only a branch needs is spilled outside it.
MOST_SPILLED = {(64, -1): 192, (128, -1): 64, (64, 256): 128, (128, 256): 448}


def batch(head_dim: int, left: int) -> tuple[torch.Tensor, Batch]:
    lens = [2000, 1000]
    q = torch.empty((sum(lens), 2, head_dim), dtype=BF16)
    return q, Batch(offsets(lens), offsets(lens), q.shape[0], q.shape[0], left, 0 if left >= 0 else -1)


def check(kernel: Resources, most_spilled: int, folder) -> None:
    assert kernel.shared <= SHARED_LIMIT[90]
    assert kernel.spilled <= most_spilled
    assert kernel.warnings == []  # C7512 to C7515 among them: products that wait for each other
    assert unset_reads(disassembled(kernel.cubin, folder)) == []


@pytest.mark.parametrize(("head_dim", "left"), MOST_SPILLED)
def test_nothing_holds_a_forward_up(head_dim, left, tmp_path):
    q, jagged = batch(head_dim, left)
    with compiling_for(90) as found:
        attention_forward(q, torch.empty_like(q), torch.empty_like(q), jagged, qk_scale=0.1)
    (kernel,) = found
    assert kernel.name == "_jfa_long" and kernel.constants["D"] == head_dim
    assert (kernel.constants["LEFT"], kernel.constants["RIGHT"]) == (int(left >= 0),) * 2
    check(kernel, MOST_SPILLED[head_dim, left], tmp_path)


@pytest.mark.parametrize(("head_dim", "left"), [(64, -1), (128, -1), (128, 256)])
def test_nothing_holds_a_backward_up(head_dim, left, tmp_path):
    q, jagged = batch(head_dim, left)
    with compiling_for(90) as found:
        jfa_backward.attention_backward(q, q, q, q, q, torch.empty(2, q.shape[0]), jagged, qk_scale=0.1)
    assert [kernel.name for kernel in found] == ["_rows", "_jfa_backward_long", "_dq_rows"]
    for kernel in found:
        check(kernel, 192 if left >= 0 else 64, tmp_path)


# -- faults ------------------------------------------------------------------------------------------------------------

FORWARD: dict[str, tuple[str, str, Change]] = {
    "keys not waited for": ("long", "jfa_long", drop("mbarrier.wait(full.index(stage), (it // STAGES) & 1)")),
    "stage filled while it is read": ("long", "jfa_long", drop("mbarrier.wait(empty.index(stage)")),
    "stage given back before its product": (
        "no turns, left", "jfa_long", put("wait(1, deps=[s_f])", "wait(2, deps=[s_f])"),
    ),
    "sums that do not shrink": ("long", "jfa_long", drop("acc = acc * gl.convert_layout(shrink")),
    "keys of the job's first tile again": ("long", "jfa_long", put("low + j * N, q_len", "low, q_len")),
    "the end no edge": ("long", "softmax", put("whole = j + N <= k_len", "whole = j > -1")),
    "edges never": ("three, causal", "softmax", put("if not whole:", "if False:")),
    "a key too far": ("three, causal", "softmax", put("m + right, last", "m + right + 1, last")),
    "a key too near": ("registers, window", "softmax", put("n >= m - left", "n > m - left")),
    "a tile too late": ("no turns, left", "softmax", put("k_len - q_len - left,", "k_len - q_len - left + 16,")),
    "the old maximum": ("long", "softmax", put("return weights, higher, total", "return weights, top, total")),
    "a sum of 0 divides": ("three, causal", "softmax", put("gl.where(none, 0.0, 1.0 / total)", "1.0 / total")),
    "no maximum in the log-sum-exp": ("long", "softmax", put("top + gl.log2(total)", "gl.log2(total)")),
}  # fmt: skip
# (Window, scale of the scores, module, change.)
BACKWARD: dict[str, tuple[tuple[int, int], float, str, Change]] = {
    "no dot": ((-1, -1), 0.3, "jfa_backward_long", put("(d_weights - delta)", "d_weights")),
    "weights above 1": (
        (-1, -1), 30.0, "jfa_backward_long", put("gl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)", "x"),
    ),
    "rows of another tile": (
        (-1, -1), 0.3, "jfa_backward_long", put("((tile + i) * heads + head) * 2,", "(tile * heads + head) * 2,"),
    ),
    "rows that nobody waits for": (
        (-1, -1), 0.3, "jfa_backward_long", put(" + rows_desc.block_type.nbytes", ""),
    ),
    "a key too near": ((40, 0), 0.3, "jfa_backward_long", put("seen = i <= j + left", "seen = i < j + left")),
    "a query too early": ((40, 0), 0.3, "jfa_backward_long", put("i >= j - right", "i >= j - right - 1")),
    "edges never": ((40, 0), 0.3, "jfa_backward_long", put("if not whole:", "if False:")),
    "a tile of queries less": (
        (40, 0), 0.3, "jfa_backward_long", put("(high + 63) // 64 - low // 64", "high // 64 - low // 64"),
    ),
    "shares counted from the first keys": (
        (40, 0), 0.3, "sums", put("+ i * 64 - left, 0) // 128", "+ i * 64 - left, 0) // 2048"),
    ),
    "sums where no key is seen": ((40, 0), 0.3, "sums", put("mask=(i >= 0) & seen", "mask=(i >= 0)")),
    "dots of the output alone": ((-1, -1), 0.3, "rows", put("gl.sum(x * y, 1)", "gl.sum(x, 1)")),
}  # fmt: skip


@pytest.fixture
def put_in(monkeypatch, tmp_path):
    """A copy of a module with a change in the place of the module, for whoever has its functions."""

    def change(name: str, what: Change) -> None:
        module = importlib.import_module(f"gem.kernels.hopper.{name}")
        copy = with_changes(module, (what,), tmp_path)
        for user in (attention, jfa_backward, jfa_long, jfa_backward_long):
            for key, value in vars(user).items():
                if value is module:
                    monkeypatch.setattr(user, key, copy)
                elif (
                    user is not module
                    and value is vars(module).get(key)
                    and isinstance(value, (JITFunction, FunctionType))
                ):
                    monkeypatch.setattr(user, key, getattr(copy, key))

    return change


@pytest.mark.parametrize("name", FORWARD)
def test_a_fault_in_a_forward_is_seen(name, put_in):
    case, module, change = FORWARD[name]
    put_in(module, change)
    with pytest.raises(AssertionError):
        for order in ORDERS:
            for lengths in ("ragged", "many keys", "many keys and queries"):
                forward(lengths, 16, BF16, CASES[case], order)


@pytest.mark.parametrize("name", BACKWARD)
def test_a_fault_in_a_backward_is_seen(name, put_in):
    window, scale, module, change = BACKWARD[name]
    put_in(module, change)
    with pytest.raises(AssertionError):
        for order in ORDERS:
            backward("many keys and queries", 64, BF16, window, order, scale)
