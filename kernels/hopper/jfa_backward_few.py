"""Backward of jagged softmax attention on Hopper, few queries a sample: the queries stay, the keys pass once.

The walk is that of backward_few: two lanes a program, each with jobs, a ring and a producer of its own; a job's queries
and d_out stay in shared memory while its keys and values pass, and dk and dv of a tile are complete when it has met all
queries. It is bound by the bytes of k, v, dk and dv, each of which moves once. With softmax

    p = 2^(s - lse), ds = p (dp - delta)

where log-sum-exps and dots delta of the job's queries come beside them through the copy engine (``rows``). They belong
to columns of the scores, which stand keys by queries, and are read from shared memory for every tile: registers have no
room for them beside dq and a tile's dk or dv.

Nothing is masked: a descriptor (launch.ragged) reads zeros behind a sample's end, and what it stores stops there. Keys
that are only zeros have the score 0, which may lie far above a row's log-sum-exp: a weight is never above 1, so that
their ds, which is no zero, times their zeros adds 0 to dq and no NaN. Queries behind the end have the log-sum-exp +inf
and so no weights. A job without keys or without queries reads neither them nor numbers of rows, so that whatever they
are its gradients are 0.

All jobs are claimed (``claims``), each when the copies of the one before it begin. Every lane has its first by then, so
that the second ones, shorter, do not all go to the lanes that came first.

Legend: T rows of all samples, H heads, D head_dim, M most queries of a sample (32 or 64), N keys of a tile (64).
"""

# ruff: noqa: RUF005
# Gluon knows no starred tuples.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

import triton.language as tl
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
from gem.kernels.hopper.backward_few import TOLD, VARIANTS, Few, job_of, limits, load_tile, send, tell
from gem.kernels.hopper.claims import claim, counter
from gem.kernels.hopper.parts import END, LAYOUT, LOG2E, key_tiles, record_of
from gem.kernels.hopper.rows import NOWHERE
from gem.kernels.hopper.sums import SumsLaunch, first_tile
from gem.kernels.launch import PLANS, kind_of, remember
from gem.kernels.schedule import Batch


def launch_of(variant: Few, head_dim: int) -> SumsLaunch:
    """The kernel with the constants of a variant. Arguments: see ``run``."""
    rows = variant.rows
    return SumsLaunch(
        _jfa_backward_few, SLOTS=variant.slots, BUFFERS=variant.buffers, M=rows, D=head_dim, warps=4,
        ragged={0: rows, 1: rows, 2: 64, 3: 64, 4: 64, 5: 64, 6: 2}, layout=LAYOUT,
    )  # fmt: skip


def run(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, rows: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    batch: Batch, *, qk_scale: float, queries: int = 64, variant: Few | None = None,
) -> None:  # fmt: skip
    """Gradients of samples of up to ``queries`` queries (32 or 64; a ``variant`` has its own) into dq, dk, dv.

    These are contiguous. Rows of samples beyond ``backward_few.limits(queries)`` and behind the last offsets stay as
    they are. ``rows``: of ``rows.of_rows``. ``dq`` is of q's type or fp32, for ``batch.shared`` queries
    [B * shared, H, D] as d_out is. Inputs, dk and dv must suit launch.tma_fits. Of a variant ``claims`` says nothing.
    """
    if batch.left >= 0 or batch.right >= 0:
        raise ValueError(
            f"the Gluon backward for few queries masks nothing, got left {batch.left} and right {batch.right}; "
            "accepted: -1, no edge"
        )
    heads, head_dim = k_THD.shape[1:]
    variant = variant or VARIANTS[queries, head_dim]
    kind = kind_of(batch, q_THD, k_THD, v_THD, d_out_THD)
    key = ("gluon attention backward, few queries", kind, variant, dq.dtype)
    plan = PLANS.get(key)
    if plan is None:
        plan = launch_of(variant, head_dim)
        if kind is not None:
            remember(key, plan)
    samples = batch.samples(limits(variant.rows))
    jobs = samples.shape[0] * heads
    if max(jobs, rows.shape[0]) >= 2**30:
        raise ValueError(
            f"the Gluon kernels count in 32 bits, got {jobs} of samples and heads, and {rows.shape[0]} rows of numbers "
            "of their queries; accepted: up to 2**30"
        )
    programs = min((jobs + 1) // 2, launch.multiprocessors(k_THD.device))
    shared = batch.shared if batch.q_offsets is None else 0
    plan(
        (programs,), d_out_THD, q_THD, k_THD, v_THD, dk, dv, rows, dq, samples, counter(k_THD.device), jobs, heads,
        shared, qk_scale,
    )  # fmt: skip


@gluon.jit
def _weigh(s, dp, rows_s, scale2, M: gl.constexpr):
    """Weights of a tile and gradients of its scores, fp32; ``rows_s``: the numbers of the job's queries."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    lse = rows_s.slice(0, 1, dim=0).slice(0, M, dim=1).load(S_L)
    delta = rows_s.slice(1, 1, dim=0).slice(0, M, dim=1).load(S_L)
    p = gl.exp2(gl.minimum(s * scale2 - lse, 0.0, propagate_nan=tl.PropagateNan.ALL))
    return p, p * (dp - delta)


@gluon.jit
def _consumer(
    W: gl.constexpr, SLOTS: gl.constexpr, BUFFERS: gl.constexpr, M: gl.constexpr, D: gl.constexpr, q_s, d_out_s, rows_s,
    job_s, ring, q_full, q_empty, full, empty, dk_desc, dv_desc, dq_ptr, heads, scale,
):  # fmt: skip
    N: gl.constexpr = 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    DS_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = ring.dtype
    scale2 = scale * LOG2E
    s_zero = gl.zeros([N, M], gl.float32, S_L)
    o_zero = gl.zeros([N, D], gl.float32, O_L)
    m = gl.arange(0, 64, gl.SliceLayout(1, O_L))[:, None]
    d = gl.arange(0, D, gl.SliceLayout(0, O_L))[None, :]
    t = 0
    it = 0
    row, q_len, k_start, k_len, column = job_of(job_s, q_full, t, W, SLOTS)
    while q_len >= 0:
        slot = W * SLOTS + t % SLOTS
        q = q_s.index(slot).reshape([M, D])
        d_out = d_out_s.index(slot).reshape([M, D])
        n = key_tiles(k_len, N)
        dq = gl.zeros([64, D], gl.float32, O_L)
        for j in range(n):
            k_at = W * BUFFERS + (2 * it) % BUFFERS
            v_at = W * BUFFERS + (2 * it + 1) % BUFFERS
            k_s = ring.index(k_at)
            v_s = ring.index(v_at)
            k = k_s.reshape([N, D])
            v = v_s.reshape([N, D])
            mbarrier.wait(full.index(k_at), ((2 * it) // BUFFERS) & 1)
            s_f = warpgroup_mma(k, q.permute((1, 0)), s_zero, use_acc=False, is_async=True)
            mbarrier.wait(full.index(v_at), ((2 * it + 1) // BUFFERS) & 1)
            dp_f = warpgroup_mma(v, d_out.permute((1, 0)), s_zero, use_acc=False, is_async=True)
            s, dp = warpgroup_mma_wait(0, deps=[s_f, dp_f])
            # By now the copy engine has read the gradients of the tile before. This is a barrier too: behind it the
            # products of all warps have read the values.
            tma.store_wait(0)
            before = gl.maximum(it - 1, 0)
            mbarrier.arrive(empty.index(W * BUFFERS + (2 * before) % BUFFERS), count=1, pred=it > 0)
            mbarrier.arrive(empty.index(W * BUFFERS + (2 * before + 1) % BUFFERS), count=1, pred=it > 0)
            w, dx = _weigh(s, dp, rows_s.index(slot), scale2, M)
            p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
            ds16 = dx.to(dtype)
            ds = gl.convert_layout(ds16, P_L, assert_trivial=True)
            # A product has 64 rows: with 32 queries the others are of whatever lies there, and are not stored.
            ds_s = v_s._reinterpret(dtype, [N, 64], DS_L)
            ds_s.slice(0, M, dim=1).store(ds16)
            fence_async_shared()
            dv_f = warpgroup_mma(p, d_out, o_zero, use_acc=False, is_async=True)
            dq_f = warpgroup_mma(ds_s.permute((1, 0)), k, dq, is_async=True)
            dv = warpgroup_mma_wait(1, deps=[dv_f])
            dv16 = dv.to(dtype)
            dq = warpgroup_mma_wait(0, deps=[dq_f])
            gl.thread_barrier()  # until the products of all warps have read the keys and ds
            k.store(dv16)
            # Not before dv is out of its registers: beside it and dq, dk has none.
            dk_f = warpgroup_mma(ds, q, o_zero, use_acc=False, is_async=True)
            send(k_s, dv_desc, k_start, k_len, j * N, column)
            dk = warpgroup_mma_wait(0, deps=[dk_f])
            if j + 1 == n:
                mbarrier.arrive(q_empty.index(slot), count=1)
            v.store((dk * scale).to(dtype))
            send(v_s, dk_desc, k_start, k_len, j * N, column)
            it += 1
        base = dq_ptr + row.to(gl.int64) * (heads * D) + column
        gl.store(base + (m * (heads * D) + d), (dq * scale).to(dq_ptr.dtype.element_ty), mask=m < q_len)
        t += 1
        row, q_len, k_start, k_len, column = job_of(job_s, q_full, t, W, SLOTS)
    tma.store_wait(0)


@gluon.jit
def _producer(
    lane: gl.constexpr, SLOTS: gl.constexpr, BUFFERS: gl.constexpr, D: gl.constexpr, q_s, d_out_s, rows_s, job_s, ring,
    q_full, q_empty, full, empty, d_out_desc, q_desc, k_desc, v_desc, rows_desc, samples, claimed, jobs, heads, shared,
):  # fmt: skip
    N: gl.constexpr = 64
    it = 0
    t = 0
    sample, _, q_start, q_len, k_start, k_len, head = record_of(samples, claim(claimed), jobs, heads)
    while sample >= 0:
        column = head * D
        k_x = gl.where(q_len > 0, END - k_len, END)
        # The first keys before the queries, whose place may not be free before the last job's last tile is done. No
        # more than one tile: that last one's buffers come back only when this job has begun.
        load_tile(k_desc, v_desc, ring, full, empty, it, k_x, k_start + k_len, column, lane, BUFFERS)
        it += 1
        slot = lane * SLOTS + t % SLOTS
        mbarrier.wait(q_empty.index(slot), ((t // SLOTS) & 1) ^ 1)
        row = q_start
        if shared > 0:
            row = sample * shared
        tell(job_s, slot, row, q_len, k_start, k_len, column)
        mbarrier.expect(q_full.index(slot), 2 * q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
        q_x = gl.where(k_len > 0, END - q_len, END)
        # Nobody wrote numbers of queries that are not there or see no key.
        of_queries = (first_tile(q_start, sample, shared) * heads + head) * 2
        of_queries = gl.where((q_len > 0) & (k_len > 0), of_queries, NOWHERE)
        tma.async_copy_global_to_shared(
            q_desc, [END, q_start + q_len, q_x, column], q_full.index(slot), q_s.index(slot)
        )
        tma.async_copy_global_to_shared(
            d_out_desc, [END, row + q_len, q_x, column], q_full.index(slot), d_out_s.index(slot)
        )
        tma.async_copy_global_to_shared(rows_desc, [of_queries, 0], q_full.index(slot), rows_s.index(slot))
        # Its answer comes while the other tiles wait for their places.
        next_job = claim(claimed)
        for j in range(1, key_tiles(k_len, N)):
            k_x = gl.where(q_len > 0, END - k_len + j * N, END)
            load_tile(k_desc, v_desc, ring, full, empty, it, k_x, k_start + k_len, column, lane, BUFFERS)
            it += 1
        t += 1
        sample, _, q_start, q_len, k_start, k_len, head = record_of(samples, next_job, jobs, heads)
    slot = lane * SLOTS + t % SLOTS
    mbarrier.wait(q_empty.index(slot), ((t // SLOTS) & 1) ^ 1)
    tell(job_s, slot, 0, -1, 0, 0, 0)
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit(do_not_specialize=["jobs", "heads", "shared"])
def _jfa_backward_few(
    d_out_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc, rows_desc, dq_ptr, samples, claimed, jobs, heads, shared,
    scale, SLOTS: gl.constexpr, BUFFERS: gl.constexpr, M: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # A tile's buffers come back when the next one's products have begun.
    gl.static_assert(BUFFERS >= 4, "BUFFERS: 4 at least")
    dtype: gl.constexpr = k_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2 * SLOTS, 1, 1, M, D], q_desc.layout)
    d_out_s = gl.allocate_shared_memory(dtype, [2 * SLOTS, 1, 1, M, D], d_out_desc.layout)
    rows_s = gl.allocate_shared_memory(gl.float32, [2 * SLOTS, 2, 64], rows_desc.layout)
    job_s = gl.allocate_shared_memory(gl.int32, [2 * SLOTS * TOLD, 1], mbarrier.MBarrierLayout())
    ring = gl.allocate_shared_memory(dtype, [2 * BUFFERS, 1, 1, 64, D], k_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    both = (q_s, d_out_s, rows_s, job_s, ring, q_full, q_empty, full, empty)
    consumed = both + (dk_desc, dv_desc, dq_ptr, heads, scale)
    produced = both + (d_out_desc, q_desc, k_desc, v_desc, rows_desc, samples, claimed, jobs, heads, shared)
    gl.warp_specialize(
        [
            (_consumer, (0, SLOTS, BUFFERS, M, D) + consumed),
            (_consumer, (1, SLOTS, BUFFERS, M, D) + consumed),
            (_producer, (0, SLOTS, BUFFERS, D) + produced),
            (_producer, (1, SLOTS, BUFFERS, D) + produced),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip
