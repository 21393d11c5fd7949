"""Forward of jagged softmax attention of impl="gluon": from a call to the kernel that runs it, and its launch.

Arguments of the kernels, in this order: descriptors of q, k, v and the output (launch.ragged); log-sum-exp; the tile
list; a counter for claims; jobs (its entries times heads), heads, query heads a head of keys, programs; ``shared``, the
queries that all samples have in common or 0; rows of the output; left, right (schedule.Batch); the scale of scores in
base 2. Programs are persistent, at most one a multiprocessor.

Legend: T rows of all samples, H heads, G heads of keys and values, D head_dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gem.kernels import launch
from gem.kernels.device import LOG2E
from gem.kernels.hopper import claims, jfa_long, jfa_short
from gem.kernels.hopper.backward import check_rows, readable
from gem.kernels.hopper.choose import FEW_QUERIES, SHORT_KEYS, Variant
from gem.kernels.launch import PLANS, Launch, empty_like, kind_of, remember
from gem.kernels.schedule import Batch


@dataclass(frozen=True)
class _Plan:
    """What was decided for calls of one kind."""

    variant: Variant
    launch: Launch


def attention_forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, batch: Batch, *, qk_scale: float, variant: Variant | None = None
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], lse [H, T] in fp32 and base 2), bf16 or fp16, D 64 or 128, G a divisor of H.

    Rows behind the last offset are 0, as are queries that see no key; their lse is +inf. ``batch.shared`` queries are
    [shared, H, D] and the output [B * shared, H, D]. ``variant``: chosen by the lengths if None. Tensors that the copy
    engine cannot read (launch.tma_fits) are copied first.
    """
    rows, heads, head_dim = q_THD.shape
    shared = batch.shared if batch.q_offsets is None else 0
    if batch.q_offsets is None:
        rows = shared * batch.size
    out = q_THD.new_empty((rows, heads, head_dim)) if shared else empty_like(q_THD)
    lse = q_THD.new_empty((heads, rows), dtype=torch.float32)
    if rows == 0:
        return out, lse
    if k_TGD.shape[0] == 0:
        return out.zero_(), lse.fill_(float("inf"))
    if qk_scale <= 0:  # a maximum is found before it is scaled: that needs a scale > 0
        q_THD = -q_THD if qk_scale < 0 else q_THD * 0
    scale = (abs(qk_scale) or 1.0) * LOG2E
    variant = variant or choose(batch, head_dim)
    kind = kind_of(batch, q_THD, k_TGD, v_TGD)
    key = ("gluon attention", kind, variant)
    plan = PLANS.get(key)
    if plan is None:
        check_rows(rows, batch.q_rows, batch.k_rows)
        q_THD, k_TGD, v_TGD = (readable(x) for x in (q_THD, k_TGD, v_TGD))
        plan = _Plan(variant, _launch_of(variant, head_dim, batch))
        if kind is not None and kind == kind_of(batch, q_THD, k_TGD, v_TGD):  # copies have other strides than the call
            remember(key, plan)
    tiles = batch.tiles("q", plan.variant.rows)
    jobs = tiles.shape[0] * heads
    if jobs >= 2**31:
        raise ValueError(f"the Gluon kernels count jobs in 32 bits, got {jobs} tiles and heads; accepted: up to 2**31")
    programs = min(jobs, launch.multiprocessors(tiles.device))
    plan.launch(
        (programs,), q_THD, k_TGD, v_TGD, out, lse, tiles, claims.counter(tiles.device), jobs, heads,
        heads // k_TGD.shape[1], programs, shared, rows, batch.left, batch.right, scale,
    )  # fmt: skip
    return out, lse


def choose(batch: Batch, head_dim: int) -> Variant:
    """The variant for a batch's mean lengths. Under a mask none keeps all keys of a sample."""
    queries = batch.shared if batch.q_offsets is None else batch.q_rows / max(batch.size, 1)
    if queries <= FEW_QUERIES:
        return _FEW[head_dim]
    if masked(batch):
        return _EDGED[head_dim]
    return (_SHORT if batch.k_rows / max(batch.size, 1) <= SHORT_KEYS else _LONG)[head_dim]


def masked(batch: Batch) -> bool:
    """Whether an edge of causal or of a window may cross its tiles."""
    return batch.left >= 0 or batch.right >= 0


def _launch_of(variant: Variant, head_dim: int, batch: Batch) -> Launch:
    if variant.kernel == "long":
        return jfa_long.launch_of(variant, head_dim, batch.left >= 0, batch.right >= 0)
    if masked(batch):
        raise ValueError(
            f"the Gluon kernel for short keys takes no mask, got a window of {batch.left}, {batch.right}; accepted: "
            'kernel "long", which visits only what a window shows'
        )
    return jfa_short.launch_of(variant, head_dim)


_LONG = {
    64: Variant("long", 192, 128, 5, consumers=3, q_slots=1, turns=1),
    128: Variant("long", 128, 128, 2, q_slots=1, q_registers=True, turns=2),
}
# Three consumers have too few registers for edges: 1,200 bytes a thread were spilled.
_EDGED = {64: Variant("long", 128, 128, 4, q_slots=2, turns=1), 128: _LONG[128]}
_FEW = {64: Variant("long", 64, 64, 4, lanes=2), 128: Variant("long", 64, 64, 2, lanes=2)}
_SHORT = {
    64: Variant("short", 1024, 64, 6, consumers=3, values_first=True),
    128: Variant("short", 1024, 64, 4, values_first=True),
}
