"""Forward of jagged softmax attention on Hopper, long keys: the keys pass, the queries stay.

The walk is that of gdpa_long: two or three consumers of 64 queries (a warpgroup each) and a producer, or two lanes with
a producer each for few queries a sample; scores of tile i in the tensor core's queue together with the product of
weights and values of tile i - 1, across jobs too; turns; claimed jobs. What softmax adds stands in ``softmax.py``: row
maxima and sums in base 2, and sums of values that shrink where a maximum grows (online softmax, FlashAttention).

-inf is selected only in tiles that an edge crosses: the keys' end, causal, a window. It is a branch that a whole
warpgroup takes or not. Jagged ends subtracted from the sum instead (the zeros' share, as the portable kernel does) need
a second walk where all scores are far below 0, and here the keys are gone by then; the branch costs one tile a job.
Tiles beyond the edges are not visited: a job's keys are [low, high), from the very first that one of its queries sees.

Rows that see no key give 0 and a log-sum-exp of +inf. GROUP query heads share a head of keys and values.

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
from gem.kernels.hopper.parts import END, LAYOUT, record_of, store_tile
from gem.kernels.hopper.softmax import finished, seen, softmax
from gem.kernels.launch import Launch


def launch_of(variant: Variant, head_dim: int, left: bool, right: bool) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``gem.kernels.hopper.attention``."""
    return Launch(
        _jfa_long, CONSUMERS=variant.consumers, LANES=variant.lanes, SLOTS=variant.q_slots,
        REGISTERS=int(variant.q_registers), TURNS=variant.turns, LEFT=int(left), RIGHT=int(right), N=variant.keys,
        D=head_dim, STAGES=variant.stages, warps=4, ragged={0: 64, 1: variant.keys, 2: variant.keys, 3: 64},
        layout=LAYOUT,
    )  # fmt: skip


@gluon.jit
def _consumer(
    W: gl.constexpr, CONSUMERS: gl.constexpr, LANES: gl.constexpr, SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
    TURNS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, out_desc, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty, turn, records, lse, shared,
    out_rows, left, right, scale,
):  # fmt: skip
    M: gl.constexpr = 64
    ROWS: gl.constexpr = M * (CONSUMERS // LANES)
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    Q_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    dtype: gl.constexpr = k_s.dtype
    lane: gl.constexpr = W if LANES == 2 else 0
    first: gl.constexpr = 0 if LANES == 2 else W * M  # row of the tile
    NEXT: gl.constexpr = (W + 1) % CONSUMERS
    EARLY: gl.constexpr = 1 if W == 0 else 0  # the first consumer's first turn is given
    zero = gl.zeros([M, N], gl.float32, S_L)
    t = 0
    it = 0
    step = 0  # turns taken
    mbarrier.wait(full.index(lane * STAGES), 0)
    sample, row, q_start, q_len, k_len, head = received(records, lane * STAGES)
    valid = sample >= 0
    w = zero
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, S_L))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, S_L))
    low, tiles = seen(row, q_len, k_len, left, right, LEFT, RIGHT, ROWS, N)
    if REGISTERS:
        q = gl.zeros([M, D], dtype, Q_L)
    else:
        q = q_s.index(W * SLOTS).reshape([M, D])
    if valid:
        mbarrier.wait(q_full.index(W * SLOTS), 0)
        if REGISTERS:
            q = q_s.index(W * SLOTS).reshape([M, D]).load(Q_L)
        k = k_s.index(lane * STAGES).reshape([N, D]).permute((1, 0))
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if REGISTERS:
            # Not before a product has used them: they may be read later than a copy that is mostly zeros arrives.
            mbarrier.arrive(q_empty.index(W * SLOTS), count=1)
        mbarrier.arrive(empty.index(lane * STAGES), count=1)
        w, top, total, _ = softmax(
            s, top, total, scale, row + first, low, q_len, k_len, left, right, LEFT, RIGHT, M, N, S_L
        )
        it += 1
    while valid:
        acc = gl.zeros([M, D], gl.float32, O_L)
        for j in range(1, tiles):
            stage = lane * STAGES + it % STAGES
            p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
            mbarrier.wait(full.index(stage), (it // STAGES) & 1)
            if TURNS:
                mbarrier.wait(turn.index(W), (step & 1) ^ EARLY)
                step += 1
            k = k_s.index(stage).reshape([N, D]).permute((1, 0))
            s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
            if TURNS == 2:
                mbarrier.arrive(turn.index(NEXT), count=1)
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            if TURNS == 1:
                mbarrier.arrive(turn.index(NEXT), count=1)
            s = warpgroup_mma_wait(1, deps=[s_f])
            w, top, total, shrink = softmax(
                s, top, total, scale, row + first, low + j * N, q_len, k_len, left, right, LEFT, RIGHT, M, N, S_L
            )
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            mbarrier.arrive(empty.index(stage), count=1)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_L), assert_trivial=True)[:, None]
            it += 1
        if not REGISTERS:
            mbarrier.arrive(q_empty.index(W * SLOTS + t % SLOTS), count=1)
        at, start, last, of_head = row + first, q_start, q_len, head
        end = q_start + q_len
        if shared > 0:
            start = sample * shared
            end = start + q_len
        t += 1
        stage = lane * STAGES + it % STAGES
        p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        sample, row, q_start, q_len, k_len, head = received(records, stage)
        low, tiles = seen(row, q_len, k_len, left, right, LEFT, RIGHT, ROWS, N)
        valid = sample >= 0
        if TURNS:
            mbarrier.wait(turn.index(W), (step & 1) ^ EARLY)
            step += 1
        # The last product of this job, and the first of the next beside this one's way out.
        slot = W * SLOTS + t % SLOTS
        if valid:
            mbarrier.wait(q_full.index(slot), (t // SLOTS) & 1)
            if REGISTERS:
                q = q_s.index(slot).reshape([M, D]).load(Q_L)
            else:
                q = q_s.index(slot).reshape([M, D])
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            k = k_s.index(stage).reshape([N, D]).permute((1, 0))
            s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
            if TURNS:
                mbarrier.arrive(turn.index(NEXT), count=1)
            acc = warpgroup_mma_wait(1, deps=[acc_f])
            acc = finished(acc, top, total, lse, of_head, out_rows, start, at, last, M, S_L, O_L)
            store_tile(o_s.index(W), out_desc, acc, 1.0, at, end, last, of_head * D, True, M, D)
            s = warpgroup_mma_wait(0, deps=[s_f])
            if REGISTERS:
                mbarrier.arrive(q_empty.index(slot), count=1)
            mbarrier.arrive(empty.index(stage), count=1)
            top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, S_L))
            total = gl.zeros([M], gl.float32, gl.SliceLayout(1, S_L))
            w, top, total, _ = softmax(
                s, top, total, scale, row + first, low, q_len, k_len, left, right, LEFT, RIGHT, M, N, S_L
            )
        else:
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            if TURNS:
                mbarrier.arrive(turn.index(NEXT), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            acc = finished(acc, top, total, lse, of_head, out_rows, start, at, last, M, S_L, O_L)
            store_tile(o_s.index(W), out_desc, acc, 1.0, at, end, last, of_head * D, True, M, D)
        it += 1
    tma.store_wait(0)


@gluon.jit
def _producer(
    lane: gl.constexpr, CONSUMERS: gl.constexpr, LANES: gl.constexpr, SLOTS: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, q_desc, k_desc, v_desc, q_s, k_s, v_s,
    q_full, q_empty, full, empty, records, tiles, claimed, jobs, heads, group, programs, left, right,
):  # fmt: skip
    ROWS: gl.constexpr = 64 * (CONSUMERS // LANES)
    it = 0
    t = 0
    job = first_job(claimed, lane, programs, LANES, 1, 1)
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
        low, n = seen(row, q_len, k_len, left, right, LEFT, RIGHT, ROWS, N)
        column = head // group * D
        for j in range(n):
            stage = lane * STAGES + it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            if j == 0:
                send(records, stage, sample, row, q_start, q_len, k_len, head)
            x = END - k_len + low + j * N
            if it > 0:
                mbarrier.expect(full.index(stage), 2 * k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [END, k_start + k_len, x, column], full.index(stage), k_s.index(stage)
                )
                tma.async_copy_global_to_shared(
                    v_desc, [END, v_end, v_x, v_column], full.index(stage), v_s.index(stage)
                )
            else:
                mbarrier.expect(full.index(stage), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [END, k_start + k_len, x, column], full.index(stage), k_s.index(stage)
                )
            v_end, v_x, v_column = k_start + k_len, x, column
            it += 1
            if j == gl.maximum(n - 2, 0):
                job = claim(claimed)
        t += 1
        sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, job, jobs, heads)
    stage = lane * STAGES + it % STAGES
    mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
    send(records, stage, -1, 0, 0, 0, 0, 0)
    if it > 0:
        mbarrier.expect(full.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [END, v_end, v_x, v_column], full.index(stage), v_s.index(stage))
    else:
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit(do_not_specialize=["jobs", "heads", "group", "programs", "shared", "out_rows", "left", "right"])
def _jfa_long(
    q_desc, k_desc, v_desc, out_desc, lse, tiles, claimed, jobs, heads, group, programs, shared, out_rows, left, right,
    scale,
    CONSUMERS: gl.constexpr, LANES: gl.constexpr, SLOTS: gl.constexpr, REGISTERS: gl.constexpr, TURNS: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
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
        out_desc, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty, turn, records, lse, shared, out_rows, left, right,
        scale,
    )  # fmt: skip
    produced = (
        q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, full, empty, records, tiles, claimed, jobs, heads,
        group, programs, left, right,
    )  # fmt: skip
    if LANES == 2:
        gl.static_assert(CONSUMERS == 2)
        gl.warp_specialize(
            [
                (_consumer, (0, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, LEFT, RIGHT, N, D, STAGES) + consumed),
                (_consumer, (1, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, LEFT, RIGHT, N, D, STAGES) + consumed),
                (_producer, (0, CONSUMERS, LANES, SLOTS, LEFT, RIGHT, N, D, STAGES) + produced),
                (_producer, (1, CONSUMERS, LANES, SLOTS, LEFT, RIGHT, N, D, STAGES) + produced),
            ],
            [4, 1, 1], [240, 24, 24],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, LEFT, RIGHT, N, D, STAGES) + consumed),
                (_consumer, (1, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, LEFT, RIGHT, N, D, STAGES) + consumed),
                (_producer, (0, CONSUMERS, LANES, SLOTS, LEFT, RIGHT, N, D, STAGES) + produced),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_consumer, (0, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, LEFT, RIGHT, N, D, STAGES) + consumed),
                (_consumer, (1, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, LEFT, RIGHT, N, D, STAGES) + consumed),
                (_consumer, (2, CONSUMERS, LANES, SLOTS, REGISTERS, TURNS, LEFT, RIGHT, N, D, STAGES) + consumed),
                (_producer, (0, CONSUMERS, LANES, SLOTS, LEFT, RIGHT, N, D, STAGES) + produced),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
