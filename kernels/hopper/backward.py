"""Backward of impl="gluon": which kernels a batch's gradients are made of, from shapes alone.

Nothing is read back from the device, so what is known are mean lengths. Kernels that are made for few queries or few
keys give a sample and head to one program, and have limits; samples beyond them, and what lies behind the last offsets,
go to "long" in launches of their own, which cost a few microseconds where there are none.

    few     up to 64 queries a sample (32, where the mean is that small): queries stay, keys pass once
    keep    head_dim 64, up to 256 keys a sample: all of them stay, queries pass once
    short   up to 512 keys a sample: a tile of keys stays, queries pass, and again for the next tile
    long    any lengths: a tile of keys stays, queries pass, and dq is added up in global memory in a fixed order

Legend: T rows of all samples, H heads, D head_dim.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gem.kernels import launch
from gem.kernels.hopper import backward_few, backward_keep, backward_long, backward_short
from gem.kernels.hopper.choose import FEW_QUERIES, SHORT_KEYS
from gem.kernels.hopper.sums import room
from gem.kernels.launch import empty_like, tma_fits
from gem.kernels.schedule import Batch, Limits


def gdpa_backward(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, batch: Batch, *, activation: str, qk_scale: float,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of a batch without a mask, bf16 or fp16, D 64 or 128; the same bits every run.

    Rows behind the last offset are 0. ``batch.shared`` queries get a gradient a sample, in fp32, summed in the samples'
    order. Tensors that the copy engine cannot read (launch.tma_fits) are copied first.
    """
    how = {"activation": activation, "qk_scale": qk_scale, "out_scale": out_scale}
    return gradients_of(d_out_THD, q_THD, k_THD, v_THD, batch, functools.partial(_run, how=how))


def gradients_of(
    d_out_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, batch: Batch, run: Callable[..., None]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) that ``run`` fills, given readable d_out, q, k, v, then these, then the batch; as ``gdpa_backward``.

    Without rows of queries or of keys they are 0, and nothing is run. ValueError for more rows than descriptors count.
    """
    shared = batch.shared if batch.q_offsets is None else 0
    heads, head_dim = k_THD.shape[1:]
    if shared:
        dq = q_THD.new_empty((shared * batch.size, heads, head_dim), dtype=torch.float32)
    else:
        dq = empty_like(q_THD)
    dk, dv = empty_like(k_THD), empty_like(v_THD)
    if dq.shape[0] == 0 or dk.shape[0] == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        check_rows(dq.shape[0], batch.q_rows, batch.k_rows)
        run(*(readable(x) for x in (d_out_THD, q_THD, k_THD, v_THD)), dq, dk, dv, batch)
    if shared:
        dq = dq.view(batch.size, *q_THD.shape).sum(0).to(q_THD.dtype)
    return dq, dk, dv


def readable(x: Tensor) -> Tensor:
    """As it is, or a copy that the copy engine can read."""
    return x if tma_fits(x) else x.clone(memory_format=torch.contiguous_format)


def check_rows(*counts: int) -> None:
    """ValueError for more rows than descriptors count."""
    if max(counts) > launch.MOST_TMA_ROWS:
        raise ValueError(f"the Gluon kernels take up to 2**30 rows, got {max(counts)}")


def choose_backward(batch: Batch, head_dim: int) -> tuple[str, Limits | None]:
    """(kernel, limits of the samples that it takes) for a batch's mean lengths."""
    samples = max(batch.size, 1)
    queries = batch.shared if batch.q_offsets is None else batch.q_rows / samples
    if queries <= FEW_QUERIES:
        return "few", backward_few.limits(32 if queries <= 32 else 64)
    if batch.k_rows / samples > SHORT_KEYS:
        return "long", None
    return ("keep", backward_keep.LIMITS) if head_dim == 64 else ("short", backward_short.LIMITS)


def _run(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, batch: Batch,
    how: dict[str, Any],
) -> None:  # fmt: skip
    kernel, limits = choose_backward(batch, k.shape[2])
    given = (d_out, q, k, v, dq, dk, dv, batch)
    sums = None
    if kernel == "few":
        assert limits is not None
        backward_few.run(*given, rows=limits.queries, **how)
    elif kernel == "keep":
        backward_keep.run(*given, **how)
    elif kernel == "short":
        sums = room(dq.shape[0], batch.size, k.shape[1], k.shape[2], k.device)
        backward_short.run(*given, sums=sums, **how)
    backward_long.run(*given, beyond=limits, sums=sums, **how)
