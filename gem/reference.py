"""The definition of every op: float64, one sample at a time, meant to be read. Everything else is compared with this.

Arguments are those of the public ops (``gem.ops``) plus two:

- ``compute_dtype``: float64 is the oracle; the inputs' own dtype gives the "same-precision plain PyTorch run" to which
  the tests compare errors.
- ``samples``: compute only these samples, leave the other samples' rows 0 (big batches are checked on a subset).

Plain autograd differentiates all of it. Nothing here is fast, and nothing here is shared with a fast implementation
except the formulas of the activations.

Legend: T rows of all samples, B samples, H heads, D head_dim, L rows of one sample (LQ, LK), N shared queries.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor

from gem.activations import FORWARD as ACTIVATIONS
from gem.bias import Bias, PositionBias, TimeBias


def jagged_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    bias: Bias | None = None,
    scale: float | None = None,
    compute_dtype: torch.dtype = torch.float64,
    samples: Iterable[int] | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias) v inside each sample; a query that sees no key gets 0. Returns [T, H, D]."""
    factor = q_THD.shape[-1] ** -0.5 if scale is None else scale
    q_bounds, k_bounds = _bounds(q_offsets), _bounds(q_offsets if k_offsets is None else k_offsets)
    q, k, v = (x.to(compute_dtype) for x in (q_THD, k_THD, v_THD))

    def one_sample(b: int) -> Tensor:
        (q0, q1), (k0, k1) = q_bounds[b], k_bounds[b]
        scores_HLL = factor * _scores(q[q0:q1], k[k0:k1])
        if bias is not None:
            scores_HLL = scores_HLL + _bias(bias, b, (q0, q1), (k0, k1), compute_dtype)
        visible_LL = _visible(q1 - q0, k1 - k0, causal, window, q.device)
        return _softmax_attention(scores_HLL, visible_LL, v[k0:k1])

    return _all_samples(one_sample, (q, k, v), q_bounds, samples)


def gdpa(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None = None,
    *,
    activation: str = "gelu",
    qk_scale: float = 1.0,
    out_scale: float = 1.0,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    broadcast_q: bool = False,
    compute_dtype: torch.dtype = torch.float64,
    samples: Iterable[int] | None = None,
) -> Tensor:
    """out_scale * act(qk_scale q k^T) v inside each sample; hidden pairs contribute 0.

    With ``broadcast_q``, q is [N, H, D], the same queries for every sample, and the result is [B * N, H, D].
    """
    q, k, v = (x.to(compute_dtype) for x in (q_THD, k_THD, v_THD))
    keys = q_offsets if k_offsets is None else k_offsets
    if keys is None:
        raise ValueError("gdpa: give q_offsets or k_offsets")
    k_bounds = _bounds(keys)
    if broadcast_q:
        n = q.shape[0]
        q = q.repeat(len(k_bounds), 1, 1)
        q_bounds = [(b * n, (b + 1) * n) for b in range(len(k_bounds))]
    else:
        q_bounds = _bounds(keys if q_offsets is None else q_offsets)

    def one_sample(b: int) -> Tensor:
        (q0, q1), (k0, k1) = q_bounds[b], k_bounds[b]
        weights_HLL = ACTIVATIONS[activation](qk_scale * _scores(q[q0:q1], k[k0:k1]))
        visible_LL = _visible(q1 - q0, k1 - k0, causal, window, q.device)
        weights_HLL = weights_HLL.masked_fill(~visible_LL, 0.0)
        return out_scale * torch.einsum("hqk,khd->qhd", weights_HLL, v[k0:k1])

    return _all_samples(one_sample, (q, k, v), q_bounds, samples)


def block_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    offsets: Tensor,
    *,
    block: int = 64,
    rope: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    compute_dtype: torch.dtype = torch.float64,
    samples: Iterable[int] | None = None,
) -> Tensor:
    """Softmax attention inside blocks of ``block`` tokens, counted from the sample's start, q and k rotated first."""
    factor = q_THD.shape[-1] ** -0.5 if scale is None else scale
    bounds = _bounds(offsets)
    q, k, v = (x.to(compute_dtype) for x in (q_THD, k_THD, v_THD))

    def one_sample(b: int) -> Tensor:
        start, end = bounds[b]
        q_LHD, k_LHD, v_LHD = q[start:end], k[start:end], v[start:end]
        if rope is not None:
            q_LHD, k_LHD = rotate(q_LHD, *rope), rotate(k_LHD, *rope)
        blocks = torch.arange(end - start, device=q.device) // block
        same_block_LL = blocks[:, None] == blocks[None, :]
        return _softmax_attention(factor * _scores(q_LHD, k_LHD), same_block_LL, v_LHD)

    return _all_samples(one_sample, (q, k, v), bounds, samples)


def rotate(x_LHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the GPT-NeoX / Llama form: x[..., :D/2] pairs with x[..., D/2:]; cos, sin [>= L, D/2]."""
    length = x_LHD.shape[0]
    cos_L1D, sin_L1D = (t[:length, None, :].to(x_LHD.dtype) for t in (cos, sin))
    first, second = x_LHD.chunk(2, dim=-1)
    return torch.cat([first * cos_L1D - second * sin_L1D, second * cos_L1D + first * sin_L1D], dim=-1)


def _bounds(offsets: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(offsets.tolist()))


def _scores(q_LHD: Tensor, k_LHD: Tensor) -> Tensor:
    return torch.einsum("qhd,khd->hqk", q_LHD, k_LHD)


def _visible(q_len: int, k_len: int, causal: bool, window: tuple[int, int], device: torch.device) -> Tensor:
    """Which keys a query sees, [LQ, LK]. Bottom-right aligned: the last query stands at the last key."""
    left, right = window
    q_position = torch.arange(q_len, device=device)[:, None] + (k_len - q_len)
    k_position = torch.arange(k_len, device=device)[None, :]
    visible = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
    if left >= 0:
        visible &= k_position >= q_position - left
    if right >= 0:
        visible &= k_position <= q_position + right
    if causal:
        visible &= k_position <= q_position
    return visible


def _softmax_attention(scores_HLL: Tensor, visible_LL: Tensor, v_LHD: Tensor) -> Tensor:
    if scores_HLL.numel() == 0:
        return torch.einsum("hqk,khd->qhd", scores_HLL, v_LHD)
    hidden = ~visible_LL
    lowest = torch.finfo(scores_HLL.dtype).min  # finite, so that a row hidden by a bias of -inf gives 0 and not NaN
    row_max = scores_HLL.detach().masked_fill(hidden, lowest).amax(-1, keepdim=True).clamp(min=lowest)
    weights_HLL = (scores_HLL - row_max).masked_fill(hidden, -torch.inf).exp()
    # The largest visible weight is exp(0) = 1, so a sum below 1 means that the query sees nothing: 0 / 1 = 0.
    row_sum = weights_HLL.sum(-1, keepdim=True).clamp(min=1.0)
    return torch.einsum("hqk,khd->qhd", weights_HLL / row_sum, v_LHD)


def _bias(bias: Bias, b: int, q_range: tuple[int, int], k_range: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The bias of sample b, broadcastable to [H, LQ, LK]."""
    (q0, q1), (k0, k1) = q_range, k_range
    q_len, k_len = q1 - q0, k1 - k0
    if isinstance(bias, Tensor):
        full = bias.to(dtype).reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
        one = full[b if full.shape[0] > 1 else 0]
        return one[:, : q_len if one.shape[1] > 1 else 1, : k_len if one.shape[2] > 1 else 1]
    if isinstance(bias, PositionBias):
        device = bias.table.device
        distance = (torch.arange(q_len, device=device) + (k_len - q_len))[:, None] - torch.arange(k_len, device=device)
    elif isinstance(bias, TimeBias):
        distance = bias.q_times[q0:q1, None].long() - bias.k_times[None, k0:k1].long()
    else:
        raise TypeError(f"bias must be a tensor, PositionBias or TimeBias, got {type(bias).__name__}")
    bucket_LL = (distance[..., None] >= bias.boundaries).sum(-1)
    # The table is widened before the look-up, so that its gradient is summed in `dtype` too.
    return bias.table.to(dtype)[bucket_LL].permute(2, 0, 1)


def _all_samples(
    one_sample: Callable[[int], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    q_bounds: list[tuple[int, int]],
    samples: Iterable[int] | None,
) -> Tensor:
    """Samples' results in order; rows of samples left out, and rows behind the last offset, are 0."""
    q_THD = inputs[0]
    wanted = range(len(q_bounds)) if samples is None else set(samples)
    parts, done = [], 0
    for b, (start, end) in enumerate(q_bounds):
        parts.append(one_sample(b) if b in wanted else q_THD.new_zeros(end - start, *q_THD.shape[1:]))
        done = end
    # Sums of nothing: they keep the inputs in the autograd graph when no sample does, as in an empty batch.
    nothing = sum(x[:0].sum() for x in inputs)
    parts.append(q_THD.new_zeros(q_THD.shape[0] - done, *q_THD.shape[1:]) + nothing)
    return torch.cat(parts)
