"""GDPA's activations in registers: value, and value with slope. All have act(0) = 0, so zero-filled tails need no mask.

gelu_taylor is GELU's 6th-order Taylor polynomial around 0: multiplications and additions alone, valid in the range that
QK-norm guarantees.

silu and both other GELUs are x times a logistic function, which keeps its digits in the negative tail; tanh in one
instruction (tanh.approx, good to 2**-11) would not: 1 + tanh(-3) would be off by a tenth.

ROUGH, for bf16, whose weights keep 8 bits: gelu by a fitted logistic function. The exact erf is two long polynomials.
"""

import math

import triton
import triton.language as tl

from gem.kernels.device import LOG2E, UPCAST

_INV_SQRT_2PI = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
TAYLOR_1 = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
TAYLOR_2 = tl.constexpr(-1.0 / (6.0 * math.sqrt(2.0 * math.pi)))
TAYLOR_3 = tl.constexpr(1.0 / (40.0 * math.sqrt(2.0 * math.pi)))
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_LOG2E = tl.constexpr(LOG2E)
LN2 = tl.constexpr(1.0 / LOG2E)
# 0.5 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) is the logistic function of twice that, here in base 2.
TANH_0 = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi) * LOG2E)
TANH_1 = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi) * LOG2E * 0.044715)
# Phi(x) as the logistic function of an odd polynomial, in base 2: least weighted maximum over [-5.5, 5.5]. x Phi(x) is
# off by 8.4e-5 at most, its slope by 3.0e-4, and relatively by 0.5 % down to x = -4. It rises everywhere.
ERF_0 = tl.constexpr(LOG2E * 1.593860524584776)
ERF_1 = tl.constexpr(LOG2E * 0.07519649869060875)
ERF_2 = tl.constexpr(LOG2E * -0.0009231662997714476)
ERF_3 = tl.constexpr(LOG2E * 7.452923868016092e-06)


@triton.jit
def _logistic(z):
    """1 / (1 + 2**-z): two trips through the special-function unit, good to 2**-21."""
    below = 1.0 + tl.exp2(-z)
    if UPCAST:  # inline assembly is not interpreted
        return 1.0 / below
    else:  # a division would see to denormal numbers too, five instructions more
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], tl.float32, True, 1)


@triton.jit
def _positive(x):
    # A GPU's plain maximum takes the number where the other is NaN: what is wrong must stay seen.
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, ROUGH: tl.constexpr):
    """act(x), fp32."""
    x2 = x * x
    if ACTIVATION == "identity":
        return x
    elif ACTIVATION == "relu":
        return _positive(x)
    elif ACTIVATION == "relu_squared":
        positive = _positive(x)
        return positive * positive
    elif ACTIVATION == "silu":
        return x * _logistic(x * _LOG2E)
    elif ACTIVATION == "gelu" and ROUGH:
        return x * _logistic(x * (ERF_0 + x2 * (ERF_1 + x2 * (ERF_2 + x2 * ERF_3))))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        return x * _logistic(x * (TANH_0 + x2 * TANH_1))
    else:
        tl.static_assert(ACTIVATION == "gelu_taylor")
        return x * (0.5 + x * (TAYLOR_1 + x2 * (TAYLOR_2 + x2 * TAYLOR_3)))


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr, ROUGH: tl.constexpr):
    """(act(x), act'(x)), fp32, sharing what they have in common."""
    x2 = x * x
    if ACTIVATION == "identity":
        return x, x * 0.0 + 1.0
    elif ACTIVATION == "relu":
        return _positive(x), tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        positive = _positive(x)
        return positive * positive, 2.0 * positive
    elif ACTIVATION == "silu":
        s = _logistic(x * _LOG2E)
        value = x * s
        return value, s + value * (1.0 - s)
    elif ACTIVATION == "gelu" and ROUGH:
        s = _logistic(x * (ERF_0 + x2 * (ERF_1 + x2 * (ERF_2 + x2 * ERF_3))))
        value = x * s
        rise = LN2 * ERF_0 + x2 * (3.0 * LN2 * ERF_1 + x2 * (5.0 * LN2 * ERF_2 + x2 * (7.0 * LN2 * ERF_3)))
        return value, s + value * (1.0 - s) * rise
    elif ACTIVATION == "gelu":
        phi = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
        return x * phi, phi + x * _INV_SQRT_2PI * tl.exp(-0.5 * x2)
    elif ACTIVATION == "gelu_tanh":
        s = _logistic(x * (TANH_0 + x2 * TANH_1))
        value = x * s
        return value, s + value * (1.0 - s) * (LN2 * TANH_0 + x2 * (3.0 * LN2 * TANH_1))
    else:
        tl.static_assert(ACTIVATION == "gelu_taylor")
        value = x * (0.5 + x * (TAYLOR_1 + x2 * (TAYLOR_2 + x2 * TAYLOR_3)))
        return value, 0.5 + x * (2.0 * TAYLOR_1 + x2 * (4.0 * TAYLOR_2 + x2 * (6.0 * TAYLOR_3)))
