"""Backward of GDPA on Hopper, short keys: 128 keys stay while all queries of the sample pass; five products.

A job is a sample and a head; a pass, 128 of its keys. Two consumers (a warpgroup each) hold dk and dv of 64 keys each
in registers. Queries and d_out pass through a ring, 64 rows a tile, which a producer (a warp) fills ahead of them.

    s^T = k q^T, dp^T = v d_out^T    keys by queries, so that weights and their gradients are register operands of
    dv += p^T d_out, dk += ds^T q    and ds^T goes through shared memory for
    dq = ds k                        of which each consumer computes half of the columns over all 128 keys.

dq of a tile is computed with the next one's dk, so that neither consumer has to wait for the other's ds. With three
buffers of ds in turn none is written while it is read: who has seen the other's ds of a tile knows that the other has
done with that of two tiles before it.

dq of a sample of one pass leaves at once. Of more, each pass adds to what the one before left in fp32: the thread that
wrote it reads it, so that nothing has to wait for anything and every run gives the same bits. Passes walk the queries
forth and back in turn: what was written last is read first, from L2.

Between passes only keys are waited for: queries, d_out and values come while the last tile is worked at, and dv and dk
leave through a place of their own. In a pass of up to 64 keys the second consumer only computes its columns of dq.

No masks: a descriptor (launch.ragged) reads zeros behind a sample's end, act(0) = 0, and what it stores stops there. A
job without keys reads no queries and one without queries no keys, so that whatever they are its gradients are 0.

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
from gem.kernels.hopper.claims import claim, counter
from gem.kernels.hopper.parts import END, LAYOUT, key_tiles, lean, record_of
from gem.kernels.hopper.passes import (
    BLOCKS,
    HEAD,
    K_END,
    K_X,
    PART,
    PARTS,
    PLACE,
    Q_END,
    Q_LEN,
    TILES,
    DqLaunch,
    barriers,
    field,
    give_back,
    load_tile,
    nothing,
    put,
    rows_out,
    store,
    weights,
)
from gem.kernels.hopper.slopes import slope_factor, value_factor
from gem.kernels.hopper.sums import room
from gem.kernels.launch import PLANS, Launch, folds, kind_of, remember
from gem.kernels.schedule import Batch, Limits

DS = gl.constexpr(3)  # buffers of ds of a consumer


@dataclass(frozen=True)
class Short:
    """What the kernel may do in more than one way."""

    buffers: int  # tiles of queries or d_out in shared memory


# A sample and head is one program's: beyond these it would keep the others waiting.
LIMITS = Limits(queries=8192, keys=512)
VARIANTS = {64: Short(10), 128: Short(4)}


def launch_of(variant: Short, head_dim: int, activation: str, fold: bool, lean: bool) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``run``."""
    return DqLaunch(
        _backward_short, BUFFERS=variant.buffers, ACT=activation, FOLD=fold, LEAN=lean, D=head_dim, warps=4,
        ragged=dict.fromkeys(range(6), 64), layout=LAYOUT,
    )  # fmt: skip


def run(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, batch: Batch, *,
    activation: str, qk_scale: float, out_scale: float = 1.0, sums: Tensor | None = None, variant: Short | None = None,
) -> None:  # fmt: skip
    """Gradients of samples within LIMITS into dq, dk, dv, all contiguous.

    Rows of other samples and behind the last offsets stay as they are. ``dq`` is of q's type or fp32, for
    ``batch.shared`` queries [B * shared, H, D] as d_out is. Inputs, dk and dv must suit launch.tma_fits. ``sums``:
    memory for parts of dq, as of ``sums.room``.
    """
    heads, head_dim = k_THD.shape[1:]
    variant = variant or VARIANTS[head_dim]
    kind = kind_of(batch, q_THD, k_THD, v_THD, d_out_THD)
    small = lean(activation, q_THD.dtype, qk_scale)
    key = ("gluon backward, short", kind, activation, variant, small, dq.dtype)
    run_it = PLANS.get(key)
    if run_it is None:
        run_it = launch_of(variant, head_dim, activation, folds(activation, q_THD), small)
        if kind is not None:
            remember(key, run_it)
    samples = batch.samples(LIMITS)
    jobs = samples.shape[0] * heads
    if jobs >= 2**30:
        raise ValueError(f"the Gluon kernels count jobs in 32 bits, got {jobs} of samples and heads; accepted: 2**30")
    programs = min(jobs, launch.multiprocessors(k_THD.device))
    shared = batch.shared if batch.q_offsets is None else 0
    # Tile i of a sample is number start // 64 + sample + i: no two are the same.
    parts = room(dq.shape[0], batch.size, heads, head_dim, k_THD.device) if sums is None else sums
    run_it(
        (programs,), d_out_THD, q_THD, k_THD, v_THD, dk, dv, dq.view(dq.shape[0], 2 * heads, head_dim // 2), parts,
        samples, counter(k_THD.device), jobs, heads, shared, qk_scale, out_scale,
    )  # fmt: skip


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def scores_of(W: gl.constexpr, k_s, v_s, ring, full, it, D: gl.constexpr, BUFFERS: gl.constexpr):
    """Scores of a tile and gradients of its weights, keys by queries, in the queue."""
    k = k_s.index(W + nothing(it)).reshape([64, D])
    v = v_s.index(W + nothing(it)).reshape([64, D])
    zero = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    at = (2 * it) % BUFFERS
    mbarrier.wait(full.index(at), ((2 * it) // BUFFERS) & 1)
    scores = warpgroup_mma(k, ring.index(at).reshape([64, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    at = (2 * it + 1) % BUFFERS
    mbarrier.wait(full.index(at), ((2 * it + 1) // BUFFERS) & 1)
    d_weights = warpgroup_mma(v, ring.index(at).reshape([64, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    return scores, d_weights


@gluon.jit
def _part(W: gl.constexpr, job_s, t, parts, tile, heads, D: gl.constexpr):
    """Where a thread has its numbers of a tile's sum, 16 bytes at a time:
    [column / 8, warp, row % 8, column / 2 % 4, row / 8 % 2, column % 2].
    """
    number = (field(job_s, t, PART) + tile) * heads + field(job_s, t, HEAD)
    base = parts + number.to(gl.int64) * (64 * D) + W * (32 * D)
    return base + gl.arange(0, 32 * D, gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def so_far(W: gl.constexpr, job_s, t, parts, tile, heads, D: gl.constexpr):
    """What passes before this one left of dq of 64 queries."""
    H_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    dq = gl.zeros([64, D // 2], gl.float32, H_L)
    if field(job_s, t, PLACE) > 1:
        x = gl.load(_part(W, job_s, t, parts, tile, heads, D), cache_modifier=".cg")
        x = x.reshape([D // 16, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, D // 2])
        dq = gl.convert_layout(x, H_L, assert_trivial=True)
    return dq


@gluon.jit
def _wait_ds(ds_full, it):
    mbarrier.wait(ds_full.index(it % DS), (it // DS) & 1)


@gluon.jit
def add_dq(W: gl.constexpr, dq, ds_s, k_s, it, blocks, D: gl.constexpr):
    """This consumer's columns of dq with the pass's share of a tile, in the queue."""
    slot = it % DS
    k = k_s.index(nothing(it)).reshape([64, D]).slice(W * (D // 2), D // 2, dim=1)
    dq = warpgroup_mma(ds_s.index(slot).permute((1, 0)), k, dq, is_async=True)
    for j in range(1, blocks):
        k = k_s.index(j).reshape([64, D]).slice(W * (D // 2), D // 2, dim=1)
        dq = warpgroup_mma(ds_s.index(j * DS + slot).permute((1, 0)), k, dq, is_async=True)
    return dq


@gluon.jit
def share(W: gl.constexpr, ds, ds_s, ds_full, it, dtype: gl.constexpr, D: gl.constexpr):
    """Gradients of scores as a register operand, and to both consumers."""
    P_L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    ds16 = ds.to(dtype)
    ds_s.index(W * DS + it % DS).store(ds16)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(it % DS), count=1)
    return gl.convert_layout(ds16, P_L, assert_trivial=True)


@gluon.jit
def give_dq(
    W: gl.constexpr, dq, dq_s, dq_to, parts, job_s, t, it, tile, heads, factor, D: gl.constexpr, F32: gl.constexpr,
):  # fmt: skip
    """What is there of dq of 64 queries: out, or where the next pass finds it."""
    if field(job_s, t, PLACE) % 2 == 0:
        FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        x = dq.reshape([4, 2, 8, D // 16, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([32 * D])
        gl.store(_part(W, job_s, t, parts, tile, heads, D), gl.convert_layout(x, FLAT, assert_trivial=True))
    else:
        rows_out(W, dq, dq_s, dq_to, job_s, t, it, tile, heads, factor, D, F32)


@gluon.jit
def _walk(
    W: gl.constexpr, BUFFERS: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr, D: gl.constexpr,
    F32: gl.constexpr, dk_desc, dv_desc, dq_to, parts, ring, k_s, v_s, out_s, ds_s, dq_s, job_s, full, empty, k_empty,
    v_empty, ds_full, heads, scale, out_scale, it, t, n, tile, step, blocks,
):  # fmt: skip
    """A pass with 64 keys of this consumer's own. Returns the number of tiles so far."""
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dtype: gl.constexpr = ring.dtype
    dq_factor = slope_factor(scale, out_scale, ACT, FOLD, LEAN)
    zero = gl.zeros([64, D], gl.float32, A_L)
    s_f, dw_f = scores_of(W, k_s, v_s, ring, full, it, D, BUFFERS)
    d_out = ring.index((2 * it + 1) % BUFFERS).reshape([64, D])
    q = ring.index((2 * it) % BUFFERS).reshape([64, D])
    s = warpgroup_mma_wait(1, deps=[s_f])
    p, slope = weights(s, scale, out_scale, ACT, FOLD, LEAN, dtype, D)
    dv_f = warpgroup_mma(p, d_out, zero, use_acc=False, is_async=True)
    dw = warpgroup_mma_wait(1, deps=[dw_f])
    if n == 1:
        mbarrier.arrive(v_empty.index(W), count=1)
    ds = share(W, slope * dw, ds_s, ds_full, it, dtype, D)
    dk_f = warpgroup_mma(ds, q, zero, use_acc=False, is_async=True)
    dv, dk = warpgroup_mma_wait(0, deps=[dv_f, dk_f])
    give_back(empty, it, BUFFERS)
    it += 1
    for i in range(1, n):
        s_f, dw_f = scores_of(W, k_s, v_s, ring, full, it, D, BUFFERS)
        d_out = ring.index((2 * it + 1) % BUFFERS).reshape([64, D])
        q = ring.index((2 * it) % BUFFERS).reshape([64, D])
        # Slopes beside the product of d_weights, ds beside that of dv. What keeps ptxas from waiting for the former
        # before it computes slopes is that a branch, the wait for ds, lies between.
        s = warpgroup_mma_wait(1, deps=[s_f])
        p, slope = weights(s, scale, out_scale, ACT, FOLD, LEAN, dtype, D)
        dv_f = warpgroup_mma(p, d_out, dv, is_async=True)
        # When ds of the last tile is there, the other one's product of three tiles before has ended.
        _wait_ds(ds_full, it - 1)
        dw = warpgroup_mma_wait(1, deps=[dw_f])
        if i + 1 == n:
            mbarrier.arrive(v_empty.index(W), count=1)
        tma.store_wait(0)
        ds = share(W, slope * dw, ds_s, ds_full, it, dtype, D)
        dq = so_far(W, job_s, t, parts, tile, heads, D)
        dq_f = add_dq(W, dq, ds_s, k_s, it - 1, blocks, D)
        dk_f = warpgroup_mma(ds, q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq_f])
        give_dq(W, dq, dq_s, dq_to, parts, job_s, t, it, tile, heads, dq_factor, D, F32)
        tile += step
        dv, dk = warpgroup_mma_wait(0, deps=[dv_f, dk_f])
        give_back(empty, it, BUFFERS)
        it += 1
    k_end = field(job_s, t, K_END)
    k_x = field(job_s, t, K_X) + W * 64
    column = field(job_s, t, HEAD) * D
    # While the other consumer may have to come up.
    tma.store_wait(0)
    dv = dv * value_factor(scale, out_scale, ACT, FOLD, LEAN)
    store(out_s.index(W + nothing(it)), dv_desc, dv, k_end, k_x, column, D)
    dq = so_far(W, job_s, t, parts, tile, heads, D)
    _wait_ds(ds_full, it - 1)
    dq_f = add_dq(W, dq, ds_s, k_s, it - 1, blocks, D)
    dq = warpgroup_mma_wait(0, deps=[dq_f])
    mbarrier.arrive(k_empty, count=1)
    tma.store_wait(0)
    give_dq(W, dq, dq_s, dq_to, parts, job_s, t, it, tile, heads, dq_factor, D, F32)
    store(out_s.index(W + nothing(it)), dk_desc, dk * dq_factor, k_end, k_x, column, D)
    return it


@gluon.jit
def _consumer(
    W: gl.constexpr, BUFFERS: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr, D: gl.constexpr,
    F32: gl.constexpr, dk_desc, dv_desc, dq_to, parts, ring, k_s, v_s, out_s, ds_s, dq_s, job_s, full, empty, k_full,
    k_empty, v_full, v_empty, ds_full, job_full, job_empty, heads, scale, out_scale,
):  # fmt: skip
    dq_factor = slope_factor(scale, out_scale, ACT, FOLD, LEAN)
    it = 0
    t = 0
    mbarrier.wait(job_full.index(0), 0)
    n = field(job_s, 0, TILES)
    while n > 0:
        back = (field(job_s, t, PLACE) // 2) % 2
        tile, step = back * (n - 1), 1 - 2 * back
        blocks = field(job_s, t, BLOCKS)
        mbarrier.wait(v_full.index(W), t & 1)
        mbarrier.wait(k_full, t & 1)
        if blocks > W:
            it = _walk(
                W, BUFFERS, ACT, FOLD, LEAN, D, F32, dk_desc, dv_desc, dq_to, parts, ring, k_s, v_s, out_s, ds_s, dq_s,
                job_s, full, empty, k_empty, v_empty, ds_full, heads, scale, out_scale, it, t, n, tile, step, blocks,
            )  # fmt: skip
        else:
            mbarrier.arrive(v_empty.index(W), count=1)
            for _ in range(n):
                mbarrier.arrive(ds_full.index(it % DS), count=1)
                dq = so_far(W, job_s, t, parts, tile, heads, D)
                _wait_ds(ds_full, it)
                dq_f = add_dq(W, dq, ds_s, k_s, it, blocks, D)
                dq = warpgroup_mma_wait(0, deps=[dq_f])
                tma.store_wait(0)
                give_dq(W, dq, dq_s, dq_to, parts, job_s, t, it, tile, heads, dq_factor, D, F32)
                give_back(empty, it, BUFFERS)
                tile += step
                it += 1
            mbarrier.arrive(k_empty, count=1)
        mbarrier.arrive(job_empty.index(t % 2), count=1)
        t += 1
        mbarrier.wait(job_full.index(t % 2), (t // 2) & 1)
        n = field(job_s, t, TILES)
    tma.store_wait(0)


# -- producer ----------------------------------------------------------------------------------------------------------


@gluon.jit
def hand_on(job_s, job_full, job_empty, t, sample, q_start, q_len, k_start, k_len, head, kt, shared):
    """Pass ``t`` to the consumers. Returns its query tiles."""
    slot = t % 2
    mbarrier.wait(job_empty.index(slot), ((t // 2) & 1) ^ 1)
    n = gl.where(sample >= 0, gl.maximum((q_len + 63) // 64, 1), 0)
    row = q_start
    if shared > 0:
        row = sample * shared
    last = gl.where(kt + 1 == key_tiles(k_len, 128), 1, 0)
    put(job_s, t, TILES, n)
    put(job_s, t, K_END, k_start + k_len)
    put(job_s, t, K_X, END - k_len + kt * 128)
    put(job_s, t, Q_END, row + q_len)
    put(job_s, t, Q_LEN, q_len)
    put(job_s, t, HEAD, head)
    put(job_s, t, PART, row // 64 + sample)
    put(job_s, t, PLACE, 2 * kt + last)
    put(job_s, t, BLOCKS, gl.where(k_len - kt * 128 > 64, 2, 1))
    mbarrier.arrive(job_full.index(slot), count=1)
    return n


@gluon.jit
def load_keys(desc, k_s, k_full, k_empty, t, k_end, x, column):
    mbarrier.wait(k_empty, (t & 1) ^ 1)
    mbarrier.expect(k_full, 2 * desc.block_type.nbytes)
    for w in gl.static_range(2):
        tma.async_copy_global_to_shared(desc, [END, k_end, x + w * 64, column], k_full, k_s.index(w))


@gluon.jit
def load_values(desc, v_s, v_full, v_empty, t, k_end, x, column):
    for w in gl.static_range(2):
        mbarrier.wait(v_empty.index(w), (t & 1) ^ 1)
        mbarrier.expect(v_full.index(w), desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [END, k_end, x + w * 64, column], v_full.index(w), v_s.index(w))


@gluon.jit
def _producer(
    BUFFERS: gl.constexpr, D: gl.constexpr, o_desc, q_desc, k_desc, v_desc, samples, claimed, ring, k_s, v_s, job_s,
    full, empty, k_full, k_empty, v_full, v_empty, job_full, job_empty, jobs, heads, shared,
):  # fmt: skip
    it = 0
    t = 0
    kt = 0
    job = claim(claimed)
    sample, _, q_start, q_len, k_start, k_len, head = record_of(samples, job, jobs, heads)
    n = hand_on(job_s, job_full, job_empty, 0, sample, q_start, q_len, k_start, k_len, head, 0, shared)
    while n > 0:
        back = kt % 2
        step = 64 - 128 * back
        k_end, column = k_start + k_len, head * D
        o_end = q_start + q_len
        if shared > 0:
            o_end = sample * shared + q_len
        q_x = gl.where(k_len > 0, END - q_len + back * (n - 1) * 64, END)
        k_x = gl.where(q_len > 0, END - k_len + kt * 128, END)
        for i in range(n):
            load_tile(q_desc, o_desc, ring, full, empty, it, q_start + q_len, o_end, q_x, column, BUFFERS)
            it += 1
            q_x += gl.where(k_len > 0, step, 0)
            # In the order in which the pass before frees its places.
            if i == gl.minimum(BUFFERS // 2 - 2, n - 1):
                load_values(v_desc, v_s, v_full, v_empty, t, k_end, k_x, column)
            if i == gl.minimum(BUFFERS // 2 - 1, n - 1):
                load_keys(k_desc, k_s, k_full, k_empty, t, k_end, k_x, column)
                if kt + 1 == key_tiles(k_len, 128):
                    job = claim(claimed)
        kt += 1
        t += 1
        if kt == key_tiles(k_len, 128):
            kt = 0
            sample, _, q_start, q_len, k_start, k_len, head = record_of(samples, job, jobs, heads)
        n = hand_on(job_s, job_full, job_empty, t, sample, q_start, q_len, k_start, k_len, head, kt, shared)


# -- kernel ------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["jobs", "heads", "shared"])
def _backward_short(
    o_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc, dq_to, parts, samples, claimed, jobs, heads, shared, scale,
    out_scale, BUFFERS: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BUFFERS >= 4, "BUFFERS: 4 at least")
    # A pointer where dq is fp32, for which there is no room.
    F32: gl.constexpr = isinstance(dq_to.type, gl.pointer_type)
    dtype: gl.constexpr = k_desc.dtype
    D_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], v_desc.layout)
    out_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], dk_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [2 * DS, 64, 64], D_L)
    if F32:
        dq_s = v_s
    else:
        dq_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D // 2], dq_to.layout)
    job_s = gl.allocate_shared_memory(gl.int32, [2 * PARTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(BUFFERS, 1), barriers(BUFFERS, 2)
    k_full, k_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    v_full, v_empty = barriers(2, 1), barriers(2, 1)
    ds_full = barriers(DS, 2)
    job_full, job_empty = barriers(2, 1), barriers(2, 2)
    fence_async_shared()
    consumed = (
        dk_desc, dv_desc, dq_to, parts, ring, k_s, v_s, out_s, ds_s, dq_s, job_s, full, empty, k_full, k_empty, v_full,
        v_empty, ds_full, job_full, job_empty, heads, scale, out_scale,
    )  # fmt: skip
    produced = (
        o_desc, q_desc, k_desc, v_desc, samples, claimed, ring, k_s, v_s, job_s, full, empty, k_full, k_empty, v_full,
        v_empty, job_full, job_empty, jobs, heads, shared,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (0, BUFFERS, ACT, FOLD, LEAN, D, F32) + consumed),
            (_consumer, (1, BUFFERS, ACT, FOLD, LEAN, D, F32) + consumed),
            (_producer, (BUFFERS, D) + produced),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
