"""Backward of jagged softmax attention on Hopper, short keys: 128 keys stay while all queries of the sample pass.

The walk is that of backward_short: passes, ring, ds in shared memory, dq of a tile with the next one's dk. With softmax

    p = 2^(s - lse), ds = p (dp - delta)

where log-sum-exps and dots delta of a tile of queries come with it through the copy engine (``rows``). Weights are
computed as soon as scores are there and stay in fp32 until dp is: that is fewer instructions than once more.

No masks: behind a sample's end keys, queries and d_out are zeros, and a row has the log-sum-exp +inf. A weight is never
above 1, so that the scores of keys that are only zeros, which may lie far above a row's log-sum-exp, add 0 and no NaN.
A job without keys reads no queries and no rows, and one without queries no keys, whatever they are.

Legend: T rows of all samples, H heads, D head_dim.
"""

# ruff: noqa: RUF005
# Gluon knows no starred tuples.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

import triton.language as tl
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
from gem.kernels.hopper.backward_short import (
    DS,
    LIMITS,
    VARIANTS,
    Short,
    add_dq,
    give_dq,
    hand_on,
    load_keys,
    load_values,
    scores_of,
    share,
    so_far,
)
from gem.kernels.hopper.claims import claim, counter
from gem.kernels.hopper.parts import END, LAYOUT, LOG2E, key_tiles, record_of
from gem.kernels.hopper.passes import (
    BLOCKS,
    HEAD,
    K_END,
    K_X,
    PARTS,
    PLACE,
    TILES,
    DqLaunch,
    barriers,
    field,
    give_back,
    nothing,
    store,
)
from gem.kernels.hopper.rows import NOWHERE
from gem.kernels.hopper.sums import SumsLaunch, first_tile, room
from gem.kernels.launch import PLANS, Launch, kind_of, remember
from gem.kernels.schedule import Batch


class RowsLaunch(DqLaunch, SumsLaunch):
    """dq as DqLaunch takes it, and ``rows``."""


def launch_of(variant: Short, head_dim: int) -> Launch:
    """The kernel with the constants of a variant. Arguments: see ``run``."""
    return RowsLaunch(
        _jfa_backward_short, BUFFERS=variant.buffers, D=head_dim, warps=4,
        ragged=dict.fromkeys(range(6), 64) | {7: 2}, layout=LAYOUT,
    )  # fmt: skip


def run(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, rows: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    batch: Batch, *, qk_scale: float, sums: Tensor | None = None, variant: Short | None = None,
) -> None:  # fmt: skip
    """Gradients of samples within backward_short.LIMITS into dq, dk, dv, all contiguous; no mask.

    Rows of other samples and behind the last offsets stay as they are. ``rows``: of ``rows.of_rows``. ``dq`` is of q's
    type or fp32, for ``batch.shared`` queries [B * shared, H, D] as d_out is. Inputs, dk and dv must suit
    launch.tma_fits. ``sums``: memory for parts of dq, as of ``sums.room``.
    """
    heads, head_dim = k_THD.shape[1:]
    variant = variant or VARIANTS[head_dim]
    kind = kind_of(batch, q_THD, k_THD, v_THD, d_out_THD)
    key = ("gluon attention backward, short", kind, variant, dq.dtype)
    run_it = PLANS.get(key)
    if run_it is None:
        run_it = launch_of(variant, head_dim)
        if kind is not None:
            remember(key, run_it)
    samples = batch.samples(LIMITS)
    jobs = samples.shape[0] * heads
    if jobs >= 2**30:
        raise ValueError(f"the Gluon kernels count jobs in 32 bits, got {jobs} of samples and heads; accepted: 2**30")
    programs = min(jobs, launch.multiprocessors(k_THD.device))
    shared = batch.shared if batch.q_offsets is None else 0
    parts = room(dq.shape[0], batch.size, heads, head_dim, k_THD.device) if sums is None else sums
    run_it(
        (programs,), d_out_THD, q_THD, k_THD, v_THD, dk, dv, dq.view(dq.shape[0], 2 * heads, head_dim // 2), rows,
        parts, samples, counter(k_THD.device), jobs, heads, shared, qk_scale,
    )  # fmt: skip


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def soft_weights(s, of_tile, scale2, dtype: gl.constexpr, D: gl.constexpr):
    """Weights of a tile in fp32, and as a register operand. ``of_tile``: its log-sum-exps and dots [2, 64]."""
    P_L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    lse = of_tile.slice(0, 1, dim=0).load(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    p = gl.exp2(gl.minimum(s * scale2 - lse, 0.0, propagate_nan=tl.PropagateNan.ALL))
    return p, gl.convert_layout(p.to(dtype), P_L, assert_trivial=True)


@gluon.jit
def soft_slopes(p, dw, of_tile):
    """Gradients of scores, of weights and their gradients."""
    delta = of_tile.slice(1, 1, dim=0).load(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    return p * (dw - delta)


@gluon.jit
def _walk(
    W: gl.constexpr, BUFFERS: gl.constexpr, D: gl.constexpr, F32: gl.constexpr, dk_desc, dv_desc, dq_to, parts, ring,
    rows_s, k_s, v_s, out_s, ds_s, dq_s, job_s, full, empty, k_empty, v_empty, ds_full, heads, scale, it, t, n, tile,
    step, blocks,
):  # fmt: skip
    """A pass with 64 keys of this consumer's own. Returns the number of tiles so far."""
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROWS: gl.constexpr = (BUFFERS + 1) // 2
    dtype: gl.constexpr = ring.dtype
    scale2 = scale * LOG2E
    zero = gl.zeros([64, D], gl.float32, A_L)
    s_f, dw_f = scores_of(W, k_s, v_s, ring, full, it, D, BUFFERS)
    d_out = ring.index((2 * it + 1) % BUFFERS).reshape([64, D])
    q = ring.index((2 * it) % BUFFERS).reshape([64, D])
    s = warpgroup_mma_wait(1, deps=[s_f])
    p, p16 = soft_weights(s, rows_s.index(it % ROWS), scale2, dtype, D)
    dv_f = warpgroup_mma(p16, d_out, zero, use_acc=False, is_async=True)
    dw = warpgroup_mma_wait(1, deps=[dw_f])
    if n == 1:
        mbarrier.arrive(v_empty.index(W), count=1)
    ds = share(W, soft_slopes(p, dw, rows_s.index(it % ROWS)), ds_s, ds_full, it, dtype, D)
    dk_f = warpgroup_mma(ds, q, zero, use_acc=False, is_async=True)
    dv, dk = warpgroup_mma_wait(0, deps=[dv_f, dk_f])
    give_back(empty, it, BUFFERS)
    it += 1
    for i in range(1, n):
        s_f, dw_f = scores_of(W, k_s, v_s, ring, full, it, D, BUFFERS)
        d_out = ring.index((2 * it + 1) % BUFFERS).reshape([64, D])
        q = ring.index((2 * it) % BUFFERS).reshape([64, D])
        # Weights beside the product of their gradients, ds beside that of dv. What keeps ptxas from waiting for the
        # former before it computes weights is that a branch, the wait for ds, lies between.
        s = warpgroup_mma_wait(1, deps=[s_f])
        p, p16 = soft_weights(s, rows_s.index(it % ROWS), scale2, dtype, D)
        dv_f = warpgroup_mma(p16, d_out, dv, is_async=True)
        # When ds of the last tile is there, the other one's product of three tiles before has ended.
        mbarrier.wait(ds_full.index((it - 1) % DS), ((it - 1) // DS) & 1)
        dw = warpgroup_mma_wait(1, deps=[dw_f])
        if i + 1 == n:
            mbarrier.arrive(v_empty.index(W), count=1)
        tma.store_wait(0)
        ds = share(W, soft_slopes(p, dw, rows_s.index(it % ROWS)), ds_s, ds_full, it, dtype, D)
        dq = so_far(W, job_s, t, parts, tile, heads, D)
        dq_f = add_dq(W, dq, ds_s, k_s, it - 1, blocks, D)
        dk_f = warpgroup_mma(ds, q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq_f])
        give_dq(W, dq, dq_s, dq_to, parts, job_s, t, it, tile, heads, scale, D, F32)
        tile += step
        dv, dk = warpgroup_mma_wait(0, deps=[dv_f, dk_f])
        give_back(empty, it, BUFFERS)
        it += 1
    k_end = field(job_s, t, K_END)
    k_x = field(job_s, t, K_X) + W * 64
    column = field(job_s, t, HEAD) * D
    # While the other consumer may have to come up.
    tma.store_wait(0)
    store(out_s.index(W + nothing(it)), dv_desc, dv, k_end, k_x, column, D)
    dq = so_far(W, job_s, t, parts, tile, heads, D)
    mbarrier.wait(ds_full.index((it - 1) % DS), ((it - 1) // DS) & 1)
    dq_f = add_dq(W, dq, ds_s, k_s, it - 1, blocks, D)
    dq = warpgroup_mma_wait(0, deps=[dq_f])
    mbarrier.arrive(k_empty, count=1)
    tma.store_wait(0)
    give_dq(W, dq, dq_s, dq_to, parts, job_s, t, it, tile, heads, scale, D, F32)
    store(out_s.index(W + nothing(it)), dk_desc, dk * scale, k_end, k_x, column, D)
    return it


@gluon.jit
def _consumer(
    W: gl.constexpr, BUFFERS: gl.constexpr, D: gl.constexpr, F32: gl.constexpr, dk_desc, dv_desc, dq_to, parts, ring,
    rows_s, k_s, v_s, out_s, ds_s, dq_s, job_s, full, empty, k_full, k_empty, v_full, v_empty, ds_full, job_full,
    job_empty, heads, scale,
):  # fmt: skip
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
                W, BUFFERS, D, F32, dk_desc, dv_desc, dq_to, parts, ring, rows_s, k_s, v_s, out_s, ds_s, dq_s, job_s,
                full, empty, k_empty, v_empty, ds_full, heads, scale, it, t, n, tile, step, blocks,
            )  # fmt: skip
        else:
            mbarrier.arrive(v_empty.index(W), count=1)
            for _ in range(n):
                mbarrier.arrive(ds_full.index(it % DS), count=1)
                dq = so_far(W, job_s, t, parts, tile, heads, D)
                mbarrier.wait(ds_full.index(it % DS), (it // DS) & 1)
                dq_f = add_dq(W, dq, ds_s, k_s, it, blocks, D)
                dq = warpgroup_mma_wait(0, deps=[dq_f])
                tma.store_wait(0)
                give_dq(W, dq, dq_s, dq_to, parts, job_s, t, it, tile, heads, scale, D, F32)
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
def load_tile(
    q_desc, o_desc, rows_desc, ring, rows_s, full, empty, it, q_end, o_end, x, of_rows, column, BUFFERS: gl.constexpr
):
    """Queries of a tile and their rows, and d_out, into the next two buffers."""
    at = (2 * it) % BUFFERS
    mbarrier.wait(empty.index(at), ((2 * it // BUFFERS) & 1) ^ 1)
    mbarrier.expect(full.index(at), q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [END, q_end, x, column], full.index(at), ring.index(at))
    # Its place was the tile's whose d_out or queries lay here.
    place = rows_s.index(it % ((BUFFERS + 1) // 2))
    tma.async_copy_global_to_shared(rows_desc, [of_rows, 0], full.index(at), place)
    at = (2 * it + 1) % BUFFERS
    mbarrier.wait(empty.index(at), (((2 * it + 1) // BUFFERS) & 1) ^ 1)
    mbarrier.expect(full.index(at), o_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(o_desc, [END, o_end, x, column], full.index(at), ring.index(at))


@gluon.jit
def _producer(
    BUFFERS: gl.constexpr, D: gl.constexpr, o_desc, q_desc, k_desc, v_desc, rows_desc, samples, claimed, ring, rows_s,
    k_s, v_s, job_s, full, empty, k_full, k_empty, v_full, v_empty, job_full, job_empty, jobs, heads, shared,
):  # fmt: skip
    it = 0
    t = 0
    kt = 0
    job = claim(claimed)
    sample, _, q_start, q_len, k_start, k_len, head = record_of(samples, job, jobs, heads)
    n = hand_on(job_s, job_full, job_empty, 0, sample, q_start, q_len, k_start, k_len, head, 0, shared)
    while n > 0:
        back = kt % 2
        k_end, column = k_start + k_len, head * D
        o_end = q_start + q_len
        if shared > 0:
            o_end = sample * shared + q_len
        # With no keys or no queries everything reads zeros.
        there = gl.where((k_len > 0) & (q_len > 0), 1, 0)
        step = there * (1 - 2 * back)
        q_x = END + there * (back * (n - 1) * 64 - q_len)
        k_x = END + there * (kt * 128 - k_len)
        of_rows = ((first_tile(q_start, sample, shared) + back * (n - 1)) * heads + head) * 2
        of_rows = gl.where(there > 0, of_rows, NOWHERE)
        for i in range(n):
            load_tile(
                q_desc, o_desc, rows_desc, ring, rows_s, full, empty, it, q_start + q_len, o_end, q_x, of_rows, column,
                BUFFERS,
            )  # fmt: skip
            it += 1
            q_x += step * 64
            of_rows += step * heads * 2
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
def _jfa_backward_short(
    o_desc, q_desc, k_desc, v_desc, dk_desc, dv_desc, dq_to, rows_desc, parts, samples, claimed, jobs, heads, shared,
    scale, BUFFERS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BUFFERS >= 4, "BUFFERS: 4 at least")
    # A pointer where dq is fp32, for which there is no room.
    F32: gl.constexpr = isinstance(dq_to.type, gl.pointer_type)
    dtype: gl.constexpr = k_desc.dtype
    D_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 64, D], q_desc.layout)
    rows_s = gl.allocate_shared_memory(gl.float32, [(BUFFERS + 1) // 2, 2, 64], rows_desc.layout)
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
        dk_desc, dv_desc, dq_to, parts, ring, rows_s, k_s, v_s, out_s, ds_s, dq_s, job_s, full, empty, k_full, k_empty,
        v_full, v_empty, ds_full, job_full, job_empty, heads, scale,
    )  # fmt: skip
    produced = (
        o_desc, q_desc, k_desc, v_desc, rows_desc, samples, claimed, ring, rows_s, k_s, v_s, job_s, full, empty, k_full,
        k_empty, v_full, v_empty, job_full, job_empty, jobs, heads, shared,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (0, BUFFERS, D, F32) + consumed),
            (_consumer, (1, BUFFERS, D, F32) + consumed),
            (_producer, (BUFFERS, D) + produced),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
