"""Peer: FlexAttention over the flattened batch with a document mask, compiled.

The block mask says which 128 x 128 tiles are computed. torch's ``create_block_mask`` finds it by evaluating the mask
for every pair of the batch; here it follows from the lengths, so a batch of a million tokens needs no dense mask. A
test holds both equal.

Legend: T rows of all samples (TQ, TK), S segments, H heads, D head_dim.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gem.data.batch import offsets_of
from gem.harness.environment import cxx_compiler
from gem.harness.peers import PackedRows, Segments, refuse_bias
from gem.harness.subjects import Inputs
from gem.harness.worker import Unsupported

BLOCK = 128  # FlexAttention's default tile of its block mask


class Flex(PackedRows):
    """``torch.compile(flex_attention)``; q, k and v are [1, H, T, D]."""

    def __init__(self, inputs: Inputs, name: str) -> None:
        if reason := refuse_bias(inputs, "this FlexAttention peer"):
            raise Unsupported(reason)
        if inputs.device == "cpu":
            compiler, missing = cxx_compiler()
            if compiler is None:
                raise Unsupported(f"FlexAttention compiles C++ on the CPU: {missing}")
            self.no_backward = "FlexAttention has no backward on the CPU"
        super().__init__(inputs, name)
        if self.no_backward:  # it refuses inputs that ask for gradients, even where none are recorded
            self.leaves = {name: leaf.detach() for name, leaf in self.leaves.items()}
            self.negated = self.leaves["v"]
        if not int(self.segments.q.sum()) or not int(self.segments.k.sum()):
            raise Unsupported("FlexAttention takes no empty batch")
        self._mask = document_mask(self.segments, inputs.device)
        self._compiled: Any = torch.compile(flex_attention)

    def forward(self) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in self.attended())
        out = self._compiled(q, k, v, block_mask=self._mask, scale=self.segments.scale)
        return out[0].transpose(0, 1)


def document_mask(seg: Segments, device: str) -> BlockMask:
    """The block mask of attention inside segments, causal and windows aligned bottom-right."""
    mask_mod = _mask_mod(seg, device)
    partial, full = (torch.as_tensor(x).to(device) for x in _tiles(seg))
    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(int(seg.q.sum()), int(seg.k.sum())),
    )


def _mask_mod(seg: Segments, device: str) -> Any:
    def by_row(lens: np.ndarray, values: np.ndarray) -> Tensor:
        return torch.as_tensor(np.repeat(values, lens).astype(np.int32)).to(device)

    number = np.arange(len(seg.q))
    q_segment, k_segment = by_row(seg.q, number), by_row(seg.k, number)
    # Row index of a query -> index of the key at its own position, both in the flattened batch.
    shift = by_row(seg.q, offsets_of(seg.k)[1:] - offsets_of(seg.q)[1:])
    left, right = seg.edges

    def mask_mod(b: Tensor, h: Tensor, q_row: Tensor, k_row: Tensor) -> Tensor:
        seen = q_segment[q_row] == k_segment[k_row]
        if left >= 0:
            seen = seen & (k_row >= q_row + shift[q_row] - left)
        if right >= 0:
            seen = seen & (k_row <= q_row + shift[q_row] + right)
        return seen

    return mask_mod


def _tiles(seg: Segments) -> tuple[np.ndarray, np.ndarray]:
    """Tiles [TQ / 128, TK / 128] bool: those with visible pairs but not only such, those with nothing else."""
    q_total, k_total = int(seg.q.sum()), int(seg.k.sum())
    q_blocks, k_blocks = -(-q_total // BLOCK), -(-k_total // BLOCK)
    some = np.zeros((q_blocks, k_blocks), bool)
    whole = np.zeros((q_blocks, k_blocks), bool)
    left, right = seg.edges
    q_start, k_start = offsets_of(seg.q), offsets_of(seg.k)
    for s in np.flatnonzero((seg.q > 0) & (seg.k > 0)):
        q0, q1, k0, k1 = int(q_start[s]), int(q_start[s + 1]), int(k_start[s]), int(k_start[s + 1])
        rows = np.arange(q0 // BLOCK, -(-q1 // BLOCK))
        cols = np.arange(k0 // BLOCK, -(-k1 // BLOCK))
        # The part of each tile that lies in this segment, [first, last] row and column.
        q_first, q_last = np.maximum(rows * BLOCK, q0)[:, None], np.minimum(rows * BLOCK + BLOCK, q1)[:, None] - 1
        k_first, k_last = np.maximum(cols * BLOCK, k0)[None], np.minimum(cols * BLOCK + BLOCK, k1)[None] - 1
        inside = (q_last - q_first + 1 == BLOCK) & (k_last - k_first + 1 == BLOCK)
        shift = k1 - q1
        touched = np.ones(inside.shape, bool)
        if left >= 0:
            touched &= k_last >= q_first + shift - left
            inside = inside & (k_first >= q_last + shift - left)
        if right >= 0:
            touched &= k_first <= q_last + shift + right
            inside = inside & (k_last <= q_first + shift + right)
        some[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1] |= touched
        whole[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1] |= inside
    return some & ~whole, whole


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(number of tiles, their columns first) of each row of tiles, as BlockMask wants them: [1, 1, rows(, cols)]."""
    count = tiles.sum(-1, dtype=torch.int32)
    columns = torch.argsort(tiles.to(torch.int32), dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], columns[None, None]
