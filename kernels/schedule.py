"""Tile lists: which tiles a jagged batch has, the longest work first, built once a batch on the device.

A grid over (longest sample, batch) would launch mostly empty programs (one long sample among short ones) and take the
work in any order. A list names the tiles that exist, sorted by the number of keys (or queries) each one visits, so that
the tail of a launch is made of the shortest (longest-processing-time-first; GDPA, Meta 2026, measures a skew of 6 x
without it). Only shapes decide its length, so nothing is read back from the device.

All layers that use the same offsets tensors share one list: it is kept beside the offsets as long as they live and are
not written to. torch counts writes (``_version``), but not those behind its back: through ``.data``, memory shared with
numpy or DLPack, another library's kernel, a replayed CUDA graph. Who writes offsets in such a way sets
``GEM_SCHEDULE_CACHE=0``, which builds the list at every call.

Legend: B samples, N tiles of the list (an upper bound; what is left over names no sample).
"""

import os
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

NO_SAMPLE = -1
FIELDS = 8  # sample, row, q_start, q_len, k_start, k_len, and two that make a record 32 bytes long


@dataclass(frozen=True)
class Limits:
    """Rows that a sample may have for a kernel."""

    queries: int
    keys: int


@dataclass(slots=True, eq=False)  # not frozen: that doubles the time to make one, and each call makes one
class Batch:
    """The jagged batch of a call: offsets [B + 1] of queries and keys, and how far a query sees around itself.

    ``q_offsets`` None: every sample has the same ``shared`` queries. ``left``, ``right``: -1 = unlimited.
    """

    q_offsets: Tensor | None
    k_offsets: Tensor
    q_rows: int  # of the tensors, those behind the last offset included
    k_rows: int
    left: int = -1
    right: int = -1
    shared: int = 0

    def __post_init__(self) -> None:
        rows = max(self.q_rows, self.k_rows, self.shared * self.size)
        if rows + max(self.left, self.right, 0) >= 2**31:
            reach = f" and a window of {self.left}, {self.right}" if max(self.left, self.right) > 0 else ""
            raise ValueError(
                f"the Triton kernels count rows and windows in 32 bits: got {rows} rows{reach}; accepted: fewer than "
                "2**31 together"
            )

    @property
    def size(self) -> int:
        """Samples."""
        return self.k_offsets.shape[0] - 1

    def tiles(self, side: str, block: int, sorted: bool = True, beyond: Limits | None = None) -> Tensor:
        """The list of tiles of ``block`` rows of the queries ("q") or the keys ("k"): int32 [N, FIELDS].

        One record holds all that a program asks about its tile, so that it waits for one load and not for a chain of
        three (list, offsets, rows): sample, first row of the tile in the sample, and start and number of rows of the
        sample's queries and keys. Sample B is what lies behind the last offset: it sees nothing, so that its outputs
        become 0. Not ``sorted``: sample after sample instead (to measure what sorting gains), those that name no sample
        last as well. ``beyond``: those of samples that are not within these limits, and of sample B.
        """
        what: tuple = (side, block)
        if not sorted:
            what = (*what, "in the batch's order")
        if beyond is not None:
            what = (*what, beyond)
        return _cached(self, what, lambda: _build(self, side, block, sorted, beyond))

    def samples(self, limits: Limits) -> Tensor:
        """The list of whole samples within limits, the most work first: int32 [B, FIELDS], records as in ``tiles``.

        Their row is 0. Samples without queries or without keys are among them; those that are not within the limits
        name no sample and stand last, and what lies behind the last offset is not listed: see ``tiles``.
        """
        return _cached(self, ("samples", limits), lambda: _whole(self, limits))

    def blocks(self, block: int) -> "Batch":
        """Each ``block`` rows of each sample, counted from its start, as a sample of their own; q and k the same."""
        if self.size == 0:
            return self
        offsets = _cached(self, ("blocks", block), lambda: _block_offsets(self.k_offsets, self.k_rows, block))
        return Batch(offsets, offsets, self.q_rows, self.k_rows)


# -- building ----------------------------------------------------------------------------------------------------------


def _build(batch: Batch, side: str, block: int, sorted: bool, beyond: Limits | None) -> Tensor:
    q_lens, k_lens = _lengths(batch)
    own, rows = (q_lens, batch.q_rows) if side == "q" else (k_lens, batch.k_rows)
    if side == "q" and batch.q_offsets is None:
        rows = batch.shared * batch.size
    sample, row = _in_order(own, rows // block + own.shape[0], block)
    there = sample.clamp(min=0)
    rest = there == batch.size  # behind the last offset nothing is seen
    if beyond is not None:
        sample = torch.where(_within(beyond, q_lens, k_lens)[there] & ~rest, NO_SAMPLE, sample)
    q_len, k_len = q_lens[there], k_lens[there]
    q_len, k_len = (q_len, k_len.masked_fill(rest, 0)) if side == "q" else (q_len.masked_fill(rest, 0), k_len)
    q_start = torch.zeros_like(there) if batch.q_offsets is None else batch.q_offsets.long()[there]
    unused = torch.zeros_like(there)
    fields = (sample, row, q_start, q_len, batch.k_offsets.long()[there], k_len, unused, unused)
    records = torch.stack(fields, 1).to(torch.int32)
    if not sorted:
        return records
    work = _visited(batch, side, q_lens, k_lens, sample, row, block)
    return records[torch.argsort(work, descending=True, stable=True)].contiguous()


def _whole(batch: Batch, limits: Limits) -> Tensor:
    q_lens, k_lens = (lens[:-1] for lens in _lengths(batch))
    k_start = batch.k_offsets[:-1].long()
    q_start = torch.zeros_like(k_start) if batch.q_offsets is None else batch.q_offsets[:-1].long()
    there = _within(limits, q_lens, k_lens)
    sample = torch.where(there, torch.arange(batch.size, device=q_lens.device), NO_SAMPLE)
    unused = torch.zeros_like(sample)
    records = torch.stack((sample, unused, q_start, q_lens, k_start, k_lens, unused, unused), 1).to(torch.int32)
    work = torch.where(there, q_lens * k_lens + q_lens + k_lens, -1)
    return records[torch.argsort(work, descending=True, stable=True)].contiguous()


def _within(limits: Limits, q_lens: Tensor, k_lens: Tensor) -> Tensor:
    return (q_lens <= limits.queries) & (k_lens <= limits.keys)


def _lengths(batch: Batch) -> tuple[Tensor, Tensor]:
    """Rows of each sample, and of the rest behind the last offset as a sample that sees nothing and is not seen."""

    def with_rest(offsets: Tensor, rows: int) -> Tensor:
        offsets = offsets.long()
        return torch.cat([offsets.diff(), rows - offsets[-1:]])

    k_lens = with_rest(batch.k_offsets, batch.k_rows)
    if batch.q_offsets is not None:
        return with_rest(batch.q_offsets, batch.q_rows), k_lens
    q_lens = torch.full_like(k_lens, batch.shared)
    q_lens[-1:] = 0
    return q_lens, k_lens


def _in_order(lens: Tensor, bound: int, block: int) -> tuple[Tensor, Tensor]:
    """(sample, first row) of every tile, sample after sample; ``bound`` entries, those left over name no sample."""
    tiles = (lens + (block - 1)) // block
    ends = tiles.cumsum(0)
    index = torch.arange(bound, device=lens.device)
    sample = torch.searchsorted(ends, index, right=True)
    there = sample.clamp(max=lens.shape[0] - 1)
    row = (index - (ends - tiles)[there]) * block
    return torch.where(sample < lens.shape[0], sample, NO_SAMPLE), row


def _visited(
    batch: Batch, side: str, q_lens: Tensor, k_lens: Tensor, sample: Tensor, row: Tensor, block: int
) -> Tensor:
    """Rows of the other side that a tile visits; -1 for entries that name no sample."""
    there = sample.clamp(min=0)
    q_len, k_len = q_lens[there], k_lens[there]
    own, other = (q_len, k_len) if side == "q" else (k_len, q_len)
    last = torch.minimum(row + block, own) - 1
    # Query i stands at key position i + shift; a key j is seen by queries up to j + left and from j - right on.
    shift = k_len - q_len if side == "q" else q_len - k_len
    before, after = (batch.left, batch.right) if side == "q" else (batch.right, batch.left)
    first_seen = torch.zeros_like(row) if before < 0 else (row + shift - before).clamp(min=0)
    behind_seen = other if after < 0 else torch.minimum(last + shift + after + 1, other)
    work = (behind_seen - first_seen).clamp(min=0)
    work = torch.where(there == batch.size, 0, work)  # the rest behind the last offset
    return torch.where(sample < 0, -1, work)


def _block_offsets(offsets: Tensor, rows: int, block: int) -> Tensor:
    """Starts of all blocks, ascending, and the end: [N + 1]; blocks left over are empty ones at the end."""
    offsets = offsets.long()
    lens = offsets.diff()
    sample, row = _in_order(lens, rows // block + lens.shape[0], block)
    starts = torch.where(sample < 0, offsets[-1:], offsets[sample.clamp(min=0)] + row)
    return torch.cat([starts, offsets[-1:]])


# -- keeping -----------------------------------------------------------------------------------------------------------

# id of the keys' offsets -> (weak reference to them, lists by what they depend on). Tensors do not hash by identity.
_kept: dict[int, tuple[weakref.ref, dict]] = {}
_MOST_LISTS = 64  # for one tensor of offsets: a model has a few masks and tile sizes
_KEEP = os.environ.get("GEM_SCHEDULE_CACHE", "1") != "0"


def _cached(batch: Batch, what: tuple, build):
    k_state = _state(batch.k_offsets)
    if batch.q_offsets is None or batch.q_offsets is batch.k_offsets:
        offsets, state = (batch.k_offsets,), (k_state,)
    else:
        offsets, state = (batch.k_offsets, batch.q_offsets), (k_state, _state(batch.q_offsets))
    if None in state:
        return build()
    key = (state, what, batch.q_offsets is None, batch.q_rows, batch.k_rows, batch.left, batch.right, batch.shared)
    owner = offsets[0]
    entry = _kept.get(id(owner))
    if entry is None or entry[0]() is not owner:
        number = id(owner)
        entry = (weakref.ref(owner, lambda _: _kept.pop(number, None)), {})
        _kept[number] = entry
    lists = entry[1]
    found = lists.get(key)
    # The queries' offsets are compared by identity too: another tensor may have come to lie at their address.
    if found is None or found[0][-1]() is not offsets[-1]:
        _forget_older(lists, state)
        found = lists[key] = (tuple(weakref.ref(x) for x in offsets), build())
    return found[1]


def _state(offsets: Tensor) -> tuple | None:
    """What tells that a tensor still holds what it held; None where that cannot be told and nothing may be kept."""
    if not _KEEP or offsets.is_inference():
        return None  # it counts no versions
    stream = 0
    if offsets.is_cuda:
        # The functions below torch.cuda's: those make a Stream object a call, 10 us of the host on a slow machine.
        if torch._C._cuda_isCurrentStreamCapturing():
            return None  # a graph is replayed with other lengths in the same memory: it must build its own list
        stream = torch._C._cuda_getCurrentRawStream(offsets.get_device())
    return offsets.data_ptr(), offsets._version, stream


def _forget_older(lists: dict, state: tuple) -> None:
    """Drop lists whose offsets were written to since or are gone, and the oldest where there are many."""
    for key, (owners, _) in list(lists.items()):  # a copy: another thread may be adding
        changed = any(old[0] == new[0] and old[1] != new[1] for old in key[0] for new in state)
        if changed or any(owner() is None for owner in owners):
            lists.pop(key, None)
    while len(lists) >= _MOST_LISTS:
        lists.pop(next(iter(lists)), None)
