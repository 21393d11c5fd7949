"""The kernels' activations, score by score, against torch's in float64: far from 0 too, and the rough ones of bf16."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from interpreted import quiet

from gem.activations import BACKWARD, FORWARD
from gem.kernels.activations import activate, activate_with_slope

pytestmark = quiet

# What the formulas allow of rounding to fp32; "rough" adds how far its formula for Phi is off (_E0 … _E3).
OFF = {(False, "gelu"): (4e-6, 4e-6), (True, "gelu"): (8.5e-5, 3.1e-4)}


@triton.jit
def _curves(x_ptr, value_ptr, again_ptr, slope_ptr, BLOCK: tl.constexpr, NAME: tl.constexpr, ROUGH: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    again, slope = activate_with_slope(x, NAME, ROUGH)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(value_ptr + at, activate(x, NAME, ROUGH))
    tl.store(again_ptr + at, again)
    tl.store(slope_ptr + at, slope)


def curves(x: torch.Tensor, name: str, rough: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    value, again, slope = (torch.empty_like(x) for _ in range(3))
    arguments: tuple[Any, ...] = (x, value, again, slope, x.numel(), name, rough)
    _curves[(1,)](*arguments)
    return value, again, slope


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("name", FORWARD)
def test_value_and_slope(name, rough):
    reach = 3.0 if name == "gelu_taylor" else 60.0  # its sixth power grows beyond any absolute bound
    x = torch.cat([torch.linspace(-reach, reach, 8191), torch.zeros(1)])
    value, again, slope = curves(x, name, rough)
    for_value, for_slope = OFF.get((rough, name), (4e-6, 4e-6))
    wanted = FORWARD[name](x.double())
    size = 1.0 + wanted.abs()
    assert ((value - wanted).abs() / size).max() < for_value
    assert ((again - wanted).abs() / size).max() < for_value
    wanted = BACKWARD[name](torch.ones_like(x).double(), x.double())
    assert ((slope - wanted).abs() / (1.0 + wanted.abs())).max() < for_slope
    assert value[-1] == again[-1] == 0.0  # tails are filled with zeros and must add nothing


@pytest.mark.parametrize(("name", "rough", "lowest", "share"), [
    ("silu", True, -15.0, 1e-5),
    ("gelu_tanh", True, -4.0, 1e-4),
    ("gelu", True, -4.0, 5e-3),
])  # fmt: skip
def test_the_negative_tail_keeps_its_digits(name, rough, lowest, share):
    """A query whose scores are all negative is made of it alone. bf16 rounds to 0.4 %."""
    x = torch.linspace(lowest, -1.0, 4096)
    value, again, _ = curves(x, name, rough)
    wanted = FORWARD[name](x.double())
    assert ((value - wanted) / wanted).abs().max() < share
    assert ((again - wanted) / wanted).abs().max() < share


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "identity"])
def test_far_from_zero(name, rough):
    x = torch.tensor([1e4, -1e4, 1e18, -1e18, 3e38, -3e38, float("inf"), 0.0])
    value, again, _ = curves(x, name, rough)
    wanted = x if name == "identity" else x.clamp(min=0.0)
    assert value.tolist() == again.tolist() == wanted.tolist()


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("name", FORWARD)
def test_nan_stays(name, rough):
    value, again, _ = curves(torch.tensor([float("nan"), 1.0]), name, rough)
    assert value.isnan().tolist() == again.isnan().tolist() == [True, False]
