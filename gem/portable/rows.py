"""Rows of jagged values in and out of dense groups.

Legend: T rows of all samples, H heads, D head_dim, G samples of a group, L rows of a sample padded to its group.
Head-major dense form [G * H, L, D]: what a batched matrix product wants.
"""

import torch
from torch import Tensor


class Rows:
    """Jagged values [T, H, D] of one tensor, read in the compute type as dense groups."""

    def __init__(self, values_THD: Tensor, compute_dtype: torch.dtype) -> None:
        self.values_THD = values_THD
        self.compute_dtype = compute_dtype
        self._flat = values_THD.view(-1, values_THD.shape[2]) if values_THD.is_contiguous() else None

    def one(self, start: int, end: int) -> Tensor:
        """Rows [start, end) head-major [H, L, D]: a view where the type already fits."""
        return self.values_THD[start:end].to(self.compute_dtype).transpose(0, 1)

    def group(self, index: "GroupIndex") -> Tensor:
        """Gathered rows [G * H, L, D]; padding reads zeros."""
        samples, heads, length = index.packed_GHL.shape
        if self._flat is not None:
            # Heads are gathered as rows of their own: the result is head-major without a second pass.
            x_GHLD = self._flat.index_select(0, index.packed_GHL.reshape(-1)).view(samples, heads, length, -1)
        else:
            x_GLHD = self.values_THD.index_select(0, index.row_GL.reshape(-1)).view(samples, length, heads, -1)
            x_GHLD = x_GLHD.transpose(1, 2).contiguous()
        x_GHLD = x_GHLD.to(self.compute_dtype)
        if index.padding_GL is not None:
            x_GHLD.masked_fill_(index.padding_GL[:, None, :, None], 0.0)
        return x_GHLD.view(samples * heads, length, -1)


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
        """Rows [start, end) head-major [H, L, D], a view to write to.

        Not the target of a product: with a strided result ATen leaves MKL's batched product for one call a head, which
        cost 11 % of a backward of 170-token samples more than the copy does.
        """
        return self._rows_THD[start:end].transpose(0, 1)

    def put_group(self, index: "GroupIndex", x_BLD: Tensor) -> None:
        """Write gathered rows back; padding goes to the spare row."""
        self._flat.index_copy_(0, index.spare_GHL(self.total).reshape(-1), x_BLD.reshape(-1, self.dim))

    def result(self) -> Tensor:
        """[T, H, D] in the input's type."""
        return self._rows_THD[:-1].to(self.dtype)


class GroupIndex:
    """Where the rows of a group lie; padding reads row 0 (and is then cleared) and is written to a spare row."""

    def __init__(self, starts_G: Tensor, lens_G: Tensor, length: int, heads: int, uniform: bool) -> None:
        position_L = torch.arange(length, device=starts_G.device)
        self.heads = heads
        self.row_GL = starts_G[:, None] + position_L
        self.padding_GL: Tensor | None = None
        if not uniform:
            self.padding_GL = position_L >= lens_G[:, None]
            self.row_GL.masked_fill_(self.padding_GL, 0)
        self.packed_GHL = self._by_head(self.row_GL)

    def spare_GHL(self, spare_row: int) -> Tensor:
        """Rows flattened by head as in ``packed_GHL``, with padding at ``spare_row``."""
        if self.padding_GL is None:
            return self.packed_GHL
        return self._by_head(self.row_GL.masked_fill(self.padding_GL, spare_row))

    def _by_head(self, row_GL: Tensor) -> Tensor:
        head_H = torch.arange(self.heads, device=row_GL.device)
        return (row_GL * self.heads)[:, None, :] + head_H[:, None]
