"""Backward of GDPA on Hopper, head_dim 64 and up to 256 keys a sample: all its keys stay while its queries pass once.

A job is a sample and a head. Its keys are up to four blocks of 64, dealt to two consumers (a warpgroup each) in turn,
which hold dk and dv of up to two blocks each in registers. So dq of a tile of 64 queries is complete when all blocks
have met it, and each input moves once. The rest is as in backward_short: scores stand keys by queries, dq of a tile is
computed half the columns by each consumer, one tile late, so that neither has to wait for the other's ds.

Blocks that a sample does not have are left out, by branches that all threads of a consumer take alike. A second
consumer without keys only computes its columns of dq.

Legend: T rows of all samples, H heads, D head_dim (64).
"""

# ruff: noqa: RUF005
# Gluon knows no starred tuples.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem.kernels import launch
from gem.kernels.hopper.claims import claim, counter
from gem.kernels.hopper.parts import END, LAYOUT, key_tiles, lean, record_of
from gem.kernels.hopper.passes import (
    BLOCKS,
    HEAD,
    K_END,
    K_X,
    PARTS,
    Q_END,
    Q_LEN,
    TILES,
    DqLaunch,
    barriers,
    field,
    give_back,
    load_tile,
    nothing,
    put,
    rows_out,
    store,
    weights,
)
from gem.kernels.hopper.slopes import slope_factor, value_factor
from gem.kernels.launch import PLANS, Launch, folds, kind_of, remember
from gem.kernels.schedule import Batch, Limits

LIMITS = Limits(queries=8192, keys=256)


@dataclass(frozen=True)
class Keep:
    """Tiles of a launch."""

    buffers: int = 7  # tiles of queries or d_out in shared memory


def launch_of(variant: Keep, activation: str, fold: bool, lean: bool) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``run``."""
    return DqLaunch(
        _backward_keep, BUFFERS=variant.buffers, ACT=activation, FOLD=fold, LEAN=lean, warps=4,
        ragged=dict.fromkeys(range(6), 64), layout=LAYOUT,
    )  # fmt: skip


def run(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, batch: Batch, *,
    activation: str, qk_scale: float, out_scale: float = 1.0, variant: Keep | None = None,
) -> None:  # fmt: skip
    """Gradients of samples within LIMITS, D 64, into dq, dk, dv, all contiguous.

    Rows of other samples and behind the last offsets stay as they are. ``dq`` is of q's type or fp32, for
    ``batch.shared`` queries [B * shared, H, D] as d_out is. Inputs, dk and dv must suit launch.tma_fits.
    """
    heads, head_dim = k_THD.shape[1:]
    variant = variant or Keep()
    kind = kind_of(batch, q_THD, k_THD, v_THD, d_out_THD)
    small = lean(activation, q_THD.dtype, qk_scale)
    key = ("gluon backward, keep", kind, activation, variant, small, dq.dtype)
    run_it = PLANS.get(key)
    if run_it is None:
        run_it = launch_of(variant, activation, folds(activation, q_THD), small)
        if kind is not None:
            remember(key, run_it)
    samples = batch.samples(LIMITS)
    jobs = samples.shape[0] * heads
    if jobs >= 2**30:
        raise ValueError(f"the Gluon kernels count jobs in 32 bits, got {jobs} of samples and heads; accepted: 2**30")
    programs = min(jobs, launch.multiprocessors(k_THD.device))
    shared = batch.shared if batch.q_offsets is None else 0
    run_it(
        (programs,), d_out_THD, q_THD, k_THD, v_THD, dk, dv, dq.view(dq.shape[0], 2 * heads, head_dim // 2), samples,
        counter(k_THD.device), jobs, heads, shared, qk_scale, out_scale,
    )  # fmt: skip


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def product_of(block, x_s, y):
    """A block of keys or values by a tile of queries or d_out, in the queue."""
    zero = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    return warpgroup_mma(x_s.index(block).reshape([64, 64]), y.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def share(block: gl.constexpr, ds, ds_s, it, dtype: gl.constexpr):
    """Gradients of scores as a register operand, and in shared memory."""
    P_L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2)
    ds16 = ds.to(dtype)
    ds_s.index((it % 2) * 4 + block).store(ds16)
    fence_async_shared()
    return gl.convert_layout(ds16, P_L, assert_trivial=True)


@gluon.jit
def dq_of(W: gl.constexpr, ds_s, k_s, ds_full, it, blocks):
    """This consumer's columns of dq of a tile, in the queue."""
    mbarrier.wait(ds_full.index(it % 2), (it // 2) & 1)
    dq = gl.zeros([64, 32], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
    k = k_s.index(nothing(it)).reshape([64, 64]).slice(W * 32, 32, dim=1)
    dq = warpgroup_mma(ds_s.index((it % 2) * 4).permute((1, 0)), k, dq, use_acc=False, is_async=True)
    for j in range(1, blocks):
        k = k_s.index(j).reshape([64, 64]).slice(W * 32, 32, dim=1)
        dq = warpgroup_mma(ds_s.index((it % 2) * 4 + j).permute((1, 0)), k, dq, is_async=True)
    return dq


@gluon.jit
def _tile(
    W: gl.constexpr, FIRST: gl.constexpr, dk_0, dv_0, dk_1, dv_1, both, blocks, k_s, v_s, ds_s, dq_s, dq_to, ring, full,
    empty, ds_full, job_s, t, it, tile, heads, scale, out_scale, ACT: gl.constexpr, FOLD: gl.constexpr,
    LEAN: gl.constexpr, BUFFERS: gl.constexpr, F32: gl.constexpr,
):  # fmt: skip
    """dk and dv with a tile's share; dq of the tile before."""
    dtype: gl.constexpr = ring.dtype
    if not FIRST:
        dq_f = dq_of(W, ds_s, k_s, ds_full, it - 1, blocks)
    at = (2 * it) % BUFFERS
    mbarrier.wait(full.index(at), ((2 * it) // BUFFERS) & 1)
    q = ring.index(at).reshape([64, 64])
    at = (2 * it + 1) % BUFFERS
    mbarrier.wait(full.index(at), ((2 * it + 1) // BUFFERS) & 1)
    d_out = ring.index(at).reshape([64, 64])
    s_f = product_of(W + nothing(it), k_s, q)
    dw_f = product_of(W + nothing(it), v_s, d_out)
    if not FIRST:
        dq = warpgroup_mma_wait(2, deps=[dq_f])
        tma.store_wait(0)
        factor = slope_factor(scale, out_scale, ACT, FOLD, LEAN)
        rows_out(W, dq, dq_s, dq_to, job_s, t, it, tile - 1, heads, factor, 64, F32)
    # The other one's product that read this place of ds has ended, or its ds of the tile before would not be there.
    s = warpgroup_mma_wait(1, deps=[s_f])
    p, slope = weights(s, scale, out_scale, ACT, FOLD, LEAN, dtype, 64)
    dv_f = warpgroup_mma(p, d_out, dv_0, use_acc=not FIRST, is_async=True)
    dw = warpgroup_mma_wait(1, deps=[dw_f])
    ds = share(W, slope * dw, ds_s, it, dtype)
    dk_f = warpgroup_mma(ds, q, dk_0, use_acc=not FIRST, is_async=True)
    if both:
        # Gradients of weights not behind them too: there are no registers for those beside the operands.
        s_f = product_of(2 + W + nothing(it), k_s, q)
        dv_0, dk_0 = warpgroup_mma_wait(1, deps=[dv_f, dk_f])
        dw_f = product_of(2 + W + nothing(it), v_s, d_out)
        s = warpgroup_mma_wait(1, deps=[s_f])
        p, slope = weights(s, scale, out_scale, ACT, FOLD, LEAN, dtype, 64)
        dv_f = warpgroup_mma(p, d_out, dv_1, use_acc=not FIRST, is_async=True)
        dw = warpgroup_mma_wait(1, deps=[dw_f])
        ds = share(2 + W, slope * dw, ds_s, it, dtype)
        mbarrier.arrive(ds_full.index(it % 2), count=1)
        dk_f = warpgroup_mma(ds, q, dk_1, use_acc=not FIRST, is_async=True)
        dv_1, dk_1 = warpgroup_mma_wait(0, deps=[dv_f, dk_f])
    else:
        mbarrier.arrive(ds_full.index(it % 2), count=1)
        dv_0, dk_0 = warpgroup_mma_wait(0, deps=[dv_f, dk_f])
    give_back(empty, it, BUFFERS)
    return dk_0, dv_0, dk_1, dv_1


@gluon.jit
def last_dq(W: gl.constexpr, ds_s, k_s, dq_s, dq_to, k_empty, ds_full, job_s, t, it, tile, blocks, heads, factor,
             F32: gl.constexpr):  # fmt: skip
    """dq of a job's last tile. Behind it nothing of this consumer is on its way out."""
    dq_f = dq_of(W, ds_s, k_s, ds_full, it, blocks)
    dq = warpgroup_mma_wait(0, deps=[dq_f])
    mbarrier.arrive(k_empty, count=1)
    tma.store_wait(0)
    rows_out(W, dq, dq_s, dq_to, job_s, t, it, tile, heads, factor, 64, F32)


@gluon.jit
def _consumer(
    W: gl.constexpr, BUFFERS: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr,
    F32: gl.constexpr, dk_desc, dv_desc, dq_to, ring, k_s, v_s, out_s, ds_s, dq_s, job_s, full, empty, k_full, k_empty,
    v_full, v_empty, ds_full, job_full, job_empty, heads, scale, out_scale,
):  # fmt: skip
    zero = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    dq_factor = slope_factor(scale, out_scale, ACT, FOLD, LEAN)
    dv_factor = value_factor(scale, out_scale, ACT, FOLD, LEAN)
    it = 0
    t = 0
    mbarrier.wait(job_full.index(0), 0)
    n = field(job_s, 0, TILES)
    while n > 0:
        blocks = field(job_s, t, BLOCKS)
        mbarrier.wait(v_full, t & 1)
        mbarrier.wait(k_full, t & 1)
        if blocks > W:
            both = blocks > 2 + W
            dk_0, dv_0, dk_1, dv_1 = _tile(
                W, True, zero, zero, zero, zero, both, blocks, k_s, v_s, ds_s, dq_s, dq_to, ring, full, empty, ds_full,
                job_s, t, it, 0, heads, scale, out_scale, ACT, FOLD, LEAN, BUFFERS, F32,
            )  # fmt: skip
            it += 1
            for i in range(1, n):
                dk_0, dv_0, dk_1, dv_1 = _tile(
                    W, False, dk_0, dv_0, dk_1, dv_1, both, blocks, k_s, v_s, ds_s, dq_s, dq_to, ring, full, empty,
                    ds_full, job_s, t, it, i, heads, scale, out_scale, ACT, FOLD, LEAN, BUFFERS, F32,
                )  # fmt: skip
                it += 1
            k_end = field(job_s, t, K_END)
            k_x = field(job_s, t, K_X) + W * 64
            column = field(job_s, t, HEAD) * 64
            # Own values are read by nobody else.
            store(v_s.index(W), dv_desc, dv_0 * dv_factor, k_end, k_x, column, 64)
            if both:
                store(v_s.index(2 + W), dv_desc, dv_1 * dv_factor, k_end, k_x + 128, column, 64)
            last_dq(
                W, ds_s, k_s, dq_s, dq_to, k_empty, ds_full, job_s, t, it - 1, n - 1, blocks, heads, dq_factor, F32
            )  # fmt: skip
            mbarrier.arrive(v_empty, count=1)
            store(out_s.index(W), dk_desc, dk_0 * dq_factor, k_end, k_x, column, 64)
            if both:
                store(out_s.index(2 + W), dk_desc, dk_1 * dq_factor, k_end, k_x + 128, column, 64)
        else:
            mbarrier.arrive(ds_full.index(it % 2), count=1)
            give_back(empty, it, BUFFERS)
            it += 1
            for i in range(1, n):
                dq_f = dq_of(W, ds_s, k_s, ds_full, it - 1, blocks)
                dq = warpgroup_mma_wait(0, deps=[dq_f])
                tma.store_wait(0)
                rows_out(W, dq, dq_s, dq_to, job_s, t, it, i - 1, heads, dq_factor, 64, F32)
                mbarrier.arrive(ds_full.index(it % 2), count=1)
                give_back(empty, it, BUFFERS)
                it += 1
            mbarrier.arrive(v_empty, count=1)
            last_dq(
                W, ds_s, k_s, dq_s, dq_to, k_empty, ds_full, job_s, t, it - 1, n - 1, blocks, heads, dq_factor, F32
            )  # fmt: skip
        mbarrier.arrive(job_empty.index(t % 2), count=1)
        t += 1
        mbarrier.wait(job_full.index(t % 2), (t // 2) & 1)
        n = field(job_s, t, TILES)
    tma.store_wait(0)


# -- producer ----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_blocks(desc, x_s, full, empty, t, blocks, end, x, column):
    mbarrier.wait(empty, (t & 1) ^ 1)
    for count in gl.static_range(1, 5):
        mbarrier.expect(full, count * desc.block_type.nbytes, pred=blocks == count)
    for j in range(blocks):
        tma.async_copy_global_to_shared(desc, [END, end, x + j * 64, column], full, x_s.index(j))


@gluon.jit
def _producer(
    BUFFERS: gl.constexpr, o_desc, q_desc, k_desc, v_desc, samples, claimed, ring, k_s, v_s, job_s, full, empty, k_full,
    k_empty, v_full, v_empty, job_full, job_empty, jobs, heads, shared,
):  # fmt: skip
    it = 0
    t = 0
    job = claim(claimed)
    sample, _, q_start, q_len, k_start, k_len, head = record_of(samples, job, jobs, heads)
    while sample >= 0:
        n = gl.maximum((q_len + 63) // 64, 1)
        blocks = key_tiles(k_len, 64)
        o_end = q_start + q_len
        if shared > 0:
            o_end = sample * shared + q_len
        slot = t % 2
        mbarrier.wait(job_empty.index(slot), ((t // 2) & 1) ^ 1)
        put(job_s, t, TILES, n)
        put(job_s, t, K_END, k_start + k_len)
        put(job_s, t, K_X, END - k_len)
        put(job_s, t, Q_END, o_end)
        put(job_s, t, Q_LEN, q_len)
        put(job_s, t, HEAD, head)
        put(job_s, t, BLOCKS, blocks)
        mbarrier.arrive(job_full.index(slot), count=1)
        q_x = gl.where(k_len > 0, END - q_len, END)
        k_x = gl.where(q_len > 0, END - k_len, END)
        for i in range(n):
            load_tile(q_desc, o_desc, ring, full, empty, it, q_start + q_len, o_end, q_x, head * 64, BUFFERS)
            it += 1
            q_x += gl.where(k_len > 0, 64, 0)
            # Their places are free when the job before has ended.
            if i == gl.minimum(BUFFERS // 2 - 1, n - 1):
                load_blocks(k_desc, k_s, k_full, k_empty, t, blocks, k_start + k_len, k_x, head * 64)
                load_blocks(v_desc, v_s, v_full, v_empty, t, blocks, k_start + k_len, k_x, head * 64)
                job = claim(claimed)
        t += 1
        sample, _, q_start, q_len, k_start, k_len, head = record_of(samples, job, jobs, heads)
    mbarrier.wait(job_empty.index(t % 2), ((t // 2) & 1) ^ 1)
    put(job_s, t, TILES, 0)
    mbarrier.arrive(job_full.index(t % 2), count=1)


# -- kernel ------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["jobs", "heads", "shared"])
def _backward_keep(
    o_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc, dq_to, samples, claimed, jobs, heads, shared, scale, out_scale,
    BUFFERS: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BUFFERS >= 4, "BUFFERS: 4 at least")
    # A pointer where dq is fp32.
    F32: gl.constexpr = isinstance(dq_to.type, gl.pointer_type)
    dtype: gl.constexpr = k_desc.dtype
    D_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 64, 64], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [4, 1, 1, 64, 64], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [4, 1, 1, 64, 64], v_desc.layout)
    out_s = gl.allocate_shared_memory(dtype, [4, 1, 1, 64, 64], dk_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [8, 64, 64], D_L)
    if F32:
        dq_s = v_s
    else:
        dq_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, 32], dq_to.layout)
    job_s = gl.allocate_shared_memory(gl.int32, [2 * PARTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(BUFFERS, 1), barriers(BUFFERS, 2)
    k_full, k_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    v_full, v_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    ds_full = barriers(2, 2)
    job_full, job_empty = barriers(2, 1), barriers(2, 2)
    fence_async_shared()
    consumed = (
        dk_desc, dv_desc, dq_to, ring, k_s, v_s, out_s, ds_s, dq_s, job_s, full, empty, k_full, k_empty, v_full,
        v_empty, ds_full, job_full, job_empty, heads, scale, out_scale,
    )  # fmt: skip
    produced = (
        o_desc, q_desc, k_desc, v_desc, samples, claimed, ring, k_s, v_s, job_s, full, empty, k_full, k_empty, v_full,
        v_empty, job_full, job_empty, jobs, heads, shared,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (0, BUFFERS, ACT, FOLD, LEAN, F32) + consumed),
            (_consumer, (1, BUFFERS, ACT, FOLD, LEAN, F32) + consumed),
            (_producer, (BUFFERS,) + produced),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
