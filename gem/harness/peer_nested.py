"""Peer: scaled_dot_product_attention on nested tensors in the jagged layout."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from gem.data.batch import offsets_of
from gem.harness.peers import PackedRows, refuse_bias
from gem.harness.subjects import Inputs, nest
from gem.harness.worker import Unsupported


class Nested(PackedRows):
    """Nested tensors are made once; the timed call is SDPA itself (and, for block attention, the rotation)."""

    def __init__(self, inputs: Inputs, name: str) -> None:
        super().__init__(inputs, name)
        seg = self.segments
        if reason := refuse_bias(inputs, "nested SDPA"):
            raise Unsupported(reason)
        if seg.window != (-1, -1):
            raise Unsupported("nested SDPA has no window")
        if seg.causal and inputs.device == "cpu":
            raise Unsupported("nested SDPA has no causal mask on the CPU (no viable backend)")
        if seg.causal and bool((seg.q != seg.k).any()):
            raise Unsupported("nested SDPA aligns causal masks top-left; the case needs bottom-right")
        if not len(seg.q) or not int(seg.q.sum()) or not int(seg.k.sum()):
            raise Unsupported("nested SDPA takes no empty batch")
        # It tells at length, on every call, which of its backends it cannot use.
        logging.getLogger("torch.nested._internal.sdpa").setLevel(logging.ERROR)
        self._q_offsets, self._k_offsets = (
            torch.as_tensor(offsets_of(lens)).to(inputs.device) for lens in (seg.q, seg.k)
        )

    def forward(self) -> Tensor:
        seg = self.segments
        q, k, v = self.attended()
        q, k, v = (
            nest(x, offsets, lens).transpose(1, 2)
            for x, offsets, lens in (
                (q, self._q_offsets, seg.q),
                (k, self._k_offsets, seg.k),
                (v, self._k_offsets, seg.k),
            )
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=seg.causal, scale=seg.scale)
        return out.transpose(1, 2).values()
