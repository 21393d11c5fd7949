"""A jagged batch as a sequence of dense tiles, the same for softmax attention and GDPA, forward and backward.

Legend: T rows of all samples, B samples, H heads, D head_dim, G samples of a group, LQ / LK rows of a sample padded to
its group, GH = G * H.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gem.portable.groups import Group, Ints, group_samples, query_tiles
from gem.portable.products import KeySum, Workspace, compute_dtype, score_dtype, tile_elements, tile_rows
from gem.portable.rows import GroupIndex, OutRows, Rows


@dataclass(frozen=True)
class Spec:
    """Where the samples lie and who sees whom. Offsets are on the host: grouping by length is host work."""

    q_starts: Ints
    q_lens: Ints
    k_starts: Ints
    k_lens: Ints
    left: int
    right: int
    broadcast_q: bool = False  # q holds one sample's queries, the same for all samples

    @classmethod
    def from_offsets(
        cls, q_offsets: Tensor | None, k_offsets: Tensor, left: int, right: int, shared_queries: int | None = None
    ) -> "Spec":
        """Read offsets [B + 1] (a copy to the host on a GPU)."""
        k_edges = k_offsets.cpu().numpy().astype(np.int64)
        if shared_queries is not None:
            q_edges = np.arange(len(k_edges), dtype=np.int64) * shared_queries
        elif q_offsets is None or q_offsets is k_offsets:
            q_edges = k_edges
        else:
            q_edges = q_offsets.cpu().numpy().astype(np.int64)
        return cls(
            q_edges[:-1], np.diff(q_edges), k_edges[:-1], np.diff(k_edges), left, right, shared_queries is not None
        )


@dataclass(frozen=True)
class Tile:
    """One dense piece: queries [GH, LQ, D] of a group against keys [k0, k1) of the group's [GH, LK, D]."""

    q0: int
    q1: int
    k0: int
    k1: int
    hidden: Tensor | None  # [G, 1, LQ, LK] or broadcastable, True where a pair is not seen
    dead: Tensor | None  # [G, 1, LQ, 1], True where a query sees nothing at all


class Dense:
    """One group in dense form, with its tiles."""

    def __init__(self, batch: "Batch", group: Group) -> None:
        self.batch, self.group = batch, group
        self.lone = len(group.samples) == 1
        self.samples = group.samples
        spec, device = batch.spec, batch.device
        if self.lone:
            b = int(group.samples[0])
            self.q_start = int(spec.q_starts[b])
            self.k_start = int(spec.k_starts[b])
        else:
            self.q_lens_G = torch.from_numpy(spec.q_lens[group.samples]).to(device)
            self.k_lens_G = torch.from_numpy(spec.k_lens[group.samples]).to(device)
            self.q_starts_G = torch.from_numpy(spec.q_starts[group.samples]).to(device)
            self.k_starts_G = torch.from_numpy(spec.k_starts[group.samples]).to(device)
            heads, uniform = batch.heads, group.uniform
            self.q_index = GroupIndex(self.q_starts_G, self.q_lens_G, group.q_len, heads, uniform)
            self.k_index = GroupIndex(self.k_starts_G, self.k_lens_G, group.k_len, heads, uniform)

    def load_q(self, rows: Rows) -> Tensor:
        """Rows that belong to queries and are per sample (d_out), [GH, LQ, D]."""
        if self.lone:
            return rows.one(self.q_start, self.q_start + self.group.q_len)
        return rows.group(self.q_index)

    def load_queries(self, rows: Rows) -> Tensor:
        """The queries themselves: shared by all samples under broadcast_q."""
        if not self.batch.spec.broadcast_q:
            return self.load_q(rows)
        shared = rows.one(0, self.group.q_len)
        count = len(self.samples)
        return shared if count == 1 else shared.repeat(count, 1, 1)

    def load_k(self, rows: Rows) -> Tensor:
        """Rows that belong to keys, [GH, LK, D]; rows behind a sample's end are 0."""
        if self.lone:
            return rows.one(self.k_start, self.k_start + self.group.k_len)
        return rows.group(self.k_index)

    def own(self, x_BLD: Tensor) -> Tensor:
        """Loaded rows that may be changed in place: a lone sample's are a view of the caller's."""
        return x_BLD.clone(memory_format=torch.contiguous_format) if self.lone else x_BLD

    def store_q(self, out: OutRows, tile: "Tile", x_BLD: Tensor) -> None:
        """Write a tile's query rows."""
        if self.lone:
            out.one(self.q_start + tile.q0, self.q_start + tile.q1).copy_(x_BLD)
        else:
            out.put_group(self.q_index, x_BLD)

    def key_sum(self) -> KeySum:
        """Sum for a gradient of the group's keys."""
        shape = (len(self.samples) * self.batch.heads, self.group.k_len, self.batch.head_dim)
        return KeySum(torch.empty(shape, dtype=self.batch.score_dtype, device=self.batch.device))

    def store_k(self, out: OutRows, total: KeySum) -> None:
        """Write the group's key rows."""
        if self.lone:
            out.one(self.k_start, self.k_start + self.group.k_len).copy_(total.into_BLD)
        else:
            out.put_group(self.k_index, total.into_BLD)

    def tiles(self, hide_key_tail: bool) -> Iterator[Tile]:
        """Tiles in order. ``hide_key_tail``: padded keys need a mask (softmax); where act(0) = 0 they do not."""
        spec, group, device = self.batch.spec, self.group, self.batch.device
        if self.lone:
            for t in query_tiles(group.q_len, group.k_len, spec.left, spec.right, self._tile_rows()):
                hidden = None
                if t.crossed:
                    shift = group.k_len - group.q_len
                    position = torch.arange(t.q0, t.q1, device=device)[None, None, :, None] + shift
                    hidden = self._outside(position, torch.arange(t.k0, t.k1, device=device))
                yield Tile(t.q0, t.q1, t.k0, t.k1, hidden, None)
            return
        key = torch.arange(group.k_len, device=device)
        hidden = dead = None
        if hide_key_tail and not group.uniform:
            hidden = (key >= self.k_lens_G[:, None])[:, None, None, :]
        if spec.left >= 0 or spec.right >= 0:
            shift_G = self.k_lens_G - self.q_lens_G
            position = (torch.arange(group.q_len, device=device) + shift_G[:, None])[:, None, :, None]
            outside = self._outside(position, key)
            hidden = outside if hidden is None else hidden | outside
            dead = hidden.all(-1, keepdim=True)
        yield Tile(0, group.q_len, 0, group.k_len, hidden, dead)

    def _tile_rows(self) -> int:
        """Query rows of a lone sample's tile."""
        spec, k_len = self.batch.spec, self.group.k_len
        if spec.left < 0 or spec.right < 0:
            return tile_rows(self.batch.device, self.batch.heads, k_len)
        # A tile of r rows computes r + width keys a row, of which width are wanted: about as many rows as the window is
        # wide (64 keys, 256 rows: 57 ms; 64 rows: 41 ms), and not so few that calls cost more than products.
        width = spec.left + spec.right + 1
        most = max(64, width)
        return min(most, tile_rows(self.batch.device, self.batch.heads, min(k_len, width + most)))

    def _outside(self, q_position: Tensor, k_position: Tensor) -> Tensor:
        left, right = self.batch.spec.left, self.batch.spec.right
        if left < 0:
            return k_position > q_position + right
        outside = k_position < q_position - left
        return outside if right < 0 else outside | (k_position > q_position + right)


class Batch:
    """Groups of a jagged batch and the workspace they share."""

    def __init__(self, spec: Spec, q_THD: Tensor, widen: bool = False) -> None:
        self.spec, self.device = spec, q_THD.device
        self.heads, self.head_dim = q_THD.shape[1:]
        self.score_dtype = score_dtype(q_THD)
        # widen: rows are changed before the products, and a change rounded to half would double its error.
        self.compute_dtype = self.score_dtype if widen else compute_dtype(q_THD)
        # Rows of the per-sample query side (out, d_out): with shared queries not those of q itself.
        self.q_rows = int(spec.q_lens.sum()) if spec.broadcast_q else q_THD.shape[0]
        self.workspace = Workspace(q_THD.device, self.score_dtype)

    def groups(self) -> Iterator[Dense]:
        """Groups, one dense form at a time."""
        max_pairs = tile_elements(self.device) // self.heads
        for group in group_samples(self.spec.q_lens, self.spec.k_lens, max_pairs):
            yield Dense(self, group)

    def rows(self, x_THD: Tensor) -> Rows:
        """An input, read in the compute type."""
        return Rows(x_THD, self.compute_dtype)

    def out_q(self, like_THD: Tensor) -> OutRows:
        """A per-sample result of queries; rows that no tile writes are 0."""
        out = OutRows(like_THD, self.score_dtype, self.q_rows)
        spec = self.spec
        out.zero(_unwritten(spec.q_starts, spec.q_lens, spec.k_lens, self.q_rows))
        if spec.right >= 0:
            # The first queries of a lone sample with fewer keys than queries see nothing and are in no tile.
            blind = np.minimum(spec.q_lens - spec.k_lens - spec.right, spec.q_lens)
            for b in np.flatnonzero((blind > 0) & (spec.k_lens > 0)).tolist():
                out.zero([(int(spec.q_starts[b]), int(spec.q_starts[b] + blind[b]))])
        return out

    def out_k(self, like_THD: Tensor) -> OutRows:
        """A result of keys; rows that no tile writes are 0."""
        out = OutRows(like_THD, self.score_dtype)
        spec = self.spec
        out.zero(_unwritten(spec.k_starts, spec.k_lens, spec.q_lens, out.total))
        return out


def _unwritten(starts: Ints, lens: Ints, other_lens: Ints, total: int) -> list[tuple[int, int]]:
    """Row ranges of samples that are in no group (the other side is empty), and the tail behind the last sample."""
    lone = np.flatnonzero((lens > 0) & (other_lens == 0)).tolist()
    ranges = [(int(starts[b]), int(starts[b] + lens[b])) for b in lone]
    end = int(starts[-1] + lens[-1]) if len(starts) else 0
    return [*ranges, (end, total)] if end < total else ranges
