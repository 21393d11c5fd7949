"""The implementations of each op behind one interface: flat arguments in, tensors out, no autograd.

``forward(q, k, v, ...)`` returns the output (jagged_attention: and the log-sum-exp, empty where the backward does not
read it); ``backward(d_out, q, k, v, ...)`` returns (dq, dk, dv) and leaves the gradients of biases in ``bias.grads``.
(impl="reference" is not here: the oracle is differentiated by plain autograd, see ``gem.ops``.)

Legend: T rows of all samples, H heads, D head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gem import with_gluon, with_triton
from gem.efficiency import window_edges
from gem.portable import block, pointwise, softmax
from gem.portable.batch import Spec
from gem.portable.biases import BiasInputs

if TYPE_CHECKING:
    from gem.dispatch import Call

Window = tuple[int, int]
Gradients = tuple[Tensor, Tensor, Tensor]


def _runs_everywhere(call: "Call") -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One implementation of one op; ``refuses(call)`` is None or the reason why it cannot run a call."""

    forward: Callable[..., Any]
    backward: Callable[..., Gradients]
    refuses: Callable[["Call"], str | None] = _runs_everywhere
    not_by_itself: Callable[["Call"], str | None] = _runs_everywhere  # why impl="auto" passes it over
    saves_lse: bool = False  # its backward of jagged_attention reads the output and the log-sum-exp


# -- impl="torch" ----------------------------------------------------------------------------------------------------


class _TorchJagged:
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, causal: bool, window: Window,
        scale: float, bias: BiasInputs,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        spec = Spec.from_offsets(q_offsets, k_offsets, *window_edges(causal, window))
        return softmax.forward(q, k, v, spec, scale, bias), q.new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(
        d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, q_offsets: Tensor,
        k_offsets: Tensor, *, causal: bool, window: Window, scale: float, bias: BiasInputs,
    ) -> Gradients:  # fmt: skip
        spec = Spec.from_offsets(q_offsets, k_offsets, *window_edges(causal, window))
        return softmax.backward(d_out, q, k, v, spec, scale, bias)


class _TorchGdpa:
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, *, activation: str,
        qk_scale: float, out_scale: float, causal: bool, window: Window,
    ) -> Tensor:  # fmt: skip
        return pointwise.forward(
            q, k, v, _shared_or_own(q, q_offsets, k_offsets, causal, window), activation, qk_scale, out_scale
        )

    @staticmethod
    def backward(
        d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, *,
        activation: str, qk_scale: float, out_scale: float, causal: bool, window: Window,
    ) -> Gradients:  # fmt: skip
        return pointwise.backward(
            d_out, q, k, v, _shared_or_own(q, q_offsets, k_offsets, causal, window), activation, qk_scale, out_scale
        )


def _shared_or_own(q: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, causal: bool, window: Window) -> Spec:
    """q_offsets None: the queries are shared by all samples."""
    shared = q.shape[0] if q_offsets is None else None
    return Spec.from_offsets(q_offsets, k_offsets, *window_edges(causal, window), shared_queries=shared)


TABLE: dict[str, dict[str, Implementation]] = {
    "jagged_attention": {
        "torch": Implementation(_TorchJagged.forward, _TorchJagged.backward),
        "triton": Implementation(
            with_triton.jagged_attention, with_triton.jagged_attention_backward, with_triton.refuses,
            with_triton.not_by_itself, saves_lse=True,
        ),
        "gluon": Implementation(
            with_gluon.jagged_attention, with_gluon.jagged_attention_backward, with_gluon.refuses,
            with_gluon.not_by_itself, saves_lse=True,
        ),
    },
    "gdpa": {
        "torch": Implementation(_TorchGdpa.forward, _TorchGdpa.backward),
        "triton": Implementation(
            with_triton.gdpa, with_triton.gdpa_backward, with_triton.refuses, with_triton.not_by_itself
        ),
        "gluon": Implementation(with_gluon.gdpa, with_gluon.gdpa_backward, with_gluon.refuses),
    },
    "block_attention": {
        "torch": Implementation(block.forward, block.backward),
        "triton": Implementation(
            with_triton.block_attention, with_triton.block_attention_backward, with_triton.refuses,
            with_triton.not_by_itself,
        ),
    },
}  # fmt: skip
