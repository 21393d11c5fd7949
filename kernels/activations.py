"""GDPA's activations in registers: value, and value with slope. All have act(0) = 0, so zero-filled tails need no mask.

gelu_taylor is GELU's 6th-order Taylor polynomial around 0: multiplications and additions alone, valid in the range that
QK-norm guarantees.

ROUGH, for bf16, whose weights keep 8 bits: tanh is one instruction of the special-function unit, good to 2**-11, and
sigmoid and erf are made of it. An exponential and a division instead keep that unit as busy as the matrix units are at
a head_dim of 128 (gelu_tanh forward on an H200: 0.56 of the speed of the kernel of facebookresearch/
ads_model_kernel_library, which has this instruction), and erf takes 26 instructions a score.
"""

import math

import triton
import triton.language as tl

from gem.kernels.device import UPCAST

_INV_SQRT_2PI = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
_C1 = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
_C2 = tl.constexpr(-1.0 / (6.0 * math.sqrt(2.0 * math.pi)))
_C3 = tl.constexpr(1.0 / (40.0 * math.sqrt(2.0 * math.pi)))
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
# With h = x / 2, where both factors of gelu have a half: sqrt(2 / pi) (x + 0.044715 x^3) = h (_T0 + _T1 h^2), and
# h (_T0 / 2 + 3 / 2 _T1 h^2) is x / 2 times its slope.
_T0 = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
_T1 = tl.constexpr(8.0 * 0.044715 * math.sqrt(2.0 / math.pi))
# erf(x / sqrt 2) = tanh(h (_E0 + _E1 h^2 + _E2 h^4)): x / 2 times it is off by 2.7e-5 at most, gelu's slope by 1.0e-4
# (least maximum over [-7, 7], checked by a test). Beyond h^2 = 12.5 the bracket stays as it is, for _E2 is negative.
_E0 = tl.constexpr(2.0 * 0.7974990831617561)
_E1 = tl.constexpr(8.0 * 0.03699312116742885)
_E2 = tl.constexpr(32.0 * -0.00034882763598163916)
_E_END = tl.constexpr(12.5)


@triton.jit
def _tanh(x, ROUGH: tl.constexpr):
    if ROUGH and not UPCAST:  # inline assembly is not interpreted
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _positive(x):
    # A GPU's plain maximum takes the number where the other is NaN: what is wrong must stay seen.
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(score, scale, ACTIVATION: tl.constexpr, ROUGH: tl.constexpr):
    """act(scale * score), fp32."""
    if ACTIVATION == "identity":
        return score * scale
    elif ACTIVATION == "relu":
        return _positive(score * scale)
    elif ACTIVATION == "relu_squared":
        positive = _positive(score * scale)
        return positive * positive
    elif ACTIVATION == "silu" and not ROUGH:
        x = score * scale
        return x * tl.sigmoid(x)
    elif ACTIVATION == "silu":
        h = score * (0.5 * scale)
        return h + h * _tanh(h, ROUGH)
    elif ACTIVATION == "gelu" and not ROUGH:
        x = score * scale
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == "gelu":
        h = score * (0.5 * scale)
        h2 = tl.minimum(h * h, _E_END)
        return h + h * _tanh(h * (_E0 + h2 * (_E1 + h2 * _E2)), ROUGH)
    elif ACTIVATION == "gelu_tanh":
        h = score * (0.5 * scale)
        return h + h * _tanh(h * (_T0 + h * h * _T1), ROUGH)
    else:
        tl.static_assert(ACTIVATION == "gelu_taylor")
        x = score * scale
        x2 = x * x
        return x * (0.5 + x * (_C1 + x2 * (_C2 + x2 * _C3)))


@triton.jit
def activate_with_slope(score, scale, ACTIVATION: tl.constexpr, ROUGH: tl.constexpr):
    """(act(x), act'(x)) at x = scale * score, fp32, sharing what they have in common."""
    if ACTIVATION == "identity":
        return score * scale, score * 0.0 + 1.0
    elif ACTIVATION == "relu":
        x = score * scale
        return _positive(x), tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        positive = _positive(score * scale)
        return positive * positive, 2.0 * positive
    elif ACTIVATION == "silu":
        h = score * (0.5 * scale)
        if ROUGH:
            s = 0.5 + 0.5 * _tanh(h, ROUGH)
        else:
            s = tl.sigmoid(2.0 * h)
        value = 2.0 * h * s
        return value, s + value * (1.0 - s)
    elif ACTIVATION == "gelu" and not ROUGH:
        x = score * scale
        phi = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
        return x * phi, phi + x * _INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu":
        h = score * (0.5 * scale)
        h2 = tl.minimum(h * h, _E_END)
        t = _tanh(h * (_E0 + h2 * (_E1 + h2 * _E2)), ROUGH)
        rise = h * (0.5 * _E0 + h2 * (1.5 * _E1 + h2 * (2.5 * _E2)))
        return h + h * t, 0.5 + 0.5 * t + (1.0 - t * t) * rise
    elif ACTIVATION == "gelu_tanh":
        h = score * (0.5 * scale)
        h2 = h * h
        t = _tanh(h * (_T0 + h2 * _T1), ROUGH)
        return h + h * t, 0.5 + 0.5 * t + (1.0 - t * t) * (h * (0.5 * _T0 + h2 * (1.5 * _T1)))
    else:
        tl.static_assert(ACTIVATION == "gelu_taylor")
        x = score * scale
        x2 = x * x
        value = x * (0.5 + x * (_C1 + x2 * (_C2 + x2 * _C3)))
        return value, 0.5 + x * (2.0 * _C1 + x2 * (4.0 * _C2 + x2 * (6.0 * _C3)))
