"""Sums of dq over programs on Hopper, in fp32: adding a tile's share in a fixed order, and dq of the sums.

A tile is 64 queries of a sample and a head. Tile i of a sample is number start // 64 + 2 * sample + i: no two are the
same, there is room for one behind a sample's last, and nothing must be read back to know how many there are. Its sums
lie in the order in which registers hold them, [column / 8, warp, row % 8, column / 2 % 4, row / 8 % 2, column % 2]: a
thread writes 16 bytes at a time, without bank conflicts, and the copy engine one block of memory.

Whose turn it is to add says a flag in global memory, which counts those that have added. Zeros are not needed: the
first one stores.

Legend: T rows of all samples, H heads, D head_dim.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem.kernels import launch
from gem.kernels.hopper.jobs import told
from gem.kernels.hopper.parts import record_of
from gem.kernels.hopper.slopes import slope_factor
from gem.kernels.launch import Launch

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
_PLAIN = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_ROWS = 0x7FFF0000  # of the descriptor, whatever there are: what a launch has prepared serves every batch
_FLAGS = 32  # where flags begin behind the counter: not in its cache line

FLAGS = gl.constexpr(_FLAGS)
# By one lane for all of a warp, so that all go the same way. What the copy engine is told afterwards comes after it.
READ_FLAG = gl.constexpr("""{
.reg .pred first; .reg .b32 lane, seen;
mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.b32 seen, 0;
@first ld.acquire.gpu.global.b32 seen, [$1];
shfl.sync.idx.b32 $0, seen, 0, 31, 0xffffffff;
fence.proxy.async.global;
}""")
# When the copy engine's additions are done: tma.store_wait waits only until it has read what it adds. The lane that
# asked for them waits, and the others for it.
RAISE_FLAG = gl.constexpr("""{
.reg .pred first; .reg .b32 lane;
cp.async.bulk.wait_group 0;
fence.proxy.async.global;
bar.warp.sync 0xffffffff;
mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;
@first st.release.gpu.global.b32 [$1], $2;
mov.b32 $0, 0;
}""")


class SumsLaunch(Launch):
    """Of a Gluon kernel with descriptors of 16-bit tensors, of the sums and of ``rows``."""

    def _given(self, position: int, x: Any) -> Any:
        if position not in self.ragged:
            return x
        block = self.ragged[position]
        if x.dtype == torch.float32:
            width = x.shape[1]
            return TensorDescriptor(x, [_ROWS, width], [width, 1], [block, width], _LAYOUT if width == 32 else _PLAIN)
        return launch.ragged(x, block, self.layout)


def buffers(
    q_rows: int, samples: int, heads: int, head_dim: int, device: torch.device, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sums as rows of 32, those given if any; zeros: a counter of jobs and, from ``FLAGS`` on, flags).

    For as many tiles as there may be. There are flags of four tiles more, which nobody raises: a writer may read them.
    """
    if sums is None:
        sums = room(q_rows, samples, heads, head_dim, device)
    return sums, torch.zeros(_FLAGS + (most_tiles(q_rows, samples) + 4) * heads, dtype=torch.int32, device=device)


def room(q_rows: int, samples: int, heads: int, head_dim: int, device: torch.device) -> Tensor:
    """Sums of as many tiles as there may be, as rows of 32. Nothing is in them."""
    rows = most_tiles(q_rows, samples) * heads * head_dim * 2
    return torch.empty((rows, 32), dtype=torch.float32, device=device)


def most_tiles(q_rows: int, samples: int) -> int:
    """Tiles of 64 queries that so many rows of so many samples may be numbered up to, for each head."""
    return q_rows // 64 + 2 * samples + 2


@builtin
def add_to_global(desc, coord, source, _semantic=None) -> None:
    """The copy engine adds a tile in shared memory to one in global memory. Gluon 3.6 has it without a name."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, source.handle)


@gluon.jit
def first_tile(start, sample, shared):
    """Number of a sample's first tile; ``start`` of its queries, where not all samples have the same."""
    if shared > 0:
        start = sample * shared
    return start // 64 + 2 * sample


@gluon.jit
def in_order(dq):
    """Columns of a share, all of them or half, as rows of 32 in the order of registers."""
    C: gl.constexpr = dq.shape[1]
    # [warp, row / 8 % 2, row % 8, column / 8, column / 2 % 4, column % 2]
    return dq.reshape([4, 2, 8, C // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([2 * C, 32])


@gluon.jit
def read_flag(flag):
    """How many have added, for a warp."""
    return gl.inline_asm_elementwise(READ_FLAG, "=r,l", [flag.to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def raise_flag(flag, count):
    """Say that so many have added, when all that this warp asked the copy engine to write is written."""
    gl.inline_asm_elementwise(RAISE_FLAG, "=r,l,r", [flag.to(gl.int64), count], gl.int32, False, 1)


@gluon.jit
def writer(
    S: gl.constexpr, M: gl.constexpr, D: gl.constexpr, LEFT: gl.constexpr, sums_desc, sum_s, sum_full, sum_empty, job_s,
    job_full, job_empty, state, heads, left,
):  # fmt: skip
    """Every other tile: a writer has a place in shared memory, and waits for one tile's addition at a time.

    LEFT: queries see keys from ``left`` before them only, so that a tile's first share is not that of the first keys.
    """
    it = 0
    t = 0
    mbarrier.wait(job_full.index(0), 0)
    n = told(job_s, 0, 0, 1)
    while n > 0:
        head, turn, tile = told(job_s, t, 3, 1), told(job_s, t, 4, 1), told(job_s, t, 5, 1)
        real, apart = told(job_s, t, 6, 1), told(job_s, t, 7, 1)
        mbarrier.arrive(job_empty.index(t % 2), count=1)
        seen = 0
        for i in range((S + it) % 2, n, 2):
            at = (tile + i * (M // 64)) * heads + head
            phase = ((it + i) // 2) & 1
            flag = state + FLAGS + at
            mbarrier.wait(sum_full.index(S * 2), phase)
            mbarrier.wait(sum_full.index(S * 2 + 1), phase)
            if i < real:
                before = turn
                if LEFT:
                    before = turn - gl.maximum(apart + turn * 128 + i * 64 - left, 0) // 128
                while seen < before:
                    seen = read_flag(flag)
                for w in gl.static_range(2):
                    row = (2 * at + w) * D if M == 64 else (at + w * heads) * (2 * D)
                    if before > 0:
                        add_to_global(sums_desc, [row, 0], sum_s.index(S * 2 + w))
                    else:
                        tma.async_copy_shared_to_global(sums_desc, [row, 0], sum_s.index(S * 2 + w))
                tma.store_wait(0)
                mbarrier.arrive(sum_empty.index(S), count=1)
                # The next flag is read while the addition goes on; behind the last are some that nobody raises.
                seen = read_flag(flag + 2 * (M // 64) * heads)
                raise_flag(flag, before + 1)
            else:
                mbarrier.arrive(sum_empty.index(S), count=1)
        it += n
        t += 1
        mbarrier.wait(job_full.index(t % 2), (t // 2) & 1)
        n = told(job_s, t, 0, 1)


@gluon.jit(do_not_specialize=["jobs", "heads", "shared", "left", "right"])
def _dq_rows(
    sums, dq, tiles, jobs, heads, shared, left, right, scale, out_scale, ACT: gl.constexpr, FOLD: gl.constexpr,
    LEAN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Rows of dq of a tile's sums: 0 where no key is seen, whose sums nobody wrote."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    sample, row, q_start, q_len, _, k_len, head = record_of(tiles, gl.program_id(0), jobs, heads)
    if sample >= 0:
        tile = first_tile(q_start, sample, shared) + row // 64
        seen = k_len > 0
        if LEFT:
            seen = seen & (row + k_len - q_len - left < k_len)
        if RIGHT:
            seen = seen & (gl.minimum(row + 64, q_len) + k_len - q_len + right > 0)
        i = gl.arange(0, 64 * D, FLAT)
        base = sums + (tile * heads + head).to(gl.int64) * (64 * D)
        x = gl.load(base + i, mask=(i >= 0) & seen, other=0.0).reshape([D // 8, 4, 8, 4, 2, 2])
        x = gl.convert_layout(x.permute((1, 4, 2, 0, 3, 5)).reshape([64, D]), ROWS)
        x = x * slope_factor(scale, out_scale, ACT, FOLD, LEAN)
        start = q_start
        if shared > 0:
            start = sample * shared
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
        columns = gl.arange(0, D, gl.SliceLayout(0, ROWS))
        at = (start + rows).to(gl.int64) * (heads * D) + head * D
        gl.store(dq + at[:, None] + columns[None, :], x.to(dq.dtype.element_ty), mask=(rows < q_len)[:, None])


def rows_launch(
    head_dim: int, activation: str, fold: bool, lean: bool, left: bool = False, right: bool = False
) -> Launch:
    """The kernel that makes dq of sums: a program for each tile of 64 queries and head."""
    return Launch(_dq_rows, ACT=activation, FOLD=fold, LEAN=lean, LEFT=int(left), RIGHT=int(right), D=head_dim, warps=4)
