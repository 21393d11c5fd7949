"""What the kernels of impl="triton" compile to for GPUs that are not here, through their real launchers and defaults.

Nothing runs: Triton and ptxas say how much shared memory a program asks for, what it spills, and which instructions it
is made of. (The earlier generation in jagged_attention_v1.py has a test of its own and is full of atomics.)
"""

import functools
import importlib.util
import os
import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: there is nothing to compile with", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set: Triton interprets and compiles nothing", allow_module_level=True)

from attention_laws import offsets
from compiled import SHARED_LIMIT, Resources, compiling_for

from gem.kernels.attention_dkv import attention_dkv
from gem.kernels.attention_dq import attention_dq
from gem.kernels.attention_forward import attention_forward
from gem.kernels.bias import Bias
from gem.kernels.bias_gradient import bias_gradient
from gem.kernels.block_attention import block_attention_backward, block_attention_forward
from gem.kernels.schedule import Batch

ARCHES = (80, 90, 100)
# Bytes that a thread may spill to local memory: a little more than the most that was found.
MOST_SPILLED = {torch.bfloat16: 384, torch.float16: 384, torch.float32: 1792}
# Where each pair's bucket is looked up (64-bit distances of a whole tile), and where rows start at any address.
MOST_SPILLED_BESIDES = 1152
MATRIX_UNIT = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
MATRIX_ROWS = {80: 16, 90: 64, 100: 64}  # fewer rows of a product go through an older unit
COPY_ENGINE = "cp.async.bulk.tensor"

HALF, FLOAT16, FULL = torch.bfloat16, torch.float16, torch.float32
LONG = [2000, 1000], [2000, 1000]
SHORT = [900] * 4, [100] * 4
FEW = [32] * 8, [1000] * 8


@dataclass(frozen=True)
class Attention:
    """A call of jagged attention, forward and backward; ``lens`` name the class of tiles (gem.kernels.config)."""

    head_dim: int = 64
    dtype: torch.dtype = HALF
    activation: str = "softmax"
    left: int = -1
    right: int = -1
    bias: str = ""
    lens: tuple[list[int], list[int]] = LONG
    shared: int = 0
    row_stride: int = 0  # elements, 0: packed


WINDOW = Attention(left=256, right=0)
GDPA = Attention(128, activation="gelu_taylor")
ATTENTION = {
    "relu": Attention(64, activation="relu"),
    "d16": Attention(16),
    "d64": Attention(64),
    "d80": Attention(80),
    "d128": Attention(128),
    "d256": Attention(256),
    "fp16": Attention(128, FLOAT16),
    "fp32": Attention(64, FULL),
    "fp32_d128": Attention(128, FULL),
    "fp32_d256": Attention(256, FULL, "gelu"),
    "causal": Attention(right=0),
    "window": WINDOW,
    "gelu": replace(GDPA, activation="gelu"),
    "gelu_taylor": GDPA,
    "gelu_taylor_d64": replace(GDPA, head_dim=64),
    "gelu_taylor_window": replace(GDPA, left=256, right=0),
    "short_keys": replace(GDPA, lens=SHORT),
    "few_queries": Attention(128, lens=FEW),
    "shared_queries": replace(GDPA, lens=FEW, shared=32),
    "dense": Attention(bias="dense"),
    "position": Attention(bias="position"),
    "time": Attention(bias="time"),
    "dense_fp32": Attention(dtype=FULL, bias="dense"),
    "time_d256_window": replace(WINDOW, head_dim=256, bias="time"),
    "unaligned": Attention(row_stride=2 * 64 + 4),
    "wide": Attention(lens=([3, 2], [3, 2]), row_stride=2**22),
}
# What differs on other architectures by little from a case beside it; each takes 2 to 25 s there.
ONLY_SM90 = {
    "fp16", "gelu_taylor_window", "dense_fp32", "time_d256_window", "block64_no_rope", "block64_d128", "fp32",
    "fp32_d128", "position", "window", "gelu", "gelu_taylor_d64", "d16", "d80", "d128", "relu", "wide",
    "shared_queries", "unaligned", "block64_d80", "block128_d128", "block64_fp32",
}  # fmt: skip
# What TMA cannot read: columns that do not fill a power of two, rows not a multiple of 16 bytes apart, fp32.
BY_POINTERS = {"d80", "unaligned", "fp32", "fp32_d128", "fp32_d256", "dense_fp32"}


@dataclass(frozen=True)
class Block:
    """A call of block attention, forward and backward."""

    size: int = 64
    head_dim: int = 64
    dtype: torch.dtype = HALF
    rope: bool = True


BLOCK = {
    "block16": Block(16),
    "block64": Block(64),
    "block64_no_rope": Block(64, rope=False),
    "block64_d128": Block(64, 128),
    "block64_d80": Block(64, 80),
    "block64_fp32": Block(64, dtype=FULL),
    "block128_d128": Block(128, 128),
    "rotary": Block(4096, 128),  # fits no tile: a pass that rotates, then the general kernels
}


@functools.cache
def compiled(name: str, arch: int) -> tuple[Resources, ...]:
    """All kernels of a case, compiled once a process."""
    with compiling_for(arch) as found:
        if name in ATTENTION:
            _call(ATTENTION[name])
        else:
            _call_blocks(BLOCK[name])
    kernels = {kernel.name for kernel in found}
    if name in ATTENTION:
        bias = ATTENTION[name].bias
        gradient = {"": set(), "dense": {"_dense_gradient_kernel"}}.get(bias, {"_bucket_gradient"})
        assert kernels == {"_forward", "_dq", "_dkv", *gradient}
    else:
        assert kernels == ({"_rotate", "_forward", "_dq", "_dkv"} if name == "rotary" else {"_forward", "_backward"})
    return tuple(found)


def _rows(total: int, heads: int, head_dim: int, dtype: torch.dtype, row_stride: int = 0) -> Tensor:
    row_stride = row_stride or heads * head_dim
    return torch.empty(total * row_stride, dtype=dtype).as_strided((total, heads, head_dim), (row_stride, head_dim, 1))


def _call(case: Attention) -> None:
    heads, (q_lens, k_lens) = 2, case.lens
    total = sum(q_lens)
    q = _rows(case.shared or total, heads, case.head_dim, case.dtype, case.row_stride)
    d_out = _rows(total, heads, case.head_dim, case.dtype, case.row_stride)
    k, v = (_rows(sum(k_lens), heads, case.head_dim, case.dtype, case.row_stride) for _ in range(2))
    batch = Batch(
        None if case.shared else offsets(q_lens), offsets(k_lens), q.shape[0], k.shape[0], case.left, case.right,
        case.shared,
    )  # fmt: skip
    softmax = case.activation == "softmax"
    per_row = torch.empty(heads, total) if softmax else None
    how = {"activation": case.activation, "qk_scale": 0.1, "bias": _bias(case, heads, total, k.shape[0])}
    attention_forward(q, k, v, batch, **how)
    attention_dq(d_out, q, k, v, d_out if softmax else None, per_row, batch, **how)
    attention_dkv(d_out, q, k, v, per_row, per_row, batch, **how)
    if case.bias:
        assert per_row is not None
        bias_gradient(d_out, q, k, v, per_row, per_row, batch, qk_scale=0.1, bias=how["bias"])


def _bias(case: Attention, heads: int, q_rows: int, k_rows: int) -> Bias | None:
    edges, q_times, k_times = torch.arange(31), torch.zeros(q_rows).long(), torch.zeros(k_rows).long()
    if case.bias == "dense":
        q_lens, k_lens = case.lens
        return Bias("dense", torch.empty((len(q_lens), heads, max(q_lens), max(k_lens)), dtype=case.dtype))
    if case.bias == "position":
        return Bias("position", torch.empty((32, heads), dtype=case.dtype), edges)
    return Bias("time", torch.empty((32, 1), dtype=case.dtype), edges, q_times, k_times) if case.bias else None


def _call_blocks(case: Block) -> None:
    x, bounds = _rows(3000, 2, case.head_dim, case.dtype), offsets(LONG[0])
    angles = torch.empty(2000, case.head_dim // 2)
    rope = (angles, angles) if case.rope else None
    block_attention_forward(x, x, x, bounds, case.size, rope, 0.1)
    block_attention_backward(x, x, x, x, bounds, case.size, rope, 0.1)


# -- what is known not to hold -----------------------------------------------------------------------------------------

SERIAL = {("dense", 90): "C7515: the bias is added into a product's accumulator"}


def cases(known: dict[tuple[str, int], str] | None = None):
    """Every case on every architecture; all tests of one stand beside each other, so that it is compiled once."""
    names = (*ATTENTION, *BLOCK)
    both = [(name, arch) for name in names for arch in ARCHES if arch == 90 or name not in ONLY_SM90]
    marks = {key: pytest.mark.xfail(strict=True, reason=reason) for key, reason in (known or {}).items()}
    values = [pytest.param(*key, id=f"{key[0]}-sm{key[1]}", marks=marks.get(key, ())) for key in both]
    return pytest.mark.parametrize(("name", "arch"), values, scope="module")


@cases()
def test_shared_memory_suffices(name, arch):
    limit = SHARED_LIMIT[arch]
    assert [(kernel.name, kernel.shared) for kernel in compiled(name, arch) if kernel.shared > limit] == []


@cases()
def test_little_is_spilled(name, arch):
    case = ATTENTION.get(name) or BLOCK[name]
    most = MOST_SPILLED[case.dtype]
    if isinstance(case, Attention) and (case.bias in ("position", "time") or case.row_stride % 8):
        most = MOST_SPILLED_BESIDES
    assert [(kernel.name, kernel.spilled) for kernel in compiled(name, arch) if kernel.spilled > most] == []


@pytest.mark.parametrize(("name", "kernels", "wanted"), [
    ("relu", {"_forward", "_dkv"}, "max.NaN.f32"),
    ("d64", {"_dq", "_dkv"}, "min.NaN.f32"),
    ("dense", {"_dense_gradient_kernel"}, "min.NaN.f32"),
])  # fmt: skip
def test_no_bound_hides_nan(name, kernels, wanted):
    """A GPU's plain max and min take the other number where one is NaN; the interpreter does not, and cannot tell."""
    bounded = [kernel for kernel in compiled(name, 90) if kernel.name in kernels]
    assert {kernel.name for kernel in bounded if wanted in kernel.ptx} == kernels


@pytest.mark.parametrize(("dtype", "fitted"), [(HALF, True), (FLOAT16, False), (FULL, False)])
def test_bf16_alone_takes_the_fitted_gelu(dtype, fitted):
    """It is good to 8 bits. The exact one has no reciprocal."""
    with compiling_for(90) as found:
        _call(Attention(activation="gelu", dtype=dtype))
    assert {"rcp.approx.ftz.f32" in kernel.ptx for kernel in found} == {fitted}


@cases()
def test_no_program_adds_to_what_another_writes(name, arch):
    """No atomics: every run gives the same bits."""
    atomic = re.compile(r"^\s*(@\S+\s+)?(atom|red)\.", re.MULTILINE)
    assert [kernel.name for kernel in compiled(name, arch) if atomic.search(kernel.ptx)] == []


@cases(SERIAL)
def test_products_run_on_the_matrix_units_and_wait_for_nothing(name, arch):
    dtype = (ATTENTION.get(name) or BLOCK[name]).dtype
    for kernel in compiled(name, arch):
        assert kernel.warnings == [], kernel.name
        if kernel.name == "_rotate":
            continue
        # Of the first product; keys are the rows in _dkv.
        rows = kernel.constants.get("BLOCK_N" if kernel.name == "_dkv" else "BLOCK_M") or kernel.constants["BLOCK"]
        expected = dtype != FULL and rows >= MATRIX_ROWS[arch]
        assert (MATRIX_UNIT[arch] in kernel.ptx) == expected, (kernel.name, rows)


@cases()
def test_the_copy_engine_loads_what_it_can_read_and_nothing_else(name, arch):
    for kernel in compiled(name, arch):
        walks = kernel.name in ("_dq", "_dkv") or (kernel.name == "_forward" and "SIGN" in kernel.constants)
        expected = walks and arch >= 90 and name not in BY_POINTERS
        assert (COPY_ENGINE in kernel.ptx) == expected, kernel.name
