"""Hostile batches for emulated kernels, their inputs, right results, and when a result is right.

Legend: T rows of all samples, H heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from attention_laws import offsets
from torch import Tensor

from gem import reference
from gem.kernels.schedule import Batch


@dataclass(frozen=True)
class Lengths:
    """Queries and keys of each sample, and rows behind the last offsets. ``shared``: queries that all samples have."""

    q: Sequence[int]
    k: Sequence[int]
    rest_q: int = 0
    rest_k: int = 0
    shared: int = 0

    @property
    def q_lens(self) -> list[int]:
        return [self.shared] * len(self.k) if self.shared else list(self.q)

    def batch(self) -> Batch:
        q_offsets = None if self.shared else offsets(self.q)
        q_rows = self.shared or sum(self.q) + self.rest_q
        return Batch(q_offsets, offsets(self.k), q_rows, sum(self.k) + self.rest_k, shared=self.shared)


# Tiles have 64 queries and, in most tests, 16 keys.
LENGTHS = {
    "ragged": Lengths((70, 0, 3, 130, 1, 64, 0, 65), (40, 5, 0, 17, 33, 16, 0, 1), rest_q=5, rest_k=3),
    "one row": Lengths((1,), (1,)),
    "a tile each": Lengths((3, 60, 1, 64, 9, 17, 5, 2), (5, 64, 1, 30, 9, 2, 33, 60)),
    "many keys": Lengths((130, 70), (100, 40), rest_k=1),
    "few keys": Lengths((300, 40, 200, 130), (17, 40, 40, 30)),
    "many keys and queries": Lengths((310, 0, 130, 1, 0, 65), (130, 5, 300, 33, 0, 1), rest_q=5, rest_k=3),
    "up to 256 keys": Lengths((310, 0, 130, 1, 0, 65), (200, 5, 256, 33, 0, 128), rest_q=5, rest_k=3),
    "no keys but of one": Lengths((5, 0, 90, 2), (0, 0, 0, 20), rest_q=70),
    "nobody's rows": Lengths((0, 0), (0, 9), rest_q=67, rest_k=20),
    "shared": Lengths((), (0, 33, 1, 16, 100, 0), rest_k=4, shared=7),
}


@dataclass(frozen=True)
class Inputs:
    """NaN wherever no result depends on a row."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor


def inputs(lengths: Lengths, heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    batch = lengths.batch()

    def rows(count: int) -> Tensor:
        return torch.randn(count, heads, head_dim, generator=g).to(dtype)

    q, k, v = rows(batch.q_rows), rows(batch.k_rows), rows(batch.k_rows)
    d_out = rows(lengths.shared * batch.size if lengths.shared else batch.q_rows)
    q_at = k_at = 0
    for q_len, k_len in zip(lengths.q_lens, lengths.k, strict=True):
        if k_len == 0:
            d_out[q_at : q_at + q_len] = torch.nan
            if not lengths.shared:
                q[q_at : q_at + q_len] = torch.nan
        if q_len == 0:
            k[k_at : k_at + k_len] = v[k_at : k_at + k_len] = torch.nan
        q_at += q_len
        k_at += k_len
    for x, end in ((d_out, q_at), (k, k_at), (v, k_at), *(() if lengths.shared else ((q, q_at),))):
        x[end:] = torch.nan
    return Inputs(q, k, v, d_out)


def gradients(
    lengths: Lengths, x: Inputs, activation: str, qk_scale: float, out_scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, dq, dk, dv) in float64; of shared queries dq of each sample, [B * shared, H, D]."""
    q, k, v, d_out = (torch.nan_to_num(t.double()) for t in (x.q, x.k, x.v, x.d_out))
    if lengths.shared:
        q = q.repeat(len(lengths.k), 1, 1)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    how = {"activation": activation, "qk_scale": qk_scale, "out_scale": out_scale}
    out = reference.gdpa(q, k, v, offsets(lengths.q_lens), offsets(lengths.k), **how)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out)
    return out.detach(), dq, dk, dv


def assert_near(got: Tensor, right: Tensor, lens: Sequence[int], name: str, most: float = 1e-2) -> None:
    """Sample by sample and head by head, relative to its largest value; what lies behind the last is all 0 or NaN."""
    ends = offsets(lens).tolist()
    for b, (start, end) in enumerate(zip(ends, [*ends[1:], got.shape[0]], strict=True)):
        a, b_ = got[start:end].double(), right[start:end]
        if a.numel() == 0:
            continue
        size = b_.abs().amax((0, 2)).clamp(min=1e-6)
        error = float(((a - b_).abs().amax((0, 2)) / size).max())
        assert error <= most, f"{name} of sample {b} is off by {error:.1e}"
