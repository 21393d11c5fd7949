"""BlockAttention in plain PyTorch: softmax attention over samples cut into blocks, rotated group by group.

Legend: B samples, T rows of all samples, H heads, D head_dim, G blocks of a group, L rows of a block.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gem.portable import softmax
from gem.portable.batch import Dense, Spec
from gem.portable.biases import BiasInputs
from gem.portable.groups import Ints


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of every block: pairs (x[..., :D/2], x[..., D/2:]) turn by the row's position in its sample.

    Applied to rows that a group has just gathered, while they are in cache: rotating whole tensors first cost as much
    as the attention itself.
    """

    cos: Tensor  # [longest sample or more, D / 2]
    sin: Tensor
    first_position: Ints  # of each block

    def apply_(self, x_BLD: Tensor, group: Dense, row: int = 0, back: bool = False) -> Tensor:
        """Rotate rows [row, row + L) of a group's blocks, [GH, L, D], in place (or back, as a gradient is)."""
        length = x_BLD.shape[1]
        first = torch.from_numpy(self.first_position[group.samples] + row).to(x_BLD.device)
        # Padding may lie past the table's end; what it reads does not matter.
        row_GL = (first[:, None] + torch.arange(length, device=x_BLD.device)).clamp_(max=self.cos.shape[0] - 1)
        cos, sin = (table[row_GL][:, None].to(x_BLD.dtype) for table in (self.cos, self.sin))
        if back:
            sin = -sin
        x_GHLD = x_BLD.view(len(group.samples), -1, *x_BLD.shape[1:])
        first_half, second_half = x_GHLD.chunk(2, dim=-1)
        kept = first_half.clone()
        first_half.mul_(cos).addcmul_(second_half, sin, value=-1.0)
        second_half.mul_(cos).addcmul_(kept, sin)
        return x_BLD


def forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    offsets: Tensor,
    block: int,
    rope: tuple[Tensor, Tensor] | None,
    scale: float,
) -> Tensor:
    """[T, H, D]; rows outside every sample 0."""
    spec, rotation = _blocks(offsets, block, rope)
    return softmax.forward(q_THD, k_THD, v_THD, spec, scale, BiasInputs(), rotation)


def backward(
    d_out_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    offsets: Tensor,
    block: int,
    rope: tuple[Tensor, Tensor] | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv: rotated back in the precision of the products, rounded once."""
    spec, rotation = _blocks(offsets, block, rope)
    return softmax.backward(d_out_THD, q_THD, k_THD, v_THD, spec, scale, BiasInputs(), rotation)


def _blocks(offsets: Tensor, block: int, rope: tuple[Tensor, Tensor] | None) -> tuple[Spec, Rotation | None]:
    """Every block as a sample of its own."""
    edges = offsets.cpu().numpy().astype(np.int64)
    lens = np.diff(edges)
    counts = -(-lens // block)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(edges[:-1], counts) + number * block
    block_lens = np.minimum(starts + block, np.repeat(edges[1:], counts)) - starts
    spec = Spec(starts, block_lens, starts, block_lens, -1, -1)
    return spec, None if rope is None else Rotation(*rope, first_position=number * block)
