"""Weights and their slopes for the Gluon backwards: act(x) and act'(x) d_weights of scores, both over factors.

On Hopper an instruction beside the tensor cores costs nearly the cycle that it takes (docs/measured.md), and a backward
needs both act and act' of every score. So, where ``parts.lean`` allows it, constants are taken out of the polynomials
and multiply the sums once (``value_factor``, ``slope_factor``), as in the forward.

Legend: N keys of a tile, M queries of a tile.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# What stands in a kernel is traced and not called: Gluon's signatures are not those of its values.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem.kernels.activations import (
    ERF_0,
    ERF_1,
    ERF_2,
    ERF_3,
    LN2,
    TANH_0,
    TANH_1,
    TAYLOR_1,
    TAYLOR_2,
    TAYLOR_3,
    activate_with_slope,
)
from gem.kernels.hopper.parts import LOG2E, LOGISTIC4


@gluon.jit
def slopes_of(
    scores, d_weights, scale, out_scale, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    """(act(scale * scores) over value_factor, act'(scale * scores) * d_weights over slope_factor), both fp32.

    FOLD (launch.folds): both times out_scale before they are rounded.
    """
    if LEAN:
        weights, d_scores = _lean_slopes(scores, d_weights, scale, ACT)
    else:
        weights, slope = activate_with_slope(scores * scale, ACT, dtype == gl.bfloat16)
        d_scores = slope * d_weights
        if FOLD:
            weights = weights * out_scale
            d_scores = d_scores * out_scale
    return weights, d_scores


@gluon.jit
def _lean_slopes(scores, d_weights, scale, ACT: gl.constexpr):
    """gelu_taylor: over 0.5 * scale and 0.5; the others, x times a logistic function: over scale and 1."""
    s2 = scores * scores
    u = scale * scale
    if ACT == "gelu_taylor":
        c1 = 2.0 * TAYLOR_1 * scale
        c2 = 2.0 * TAYLOR_2 * scale * u
        c3 = 2.0 * TAYLOR_3 * scale * u * u
        weights = scores + s2 * (c1 + s2 * (c2 + s2 * c3))
        d_scores = d_weights * (1.0 + scores * (2.0 * c1 + s2 * (4.0 * c2 + s2 * (6.0 * c3))))
    else:
        if ACT == "silu":
            z = scores * (-LOG2E * scale)
        elif ACT == "gelu_tanh":
            z = scores * (-TANH_0 * scale + s2 * (-TANH_1 * scale * u))
            rise = LN2 * TANH_0 + s2 * (3.0 * LN2 * TANH_1 * u)
        else:
            gl.static_assert(ACT == "gelu")
            c1 = ERF_1 * u
            c2 = ERF_2 * u * u
            c3 = ERF_3 * u * u * u
            z = scores * (-ERF_0 * scale + s2 * (-c1 * scale + s2 * (-c2 * scale + s2 * (-c3 * scale))))
            rise = LN2 * ERF_0 + s2 * (3.0 * LN2 * c1 + s2 * (5.0 * LN2 * c2 + s2 * (7.0 * LN2 * c3)))
        s = gl.inline_asm_elementwise(LOGISTIC4, "=f,=f,=f,=f,f,f,f,f", [z], gl.float32, True, 4)
        weights = scores * s
        value = scale * weights
        rest = value - value * s
        if ACT != "silu":
            rest = rest * rise
        d_scores = d_weights * (s + rest)
    return weights, d_scores


@gluon.jit
def value_factor(scale, out_scale, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr):
    """What sums of ``slopes_of``'s weights times d_out are multiplied by: dv."""
    factor = 1.0 if FOLD else out_scale
    if LEAN:
        factor = factor * scale
        if ACT == "gelu_taylor":
            factor = factor * 0.5
    return factor


@gluon.jit
def slope_factor(scale, out_scale, ACT: gl.constexpr, FOLD: gl.constexpr, LEAN: gl.constexpr):
    """What sums of ``slopes_of``'s gradients of scores times keys or queries are multiplied by: dq, dk."""
    factor = scale if FOLD else scale * out_scale
    if LEAN and ACT == "gelu_taylor":
        factor = factor * 0.5
    return factor
