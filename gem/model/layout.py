"""How the events of a sequence lie in memory, and the attention over them in that form.

The tower's linear layers and norms do not care: they work on the last dimension. What does is here, so that the same
model, with the same parameters, runs on packed events (gem's ops) or on a padded batch (gem.baselines.padded).

Legend: B samples, T events, H heads, D head_dim, E width of a token, N shared queries; ``…`` the layout's dimensions:
[T] packed.
"""

from typing import Protocol

import torch
from torch import Tensor

from gem.data.samples import Events
from gem.model.segments import segment_sum
from gem.ops import block_attention, gdpa, jagged_attention

Rope = tuple[Tensor, Tensor]


class Layout(Protocol):
    """One sequence of a batch."""

    ids: dict[str, Tensor]  # by feature, int64 […]
    ages: (
        Tensor | None
    )  # int64 […]: seconds between an event and the latest of its sample; None where there are no times

    share_B: Tensor  # fp32 [B]: 1 / number of events, 1 where there are none
    along: int  # the dimension of […] that grows with the events

    def spread(self, x_BE: Tensor) -> Tensor:
        """Each sample's row beside each of its events: […, E]."""
        ...

    def blocks(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope, block: int) -> Tensor:
        """Softmax attention inside blocks of events, rotated by position: […, H, D]."""
        ...

    def window(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope, left: int) -> Tensor:
        """Causal softmax attention to the ``left`` events before, rotated by position: […, H, D]."""
        ...

    def cross(self, q: Tensor, k: Tensor, v: Tensor, keys: "Layout", activation: str, scale: float) -> Tensor:
        """GDPA of these events as queries on another sequence of the same samples: […, H, D]."""
        ...

    def pooled(self, q: Tensor, k: Tensor, v: Tensor, activation: str, scale: float) -> Tensor:
        """GDPA of queries [N, H, D], which all samples share, or [B, N, H, D] on these events: [B, N, H, D]."""
        ...


class Packed:
    """Events of all samples one after the other, without padding: gem's ops."""

    along = 0

    def __init__(self, events: Events, impl: str = "auto") -> None:
        self.ids, self.offsets, self.impl = events.ids, events.offsets, impl
        self._first = next(iter(events.ids.values()))  # its rows are the events
        self.share_B = self.offsets.diff().clamp_min(1).float().reciprocal()
        self.ages = None
        if events.times is not None:
            self.ages = self.spread(_latest(events)[:, None])[:, 0] - events.times

    def spread(self, x_BE: Tensor) -> Tensor:
        """See Layout."""
        return _Spread.apply(x_BE, self.offsets, self._first.shape[0])

    def blocks(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope, block: int) -> Tensor:
        """See Layout."""
        return block_attention(q, k, v, self.offsets, block=block, rope=rope, impl=self.impl)

    def window(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope, left: int) -> Tensor:
        """See Layout."""
        position = torch.arange(q.shape[0], device=q.device)
        position = position - self.spread(self.offsets[:-1, None])[:, 0]
        cos, sin = (table[position][:, None] for table in rope)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return jagged_attention(q, k, v, self.offsets, causal=True, window=(left, 0), impl=self.impl)

    def cross(self, q: Tensor, k: Tensor, v: Tensor, keys: Layout, activation: str, scale: float) -> Tensor:
        """See Layout."""
        assert isinstance(keys, Packed)
        return gdpa(q, k, v, self.offsets, keys.offsets, activation=activation, qk_scale=scale, impl=self.impl)

    def pooled(self, q: Tensor, k: Tensor, v: Tensor, activation: str, scale: float) -> Tensor:
        """See Layout."""
        queries, shared = q.shape[-3], q.dim() == 3
        q_offsets = None
        if not shared:
            q_offsets = torch.arange(q.shape[0] + 1, device=q.device) * queries
            q = q.flatten(0, 1)
        out = gdpa(
            q, k, v, q_offsets, self.offsets, broadcast_q=shared, activation=activation, qk_scale=scale,
            impl=self.impl,
        )  # fmt: skip
        return out.unflatten(0, (-1, queries))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with its halves rotated against each other (GPT-NeoX form), in fp32; cos and sin broadcast to […, D / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rope_tables(longest: int, head_dim: int, base: float = 10000.0) -> Rope:
    """cos and sin of positions 0 … longest - 1, fp32 [longest, head_dim / 2]."""
    frequency = base ** (-torch.arange(head_dim // 2, dtype=torch.float64) / (head_dim // 2))
    angle = torch.arange(longest, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def _latest(events: Events) -> Tensor:
    """int64 [B]: time of each sample's last event, 0 where it has none."""
    assert events.times is not None
    if events.times.shape[0] == 0:
        return torch.zeros_like(events.offsets[1:])
    last = (events.offsets[1:] - 1).clamp_min(0)
    return torch.where(events.offsets.diff() > 0, events.times[last], 0)


class _Spread(torch.autograd.Function):
    """Rows repeated by the lengths of jagged samples. Backward: sums in a fixed order, no atomics."""

    @staticmethod
    def forward(ctx, x_BE: Tensor, offsets: Tensor, total: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(offsets)
        return torch.repeat_interleave(x_BE, offsets.diff(), dim=0, output_size=total)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (offsets,) = ctx.saved_tensors
        return segment_sum(grad, offsets), None, None
