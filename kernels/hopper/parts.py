"""What the Gluon kernels share: weights, the records of jobs and how they are dealt, counts of tiles.

A job is an entry of the tile list (schedule.Batch.tiles) and a head: number ``entry * heads + head``, so that the heads
of an entry, whose rows are neighbours in memory, run side by side.

Legend: M queries of a tile, N keys of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem.kernels.activations import activate, activate_with_slope
from gem.kernels.schedule import FIELDS as _FIELDS

# Of a descriptor's tiles in shared memory: rows of 64 columns of 16 bits, as wgmma reads them.
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
FIELDS = gl.constexpr(_FIELDS)
# Rows of a ragged descriptor (launch.ragged) are counted back from here.
END = gl.constexpr(2**30)


@gluon.jit
def weights_of(scores, scale, out_scale, ACT: gl.constexpr, FOLD: gl.constexpr, dtype: gl.constexpr):
    """act(scale * scores) in fp32, with out_scale where FOLD (launch.folds), for weights of ``dtype``."""
    weights = activate(scores * scale, ACT, dtype == gl.bfloat16)
    if FOLD:
        weights = weights * out_scale
    return weights


@gluon.jit
def weights_and_slopes(scores, scale, ACT: gl.constexpr, dtype: gl.constexpr):
    """(act, act') of scale * scores in fp32, for a backward in ``dtype``."""
    return activate_with_slope(scores * scale, ACT, dtype == gl.bfloat16)


@gluon.jit
def dealt(turn, lane, programs, LANES: gl.constexpr):
    """Number of a lane's ``turn``-th job, in zigzag: the list begins with the longest, so that sums differ little."""
    lanes = programs * LANES
    at = gl.program_id(0) * LANES + lane
    back = turn % 2
    return turn * lanes + at * (1 - back) + (lanes - 1 - at) * back


@gluon.jit
def record_of(tiles, job, jobs, heads):
    """(sample, row, q_start, q_len, k_start, k_len, head) of a job; sample -1 = there is no such job, nor a later one.

    Sample B is the rest behind the last offset, with k_len 0.
    """
    there = job < jobs
    job = gl.where(there, job, 0)
    base = tiles + (job // heads) * FIELDS
    sample = gl.where(there, gl.load(base), -1)
    row = gl.load(base + 1)
    q_start = gl.load(base + 2)
    q_len = gl.load(base + 3)
    k_start = gl.load(base + 4)
    k_len = gl.load(base + 5)
    return sample, row, q_start, q_len, k_start, k_len, job % heads


@gluon.jit
def key_tiles(k_len, N: gl.constexpr):
    """Tiles of keys of a job; for no keys one of zeros, so that its output is written: 0."""
    return gl.maximum((k_len + N - 1) // N, 1)
