"""Shared by the tests of ops: jagged inputs, and the rule by which an implementation agrees with the oracle."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Relative to max(1, largest oracle value): a couple of roundings of the dtype (float32: sums of some hundred terms).
FLOOR = {torch.float64: 2e-14, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BOUND = {torch.float64: 1e-11, torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def offsets(lens: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Offsets [B + 1] of lengths."""
    return torch.tensor([0, *torch.tensor(list(lens), dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def rows(total: int, heads: int, dim: int, dtype: torch.dtype, seed: int, layout: str = "packed") -> Tensor:
    """N(0, 1) values [total, heads, dim], packed or a view with gaps between rows."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(total, heads, dim, generator=g, dtype=torch.float64).to(dtype)
    if layout == "packed":
        return x
    if layout == "strided":  # a slice of a wider projection
        wide = torch.full((total, 3, heads, dim), torch.nan, dtype=dtype)
        wide[:, 1] = x
        return wide[:, 1]
    assert layout == "heads_first"
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def run(fn: Callable[..., Tensor], tensors: Sequence[Tensor], seed: int = 7) -> list[Tensor]:
    """[output, gradient of each tensor] for one seeded gradient of the output; keeps strides of the inputs."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = fn(*leaves)
    g = torch.Generator().manual_seed(seed)
    d_out = torch.randn(out.shape, generator=g, dtype=torch.float64)
    grads = torch.autograd.grad(out, leaves, d_out.to(out.dtype), allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]


def assert_agrees(
    op: Callable[..., Tensor], oracle: Callable[..., Tensor], tensors: Sequence[Tensor], **how: Any
) -> None:
    """Error against the float64 oracle <= 2 x that of the plain run in the inputs' own dtype + a floor, and a bound."""
    dtype = tensors[0].dtype
    got = run(lambda *xs: op(*xs, **how), tensors)
    right = run(lambda *xs: oracle(*xs, **how), tensors)
    plain = run(lambda *xs: oracle(*xs, compute_dtype=dtype, **how), tensors)
    for name, x, ref, other in zip(("out", "dq", "dk", "dv", "d_bias"), got, right, plain, strict=False):
        assert x.dtype == dtype and x.shape == ref.shape, name
        assert torch.isfinite(x).all(), f"{name} is not finite"
        if x.numel() == 0:
            continue
        size = max(1.0, float(ref.double().abs().max()))
        error = float((x.double() - ref.double()).abs().max())
        plain_error = float((other.double() - ref.double()).abs().max())
        assert error <= 2 * plain_error + FLOOR[dtype] * size, f"{name}: error {error:.2e}, plain run {plain_error:.2e}"
        assert error <= BOUND[dtype] * size, f"{name}: error {error:.2e} of values up to {size:.2e}"
