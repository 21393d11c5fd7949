"""What a softmax backward must know of each row of queries: its log-sum-exp and the dot of its output and d_out.

They lie tile by tile, in the order in which kernels read them through the copy engine: 64 log-sum-exps in base 2 and 64
dots of a tile of queries and a head, numbered as in ``sums``. Rows behind a sample's end have +inf and 0, so that their
weights are 0.

Legend: T rows of all samples, H heads, D head_dim.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem.kernels.hopper.parts import record_of
from gem.kernels.hopper.sums import first_tile, most_tiles
from gem.kernels.launch import PLANS, Launch, kind_of, remember
from gem.kernels.schedule import Batch

NOWHERE = gl.constexpr(-2)  # a row of the descriptor at which zeros are read


def of_rows(out_THD: Tensor, d_out_THD: Tensor, lse_HT: Tensor, batch: Batch) -> Tensor:
    """[2 * tiles * heads, 64] fp32 of a batch. ``out_THD`` is contiguous, rows of ``d_out_THD`` are."""
    rows, heads, head_dim = out_THD.shape
    shared = batch.shared if batch.q_offsets is None else 0
    found = out_THD.new_empty((2 * most_tiles(rows, batch.size) * heads, 64), dtype=torch.float32)
    kind = kind_of(batch, out_THD, d_out_THD)
    key = ("gluon attention rows", kind)
    launch = PLANS.get(key)
    if launch is None:
        launch = Launch(_rows, D=head_dim, warps=4)
        if kind is not None:
            remember(key, launch)
    tiles = batch.tiles("q", 64)
    jobs = tiles.shape[0] * heads
    launch((jobs,), out_THD, d_out_THD, lse_HT, found, tiles, jobs, heads, shared, rows, d_out_THD.stride(0))
    return found


@gluon.jit(do_not_specialize=["jobs", "heads", "shared", "total", "stride"])
def _rows(out, d_out, lse, found, tiles, jobs, heads, shared, total, stride, D: gl.constexpr):
    """Of a tile of 64 queries and a head."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    sample, row, q_start, q_len, _, k_len, head = record_of(tiles, gl.program_id(0), jobs, heads)
    if (sample >= 0) & (k_len > 0):
        start = q_start
        if shared > 0:
            start = sample * shared
        m = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
        columns = head * D + gl.arange(0, D, gl.SliceLayout(0, ROWS))
        there = row + m < q_len
        at = (start + row + m).to(gl.int64)
        here = there[:, None] & (columns >= 0)[None, :]
        x = gl.load(out + (at * (heads * D))[:, None] + columns[None, :], mask=here, other=0.0).to(gl.float32)
        y = gl.load(d_out + (at * stride)[:, None] + columns[None, :], mask=here, other=0.0).to(gl.float32)
        base = found + ((first_tile(q_start, sample, shared) + row // 64) * heads + head).to(gl.int64) * 128
        scale = gl.load(lse + head.to(gl.int64) * total + at, mask=there, other=float("inf"))
        gl.store(base + m, scale)
        gl.store(base + 64 + m, gl.sum(x * y, 1))
