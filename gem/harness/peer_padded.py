"""Peers that pad every sample to the longest: what a model does that has no jagged op.

The padded batch and its masks are made before the timing, in the form that is kindest to the peer.

Legend: S segments (samples, or blocks), H heads, L longest segment (LQ, LK), D head_dim, N shared queries.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gem.activations import FORWARD as ACTIVATIONS
from gem.efficiency import Ints
from gem.harness.params import GdpaParams
from gem.harness.peers import Segments, computes, refuse_bias, rotate, segments, with_tail
from gem.harness.subjects import Inputs
from gem.harness.worker import Unsupported


class _Padded:
    """Rows <-> [S, H, L, D]."""

    computes = "same"
    repeatable = False
    no_backward = ""
    to_longest = True  # of block attention: every sample padded to as many blocks as the longest one has

    def __init__(self, inputs: Inputs, name: str) -> None:
        self.inputs = inputs
        self.computes = computes(name, inputs.subject)
        seg = self.segments = segments(inputs, self.to_longest)
        if not int(seg.q.sum()) or not int(seg.k.sum()):
            raise Unsupported("nothing to pad: the batch has no queries or no keys")
        self.q_len, self.k_len = int(seg.q.max()), int(seg.k.max())
        # A query that sees no key is let see a padding key, whose value is 0: right, and no NaN of an empty softmax.
        blind = seg.first_visible()
        if bool(((blind > 0) & (seg.k == self.k_len)).any()):
            self.k_len += 1
        self.k_len = self.key_room(self.k_len)
        self._index = {
            "q": _positions(seg.q, self.q_len, inputs.device),
            "k": _positions(seg.k, self.k_len, inputs.device),
        }
        self.leaves = {name: self._leaf(name) for name in ("q", "k", "v")}
        self.negated = self.leaves["v"]

    def key_room(self, longest: int) -> int:
        """Keys that every segment gets room for; at least ``longest``."""
        return longest

    def _leaf(self, name: str) -> Tensor:
        x = self.inputs.leaves[name].detach()
        if name == "q" and self.inputs.shared_queries:
            return x.clone().requires_grad_()
        return self._pad("q" if name == "q" else "k", x).requires_grad_()

    def _pad(self, side: str, rows: Tensor) -> Tensor:
        """Rows [T, ...] -> [S, H, L, D], 0 where there is no row."""
        length = self.q_len if side == "q" else self.k_len
        index = self._index[side]
        padded = rows.new_zeros(len(self.segments.q) * length, *rows.shape[1:])
        padded[index] = rows[: len(index)]
        return padded.unflatten(0, (-1, length)).transpose(1, 2).contiguous()

    def queries(self) -> Tensor:
        """q [S, H, LQ, D]; shared queries are expanded, not copied."""
        q = self.leaves["q"]
        return q.transpose(0, 1).expand(len(self.segments.q), -1, -1, -1) if self.inputs.shared_queries else q

    def gradient_in(self, d_out: Tensor) -> Tensor:
        return self._pad("q", d_out)

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        if name == "bias":
            return tensor
        if name == "q" and self.inputs.shared_queries:
            return tensor
        side = "k" if name in ("k", "v") else "q"
        return with_tail(self.inputs, name, tensor.transpose(1, 2).flatten(0, 1)[self._index[side]])

    def visible(self) -> Tensor | None:
        """Which keys a query may see, [S, 1, LQ or 1, LK] bool; None when all of them."""
        return visible_keys(self.segments, self.q_len, self.k_len, self.inputs.device)


class SdpaPadded(_Padded):
    """torch.nn.functional.scaled_dot_product_attention with a key mask (causal and window masks included)."""

    def __init__(self, inputs: Inputs, name: str) -> None:
        reason = refuse_bias(inputs, "padded SDPA", accepted=("dense", "dense_broadcast"))
        if reason:
            raise Unsupported(reason)
        super().__init__(inputs, name)
        seg = self.segments
        self._is_causal = self.causal_alone()
        self._mask = None
        visible = None if self._is_causal else self.visible()
        if visible is not None:
            # Additive, in the inputs' dtype: what SDPA would make of a boolean mask in every call.
            self._mask = torch.zeros(visible.shape, dtype=inputs.dtype, device=inputs.device)
            self._mask.masked_fill_(~visible, -torch.inf)
        self._rope = None
        if seg.cos is not None and seg.sin is not None:
            self._rope = tuple(self._pad("q", table[:, None]) for table in (seg.cos, seg.sin))
        if isinstance(inputs.bias, Tensor):
            self.leaves["bias"] = inputs.bias.detach().clone().requires_grad_()

    def causal_alone(self) -> bool:
        """Rows behind a sample's end attend to anything, so causal self attention needs no mask: SDPA's fast path."""
        seg = self.segments
        square = bool((seg.q == seg.k).all())
        return seg.causal and seg.window == (-1, -1) and square and self.inputs.bias is None

    def forward(self) -> Tensor:
        q, k, mask = self.queries(), self.leaves["k"], self._mask
        if self._rope is not None:
            q, k = (rotate(x, *self._rope) for x in (q, k))
        if "bias" in self.leaves:
            bias = self.leaves["bias"]
            bias = F.pad(bias, (0, self.k_len - bias.shape[-1]))
            mask = bias if mask is None else bias + mask
        return F.scaled_dot_product_attention(
            q, k, self.leaves["v"], attn_mask=mask, is_causal=self._is_causal, scale=self.segments.scale
        )


class SdpaBlocks(SdpaPadded):
    """SDPA on the jagged batch already cut into its blocks: nothing is padded but each sample's last block."""

    to_longest = False


class GdpaPadded(_Padded):
    """The same GDPA by two plain matmuls on the padded batch. Padding keys have value 0 and so add nothing."""

    def __init__(self, inputs: Inputs, name: str) -> None:
        if not isinstance(inputs.params, GdpaParams):
            raise Unsupported(f"computes gdpa, not {inputs.subject}")
        super().__init__(inputs, name)
        self._params = inputs.params
        self._hidden = None
        if self.segments.masked:
            visible = self.visible()
            self._hidden = None if visible is None else ~visible

    def forward(self) -> Tensor:
        params = self._params
        weights = ACTIVATIONS[params.activation](params.qk_scale * (self.queries() @ self.leaves["k"].mT))
        if self._hidden is not None:
            weights = weights.masked_fill(self._hidden, 0.0)
        return params.out_scale * (weights @ self.leaves["v"])


def _positions(lens: Ints, longest: int, device: str) -> Tensor:
    """Where each row of a jagged batch lies in the padded one, flat: [T]."""
    starts = np.repeat(np.arange(len(lens)) * longest, lens)
    inside = np.concatenate([np.empty(0, np.int64), *(np.arange(n) for n in lens)])
    return torch.as_tensor(starts + inside).to(device)


def visible_keys(seg: Segments, q_len: int, k_len: int, device: str) -> Tensor | None:
    """[S, 1, LQ, LK] (LQ = 1 where all queries of a segment see the same keys) bool; None when everything is seen.

    No row is without a key: those that see none, and those behind the end of their segment, see one padding key.
    """
    q_lens, k_lens = (torch.as_tensor(np.array(x)).to(device)[:, None, None] for x in (seg.q, seg.k))
    key = torch.arange(k_len, device=device)[None, None, :]
    blind = torch.as_tensor(seg.first_visible()).to(device)[:, None, None]
    first_padding = torch.where(k_lens < k_len, k_lens, 0)
    if not seg.masked:
        if bool((seg.k == k_len).all()):
            return None
        return ((key < k_lens) | ((k_lens == 0) & (key == 0)))[:, None]
    query = torch.arange(q_len, device=device)[None, :, None]
    left, right = seg.edges
    position = query + k_lens - q_lens
    seen = key < k_lens
    if left >= 0:
        seen = seen & (key >= position - left)
    if right >= 0:
        seen = seen & (key <= position + right)
    lost = (query < blind) | (query >= q_lens)
    return torch.where(lost, key == first_padding, seen)[:, None]
