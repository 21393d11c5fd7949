"""What the backwards for short keys share: numbers of a pass, weights as an operand, how dq, dk and dv leave.

Legend: T rows of all samples, H heads, D head_dim.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gem.kernels import launch
from gem.kernels.hopper.parts import END, LAYOUT
from gem.kernels.hopper.slopes import slopes_of
from gem.kernels.launch import Launch

_HALF_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=4)  # of 32 columns
# Numbers that the producer hands on for a pass.
TILES = gl.constexpr(0)  # of queries; 0: there is no more pass
K_END = gl.constexpr(1)
K_X = gl.constexpr(2)  # first row of the keys, as descriptors count
Q_END = gl.constexpr(3)  # of dq
Q_LEN = gl.constexpr(4)
HEAD = gl.constexpr(5)
PART = gl.constexpr(6)  # number of the first query tile among all
PLACE = gl.constexpr(7)  # 2 * number of the pass in its job, + 1 for the last one
BLOCKS = gl.constexpr(8)  # of 64 keys, of those that are worked at
PARTS = gl.constexpr(9)


class DqLaunch(Launch):
    """dq, of which each consumer stores half a head's columns, comes as [T, 2 * H, D / 2]."""

    def _given(self, position: int, x: Any) -> Any:
        if position == 6 and x.dtype != torch.float32:
            return launch.ragged(x, 64, LAYOUT if x.shape[2] == 64 else _HALF_LAYOUT)
        return super()._given(position, x)


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, each for so many arrivals. The fence is the caller's."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def field(job_s, t, number: gl.constexpr):
    """A number of pass ``t`` that the producer handed on."""
    return gl.max(job_s.index((t % 2) * PARTS + number).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def put(job_s, t, number: gl.constexpr, value):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    job_s.index((t % 2) * PARTS + number).store(gl.full([1], value, gl.int32, L))


@gluon.jit
def load_tile(q_desc, o_desc, ring, full, empty, it, q_end, o_end, x, column, BUFFERS: gl.constexpr):
    """Queries and d_out of a tile into the next two buffers."""
    for half in gl.static_range(2):
        number = 2 * it + half
        at = number % BUFFERS
        mbarrier.wait(empty.index(at), ((number // BUFFERS) & 1) ^ 1)
        mbarrier.expect(full.index(at), q_desc.block_type.nbytes)
        if half == 0:
            tma.async_copy_global_to_shared(q_desc, [END, q_end, x, column], full.index(at), ring.index(at))
        else:
            tma.async_copy_global_to_shared(o_desc, [END, o_end, x, column], full.index(at), ring.index(at))


@gluon.jit
def nothing(it):
    """0, which the compiler does not know: addresses that it took out of loops would have to go to local memory."""
    return it >> 30


@gluon.jit
def weights(
    s, scale, out_scale, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr, dtype: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Weights as a register operand, and slopes."""
    one = gl.full([64, 64], 1.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    w, slope = slopes_of(s, one, scale, out_scale, ACT, FOLD, LEAN, dtype)
    P_L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    return gl.convert_layout(w.to(dtype), P_L, assert_trivial=True), slope


@gluon.jit
def give_back(empty, it, BUFFERS: gl.constexpr):
    mbarrier.arrive(empty.index((2 * it) % BUFFERS), count=1)
    mbarrier.arrive(empty.index((2 * it + 1) % BUFFERS), count=1)


@gluon.jit
def rows_out(W: gl.constexpr, dq, dq_s, dq_to, job_s, t, it, tile, heads, factor, D: gl.constexpr, F32: gl.constexpr):
    """Half the columns of dq of 64 queries out. tma.store_wait is the caller's."""
    C: gl.constexpr = D // 2
    q_end = field(job_s, t, Q_END)
    q_len = field(job_s, t, Q_LEN)
    column = field(job_s, t, HEAD) * D + W * C
    dq = dq * factor
    if F32:
        H_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
        rows = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, H_L))[:, None]
        columns = column + gl.arange(0, C, gl.SliceLayout(0, H_L))[None, :]
        base = dq_to + (q_end - q_len).to(gl.int64) * (heads * D)
        gl.store(base + (rows * (heads * D) + columns), dq, mask=rows < q_len)
    else:
        to = dq_s.index(W + nothing(it))
        to.reshape([64, C]).store(dq.to(dq_s.dtype))
        fence_async_shared()
        if tile * 64 < q_len:
            tma.async_copy_shared_to_global(dq_to, [END, q_end, END - q_len + tile * 64, column], to)


@gluon.jit
def store(x_s, desc, x, end, at, column, D: gl.constexpr):
    """64 rows out through shared memory; tma.store_wait is the caller's."""
    x_s.reshape([64, D]).store(x.to(x_s.dtype))
    fence_async_shared()
    if at < END:
        tma.async_copy_shared_to_global(desc, [END, end, at, column], x_s)
