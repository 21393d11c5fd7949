"""Forward of jagged attention: softmax attention, or GDPA where an activation stands in softmax's place.

One program computes a tile of queries of one sample and head over the keys that it sees. Jagged ends cost no mask in
the loop. Rows behind a sample's end read as zeros, so their scores are 0: GDPA adds act(0) v = 0, and softmax adds
exp(0 - max) to its sum for each of them and nothing to its output, which is subtracted again at the end
(Jagged Flash Attention's masking by subtraction; -inf in every tile was 28 % of its instructions). -inf appears in
the tiles that an edge of causal or window crosses, and with a bias in the one that the keys' end crosses; tiles beyond
the edges are not visited.

Arguments and constants of the three kernels: ``*_source`` is what the loop reads its tiles from, a descriptor where
TMA, else the same pointer as ``*_ptr``. SHARED: all samples have the same queries. FOLD: out_scale goes into the
weights (launch.folds). WARM: see device.warm_rows. WIDE: offsets inside a tile take 64 bits. PERSISTENT: see
device.dealt. Pointers that a launch has no tensor for (no bias, no log-sum-exp) are some other tensor's, and unread.

Legend: T rows of all samples, H heads, D head_dim, M queries of a tile, N keys of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem.kernels.activations import activate
from gem.kernels.bias import NO_BIAS, Bias, bias_tile
from gem.kernels.config import Config, Shape, has_tma
from gem.kernels.device import LOG2E as _LOG2E
from gem.kernels.device import dealt, dot, load_rows, load_tile, read_tile, store_rows, warm_rows
from gem.kernels.launch import (
    PLANS,
    Launch,
    Plan,
    empty_like,
    folds,
    grid_of,
    kind_of,
    last_contiguous,
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


def attention_forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    batch: Batch,
    *,
    activation: str = "softmax",
    qk_scale: float,
    out_scale: float = 1.0,
    bias: Bias | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], lse [H, T] in fp32 and base 2; empty for GDPA).

    Rows behind the last offset are 0, as are queries that see no key; their lse is +inf, so that exp2(score - lse) is 0
    in the backward. ``batch.shared`` queries are [shared, H, D] and the output [B * shared, H, D].
    """
    softmax, shared = activation == "softmax", batch.q_offsets is None
    rows, heads, head_dim = q_THD.shape
    if shared:
        rows = batch.shared * batch.size
    out = q_THD.new_empty((rows, heads, head_dim)) if shared else empty_like(q_THD)
    lse = q_THD.new_empty((heads, rows), dtype=torch.float32) if softmax else nothing(q_THD.device)
    if rows == 0:
        return out, lse
    # A row's maximum is found before it is scaled: that needs a scale >= 0, so the sign moves into q.
    sign = 1 if qk_scale > 0 or not softmax else (-1 if qk_scale < 0 else 0)
    scale = (abs(qk_scale) if sign else 1.0) * _LOG2E if softmax else qk_scale
    kind = None if bias else kind_of(batch, q_THD, k_THD, v_THD)
    key = ("forward", kind, activation, sign, config)
    plan = PLANS.get(key)
    if plan is None:
        q_THD, k_THD, v_THD = (last_contiguous(x) for x in (q_THD, k_THD, v_THD))
        plan = _plan(q_THD, k_THD, v_THD, batch, activation, qk_scale, out_scale, sign, bias or NO_BIAS, config)
        if kind is not None and kind == kind_of(batch, q_THD, k_THD, v_THD):  # copies have other strides than the call
            remember(key, plan)
    tiles = batch.tiles("q", plan.config.block_m)
    plan.launch(
        grid_of(plan.config, tiles, heads),
        q_THD, k_THD, v_THD, k_THD, v_THD, out, lse, tiles, *plan.strides, tiles.shape[0], heads, rows,
        batch.left, batch.right, scale, out_scale, *(bias or NO_BIAS).arguments(out),
    )  # fmt: skip
    return out, lse


def _plan(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, batch: Batch, activation: str, qk_scale: float, out_scale: float,
    sign: int, bias: Bias, config: Config | None,
) -> Plan:  # fmt: skip
    heads, head_dim = q_THD.shape[1:]
    tma = has_tma(q_THD.device) and tma_fits(k_THD, v_THD)
    if config is None:
        how = {"activation": activation, "qk_scale": qk_scale, "out_scale": out_scale, "bias": bias}
        config = choose(
            Shape.of("forward", q_THD, batch, activation, bias.kind, tma),
            lambda c: attention_forward(q_THD, k_THD, v_THD, batch, config=c, **how),
        )
    strides = (
        q_THD.stride(0), q_THD.stride(1), k_THD.stride(0), k_THD.stride(1), v_THD.stride(0), v_THD.stride(1),
        heads * head_dim, head_dim,
    )  # fmt: skip
    launch = Launch(
        _forward, ACTIVATION=activation, SIGN=sign, HAS_LEFT=batch.left >= 0, HAS_RIGHT=batch.right >= 0,
        SHARED=batch.q_offsets is None, BIAS=bias.kind, BIAS_STEPS=bias.steps,
        HEAD_DIM=head_dim, BLOCK_D=tile_dim(head_dim), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        WIDE=wide(q_THD, k_THD, v_THD), PRECISION=precision_of(q_THD), PERSISTENT=config.persistent > 0, TMA=tma,
        WARM=config.warm, FOLD=folds(activation, q_THD), warps=config.warps, stages=config.stages,
        registers=config.registers, ragged={1: config.block_n, 2: config.block_n} if tma else None,
    )  # fmt: skip
    return Plan(config, folds(activation, q_THD), strides, launch)


@triton.jit(do_not_specialize=["n_tiles", "heads", "out_rows", "left", "right"])
def _forward(
    q_ptr, k_source, v_source, k_ptr, v_ptr, out_ptr, lse_ptr, tiles,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    n_tiles, heads, out_rows, left, right, scale, out_scale,
    bias_ptr, boundaries, q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries,
    ACTIVATION: tl.constexpr, SIGN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SHARED: tl.constexpr, BIAS: tl.constexpr, BIAS_STEPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, PERSISTENT: tl.constexpr, TMA: tl.constexpr,
    WARM: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    SOFTMAX: tl.constexpr = ACTIVATION == "softmax"
    # Where -inf masks some tiles anyway, and where a bias gives the columns behind the end a score, the jagged end is
    # one more edge; elsewhere its share is subtracted.
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT or BIAS != ""
    # The heads of a tile run side by side: their rows are neighbours in memory (2 to 8 % on an H200).
    work = n_tiles * heads
    turns = tl.cdiv(work, tl.num_programs(0)) if PERSISTENT else 1
    for turn in range(turns):
        item = dealt(turn, work, PERSISTENT)
        head = (item % heads).to(tl.int64)
        sample, row, q_start, q_len, k_start, k_len = read_tile(tiles, item // heads, n_tiles)
        if sample >= 0:
            out_start = sample.to(tl.int64) * q_len if SHARED else q_start
            low, high = seen_range(row, BLOCK_M, q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
            columns, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
            if WARM:
                if low < high:
                    n = tl.arange(0, BLOCK_N)
                    warm_rows(k_ptr + k_start * k_row + head * k_head, low, n, k_row, k_len, HEAD_DIM)
                    warm_rows(v_ptr + k_start * v_row + head * v_head, low, n, v_row, k_len, HEAD_DIM)
            q_base = q_ptr + q_start * q_row + head * q_head
            q = load_rows(q_base, row, m, columns, q_row, q_len, HEAD_DIM, BLOCK_D, WIDE)
            if SIGN != 1:
                q = (q * SIGN).to(q_ptr.dtype.element_ty)
            acc, top, total = _over_keys(
                q, k_source, v_source, row, low, high, q_len, k_len, k_row, k_head, v_row, v_head, left, right, scale,
                out_scale, sample, head, q_start, k_start, bias_ptr, boundaries, q_times, k_times, bias_b, bias_h,
                bias_q, bias_k,
                n_boundaries, ACTIVATION, MASKED, HAS_LEFT, HAS_RIGHT, BIAS, BIAS_STEPS, HEAD_DIM, BLOCK_D, BLOCK_M,
                BLOCK_N, WIDE, PRECISION, TMA, FOLD,
            )  # fmt: skip
            if SOFTMAX:
                if not MASKED:
                    padded = tl.cdiv(k_len, BLOCK_N) * BLOCK_N - k_len
                    share = padded * tl.exp2(-top)
                    rest = total - share
                    # The difference keeps its digits while the sum is not mostly padding: else (all scores far below 0,
                    # or a few keys in a tile) the tile is computed anew with masks.
                    doubt = 0.25 if PRECISION == "ieee" else 0.0625
                    doubtful = (rest < doubt * share) & (row + m < q_len)
                    total = tl.where(padded > 0, rest, total)
                    if (padded > 0) & (tl.max(doubtful.to(tl.int32), 0) > 0):
                        acc, top, total = _over_keys(
                            q, k_source, v_source, row, low, high, q_len, k_len, k_row, k_head, v_row, v_head, left,
                            right, scale, out_scale, sample, head, q_start, k_start, bias_ptr, boundaries, q_times,
                            k_times,
                            bias_b, bias_h, bias_q, bias_k, n_boundaries, ACTIVATION, True, HAS_LEFT, HAS_RIGHT, BIAS,
                            BIAS_STEPS, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, WIDE, PRECISION, TMA, FOLD,
                        )  # fmt: skip
                # A sum of 0: nothing seen. NaN is not 0 and stays.
                acc = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
                lse = tl.where(total == 0.0, float("inf"), top + tl.log2(total))
                tl.store(lse_ptr + head * out_rows + out_start + row + m, lse, mask=row + m < q_len)
            elif not FOLD:
                acc = acc * out_scale
            out_base = out_ptr + out_start * out_row + head * out_head
            store_rows(out_base, row, m, columns, out_row, q_len, acc, HEAD_DIM, BLOCK_D, False)


@triton.jit
def _over_keys(
    q, k_source, v_source, row, low, high, q_len, k_len, k_row, k_head, v_row, v_head, left, right, scale, out_scale,
    sample,
    head, q_start, k_start, bias_ptr, boundaries, q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries,
    ACTIVATION: tl.constexpr, MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BIAS: tl.constexpr, BIAS_STEPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """(sum of weights times v, [M, D]; the rows' maxima in base 2 and sums of weights, [M], 0 for GDPA)."""
    SOFTMAX: tl.constexpr = ACTIVATION == "softmax"
    columns, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    i = row + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for j in tl.range(low, high, BLOCK_N):
        k = load_tile(k_source, k_start, k_len, head, j, n, columns, k_row, k_head, HEAD_DIM, BLOCK_D, WIDE, TMA)
        v = load_tile(v_source, k_start, k_len, head, j, n, columns, v_row, v_head, HEAD_DIM, BLOCK_D, WIDE, TMA)
        whole = tile_is_whole(row, BLOCK_M, j, BLOCK_N, q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
        x = dot(q, tl.trans(k), None, PRECISION)
        if SOFTMAX:
            factor = scale  # of x in the exponent; where a bias is added it is applied before
            if BIAS != "":
                factor = 1.0
                x = x * scale + LOG2E * bias_tile(
                    i[:, None], (j + n)[None, :], q_len, k_len, sample, head, q_start, k_start, bias_ptr, boundaries,
                    q_times, k_times, bias_b, bias_h, bias_q, bias_k, n_boundaries, BIAS, BIAS_STEPS,
                )  # fmt: skip
            if MASKED:
                if not whole:
                    seen = visible(i[:, None], (j + n)[None, :], q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
                    x = tl.where(seen, x, float("-inf"))
            higher = tl.maximum(top, tl.max(x, 1) * factor)
            # A row that saw nothing yet has the maximum -inf, and -inf - -inf is no number.
            origin = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
            weights = tl.exp2(x * factor - origin[:, None])
            shrink = tl.exp2(top - origin)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            top = higher
        else:
            weights = activate(x * scale, ACTIVATION, q.dtype == tl.bfloat16)
            if FOLD:
                weights = weights * out_scale
            if MASKED:
                if not whole:
                    seen = visible(i[:, None], (j + n)[None, :], q_len, k_len, left, right, HAS_LEFT, HAS_RIGHT)
                    weights = tl.where(seen, weights, 0.0)
        acc = dot(weights.to(v.dtype), v, acc, PRECISION)
    return acc, top, total
