"""GDPA on jagged tensors in plain PyTorch: out = out_scale * act(qk_scale q k^T) v.

act(0) = 0, so zero-filled tails need no mask; only the edges of causal and window do.

Legend: as in batch.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gem.activations import TAYLOR_C1, TAYLOR_C2, TAYLOR_C3
from gem.portable.batch import Batch, Dense, Spec, Tile
from gem.portable.products import product
from gem.portable.rows import OutRows

_aten = torch.ops.aten


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, spec: Spec, activation: str, qk_scale: float, out_scale: float
) -> Tensor:
    """[T, H, D]; rows outside every sample 0."""
    act = _FORWARD[activation]
    batch = Batch(spec, q_THD)
    q, k, v = batch.rows(q_THD), batch.rows(k_THD), batch.rows(v_THD)
    out = batch.out_q(q_THD)
    for group in batch.groups():
        q_BLD, k_BLD, v_BLD = group.load_queries(q), group.load_k(k), group.load_k(v)
        for tile in group.tiles(hide_key_tail=False):
            scores = _scores(group, tile, q_BLD, k_BLD, qk_scale)
            weights = act(scores, batch.workspace("weights", *scores.shape))
            _hide(weights, tile, batch)
            group.store_q(out, tile, product(weights, v_BLD[:, tile.k0 : tile.k1], out_scale))
    return out.result()


def backward(
    d_out_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    spec: Spec,
    activation: str,
    qk_scale: float,
    out_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. No row statistics exist: act and act' are recomputed from the scores."""
    act, act_backward = _FORWARD[activation], _BACKWARD[activation]
    batch = Batch(spec, q_THD)
    q, k, v, d_out = batch.rows(q_THD), batch.rows(k_THD), batch.rows(v_THD), batch.rows(d_out_THD)
    dq = OutRows(q_THD, batch.score_dtype) if spec.broadcast_q else batch.out_q(q_THD)
    dk, dv = batch.out_k(k_THD), batch.out_k(v_THD)
    shared = q_THD.shape[0] if spec.broadcast_q else 0
    dq_shared_HLD = torch.zeros(batch.heads, shared, q_THD.shape[2], dtype=batch.score_dtype, device=batch.device)
    for group in batch.groups():
        q_BLD, d_out_BLD = group.load_queries(q), group.load_q(d_out)
        k_BLD, v_BLD = group.load_k(k), group.load_k(v)
        dk_sum, dv_sum = group.key_sum(), group.key_sum()
        for tile in group.tiles(hide_key_tail=False):
            queries, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            scores = _scores(group, tile, q_BLD, k_BLD, qk_scale)
            weights = act(scores, batch.workspace("weights", *scores.shape))
            _hide(weights, tile, batch)
            dv_sum.add(keys, weights.transpose(1, 2), d_out_BLD[:, queries], out_scale)
            d_weights = product(
                d_out_BLD[:, queries],
                v_BLD[:, keys].transpose(1, 2),
                out_scale,
                out=batch.workspace("d_weights", *scores.shape),
            )
            d_scores = act_backward(d_weights, scores, batch.workspace("weights", *scores.shape))
            _hide(d_scores, tile, batch)
            dq_BLD = product(d_scores, k_BLD[:, keys], qk_scale)
            if spec.broadcast_q:
                dq_shared_HLD[:, queries] += dq_BLD.view(-1, batch.heads, *dq_BLD.shape[1:]).sum(0)
            else:
                group.store_q(dq, tile, dq_BLD)
            dk_sum.add(keys, d_scores.transpose(1, 2), q_BLD[:, queries], qk_scale)
        group.store_k(dk, dk_sum)
        group.store_k(dv, dv_sum)
    if spec.broadcast_q:
        dq.one(0, shared).copy_(dq_shared_HLD)
    return dq.result(), dk.result(), dv.result()


def _scores(group: Dense, tile: Tile, q_BLD: Tensor, k_BLD: Tensor, qk_scale: float) -> Tensor:
    q_tile, k_tile = q_BLD[:, tile.q0 : tile.q1], k_BLD[:, tile.k0 : tile.k1]
    out = group.batch.workspace("scores", q_tile.shape[0], q_tile.shape[1], k_tile.shape[1])
    return product(q_tile, k_tile.transpose(1, 2), qk_scale, out=out)


def _hide(x_BLL: Tensor, tile: Tile, batch: Batch) -> None:
    """0 where a pair is not seen, in place."""
    if tile.hidden is not None:
        x_BLL.view(-1, batch.heads, *x_BLL.shape[1:]).masked_fill_(tile.hidden, 0.0)


# Activations that write into a given tile, forward(x, out) and backward(grad, x, out): fresh buffers of a megabyte cost
# more in page faults than the arithmetic (see products.Workspace). `grad` may be overwritten, `x` may not.


def _taylor(x: Tensor, out: Tensor) -> Tensor:
    x2 = torch.mul(x, x, out=out)
    inner = x2.mul(TAYLOR_C3).add_(TAYLOR_C2)
    return x2.mul_(inner.mul_(x2).add_(TAYLOR_C1)).add_(x, alpha=0.5)


def _taylor_backward(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    x2 = torch.mul(x, x, out=out)
    slope = x2.mul(6.0 * TAYLOR_C3).add_(4.0 * TAYLOR_C2)
    slope.mul_(x2).add_(2.0 * TAYLOR_C1).mul_(x).add_(0.5)
    return torch.mul(slope, grad, out=out)


def _relu_squared(x: Tensor, out: Tensor) -> Tensor:
    return torch.clamp(x, min=0.0, out=out).mul_(out)


def _relu_squared_backward(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return torch.clamp(x, min=0.0, out=out).mul_(grad).mul_(2.0)


_FORWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": lambda x, out: _aten.gelu.out(x, out=out),
    "gelu_tanh": lambda x, out: _aten.gelu.out(x, approximate="tanh", out=out),
    "gelu_taylor": _taylor,
    "silu": lambda x, out: _aten.silu.out(x, out=out),
    "relu": lambda x, out: torch.clamp(x, min=0.0, out=out),
    "relu_squared": _relu_squared,
    "identity": lambda x, out: out.copy_(x),
}
_BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gelu": lambda grad, x, out: _aten.gelu_backward.grad_input(grad, x, grad_input=out),
    "gelu_tanh": lambda grad, x, out: _aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=out),
    "gelu_taylor": _taylor_backward,
    "silu": lambda grad, x, out: _aten.silu_backward.grad_input(grad, x, grad_input=out),
    "relu": lambda grad, x, out: _aten.threshold_backward.grad_input(grad, x, 0, grad_input=out),
    "relu_squared": _relu_squared_backward,
    "identity": lambda grad, x, out: out.copy_(grad),
}
