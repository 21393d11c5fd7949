"""Rows of jagged values in and out of dense groups.

Legend: T rows of all samples, H heads, D head_dim, G samples of a group, L rows of a sample padded to its group.
Head-major dense form [G * H, L, D]: what a batched matrix product wants.
"""

import torch
from torch import Tensor


class Rows:
    """Jagged values [T, H, D] of one tensor, read in the compute type as dense groups, or written back from them."""

    def __init__(self, values_THD: Tensor, compute_dtype: torch.dtype) -> None:
        self.values_THD = values_THD
        self.compute_dtype = compute_dtype
        self._padded: Tensor | None = None

    def one(self, start: int, end: int) -> Tensor:
        """Rows [start, end) head-major [H, L, D]: a view where the type already fits."""
        return self.values_THD[start:end].to(self.compute_dtype).transpose(0, 1)

    def group(self, index_GHL: Tensor) -> Tensor:
        """Gathered rows [G * H, L, D]; an index of T * H reads zeros."""
        if self._padded is None:
            # One sequential copy makes strided and half-precision inputs dense and adds the row of zeros that padding
            # reads: cheaper than a masked second pass over every gathered group.
            total, heads, dim = self.values_THD.shape
            padded = torch.empty(total * heads + 1, dim, dtype=self.compute_dtype, device=self.values_THD.device)
            padded[: total * heads].view(total, heads, dim).copy_(self.values_THD)
            padded[total * heads :].zero_()
            self._padded = padded
        groups, heads, length = index_GHL.shape
        return self._padded.index_select(0, index_GHL.reshape(-1)).view(groups * heads, length, -1)


class OutRows:
    """Jagged result [T, H, D] in the making. Padding goes to one spare row that is dropped.

    Not zeroed as a whole (a memset of the result is 4 % of a forward of 150-token samples): ``zero`` clears the rows
    that no group writes.
    """

    def __init__(self, like_THD: Tensor, dtype: torch.dtype, rows: int | None = None) -> None:
        self.total = like_THD.shape[0] if rows is None else rows
        self.heads, self.dim, self.dtype = like_THD.shape[1], like_THD.shape[2], like_THD.dtype
        self._flat = torch.empty((self.total + 1) * self.heads, self.dim, dtype=dtype, device=like_THD.device)
        self._rows_THD = self._flat.view(self.total + 1, self.heads, self.dim)

    def zero(self, ranges: list[tuple[int, int]]) -> None:
        """Clear rows [start, end) of each range."""
        for start, end in ranges:
            self._rows_THD[start:end] = 0.0

    def one(self, start: int, end: int) -> Tensor:
        """Rows [start, end) head-major [H, L, D], to be written in place: products land there without a copy."""
        return self._rows_THD[start:end].transpose(0, 1)

    def put_group(self, index_GHL: Tensor, x_BLD: Tensor) -> None:
        """Write gathered rows back; an index of T * H is padding."""
        self._flat.index_copy_(0, index_GHL.reshape(-1), x_BLD.reshape(-1, self.dim))

    def result(self) -> Tensor:
        """[T, H, D] in the input's type."""
        return self._rows_THD[:-1].to(self.dtype)


def group_index(starts_G: Tensor, lens_G: Tensor, length: int, heads: int, spare: int) -> Tensor:
    """Row numbers [G, H, L] in values flattened to [T * H, D]; ``spare`` where a sample is shorter than ``length``."""
    device = starts_G.device
    row_GL = torch.arange(length, device=device)
    inside_GL = row_GL < lens_G[:, None]
    row_GL = (starts_G[:, None] + row_GL) * heads
    index_GHL = row_GL[:, None, :] + torch.arange(heads, device=device)[None, :, None]
    return torch.where(inside_GL[:, None, :], index_GHL, spare)
