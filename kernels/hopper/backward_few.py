"""Backward of GDPA on Hopper, few queries a sample: the queries stay, the keys pass once.

With up to 64 queries a sample the bytes of k, v, dk and dv bound it, each of which moves once. A program holds two
lanes, each a consumer (a warpgroup), a ring of tiles in shared memory and a producer (a warp) with jobs of its own. A
job is a sample and a head: its queries and d_out stay in shared memory while its keys and values pass, 64 rows a tile.

    s^T = k q^T, dp^T = v d_out^T    keys by queries, so that weights and their gradients are register operands of
    dv = p^T d_out, dk = ds^T q      which are complete after one tile, since it has met all queries, and
    dq += ds k                       over all tiles of the job. Here ds goes through shared memory.

Nothing needs room of its own: ds^T lies where the values were, dv leaves through the buffer of the keys and dk through
that of the values, which go back to the producer when the copy engine has read them.

CLAIMS: jobs are claimed as lanes become free, behind the first two of each lane. Dealt out beforehand, in zigzag, the
busiest lane of pma_q64 got 11 % more keys than the mean. A job's results are the same bits on whatever lane it runs.

Nothing is masked: a descriptor (launch.ragged) reads zeros behind a sample's end, act(0) = 0, and what it stores stops
at the sample's end. A job without keys reads no queries and one without queries no keys, so that whatever they are its
gradients are 0.

Legend: T rows of all samples, H heads, D head_dim, M most queries of a sample (32 or 64), N keys of a tile (64).
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
from gem.kernels.hopper.claims import counter
from gem.kernels.hopper.parts import END, LAYOUT, dealt, key_tiles, lean, record_of
from gem.kernels.hopper.slopes import slope_factor, slopes_of, value_factor
from gem.kernels.launch import PLANS, Launch, folds, kind_of, remember
from gem.kernels.schedule import Batch, Limits


@dataclass(frozen=True)
class Few:
    """Tiles of a launch."""

    rows: int  # M: 32 or 64
    slots: int  # jobs whose queries are in shared memory, a lane
    buffers: int  # tiles of keys or values in shared memory, a lane
    claims: bool = True  # else jobs are dealt out beforehand


TOLD = gl.constexpr(5)  # numbers that a producer tells its consumer of a job

# By (M, head_dim): what fits into 227 KB beside each other.
VARIANTS = {(32, 64): Few(32, 2, 12), (64, 64): Few(64, 2, 10), (32, 128): Few(32, 1, 6), (64, 128): Few(64, 1, 5)}


def limits(rows: int) -> Limits:
    """Of samples that a launch with tiles of ``rows`` queries takes: one lane walks all keys of one."""
    return Limits(rows, 2**15)


def launch_of(variant: Few, head_dim: int, activation: str, fold: bool, lean: bool) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``run``."""
    rows = variant.rows
    return Launch(
        _backward_few, SLOTS=variant.slots, BUFFERS=variant.buffers, CLAIMS=int(variant.claims), ACT=activation,
        FOLD=fold, LEAN=lean, M=rows, D=head_dim, warps=4, ragged={0: rows, 1: rows, 2: 64, 3: 64, 4: 64, 5: 64},
        layout=LAYOUT,
    )  # fmt: skip


def run(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, batch: Batch, *,
    activation: str, qk_scale: float, out_scale: float = 1.0, rows: int = 64, variant: Few | None = None,
) -> None:  # fmt: skip
    """Gradients of samples of up to ``rows`` queries (32 or 64; a ``variant`` has its own) into dq, dk, dv, contiguous.

    Rows of samples beyond ``limits(rows)`` and behind the last offsets stay as they are. ``dq`` is of q's type or fp32,
    for ``batch.shared`` queries [B * shared, H, D] as d_out is. Inputs, dk and dv must suit launch.tma_fits.
    """
    heads, head_dim = k_THD.shape[1:]
    variant = variant or VARIANTS[rows, head_dim]
    kind = kind_of(batch, q_THD, k_THD, v_THD, d_out_THD)
    is_lean = lean(activation, q_THD.dtype, qk_scale)
    key = ("gluon backward, few queries", kind, activation, variant, is_lean, dq.dtype)
    plan = PLANS.get(key)
    if plan is None:
        plan = launch_of(variant, head_dim, activation, folds(activation, q_THD), is_lean)
        if kind is not None:
            remember(key, plan)
    samples = batch.samples(limits(variant.rows))
    jobs = samples.shape[0] * heads
    if jobs >= 2**31:
        raise ValueError(f"the Gluon kernels count jobs in 32 bits, got {jobs} of samples and heads; accepted: 2**31")
    programs = min((jobs + 1) // 2, launch.multiprocessors(k_THD.device))
    shared = batch.shared if batch.q_offsets is None else 0
    claimed = counter(k_THD.device)
    plan(
        (programs,), d_out_THD, q_THD, k_THD, v_THD, dk, dv, dq, samples, claimed, jobs, heads, programs, shared,
        qk_scale, out_scale,
    )  # fmt: skip


@gluon.jit
def tell(job_s, slot, row, q_len, k_start, k_len, column):
    """By a producer, to its consumer: the job of a slot (see ``job_of``)."""
    LAYOUT_1: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = slot * TOLD
    job_s.index(at).store(gl.full([1], row, gl.int32, LAYOUT_1))
    job_s.index(at + 1).store(gl.full([1], q_len, gl.int32, LAYOUT_1))
    job_s.index(at + 2).store(gl.full([1], k_start, gl.int32, LAYOUT_1))
    job_s.index(at + 3).store(gl.full([1], k_len, gl.int32, LAYOUT_1))
    job_s.index(at + 4).store(gl.full([1], column, gl.int32, LAYOUT_1))
    gl.thread_barrier()


@gluon.jit
def job_of(job_s, q_full, t, W: gl.constexpr, SLOTS: gl.constexpr):
    """(first row of dq, queries, k_start, k_len, first column) of a lane's job ``t``; queries -1 = it has no more."""
    slot = W * SLOTS + t % SLOTS
    mbarrier.wait(q_full.index(slot), (t // SLOTS) & 1)
    at = slot * TOLD
    LAYOUT_4: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.max(job_s.index(at).load(LAYOUT_4), 0)
    q_len = gl.max(job_s.index(at + 1).load(LAYOUT_4), 0)
    k_start = gl.max(job_s.index(at + 2).load(LAYOUT_4), 0)
    k_len = gl.max(job_s.index(at + 3).load(LAYOUT_4), 0)
    column = gl.max(job_s.index(at + 4).load(LAYOUT_4), 0)
    return row, q_len, k_start, k_len, column


@gluon.jit
def send(buffer, desc, k_start, k_len, row, column):
    """A tile of gradients on its way from shared memory to those rows of it that the sample has."""
    fence_async_shared()
    if row < k_len:
        tma.async_copy_shared_to_global(desc, [END, k_start + k_len, END - k_len + row, column], buffer)


@gluon.jit
def _consumer(
    W: gl.constexpr, SLOTS: gl.constexpr, BUFFERS: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr,
    LEAN: gl.constexpr, M: gl.constexpr, D: gl.constexpr, q_s, d_out_s, job_s, ring, q_full, q_empty, full, empty,
    dk_desc, dv_desc, dq_ptr, heads, scale, out_scale,
):  # fmt: skip
    N: gl.constexpr = 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    DS_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = ring.dtype
    dv_factor = value_factor(scale, out_scale, ACT, FOLD, LEAN)
    dk_factor = slope_factor(scale, out_scale, ACT, FOLD, LEAN)
    V_SCALED: gl.constexpr = LEAN or not FOLD
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
            p_f = warpgroup_mma(v, d_out.permute((1, 0)), s_zero, use_acc=False, is_async=True)
            s, dp = warpgroup_mma_wait(0, deps=[s_f, p_f])
            # By now the copy engine has read the gradients of the tile before. This is a barrier too: behind it the
            # products of all warps have read the values.
            tma.store_wait(0)
            before = gl.maximum(it - 1, 0)
            mbarrier.arrive(empty.index(W * BUFFERS + (2 * before) % BUFFERS), count=1, pred=it > 0)
            mbarrier.arrive(empty.index(W * BUFFERS + (2 * before + 1) % BUFFERS), count=1, pred=it > 0)
            w, dx = slopes_of(s, dp, scale, out_scale, ACT, FOLD, LEAN, dtype)
            p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
            ds16 = dx.to(dtype)
            ds = gl.convert_layout(ds16, P_L, assert_trivial=True)
            # A product has 64 rows: with 32 queries the others are of whatever lies there, and are not stored. (Turned,
            # [D, 32], it read wrong operands on the H200: triton 3.6, ds with 64-byte swizzle.)
            ds_s = v_s._reinterpret(dtype, [N, 64], DS_L)
            ds_s.slice(0, M, dim=1).store(ds16)
            fence_async_shared()
            dv_f = warpgroup_mma(p, d_out, o_zero, use_acc=False, is_async=True)
            dq_f = warpgroup_mma(ds_s.permute((1, 0)), k, dq, is_async=True)
            dv = warpgroup_mma_wait(1, deps=[dv_f])
            if V_SCALED:
                dv = dv * dv_factor
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
            v.store((dk * dk_factor).to(dtype))
            send(v_s, dk_desc, k_start, k_len, j * N, column)
            it += 1
        base = dq_ptr + row.to(gl.int64) * (heads * D) + column
        gl.store(base + (m * (heads * D) + d), (dq * dk_factor).to(dq_ptr.dtype.element_ty), mask=m < q_len)
        t += 1
        row, q_len, k_start, k_len, column = job_of(job_s, q_full, t, W, SLOTS)
    tma.store_wait(0)


@gluon.jit
def load_tile(k_desc, v_desc, ring, full, empty, it, x, end, column, lane: gl.constexpr, BUFFERS: gl.constexpr):
    """Keys and values of a tile into the next two buffers."""
    for half in gl.static_range(2):
        number = 2 * it + half
        at = lane * BUFFERS + number % BUFFERS
        mbarrier.wait(empty.index(at), ((number // BUFFERS) & 1) ^ 1)
        mbarrier.expect(full.index(at), k_desc.block_type.nbytes)
        if half == 0:
            tma.async_copy_global_to_shared(k_desc, [END, end, x, column], full.index(at), ring.index(at))
        else:
            tma.async_copy_global_to_shared(v_desc, [END, end, x, column], full.index(at), ring.index(at))


@gluon.jit
def _producer(
    lane: gl.constexpr, SLOTS: gl.constexpr, BUFFERS: gl.constexpr, CLAIMS: gl.constexpr, D: gl.constexpr, q_s,
    d_out_s, job_s, ring, q_full, q_empty, full, empty, d_out_desc, q_desc, k_desc, v_desc, samples, claimed, jobs,
    heads, programs, shared,
):  # fmt: skip
    N: gl.constexpr = 64
    it = 0
    t = 0
    next_job = dealt(1, lane, programs, 2, True)
    sample, _, q_start, q_len, k_start, k_len, head = record_of(samples, dealt(0, lane, programs, 2, True), jobs, heads)
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
        mbarrier.expect(q_full.index(slot), 2 * q_desc.block_type.nbytes)
        q_x = gl.where(k_len > 0, END - q_len, END)
        tma.async_copy_global_to_shared(
            q_desc, [END, q_start + q_len, q_x, column], q_full.index(slot), q_s.index(slot)
        )
        tma.async_copy_global_to_shared(
            d_out_desc, [END, row + q_len, q_x, column], q_full.index(slot), d_out_s.index(slot)
        )
        for j in range(1, key_tiles(k_len, N)):
            k_x = gl.where(q_len > 0, END - k_len + j * N, END)
            load_tile(k_desc, v_desc, ring, full, empty, it, k_x, k_start + k_len, column, lane, BUFFERS)
            it += 1
        t += 1
        sample, _, q_start, q_len, k_start, k_len, head = record_of(samples, next_job, jobs, heads)
        # When all of a job's copies are under way there is time to claim one.
        if CLAIMS:
            next_job = 4 * programs + gl.atomic_add(claimed, 1, sem="relaxed")
        else:
            next_job = dealt(t + 1, lane, programs, 2, True)
    slot = lane * SLOTS + t % SLOTS
    mbarrier.wait(q_empty.index(slot), ((t // SLOTS) & 1) ^ 1)
    tell(job_s, slot, 0, -1, 0, 0, 0)
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit(do_not_specialize=["jobs", "heads", "programs", "shared"])
def _backward_few(
    d_out_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc, dq_ptr, samples, claimed, jobs, heads, programs, shared,
    scale, out_scale, SLOTS: gl.constexpr, BUFFERS: gl.constexpr, CLAIMS: gl.constexpr, ACT: gl.constexpr,
    FOLD: gl.constexpr, LEAN: gl.constexpr, M: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    # A tile's buffers come back when the next one's products have begun.
    gl.static_assert(BUFFERS >= 4, "BUFFERS: 4 at least")
    dtype: gl.constexpr = k_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2 * SLOTS, 1, 1, M, D], q_desc.layout)
    d_out_s = gl.allocate_shared_memory(dtype, [2 * SLOTS, 1, 1, M, D], d_out_desc.layout)
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
    both = (q_s, d_out_s, job_s, ring, q_full, q_empty, full, empty)
    consumed = both + (dk_desc, dv_desc, dq_ptr, heads, scale, out_scale)
    produced = both + (d_out_desc, q_desc, k_desc, v_desc, samples, claimed, jobs, heads, programs, shared)
    gl.warp_specialize(
        [
            (_consumer, (0, SLOTS, BUFFERS, ACT, FOLD, LEAN, M, D) + consumed),
            (_consumer, (1, SLOTS, BUFFERS, ACT, FOLD, LEAN, M, D) + consumed),
            (_producer, (0, SLOTS, BUFFERS, CLAIMS, D) + produced),
            (_producer, (1, SLOTS, BUFFERS, CLAIMS, D) + produced),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip
