"""Gradient of the queries of jagged attention. One program owns a tile of queries and walks the keys that it sees.

The keys' gradients have a kernel of their own (attention_dkv.py): scores are computed twice, seven products instead of
five, but nobody adds to what another program writes, so there are no atomics and every run gives the same bits (of the
four schemes of JFA the one that wins with many samples and heads). For softmax this kernel runs first: it also makes
delta = rowsum(out * d_out), which both need.

For arguments and constants see attention_forward.py.

Legend: T rows of all samples, H heads, D head_dim, M queries of a tile, N keys of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem.kernels.activations import activate_with_slope
from gem.kernels.bias import NO_BIAS, Bias, bias_tile
from gem.kernels.config import Config, Shape, has_tma
from gem.kernels.device import LOG2E as _LOG2E
from gem.kernels.device import dealt, dot, load_rows, load_tile, read_tile, store_rows, warm_rows, weights_of
from gem.kernels.launch import (
    PLANS,
    Launch,
    Plan,
    folds,
    grid_of,
    kind_of,
    nothing,
    precision_of,
    remember,
    tile_dim,
    tma_fits,
    wide,
)
from gem.kernels.masks import seen_range, tile_is_whole, visible
from gem.kernels.schedule import Batch
from gem.kernels.tuning import choose

LOG2E = tl.constexpr(_LOG2E)


def attention_dq(
    d_out_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor | None,
    lse_HT: Tensor | None,
    batch: Batch,
    *,
    activation: str = "softmax",
    qk_scale: float,
    out_scale: float = 1.0,
    bias: Bias | None = None,
    dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq, delta [H, T] in fp32, empty for GDPA). Shared queries get a gradient a sample, summed here in sample order.

    ``out_THD`` and ``lse_HT`` are the forward's, softmax only. ``dtype``: of dq, q's own by default.
    """
    softmax, shared = activation == "softmax", batch.q_offsets is None
    rows = batch.shared * batch.size if shared else q_THD.shape[0]
    dtype = dtype or q_THD.dtype
    dq = q_THD.new_empty((rows, *q_THD.shape[1:]), dtype=torch.float32 if shared else dtype)
    delta = q_THD.new_empty((q_THD.shape[1], rows), dtype=torch.float32) if softmax else nothing(q_THD.device)
    if dq.numel():
        out_THD = d_out_THD if out_THD is None else out_THD
        kind = None if bias else kind_of(batch, q_THD, k_THD, v_THD, d_out_THD, out_THD)
        key = ("dq", kind, activation, dq.dtype, config)
        plan = PLANS.get(key)
        if plan is None:
            inputs = (d_out_THD, q_THD, k_THD, v_THD, out_THD)
            plan = _plan(inputs, lse_HT, batch, activation, qk_scale, out_scale, bias or NO_BIAS, dtype, config)
            if kind is not None:
                remember(key, plan)
        heads = q_THD.shape[1]
        tiles = batch.tiles("q", plan.config.block_m)
        plan.launch(
            grid_of(plan.config, tiles, heads),
            d_out_THD, q_THD, k_THD, v_THD, k_THD, v_THD, out_THD,
            delta if lse_HT is None else lse_HT, dq, delta,
            tiles, *plan.strides, tiles.shape[0], heads, rows, batch.left, batch.right,
            qk_scale * _LOG2E if softmax else qk_scale, qk_scale * (1.0 if plan.fold else out_scale), out_scale,
            *(bias or NO_BIAS).arguments(dq),
        )  # fmt: skip
    if shared:
        dq = dq.view(batch.size, *q_THD.shape).sum(0).to(dtype)
    return dq, delta


def _plan(
    inputs: tuple[Tensor, ...], lse_HT: Tensor | None, batch: Batch, activation: str, qk_scale: float, out_scale: float,
    bias: Bias, dtype: torch.dtype, config: Config | None,
) -> Plan:  # fmt: skip
    d_out_THD, q_THD, k_THD, v_THD, out_THD = inputs
    heads, head_dim = q_THD.shape[1:]
    tma = has_tma(q_THD.device) and tma_fits(k_THD, v_THD)
    if config is None:
        how = {"activation": activation, "qk_scale": qk_scale, "out_scale": out_scale, "bias": bias, "dtype": dtype}
        config = choose(
            Shape.of("dq", q_THD, batch, activation, bias.kind, tma),
            lambda c: attention_dq(d_out_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, batch, config=c, **how),
        )
    strides = tuple(stride for x in (d_out_THD, q_THD, k_THD, v_THD, out_THD) for stride in x.stride()[:2])
    launch = Launch(
        _dq, ACTIVATION=activation, HAS_LEFT=batch.left >= 0, HAS_RIGHT=batch.right >= 0,
        SHARED=batch.q_offsets is None, BIAS=bias.kind, BIAS_STEPS=bias.steps,
        HEAD_DIM=head_dim, BLOCK_D=tile_dim(head_dim), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        WIDE=wide(*inputs), PRECISION=precision_of(q_THD), PERSISTENT=config.persistent > 0, TMA=tma,
        WARM=config.warm, FOLD=folds(activation, q_THD), warps=config.warps, stages=config.stages,
        registers=config.registers, ragged={2: config.block_n, 3: config.block_n} if tma else None,
    )  # fmt: skip
    return Plan(config, folds(activation, q_THD), (*strides, heads * head_dim, head_dim), launch)


@triton.jit(do_not_specialize=["n_tiles", "heads", "out_rows", "left", "right"])
def _dq(
    d_out_ptr, q_ptr, k_source, v_source, k_ptr, v_ptr, out_ptr, lse_ptr, dq_ptr, delta_ptr, tiles,
    d_out_row, d_out_head, q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, dq_row, dq_head,
    n_tiles, heads, out_rows, left, right, scale, dq_scale, out_scale,
    bias_ptr, boundaries, q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries,
    ACTIVATION: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SHARED: tl.constexpr, BIAS: tl.constexpr, BIAS_STEPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, PERSISTENT: tl.constexpr,
    TMA: tl.constexpr, WARM: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    SOFTMAX: tl.constexpr = ACTIVATION == "softmax"
    # Behind the keys' end k and v read 0, and so does every term of dq: nothing is masked there. Except in fp16, which
    # may not hold weights times delta where all real scores are far below 0.
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT or q_ptr.dtype.element_ty == tl.float16
    # The heads of a tile run side by side: their rows are neighbours in memory.
    work = n_tiles * heads
    turns = tl.cdiv(work, tl.num_programs(0)) if PERSISTENT else 1
    for turn in range(turns):
        item = dealt(turn, work, PERSISTENT)
        head = (item % heads).to(tl.int64)
        sample, row, q_start, q_len, k_start, k_len = read_tile(tiles, item // heads, n_tiles)
        if sample >= 0:
            out_start = sample.to(tl.int64) * q_len if SHARED else q_start
            low, high = seen_range(row, BLOCK_M, q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
            columns, n, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
            i = row + m
            q_base = q_ptr + q_start * q_row + head * q_head
            d_out_base = d_out_ptr + out_start * d_out_row + head * d_out_head
            if WARM:
                warm_rows(d_out_base, row, m, d_out_row, q_len, HEAD_DIM)
                if SOFTMAX:
                    warm_rows(out_ptr + out_start * out_row + head * out_head, row, m, out_row, q_len, HEAD_DIM)
                if low < high:
                    warm_rows(k_ptr + k_start * k_row + head * k_head, low, n, k_row, k_len, HEAD_DIM)
                    warm_rows(v_ptr + k_start * v_row + head * v_head, low, n, v_row, k_len, HEAD_DIM)
            q = load_rows(q_base, row, m, columns, q_row, q_len, HEAD_DIM, BLOCK_D, WIDE)
            d_out = load_rows(d_out_base, row, m, columns, d_out_row, q_len, HEAD_DIM, BLOCK_D, WIDE)
            if SOFTMAX:
                out_base = out_ptr + out_start * out_row + head * out_head
                out = load_rows(out_base, row, m, columns, out_row, q_len, HEAD_DIM, BLOCK_D, WIDE)
                delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
                per_row = head * out_rows + out_start + i
                tl.store(delta_ptr + per_row, delta, mask=i < q_len)
                lse = tl.load(lse_ptr + per_row, mask=i < q_len, other=float("inf"))
            dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for j in tl.range(low, high, BLOCK_N):
                k = load_tile(
                    k_source, k_start, k_len, head, j, n, columns, k_row, k_head, HEAD_DIM, BLOCK_D, WIDE, TMA
                )
                v = load_tile(
                    v_source, k_start, k_len, head, j, n, columns, v_row, v_head, HEAD_DIM, BLOCK_D, WIDE, TMA
                )
                whole = tile_is_whole(row, BLOCK_M, j, BLOCK_N, q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
                x = dot(q, tl.trans(k), None, PRECISION) * scale
                d_weights = dot(d_out, tl.trans(v), None, PRECISION)
                if SOFTMAX:
                    if BIAS != "":
                        x += LOG2E * bias_tile(
                            i[:, None], (j + n)[None, :], q_len, k_len, sample, head, q_start, k_start, bias_ptr,
                            boundaries, q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries, BIAS,
                            BIAS_STEPS,
                        )  # fmt: skip
                    weights = weights_of(x, lse[:, None])
                    if MASKED:
                        if not whole:
                            seen = visible(i[:, None], (j + n)[None, :], q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
                            weights = tl.where(seen, weights, 0.0)
                    dx = weights * (d_weights - delta[:, None])
                else:
                    _, slope = activate_with_slope(x, ACTIVATION, k.dtype == tl.bfloat16)
                    dx = slope * d_weights
                    if FOLD:
                        dx = dx * out_scale
                    if HAS_LEFT or HAS_RIGHT:
                        if not whole:
                            seen = visible(i[:, None], (j + n)[None, :], q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
                            dx = tl.where(seen, dx, 0.0)
                dq = dot(dx.to(k.dtype), k, dq, PRECISION)
            dq_base = dq_ptr + out_start * dq_row + head * dq_head
            store_rows(dq_base, row, m, columns, dq_row, q_len, dq * dq_scale, HEAD_DIM, BLOCK_D, False)
