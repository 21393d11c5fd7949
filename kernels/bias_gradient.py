"""Gradients of attention biases. The score gradient of a pair is its bias gradient too; what pairs share is summed.

Both kernels compute the score gradients anew, two products a tile: the kernels for dq and dk stay free of biases'
reductions, and no program adds to what another writes, so every run gives the same bits.

Legend: T rows of all samples, B samples, H heads, D head_dim, N buckets, M queries of a tile, K keys of a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem.kernels.bias import Bias, bias_tile, buckets
from gem.kernels.config import Shape, default
from gem.kernels.device import LOG2E as _LOG2E
from gem.kernels.device import dot, load_rows, read_tile, weights_of
from gem.kernels.launch import Launch, precision_of, tile_dim, wide
from gem.kernels.masks import sample_rows, seen_range, visible
from gem.kernels.schedule import Batch

LOG2E = tl.constexpr(_LOG2E)


def bias_gradient(
    d_out_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    lse_HT: Tensor,
    delta_HT: Tensor,
    batch: Batch,
    *,
    qk_scale: float,
    bias: Bias,
) -> Tensor:
    """Gradient of ``bias.values``, fp32: of its shape for a dense one, [N, H] or [N, 1] for a table."""
    assert bias.values is not None and batch.q_offsets is not None
    heads, head_dim = q_THD.shape[1:]
    config = default(Shape.of("bias", q_THD, batch, "softmax", bias.kind))
    inputs = (
        d_out_THD, q_THD, k_THD, v_THD, lse_HT, delta_HT, batch.q_offsets, batch.k_offsets,
        d_out_THD.stride(0), d_out_THD.stride(1), q_THD.stride(0), q_THD.stride(1), k_THD.stride(0), k_THD.stride(1),
        v_THD.stride(0), v_THD.stride(1),
        batch.size, heads, batch.q_rows, batch.k_rows, batch.left, batch.right, qk_scale * _LOG2E,
    )  # fmt: skip
    options: dict[str, Any] = dict(
        HAS_LEFT=batch.left >= 0, HAS_RIGHT=batch.right >= 0, BIAS=bias.kind, BIAS_STEPS=bias.steps, HEAD_DIM=head_dim,
        BLOCK_D=tile_dim(head_dim), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        WIDE=wide(q_THD, k_THD, v_THD, d_out_THD), PRECISION=precision_of(q_THD), warps=config.warps,
        stages=config.stages,
    )  # fmt: skip
    if bias.kind == "dense":
        return _dense_gradient(bias, config.block_m, config.block_n, inputs, options)
    tiles = batch.tiles("q", config.block_m)
    n = bias.values.shape[0]
    parts = torch.zeros((tiles.shape[0], heads, n), dtype=torch.float32, device=q_THD.device)
    if parts.numel():
        run = Launch(_bucket_gradient, BLOCK_BUCKETS=triton.next_power_of_2(n), **options)
        run((tiles.shape[0] * heads,), *inputs, *bias.arguments(parts), parts, tiles, tiles.shape[0], n)
    table_NH = parts.sum(0).t()
    return table_NH if bias.values.shape[1] > 1 else table_NH.sum(1, keepdim=True)


def _dense_gradient(bias: Bias, block_m: int, block_n: int, inputs: tuple, options: dict) -> Tensor:
    assert bias.values is not None
    shape = bias.values.shape
    grad = torch.zeros(shape, dtype=torch.float32, device=bias.values.device)
    if grad.numel() == 0:
        return grad
    tiles = -(-shape[2] // block_m) * -(-shape[3] // block_n)
    grid = (tiles * shape[1] * shape[0],)  # one axis: the others end at 65,535
    run = Launch(
        _dense_gradient_kernel, ALL_SAMPLES=shape[0] == 1, ALL_HEADS=shape[1] == 1, ALL_QUERIES=shape[2] == 1,
        ALL_KEYS=shape[3] == 1, **options,
    )  # fmt: skip
    run(grid, *inputs, *bias.arguments(grad), grad, *grad.stride(), shape[1], shape[2], shape[3])
    return grad


@triton.jit
def _score_gradient(
    first, row, q_len, k_len, sample, head, q_start, k_start, d_out_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr,
    d_out_row, d_out_head, q_row, q_head, k_row, k_head, v_row, v_head, q_rows, left, right, scale,
    bias_ptr, boundaries, q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BIAS: tl.constexpr, BIAS_STEPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores (with bias) of queries [first, first + M) and keys [row, row + N), 0 for hidden pairs."""
    columns, m, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    q = load_rows(q_ptr + q_start * q_row + head * q_head, first, m, columns, q_row, q_len, HEAD_DIM, BLOCK_D, WIDE)
    k = load_rows(k_ptr + k_start * k_row + head * k_head, row, n, columns, k_row, k_len, HEAD_DIM, BLOCK_D, WIDE)
    x = dot(q, tl.trans(k), None, PRECISION) * scale
    d_out_base = d_out_ptr + q_start * d_out_row + head * d_out_head
    d_out = load_rows(d_out_base, first, m, columns, d_out_row, q_len, HEAD_DIM, BLOCK_D, WIDE)
    v = load_rows(v_ptr + k_start * v_row + head * v_head, row, n, columns, v_row, k_len, HEAD_DIM, BLOCK_D, WIDE)
    d_weights = dot(d_out, tl.trans(v), None, PRECISION)
    i, j = first + m, row + n
    x += LOG2E * bias_tile(
        i[:, None], j[None, :], q_len, k_len, sample, head, q_start, k_start, bias_ptr, boundaries, q_times, k_times,
        bias_b, bias_h, bias_q, bias_k, n_boundaries, BIAS, BIAS_STEPS,
    )  # fmt: skip
    per_row = head * q_rows + q_start + i
    lse = tl.load(lse_ptr + per_row, mask=i < q_len, other=float("inf"))
    delta = tl.load(delta_ptr + per_row, mask=i < q_len, other=0.0)
    dx = weights_of(x, lse[:, None]) * (d_weights - delta[:, None])
    seen = visible(i[:, None], j[None, :], q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
    return tl.where(seen & (i < q_len)[:, None], dx, 0.0)


@triton.jit(
    do_not_specialize=["batch_size", "q_rows", "k_rows", "left", "right", "grad_heads", "grad_q_len", "grad_k_len"]
)
def _dense_gradient_kernel(
    d_out_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, q_offsets, k_offsets,
    d_out_row, d_out_head, q_row, q_head, k_row, k_head, v_row, v_head,
    batch_size, heads, q_rows, k_rows, left, right, scale,
    bias_ptr, boundaries, q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries,
    grad_ptr, grad_b, grad_h, grad_q, grad_k, grad_heads, grad_q_len, grad_k_len,
    ALL_SAMPLES: tl.constexpr, ALL_HEADS: tl.constexpr, ALL_QUERIES: tl.constexpr, ALL_KEYS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BIAS: tl.constexpr, BIAS_STEPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile of the bias; it walks whatever shares that tile: samples, heads, queries, keys."""
    tiles_k = tl.cdiv(grad_k_len, BLOCK_N)
    tiles = tl.cdiv(grad_q_len, BLOCK_M) * tiles_k
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    tile_q, tile_k = (tile // tiles_k) * BLOCK_M, (tile % tiles_k) * BLOCK_N
    first_sample, first_head = rest // grad_heads, rest % grad_heads
    n_samples = batch_size if ALL_SAMPLES else 1
    n_heads = heads if ALL_HEADS else 1
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for s in range(n_samples):
        sample = first_sample + s
        q_start, q_len = sample_rows(q_offsets, sample, batch_size, q_rows)
        k_start, k_len = sample_rows(k_offsets, sample, batch_size, k_rows)
        q_end = q_len if ALL_QUERIES else tl.minimum(q_len, tile_q + 1)
        k_end = k_len if ALL_KEYS else tl.minimum(k_len, tile_k + 1)
        for h in range(n_heads):
            head = tl.cast(first_head + h, tl.int64)
            for i in range(tile_q, q_end, BLOCK_M):
                for j in range(tile_k, k_end, BLOCK_N):
                    acc += _score_gradient(
                        i, j, q_len, k_len, sample, head, q_start, k_start, d_out_ptr, q_ptr, k_ptr, v_ptr, lse_ptr,
                        delta_ptr, d_out_row, d_out_head, q_row, q_head, k_row, k_head, v_row, v_head, q_rows, left,
                        right, scale, bias_ptr, boundaries, q_times, k_times, bias_b, bias_h, bias_q, bias_k,
                        n_boundaries, HAS_LEFT, HAS_RIGHT, BIAS, BIAS_STEPS, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, WIDE,
                        PRECISION,
                    )  # fmt: skip
    base = grad_ptr + tl.cast(first_sample, tl.int64) * grad_b + tl.cast(first_head, tl.int64) * grad_h
    i, j = tile_q + tl.arange(0, BLOCK_M), tile_k + tl.arange(0, BLOCK_N)
    if ALL_QUERIES and ALL_KEYS:
        tl.store(base, tl.sum(tl.sum(acc, 1), 0))
    elif ALL_QUERIES:
        tl.store(base + j.to(tl.int64) * grad_k, tl.sum(acc, 0), mask=j < grad_k_len)
    elif ALL_KEYS:
        tl.store(base + i.to(tl.int64) * grad_q, tl.sum(acc, 1), mask=i < grad_q_len)
    else:
        pointers = base + i.to(tl.int64)[:, None] * grad_q + j.to(tl.int64)[None, :] * grad_k
        tl.store(pointers, acc, mask=(i < grad_q_len)[:, None] & (j < grad_k_len)[None, :])


@triton.jit(do_not_specialize=["batch_size", "q_rows", "k_rows", "left", "right", "n_tiles", "n_buckets"])
def _bucket_gradient(
    d_out_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, q_offsets, k_offsets,
    d_out_row, d_out_head, q_row, q_head, k_row, k_head, v_row, v_head,
    batch_size, heads, q_rows, k_rows, left, right, scale,
    bias_ptr, boundaries, q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries,
    parts_ptr, tiles, n_tiles, n_buckets,
    BLOCK_BUCKETS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BIAS: tl.constexpr,
    BIAS_STEPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile of queries and a head; its sums by bucket are a row of ``parts``, added up afterwards."""
    index, head = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    tile = read_tile(tiles, index, n_tiles)  # pyright: ignore[reportGeneralTypeIssues]
    sample, first, q_start, q_len, k_start, k_len = tile
    if (sample >= 0) & (sample < batch_size):
        low, high = seen_range(first, BLOCK_M, q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
        number = tl.arange(0, BLOCK_BUCKETS)
        sums = tl.zeros([BLOCK_BUCKETS], tl.float32)
        i = first + tl.arange(0, BLOCK_M)
        for row in range(low, high, BLOCK_N):
            dx = _score_gradient(
                first, row, q_len, k_len, sample, head, q_start, k_start, d_out_ptr, q_ptr, k_ptr, v_ptr, lse_ptr,
                delta_ptr, d_out_row, d_out_head, q_row, q_head, k_row, k_head, v_row, v_head, q_rows, left, right,
                scale, bias_ptr, boundaries, q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries, HAS_LEFT,
                HAS_RIGHT, BIAS, BIAS_STEPS, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, WIDE, PRECISION,
            )  # fmt: skip
            j = row + tl.arange(0, BLOCK_N)
            bucket = buckets(
                i[:, None], j[None, :], (i < q_len)[:, None], (j < k_len)[None, :], k_len - q_len, q_start, k_start,
                boundaries, q_times, k_times, n_boundaries, BIAS, BIAS_STEPS,
            )  # fmt: skip
            # Only the buckets that the tile has: far from the diagonal that is one.
            inside = (i < q_len)[:, None] & (j < k_len)[None, :]
            lowest = tl.min(tl.where(inside, bucket, n_boundaries))
            highest = tl.max(tl.where(inside, bucket, 0))
            for b in range(lowest, highest + 1):
                part = tl.sum(tl.where(bucket == b, dx, 0.0))
                sums += tl.where(number == b, part, 0.0)
        offset = (tl.cast(index, tl.int64) * heads + head) * n_buckets
        tl.store(parts_ptr + offset + number, sums, mask=number < n_buckets)
