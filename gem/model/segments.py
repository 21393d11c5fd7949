"""Sums over the events of each sample, in a fixed order: no atomics, two runs give the same bits.

Legend: B samples, T events, P pieces of samples, E width.
"""

import torch
from torch import Tensor

PIECE = 256  # rows that one thread of torch.segment_reduce adds up, one after the other


@torch.library.custom_op("gem::segment_sum", mutates_args=())
def segment_sum(x_TE: Tensor, offsets: Tensor) -> Tensor:
    """Sums [B, E] of the rows between ``offsets`` [B + 1], added in fp32 at least and given back in x's type.

    Rows behind the last offset are in no sum. torch.segment_reduce goes through a segment with one thread a column, and
    a step would wait for the one longest history; so long ones are cut, and the sums of their pieces added.
    """
    wide = x_TE.float() if x_TE.element_size() < 4 else x_TE
    starts, ends = _pieces(offsets, x_TE.shape[0])
    sums_PE = torch.segment_reduce(wide.contiguous(), "sum", offsets=starts, axis=0, initial=0.0)
    return torch.segment_reduce(sums_PE, "sum", offsets=ends, axis=0, initial=0.0).to(x_TE.dtype)


@segment_sum.register_fake
def _(x_TE: Tensor, offsets: Tensor) -> Tensor:
    return x_TE.new_empty((offsets.shape[0] - 1, *x_TE.shape[1:]))


def _pieces(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(rows at which pieces start, and the end: [P + 1]; pieces before each sample, and all: [B + 1]).

    P follows from shapes alone, so that nothing waits for the device: pieces left over are empty ones at the end.
    """
    lengths = offsets.diff()
    counts = (lengths + (PIECE - 1)) // PIECE
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    index = torch.arange(rows // PIECE + lengths.shape[0] + 1, device=offsets.device)
    sample = torch.searchsorted(ends, index, right=True) - 1
    start = offsets[sample] + (index - ends[sample]) * PIECE
    return torch.minimum(start, offsets[-1]), ends
