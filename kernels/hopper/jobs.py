"""What a program's partitions must know of a job, from the producer to the others through shared memory, two jobs deep.

Of job ``t``, by number: 0 tiles of queries (0: there is no more job); 1 end and 2 first row of the keys, as ragged
descriptors count; 3 head; 4 tiles of the sample with earlier keys; 5 number of its first tile of sums; 6 tiles that
hold queries. Between ``told`` and giving the job back (an arrival at job_empty) nothing is overwritten.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

PARTS = gl.constexpr(8)


@gluon.jit
def hand_on(job_s, job_full, job_empty, t, tiles, k_end, k_x, head, turn, tile, real, apart):
    """Numbers of job ``t``, by a warp."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = t % 2
    mbarrier.wait(job_empty.index(slot), ((t // 2) & 1) ^ 1)
    job_s.index(slot * PARTS).store(gl.full([1], tiles, gl.int32, L))
    job_s.index(slot * PARTS + 1).store(gl.full([1], k_end, gl.int32, L))
    job_s.index(slot * PARTS + 2).store(gl.full([1], k_x, gl.int32, L))
    job_s.index(slot * PARTS + 3).store(gl.full([1], head, gl.int32, L))
    job_s.index(slot * PARTS + 4).store(gl.full([1], turn, gl.int32, L))
    job_s.index(slot * PARTS + 5).store(gl.full([1], tile, gl.int32, L))
    job_s.index(slot * PARTS + 6).store(gl.full([1], real, gl.int32, L))
    job_s.index(slot * PARTS + 7).store(gl.full([1], apart, gl.int32, L))
    mbarrier.arrive(job_full.index(slot), count=1)


@gluon.jit
def told(job_s, t, part: gl.constexpr, WARPS: gl.constexpr):
    """A number of job ``t``, for a partition of so many warps that has waited for job_full."""
    return gl.max(job_s.index(t % 2 * PARTS + part).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
