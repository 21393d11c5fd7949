"""Backward of jagged softmax attention of impl="gluon": which kernels a batch's gradients are made of.

From shapes alone, as for GDPA (backward.py): few, keep, short and long, with the same limits; with causal or a window
long alone, whose tiles of keys visit only what an edge leaves.

Legend: T rows of all samples, H heads, D head_dim.
"""

from torch import Tensor

from gem.kernels.hopper import jfa_backward_few, jfa_backward_keep, jfa_backward_long, jfa_backward_short
from gem.kernels.hopper.attention import masked
from gem.kernels.hopper.backward import choose_backward, gradients_of
from gem.kernels.hopper.rows import of_rows
from gem.kernels.hopper.sums import room
from gem.kernels.schedule import Batch


def attention_backward(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, out_THD: Tensor, lse_HT: Tensor, batch: Batch, *,
    qk_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), bf16 or fp16, D 64 or 128, of as many heads of keys as of queries; the same bits every run.

    ``out_THD``, ``lse_HT``: the forward's. Rows behind the last offset are 0. ``batch.shared`` queries get a gradient a
    sample, in fp32, summed in the samples' order. Tensors that the copy engine cannot read are copied first.
    """

    def run(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, batch: Batch) -> None:
        kernel, limits = ("long", None) if masked(batch) else choose_backward(batch, k.shape[2])
        given = (d_out, q, k, v, of_rows(out_THD, d_out, lse_HT, batch), dq, dk, dv, batch)
        sums = None
        if kernel == "few":
            assert limits is not None
            jfa_backward_few.run(*given, qk_scale=qk_scale, queries=limits.queries)
        elif kernel == "keep":
            jfa_backward_keep.run(*given, qk_scale=qk_scale)
        elif kernel == "short":
            sums = room(dq.shape[0], batch.size, k.shape[1], k.shape[2], k.device)
            jfa_backward_short.run(*given, qk_scale=qk_scale, sums=sums)
        # All samples, or those beyond the limits and what lies behind the last offsets.
        jfa_backward_long.run(*given, qk_scale=qk_scale, beyond=limits, sums=sums)

    return gradients_of(d_out_THD, q_THD, k_THD, v_THD, batch, run)
