"""Backward of jagged softmax attention on Hopper, long sequences: five products, dq summed in a fixed order.

The walk is that of backward_long: a tile of 128 keys stays with two consumers, the queries that see it pass, and
writers add a tile's share of dq to sums in global memory, tile of keys after tile of keys. With softmax

    p = 2^(s - lse), ds = p (dp - delta)

where log-sum-exps and dots delta of a tile of queries come beside it through the copy engine (``rows``). No row's
maximum is needed, and nothing is masked where no edge crosses a tile: behind a sample's end d_out and keys are zeros. A
weight is never above 1, so that scores of keys that are only zeros, which may lie far above a row's log-sum-exp, add 0
and no NaN. Where causal or a window cross a tile, -inf is selected in a branch that the whole warpgroup takes.

A tile of keys visits only the queries that see it. Which of these it adds to as the how-manieth follows from the
window, so the order stays fixed; jobs ascend in a sample's keys, so that the lowest unfinished one waits for none.

Legend: T rows of all samples, H heads, D head_dim, M queries of a tile (64).
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
from gem.kernels.hopper.backward_long import (
    VARIANTS,
    Variant,
    give_dq,
    scores_ahead,
    scores_of,
    share_of_dq,
    store_own,
)
from gem.kernels.hopper.jobs import PARTS, hand_on, told
from gem.kernels.hopper.parts import END, LAYOUT, LOG2E, record_of
from gem.kernels.hopper.rows import NOWHERE
from gem.kernels.hopper.sums import SumsLaunch, buffers, first_tile, rows_launch, writer
from gem.kernels.launch import PLANS, Launch, kind_of, remember
from gem.kernels.schedule import Batch, Limits

_KEYS = 128  # of a job


def launches_of(variant: Variant, head_dim: int, left: bool, right: bool) -> tuple[Launch, Launch]:
    """The kernel with the constants of a variant, and the one that makes dq of its sums. Arguments: see ``run``."""
    products = SumsLaunch(
        _jfa_backward_long, REGISTERS=int(variant.kv_registers), LEFT=int(left), RIGHT=int(right), D=head_dim,
        STAGES=variant.stages, KV=variant.kv_slots, warps=4,
        ragged={0: 64, 1: 64, 2: 64, 3: 64, 4: 64, 5: 64, 6: head_dim, 7: 2}, layout=LAYOUT,
    )  # fmt: skip
    return products, rows_launch(head_dim, "softmax", True, False, left, right)


def run(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, rows: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    batch: Batch, *, qk_scale: float, variant: Variant | None = None, beyond: Limits | None = None,
    sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Gradients of all samples into dq, dk, dv, all contiguous and with rows; 0 where nothing is seen.

    ``rows``: of ``rows.of_rows``. ``beyond``: of samples beyond these limits alone, and of what lies behind the last
    offsets; others' rows stay as they are. ``dq`` is of q's type or fp32, for ``batch.shared`` queries
    [B * shared, H, D] as d_out is. Inputs, dk and dv must suit launch.tma_fits. ``sums``: memory to work in.
    """
    heads, head_dim = k_THD.shape[1:]
    variant = variant or VARIANTS[head_dim]
    left, right = batch.left >= 0, batch.right >= 0
    kind = kind_of(batch, q_THD, k_THD, v_THD, d_out_THD)
    key = ("gluon attention backward, long", kind, variant, dq.dtype)
    launches = PLANS.get(key)
    if launches is None:
        launches = launches_of(variant, head_dim, left, right)
        if kind is not None:
            remember(key, launches)
    # With a window a sample's tiles of keys visit different numbers of queries, and would not ascend if sorted by them.
    k_tiles = batch.tiles("k", _KEYS, sorted=not (left or right), beyond=beyond)
    q_tiles = batch.tiles("q", 64, beyond=beyond)
    k_jobs, q_jobs = k_tiles.shape[0] * heads, q_tiles.shape[0] * heads
    if max(k_jobs, q_jobs) >= 2**30:
        raise ValueError(f"the Gluon kernels count jobs in 32 bits, got {max(k_jobs, q_jobs)}; accepted: up to 2**30")
    shared = batch.shared if batch.q_offsets is None else 0
    sums, state = buffers(dq.shape[0], batch.size, heads, head_dim, q_THD.device, sums)
    products, dq_rows = launches
    programs = min(k_jobs, launch.multiprocessors(q_THD.device))
    products(
        (programs,), q_THD, d_out_THD, k_THD, v_THD, dk, dv, sums, rows, state, k_tiles, k_jobs, heads, shared,
        batch.left, batch.right, qk_scale,
    )  # fmt: skip
    dq_rows((q_jobs,), sums, dq, q_tiles, q_jobs, heads, shared, batch.left, batch.right, qk_scale, 1.0)


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _weigh(
    W: gl.constexpr, scores, d_weights, rows_s, ds_s, ds_full, sum_full, it, tile, job_s, t, left, right, scale2,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Weights of a tile and gradients of its scores as operands, the latter in shared memory too."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    dtype: gl.constexpr = ds_s.dtype
    slot = it % 2
    of_tile = rows_s.index(it % STAGES)
    lse = of_tile.slice(0, 1, dim=0).load(S_L)
    delta = of_tile.slice(1, 1, dim=0).load(S_L)
    x = scores * scale2 - lse
    if LEFT or RIGHT:
        x = _edged(W, x, tile, job_s, t, left, right, LEFT, RIGHT)
    weights = gl.exp2(gl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL))
    d_scores = (weights * (d_weights - delta)).to(dtype)
    weights = gl.convert_layout(weights.to(dtype), P_L, assert_trivial=True)
    # The other consumer's product of two tiles before has read this slot when its result was handed on.
    mbarrier.wait(sum_full.index(slot * 2 + 1 - W), ((it // 2) & 1) ^ 1)
    ds_s.index(slot * 2 + W).store(d_scores)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot), count=1)
    return weights, gl.convert_layout(d_scores, P_L, assert_trivial=True)


@gluon.jit
def _edged(W: gl.constexpr, x, tile, job_s, t, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """-inf where a query does not see a key: row j sees column i if -right <= i - j <= left, counted from here."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    # Key position of the tile's first query less the first key.
    apart = told(job_s, t, 7, 4) + tile * 64 - W * 64
    whole = apart == apart
    if LEFT:
        whole = whole & (apart + 63 <= left)
    if RIGHT:
        whole = whole & (apart - 63 >= -right)
    if not whole:
        j = gl.arange(0, 64, layout=gl.SliceLayout(1, S_L))[:, None] - apart
        # Not known to be the same every time: the compiler would keep all of a thread's columns through the whole walk.
        i = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [gl.arange(0, 64, layout=gl.SliceLayout(0, S_L))], gl.int32, False, 1
        )[None, :]
        if LEFT:
            seen = i <= j + left
            if RIGHT:
                seen = seen & (i >= j - right)
        else:
            seen = i >= j - right
        x = gl.where(seen, x, float("-inf"))
    return x


@gluon.jit
def _consumer(
    W: gl.constexpr, REGISTERS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, KV: gl.constexpr, dk_desc, dv_desc, q_s, o_s, k_s, v_s, rows_s, ds_s, sum_s, job_s, full,
    empty, kv_full, kv_empty, ds_full, sum_full, sum_empty, job_full, job_empty, left, right, scale,
):  # fmt: skip
    M: gl.constexpr = 64
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    K_L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16]), 2)
    scale2 = scale * LOG2E
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
        p, dp = _weigh(
            W, s, dw, rows_s, ds_s, ds_full, sum_full, it, 0, job_s, t, left, right, scale2, LEFT, RIGHT, D, STAGES
        )
        dv_f = warpgroup_mma(p, o_s.index(it % STAGES).reshape([M, D]), dv, use_acc=False, is_async=True)
        dk_f = warpgroup_mma(dp, q_s.index(it % STAGES).reshape([M, D]), dk, use_acc=False, is_async=True)
        s_f, dw_f, dk, dv = scores_ahead(
            W, k, v, dk_f, dv_f, q_s, o_s, full, empty, it, kv, REGISTERS, M, D, STAGES
        )  # fmt: skip
        it += 1
        for i in range(2, n):
            s, dw = warpgroup_mma_wait(0, deps=[s_f, dw_f])
            p, dp = _weigh(
                W, s, dw, rows_s, ds_s, ds_full, sum_full, it, i - 1, job_s, t, left, right, scale2, LEFT, RIGHT, D,
                STAGES,
            )  # fmt: skip
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
        p, dp = _weigh(
            W, s, dw, rows_s, ds_s, ds_full, sum_full, it, n - 1, job_s, t, left, right, scale2, LEFT, RIGHT, D, STAGES
        )
        dq_f = share_of_dq(W, ds_s, k_s, ds_full, it - 1, kv, M, D)
        dv_f = warpgroup_mma(p, o_s.index(it % STAGES).reshape([M, D]), dv, is_async=True)
        dk_f = warpgroup_mma(dp, q_s.index(it % STAGES).reshape([M, D]), dk, is_async=True)
        dq = warpgroup_mma_wait(2, deps=[dq_f])
        give_dq(W, dq, sum_s, sum_full, sum_empty, it - 1)
        dq_f = share_of_dq(W, ds_s, k_s, ds_full, it, kv, M, D)
        dv, dk = warpgroup_mma_wait(2, deps=[dv_f, dk_f])
        mbarrier.arrive(empty.index(it % STAGES), count=1)
        store_own(W, v_s, dv_desc, dv, 1.0, job_s, t, kv, M, D)
        dq = warpgroup_mma_wait(0, deps=[dq_f])
        give_dq(W, dq, sum_s, sum_full, sum_empty, it)
        it += 1
        mbarrier.wait(sum_full.index((it - 1) % 2 * 2 + 1 - W), ((it - 1) // 2) & 1)
        store_own(W, k_s, dk_desc, dk, scale, job_s, t, kv, M, D)
        tma.store_wait(0)
        mbarrier.arrive(kv_empty.index(kv), count=1)
        mbarrier.arrive(job_empty.index(t % 2), count=1)
        t += 1
        mbarrier.wait(job_full.index(t % 2), (t // 2) & 1)
        n = told(job_s, t, 0, 4)


# -- producer ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _queries(row, q_len, k_len, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """(first tile of queries that see one of 128 keys from ``row``, how many there are)."""
    shift = k_len - q_len
    low = row * 0
    high = q_len
    if RIGHT:
        low = gl.minimum(gl.maximum(row - shift - right, 0), q_len)
    if LEFT:
        high = gl.minimum(gl.minimum(row + 128, k_len) - shift + left, q_len)
    return low // 64, gl.where(high > low, (high + 63) // 64 - low // 64, 0)


@gluon.jit
def _producer(
    LEFT: gl.constexpr, RIGHT: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, KV: gl.constexpr, q_desc, o_desc,
    k_desc, v_desc, rows_desc, q_s, o_s, k_s, v_s, rows_s, job_s, full, empty, kv_full, kv_empty, job_full, job_empty,
    state, tiles, jobs, heads, shared, left, right,
):  # fmt: skip
    it = 0
    t = 0
    n = 1
    while n > 0:
        job = gl.atomic_add(state, 1, sem="relaxed")
        sample, row, q_start, q_len, k_start, k_len, head = record_of(tiles, job, jobs, heads)
        first, real = _queries(row, q_len, k_len, left, right, LEFT, RIGHT)
        # Three at least, empty ones among them: see backward_long.
        n = gl.where(sample >= 0, gl.maximum(real, 3), 0)
        k_end = k_start + k_len
        k_x = END - k_len + row
        tile = first_tile(q_start, sample, shared) + first
        apart = k_len - q_len + first * 64 - row
        # Tiles that no query sees need not wait for each other: nobody reads their sums.
        hand_on(job_s, job_full, job_empty, t, n, k_end, k_x, head, row // 128, tile, real, apart)
        if n > 0:
            q_end = q_start + q_len
            o_end = q_end
            if shared > 0:
                o_end = sample * shared + q_len
            kv = t % KV
            mbarrier.wait(kv_empty.index(kv), ((t // KV) & 1) ^ 1)
            mbarrier.expect(kv_full.index(kv), 4 * k_desc.block_type.nbytes)
            x = gl.where(real > 0, k_x, END)
            for w in gl.static_range(2):
                at = [END, k_end, x + w * 64, head * D]
                tma.async_copy_global_to_shared(k_desc, at, kv_full.index(kv), k_s.index(kv * 2 + w))
                tma.async_copy_global_to_shared(v_desc, at, kv_full.index(kv), v_s.index(kv * 2 + w))
            for i in range(n):
                stage = it % STAGES
                mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), 2 * q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
                x = gl.where(i < real, END - q_len + (first + i) * 64, END)
                tma.async_copy_global_to_shared(
                    q_desc, [END, q_end, x, head * D], full.index(stage), q_s.index(stage)
                )  # fmt: skip
                tma.async_copy_global_to_shared(
                    o_desc, [END, o_end, x, head * D], full.index(stage), o_s.index(stage)
                )  # fmt: skip
                of_tile = gl.where(i < real, ((tile + i) * heads + head) * 2, NOWHERE)
                tma.async_copy_global_to_shared(rows_desc, [of_tile, 0], full.index(stage), rows_s.index(stage))
                it += 1
        t += 1


@gluon.jit(do_not_specialize=["jobs", "heads", "shared", "left", "right"])
def _jfa_backward_long(
    q_desc, o_desc, k_desc, v_desc, dk_desc, dv_desc, sums_desc, rows_desc, state, tiles, jobs, heads, shared, left,
    right, scale, REGISTERS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, KV: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    D_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, D], q_desc.layout)
    o_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, D], o_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [KV * 2, 1, 1, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [KV * 2, 1, 1, 64, D], v_desc.layout)
    rows_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2, 64], rows_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [4, 64, 64], D_L)
    sum_s = gl.allocate_shared_memory(gl.float32, [4, D, 32], sums_desc.layout)
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
        dk_desc, dv_desc, q_s, o_s, k_s, v_s, rows_s, ds_s, sum_s, job_s, full, empty, kv_full, kv_empty, ds_full,
        sum_full, sum_empty, job_full, job_empty, left, right, scale,
    )  # fmt: skip
    produced = (
        q_desc, o_desc, k_desc, v_desc, rows_desc, q_s, o_s, k_s, v_s, rows_s, job_s, full, empty, kv_full, kv_empty,
        job_full, job_empty, state, tiles, jobs, heads, shared, left, right,
    )  # fmt: skip
    written = (sums_desc, sum_s, sum_full, sum_empty, job_s, job_full, job_empty, state, heads, left)
    gl.warp_specialize(
        [
            (_consumer, (0, REGISTERS, LEFT, RIGHT, D, STAGES, KV) + consumed),
            (_consumer, (1, REGISTERS, LEFT, RIGHT, D, STAGES, KV) + consumed),
            (_producer, (LEFT, RIGHT, D, STAGES, KV) + produced),
            (writer, (0, 64, D, LEFT) + written),
            (writer, (1, 64, D, LEFT) + written),
        ],
        [4, 1, 1, 1], [240, 24, 24, 24],
    )  # fmt: skip
