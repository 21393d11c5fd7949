"""GDPA's activations in registers: value, and value with slope. All have act(0) = 0, so zero-filled tails need no mask.

gelu_taylor is GELU's 6th-order Taylor polynomial around 0: multiplications and additions alone, valid in the range that
QK-norm guarantees.
"""

import math

import triton
import triton.language as tl

_INV_SQRT_2PI = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
_C1 = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
_C2 = tl.constexpr(-1.0 / (6.0 * math.sqrt(2.0 * math.pi)))
_C3 = tl.constexpr(1.0 / (40.0 * math.sqrt(2.0 * math.pi)))
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_SQRT_2_OVER_PI = tl.constexpr(math.sqrt(2.0 / math.pi))
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _tanh(x):
    # tanh.approx (one instruction) has an error of 2**-11, more than bf16 forgives after a sum; this is good to 2**-22.
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _positive(x):
    # A GPU's plain maximum takes the number where the other is NaN: what is wrong must stay seen.
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """act(x), fp32."""
    if ACTIVATION == "identity":
        return x
    elif ACTIVATION == "relu":
        return _positive(x)
    elif ACTIVATION == "relu_squared":
        positive = _positive(x)
        return positive * positive
    elif ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)))
    else:
        tl.static_assert(ACTIVATION == "gelu_taylor")
        x2 = x * x
        return 0.5 * x + x2 * (_C1 + x2 * (_C2 + x2 * _C3))


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr):
    """(act(x), act'(x)), fp32, sharing what they have in common."""
    if ACTIVATION == "identity":
        return x, x * 0.0 + 1.0
    elif ACTIVATION == "relu":
        return _positive(x), tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        positive = _positive(x)
        return positive * positive, 2.0 * positive
    elif ACTIVATION == "silu":
        s = tl.sigmoid(x)
        value = x * s
        return value, s + value * (1.0 - s)
    elif ACTIVATION == "gelu":
        phi = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
        return x * phi, phi + x * _INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        x2 = x * x
        t = _tanh(_SQRT_2_OVER_PI * x * (1.0 + _CUBIC * x2))
        half = 0.5 * (1.0 + t)
        return x * half, half + 0.5 * x * (1.0 - t * t) * _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * x2)
    else:
        tl.static_assert(ACTIVATION == "gelu_taylor")
        x2 = x * x
        value = 0.5 * x + x2 * (_C1 + x2 * (_C2 + x2 * _C3))
        return value, 0.5 + x * (2.0 * _C1 + x2 * (4.0 * _C2 + x2 * (6.0 * _C3)))
