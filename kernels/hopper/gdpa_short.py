"""Forward of GDPA on Hopper, short keys: the keys stay, the queries pass.

A job is up to ROWS queries of a sample and head: with keys that fill one or two tiles, reading them anew for each tile
of queries would cost as much as the products. Consumers (a warpgroup each; two, or three with 160 registers a thread
instead of 240) take blocks of 64 queries in turn, each at its own pace, and load them into registers. Keys and values
stay in the ring, a tile a stage, while the job's queries pass; more keys than the ring holds are read again for each
round of blocks, which all consumers then walk together.

As in gdpa_long, products of two tiles stand in the tensor core's queue together, across blocks and jobs too (VFIRST:
whose goes first there), weights go from step to step in fp32, a job that was claimed comes with its record beside its
first keys, and nothing is masked.

Legend: T rows of all samples, H heads, D head_dim, M queries of a consumer (64), N keys of a tile.
"""

# ruff: noqa: RUF005
# Gluon knows no starred tuples.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem.kernels.hopper.choose import Variant
from gem.kernels.hopper.claims import PLACE, claim, first_job, received, send
from gem.kernels.hopper.parts import (
    END,
    LAYOUT,
    blocks_of,
    dealt,
    factor_of,
    key_tiles,
    record_of,
    store_tile,
    weights_of,
)
from gem.kernels.launch import Launch


def launch_of(variant: Variant, head_dim: int, activation: str, fold: bool, lean: bool) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``gem.kernels.hopper.ops``."""
    return Launch(
        _gdpa_short, CONSUMERS=variant.consumers, SLOTS=variant.q_slots, VFIRST=int(variant.values_first),
        ZIGZAG=int(variant.zigzag), CLAIMS=int(variant.claims and variant.zigzag), PIPELINED=int(variant.pipelined),
        ACT=activation, FOLD=fold, LEAN=lean, ROWS=variant.rows, N=variant.keys, D=head_dim, STAGES=variant.stages,
        warps=4, ragged={0: 64, 1: variant.keys, 2: variant.keys, 3: 64}, layout=LAYOUT,
    )  # fmt: skip


@gluon.jit
def _consumer(
    W: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, VFIRST: gl.constexpr,
    ZIGZAG: gl.constexpr, CLAIMS: gl.constexpr, PIPELINED: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr,
    LEAN: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, out_desc, q_s, k_s,
    v_s, o_s, q_full, q_empty, full, empty, records, tiles, jobs, heads, programs, shared, scale, out_scale,
):  # fmt: skip
    M: gl.constexpr = 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    Q_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    dtype: gl.constexpr = k_s.dtype
    factor = factor_of(scale, out_scale, ACT, LEAN)
    zero = gl.zeros([M, N], gl.float32, S_L)
    t = 0  # own blocks so far
    base = 0  # key tiles before this block's first
    number = 0
    u = 0  # own blocks of this job so far
    if CLAIMS:
        mbarrier.wait(full.index(0), 0)
        sample, row, q_start, q_len, k_len, head = received(records, 0)
    else:
        sample, row, q_start, q_len, _, k_len, head = record_of(tiles, dealt(0, 0, programs, 1, ZIGZAG), jobs, heads)
    valid = sample >= 0
    n = key_tiles(k_len, N)
    blocks = blocks_of(W, row, q_len, n, CONSUMERS, ROWS, STAGES)
    if not CLAIMS:
        # The next job's record comes while this one is worked at.
        job = dealt(1, 0, programs, 1, ZIGZAG)
        n_sample, n_row, n_q_start, n_q_len, _, n_k_len, n_head = record_of(tiles, job, jobs, heads)
    w = zero
    q = gl.zeros([M, D], dtype, Q_L)
    if valid:
        mbarrier.wait(q_full.index(W * SLOTS), 0)
        q = q_s.index(W * SLOTS).reshape([M, D]).load(Q_L)
        mbarrier.wait(full.index(0), 0)
        s = warpgroup_mma(q, k_s.index(0).reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        # Not before a product has used them: a copy that is mostly zeros came faster than they were read, on an H200.
        mbarrier.arrive(q_empty.index(W * SLOTS), count=1)
        w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
    while valid:
        kept = n <= STAGES  # keys and values stay for the job's next block
        leaving = (u + 1 == blocks) | (not kept)
        acc = gl.zeros([M, D], gl.float32, O_L)
        for j in range(1, n):
            at_k = base + j
            stage = at_k % STAGES
            before = (at_k - 1) % STAGES
            p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
            mbarrier.wait(full.index(stage), (at_k // STAGES) & 1)
            s_f = warpgroup_mma(q, k_s.index(stage).reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
            acc_f = warpgroup_mma(p, v_s.index(before).reshape([N, D]), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_f])
            w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            mbarrier.arrive(empty.index(before), count=1, pred=leaving)
        at, end, last, column = row + (u * CONSUMERS + W) * M, q_start + q_len, q_len, head * D
        if shared > 0:
            end = sample * shared + q_len
        before = (base + n - 1) % STAGES
        p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
        t += 1
        u += 1
        base += gl.where(leaving, n, 0)
        if u == blocks:
            number += 1
            u = 0
            if CLAIMS:
                mbarrier.wait(full.index(base % STAGES), (base // STAGES) & 1)
                sample, row, q_start, q_len, k_len, head = received(records, base % STAGES)
            else:
                sample, row, q_start, q_len, k_len, head = n_sample, n_row, n_q_start, n_q_len, n_k_len, n_head
            valid = sample >= 0
            n = key_tiles(k_len, N)
            blocks = blocks_of(W, row, q_len, n, CONSUMERS, ROWS, STAGES)
            if not CLAIMS:
                job = dealt(number + 1, 0, programs, 1, ZIGZAG)
                n_sample, n_row, n_q_start, n_q_len, _, n_k_len, n_head = record_of(tiles, job, jobs, heads)
        # The last product of this block beside the first of the next.
        if valid:
            slot = W * SLOTS + t % SLOTS
            mbarrier.wait(q_full.index(slot), (t // SLOTS) & 1)
            q = q_s.index(slot).reshape([M, D]).load(Q_L)
            stage = base % STAGES
            mbarrier.wait(full.index(stage), (base // STAGES) & 1)
            k = k_s.index(stage).reshape([N, D]).permute((1, 0))
            v = v_s.index(before).reshape([N, D])
            if not PIPELINED:
                acc_f = warpgroup_mma(p, v, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc_f])
                mbarrier.arrive(empty.index(before), count=1, pred=leaving)
                store_tile(o_s.index(W), out_desc, acc, factor, at, end, last, column, FOLD, M, D)
                s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s_f])
                mbarrier.arrive(q_empty.index(slot), count=1)
                w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
            elif VFIRST:
                acc_f = warpgroup_mma(p, v, acc, is_async=True)
                s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc_f])
                mbarrier.arrive(empty.index(before), count=1, pred=leaving)
                store_tile(o_s.index(W), out_desc, acc, factor, at, end, last, column, FOLD, M, D)
                s = warpgroup_mma_wait(0, deps=[s_f])
                mbarrier.arrive(q_empty.index(slot), count=1)
                w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
            else:
                s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                acc_f = warpgroup_mma(p, v, acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s_f])
                mbarrier.arrive(q_empty.index(slot), count=1)
                w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
                acc = warpgroup_mma_wait(0, deps=[acc_f])
                mbarrier.arrive(empty.index(before), count=1, pred=leaving)
                store_tile(o_s.index(W), out_desc, acc, factor, at, end, last, column, FOLD, M, D)
        else:
            acc_f = warpgroup_mma(p, v_s.index(before).reshape([N, D]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            store_tile(o_s.index(W), out_desc, acc, factor, at, end, last, column, FOLD, M, D)
    tma.store_wait(0)


@gluon.jit
def _producer(
    CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, ZIGZAG: gl.constexpr, CLAIMS: gl.constexpr, ROWS: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty,
    full, empty, records, tiles, claimed, jobs, heads, programs,
):  # fmt: skip
    it = 0
    number = 0
    # Blocks of each consumer before this job. (Three expressions: carried values that start from one hang Gluon 3.6.)
    before_0 = 0
    before_1 = number * 1
    before_2 = number * 2
    job = first_job(claimed, 0, programs, 1, ZIGZAG, CLAIMS)
    sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, job, jobs, heads)
    while sample >= 0:
        n = key_tiles(k_len, N)
        rounds = blocks_of(0, row, q_len, n, CONSUMERS, ROWS, STAGES)
        for u in range(rounds):
            for w in gl.static_range(CONSUMERS):
                t = u + (before_0 if w == 0 else before_1 if w == 1 else before_2)
                slot = w * SLOTS + t % SLOTS
                if u < blocks_of(w, row, q_len, n, CONSUMERS, ROWS, STAGES):
                    mbarrier.wait(q_empty.index(slot), ((t // SLOTS) & 1) ^ 1)
                    mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
                    q_x = gl.where(k_len > 0, END - q_len + row + (u * CONSUMERS + w) * 64, END)
                    tma.async_copy_global_to_shared(
                        q_desc, [END, q_start + q_len, q_x, head * D], q_full.index(slot), q_s.index(slot)
                    )  # fmt: skip
            if (u == 0) | (n > STAGES):
                for j in range(n):
                    stage = it % STAGES
                    mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
                    if CLAIMS:
                        if (u == 0) & (j == 0):
                            send(records, stage, sample, row, q_start, q_len, k_len, head)
                    mbarrier.expect(full.index(stage), 2 * k_desc.block_type.nbytes)
                    at = [END, k_start + k_len, END - k_len + j * N, head * D]
                    tma.async_copy_global_to_shared(k_desc, at, full.index(stage), k_s.index(stage))
                    tma.async_copy_global_to_shared(v_desc, at, full.index(stage), v_s.index(stage))
                    it += 1
            if CLAIMS:
                if u == gl.maximum(rounds - 2, 0):
                    job = claim(claimed)
        before_0 += rounds
        before_1 += blocks_of(1, row, q_len, n, CONSUMERS, ROWS, STAGES)
        before_2 += blocks_of(2, row, q_len, n, CONSUMERS, ROWS, STAGES)
        number += 1
        if not CLAIMS:
            job = dealt(number, 0, programs, 1, ZIGZAG)
        sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, job, jobs, heads)
    if CLAIMS:
        stage = it % STAGES
        mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
        send(records, stage, -1, 0, 0, 0, 0, 0)
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit(do_not_specialize=["jobs", "heads", "programs", "shared"])
def _gdpa_short(
    q_desc, k_desc, v_desc, out_desc, tiles, claimed, jobs, heads, programs, shared, scale, out_scale,
    CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, VFIRST: gl.constexpr, ZIGZAG: gl.constexpr, CLAIMS: gl.constexpr,
    PIPELINED: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr, ROWS: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [CONSUMERS * SLOTS, 1, 1, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], v_desc.layout)
    o_s = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, D], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS * SLOTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    records = gl.allocate_shared_memory(gl.int32, [STAGES * PLACE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(CONSUMERS * SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    consumed = (
        out_desc, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty, records, tiles, jobs, heads, programs, shared,
        scale, out_scale,
    )  # fmt: skip
    produced = (
        q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, full, empty, records, tiles, claimed, jobs, heads,
        programs,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, CONSUMERS, SLOTS, VFIRST, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, ROWS, N, D, STAGES) + consumed),
                (_consumer, (1, CONSUMERS, SLOTS, VFIRST, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, ROWS, N, D, STAGES) + consumed),
                (_producer, (CONSUMERS, SLOTS, ZIGZAG, CLAIMS, ROWS, N, D, STAGES) + produced),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_consumer, (0, CONSUMERS, SLOTS, VFIRST, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, ROWS, N, D, STAGES) + consumed),
                (_consumer, (1, CONSUMERS, SLOTS, VFIRST, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, ROWS, N, D, STAGES) + consumed),
                (_consumer, (2, CONSUMERS, SLOTS, VFIRST, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, ROWS, N, D, STAGES) + consumed),
                (_producer, (CONSUMERS, SLOTS, ZIGZAG, CLAIMS, ROWS, N, D, STAGES) + produced),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
