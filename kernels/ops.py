"""jagged_attention and gdpa of impl="triton": which kernels a forward and a backward are made of.

Legend: T rows of all samples, H heads, D head_dim.
"""

import torch
from torch import Tensor

from gem.kernels.attention_dkv import attention_dkv
from gem.kernels.attention_dq import attention_dq
from gem.kernels.attention_forward import attention_forward
from gem.kernels.bias import Bias
from gem.kernels.bias_gradient import bias_gradient
from gem.kernels.launch import last_contiguous
from gem.kernels.schedule import Batch


def jagged_batch(q: Tensor, k: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, left: int, right: int) -> Batch:
    """The batch of a call. A window that reaches past every row is none."""
    shared = q.shape[0] if q_offsets is None else 0
    q_rows, k_rows = q.shape[0], k.shape[0]
    # Query i stands at key position i + k_len - q_len: so far to the left all keys lie, so far to the right the last.
    left = -1 if left >= k_rows else left
    right = -1 if right >= q_rows else right
    return Batch(q_offsets, k_offsets, q_rows, k_rows, left, right, shared)


def attention_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, gradient of the bias's values or None). ``dtype``: of dq and dk, the inputs' own by default."""
    d_out_THD, q_THD, k_THD, v_THD = (last_contiguous(x) for x in (d_out_THD, q_THD, k_THD, v_THD))
    how = {"activation": activation, "qk_scale": qk_scale, "out_scale": out_scale, "bias": bias}
    dq, delta = attention_dq(d_out_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, batch, dtype=dtype, **how)
    dk, dv = attention_dkv(d_out_THD, q_THD, k_THD, v_THD, lse_HT, delta, batch, dk_dtype=dtype, **how)
    d_bias = None
    if bias is not None and bias.kind:
        assert lse_HT is not None
        d_bias = bias_gradient(d_out_THD, q_THD, k_THD, v_THD, lse_HT, delta, batch, qk_scale=qk_scale, bias=bias)
    return dq, dk, dv, d_bias


__all__ = ["attention_backward", "attention_forward", "jagged_batch"]
