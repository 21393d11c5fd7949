"""Forward of jagged softmax attention on Hopper, short keys: the keys stay, the queries pass.

As gdpa_short: jobs of up to ROWS queries of a sample and head, claimed; two or three consumers that take blocks of 64
queries in turn; keys and values in a ring, a tile a stage, where they stay for the job's blocks if they fit; products
of two tiles in the tensor core's queue together, across blocks and jobs too (VFIRST: whose goes first there). How
scores become weights stands in ``lazy_softmax.py``. The instructions beside the products are what bounds this kernel
(docs/measured.md), so:

- A tile that the sample's keys do not fill is their last N instead: all scores are real, nothing is masked. The keys
  that the tile before had already are left out of the sums by a factor, for which an addition becomes a multiply-add,
  and their values are read as zeros. Only a sample of fewer than N keys has scores to mask.
- The first product of a block overwrites its sums of values, so that none are set to zero.
- A block begins at the head of the loop, with the last product of the one before: its queries are not carried from one
  turn to the next, which would take 16-bit numbers apart and put them together. The first block finds weights of 0.

No causal mask and no window: with those a block of queries sees part of the keys, and jfa_long visits fewer tiles.

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
from gem.kernels.hopper.lazy_softmax import averages, nothing_seen, shrunk, weights_of_first, weights_of_next
from gem.kernels.hopper.parts import END, LAYOUT, blocks_of, key_tiles, record_of, store_tile
from gem.kernels.launch import Launch


def launch_of(variant: Variant, head_dim: int) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``gem.kernels.hopper.attention``."""
    return Launch(
        _jfa_short, CONSUMERS=variant.consumers, SLOTS=variant.q_slots, VFIRST=int(variant.values_first),
        ROWS=variant.rows, N=variant.keys, D=head_dim, STAGES=variant.stages, warps=4,
        ragged={0: 64, 1: variant.keys, 2: variant.keys, 3: 64}, layout=LAYOUT,
    )  # fmt: skip


@gluon.jit
def _not_twice(k_len, n, N: gl.constexpr, S_L: gl.constexpr):
    """[N] of a sample's last tile: 1 for keys of the sample that no tile before had, else 0."""
    at = gl.arange(0, N, layout=gl.SliceLayout(0, S_L))
    low = gl.where(n > 1, n * N - k_len, 0)
    high = gl.where(n > 1, N, k_len)
    return gl.where((at >= low) & (at < high), 1.0, 0.0)


@gluon.jit
def _next_stage(stage, parity, STAGES: gl.constexpr):
    stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    return stage, gl.where(stage == 0, parity ^ 1, parity)


@gluon.jit
def _consumer(
    W: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, VFIRST: gl.constexpr, ROWS: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, out_desc, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty,
    records, lse, shared, out_rows, scale,
):  # fmt: skip
    M: gl.constexpr = 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    Q_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    dtype: gl.constexpr = k_s.dtype
    zero = gl.zeros([M, N], gl.float32, S_L)
    t = 0  # own blocks so far
    u = 0  # own blocks of this job so far
    mbarrier.wait(full.index(0), 0)
    sample, row, q_start, q_len, k_len, head = received(records, 0)
    valid = sample >= 0
    n = key_tiles(k_len, N)
    new = _not_twice(k_len, n, N, S_L)
    blocks = blocks_of(W, row, q_len, n, CONSUMERS, ROWS, STAGES)
    first = 0  # stage of this block's first keys
    parity = 0  # of its barrier
    # What is left of the block before: there is none, whose rows nobody stores.
    w = zero
    origin, total = nothing_seen(N)
    acc = gl.zeros([M, D], gl.float32, O_L)
    before = 0  # stage of its last keys
    leaving = t > 0  # whether that is to be given back
    several = t > 0  # whether it has sums of values
    at, start, end, of_head = row, q_start, q_start, head
    last = 0
    while valid:
        # The last product of the block before beside the first of this one.
        p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
        slot = W * SLOTS + t % SLOTS
        mbarrier.wait(q_full.index(slot), (t // SLOTS) & 1)
        q = q_s.index(slot).reshape([M, D]).load(Q_L)
        mbarrier.wait(full.index(first), parity)
        k = k_s.index(first).reshape([N, D]).permute((1, 0))
        v = v_s.index(before).reshape([N, D])
        if VFIRST:
            acc_f = warpgroup_mma(p, v, acc, use_acc=several, is_async=True)
            s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc_f])
            mbarrier.arrive(empty.index(before), count=1, pred=leaving)
            out = averages(acc, origin, total, lse, of_head, out_rows, start, at, last, N, O_L)
            store_tile(o_s.index(W), out_desc, out, 1.0, at, end, last, of_head * D, True, M, D)
            s = warpgroup_mma_wait(0, deps=[s_f])
            # Not before a product has used them: they may be read later than a copy that is mostly zeros arrives.
            mbarrier.arrive(q_empty.index(slot), count=1)
            w, origin, total = weights_of_first(s, new, k_len < N, scale, N, S_L)
        else:
            s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
            acc_f = warpgroup_mma(p, v, acc, use_acc=several, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_f])
            mbarrier.arrive(q_empty.index(slot), count=1)
            old_origin, old_total = origin, total
            w, origin, total = weights_of_first(s, new, k_len < N, scale, N, S_L)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            mbarrier.arrive(empty.index(before), count=1, pred=leaving)
            out = averages(acc, old_origin, old_total, lse, of_head, out_rows, start, at, last, N, O_L)
            store_tile(o_s.index(W), out_desc, out, 1.0, at, end, last, of_head * D, True, M, D)
        leaving = (u + 1 == blocks) | (n > STAGES)  # else keys and values stay for the job's next block
        before, now, several = first, parity, n < 0
        for _ in range(2, n):
            w, origin, total, acc, before, now = _another_tile(
                w, origin, total, acc, before, now, several, leaving, new, q, k_s, v_s, full, empty, scale, 0, N, D,
                STAGES, S_L, O_L, P_L,
            )  # fmt: skip
            several = n > 1
        if n > 1:
            w, origin, total, acc, before, now = _another_tile(
                w, origin, total, acc, before, now, several, leaving, new, q, k_s, v_s, full, empty, scale, 1, N, D,
                STAGES, S_L, O_L, P_L,
            )  # fmt: skip
            several = n > 1
        at, start, last, of_head = row + (u * CONSUMERS + W) * M, q_start, q_len, head
        if shared > 0:
            start = sample * shared
        end = start + q_len
        t += 1
        u += 1
        if leaving:
            first, parity = _next_stage(before, now, STAGES)
        if u == blocks:
            u = 0
            mbarrier.wait(full.index(first), parity)
            sample, row, q_start, q_len, k_len, head = received(records, first)
            valid = sample >= 0
            n = key_tiles(k_len, N)
            new = _not_twice(k_len, n, N, S_L)
            blocks = blocks_of(W, row, q_len, n, CONSUMERS, ROWS, STAGES)
    if t > 0:
        p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
        acc_f = warpgroup_mma(p, v_s.index(before).reshape([N, D]), acc, use_acc=several, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_f])
        out = averages(acc, origin, total, lse, of_head, out_rows, start, at, last, N, O_L)
        store_tile(o_s.index(W), out_desc, out, 1.0, at, end, last, of_head * D, True, M, D)
    tma.store_wait(0)


@gluon.jit
def _another_tile(
    w, origin, total, acc, before, parity, several, leaving, new, q, k_s, v_s, full, empty, scale, LAST: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr, P_L: gl.constexpr,
):  # fmt: skip
    """Scores with the tile behind ``before`` while the weights of that one meet its values."""
    stage, parity = _next_stage(before, parity, STAGES)
    p = gl.convert_layout(w.to(k_s.dtype), P_L, assert_trivial=True)
    mbarrier.wait(full.index(stage), parity)
    zero = gl.zeros([64, N], gl.float32, S_L)
    s_f = warpgroup_mma(q, k_s.index(stage).reshape([N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    acc_f = warpgroup_mma(p, v_s.index(before).reshape([N, D]), acc, use_acc=several, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_f])
    w, origin, total, shrink = weights_of_next(s, new, origin, total, scale, LAST, N, S_L)
    acc = warpgroup_mma_wait(0, deps=[acc_f])
    mbarrier.arrive(empty.index(before), count=1, pred=leaving)
    return w, origin, total, shrunk(acc, shrink, D, O_L), stage, parity


@gluon.jit
def _producer(
    CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, full, empty, records, tiles, claimed,
    jobs, heads, group, programs,
):  # fmt: skip
    it = 0
    # Blocks of each consumer before this job. (Three expressions: carried values that start from one hang Gluon 3.6.)
    before_0 = 0
    before_1 = it * 1
    before_2 = it * 2
    job = first_job(claimed, 0, programs, 1, 1, 1)
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
                    if (u == 0) & (j == 0):
                        send(records, stage, sample, row, q_start, q_len, k_len, head)
                    mbarrier.expect(full.index(stage), 2 * k_desc.block_type.nbytes)
                    column = head // group * D
                    if (j + 1 < n) | (n == 1):
                        at = [END, k_start + k_len, END - k_len + j * N, column]
                        tma.async_copy_global_to_shared(k_desc, at, full.index(stage), k_s.index(stage))
                        tma.async_copy_global_to_shared(v_desc, at, full.index(stage), v_s.index(stage))
                    else:
                        # The last N keys; values with zeros for those that the tile before had: rows below 0.
                        tma.async_copy_global_to_shared(
                            k_desc, [END, k_start + k_len, END - N, column], full.index(stage), k_s.index(stage)
                        )
                        tma.async_copy_global_to_shared(
                            v_desc, [0, k_start + j * N, k_len - n * N, column], full.index(stage), v_s.index(stage)
                        )
                    it += 1
            if u == gl.maximum(rounds - 2, 0):
                job = claim(claimed)
        before_0 += rounds
        before_1 += blocks_of(1, row, q_len, n, CONSUMERS, ROWS, STAGES)
        before_2 += blocks_of(2, row, q_len, n, CONSUMERS, ROWS, STAGES)
        sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, job, jobs, heads)
    stage = it % STAGES
    mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
    send(records, stage, -1, 0, 0, 0, 0, 0)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit(do_not_specialize=["jobs", "heads", "group", "programs", "shared", "out_rows", "left", "right"])
def _jfa_short(
    q_desc, k_desc, v_desc, out_desc, lse, tiles, claimed, jobs, heads, group, programs, shared, out_rows, left, right,
    scale,
    CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, VFIRST: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
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
        out_desc, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty, records, lse, shared, out_rows, scale,
    )  # fmt: skip
    produced = (
        q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, full, empty, records, tiles, claimed, jobs, heads,
        group, programs,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, CONSUMERS, SLOTS, VFIRST, ROWS, N, D, STAGES) + consumed),
                (_consumer, (1, CONSUMERS, SLOTS, VFIRST, ROWS, N, D, STAGES) + consumed),
                (_producer, (CONSUMERS, SLOTS, ROWS, N, D, STAGES) + produced),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_consumer, (0, CONSUMERS, SLOTS, VFIRST, ROWS, N, D, STAGES) + consumed),
                (_consumer, (1, CONSUMERS, SLOTS, VFIRST, ROWS, N, D, STAGES) + consumed),
                (_consumer, (2, CONSUMERS, SLOTS, VFIRST, ROWS, N, D, STAGES) + consumed),
                (_producer, (CONSUMERS, SLOTS, ROWS, N, D, STAGES) + produced),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
