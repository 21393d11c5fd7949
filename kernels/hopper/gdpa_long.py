"""Forward of GDPA on Hopper, long keys: the keys pass, the queries stay.

A program holds two or three consumers of 64 queries each (a warpgroup; with three, 160 registers a thread instead of
240) and a producer, a warp, that fills rings in shared memory through the copy engine. One lane: the consumers work at
one tile of queries and read the same keys. Two lanes: each has jobs, a ring and a producer of its own, for queries that
fill no larger tile.

A stage of a ring holds the keys of tile i beside the values of tile i - 1, since a consumer puts the scores of tile i
and the product of weights and values of tile i - 1 into the tensor core's queue together: one wait and one arrival a
step. Between jobs the queue is not emptied: the last product and the next job's first scores stand in it together, and
the output leaves while the scores are computed. Where jobs are claimed (claims.py), a job's record comes beside its
first keys; behind the last job's values it says that there is no more.

TURNS: consumers issue their products one after the other, so that while one waits for its products and computes
weights, the others keep the tensor core busy. A turn is handed on behind both products (1) or between them (2).

Weights go from step to step in fp32 and become operands right before their product: as 16-bit numbers they were taken
apart and put together again at the loop's end, 64 instructions of 491 a step.

Nothing is masked: a descriptor (launch.ragged) reads zeros behind a sample's end, act(0) = 0, and what it stores stops
at the sample's end. A job without keys reads no queries either, so that whatever they are its output is 0.

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
from gem.kernels.hopper.parts import END, LAYOUT, dealt, factor_of, key_tiles, record_of, store_tile, weights_of
from gem.kernels.launch import Launch


def launch_of(variant: Variant, head_dim: int, activation: str, fold: bool, lean: bool) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``gem.kernels.hopper.ops``."""
    return Launch(
        _gdpa_long, CONSUMERS=variant.consumers, LANES=variant.lanes, SLOTS=variant.q_slots,
        REGISTERS=int(variant.q_registers), TURNS=variant.turns, ZIGZAG=int(variant.zigzag),
        CLAIMS=int(variant.claims and variant.zigzag), PIPELINED=int(variant.pipelined), ACT=activation, FOLD=fold,
        LEAN=lean, N=variant.keys, D=head_dim, STAGES=variant.stages, warps=4,
        ragged={0: 64, 1: variant.keys, 2: variant.keys, 3: 64}, layout=LAYOUT,
    )  # fmt: skip


@gluon.jit
def _issue(
    q, k, p, v, acc, turn, W: gl.constexpr, NEXT: gl.constexpr, TURNS: gl.constexpr, N: gl.constexpr, D: gl.constexpr
):
    """Scores of this tile and the product of the one before, in the queue behind each other; and the turn handed on."""
    zero = gl.zeros([64, N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    scores = warpgroup_mma(q, k.reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    if TURNS == 2:
        mbarrier.arrive(turn.index(NEXT), count=1)
    acc = warpgroup_mma(p, v.reshape([N, D]), acc, is_async=True)
    if TURNS == 1:
        mbarrier.arrive(turn.index(NEXT), count=1)
    return scores, acc


@gluon.jit
def _consumer(
    W: gl.constexpr, CONSUMERS: gl.constexpr, LANES: gl.constexpr, SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
    TURNS: gl.constexpr, ZIGZAG: gl.constexpr, CLAIMS: gl.constexpr, PIPELINED: gl.constexpr, ACT: gl.constexpr,
    FOLD: gl.constexpr, LEAN: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, out_desc, q_s, k_s,
    v_s, o_s, q_full, q_empty, full, empty, turn, records, tiles, jobs, heads, programs, shared, scale, out_scale,
):  # fmt: skip
    M: gl.constexpr = 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    Q_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    dtype: gl.constexpr = k_s.dtype
    lane: gl.constexpr = W if LANES == 2 else 0
    first: gl.constexpr = 0 if LANES == 2 else W * M  # row of the tile
    NEXT: gl.constexpr = (W + 1) % CONSUMERS
    EARLY: gl.constexpr = 1 if W == 0 else 0  # the first consumer's first turn is given
    factor = factor_of(scale, out_scale, ACT, LEAN)
    zero = gl.zeros([M, N], gl.float32, S_L)
    t = 0
    it = 0
    step = 0  # turns taken
    if CLAIMS:
        mbarrier.wait(full.index(lane * STAGES), 0)
        sample, row, q_start, q_len, k_len, head = received(records, lane * STAGES)
    else:
        job = dealt(0, lane, programs, LANES, ZIGZAG)
        sample, row, q_start, q_len, _, k_len, head = record_of(tiles, job, jobs, heads)
    valid = sample >= 0
    w = zero
    if REGISTERS:
        q = gl.zeros([M, D], dtype, Q_L)
    else:
        q = q_s.index(W * SLOTS).reshape([M, D])
    if valid:
        mbarrier.wait(q_full.index(W * SLOTS), 0)
        if REGISTERS:
            q = q_s.index(W * SLOTS).reshape([M, D]).load(Q_L)
        mbarrier.wait(full.index(lane * STAGES), 0)
        k = k_s.index(lane * STAGES).reshape([N, D]).permute((1, 0))
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if REGISTERS:
            # Not before a product has used them: they may be read later than a copy that is mostly zeros arrives.
            mbarrier.arrive(q_empty.index(W * SLOTS), count=1)
        mbarrier.arrive(empty.index(lane * STAGES), count=1)
        w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
        it += 1
    while valid:
        if not CLAIMS:
            # The next job's record comes while this one is worked at.
            job = dealt(t + 1, lane, programs, LANES, ZIGZAG)
            n_sample, n_row, n_q_start, n_q_len, _, n_k_len, n_head = record_of(tiles, job, jobs, heads)
        acc = gl.zeros([M, D], gl.float32, O_L)
        for _ in range(1, key_tiles(k_len, N)):
            stage = lane * STAGES + it % STAGES
            p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
            mbarrier.wait(full.index(stage), (it // STAGES) & 1)
            if TURNS:
                mbarrier.wait(turn.index(W), (step & 1) ^ EARLY)
                step += 1
            s_f, acc_f = _issue(q, k_s.index(stage), p, v_s.index(stage), acc, turn, W, NEXT, TURNS, N, D)
            s = warpgroup_mma_wait(1, deps=[s_f])
            w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            mbarrier.arrive(empty.index(stage), count=1)
            it += 1
        if not REGISTERS:
            mbarrier.arrive(q_empty.index(W * SLOTS + t % SLOTS), count=1)
        at, end, last, column = row + first, q_start + q_len, q_len, head * D
        if shared > 0:
            end = sample * shared + q_len
        t += 1
        stage = lane * STAGES + it % STAGES
        p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        if CLAIMS:
            sample, row, q_start, q_len, k_len, head = received(records, stage)
        else:
            sample, row, q_start, q_len, k_len, head = n_sample, n_row, n_q_start, n_q_len, n_k_len, n_head
        valid = sample >= 0
        if TURNS:
            mbarrier.wait(turn.index(W), (step & 1) ^ EARLY)
            step += 1
        # The last product of this job, and the first of the next beside this one's way out.
        if valid:
            slot = W * SLOTS + t % SLOTS
            mbarrier.wait(q_full.index(slot), (t // SLOTS) & 1)
            if REGISTERS:
                q = q_s.index(slot).reshape([M, D]).load(Q_L)
            else:
                q = q_s.index(slot).reshape([M, D])
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            k = k_s.index(stage).reshape([N, D]).permute((1, 0))
            if PIPELINED:
                s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                if TURNS:
                    mbarrier.arrive(turn.index(NEXT), count=1)
                acc = warpgroup_mma_wait(1, deps=[acc_f])
                store_tile(o_s.index(W), out_desc, acc, factor, at, end, last, column, FOLD, M, D)
            else:
                if TURNS:
                    mbarrier.arrive(turn.index(NEXT), count=1)
                acc = warpgroup_mma_wait(0, deps=[acc_f])
                store_tile(o_s.index(W), out_desc, acc, factor, at, end, last, column, FOLD, M, D)
                if TURNS:
                    mbarrier.wait(turn.index(W), (step & 1) ^ EARLY)
                    step += 1
                s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                if TURNS:
                    mbarrier.arrive(turn.index(NEXT), count=1)
            s = warpgroup_mma_wait(0, deps=[s_f])
            if REGISTERS:
                mbarrier.arrive(q_empty.index(slot), count=1)
            mbarrier.arrive(empty.index(stage), count=1)
            w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
        else:
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            if TURNS:
                mbarrier.arrive(turn.index(NEXT), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            store_tile(o_s.index(W), out_desc, acc, factor, at, end, last, column, FOLD, M, D)
        it += 1
    tma.store_wait(0)


@gluon.jit
def _producer(
    lane: gl.constexpr, CONSUMERS: gl.constexpr, LANES: gl.constexpr, SLOTS: gl.constexpr, ZIGZAG: gl.constexpr,
    CLAIMS: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, q_desc, k_desc, v_desc, q_s, k_s, v_s,
    q_full, q_empty, full, empty, records, tiles, claimed, jobs, heads, programs,
):  # fmt: skip
    it = 0
    t = 0
    job = first_job(claimed, lane, programs, LANES, ZIGZAG, CLAIMS)
    sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, job, jobs, heads)
    v_end, v_x, v_column = k_start, k_len, head  # of the tile before, whose values go with this one's keys
    while sample >= 0:
        for w in gl.static_range(CONSUMERS // LANES):
            slot = (lane + w) * SLOTS + t % SLOTS
            mbarrier.wait(q_empty.index(slot), ((t // SLOTS) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            q_x = gl.where(k_len > 0, END - q_len + row + w * 64, END)
            tma.async_copy_global_to_shared(
                q_desc, [END, q_start + q_len, q_x, head * D], q_full.index(slot), q_s.index(slot)
            )  # fmt: skip
        n = key_tiles(k_len, N)
        for j in range(n):
            stage = lane * STAGES + it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            if CLAIMS:
                if j == 0:
                    send(records, stage, sample, row, q_start, q_len, k_len, head)
            x = END - k_len + j * N
            if it > 0:
                mbarrier.expect(full.index(stage), 2 * k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [END, k_start + k_len, x, head * D], full.index(stage), k_s.index(stage)
                )
                tma.async_copy_global_to_shared(
                    v_desc, [END, v_end, v_x, v_column], full.index(stage), v_s.index(stage)
                )
            else:
                mbarrier.expect(full.index(stage), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [END, k_start + k_len, x, head * D], full.index(stage), k_s.index(stage)
                )
            v_end, v_x, v_column = k_start + k_len, x, head * D
            it += 1
            if CLAIMS:
                if j == gl.maximum(n - 2, 0):
                    job = claim(claimed)
        t += 1
        if not CLAIMS:
            job = dealt(t, lane, programs, LANES, ZIGZAG)
        sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, job, jobs, heads)
    if it > 0:
        stage = lane * STAGES + it % STAGES
        mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
        if CLAIMS:
            send(records, stage, -1, 0, 0, 0, 0, 0)
        mbarrier.expect(full.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [END, v_end, v_x, v_column], full.index(stage), v_s.index(stage))
    elif CLAIMS:
        send(records, lane * STAGES, -1, 0, 0, 0, 0, 0)
        mbarrier.arrive(full.index(lane * STAGES), count=1)


@gluon.jit(do_not_specialize=["jobs", "heads", "programs", "shared"])
def _gdpa_long(
    q_desc, k_desc, v_desc, out_desc, tiles, claimed, jobs, heads, programs, shared, scale, out_scale,
    CONSUMERS: gl.constexpr, LANES: gl.constexpr, SLOTS: gl.constexpr, REGISTERS: gl.constexpr, TURNS: gl.constexpr,
    ZIGZAG: gl.constexpr, CLAIMS: gl.constexpr, PIPELINED: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr,
    LEAN: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [CONSUMERS * SLOTS, 1, 1, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [LANES * STAGES, 1, 1, N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [LANES * STAGES, 1, 1, N, D], v_desc.layout)
    o_s = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, D], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS * SLOTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [LANES * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [LANES * STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    records = gl.allocate_shared_memory(gl.int32, [LANES * STAGES * PLACE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(CONSUMERS * SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(LANES * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS // LANES)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    consumed = (
        out_desc, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty, turn, records, tiles, jobs, heads, programs, shared,
        scale, out_scale,
    )  # fmt: skip
    produced = (
        q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, full, empty, records, tiles, claimed, jobs, heads,
        programs,
    )  # fmt: skip
    if LANES == 2:
        gl.static_assert(CONSUMERS == 2)
        gl.warp_specialize(
            [
                (_consumer, (0, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, N, D, STAGES) + consumed),
                (_consumer, (1, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, N, D, STAGES) + consumed),
                (_producer, (0, CONSUMERS, LANES, SLOTS, ZIGZAG, CLAIMS, N, D, STAGES) + produced),
                (_producer, (1, CONSUMERS, LANES, SLOTS, ZIGZAG, CLAIMS, N, D, STAGES) + produced),
            ],
            [4, 1, 1], [240, 24, 24],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, N, D, STAGES) + consumed),
                (_consumer, (1, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, N, D, STAGES) + consumed),
                (_producer, (0, CONSUMERS, LANES, SLOTS, ZIGZAG, CLAIMS, N, D, STAGES) + produced),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_consumer, (0, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, N, D, STAGES) + consumed),
                (_consumer, (1, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, N, D, STAGES) + consumed),
                (_consumer, (2, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, ZIGZAG, CLAIMS, PIPELINED,
                             ACT, FOLD, LEAN, N, D, STAGES) + consumed),
                (_producer, (0, CONSUMERS, LANES, SLOTS, ZIGZAG, CLAIMS, N, D, STAGES) + produced),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
