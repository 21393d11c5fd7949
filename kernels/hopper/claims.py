"""Jobs claimed as lanes become free: counters on the host, and in a kernel what a producer claims and consumers learn.

Jobs that are dealt out beforehand wait for the lane that they were dealt to. So one SM that another kernel held made a
launch of one program an SM take twice as long (docs/measured.md), and the busiest lane of pma_q64 got 12 % more keys
than the mean. Claimed from the list, which begins with the longest, each goes to whoever is free first, and a program
that comes late finds nothing left to do. A job's results are the same bits on whatever lane it runs.

Measured on an H200 (bf16, forward): 1 to 9 % faster than dealt beforehand in zigzag, most where keys are short.

A producer claims a job when it has asked for the last tiles but one of the job before, so that neither the counter's
answer nor the record's makes consumers wait. They are sent the record through shared memory, beside the job's first
keys, whose barrier they wait for anyway, and learn only then that there is another job, or none.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem.kernels.hopper.parts import dealt

PLACE = gl.constexpr(8)  # words of a record on its way

# -- on the host -------------------------------------------------------------------------------------------------------

_AT_ONCE = 256
_unused: dict[tuple[int, int], list[Tensor]] = {}  # by device and stream


def counter(device: torch.device) -> Tensor:
    """int32 zeros at 16 bytes, for one launch on the current stream of the current device ``device``.

    A fill costs 2 us of the GPU and more of the host, so 256 launches of a stream share one. None is used twice: there
    is nothing to reset, nor anything left over from a launch that failed. A captured launch has a fill of its own,
    since it is replayed, on any stream.
    """
    if device.type != "cuda" or torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    number = torch.cuda.current_device() if device.index is None else device.index
    key = number, torch._C._cuda_getCurrentRawStream(number)
    try:
        return _unused[key].pop()  # one step, whichever threads use a stream
    except (KeyError, IndexError):
        counters = list(torch.zeros((_AT_ONCE, 4), dtype=torch.int32, device=device).unbind())
        found = counters.pop()
        _unused[key] = counters
        return found


# -- producers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def first_job(claimed, lane, programs, LANES: gl.constexpr, ZIGZAG: gl.constexpr, CLAIMS: gl.constexpr):
    """Number of a lane's first job."""
    if CLAIMS:
        job = gl.atomic_add(claimed, 1, sem="relaxed")
    else:
        job = dealt(0, lane, programs, LANES, ZIGZAG)
    return job


@gluon.jit
def claim(claimed):
    """Number of a lane's next job. Takes the memory's time."""
    return gl.atomic_add(claimed, 1, sem="relaxed")


@gluon.jit
def send(records, at, sample, row, q_start, q_len, k_len, head):
    """A record to place ``at`` that is free, seen by whoever waits for a barrier at which this warp arrives next."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    _send_field(records, at, 0, sample, L)
    _send_field(records, at, 1, row, L)
    _send_field(records, at, 2, q_start, L)
    _send_field(records, at, 3, q_len, L)
    _send_field(records, at, 4, k_len, L)
    _send_field(records, at, 5, head, L)
    gl.thread_barrier()


@gluon.jit
def _send_field(records, at, field: gl.constexpr, value, L: gl.constexpr):
    records.index(at * PLACE + field).store(gl.full([1], value, gl.int32, L))


# -- consumers ---------------------------------------------------------------------------------------------------------


@gluon.jit
def received(records, at):
    """(sample, row, q_start, q_len, k_len, head) that was sent to place ``at``; sample -1 = there is no more job."""
    sample = _received_field(records, at, 0)
    row = _received_field(records, at, 1)
    q_start = _received_field(records, at, 2)
    q_len = _received_field(records, at, 3)
    k_len = _received_field(records, at, 4)
    head = _received_field(records, at, 5)
    return sample, row, q_start, q_len, k_len, head


@gluon.jit
def _received_field(records, at, field: gl.constexpr):
    return gl.max(records.index(at * PLACE + field).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
