"""Forward of GDPA on Hopper, long keys, without warp specialisation: for suites/throughput/gdpa_ablation.toml alone.

No call is given it unless it asks for it by its variant. As in gdpa_long, programs are persistent over the same list,
products of two tiles stand in the tensor core's queue together, across jobs too, weights go from step to step in fp32
and nothing is masked. But all 8 warps are of one kind: they work at 128 queries in step, meet at a barrier when both
halves have read a stage of the ring, and then ask the copy engine for the tile that comes into it themselves. Weights
are computed beside the own product of the tile before, and beside nobody else's.

Legend: T rows of all samples, H heads, D head_dim, M queries of a tile (128), N keys of a tile.
"""

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
from gem.kernels.hopper.parts import END, LAYOUT, dealt, factor_of, key_tiles, record_of, store_tile, weights_of
from gem.kernels.launch import Launch

PLAIN = {64: Variant("plain", 128, 128, 4), 128: Variant("plain", 128, 128, 2)}  # as many stages as fit


def launch_of(variant: Variant, head_dim: int, activation: str, fold: bool, lean: bool) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``gem.kernels.hopper.ops``."""
    return Launch(
        _gdpa_plain, ZIGZAG=int(variant.zigzag), ACT=activation, FOLD=fold, LEAN=lean, N=variant.keys, D=head_dim,
        STAGES=variant.stages, warps=8, ragged={0: variant.rows, 1: variant.keys, 2: variant.keys, 3: variant.rows},
        layout=LAYOUT,
    )  # fmt: skip


@gluon.jit
def _load(ahead, it, ring, ZIGZAG: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Ask for what comes into a stage that all have left: keys of a tile, values of the one before, a job's queries.

    ``it``: tiles before this stage's, or as many less a round of the ring. ``ahead``: how far loading is: jobs begun,
    tiles left of the last (-1 = there is nothing to come), where its last tile of keys lay, and the next job's record.
    Where there are no keys, or no values, zeros from behind the end are read. A slot of queries is free by then: a job
    has a tile at least, so all scores of STAGES jobs ago have been waited for.
    """
    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, full, tiles, jobs, heads, programs = ring
    t, left, x, end, column, sample, row, q_start, q_len, k_start, k_len, head = ahead
    gl.thread_barrier()
    if left >= 0:
        stage = it % STAGES
        mbarrier.expect(full.index(stage), 2 * k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [END, end, x, column], full.index(stage), v_s.index(stage))
        left -= 1
        x += N
        if left < 0:
            x = gl.where(sample >= 0, END - k_len, END)
            if sample >= 0:
                slot = t % STAGES
                left = key_tiles(k_len, N) - 1
                end = k_start + k_len
                column = head * D
                mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
                q_x = gl.where(k_len > 0, END - q_len + row, END)
                tma.async_copy_global_to_shared(
                    q_desc, [END, q_start + q_len, q_x, column], q_full.index(slot), q_s.index(slot)
                )  # fmt: skip
                t += 1
                job = dealt(t, 0, programs, 1, ZIGZAG)
                sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, job, jobs, heads)
        tma.async_copy_global_to_shared(k_desc, [END, end, x, column], full.index(stage), k_s.index(stage))
    return t, left, x, end, column, sample, row, q_start, q_len, k_start, k_len, head


@gluon.jit(do_not_specialize=["jobs", "heads", "programs", "shared"])
def _gdpa_plain(
    q_desc, k_desc, v_desc, out_desc, tiles, jobs, heads, programs, shared, scale, out_scale, ZIGZAG: gl.constexpr,
    ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = 128
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    dtype: gl.constexpr = k_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, N, D], v_desc.layout)
    o_s = gl.allocate_shared_memory(dtype, [1, 1, M, D], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    factor = factor_of(scale, out_scale, ACT, LEAN)
    zero = gl.zeros([M, N], gl.float32, S_L)
    sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, dealt(0, 0, programs, 1, ZIGZAG), jobs, heads)
    valid = sample >= 0
    ring = (q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, full, tiles, jobs, heads, programs)
    left = gl.where(valid, 0, -1)
    x = gl.to_tensor(END)
    ahead = (0, left, x, 0, 0, sample, row, q_start, q_len, k_start, k_len, head)
    for i in gl.static_range(STAGES):
        ahead = _load(ahead, i, ring, ZIGZAG, N, D, STAGES)
    t = 0
    it = 0
    w = zero
    q = q_s.index(0).reshape([M, D])
    if valid:
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(full.index(0), 0)
        k = k_s.index(0).reshape([N, D]).permute((1, 0))
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        ahead = _load(ahead, it, ring, ZIGZAG, N, D, STAGES)
        w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
        it += 1
    while valid:
        acc = gl.zeros([M, D], gl.float32, O_L)
        for _ in range(1, key_tiles(k_len, N)):
            stage = it % STAGES
            p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
            mbarrier.wait(full.index(stage), (it // STAGES) & 1)
            k = k_s.index(stage).reshape([N, D]).permute((1, 0))
            s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_f])
            w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            ahead = _load(ahead, it, ring, ZIGZAG, N, D, STAGES)
            it += 1
        end = q_start + q_len
        if shared > 0:
            end = sample * shared + q_len
        at, last, column = row, q_len, head * D
        t += 1
        job = dealt(t, 0, programs, 1, ZIGZAG)
        sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, job, jobs, heads)
        valid = sample >= 0
        stage = it % STAGES
        p = gl.convert_layout(w.to(dtype), P_L, assert_trivial=True)
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        # The last product of this job, and the first of the next beside this one's way out.
        if valid:
            slot = t % STAGES
            mbarrier.wait(q_full.index(slot), (t // STAGES) & 1)
            q = q_s.index(slot).reshape([M, D])
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            k = k_s.index(stage).reshape([N, D]).permute((1, 0))
            s_f = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc_f])
            store_tile(o_s, out_desc, acc, factor, at, end, last, column, FOLD, M, D)
            s = warpgroup_mma_wait(0, deps=[s_f])
            ahead = _load(ahead, it, ring, ZIGZAG, N, D, STAGES)
            w = weights_of(s, scale, out_scale, ACT, FOLD, LEAN, dtype)
            it += 1
        else:
            acc_f = warpgroup_mma(p, v_s.index(stage).reshape([N, D]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_f])
            store_tile(o_s, out_desc, acc, factor, at, end, last, column, FOLD, M, D)
    tma.store_wait(0)
