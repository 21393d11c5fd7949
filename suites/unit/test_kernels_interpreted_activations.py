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

SCALE = 0.37
# What the formulas allow of rounding to fp32; "rough" adds how far its formula for erf is off (_E0 … _E2).
OFF = {(False, "gelu"): (4e-6, 4e-6), (True, "gelu"): (2.8e-5, 1.1e-4)}


@triton.jit
def _curves(score_ptr, value_ptr, again_ptr, slope_ptr, scale, BLOCK: tl.constexpr, NAME: tl.constexpr,
            ROUGH: tl.constexpr):  # fmt: skip
    at = tl.arange(0, BLOCK)
    score = tl.load(score_ptr + at)
    again, slope = activate_with_slope(score, scale, NAME, ROUGH)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(value_ptr + at, activate(score, scale, NAME, ROUGH))
    tl.store(again_ptr + at, again)
    tl.store(slope_ptr + at, slope)


def curves(score: torch.Tensor, name: str, rough: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    value, again, slope = (torch.empty_like(score) for _ in range(3))
    arguments: tuple[Any, ...] = (score, value, again, slope, SCALE, score.numel(), name, rough)
    _curves[(1,)](*arguments)
    return value, again, slope


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("name", FORWARD)
def test_value_and_slope(name, rough):
    reach = 3.0 if name == "gelu_taylor" else 60.0  # its sixth power grows beyond any absolute bound
    x = torch.cat([torch.linspace(-reach, reach, 8191), torch.zeros(1)])
    score = x / SCALE
    x = score.double() * torch.tensor(SCALE, dtype=torch.float32).double()
    value, again, slope = curves(score, name, rough)
    for_value, for_slope = OFF.get((rough, name), (4e-6, 4e-6))
    wanted = FORWARD[name](x)
    size = 1.0 + wanted.abs()
    assert ((value - wanted).abs() / size).max() < for_value
    assert ((again - wanted).abs() / size).max() < for_value
    wanted = BACKWARD[name](torch.ones_like(x), x)
    assert ((slope - wanted).abs() / (1.0 + wanted.abs())).max() < for_slope
    assert value[-1] == again[-1] == 0.0  # tails are filled with zeros and must add nothing


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("name", FORWARD)
def test_nan_stays(name, rough):
    value, again, _ = curves(torch.tensor([float("nan"), 1.0]), name, rough)
    assert value.isnan().tolist() == again.isnan().tolist() == [True, False]
