"""The activations of GDPA, in plain torch: one definition that the oracle and the portable implementation share.

All satisfy act(0) = 0. That is what lets jagged tails be zero-filled instead of masked.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Taylor series of x * Phi(x) around 0 up to x^6: the ALU-only GELU, valid in the range that QK-norm guarantees.
TAYLOR_C1 = 1.0 / math.sqrt(2.0 * math.pi)
TAYLOR_C2 = -1.0 / (6.0 * math.sqrt(2.0 * math.pi))
TAYLOR_C3 = 1.0 / (40.0 * math.sqrt(2.0 * math.pi))


def gelu_taylor(x: Tensor) -> Tensor:
    """0.5 x + x^2 (c1 + x^2 (c2 + x^2 c3)): GELU's 6th-order Taylor polynomial around 0."""
    x2 = x * x
    return 0.5 * x + x2 * (TAYLOR_C1 + x2 * (TAYLOR_C2 + x2 * TAYLOR_C3))


def gelu_taylor_backward(grad: Tensor, x: Tensor) -> Tensor:
    """grad * d/dx gelu_taylor(x) = grad * (0.5 + x (2 c1 + x^2 (4 c2 + 6 c3 x^2)))."""
    x2 = x * x
    slope = x2.mul(6.0 * TAYLOR_C3).add_(4.0 * TAYLOR_C2).mul_(x2).add_(2.0 * TAYLOR_C1).mul_(x).add_(0.5)
    return slope.mul_(grad)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _relu_squared_backward(grad: Tensor, x: Tensor) -> Tensor:
    return F.relu(x).mul_(2.0).mul_(grad)


_aten = torch.ops.aten

FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_taylor": gelu_taylor,
    "silu": F.silu,
    "relu": F.relu,
    "relu_squared": _relu_squared,
    "identity": lambda x: x,
}

# backward(grad_out, x) -> grad_x, one fused pass over memory where ATen has one.
BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": lambda grad, x: _aten.gelu_backward(grad, x),
    "gelu_tanh": lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    "gelu_taylor": gelu_taylor_backward,
    "silu": lambda grad, x: _aten.silu_backward(grad, x),
    "relu": lambda grad, x: _aten.threshold_backward(grad, x, 0),
    "relu_squared": _relu_squared_backward,
    "identity": lambda grad, x: grad,
}

NAMES = tuple(FORWARD)
