"""Attention biases in a tile of scores: dense ones by strides, learned ones by bucket of distance or time difference.

Legend: B samples, H heads, N buckets.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Bias:
    """The bias of a call as the kernels take it. ``kind``: "", "dense", "position" or "time".

    ``values``: dense [B or 1, H or 1, max_q or 1, max_k or 1], or a table [N, H or 1]. ``boundaries`` [N - 1] ascend; a
    distance falls into bucket "number of boundaries <= distance". ``q_times``, ``k_times``: one a row, int64.
    """

    kind: str = ""
    values: Tensor | None = None
    boundaries: Tensor | None = None
    q_times: Tensor | None = None
    k_times: Tensor | None = None

    @property
    def steps(self) -> int:
        """Halvings that find a bucket."""
        return 0 if self.boundaries is None else max(self.boundaries.shape[0], 0).bit_length()

    def arguments(self, placeholder: Tensor) -> tuple:
        """What kernels take after q, k, v: pointers (an unread placeholder for those absent), strides, a count."""
        if not self.kind:
            return (placeholder,) * 4 + (0,) * 5
        assert self.values is not None
        values = self.values
        if self.kind == "dense":
            strides = [0 if n == 1 else s for n, s in zip(values.shape, values.stride(), strict=True)]
        else:
            strides = [values.stride(0), 0 if values.shape[1] == 1 else values.stride(1), 0, 0]
        count = 0 if self.boundaries is None else self.boundaries.shape[0]
        rest = (placeholder if x is None else x for x in (self.boundaries, self.q_times, self.k_times))
        return (values, *rest, *strides, count)


NO_BIAS = Bias()


def dense_4d(values: Tensor) -> Tensor:
    """A dense bias with its four dimensions, as a view."""
    return values[(None,) * (4 - values.dim())]


def as_int64(x: Tensor | None) -> Tensor | None:
    """Boundaries and times as the kernels read them."""
    return None if x is None else x.to(torch.int64).contiguous()


@triton.jit
def bucket_of(distance, boundaries, count, STEPS: tl.constexpr):
    """Number of ``boundaries`` <= distance, by halving: the largest position whose boundary is not above."""
    position = tl.zeros_like(distance).to(tl.int32)
    for step in tl.static_range(STEPS):
        candidate = position + (1 << (STEPS - 1 - step))
        inside = candidate <= count
        boundary = tl.load(boundaries + candidate - 1, mask=inside, other=0)
        position = tl.where(inside & (boundary <= distance), candidate, position)
    return position


@triton.jit
def buckets(i, j, i_inside, j_inside, shift, q_start, k_start, boundaries, q_times, k_times, count,
            KIND: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Buckets of the pairs (i, j) of a sample: i and j broadcast against each other, so either may be the rows."""
    if KIND == "position":
        distance = (i + shift - j).to(tl.int64)
    else:
        distance = tl.load(q_times + q_start + i, mask=i_inside, other=0) - tl.load(
            k_times + k_start + j, mask=j_inside, other=0
        )
    return bucket_of(distance, boundaries, count, STEPS)


@triton.jit
def bias_tile(i, j, q_len, k_len, sample, head, q_start, k_start, values, boundaries, q_times, k_times,
              stride_b, stride_h, stride_q, stride_k, count, KIND: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """The bias of the pairs (i, j), fp32; 0 for pairs outside the sample, where a caller may have left anything."""
    i_inside, j_inside = i < q_len, j < k_len
    if KIND == "dense":
        base = values + sample.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        pointers = base + (i.to(tl.int64) * stride_q + j.to(tl.int64) * stride_k)
        return tl.load(pointers, mask=i_inside & j_inside, other=0.0).to(tl.float32)
    else:
        bucket = buckets(i, j, i_inside, j_inside, k_len - q_len, q_start, k_start, boundaries, q_times, k_times,
                         count, KIND, STEPS)  # fmt: skip
        value = tl.load(values + (bucket.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h)).to(tl.float32)
        return tl.where(i_inside & j_inside, value, 0.0)
