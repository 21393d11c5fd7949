"""The GEM model on padded batches: what a good engineer writes today who has no jagged kernels.

``GemModel(schema, config, layout=Padded)`` is the same model with the same parameters (a state dict fits both ways) on
histories padded to the longest of the batch: all of the tower, its projections and norms included, works on [B, L, E].
What was chosen, each time the kindest to the baseline that plain torch offers:

- Batches are padded on the host (``pad``, in the loader), so that no step waits for the GPU to say how long the longest
  is. Lengths are rounded up for the tensor cores.
- Block attention: the batch reshaped to blocks, scaled_dot_product_attention with a mask of the keys that are there.
- Causal window: chunks as long as the window, each with the chunk before it as keys (as in Longformer, 2020), so it
  costs O(L window) and not O(L²); without a mask, by SDPA's causal path, where the window spans everything.
- GDPA has no kernel in torch: two matrix products around the activation, which torch.compile fuses into one pass on a
  GPU. Padding keys are not masked: their values are zeroed, which is the same and touches [B, L] rows, not [B, L, L].

Rows of padding hold numbers that mean nothing; none reaches a row that is not padding, and their gradients are 0.

Legend: B samples, L events of the longest sample, rounded up; H heads, D head_dim, E width of a token, N shared
queries, C chunks or blocks of a sample.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gem.activations import FORWARD as ACTIVATIONS
from gem.data.samples import Events, Samples
from gem.model.layout import Layout, Rope

_FINE, _COARSE = 8, 64  # lengths are rounded up to 8; from 64 on to 64, the block that attention rounds up to anyway


def pad(samples: Samples) -> Samples:
    """The same samples with every sequence's ids and times as int64 [B, L], 0 behind a sample's end.

    For the loader's side: ``to``, ``apply`` and ``pin_memory`` work on the result; ``take`` and ``merge`` do not.
    """
    return replace(samples, sequences={name: pad_events(events) for name, events in samples.sequences.items()})


def pad_events(events: Events) -> Events:
    """One sequence of ``pad``. On a GPU this waits for the longest length."""
    lengths = events.lengths
    longest = int(lengths.max()) if lengths.numel() else 0
    step = _COARSE if longest >= _COARSE else _FINE
    room = max(step, -(-longest // step) * step)
    real_BL = torch.arange(room, device=lengths.device) < lengths[:, None]

    def spread(x_T: Tensor) -> Tensor:
        return x_T.new_zeros(real_BL.shape).masked_scatter_(real_BL, x_T)

    times = None if events.times is None else spread(events.times)
    return Events(events.offsets, {name: spread(x) for name, x in events.ids.items()}, times)


class Padded:
    """One padded sequence of a batch, of ``pad``'s making or padded here: a gem.model.layout.Layout on [B, L, …]."""

    along = 1

    def __init__(self, events: Events) -> None:
        if next(iter(events.ids.values())).dim() == 1:
            events = pad_events(events)
        self.ids = events.ids
        lengths, room = events.lengths, next(iter(events.ids.values())).shape[1]
        self.real_BL = torch.arange(room, device=lengths.device) < lengths[:, None]
        self.share_B = lengths.clamp_min(1).float().reciprocal()
        self.ages = None
        if events.times is not None:
            last = events.times.gather(1, (lengths - 1).clamp_min(0)[:, None])
            self.ages = torch.where(self.real_BL, last - events.times, 0)

    @property
    def room(self) -> int:
        """Events of the longest sample, rounded up. Of a tensor, so that torch.compile knows that it varies."""
        return self.real_BL.shape[1]

    def spread(self, x_BE: Tensor) -> Tensor:
        """See Layout."""
        return x_BE[:, None].expand(-1, self.room, -1)

    def blocks(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope, block: int) -> Tensor:
        """See Layout."""
        q, k = self._rotated(q, k, rope)
        q, k, v = (_chunks(x, block).flatten(0, 1).transpose(1, 2) for x in (q, k, v))
        real = self.real_BL if self.room % block == 0 else F.pad(self.real_BL, (0, -self.room % block))
        real = real.unflatten(1, (-1, block)).flatten(0, 1)
        # In a block of nothing but padding all keys are seen: not all of SDPA's backends make 0 of an empty softmax.
        seen = real | ~real[:, :1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])
        return self._joined(out.transpose(1, 2))

    def window(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope, left: int) -> Tensor:
        """See Layout."""
        q, k = self._rotated(q, k, rope)
        if left + 1 >= self.room:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        size = max(_COARSE, left)
        q, k, v = (_chunks(x, size).transpose(2, 3) for x in (q, k, v))
        count, heads = q.shape[1:3]
        # Chunks beside heads, not beside samples: the one mask then serves all samples without a copy for each.
        k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 0, 0, 1, -1)), x], 3).flatten(1, 2) for x in (k, v))
        seen = _chunk_mask(count, size, left, q.device).repeat_interleave(heads, 0)
        out = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, attn_mask=seen)
        return self._joined(out.unflatten(1, (count, heads)).transpose(2, 3))

    def cross(self, q: Tensor, k: Tensor, v: Tensor, keys: Layout, activation: str, scale: float) -> Tensor:
        """See Layout."""
        assert isinstance(keys, Padded)
        return keys._gdpa(q.transpose(1, 2), k, v, activation, scale)

    def pooled(self, q: Tensor, k: Tensor, v: Tensor, activation: str, scale: float) -> Tensor:
        """See Layout."""
        return self._gdpa(q.transpose(-3, -2), k, v, activation, scale)

    def _gdpa(self, q: Tensor, k: Tensor, v: Tensor, activation: str, scale: float) -> Tensor:
        """act(scale q kᵀ) v on these keys; q [B, H, LQ, D] or, for all samples, [H, N, D]; to [B, LQ or N, H, D]."""
        scores = q @ k.permute(0, 2, 3, 1)
        v = v.masked_fill(~self.real_BL[:, :, None, None], 0.0)
        if torch.compiler.is_compiling():
            weights = ACTIVATIONS[activation](scores * scale)
        else:
            weights = _activate(activation, scores.device.type)(scores, scale)
        return (weights @ v.transpose(1, 2)).transpose(1, 2)

    def _rotated(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """q and k turned by their positions, in their own type as public model code does."""
        missing = max(0, self.room - rope[0].shape[0])  # the room is rounded up, perhaps past the last position
        if missing >= _COARSE:
            raise ValueError(f"padded: room for {self.room} events, more than the rows of rope = {rope[0].shape[0]}")
        cos, sin = (F.pad(table[: self.room], (0, 0, 0, missing))[:, None].to(q.dtype) for table in rope)

        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        return turn(q), turn(k)

    def _joined(self, chunks: Tensor) -> Tensor:
        """[B, C, …, H, D] or [B C, …, H, D] back to [B, L, H, D]."""
        return chunks.reshape(self.real_BL.shape[0], -1, *chunks.shape[-2:])[:, : self.room]


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, L, H, D] to [B, C, size, H, D], the last one filled up with 0."""
    if x.shape[1] % size:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.unflatten(1, (-1, size))


def _chunk_mask(count: int, size: int, left: int, device: torch.device) -> Tensor:
    """Which of a chunk's keys (the chunk before it, then its own) a query sees: bool [C, size, 2 size]."""
    query = torch.arange(size, device=device)[:, None] + size
    key = torch.arange(2 * size, device=device)
    band = (key <= query) & (key >= query - left)
    chunk = torch.arange(count, device=device)[:, None, None]
    return band & ((chunk > 0) | (key >= size))


@cache
def _activate(name: str, device: str) -> Callable[[Tensor, float], Tensor]:
    """act(scale x), in one pass over memory where torch can compile it."""
    act = ACTIVATIONS[name]

    def scaled(scores: Tensor, scale: float) -> Tensor:
        return act(scores * scale)

    return torch.compile(scaled, dynamic=True) if device == "cuda" else scaled
