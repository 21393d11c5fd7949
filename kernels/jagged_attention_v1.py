"""Jagged softmax attention as one writes it first: the first generation, kept to measure what the later ones gain.

It is the fused attention of Triton's tutorial on packed rows, and does what Jagged Flash Attention's first version did:

- a grid over (longest sample, heads and samples), so a short sample among long ones leaves most of its programs empty;
- every tile of scores is masked with -inf for the jagged end and the edges of causal and window;
- a tile meets all other tiles of its sample: the causal diagonal ends (in the backward begins) the walk, as in the
  tutorial, but what lies outside a window is computed and masked;
- one backward kernel over tiles of keys, which adds to the queries' gradient by atomics in fp32. In which order they
  add up differs from run to run, and so do the last bits of dq; out, dk and dv are repeatable;
- one tile size for every GPU, mask and length, chosen to fit and not to be fast.

No bias, no GDPA, no second derivative. What it shares with the later kernels is what they do not differ in: products,
addressing of rows, the rule of what a query sees.

Legend: T rows of all samples (TQ, TK), B samples, H heads, D head_dim, M queries of a tile, N keys of a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem.kernels.device import LOG2E, dot, load_rows, store_rows, tile_offsets
from gem.kernels.launch import last_contiguous, precision_of, tile_dim, wide
from gem.kernels.masks import visible

# Triton's annotations know neither the options of a launch nor what a device function returns.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_SAMPLE_HEADS = 65535  # they are the grid's second axis, which CUDA limits
WARPS, STAGES = 4, 2


def jagged_attention_v1(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    max_q_len: int,
    max_k_len: int,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v inside each sample, [T, H, D]; differentiable in q, k and v. ``scale`` None: D ** -0.5.

    q [TQ, H, D], k and v [TK, H, D] with rows of any stride; offsets [B + 1] of int32 or int64. ``causal`` and
    ``window`` (left, right; -1 = unlimited) are aligned bottom-right. Queries that see no key, and rows behind the last
    offset, get 0 in the output and in the gradients.

    The lengths make the grid and are not read: no sample may be longer than ``max_q_len`` and ``max_k_len``.
    """
    heads, head_dim = q_THD.shape[1:]
    if reason := refusal(q_THD.dtype, head_dim, heads, q_offsets.shape[0] - 1):
        raise ValueError(f"jagged_attention_v1: {reason}")
    left, right = window
    if causal:
        right = 0
    # A side that reaches past every row is unlimited, and positions +- its length need not fit into 32 bits.
    left, right = (-1 if side >= q_THD.shape[0] + k_THD.shape[0] else side for side in (left, right))
    scale = head_dim**-0.5 if scale is None else scale
    return _Attention.apply(q_THD, k_THD, v_THD, q_offsets, k_offsets, max_q_len, max_k_len, left, right, scale)


def refusal(dtype: torch.dtype, head_dim: int, heads: int, samples: int) -> str:
    """Why these kernels do not compute a case, "" when they do."""
    if dtype not in DTYPES:
        taken = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        return f"takes {taken}, not {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD_DIM:
        return f"takes a head_dim up to {MAX_HEAD_DIM}, not {head_dim}"
    if heads * samples > MAX_SAMPLE_HEADS:
        return f"takes up to {MAX_SAMPLE_HEADS} heads times samples, not {heads * samples}"
    return ""


def tile_rows(x_THD: Tensor) -> int:
    """Rows of a tile of queries or keys.

    64; half of them above a head_dim of 128, where shared memory does not hold the backward's tiles else. Products of
    fp32 run beside the matrix units with their operands in registers, which have room for 16 rows.
    """
    if x_THD.dtype == torch.float32:
        return 16
    return 64 if x_THD.shape[2] <= 128 else 32


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, q_offsets: Tensor, k_offsets: Tensor,
        max_q_len: int, max_k_len: int, left: int, right: int, scale: float,
    ) -> Tensor:  # fmt: skip
        q_THD, k_THD, v_THD = (last_contiguous(x) for x in (q_THD, k_THD, v_THD))
        out_THD, lse_HT = attention_v1_forward(q_THD, k_THD, v_THD, q_offsets, k_offsets, max_q_len, left, right, scale)
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, lse_HT, q_offsets, k_offsets)
        ctx.max_k_len, ctx.left, ctx.right, ctx.scale = max_k_len, left, right, scale
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_THD: Tensor) -> tuple[Tensor | None, ...]:
        grads = attention_v1_backward(d_out_THD, *ctx.saved_tensors, ctx.max_k_len, ctx.left, ctx.right, ctx.scale)
        return (*grads, *[None] * 7)


# -- forward -----------------------------------------------------------------------------------------------------------


def attention_v1_forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q_len: int,
    left: int, right: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [T, H, D], lse [H, T] in fp32 and base 2). lse: +inf where a query sees no key, unset behind the samples."""
    rows, heads, head_dim = q_THD.shape
    samples = q_offsets.shape[0] - 1
    out = torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=q_THD.device)
    block = tile_rows(q_THD)
    grid = (triton.cdiv(max_q_len, block), heads * samples)
    if out.numel() and all(grid):
        _forward_v1[grid](
            q_THD, k_THD, v_THD, out, lse, q_offsets, k_offsets,
            q_THD.stride(0), q_THD.stride(1), k_THD.stride(0), k_THD.stride(1), v_THD.stride(0), v_THD.stride(1),
            out.stride(0), out.stride(1), heads, rows, left, right, scale * LOG2E,
            HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, CAUSAL=right == 0,
            HEAD_DIM=head_dim, BLOCK_D=tile_dim(head_dim), BLOCK_M=block, BLOCK_N=block,
            WIDE=wide(q_THD, k_THD, v_THD), PRECISION=precision_of(q_THD), num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["heads", "rows", "left", "right"])
def _forward_v1(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_offsets, k_offsets,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, heads, rows, left, right, scale,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of queries of one sample and head over its keys."""
    row = tl.program_id(0) * BLOCK_M
    sample = tl.program_id(1) // heads
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_start, q_len = _sample(q_offsets, sample)
    k_start, k_len = _sample(k_offsets, sample)
    if row >= q_len:
        return
    columns, m, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    i = row + m
    q = load_rows(q_ptr + q_start * q_row + head * q_head, row, m, columns, q_row, q_len, HEAD_DIM, BLOCK_D, WIDE)
    k_base = k_ptr + k_start * k_row + head * k_head
    v_base = v_ptr + k_start * v_row + head * v_head
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    end = tl.minimum(row + BLOCK_M + k_len - q_len, k_len) if CAUSAL else k_len
    for j in tl.range(0, end, BLOCK_N):
        k = load_rows(k_base, j, n, columns, k_row, k_len, HEAD_DIM, BLOCK_D, WIDE)
        x = dot(q, tl.trans(k), None, PRECISION) * scale
        seen = visible(i[:, None], (j + n)[None, :], q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
        x = tl.where(seen, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        # A row that saw nothing yet has the maximum -inf, and -inf - -inf is no number.
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(x - origin[:, None])
        shrink = tl.exp2(top - origin)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v = load_rows(v_base, j, n, columns, v_row, k_len, HEAD_DIM, BLOCK_D, WIDE)
        acc = dot(weights.to(v.dtype), v, acc, PRECISION)
        top = higher
    # A sum of 0: nothing seen. With lse = +inf the backward's weights exp2(x - lse) are 0 there.
    acc = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    lse = tl.where(total == 0.0, float("inf"), top + tl.log2(total))
    tl.store(lse_ptr + head * rows + q_start + i, lse, mask=i < q_len)
    out_base = out_ptr + q_start * out_row + head * out_head
    store_rows(out_base, row, m, columns, out_row, q_len, acc, HEAD_DIM, BLOCK_D, False)


@triton.jit
def _sample(offsets, sample):
    """(first row, number of rows)."""
    start = tl.load(offsets + sample).to(tl.int64)
    return start, (tl.load(offsets + sample + 1).to(tl.int64) - start).to(tl.int32)


# -- backward ----------------------------------------------------------------------------------------------------------


def attention_v1_backward(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, out_THD: Tensor, lse_HT: Tensor,
    q_offsets: Tensor, k_offsets: Tensor, max_k_len: int, left: int, right: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) in the inputs' dtype. dq is summed in fp32 [T, H, D] and cast at the end."""
    d_out_THD = last_contiguous(d_out_THD)
    rows, heads, head_dim = q_THD.shape
    samples = q_offsets.shape[0] - 1
    dq = torch.zeros(q_THD.shape, dtype=torch.float32, device=q_THD.device)
    dk = torch.zeros(k_THD.shape, dtype=k_THD.dtype, device=k_THD.device)
    dv = torch.zeros(v_THD.shape, dtype=v_THD.dtype, device=v_THD.device)
    block, tile_d = tile_rows(q_THD), tile_dim(head_dim)
    grid = (triton.cdiv(max_k_len, block), heads * samples)
    if dq.numel() and dk.numel() and all(grid):
        delta = torch.empty((heads, rows), dtype=torch.float32, device=q_THD.device)
        _delta_v1[(triton.cdiv(rows, block), heads)](
            d_out_THD, out_THD, delta, d_out_THD.stride(0), d_out_THD.stride(1), out_THD.stride(0), out_THD.stride(1),
            rows, HEAD_DIM=head_dim, BLOCK_D=tile_d, BLOCK_M=block, WIDE=wide(d_out_THD), num_warps=WARPS,
        )  # fmt: skip
        _backward_v1[grid](
            d_out_THD, q_THD, k_THD, v_THD, lse_HT, delta, dq, dk, dv, q_offsets, k_offsets,
            d_out_THD.stride(0), d_out_THD.stride(1), q_THD.stride(0), q_THD.stride(1),
            k_THD.stride(0), k_THD.stride(1), v_THD.stride(0), v_THD.stride(1),
            dq.stride(0), dq.stride(1), dk.stride(0), dk.stride(1),
            heads, rows, left, right, scale * LOG2E, scale,
            HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, CAUSAL=right == 0,
            HEAD_DIM=head_dim, BLOCK_D=tile_d, BLOCK_M=block, BLOCK_N=block,
            WIDE=wide(q_THD, k_THD, v_THD, d_out_THD), PRECISION=precision_of(q_THD),
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return dq.to(q_THD.dtype), dk, dv


@triton.jit(do_not_specialize=["rows"])
def _delta_v1(
    d_out_ptr, out_ptr, delta_ptr, d_out_row, d_out_head, out_row, out_head, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta [H, T] = rowsum(out * d_out). Behind the last offset it may be anything: nobody reads it there."""
    row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    columns, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    out = load_rows(out_ptr + head * out_head, row, m, columns, out_row, rows, HEAD_DIM, BLOCK_D, False)
    d_out = load_rows(d_out_ptr + head * d_out_head, row, m, columns, d_out_row, rows, HEAD_DIM, BLOCK_D, WIDE)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(delta_ptr + head * rows + row + m, delta, mask=row + m < rows)


@triton.jit(do_not_specialize=["heads", "rows", "left", "right"])
def _backward_v1(
    d_out_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, q_offsets, k_offsets,
    d_out_row, d_out_head, q_row, q_head, k_row, k_head, v_row, v_head, dq_row, dq_head, dk_row, dk_head,
    heads, rows, left, right, scale, grad_scale,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of keys of one sample and head over its queries, scores as keys by queries [N, M].

    ``grad_scale`` is the factor of the scores, ``scale`` the same times log2(e). dk and dv lie alike.
    """
    row = tl.program_id(0) * BLOCK_N
    sample = tl.program_id(1) // heads
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_start, q_len = _sample(q_offsets, sample)
    k_start, k_len = _sample(k_offsets, sample)
    if row >= k_len:
        return
    columns, m, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    j = row + n
    k = load_rows(k_ptr + k_start * k_row + head * k_head, row, n, columns, k_row, k_len, HEAD_DIM, BLOCK_D, WIDE)
    v = load_rows(v_ptr + k_start * v_row + head * v_head, row, n, columns, v_row, k_len, HEAD_DIM, BLOCK_D, WIDE)
    q_base = q_ptr + q_start * q_row + head * q_head
    d_out_base = d_out_ptr + q_start * d_out_row + head * d_out_head
    dq_base = dq_ptr + q_start * dq_row + head * dq_head
    per_row = head * rows + q_start
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    first = tl.maximum(row + q_len - k_len, 0) // BLOCK_M * BLOCK_M if CAUSAL else 0
    for start in tl.range(first, q_len, BLOCK_M):
        i = start + m
        q = load_rows(q_base, start, m, columns, q_row, q_len, HEAD_DIM, BLOCK_D, WIDE)
        d_out = load_rows(d_out_base, start, m, columns, d_out_row, q_len, HEAD_DIM, BLOCK_D, WIDE)
        lse = tl.load(lse_ptr + per_row + i, mask=i < q_len, other=float("inf"))
        delta = tl.load(delta_ptr + per_row + i, mask=i < q_len, other=0.0)
        x = dot(k, tl.trans(q), None, PRECISION) * scale
        seen = visible(i[None, :], j[:, None], q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
        x = tl.where(seen, x, float("-inf"))
        weights = tl.exp2(x - lse[None, :])
        dv = dot(weights.to(d_out.dtype), d_out, dv, PRECISION)
        d_weights = dot(v, tl.trans(d_out), None, PRECISION)
        dx = (weights * (d_weights - delta[None, :])).to(q.dtype)
        dk = dot(dx, q, dk, PRECISION)
        dq = dot(tl.trans(dx), k, None, PRECISION) * grad_scale
        # Relaxed: only the sum counts, and it is read by a later kernel.
        pointers = dq_base + tl.cast(start, tl.int64) * dq_row + tile_offsets(m, columns, dq_row, False)
        tl.atomic_add(pointers, dq, mask=(i < q_len)[:, None] & (columns < HEAD_DIM)[None, :], sem="relaxed")
    dk_base = dk_ptr + k_start * dk_row + head * dk_head
    store_rows(dk_base, row, n, columns, dk_row, k_len, dk * grad_scale, HEAD_DIM, BLOCK_D, False)
    dv_base = dv_ptr + k_start * dk_row + head * dk_head
    store_rows(dv_base, row, n, columns, dk_row, k_len, dv, HEAD_DIM, BLOCK_D, False)
