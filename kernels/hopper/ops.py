"""GDPA of impl="gluon": from a call to the kernel that runs it, and its launch.

Arguments of the forwards' kernels, in this order: descriptors of q, k, v and the output (launch.ragged); the tile list;
a counter for claims (none for gdpa_plain, which claims nothing); jobs (its entries times heads), heads, programs;
``shared``, the queries that all samples have in common or 0; qk_scale, out_scale. Programs are persistent, at
most one a multiprocessor.

Legend: T rows of all samples, H heads, D head_dim.
"""

from dataclasses import dataclass

from torch import Tensor

from gem.kernels import launch
from gem.kernels.hopper import claims, gdpa_long, gdpa_plain, gdpa_short, parts
from gem.kernels.hopper.attention import attention_forward
from gem.kernels.hopper.backward import check_rows, gdpa_backward, readable
from gem.kernels.hopper.choose import Variant, choose
from gem.kernels.hopper.jfa_backward import attention_backward
from gem.kernels.launch import PLANS, Launch, empty_like, folds, kind_of, remember
from gem.kernels.ops import jagged_batch
from gem.kernels.schedule import Batch

_LAUNCH_OF = {"long": gdpa_long.launch_of, "short": gdpa_short.launch_of, "plain": gdpa_plain.launch_of}


@dataclass(frozen=True)
class _Plan:
    """What was decided for calls of one kind."""

    variant: Variant
    launch: Launch


def gdpa_forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, batch: Batch, *, activation: str, qk_scale: float,
    out_scale: float = 1.0, variant: Variant | None = None,
) -> Tensor:  # fmt: skip
    """out [T, H, D] of a batch without a mask, bf16 or fp16, D 64 or 128. ``variant``: chosen by the lengths if None.

    Rows behind the last offset are 0, as are those of samples without keys. ``batch.shared`` queries are [shared, H, D]
    and the output [B * shared, H, D]. Tensors that the copy engine cannot read (launch.tma_fits) are copied first.
    """
    rows, heads, head_dim = q_THD.shape
    shared = batch.shared if batch.q_offsets is None else 0
    if batch.q_offsets is None:
        rows = shared * batch.size
    out = q_THD.new_empty((rows, heads, head_dim)) if shared else empty_like(q_THD)
    if rows == 0:
        return out
    if k_THD.shape[0] == 0:
        return out.zero_()
    variant = variant or choose(batch, head_dim)
    kind = kind_of(batch, q_THD, k_THD, v_THD)
    lean = parts.lean(activation, q_THD.dtype, qk_scale)
    key = ("gluon forward", kind, activation, variant, lean)
    plan = PLANS.get(key)
    if plan is None:
        check_rows(rows, batch.q_rows, batch.k_rows)
        q_THD, k_THD, v_THD = (readable(x) for x in (q_THD, k_THD, v_THD))
        plan = _Plan(variant, _LAUNCH_OF[variant.kernel](variant, head_dim, activation, folds(activation, q_THD), lean))
        if kind is not None and kind == kind_of(batch, q_THD, k_THD, v_THD):  # copies have other strides than the call
            remember(key, plan)
    tiles = batch.tiles("q", plan.variant.rows, sorted=plan.variant.zigzag)
    jobs = tiles.shape[0] * heads
    if jobs >= 2**31:
        raise ValueError(f"the Gluon kernels count jobs in 32 bits, got {jobs} tiles and heads; accepted: up to 2**31")
    programs = min(jobs, launch.multiprocessors(tiles.device))
    lists = (tiles,) if plan.variant.kernel == "plain" else (tiles, claims.counter(tiles.device))
    plan.launch((programs,), q_THD, k_THD, v_THD, out, *lists, jobs, heads, programs, shared, qk_scale, out_scale)
    return out


__all__ = ["attention_backward", "attention_forward", "gdpa_backward", "gdpa_forward", "jagged_batch"]
