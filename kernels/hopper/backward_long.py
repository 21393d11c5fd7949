"""Backward of GDPA on Hopper, long sequences: five products, dq summed over programs in a fixed order.

A program holds a tile of 128 keys at a time, as two consumers (a warpgroup each) of 64 keys that keep dk and dv in
registers while the sample's queries pass in tiles of 64 through a ring. The producer, a warp, fills the ring and takes
jobs (a tile of keys and a head) from a counter. Scores stand transposed, keys by queries, so that weights and their
gradients are register operands of dv += weights d_out and dk += d_scores q; d_scores go through shared memory for
dq = d_scores^T k, of which each consumer computes half over all 128 keys: with the next tile's dk and dv, so that it
need not wait for the other one's d_scores (TFLOP/s on an H200, self_long: 582 against 552 at head_dim 128).

A key tile's share of dq goes to sums in global memory (``sums``), fp32, by the copy engine: the first tile of a sample
stores, the others add, one after the other, so that every run gives the same bits. For that a writer, a warp, waits
until the flag of a query tile and head counts all earlier tiles of the sample, adds, waits until the addition is done,
and counts itself. Nothing waits in a circle: jobs are handed out in ascending order, and a job waits only for those of
the same sample and head with earlier keys. These have lower numbers, since tiles of a sample ascend in the list (its
sort is stable, and all of them visit the same queries) and a job's number is entry * heads + head. So the lowest job
that is not finished waits for none; a program has it that runs, and comes to it first, having finished all lower ones.

No masks: a descriptor (launch.ragged) reads zeros behind a sample's end, act(0) = 0, and stores stop there. A job has
two tiles of queries at least, if need be of zeros, whose sums nobody adds. Samples without queries read zeros for keys
too, so that their dk and dv are 0 whatever the keys are.

Legend: T rows of all samples, H heads, D head_dim.
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
from gem.kernels.hopper.jobs import PARTS, hand_on, told
from gem.kernels.hopper.parts import END, LAYOUT, lean, record_of
from gem.kernels.hopper.slopes import slope_factor, slopes_of, value_factor
from gem.kernels.hopper.sums import SumsLaunch, buffers, first_tile, in_order, rows_launch, writer
from gem.kernels.launch import PLANS, Launch, folds, kind_of, remember
from gem.kernels.schedule import Batch, Limits

_KEYS = 128  # of a job


@dataclass(frozen=True)
class Variant:
    """What the kernel may do in more than one way."""

    stages: int  # tiles of queries and d_out under way
    rows: int = 64  # queries of a tile: 64, or 128 at head_dim 64
    kv_slots: int = 1  # tiles of keys and values in shared memory; with two the next job's come during this one
    kv_registers: bool = False  # keys and values are copied to registers before their products


VARIANTS = {64: Variant(4, kv_slots=2, kv_registers=True), 128: Variant(2)}


def launches_of(variant: Variant, head_dim: int, activation: str, fold: bool, lean: bool) -> tuple[Launch, Launch]:
    """The kernel with the constants of a variant, and the one that makes dq of its sums. Arguments: see ``run``."""
    products = SumsLaunch(
        _backward_long, REGISTERS=int(variant.kv_registers),
        ACT=activation, FOLD=fold, LEAN=lean, M=variant.rows, D=head_dim, STAGES=variant.stages, KV=variant.kv_slots,
        warps=4,
        ragged={0: variant.rows, 1: variant.rows, 2: 64, 3: 64, 4: 64, 5: 64, 6: variant.rows * head_dim // 64},
        layout=LAYOUT,
    )  # fmt: skip
    return products, rows_launch(head_dim, activation, fold, lean)


def run(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, batch: Batch, *,
    activation: str, qk_scale: float, out_scale: float = 1.0, variant: Variant | None = None,
    beyond: Limits | None = None, sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Gradients of all samples into dq, dk, dv, all contiguous and with rows; 0 where nothing is seen.

    ``beyond``: of samples beyond these limits alone, and of what lies behind the last offsets; others' rows stay as
    they are. ``dq`` is of q's type or fp32, for ``batch.shared`` queries [B * shared, H, D] as d_out is. Inputs, dk and
    dv must suit launch.tma_fits. ``sums``: memory to work in (the first of sums.buffers).
    """
    heads, head_dim = k_THD.shape[1:]
    variant = variant or VARIANTS[head_dim]
    kind = kind_of(batch, q_THD, k_THD, v_THD, d_out_THD)
    small = lean(activation, q_THD.dtype, qk_scale)
    key = ("gluon backward, long", kind, activation, variant, small, dq.dtype)
    launches = PLANS.get(key)
    if launches is None:
        launches = launches_of(variant, head_dim, activation, folds(activation, q_THD), small)
        if kind is not None:
            remember(key, launches)
    k_tiles, q_tiles = batch.tiles("k", _KEYS, beyond=beyond), batch.tiles("q", 64, beyond=beyond)
    k_jobs, q_jobs = k_tiles.shape[0] * heads, q_tiles.shape[0] * heads
    if max(k_jobs, q_jobs) >= 2**30:
        raise ValueError(f"the Gluon kernels count jobs in 32 bits, got {max(k_jobs, q_jobs)}; accepted: up to 2**30")
    shared = batch.shared if batch.q_offsets is None else 0
    sums, state = buffers(dq.shape[0], batch.size, heads, head_dim, q_THD.device, sums)
    products, rows = launches
    programs = min(k_jobs, launch.multiprocessors(q_THD.device))
    products(
        (programs,), q_THD, d_out_THD, k_THD, v_THD, dk, dv, sums, state, k_tiles, k_jobs, heads, shared, qk_scale,
        out_scale,
    )  # fmt: skip
    rows((q_jobs,), sums, dq, q_tiles, q_jobs, heads, shared, -1, -1, qk_scale, out_scale)


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _nothing(it, M: gl.constexpr, D: gl.constexpr):
    """0, which the compiler does not know for wide tiles: addresses taken out of loops would go to local memory."""
    return it >> 30 if M + D > 128 else 0


@gluon.jit
def scores_of(
    W: gl.constexpr, k, v, q_s, o_s, full, it, kv, REGISTERS: gl.constexpr, M: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of a tile and gradients of its weights, keys by queries, in the queue."""
    zero = gl.zeros([64, M], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16]))
    stage = it % STAGES
    mbarrier.wait(full.index(stage), (it // STAGES) & 1)
    q = q_s.index(stage).reshape([M, D]).permute((1, 0))
    d_out = o_s.index(stage).reshape([M, D]).permute((1, 0))
    if not REGISTERS:
        k = k.index(kv * 2 + W + _nothing(it, M, D)).reshape([64, D])
        v = v.index(kv * 2 + W + _nothing(it, M, D)).reshape([64, D])
    scores = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
    return scores, warpgroup_mma(v, d_out, zero, use_acc=False, is_async=True)


@gluon.jit
def scores_ahead(
    W: gl.constexpr, k, v, dk, dv, q_s, o_s, full, empty, it, kv, REGISTERS: gl.constexpr, M: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The same of the tile behind ``it``, whose dk and dv are in the queue and done before."""
    zero = gl.zeros([64, M], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16]))
    stage = (it + 1) % STAGES
    mbarrier.wait(full.index(stage), ((it + 1) // STAGES) & 1)
    q = q_s.index(stage).reshape([M, D]).permute((1, 0))
    d_out = o_s.index(stage).reshape([M, D]).permute((1, 0))
    if not REGISTERS:
        k = k.index(kv * 2 + W + _nothing(it, M, D)).reshape([64, D])
        v = v.index(kv * 2 + W + _nothing(it, M, D)).reshape([64, D])
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    mbarrier.arrive(empty.index(it % STAGES), count=1)
    scores = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
    d_weights = warpgroup_mma(v, d_out, zero, use_acc=False, is_async=True)
    return scores, d_weights, dk, dv


@gluon.jit
def _weigh(
    W: gl.constexpr, scores, d_weights, ds_s, ds_full, sum_full, it, scale, out_scale, ACT: gl.constexpr,
    FOLD: gl.constexpr, LEAN: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Weights of a tile and gradients of its scores as operands, the latter in shared memory too."""
    P_L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    dtype: gl.constexpr = ds_s.dtype
    slot = it % 2
    weights, d_scores = slopes_of(scores, d_weights, scale, out_scale, ACT, FOLD, LEAN, dtype)
    d_scores = d_scores.to(dtype)
    weights = gl.convert_layout(weights.to(dtype), P_L, assert_trivial=True)
    # The other consumer's product of two tiles before has read this slot when its result was handed on.
    mbarrier.wait(sum_full.index(slot * 2 + 1 - W), ((it // 2) & 1) ^ 1)
    ds_s.index(slot * 2 + W).store(d_scores)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot), count=1)
    return weights, gl.convert_layout(d_scores, P_L, assert_trivial=True)


@gluon.jit
def share_of_dq(W: gl.constexpr, ds_s, k_s, ds_full, it, kv, M: gl.constexpr, D: gl.constexpr):
    """A tile's share of dq in the queue: this consumer's half of the columns, or of the rows where there are 128."""
    C: gl.constexpr = D * M // 128
    slot = it % 2
    mbarrier.wait(ds_full.index(slot), (it // 2) & 1)
    kv += _nothing(it, M, D)
    k_0, k_1 = k_s.index(kv * 2).reshape([64, D]), k_s.index(kv * 2 + 1).reshape([64, D])
    ds_0, ds_1 = ds_s.index(slot * 2), ds_s.index(slot * 2 + 1)
    if M == 64:
        k_0, k_1 = k_0.slice(W * C, C, dim=1), k_1.slice(W * C, C, dim=1)
    else:
        ds_0, ds_1 = ds_0.slice(W * 64, 64, dim=1), ds_1.slice(W * 64, 64, dim=1)
    dq = gl.zeros([64, C], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16]))
    dq = warpgroup_mma(ds_0.permute((1, 0)), k_0, dq, use_acc=False, is_async=True)
    return warpgroup_mma(ds_1.permute((1, 0)), k_1, dq, is_async=True)


@gluon.jit
def give_dq(W: gl.constexpr, dq, sum_s, sum_full, sum_empty, it):
    """A share of dq to the writer."""
    slot = it % 2
    mbarrier.wait(sum_empty.index(slot), ((it // 2) & 1) ^ 1)
    sum_s.index(slot * 2 + W).store(in_order(dq))
    fence_async_shared()
    mbarrier.arrive(sum_full.index(slot * 2 + W), count=1)


@gluon.jit
def store_own(W: gl.constexpr, x_s, desc, x, factor, job_s, t, kv, M: gl.constexpr, D: gl.constexpr):
    """This consumer's rows of dk or dv out through where its keys or values are; tma.store_wait is the caller's.

    Its values are read by nobody else, its keys by the other consumer's last product.
    """
    end, at, column = told(job_s, t, 1, 4), told(job_s, t, 2, 4) + W * 64, told(job_s, t, 3, 4) * D
    own = x_s.index(kv * 2 + W + _nothing(t, M, D))
    own.reshape([64, D]).store((x * factor).to(x_s.dtype))
    fence_async_shared()
    if at < END:
        tma.async_copy_shared_to_global(desc, [END, end, at, column], own)


@gluon.jit
def _consumer(
    W: gl.constexpr, REGISTERS: gl.constexpr,
    ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr, M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    KV: gl.constexpr, dk_desc, dv_desc, q_s, o_s, k_s, v_s, ds_s, sum_s, job_s, full, empty, kv_full, kv_empty,
    ds_full, sum_full, sum_empty, job_full, job_empty, scale, out_scale,
):  # fmt: skip
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    K_L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16]), 2)
    dv_factor = value_factor(scale, out_scale, ACT, FOLD, LEAN)
    dk_factor = slope_factor(scale, out_scale, ACT, FOLD, LEAN)
    it = 0
    t = 0
    mbarrier.wait(job_full.index(0), 0)
    n = told(job_s, 0, 0, 4)
    while n > 0:
        kv = t % KV
        mbarrier.wait(kv_full.index(kv), (t // KV) & 1)
        k, v = k_s, v_s
        if REGISTERS:
            k = k_s.index(kv * 2 + W).reshape([64, D]).load(K_L)
            v = v_s.index(kv * 2 + W).reshape([64, D]).load(K_L)
        dk = gl.zeros([64, D], gl.float32, A_L)
        dv = gl.zeros([64, D], gl.float32, A_L)
        s_f, dw_f = scores_of(W, k, v, q_s, o_s, full, it, kv, REGISTERS, M, D, STAGES)
        s, dw = warpgroup_mma_wait(0, deps=[s_f, dw_f])
        p, dp = _weigh(W, s, dw, ds_s, ds_full, sum_full, it, scale, out_scale, ACT, FOLD, LEAN, D)
        dv_f = warpgroup_mma(p, o_s.index(it % STAGES).reshape([M, D]), dv, use_acc=False, is_async=True)
        dk_f = warpgroup_mma(dp, q_s.index(it % STAGES).reshape([M, D]), dk, use_acc=False, is_async=True)
        s_f, dw_f, dk, dv = scores_ahead(
            W, k, v, dk_f, dv_f, q_s, o_s, full, empty, it, kv, REGISTERS, M, D, STAGES
        )  # fmt: skip
        it += 1
        # The producer's word. Else ptxas 12.8 sets uniform registers that the last tile's products read in this loop's
        # preheader alone (fp16, exact gelu, head_dim 64; test_hopper_machine_code.py).
        gl.assume(n > 2)
        for _ in range(2, n):
            s, dw = warpgroup_mma_wait(0, deps=[s_f, dw_f])
            p, dp = _weigh(W, s, dw, ds_s, ds_full, sum_full, it, scale, out_scale, ACT, FOLD, LEAN, D)
            dq_f = share_of_dq(W, ds_s, k_s, ds_full, it - 1, kv, M, D)
            dv_f = warpgroup_mma(p, o_s.index(it % STAGES).reshape([M, D]), dv, is_async=True)
            dk_f = warpgroup_mma(dp, q_s.index(it % STAGES).reshape([M, D]), dk, is_async=True)
            dq = warpgroup_mma_wait(2, deps=[dq_f])
            give_dq(W, dq, sum_s, sum_full, sum_empty, it - 1)
            s_f, dw_f, dk, dv = scores_ahead(
                W, k, v, dk_f, dv_f, q_s, o_s, full, empty, it, kv, REGISTERS, M, D, STAGES
            )  # fmt: skip
            it += 1
        s, dw = warpgroup_mma_wait(0, deps=[s_f, dw_f])
        p, dp = _weigh(W, s, dw, ds_s, ds_full, sum_full, it, scale, out_scale, ACT, FOLD, LEAN, D)
        dq_f = share_of_dq(W, ds_s, k_s, ds_full, it - 1, kv, M, D)
        dv_f = warpgroup_mma(p, o_s.index(it % STAGES).reshape([M, D]), dv, is_async=True)
        dk_f = warpgroup_mma(dp, q_s.index(it % STAGES).reshape([M, D]), dk, is_async=True)
        dq = warpgroup_mma_wait(2, deps=[dq_f])
        give_dq(W, dq, sum_s, sum_full, sum_empty, it - 1)
        dq_f = share_of_dq(W, ds_s, k_s, ds_full, it, kv, M, D)
        dv, dk = warpgroup_mma_wait(2, deps=[dv_f, dk_f])
        mbarrier.arrive(empty.index(it % STAGES), count=1)
        store_own(W, v_s, dv_desc, dv, dv_factor, job_s, t, kv, M, D)
        dq = warpgroup_mma_wait(0, deps=[dq_f])
        give_dq(W, dq, sum_s, sum_full, sum_empty, it)
        it += 1
        mbarrier.wait(sum_full.index((it - 1) % 2 * 2 + 1 - W), ((it - 1) // 2) & 1)
        store_own(W, k_s, dk_desc, dk, dk_factor, job_s, t, kv, M, D)
        tma.store_wait(0)
        mbarrier.arrive(kv_empty.index(kv), count=1)
        mbarrier.arrive(job_empty.index(t % 2), count=1)
        t += 1
        mbarrier.wait(job_full.index(t % 2), (t // 2) & 1)
        n = told(job_s, t, 0, 4)


# -- producer ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _producer(
    M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, KV: gl.constexpr, q_desc, o_desc, k_desc, v_desc, q_s,
    o_s, k_s, v_s, job_s, full, empty, kv_full, kv_empty, job_full, job_empty, state, tiles, jobs, heads, shared,
):  # fmt: skip
    it = 0
    t = 0
    n = 1
    while n > 0:
        job = gl.atomic_add(state, 1, sem="relaxed")
        sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, job, jobs, heads)
        # Three at least, empty ones among them: where the loop between the first and the last could be skipped, ptxas
        # 12.8 set uniform registers that the last one's products read in the loop's preheader alone (fp16, exact gelu).
        n = gl.where(sample >= 0, gl.maximum((q_len + M - 1) // M, 3), 0)
        k_end = k_start + k_len
        k_x = END - k_len + row
        # Tiles that no query sees need not wait for each other: nobody reads their sums.
        turn = gl.where(q_len > 0, row // 128, 0)
        tile = first_tile(q_start, sample, shared)
        hand_on(job_s, job_full, job_empty, t, n, k_end, k_x, head, turn, tile, (q_len + M - 1) // M, 0)
        if n > 0:
            q_end = q_start + q_len
            o_end = q_end
            if shared > 0:
                o_end = sample * shared + q_len
            kv = t % KV
            mbarrier.wait(kv_empty.index(kv), ((t // KV) & 1) ^ 1)
            mbarrier.expect(kv_full.index(kv), 4 * k_desc.block_type.nbytes)
            x = gl.where(q_len > 0, k_x, END)
            for w in gl.static_range(2):
                at = [END, k_end, x + w * 64, head * D]
                tma.async_copy_global_to_shared(k_desc, at, kv_full.index(kv), k_s.index(kv * 2 + w))
                tma.async_copy_global_to_shared(v_desc, at, kv_full.index(kv), v_s.index(kv * 2 + w))
            for i in range(n):
                stage = it % STAGES
                mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), 2 * q_desc.block_type.nbytes)
                x = END - q_len + i * M
                tma.async_copy_global_to_shared(
                    q_desc, [END, q_end, x, head * D], full.index(stage), q_s.index(stage)
                )  # fmt: skip
                tma.async_copy_global_to_shared(
                    o_desc, [END, o_end, x, head * D], full.index(stage), o_s.index(stage)
                )  # fmt: skip
                it += 1
        t += 1


@gluon.jit(do_not_specialize=["jobs", "heads", "shared"])
def _backward_long(
    q_desc, o_desc, k_desc, v_desc, dk_desc, dv_desc, sums_desc, state, tiles, jobs, heads, shared, scale, out_scale,
    REGISTERS: gl.constexpr,
    ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr, M: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, KV: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    D_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, D], q_desc.layout)
    o_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, D], o_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [KV * 2, 1, 1, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [KV * 2, 1, 1, 64, D], v_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [4, 64, M], D_L)
    sum_s = gl.allocate_shared_memory(gl.float32, [4, M * D // 64, 32], sums_desc.layout)
    job_s = gl.allocate_shared_memory(gl.int32, [2 * PARTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [KV, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sum_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    sum_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    job_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    job_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(KV):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(sum_empty.index(i), count=1)
        mbarrier.init(job_full.index(i), count=1)
        mbarrier.init(job_empty.index(i), count=4)
    for i in gl.static_range(4):
        mbarrier.init(sum_full.index(i), count=1)
    fence_async_shared()
    consumed = (
        dk_desc, dv_desc, q_s, o_s, k_s, v_s, ds_s, sum_s, job_s, full, empty, kv_full, kv_empty, ds_full, sum_full,
        sum_empty, job_full, job_empty, scale, out_scale,
    )  # fmt: skip
    produced = (
        q_desc, o_desc, k_desc, v_desc, q_s, o_s, k_s, v_s, job_s, full, empty, kv_full, kv_empty, job_full, job_empty,
        state, tiles, jobs, heads, shared,
    )  # fmt: skip
    written = (sums_desc, sum_s, sum_full, sum_empty, job_s, job_full, job_empty, state, heads, 0)
    gl.warp_specialize(
        [
            (_consumer, (0, REGISTERS, ACT, FOLD, LEAN, M, D, STAGES, KV) + consumed),
            (_consumer, (1, REGISTERS, ACT, FOLD, LEAN, M, D, STAGES, KV) + consumed),
            (_producer, (M, D, STAGES, KV) + produced),
            (writer, (0, M, D, 0) + written),
            (writer, (1, M, D, 0) + written),
        ],
        [4, 1, 1, 1], [240, 24, 24, 24],
    )  # fmt: skip
