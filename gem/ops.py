"""The public ops: jagged softmax attention, generalized dot-product attention, block attention.

Jagged convention (FlashAttention's and nested tensors'): values [total, heads, head_dim], offsets int32/int64
[batch + 1] from 0, non-decreasing; rows behind offsets[-1] read as absent (output 0, gradient 0). Nested tensors in the
jagged layout [batch, jagged, heads, head_dim] are taken as they are, without offsets, and give nested tensors back.

Bad arguments raise ValueError naming the argument, what it was and what is accepted. Shapes, types and names are always
checked; what reads device memory (offsets out of order or range, a sample longer than the given maximum) always on the
CPU, on a GPU with ``check=True``, or ``GEM_CHECK=1`` when Python starts.

Legend: T rows of all samples (TQ, TK), B samples, H heads, D head_dim, N shared queries.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from gem import library, reference
from gem.arguments import Inputs, block_size, flag, flat_bias, flatten, length, number, rope_tables, window_sides
from gem.bias import Bias
from gem.dispatch import Call, Choice, choose, log
from gem.jagged import to_nested
from gem.with_gluon import readable

ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_taylor", "silu", "relu", "relu_squared", "identity")


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None = None,
    k_offsets: Tensor | None = None,
    *,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    bias: Bias | None = None,
    scale: float | None = None,
    impl: str = "auto",
    check: bool = False,
) -> Tensor:
    """Softmax attention inside each sample of a jagged batch (Jagged Flash Attention).

    Shapes: q [TQ, H, D], k and v [TK, H, D], offsets [B + 1] (``k_offsets`` None = ``q_offsets``); returns [TQ, H, D].
    ``causal`` and ``window`` = (left, right) tokens around a query (-1 = unlimited) are aligned bottom-right as in
    FlashAttention >= 2.1; a query that sees no key gives 0. ``scale`` defaults to D ** -0.5. ``bias``: a tensor
    broadcastable to [B, H, max_q_len, max_k_len], a ``gem.PositionBias`` or a ``gem.TimeBias``; gradients flow to it.
    ``max_q_len`` / ``max_k_len`` promise a longest sample; a longer one is an error, never cut.

    Raises ValueError for bad arguments. The oracle is ``gem.reference.jagged_attention``.
    """
    choice, args, x = _prepare_jagged_attention(
        q, k, v, q_offsets, k_offsets, max_q_len=max_q_len, max_k_len=max_k_len, causal=causal, window=window,
        bias=bias, scale=scale, impl=impl, check=check,
    )  # fmt: skip
    if choice.impl == "reference":
        assert x.q_offsets is not None
        library.check_lengths("jagged_attention", x.q, x.k, x.q_offsets, x.k_offsets, *args[5:7])
        out = reference.jagged_attention(
            x.q, x.k, x.v, x.q_offsets, x.k_offsets, causal=causal, window=window, bias=bias, scale=scale
        )
        return _finish(out.to(x.q.dtype), x)
    run = library.eager_jagged_attention if library.plain_call(q, k, v) else library.jagged_attention
    return _finish(run(*args, choice.impl, check)[0], x)


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None = None,
    k_offsets: Tensor | None = None,
    *,
    max_q_len: int | None = None,
    max_k_len: int | None = None,
    activation: str = "gelu",
    qk_scale: float = 1.0,
    out_scale: float = 1.0,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    broadcast_q: bool = False,
    impl: str = "auto",
    check: bool = False,
) -> Tensor:
    """Generalized dot-product attention: out_scale * act(qk_scale * q k^T) v inside each sample.

    Shapes as in ``jagged_attention``. ``activation``: gelu (erf), gelu_tanh, gelu_taylor (6th order), silu, relu,
    relu_squared, identity; in bf16 the gelu of triton and gluon is a fitted one (8.4e-5 off). With ``broadcast_q`` q is
    [N, H, D], shared by all samples (PMA); give the keys' offsets alone (either argument); returns [B * N, H, D].

    Raises ValueError for bad arguments. The oracle is ``gem.reference.gdpa``.
    """
    choice, args, x = _prepare_gdpa(
        q, k, v, q_offsets, k_offsets, max_q_len=max_q_len, max_k_len=max_k_len, activation=activation,
        qk_scale=qk_scale, out_scale=out_scale, causal=causal, window=window, broadcast_q=broadcast_q, impl=impl,
        check=check,
    )  # fmt: skip
    if choice.impl == "reference":
        library.check_lengths("gdpa", x.q, x.k, x.q_offsets, x.k_offsets, max_q_len, max_k_len)
        out = reference.gdpa(
            x.q, x.k, x.v, x.q_offsets, x.k_offsets, activation=activation, qk_scale=qk_scale, out_scale=out_scale,
            causal=causal, window=window, broadcast_q=broadcast_q,
        )  # fmt: skip
        return _finish(out.to(x.q.dtype), x)
    run = library.eager_gdpa if library.plain_call(q, k, v) else library.gdpa
    return _finish(run(*args, choice.impl, check), x)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None = None,
    *,
    block: int = 64,
    rope: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    max_len: int | None = None,
    impl: str = "auto",
    check: bool = False,
) -> Tensor:
    """Softmax attention inside each block of ``block`` tokens, counted from each sample's start.

    Shapes: q, k, v [T, H, D], offsets [B + 1]; returns [T, H, D]. ``rope`` = (cos, sin), each [>= longest sample,
    D // 2], rotates q and k by their position in the sample, pairing x[..., :D/2] with x[..., D/2:] (GPT-NeoX / Llama
    form); the tables get no gradient. ``scale`` defaults to D ** -0.5. ``max_len`` promises a longest sample.

    Raises ValueError for bad arguments. The oracle is ``gem.reference.block_attention``.
    """
    choice, args, x = _prepare_block_attention(
        q, k, v, offsets, block=block, rope=rope, scale=scale, max_len=max_len, impl=impl, check=check
    )
    if choice.impl == "reference":
        library.check_blocks(x.q, x.k_offsets, None if rope is None else rope[0], max_len)
        out = reference.block_attention(x.q, x.k, x.v, x.k_offsets, block=block, rope=rope, scale=scale)
        return _finish(out.to(x.q.dtype), x)
    run = library.eager_block_attention if library.plain_call(q, k, v) else library.block_attention
    return _finish(run(*args, choice.impl, check), x)


# -- from the public arguments to the flat ones of gem.library ---------------------------------------------------------

_Prepared = tuple[Choice, tuple[Any, ...], Inputs]


def _prepare_jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None = None, k_offsets: Tensor | None = None, *,
    max_q_len: int | None = None, max_k_len: int | None = None, causal: bool = False,
    window: tuple[int, int] = (-1, -1), bias: Bias | None = None, scale: float | None = None, impl: str = "auto",
    check: bool = False,
) -> _Prepared:  # fmt: skip
    op = "jagged_attention"
    x = flatten(op, q, k, v, q_offsets, k_offsets)
    left, right = window_sides(op, window)
    flag(op, "causal", causal)
    flag(op, "check", check)
    scale = x.q.shape[2] ** -0.5 if scale is None else number(op, "scale", scale)
    max_q_len, max_k_len = length(op, "max_q_len", max_q_len), length(op, "max_k_len", max_k_len)
    max_q_len, max_k_len, bias_tensors = flat_bias(op, x, bias, max_q_len, max_k_len)
    args = (
        x.q, x.k, x.v, x.q_offsets, x.k_offsets, max_q_len, max_k_len, causal, left, right, scale, *bias_tensors
    )  # fmt: skip
    return _choose(op, x, impl, causal or left >= 0 or right >= 0, bias is not None), args, x


def _prepare_gdpa(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None = None, k_offsets: Tensor | None = None, *,
    max_q_len: int | None = None, max_k_len: int | None = None, activation: str = "gelu", qk_scale: float = 1.0,
    out_scale: float = 1.0, causal: bool = False, window: tuple[int, int] = (-1, -1), broadcast_q: bool = False,
    impl: str = "auto", check: bool = False,
) -> _Prepared:  # fmt: skip
    op = "gdpa"
    flag(op, "broadcast_q", broadcast_q)
    x = flatten(op, q, k, v, q_offsets, k_offsets, broadcast_q=broadcast_q)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation={activation!r}; accepted are {', '.join(ACTIVATIONS)}")
    left, right = window_sides(op, window)
    flag(op, "causal", causal)
    flag(op, "check", check)
    args = (
        x.q, x.k, x.v, x.q_offsets, x.k_offsets, length(op, "max_q_len", max_q_len),
        length(op, "max_k_len", max_k_len), activation, number(op, "qk_scale", qk_scale),
        number(op, "out_scale", out_scale), causal, left, right,
    )  # fmt: skip
    return _choose(op, x, impl, masked=causal or left >= 0 or right >= 0), args, x


def _prepare_block_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None = None, *, block: int = 64,
    rope: tuple[Tensor, Tensor] | None = None, scale: float | None = None, max_len: int | None = None,
    impl: str = "auto", check: bool = False,
) -> _Prepared:  # fmt: skip
    op = "block_attention"
    x = flatten(op, q, k, v, offsets, None, name="offsets")
    if x.q.shape[0] != x.k.shape[0]:
        raise ValueError(f"{op}: q and k must have one number of rows, got {x.q.shape[0]} and {x.k.shape[0]}")
    block_size(op, block)
    flag(op, "check", check)
    scale = x.q.shape[2] ** -0.5 if scale is None else number(op, "scale", scale)
    cos, sin = (None, None) if rope is None else rope_tables(op, rope, x.q)
    args = (x.q, x.k, x.v, x.k_offsets, block, cos, sin, scale, length(op, "max_len", max_len))
    return _choose(op, x, impl), args, x


def _choose(op: str, x: Inputs, impl: str, masked: bool = False, biased: bool = False) -> Choice:
    _, heads, head_dim = x.q.shape
    # Strides are asked for where an implementation looks at them: not a microsecond of each call of the other ops.
    looked_at = op == "gdpa" or impl == "gluon"
    fits = not looked_at or readable(x.q, x.k, x.v)
    call = Call(op, x.q.device.type, x.q.dtype, heads, head_dim, masked, biased, fits)
    if torch.compiler.is_compiling():
        return choose(call, impl)
    # On a CPU the choice follows TRITON_INTERPRET, which may change.
    choice = choose(call, impl) if call.device == "cpu" else _chosen(call, impl)
    log.debug("%s", choice)
    return choice


_chosen = functools.lru_cache(1024)(choose)


def _finish(out: Tensor, x: Inputs) -> Tensor:
    return out if x.nested is None else to_nested(out, x.nested)
