"""Forward of GDPA on Hopper, long keys: the keys pass, the queries stay.

A program holds two consumers of 64 queries each (a warpgroup, 240 registers a thread) and a producer, a warp, that
fills rings in shared memory through the copy engine. One lane: both consumers work at a tile of 128 queries and read
the same keys. Two lanes: each has jobs, a ring and a producer of its own, for queries that fill no tile of 128.

A stage of a ring holds the keys of tile i beside the values of tile i - 1, since a consumer puts the scores of tile i
and the product of weights and values of tile i - 1 into the tensor core's queue together: one wait and one arrival a
step. A job's last product runs beside the next job's first
scores, so the queue is not emptied between jobs.

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
from gem.kernels.hopper.parts import END, LAYOUT, dealt, key_tiles, record_of, weights_of
from gem.kernels.launch import Launch


def launch_of(variant: Variant, head_dim: int, activation: str, fold: bool) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``gem.kernels.hopper.ops``."""
    return Launch(
        _gdpa_long, LANES=variant.lanes, ACT=activation, FOLD=fold, N=variant.keys, D=head_dim,
        STAGES=variant.stages, warps=4, ragged={0: variant.q_tile, 1: variant.keys, 2: variant.keys, 3: 64},
        layout=LAYOUT,
    )  # fmt: skip


@gluon.jit
def _consumer(
    HALF: gl.constexpr, LANES: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, out_desc, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty, tiles, jobs,
    heads, programs, shared, scale, out_scale,
):  # fmt: skip
    M: gl.constexpr = 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    dtype: gl.constexpr = k_s.dtype
    ROWS: gl.constexpr = 128 // LANES  # of a tile of queries
    lane: gl.constexpr = HALF if LANES == 2 else 0
    first: gl.constexpr = 0 if LANES == 2 else HALF * M  # row of the tile
    zero = gl.zeros([M, N], gl.float32, S_L)
    t = 0
    it = 0
    job = dealt(0, lane, programs, LANES)
    sample, row, q_start, q_len, _, k_len, head = record_of(tiles, job, jobs, heads)
    valid = sample >= 0
    p = gl.convert_layout(zero.to(dtype), P_L, assert_trivial=True)
    if valid:
        mbarrier.wait(q_full.index(2 * lane), 0)
        mbarrier.wait(full.index(lane * STAGES), 0)
        q = q_s.index(2 * lane).reshape([ROWS, D]).slice(first, M, 0)
        s = warpgroup_mma(
            q, k_s.index(lane * STAGES).reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(lane * STAGES), count=1)
        p = gl.convert_layout(weights_of(s, scale, out_scale, ACT, FOLD, dtype).to(dtype), P_L, assert_trivial=True)
        it += 1
    while valid:
        slot = 2 * lane + t % 2
        q = q_s.index(slot).reshape([ROWS, D]).slice(first, M, 0)
        acc = gl.zeros([M, D], gl.float32, O_L)
        for _ in range(1, key_tiles(k_len, N)):
            stage = lane * STAGES + it % STAGES
            mbarrier.wait(full.index(stage), (it // STAGES) & 1)
            s_f = warpgroup_mma(q, k_s.index(stage).reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_f])
            w = weights_of(s, scale, out_scale, ACT, FOLD, dtype)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            mbarrier.arrive(empty.index(stage), count=1)
            p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
            it += 1
        mbarrier.arrive(q_empty.index(slot), count=1)
        at, end, last = row + first, q_start + q_len, q_len
        if shared > 0:
            end = sample * shared + q_len
        column = head * D
        # The last product of this job beside the first of the next.
        t += 1
        job = dealt(t, lane, programs, LANES)
        sample, row, q_start, q_len, _, k_len, head = record_of(tiles, job, jobs, heads)
        valid = sample >= 0
        stage = lane * STAGES + it % STAGES
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        if valid:
            mbarrier.wait(q_full.index(2 * lane + t % 2), (t // 2) & 1)
            q = q_s.index(2 * lane + t % 2).reshape([ROWS, D]).slice(first, M, 0)
            s_f = warpgroup_mma(q, k_s.index(stage).reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_f])
            w = weights_of(s, scale, out_scale, ACT, FOLD, dtype)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            mbarrier.arrive(empty.index(stage), count=1)
            p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
        else:
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
        it += 1
        o = o_s.index(HALF)
        tma.store_wait(0)
        if not FOLD:
            acc = acc * out_scale
        o.reshape([M, D]).store(acc.to(dtype))
        fence_async_shared()
        if at < last:
            tma.async_copy_shared_to_global(out_desc, [END, end, END - last + at, column], o)
    tma.store_wait(0)


@gluon.jit
def _producer(
    lane: gl.constexpr, LANES: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, q_desc,
    k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, full, empty, tiles, jobs, heads, programs,
):  # fmt: skip
    it = 0
    t = 0
    sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, dealt(0, lane, programs, LANES), jobs, heads)
    v_end, v_x, v_column = k_start, k_len, head  # of the tile before, whose values go with this one's keys
    while sample >= 0:
        slot = 2 * lane + t % 2
        mbarrier.wait(q_empty.index(slot), ((t // 2) & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
        q_x = gl.where(k_len > 0, END - q_len + row, END)
        tma.async_copy_global_to_shared(
            q_desc, [END, q_start + q_len, q_x, head * D], q_full.index(slot), q_s.index(slot)
        )  # fmt: skip
        for j in range(key_tiles(k_len, N)):
            stage = lane * STAGES + it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
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
        t += 1
        sample, row, q_start, q_len, k_start, k_len, head = record_of(
            tiles, dealt(t, lane, programs, LANES), jobs, heads
        )
    if it > 0:
        stage = lane * STAGES + it % STAGES
        mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [END, v_end, v_x, v_column], full.index(stage), v_s.index(stage))


@gluon.jit(do_not_specialize=["jobs", "heads", "programs", "shared"])
def _gdpa_long(
    q_desc, k_desc, v_desc, out_desc, tiles, jobs, heads, programs, shared, scale, out_scale, LANES: gl.constexpr,
    ACT: gl.constexpr, FOLD: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2 * LANES, 1, 1, 128 // LANES, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [LANES * STAGES, 1, 1, N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [LANES * STAGES, 1, 1, N, D], v_desc.layout)
    o_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * LANES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * LANES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [LANES * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [LANES * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * LANES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2 // LANES)
    for i in gl.static_range(LANES * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 // LANES)
    fence_async_shared()
    consumed = (
        out_desc, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty, tiles, jobs, heads, programs, shared, scale,
        out_scale,
    )  # fmt: skip
    produced = (q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, full, empty, tiles, jobs, heads, programs)
    if LANES == 1:
        gl.warp_specialize(
            [
                (_consumer, (0, LANES, ACT, FOLD, N, D, STAGES) + consumed),
                (_consumer, (1, LANES, ACT, FOLD, N, D, STAGES) + consumed),
                (_producer, (0, LANES, N, D, STAGES) + produced),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, LANES, ACT, FOLD, N, D, STAGES) + consumed),
                (_consumer, (1, LANES, ACT, FOLD, N, D, STAGES) + consumed),
                (_producer, (0, LANES, N, D, STAGES) + produced),
                (_producer, (1, LANES, N, D, STAGES) + produced),
            ],
            [4, 1, 1], [240, 24, 24],
        )  # fmt: skip
