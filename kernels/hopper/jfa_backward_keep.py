"""Backward of jagged softmax attention on Hopper, head_dim 64 and up to 256 keys a sample: all its keys stay.

The walk is that of backward_keep: queries pass once, past up to four blocks of 64 keys that two consumers hold, and dq
of a tile is complete when all blocks have met it. Weights and their gradients, and why nothing is masked:
jfa_backward_short. A tile's log-sum-exps and dots (``rows``) are read from shared memory again for a second block,
as there are no registers to keep them in.

Legend: T rows of all samples, H heads, D head_dim (64).
"""

# ruff: noqa: RUF005
# Gluon knows no starred tuples.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

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
from gem.kernels.hopper.backward_keep import LIMITS, Keep, dq_of, last_dq, load_blocks, product_of, share
from gem.kernels.hopper.claims import claim, counter
from gem.kernels.hopper.jfa_backward_short import RowsLaunch, load_tile, soft_slopes, soft_weights
from gem.kernels.hopper.parts import END, LAYOUT, LOG2E, key_tiles, record_of
from gem.kernels.hopper.passes import (
    BLOCKS,
    HEAD,
    K_END,
    K_X,
    PARTS,
    Q_END,
    Q_LEN,
    TILES,
    barriers,
    field,
    give_back,
    nothing,
    put,
    rows_out,
    store,
)
from gem.kernels.hopper.rows import NOWHERE
from gem.kernels.hopper.sums import first_tile
from gem.kernels.launch import PLANS, Launch, kind_of, remember
from gem.kernels.schedule import Batch


def launch_of(variant: Keep) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``run``."""
    return RowsLaunch(
        _jfa_backward_keep, BUFFERS=variant.buffers, warps=4, ragged=dict.fromkeys(range(6), 64) | {7: 2}, layout=LAYOUT
    )


def run(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, rows: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    batch: Batch, *, qk_scale: float, variant: Keep | None = None,
) -> None:  # fmt: skip
    """Gradients of samples within backward_keep.LIMITS, D 64, into dq, dk, dv, all contiguous; no mask.

    Rows of other samples and behind the last offsets stay as they are. ``rows``: of ``rows.of_rows``. ``dq`` is of q's
    type or fp32, for ``batch.shared`` queries [B * shared, H, D] as d_out is. Inputs, dk and dv must suit
    launch.tma_fits.
    """
    heads, head_dim = k_THD.shape[1:]
    variant = variant or Keep()
    kind = kind_of(batch, q_THD, k_THD, v_THD, d_out_THD)
    key = ("gluon attention backward, keep", kind, variant, dq.dtype)
    run_it = PLANS.get(key)
    if run_it is None:
        run_it = launch_of(variant)
        if kind is not None:
            remember(key, run_it)
    samples = batch.samples(LIMITS)
    jobs = samples.shape[0] * heads
    if jobs >= 2**30:
        raise ValueError(f"the Gluon kernels count jobs in 32 bits, got {jobs} of samples and heads; accepted: 2**30")
    programs = min(jobs, launch.multiprocessors(k_THD.device))
    shared = batch.shared if batch.q_offsets is None else 0
    run_it(
        (programs,), d_out_THD, q_THD, k_THD, v_THD, dk, dv, dq.view(dq.shape[0], 2 * heads, head_dim // 2), rows,
        samples, counter(k_THD.device), jobs, heads, shared, qk_scale,
    )  # fmt: skip


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _tile(
    W: gl.constexpr, FIRST: gl.constexpr, dk_0, dv_0, dk_1, dv_1, both, blocks, k_s, v_s, ds_s, dq_s, dq_to, ring,
    rows_s, full, empty, ds_full, job_s, t, it, tile, heads, scale, BUFFERS: gl.constexpr, F32: gl.constexpr,
):  # fmt: skip
    """dk and dv with a tile's share; dq of the tile before."""
    ROWS: gl.constexpr = (BUFFERS + 1) // 2
    dtype: gl.constexpr = ring.dtype
    scale2 = scale * LOG2E
    if not FIRST:
        dq_f = dq_of(W, ds_s, k_s, ds_full, it - 1, blocks)
        if F32:
            # Addresses of single numbers: beside products there are no registers for them.
            dq = warpgroup_mma_wait(0, deps=[dq_f])
            rows_out(W, dq, dq_s, dq_to, job_s, t, it, tile - 1, heads, scale, 64, F32)
    at = (2 * it) % BUFFERS
    mbarrier.wait(full.index(at), ((2 * it) // BUFFERS) & 1)
    q = ring.index(at).reshape([64, 64])
    at = (2 * it + 1) % BUFFERS
    mbarrier.wait(full.index(at), ((2 * it + 1) // BUFFERS) & 1)
    d_out = ring.index(at).reshape([64, 64])
    s_f = product_of(W + nothing(it), k_s, q)
    dw_f = product_of(W + nothing(it), v_s, d_out)
    if not FIRST and not F32:
        dq = warpgroup_mma_wait(2, deps=[dq_f])
        tma.store_wait(0)
        rows_out(W, dq, dq_s, dq_to, job_s, t, it, tile - 1, heads, scale, 64, F32)
    # The other one's product that read this place of ds has ended, or its ds of the tile before would not be there.
    s = warpgroup_mma_wait(1, deps=[s_f])
    p, p16 = soft_weights(s, rows_s.index(it % ROWS), scale2, dtype, 64)
    dv_f = warpgroup_mma(p16, d_out, dv_0, use_acc=not FIRST, is_async=True)
    dw = warpgroup_mma_wait(1, deps=[dw_f])
    ds = share(W, soft_slopes(p, dw, rows_s.index(it % ROWS)), ds_s, it, dtype)
    dk_f = warpgroup_mma(ds, q, dk_0, use_acc=not FIRST, is_async=True)
    if both:
        # Gradients of weights not behind them too: there are no registers for those beside the operands.
        s_f = product_of(2 + W + nothing(it), k_s, q)
        dv_0, dk_0 = warpgroup_mma_wait(1, deps=[dv_f, dk_f])
        dw_f = product_of(2 + W + nothing(it), v_s, d_out)
        s = warpgroup_mma_wait(1, deps=[s_f])
        p, p16 = soft_weights(s, rows_s.index(it % ROWS), scale2, dtype, 64)
        dv_f = warpgroup_mma(p16, d_out, dv_1, use_acc=not FIRST, is_async=True)
        dw = warpgroup_mma_wait(1, deps=[dw_f])
        ds = share(2 + W, soft_slopes(p, dw, rows_s.index(it % ROWS)), ds_s, it, dtype)
        mbarrier.arrive(ds_full.index(it % 2), count=1)
        dk_f = warpgroup_mma(ds, q, dk_1, use_acc=not FIRST, is_async=True)
        dv_1, dk_1 = warpgroup_mma_wait(0, deps=[dv_f, dk_f])
    else:
        mbarrier.arrive(ds_full.index(it % 2), count=1)
        dv_0, dk_0 = warpgroup_mma_wait(0, deps=[dv_f, dk_f])
    give_back(empty, it, BUFFERS)
    return dk_0, dv_0, dk_1, dv_1


@gluon.jit
def _consumer(
    W: gl.constexpr, BUFFERS: gl.constexpr, F32: gl.constexpr, dk_desc, dv_desc, dq_to, ring, rows_s, k_s, v_s, out_s,
    ds_s, dq_s, job_s, full, empty, k_full, k_empty, v_full, v_empty, ds_full, job_full, job_empty, heads, scale,
):  # fmt: skip
    zero = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
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
                W, True, zero, zero, zero, zero, both, blocks, k_s, v_s, ds_s, dq_s, dq_to, ring, rows_s, full, empty,
                ds_full, job_s, t, it, 0, heads, scale, BUFFERS, F32,
            )  # fmt: skip
            it += 1
            for i in range(1, n):
                dk_0, dv_0, dk_1, dv_1 = _tile(
                    W, False, dk_0, dv_0, dk_1, dv_1, both, blocks, k_s, v_s, ds_s, dq_s, dq_to, ring, rows_s, full,
                    empty, ds_full, job_s, t, it, i, heads, scale, BUFFERS, F32,
                )  # fmt: skip
                it += 1
            k_end = field(job_s, t, K_END)
            k_x = field(job_s, t, K_X) + W * 64
            column = field(job_s, t, HEAD) * 64
            # Own values are read by nobody else.
            store(v_s.index(W), dv_desc, dv_0, k_end, k_x, column, 64)
            if both:
                store(v_s.index(2 + W), dv_desc, dv_1, k_end, k_x + 128, column, 64)
            last_dq(W, ds_s, k_s, dq_s, dq_to, k_empty, ds_full, job_s, t, it - 1, n - 1, blocks, heads, scale, F32)
            mbarrier.arrive(v_empty, count=1)
            store(out_s.index(W), dk_desc, dk_0 * scale, k_end, k_x, column, 64)
            if both:
                store(out_s.index(2 + W), dk_desc, dk_1 * scale, k_end, k_x + 128, column, 64)
        else:
            mbarrier.arrive(ds_full.index(it % 2), count=1)
            give_back(empty, it, BUFFERS)
            it += 1
            for i in range(1, n):
                dq_f = dq_of(W, ds_s, k_s, ds_full, it - 1, blocks)
                dq = warpgroup_mma_wait(0, deps=[dq_f])
                tma.store_wait(0)
                rows_out(W, dq, dq_s, dq_to, job_s, t, it, i - 1, heads, scale, 64, F32)
                mbarrier.arrive(ds_full.index(it % 2), count=1)
                give_back(empty, it, BUFFERS)
                it += 1
            mbarrier.arrive(v_empty, count=1)
            last_dq(W, ds_s, k_s, dq_s, dq_to, k_empty, ds_full, job_s, t, it - 1, n - 1, blocks, heads, scale, F32)
        mbarrier.arrive(job_empty.index(t % 2), count=1)
        t += 1
        mbarrier.wait(job_full.index(t % 2), (t // 2) & 1)
        n = field(job_s, t, TILES)
    tma.store_wait(0)


# -- producer ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _producer(
    BUFFERS: gl.constexpr, o_desc, q_desc, k_desc, v_desc, rows_desc, samples, claimed, ring, rows_s, k_s, v_s, job_s,
    full, empty, k_full, k_empty, v_full, v_empty, job_full, job_empty, jobs, heads, shared,
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
        # With no keys or no queries everything reads zeros.
        there = gl.where((k_len > 0) & (q_len > 0), 1, 0)
        q_x = END - there * q_len
        k_x = END - there * k_len
        of_rows = gl.where(there > 0, (first_tile(q_start, sample, shared) * heads + head) * 2, NOWHERE)
        for i in range(n):
            load_tile(
                q_desc, o_desc, rows_desc, ring, rows_s, full, empty, it, q_start + q_len, o_end, q_x, of_rows,
                head * 64, BUFFERS,
            )  # fmt: skip
            it += 1
            q_x += there * 64
            of_rows += there * heads * 2
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
def _jfa_backward_keep(
    o_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc, dq_to, rows_desc, samples, claimed, jobs, heads, shared, scale,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BUFFERS >= 4, "BUFFERS: 4 at least")
    # A pointer where dq is fp32.
    F32: gl.constexpr = isinstance(dq_to.type, gl.pointer_type)
    dtype: gl.constexpr = k_desc.dtype
    D_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 64, 64], q_desc.layout)
    rows_s = gl.allocate_shared_memory(gl.float32, [(BUFFERS + 1) // 2, 2, 64], rows_desc.layout)
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
        dk_desc, dv_desc, dq_to, ring, rows_s, k_s, v_s, out_s, ds_s, dq_s, job_s, full, empty, k_full, k_empty, v_full,
        v_empty, ds_full, job_full, job_empty, heads, scale,
    )  # fmt: skip
    produced = (
        o_desc, q_desc, k_desc, v_desc, rows_desc, samples, claimed, ring, rows_s, k_s, v_s, job_s, full, empty, k_full,
        k_empty, v_full, v_empty, job_full, job_empty, jobs, heads, shared,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (0, BUFFERS, F32) + consumed),
            (_consumer, (1, BUFFERS, F32) + consumed),
            (_producer, (BUFFERS,) + produced),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
