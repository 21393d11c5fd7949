"""The attention bias of a dense tile, and its gradient.

Legend: as in batch.py; N buckets, HB = H or 1 heads of a bias.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gem.portable.batch import Dense, Tile


@dataclass
class BiasInputs:
    """The three kinds of bias of one call, flat as torch.library wants them; each may be None, present ones add up."""

    dense: Tensor | None = None  # broadcastable to [B, H, max_q, max_k]
    position_table: Tensor | None = None  # [N, HB]
    position_boundaries: Tensor | None = None  # [N - 1]
    time_table: Tensor | None = None  # [N, HB]
    time_boundaries: Tensor | None = None
    q_times: Tensor | None = None  # [TQ]
    k_times: Tensor | None = None  # [TK]
    grads: dict[str, Tensor] = field(default_factory=dict)

    @property
    def present(self) -> bool:
        """Whether any bias is given."""
        return self.dense is not None or self.position_table is not None or self.time_table is not None

    def start_backward(self, dtype: torch.dtype) -> None:
        """Zero the gradients of what is given. A bucket sums over as many pairs as there are: in float64."""
        for name in ("dense", "position_table", "time_table"):
            x = getattr(self, name)
            if x is not None:
                into = dtype if name == "dense" else torch.float64
                self.grads[name] = torch.zeros(x.shape, dtype=into, device=x.device)

    def grad(self, name: str) -> Tensor | None:
        """Gradient of one input in its own type."""
        x = getattr(self, name)
        return None if x is None else self.grads[name].to(x.dtype)

    def add_to(self, scores_GHLL: Tensor, group: Dense, tile: Tile) -> None:
        """scores += bias of the tile, in place."""
        if self.dense is not None:
            scores_GHLL += self._dense_tile(self.dense, group, tile).to(scores_GHLL.dtype)
        for table, bucket in self._bucketed(group, tile):
            scores_GHLL += table[bucket].permute(0, 3, 1, 2).to(scores_GHLL.dtype)

    def backward(self, grad_GHLL: Tensor, group: Dense, tile: Tile) -> None:
        """Add the tile's score gradient to the gradients of what is given. Padded pairs carry gradient 0."""
        if self.dense is not None:
            self._dense_backward(grad_GHLL, group, tile)
        names = [n for n in ("position_table", "time_table") if getattr(self, n) is not None]
        for name, (table, bucket) in zip(names, self._bucketed(group, tile), strict=True):
            into = self.grads[name]
            grad = grad_GHLL if table.shape[1] > 1 else grad_GHLL.sum(1, keepdim=True)
            _add_by_bucket(into, bucket.expand(grad.shape[0], *bucket.shape[1:]), grad)

    def _dense_tile(self, dense: Tensor, group: Dense, tile: Tile) -> Tensor:
        bias = dense.reshape((1,) * (4 - dense.dim()) + tuple(dense.shape))
        if bias.shape[0] > 1:
            bias = bias.index_select(0, torch.from_numpy(group.samples).to(bias.device))
        bias = bias[:, :, slice(tile.q0, tile.q1) if bias.shape[2] > 1 else slice(None)]
        bias = bias[:, :, :, slice(tile.k0, tile.k1) if bias.shape[3] > 1 else slice(None)]
        if group.lone or group.group.uniform:
            return bias
        # Behind a sample's end the caller may have left anything, NaN included.
        q_tail = torch.arange(tile.q0, tile.q1, device=bias.device) >= group.q_lens_G[:, None]
        k_tail = torch.arange(tile.k0, tile.k1, device=bias.device) >= group.k_lens_G[:, None]
        return torch.where(q_tail[:, None, :, None] | k_tail[:, None, None, :], 0.0, bias)

    def _dense_backward(self, grad_GHLL: Tensor, group: Dense, tile: Tile) -> None:
        into = self.grads["dense"]
        into = into.view((1,) * (4 - into.dim()) + tuple(into.shape))
        grad = grad_GHLL
        for dim in range(4):
            if into.shape[dim] == 1 and grad.shape[dim] > 1:
                grad = grad.sum(dim, keepdim=True)
        q = slice(tile.q0, tile.q1) if into.shape[2] > 1 else slice(None)
        k = slice(tile.k0, tile.k1) if into.shape[3] > 1 else slice(None)
        if into.shape[0] == 1:
            into[:, :, q, k] += grad
        else:
            for i, b in enumerate(group.samples.tolist()):
                into[b, :, q, k] += grad[i]

    def _bucketed(self, group: Dense, tile: Tile) -> list[tuple[Tensor, Tensor]]:
        """(table, bucket [G or 1, LQ, LK]) of each bucket bias given."""
        found = []
        if self.position_table is not None and self.position_boundaries is not None:
            found.append((self.position_table, _bucket(self._distance(group, tile), self.position_boundaries)))
        if self.time_table is not None and self.time_boundaries is not None:
            found.append((self.time_table, _bucket(self._time_difference(group, tile), self.time_boundaries)))
        return found

    def _distance(self, group: Dense, tile: Tile) -> Tensor:
        device = group.batch.device
        row = torch.arange(tile.q0, tile.q1, device=device)[None, :]
        shift = group.group.k_len - group.group.q_len if group.lone else (group.k_lens_G - group.q_lens_G)[:, None]
        return (row + shift)[:, :, None] - torch.arange(tile.k0, tile.k1, device=device)

    def _time_difference(self, group: Dense, tile: Tile) -> Tensor:
        assert self.q_times is not None and self.k_times is not None
        if group.lone:
            q = self.q_times[None, group.q_start + tile.q0 : group.q_start + tile.q1]
            k = self.k_times[None, group.k_start + tile.k0 : group.k_start + tile.k1]
        else:
            device = group.batch.device
            last_q, last_k = self.q_times.shape[0] - 1, self.k_times.shape[0] - 1
            q_row = group.q_starts_G[:, None] + torch.arange(tile.q0, tile.q1, device=device)
            k_row = group.k_starts_G[:, None] + torch.arange(tile.k0, tile.k1, device=device)
            q, k = self.q_times[q_row.clamp(max=last_q)], self.k_times[k_row.clamp(max=last_k)]
        return q.long()[:, :, None] - k.long()[:, None, :]


NO_BIAS = BiasInputs()  # of the calls that have none: nothing is ever written into it


def _bucket(distance: Tensor, boundaries: Tensor) -> Tensor:
    """Number of boundaries <= distance."""
    return torch.bucketize(distance, boundaries.to(distance.dtype), right=True)


def _add_by_bucket(into_NH: Tensor, bucket_GLL: Tensor, grad_GHLL: Tensor) -> None:
    """into[bucket] += grad, bitwise repeatable: ATen's own scatter-adds run in parallel, with atomics."""
    bucket = bucket_GLL.reshape(-1)
    by_head = grad_GHLL.transpose(0, 1).reshape(grad_GHLL.shape[1], -1)
    if into_NH.device.type == "cpu":
        for head, grad in enumerate(by_head):
            into_NH[:, head] += torch.bincount(bucket, grad.to(into_NH.dtype), into_NH.shape[0])
    else:
        by_pair = by_head.t().to(into_NH.dtype)
        into_NH.index_put_((bucket,), by_pair, accumulate=True)  # sorts by bucket on CUDA
