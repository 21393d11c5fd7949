"""torch.library registration of the ops (namespace ``gem``): kernels, fake kernels and autograd.

Everything that depends on values (the lengths) happens inside these opaque ops, so that
``torch.compile(fullgraph=True)`` neither breaks its graph nor recompiles for another batch of lengths. Flat arguments:
``gem.ops`` is the public face.

A plain eager call does not go through the dispatcher: registered Python ops cost 80 us of host time under autograd (2
cores of an EPYC, torch 2.13) and an autograd.Function a fifth of it. Both run the same functions.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from gem.implementations import TABLE
from gem.jagged import check_offset_values
from gem.portable.biases import NO_BIAS, BiasInputs

_ALWAYS_CHECK = os.environ.get("GEM_CHECK") == "1"


def _checks(check: bool, x: Tensor, impl: str) -> bool:
    """Whether offsets are read: always on the CPU and where the implementation reads them on the host anyway."""
    return check or impl == "torch" or x.device.type == "cpu" or _ALWAYS_CHECK


def check_lengths(
    op: str, q: Tensor, k: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q_len: int | None,
    max_k_len: int | None,
) -> None:  # fmt: skip
    """Values of both offsets; ``q_offsets`` None = shared queries. ValueError; reads memory."""
    if q_offsets is not None:
        check_offset_values(op, "q_offsets", q_offsets, q.shape[0], max_q_len, "max_q_len")
    elif max_q_len is not None and q.shape[0] > max_q_len:
        raise ValueError(f"{op}: there are {q.shape[0]} shared queries, more than max_q_len = {max_q_len}")
    check_offset_values(op, "k_offsets", k_offsets, k.shape[0], max_k_len, "max_k_len")


def check_blocks(q: Tensor, offsets: Tensor, cos: Tensor | None, max_len: int | None) -> None:
    """Values of block_attention's offsets, against the rows of the rotary table too. ValueError; reads memory."""
    check_offset_values("block_attention", "offsets", offsets, q.shape[0], max_len, "max_len")
    if cos is not None:
        check_offset_values("block_attention", "offsets", offsets, q.shape[0], cos.shape[0], "the rows of rope")


def _same(x: Tensor, rows: int | None = None) -> Tensor:
    """A dense tensor of x's shape (or with other rows): what every implementation returns."""
    return torch.empty((x.shape[0] if rows is None else rows, *x.shape[1:]), dtype=x.dtype, device=x.device)


def plain_call(*tensors: Tensor | None) -> bool:
    """Whether nobody watches the dispatcher: no tracing, no mode, no transform, no tensor subclass."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
        and all(map(_plain, tensors))
    )


def _plain(x: Tensor | None) -> bool:
    return type(x) is Tensor or type(x) is Parameter or x is None


def _eager(name: str, forward: Callable, setup: Callable, gradient: Callable) -> Callable:
    """A call with gradients of flat arguments, as torch.autograd.Function makes one.

    Not by the new-style ``setup_context``, whose binding costs 30 us, nor by Function.apply, whose look for functorch's
    wrappers costs 6: ``plain_call`` has looked.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.set_materialize_grads(False)  # or the log-sum-exp gets a gradient of zeros every backward
            ctx.count = len(inputs)
            output = _own(forward(*inputs))
            setup(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *d_outputs):
            if d_outputs[0] is None:
                return (None,) * ctx.count
            saved = ctx.saved_tensors  # once: a checkpoint unpacks each tensor a single time
            with torch.no_grad():
                grads = gradient(ctx, saved, *d_outputs)
            return _once(grads, (*saved, *d_outputs)) if torch.is_grad_enabled() else grads

    Eager.__name__ = Eager.__qualname__ = name

    apply: Callable = super(torch.autograd.Function, Eager).apply  # pyright: ignore[reportAttributeAccessIssue]

    def call(*inputs):
        return apply(*inputs) if torch.is_grad_enabled() else forward(*inputs)

    return call


def _own(output):
    """Outputs that autograd takes for tensors of their own: it refuses in-place operations on a view from an op."""
    if isinstance(output, tuple):
        return tuple(map(_own, output))
    return output.data if output._is_view() else output


class _Once(torch.autograd.Function):
    """Its first ``count`` tensors, unchanged; it stands before all of ``tensors`` and cannot be gone through."""

    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor):
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("gem: the gradient of an op cannot be differentiated twice")


def _once(grads: tuple, origins: tuple) -> tuple:
    """Gradients made for create_graph=True, which raise when differentiated again, through ``origins`` above all.

    (once_differentiable lets them pass as constants where the output's gradient does not require one of its own.)
    """
    given = [x for x in grads if x is not None]
    rest = iter(_Once.apply(len(given), *given, *[x for x in origins if x is not None and x.requires_grad]))
    return tuple(None if x is None else next(rest) for x in grads)


# -- jagged_attention --------------------------------------------------------------------------------------------------


def _jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q_len: int | None, max_k_len: int | None,
    causal: bool, window_left: int, window_right: int, scale: float, dense: Tensor | None,
    position_table: Tensor | None, position_boundaries: Tensor | None, time_table: Tensor | None,
    time_boundaries: Tensor | None, q_times: Tensor | None, k_times: Tensor | None, impl: str, check: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention, see ``gem.jagged_attention``; and the log-sum-exp if the backward of ``impl`` reads it."""
    if _checks(check, q, impl):
        check_lengths("jagged_attention", q, k, q_offsets, k_offsets, max_q_len, max_k_len)
    bias = NO_BIAS
    if dense is not None or position_table is not None or time_table is not None:
        bias = BiasInputs(dense, position_table, position_boundaries, time_table, time_boundaries, q_times, k_times)
    return TABLE["jagged_attention"][impl].forward(
        q, k, v, q_offsets, k_offsets, causal=causal, window=(window_left, window_right), scale=scale, bias=bias
    )  # fmt: skip


jagged_attention = torch.library.custom_op("gem::jagged_attention", _jagged_attention, mutates_args=())


@jagged_attention.register_fake
def _(q, *args) -> tuple[Tensor, Tensor]:
    impl = args[-2]
    shape = (q.shape[1], q.shape[0]) if TABLE["jagged_attention"][impl].saves_lse else (0,)
    return _same(q), torch.empty(shape, dtype=torch.float32, device=q.device)


def _jagged_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, q_offsets: Tensor,
    k_offsets: Tensor, causal: bool, window_left: int, window_right: int, scale: float, dense: Tensor | None,
    position_table: Tensor | None, position_boundaries: Tensor | None, time_table: Tensor | None,
    time_boundaries: Tensor | None, q_times: Tensor | None, k_times: Tensor | None, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and the gradients of the three kinds of bias; an absent bias has an empty one."""
    bias = BiasInputs(dense, position_table, position_boundaries, time_table, time_boundaries, q_times, k_times)
    dq, dk, dv = TABLE["jagged_attention"][impl].backward(
        d_out, q, k, v, out, lse, q_offsets, k_offsets, causal=causal, window=(window_left, window_right), scale=scale,
        bias=bias,
    )  # fmt: skip
    biases = [bias.grad(name) for name in ("dense", "position_table", "time_table")]
    d_dense, d_position, d_time = (q.new_empty(0) if g is None else g for g in biases)
    return dq, dk, dv, d_dense, d_position, d_time


jagged_attention_backward = torch.library.custom_op(
    "gem::jagged_attention_backward", _jagged_attention_backward, mutates_args=()
)


@jagged_attention_backward.register_fake
def _(d_out, q, k, v, out, lse, q_offsets, k_offsets, causal, left, right, scale, dense, position_table,
      position_boundaries, time_table, *args):  # fmt: skip
    absent = [q.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
              for x in (dense, position_table, time_table)]  # fmt: skip
    return _same(q), _same(k), _same(v), *absent


def _jagged_setup(ctx, inputs, output) -> None:
    (q, k, v, q_offsets, k_offsets, _, _, ctx.causal, ctx.left, ctx.right, ctx.scale, dense, position_table,
     position_boundaries, time_table, time_boundaries, q_times, k_times, ctx.impl, _) = inputs  # fmt: skip
    out, lse = output
    ctx.mark_non_differentiable(lse)
    if not TABLE["jagged_attention"][ctx.impl].saves_lse:
        out = lse = None  # the backward computes its softmax anew: the output need not outlive its use
    ctx.save_for_backward(
        q, k, v, out, lse, q_offsets, k_offsets, dense, position_table, position_boundaries, time_table,
        time_boundaries, q_times, k_times,
    )  # fmt: skip


def _jagged_grad(ctx, d_out, _):
    q, k, v, out, lse, q_offsets, k_offsets, *bias = ctx.saved_tensors
    dq, dk, dv, d_dense, d_position, d_time = jagged_attention_backward(
        d_out, q, k, v, out, lse, q_offsets, k_offsets, ctx.causal, ctx.left, ctx.right, ctx.scale, *bias, ctx.impl
    )
    d_dense = None if bias[0] is None else d_dense
    d_position = None if bias[1] is None else d_position
    d_time = None if bias[3] is None else d_time
    return (dq, dk, dv, *[None] * 8, d_dense, d_position, None, d_time, *[None] * 5)


def _jagged_gradients(ctx, saved, d_out, _=None):
    """Like ``_jagged_grad``, past the dispatcher and without placeholders for what is absent."""
    q, k, v, out, lse, q_offsets, k_offsets, *given = saved
    bias = NO_BIAS if all(x is None for x in given) else BiasInputs(*given)
    dq, dk, dv = TABLE["jagged_attention"][ctx.impl].backward(
        d_out, q, k, v, out, lse, q_offsets, k_offsets, causal=ctx.causal, window=(ctx.left, ctx.right),
        scale=ctx.scale, bias=bias,
    )  # fmt: skip
    d_dense, d_position, d_time = bias.grad("dense"), bias.grad("position_table"), bias.grad("time_table")
    return (dq, dk, dv, *[None] * 8, d_dense, d_position, None, d_time, *[None] * 5)


jagged_attention.register_autograd(_jagged_grad, setup_context=_jagged_setup)
eager_jagged_attention = _eager("JaggedAttention", _jagged_attention, _jagged_setup, _jagged_gradients)


# -- gdpa --------------------------------------------------------------------------------------------------------------


def _gdpa(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q_len: int | None,
    max_k_len: int | None, activation: str, qk_scale: float, out_scale: float, causal: bool, window_left: int,
    window_right: int, impl: str, check: bool,
) -> Tensor:  # fmt: skip
    """act(q k^T) v; ``q_offsets`` None = queries shared by all samples. See ``gem.gdpa``."""
    if _checks(check, q, impl):
        check_lengths("gdpa", q, k, q_offsets, k_offsets, max_q_len, max_k_len)
    return TABLE["gdpa"][impl].forward(
        q, k, v, q_offsets, k_offsets, activation=activation, qk_scale=qk_scale, out_scale=out_scale, causal=causal,
        window=(window_left, window_right),
    )  # fmt: skip


gdpa = torch.library.custom_op("gem::gdpa", _gdpa, mutates_args=())


@gdpa.register_fake
def _(q, k, v, q_offsets, k_offsets, *args) -> Tensor:
    return _same(q, (k_offsets.shape[0] - 1) * q.shape[0] if q_offsets is None else None)


def _gdpa_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, activation: str,
    qk_scale: float, out_scale: float, causal: bool, window_left: int, window_right: int, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of ``gem::gdpa``."""
    return TABLE["gdpa"][impl].backward(
        d_out, q, k, v, q_offsets, k_offsets, activation=activation, qk_scale=qk_scale, out_scale=out_scale,
        causal=causal, window=(window_left, window_right),
    )  # fmt: skip


gdpa_backward = torch.library.custom_op("gem::gdpa_backward", _gdpa_backward, mutates_args=())


@gdpa_backward.register_fake
def _(d_out, q, k, v, *args):
    return _same(q), _same(k), _same(v)


def _gdpa_setup(ctx, inputs, output) -> None:
    (q, k, v, q_offsets, k_offsets, _, _, ctx.activation, ctx.qk_scale, ctx.out_scale, ctx.causal, ctx.left,
     ctx.right, ctx.impl, _) = inputs  # fmt: skip
    ctx.save_for_backward(q, k, v, q_offsets, k_offsets)


def _gdpa_grad(ctx, d_out):
    return _gdpa_gradients(ctx, ctx.saved_tensors, d_out, backward=gdpa_backward)


def _gdpa_gradients(ctx, saved, d_out, *, backward: Callable = _gdpa_backward):
    grads = backward(
        d_out, *saved, ctx.activation, ctx.qk_scale, ctx.out_scale, ctx.causal, ctx.left, ctx.right,
        ctx.impl,
    )  # fmt: skip
    return (*grads, *[None] * 12)


gdpa.register_autograd(_gdpa_grad, setup_context=_gdpa_setup)
eager_gdpa = _eager("Gdpa", _gdpa, _gdpa_setup, _gdpa_gradients)


# -- block_attention ---------------------------------------------------------------------------------------------------


def _block_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block: int, cos: Tensor | None, sin: Tensor | None, scale: float,
    max_len: int | None, impl: str, check: bool,
) -> Tensor:  # fmt: skip
    """Softmax inside blocks, q and k rotated when cos and sin are given. See ``gem.block_attention``."""
    if _checks(check, q, impl):
        check_blocks(q, offsets, cos, max_len)
    return TABLE["block_attention"][impl].forward(q, k, v, offsets, block, _rope(cos, sin), scale)


block_attention = torch.library.custom_op("gem::block_attention", _block_attention, mutates_args=())


@block_attention.register_fake
def _(q, *args) -> Tensor:
    return _same(q)


def _block_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block: int, cos: Tensor | None,
    sin: Tensor | None, scale: float, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of ``gem::block_attention``."""
    return TABLE["block_attention"][impl].backward(d_out, q, k, v, offsets, block, _rope(cos, sin), scale)


block_attention_backward = torch.library.custom_op(
    "gem::block_attention_backward", _block_attention_backward, mutates_args=()
)


@block_attention_backward.register_fake
def _(d_out, q, k, v, *args):
    return _same(q), _same(k), _same(v)


def _rope(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if cos is None or sin is None else (cos, sin)


def _block_setup(ctx, inputs, output) -> None:
    q, k, v, offsets, ctx.block, cos, sin, ctx.scale, _, ctx.impl, _ = inputs
    ctx.save_for_backward(q, k, v, offsets, cos, sin)


def _block_grad(ctx, d_out):
    return _block_gradients(ctx, ctx.saved_tensors, d_out, backward=block_attention_backward)


def _block_gradients(ctx, saved, d_out, *, backward: Callable = _block_attention_backward):
    q, k, v, offsets, cos, sin = saved
    grads = backward(d_out, q, k, v, offsets, ctx.block, cos, sin, ctx.scale, ctx.impl)
    return (*grads, *[None] * 8)


block_attention.register_autograd(_block_grad, setup_context=_block_setup)
eager_block_attention = _eager("BlockAttention", _block_attention, _block_setup, _block_gradients)
