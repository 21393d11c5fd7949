"""Gradients of keys and values of jagged attention. One program owns a tile of keys and walks the queries that see it.

Everything is computed transposed (scores as keys by queries), so that the weights and their gradients are already the
register operands of dv += weights^T d_out and dk += d_scores^T q. No mask for jagged ends: behind the queries' end
q, d_out and delta read 0, so that both terms are 0 whatever the weights are; rows behind the keys' end are computed and
not stored.

For arguments and constants see attention_forward.py.

Legend: T rows of all samples, H heads, D head_dim, M queries of a tile, N keys of a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem.kernels.activations import activate_with_slope
from gem.kernels.bias import NO_BIAS, Bias, bias_tile
from gem.kernels.config import Config, Shape, has_tma
from gem.kernels.device import LOG2E as _LOG2E
from gem.kernels.device import (
    dealt,
    dot,
    load_rows,
    load_tile,
    load_two,
    read_tile,
    store_rows,
    warm_rows,
    weights_of,
)
from gem.kernels.launch import (
    PLANS,
    Launch,
    Plan,
    empty_like,
    folds,
    grid_of,
    kind_of,
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


def attention_dkv(
    d_out_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    lse_HT: Tensor | None,
    delta_HT: Tensor | None,
    batch: Batch,
    *,
    activation: str = "softmax",
    qk_scale: float,
    out_scale: float = 1.0,
    bias: Bias | None = None,
    dk_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """(dk, dv), 0 behind the last offset. ``lse_HT`` (of the forward), ``delta_HT`` (of attention_dq): softmax only."""
    dk, dv = empty_like(k_THD, dk_dtype), empty_like(v_THD)
    if dk.numel() == 0:
        return dk, dv
    kind = None if bias else kind_of(batch, q_THD, k_THD, v_THD, d_out_THD)
    key = ("dkv", kind, activation, dk.dtype, config)
    plan = PLANS.get(key)
    if plan is None:
        inputs = (d_out_THD, q_THD, k_THD, v_THD, lse_HT, delta_HT)
        plan = _plan(inputs, batch, activation, qk_scale, out_scale, bias or NO_BIAS, dk_dtype, config)
        if kind is not None:
            remember(key, plan)
    heads = k_THD.shape[1]
    tiles = batch.tiles("k", plan.config.block_n)
    plan.launch(
        grid_of(plan.config, tiles, heads),
        d_out_THD, q_THD, d_out_THD, q_THD, k_THD, v_THD,
        dv if lse_HT is None else lse_HT, dv if delta_HT is None else delta_HT, dk, dv, tiles,
        *plan.strides, tiles.shape[0], heads, d_out_THD.shape[0], batch.left, batch.right,
        qk_scale * _LOG2E if activation == "softmax" else qk_scale, qk_scale * (1.0 if plan.fold else out_scale),
        out_scale,
        *(bias or NO_BIAS).arguments(dv),
    )  # fmt: skip
    return dk, dv


def _plan(
    inputs: tuple[Any, ...], batch: Batch, activation: str, qk_scale: float, out_scale: float, bias: Bias,
    dk_dtype: torch.dtype | None, config: Config | None,
) -> Plan:  # fmt: skip
    d_out_THD, q_THD, k_THD, v_THD, lse_HT, delta_HT = inputs
    heads, head_dim = k_THD.shape[1:]
    tma = has_tma(q_THD.device) and tma_fits(q_THD, d_out_THD)
    if config is None:
        how = {"activation": activation, "qk_scale": qk_scale, "out_scale": out_scale, "bias": bias}
        config = choose(
            Shape.of("dkv", q_THD, batch, activation, bias.kind, tma),
            lambda c: attention_dkv(
                d_out_THD, q_THD, k_THD, v_THD, lse_HT, delta_HT, batch, config=c, dk_dtype=dk_dtype, **how
            ),
        )
    strides = tuple(stride for x in (d_out_THD, q_THD, k_THD, v_THD) for stride in x.stride()[:2])
    launch = Launch(
        _dkv, ACTIVATION=activation, HAS_LEFT=batch.left >= 0, HAS_RIGHT=batch.right >= 0,
        SHARED=batch.q_offsets is None, BIAS=bias.kind, BIAS_STEPS=bias.steps,
        HEAD_DIM=head_dim, BLOCK_D=tile_dim(head_dim), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        WIDE=wide(d_out_THD, q_THD, k_THD, v_THD), PRECISION=precision_of(q_THD), PERSISTENT=config.persistent > 0,
        TMA=tma, WARM=config.warm, FOLD=folds(activation, q_THD), warps=config.warps, stages=config.stages,
        registers=config.registers, ragged={0: config.block_m, 1: config.block_m} if tma else None,
    )  # fmt: skip
    return Plan(config, folds(activation, q_THD), (*strides, *(heads * head_dim, head_dim) * 2), launch)


@triton.jit(do_not_specialize=["n_tiles", "heads", "out_rows", "left", "right"])
def _dkv(
    d_out_source, q_source, d_out_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, tiles,
    d_out_row, d_out_head, q_row, q_head, k_row, k_head, v_row, v_head, dk_row, dk_head, dv_row, dv_head,
    n_tiles, heads, out_rows, left, right, scale, dk_scale, dv_scale,
    bias_ptr, boundaries, q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries,
    ACTIVATION: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SHARED: tl.constexpr, BIAS: tl.constexpr, BIAS_STEPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, PERSISTENT: tl.constexpr,
    TMA: tl.constexpr, WARM: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    SOFTMAX: tl.constexpr = ACTIVATION == "softmax"
    EDGES: tl.constexpr = HAS_LEFT or HAS_RIGHT
    # The heads of a tile run side by side: their rows are neighbours in memory.
    work = n_tiles * heads
    turns = tl.cdiv(work, tl.num_programs(0)) if PERSISTENT else 1
    for turn in range(turns):
        item = dealt(turn, work, PERSISTENT)
        head = (item % heads).to(tl.int64)
        sample, row, q_start, q_len, k_start, k_len = read_tile(tiles, item // heads, n_tiles)
        if sample >= 0:
            out_start = sample.to(tl.int64) * q_len if SHARED else q_start
            low, high = seen_range(row, BLOCK_N, k_len, q_len, right, left, HAS_RIGHT, HAS_LEFT)
            columns, n, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
            j = row + n
            k_base = k_ptr + k_start * k_row + head * k_head
            v_base = v_ptr + k_start * v_row + head * v_head
            if WARM:
                warm_rows(v_base, row, n, v_row, k_len, HEAD_DIM)
                if low < high:
                    warm_rows(q_ptr + q_start * q_row + head * q_head, low, m, q_row, q_len, HEAD_DIM)
                    warm_rows(d_out_ptr + out_start * d_out_row + head * d_out_head, low, m, d_out_row, q_len, HEAD_DIM)
            k = load_rows(k_base, row, n, columns, k_row, k_len, HEAD_DIM, BLOCK_D, WIDE)
            v = load_rows(v_base, row, n, columns, v_row, k_len, HEAD_DIM, BLOCK_D, WIDE)
            per_row = head * out_rows + out_start
            dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            for first in tl.range(low, high, BLOCK_M):
                i = first + m
                q = load_tile(
                    q_source, q_start, q_len, head, first, m, columns, q_row, q_head, HEAD_DIM, BLOCK_D, WIDE, TMA
                )
                d_out = load_tile(
                    d_out_source, out_start, q_len, head, first, m, columns, d_out_row, d_out_head, HEAD_DIM, BLOCK_D,
                    WIDE, TMA,
                )  # fmt: skip
                whole = tile_is_whole(first, BLOCK_M, row, BLOCK_N, q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
                x = dot(k, tl.trans(q), None, PRECISION) * scale
                d_weights = dot(v, tl.trans(d_out), None, PRECISION)
                if SOFTMAX:
                    if BIAS != "":
                        x += LOG2E * bias_tile(
                            i[None, :], j[:, None], q_len, k_len, sample, head, q_start, k_start, bias_ptr, boundaries,
                            q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries, BIAS, BIAS_STEPS,
                        )  # fmt: skip
                    lse, delta = load_two(lse_ptr + per_row, delta_ptr + per_row, first, q_len, BLOCK_M)
                    weights = weights_of(x, lse[None, :])
                    if EDGES:
                        if not whole:
                            seen = visible(i[None, :], j[:, None], q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
                            weights = tl.where(seen, weights, 0.0)
                    dx = weights * (d_weights - delta[None, :])
                else:
                    weights, slope = activate_with_slope(x, ACTIVATION, q.dtype == tl.bfloat16)
                    dx = slope * d_weights
                    if FOLD:
                        weights, dx = weights * dv_scale, dx * dv_scale
                    if EDGES:
                        if not whole:
                            seen = visible(i[None, :], j[:, None], q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
                            weights = tl.where(seen, weights, 0.0)
                            dx = tl.where(seen, dx, 0.0)
                dv = dot(weights.to(d_out.dtype), d_out, dv, PRECISION)
                dk = dot(dx.to(q.dtype), q, dk, PRECISION)
            dk_base = dk_ptr + k_start * dk_row + head * dk_head
            store_rows(dk_base, row, n, columns, dk_row, k_len, dk * dk_scale, HEAD_DIM, BLOCK_D, False)
            dv_base = dv_ptr + k_start * dv_row + head * dv_head
            if not FOLD:
                dv = dv * dv_scale
            store_rows(dv_base, row, n, columns, dv_row, k_len, dv, HEAD_DIM, BLOCK_D, False)
