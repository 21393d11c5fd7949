"""Forward of GDPA on Hopper, short keys: the keys stay, the queries pass.

A job is up to ROWS queries of a sample and head: with keys that fill one or two tiles, reading them anew for each tile
of queries would cost as much as the products. Two consumers take 64 queries each of every 128, which they load into
registers, so that the producer may bring in the next ones at once. Keys and values stay in the ring, a tile a stage,
while the job's queries pass; more keys than the ring holds are read again for each 128 queries.

As in gdpa_long, products of two tiles stand in the tensor core's queue together, across parts of a job and across jobs
too, and nothing is masked.

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
        _gdpa_short, ACT=activation, FOLD=fold, ROWS=variant.rows, N=variant.keys, D=head_dim,
        STAGES=variant.stages, warps=4, ragged={0: variant.q_tile, 1: variant.keys, 2: variant.keys, 3: 64},
        layout=LAYOUT,
    )  # fmt: skip


@gluon.jit
def _parts_of(row, q_len, ROWS: gl.constexpr):
    return gl.maximum((gl.minimum(q_len - row, ROWS) + 127) // 128, 1)


@gluon.jit
def _consumer(
    HALF: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, out_desc, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty, tiles, jobs,
    heads, programs, shared, scale, out_scale,
):  # fmt: skip
    M: gl.constexpr = 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    Q_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    dtype: gl.constexpr = k_s.dtype
    zero = gl.zeros([M, N], gl.float32, S_L)
    t = 0  # parts of jobs so far: 128 queries each
    base = 0  # key tiles before this part's first
    number = 0
    sample, row, q_start, q_len, _, k_len, head = record_of(tiles, dealt(0, 0, programs, 1), jobs, heads)
    valid = sample >= 0
    n = key_tiles(k_len, N)
    parts = _parts_of(row, q_len, ROWS)
    u = 0
    p = gl.convert_layout(zero.to(dtype), P_L, assert_trivial=True)
    q = gl.zeros([M, D], dtype, Q_L)
    if valid:
        mbarrier.wait(q_full.index(0), 0)
        q = q_s.index(0).reshape([2 * M, D]).slice(HALF * M, M, 0).load(Q_L)
        mbarrier.wait(full.index(0), 0)
        s = warpgroup_mma(q, k_s.index(0).reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        # Not before a product has used them: a copy that is mostly zeros can be there before they have been read.
        mbarrier.arrive(q_empty.index(0), count=1)
        p = gl.convert_layout(weights_of(s, scale, out_scale, ACT, FOLD, dtype).to(dtype), P_L, assert_trivial=True)
    while valid:
        kept = n <= STAGES  # keys and values stay for the job's next part
        leaving = (u + 1 == parts) | (not kept)
        acc = gl.zeros([M, D], gl.float32, O_L)
        for j in range(1, n):
            at_k = base + j
            stage = at_k % STAGES
            before = (at_k - 1) % STAGES
            mbarrier.wait(full.index(stage), (at_k // STAGES) & 1)
            s_f = warpgroup_mma(q, k_s.index(stage).reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
            acc_f = warpgroup_mma(p, v_s.index(before).reshape([N, D]), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_f])
            w = weights_of(s, scale, out_scale, ACT, FOLD, dtype)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            mbarrier.arrive(empty.index(before), count=1, pred=leaving)
            p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
        at, end, last = row + u * 128 + HALF * M, q_start + q_len, q_len
        if shared > 0:
            end = sample * shared + q_len
        column = head * D
        before = (base + n - 1) % STAGES
        # The last product of this part beside the first of the next.
        t += 1
        u += 1
        base += gl.where(leaving, n, 0)
        if u == parts:
            number += 1
            u = 0
            sample, row, q_start, q_len, _, k_len, head = record_of(tiles, dealt(number, 0, programs, 1), jobs, heads)
            valid = sample >= 0
            n = key_tiles(k_len, N)
            parts = _parts_of(row, q_len, ROWS)
        if valid:
            mbarrier.wait(q_full.index(t % 2), (t // 2) & 1)
            q = q_s.index(t % 2).reshape([2 * M, D]).slice(HALF * M, M, 0).load(Q_L)
            stage = base % STAGES
            mbarrier.wait(full.index(stage), (base // STAGES) & 1)
            s_f = warpgroup_mma(q, k_s.index(stage).reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
            acc_f = warpgroup_mma(p, v_s.index(before).reshape([N, D]), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_f])
            mbarrier.arrive(q_empty.index(t % 2), count=1)
            w = weights_of(s, scale, out_scale, ACT, FOLD, dtype)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            mbarrier.arrive(empty.index(before), count=1, pred=leaving)
            p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
        else:
            acc_f = warpgroup_mma(p, v_s.index(before).reshape([N, D]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
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
    ROWS: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, q_desc, k_desc, v_desc, q_s, k_s,
    v_s, q_full, q_empty, full, empty, tiles, jobs, heads, programs,
):  # fmt: skip
    it = 0
    t = 0
    number = 0
    sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, dealt(0, 0, programs, 1), jobs, heads)
    while sample >= 0:
        n = key_tiles(k_len, N)
        parts = _parts_of(row, q_len, ROWS)
        for u in range(parts):
            slot = t % 2
            mbarrier.wait(q_empty.index(slot), ((t // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            q_x = gl.where(k_len > 0, END - q_len + row + u * 128, END)
            tma.async_copy_global_to_shared(
                q_desc, [END, q_start + q_len, q_x, head * D], q_full.index(slot), q_s.index(slot)
            )  # fmt: skip
            t += 1
            if (u == 0) | (n > STAGES):
                for j in range(n):
                    stage = it % STAGES
                    mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
                    mbarrier.expect(full.index(stage), 2 * k_desc.block_type.nbytes)
                    at = [END, k_start + k_len, END - k_len + j * N, head * D]
                    tma.async_copy_global_to_shared(k_desc, at, full.index(stage), k_s.index(stage))
                    tma.async_copy_global_to_shared(v_desc, at, full.index(stage), v_s.index(stage))
                    it += 1
        number += 1
        sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, dealt(number, 0, programs, 1), jobs, heads)


@gluon.jit(do_not_specialize=["jobs", "heads", "programs", "shared"])
def _gdpa_short(
    q_desc, k_desc, v_desc, out_desc, tiles, jobs, heads, programs, shared, scale, out_scale, ACT: gl.constexpr,
    FOLD: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 128, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], v_desc.layout)
    o_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    consumed = (
        out_desc, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty, tiles, jobs, heads, programs, shared, scale,
        out_scale,
    )  # fmt: skip
    produced = (q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, full, empty, tiles, jobs, heads, programs)
    gl.warp_specialize(
        [
            (_consumer, (0, ACT, FOLD, ROWS, N, D, STAGES) + consumed),
            (_consumer, (1, ACT, FOLD, ROWS, N, D, STAGES) + consumed),
            (_producer, (ROWS, N, D, STAGES) + produced),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
