"""What the Gluon kernels share: weights, the records of jobs and how they are dealt, counts of tiles.

A job is an entry of the tile list (schedule.Batch.tiles) and a head: number ``entry * heads + head``, so that the heads
of an entry, whose rows are neighbours in memory, run side by side.

Legend: M queries of a tile, N keys of a tile.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gem.kernels.activations import (
    ERF_0,
    ERF_1,
    ERF_2,
    ERF_3,
    TANH_0,
    TANH_1,
    TAYLOR_1,
    TAYLOR_2,
    TAYLOR_3,
    activate,
    activate_with_slope,
)
from gem.kernels.device import LOG2E as _LOG2E
from gem.kernels.schedule import FIELDS as _FIELDS

# Of a descriptor's tiles in shared memory: rows of 64 columns of 16 bits, as wgmma reads them.
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
FIELDS = gl.constexpr(_FIELDS)
# Rows of a ragged descriptor (launch.ragged) are counted back from here.
END = gl.constexpr(2**30)
LOG2E = gl.constexpr(_LOG2E)


# Of four numbers z: 1 / (1 + 2**z) by one reciprocal, as the special-function unit is what bounds a logistic function.
# What is above 31 counts as 31, so that four factors stay in range: x times the result is then -1e-8 at most.
LOGISTIC4 = gl.constexpr("""{
.reg .f32 a, b, c, d, p, q, r, t, u;
min.f32 a, $4, 0f41F80000; min.f32 b, $5, 0f41F80000; min.f32 c, $6, 0f41F80000; min.f32 d, $7, 0f41F80000;
ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; ex2.approx.ftz.f32 c, c; ex2.approx.ftz.f32 d, d;
add.f32 a, a, 0f3F800000; add.f32 b, b, 0f3F800000; add.f32 c, c, 0f3F800000; add.f32 d, d, 0f3F800000;
mul.f32 p, a, b; mul.f32 q, c, d; mul.f32 r, p, q; rcp.approx.ftz.f32 r, r;
mul.f32 t, r, q; mul.f32 u, r, p;
mul.f32 $0, t, b; mul.f32 $1, t, a; mul.f32 $2, u, d; mul.f32 $3, u, c;
}""")
_LEAN = ("gelu_taylor", "silu", "gelu", "gelu_tanh")
_LEANSCALES = 1e-6, 1e6  # fifth and seventh powers of which fp32 holds


def lean(activation: str, dtype: torch.dtype, qk_scale: float) -> bool:
    """Whether weights may be computed over a factor, which the output takes (``factor_of``): fewer instructions.

    On Hopper an instruction beside the tensor cores costs nearly the cycle that it takes (docs/measured.md), so their
    number is what counts. Not for fp16, whose range is small, nor for scales whose powers leave fp32's.
    """
    low, high = _LEANSCALES
    return dtype == torch.bfloat16 and activation in _LEAN and low <= abs(qk_scale) <= high


@gluon.jit
def weights_of(
    scores, scale, out_scale, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    """act(scale * scores), fp32: times out_scale where FOLD (launch.folds), over ``factor_of``'s factor where LEAN."""
    if LEAN:
        weights = _lean_weights(scores, scale, ACT)
    else:
        weights = activate(scores * scale, ACT, dtype == gl.bfloat16)
        if FOLD:
            weights = weights * out_scale
    return weights


@gluon.jit
def _lean_weights(scores, scale, ACT: gl.constexpr):
    """gelu_taylor over 0.5 * scale; the others, x times a logistic function, over scale."""
    s2 = scores * scores
    u = scale * scale
    if ACT == "gelu_taylor":
        c1 = 2.0 * TAYLOR_1 * scale
        c2 = 2.0 * TAYLOR_2 * scale * u
        c3 = 2.0 * TAYLOR_3 * scale * u * u
        weights = scores + s2 * (c1 + s2 * (c2 + s2 * c3))
    else:
        if ACT == "silu":
            z = scores * (-LOG2E * scale)
        elif ACT == "gelu_tanh":
            z = scores * (-TANH_0 * scale + s2 * (-TANH_1 * scale * u))
        else:
            gl.static_assert(ACT == "gelu")
            c1 = -ERF_1 * scale * u
            c2 = -ERF_2 * scale * u * u
            c3 = -ERF_3 * scale * u * u * u
            z = scores * (-ERF_0 * scale + s2 * (c1 + s2 * (c2 + s2 * c3)))
        weights = scores * gl.inline_asm_elementwise(LOGISTIC4, "=f,=f,=f,=f,f,f,f,f", [z], gl.float32, True, 4)
    return weights


@gluon.jit
def factor_of(scale, out_scale, ACT: gl.constexpr, LEAN: gl.constexpr):
    """What sums of ``weights_of`` times values are multiplied by, where not FOLD."""
    if LEAN:
        out_scale = out_scale * scale
        if ACT == "gelu_taylor":
            out_scale = out_scale * 0.5
    return out_scale


@gluon.jit
def weights_and_slopes(scores, scale, ACT: gl.constexpr, dtype: gl.constexpr):
    """(act, act') of scale * scores in fp32, for a backward in ``dtype``."""
    return activate_with_slope(scores * scale, ACT, dtype == gl.bfloat16)


@gluon.jit
def dealt(turn, lane, programs, LANES: gl.constexpr, ZIGZAG: gl.constexpr):
    """Number of a lane's ``turn``-th job, in zigzag: the list begins with the longest, so that sums differ little.

    Without ZIGZAG each round of jobs goes to the lanes in the same order.
    """
    lanes = programs * LANES
    at = gl.program_id(0) * LANES + lane
    if ZIGZAG:
        back = turn % 2
        job = turn * lanes + at * (1 - back) + (lanes - 1 - at) * back
    else:
        job = turn * lanes + at
    return job


@gluon.jit
def record_of(tiles, job, jobs, heads):
    """(sample, row, q_start, q_len, k_start, k_len, head) of a job; sample -1 = there is no such job, nor a later one.

    Sample B is the rest behind the last offset, with k_len 0.
    """
    there = job < jobs
    job = gl.where(there, job, 0)
    base = tiles + (job // heads) * FIELDS
    sample = gl.where(there, gl.load(base), -1)
    row = gl.load(base + 1)
    q_start = gl.load(base + 2)
    q_len = gl.load(base + 3)
    k_start = gl.load(base + 4)
    k_len = gl.load(base + 5)
    return sample, row, q_start, q_len, k_start, k_len, job % heads


@gluon.jit
def store_tile(
    o, out_desc, acc, factor, at, end, last, column, FOLD: gl.constexpr, M: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """``acc`` [M, D], times ``factor`` where not FOLD, to rows from ``at`` of a sample of ``last`` rows up to ``end``.

    Through ``o`` in shared memory, which may be on its way out from before. Rows past the sample stay as they are.
    """
    tma.store_wait(0)
    if not FOLD:
        acc = acc * factor
    o.reshape([M, D]).store(acc.to(o.dtype))
    fence_async_shared()
    if at < last:
        tma.async_copy_shared_to_global(out_desc, [END, end, END - last + at, column], o)


@gluon.jit
def key_tiles(k_len, N: gl.constexpr):
    """Tiles of keys of a job; for no keys one of zeros, so that its output is written: 0."""
    return gl.maximum((k_len + N - 1) // N, 1)


@gluon.jit
def blocks_of(w, row, q_len, n, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Blocks of a job that consumer ``w`` works at: its own where keys stay, as many as the first where all walk them.

    At least one, which may lie behind the sample's end: its queries are read as zeros and nothing is stored.
    """
    blocks = (gl.minimum(q_len - row, ROWS) + 63) // 64
    mine = gl.where(n <= STAGES, blocks - w, blocks)
    return gl.maximum((mine + CONSUMERS - 1) // CONSUMERS, 1)
