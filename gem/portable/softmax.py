"""Softmax attention on jagged tensors in plain PyTorch.

Each tile holds the whole key range of its queries, so the row statistics need no second look: the backward recomputes
the softmax in one fused pass, and nothing but the inputs is saved.

Legend: as in batch.py.
"""

from typing import Protocol

import torch
from torch import Tensor

from gem.portable.batch import Batch, Dense, Spec, Tile
from gem.portable.biases import BiasInputs
from gem.portable.products import product

_aten = torch.ops.aten


class Rotates(Protocol):
    """What block attention does to q and k: see ``gem.portable.block``."""

    def apply_(self, x_BLD: Tensor, group: Dense, row: int = 0, back: bool = False) -> Tensor:
        """Rotate in place."""
        ...


def forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    spec: Spec,
    scale: float,
    bias: BiasInputs,
    rotation: Rotates | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias) v for every sample; [T, H, D], rows outside every sample 0."""
    batch = Batch(spec, q_THD, widen=rotation is not None)
    q, k, v = batch.rows(q_THD), batch.rows(k_THD), batch.rows(v_THD)
    out = batch.out_q(q_THD)
    for group in batch.groups():
        q_BLD, k_BLD, v_BLD = group.load_q(q), group.load_k(k), group.load_k(v)
        if rotation is not None:
            q_BLD, k_BLD = (rotation.apply_(group.own(x), group) for x in (q_BLD, k_BLD))
        for tile in group.tiles(hide_key_tail=True):
            weights_BLL, dead = _weights(group, tile, q_BLD, k_BLD, scale, bias)
            out_BLD = product(weights_BLL, v_BLD[:, tile.k0 : tile.k1])
            _clear_(out_BLD, dead)
            group.store_q(out, tile, out_BLD)
    return out.result()


def backward(
    d_out_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    spec: Spec,
    scale: float,
    bias: BiasInputs,
    rotation: Rotates | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; the gradients of biases are left in ``bias.grads``."""
    batch = Batch(spec, q_THD, widen=rotation is not None)
    q, k, v, d_out = batch.rows(q_THD), batch.rows(k_THD), batch.rows(v_THD), batch.rows(d_out_THD)
    dq, dk, dv = batch.out_q(q_THD), batch.out_k(k_THD), batch.out_k(v_THD)
    if bias.present:
        bias.start_backward(batch.score_dtype)
    for group in batch.groups():
        q_BLD, k_BLD, v_BLD, d_out_BLD = group.load_q(q), group.load_k(k), group.load_k(v), group.load_q(d_out)
        if rotation is not None:
            q_BLD, k_BLD = (rotation.apply_(group.own(x), group) for x in (q_BLD, k_BLD))
        dk_sum, dv_sum = group.key_sum(), group.key_sum()
        for tile in group.tiles(hide_key_tail=True):
            weights_BLL, dead = _weights(group, tile, q_BLD, k_BLD, scale, bias)
            queries, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            d_out_tile = d_out_BLD[:, queries]
            if dead is not None:
                d_out_tile = d_out_tile.clone()
                _clear_(d_out_tile, dead)
            dv_sum.add(keys, weights_BLL.transpose(1, 2), d_out_tile)
            d_weights = product(
                d_out_tile, v_BLD[:, keys].transpose(1, 2), out=batch.workspace("d_weights", *weights_BLL.shape)
            )
            # One pass over the tile: P * (dP - rowsum(P * dP)).
            d_scores = _aten._softmax_backward_data.out(
                d_weights,
                weights_BLL,
                -1,
                weights_BLL.dtype,
                grad_input=batch.workspace("scores", *weights_BLL.shape),
            )
            if bias.present:
                bias.backward(_split_heads(d_scores, batch), group, tile)
            dq_BLD = product(d_scores, k_BLD[:, keys], scale)
            if rotation is not None:
                rotation.apply_(dq_BLD, group, tile.q0, back=True)
            group.store_q(dq, tile, dq_BLD)
            dk_sum.add(keys, d_scores.transpose(1, 2), q_BLD[:, queries], scale)
        if rotation is not None:
            rotation.apply_(dk_sum.into_BLD, group, back=True)
        group.store_k(dk, dk_sum)
        group.store_k(dv, dv_sum)
    return dq.result(), dk.result(), dv.result()


def _weights(
    group: Dense, tile: Tile, q_BLD: Tensor, k_BLD: Tensor, scale: float, bias: BiasInputs
) -> tuple[Tensor, Tensor | None]:
    """Softmax weights [GH, LQ, LK] of a tile, and which queries see nothing (their weights are finite, unused)."""
    batch = group.batch
    q_tile, k_tile = q_BLD[:, tile.q0 : tile.q1], k_BLD[:, tile.k0 : tile.k1]
    shape = (q_tile.shape[0], q_tile.shape[1], k_tile.shape[1])
    scores = product(q_tile, k_tile.transpose(1, 2), scale, out=batch.workspace("scores", *shape))
    scores_GHLL = _split_heads(scores, batch)
    dead = tile.dead
    if bias.present:
        bias.add_to(scores_GHLL, group, tile)
    if tile.hidden is not None:
        hidden = tile.hidden if dead is None else tile.hidden & ~dead
        scores_GHLL.add_(torch.where(hidden, -torch.inf, 0.0).to(scores.dtype))
    if bias.dense is not None:
        # A bias of -inf over a whole row hides the row: 0, not NaN.
        all_hidden = scores_GHLL.amax(-1, keepdim=True) == -torch.inf
        scores_GHLL.masked_fill_(all_hidden, 0.0)
        dead = all_hidden if dead is None else dead | all_hidden
    weights = torch.softmax(scores, -1, out=batch.workspace("weights", *shape))
    return weights, dead


def _split_heads(x_BLL: Tensor, batch: Batch) -> Tensor:
    return x_BLL.view(-1, batch.heads, *x_BLL.shape[1:])


def _clear_(x_BLD: Tensor, dead: Tensor | None) -> None:
    """0 in the rows of queries that see nothing, in place."""
    if dead is not None:
        x_BLD.view(dead.shape[0], -1, *x_BLD.shape[1:]).masked_fill_(dead, 0.0)
