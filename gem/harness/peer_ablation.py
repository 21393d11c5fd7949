"""Peers of an ablation: gem's own Gluon forward with one thing changed, so that what this thing gains is measured.

The unchanged kernels are no peer: they are the subject itself with ``impl="gluon"``, given the same inputs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gem import with_gluon
from gem.dispatch import Call, refusal
from gem.harness import peers
from gem.harness.params import GdpaParams
from gem.harness.subjects import Inputs
from gem.harness.worker import Unsupported
from gem.with_triton import on_device_of

if TYPE_CHECKING:
    from gem.kernels.hopper.choose import Variant


class Changed:
    """The forward of ``impl="gluon"`` by its launcher, past the public op's checks (microseconds of the host)."""

    repeatable = True

    def __init__(self, inputs: Inputs, name: str) -> None:
        params = inputs.params
        if not isinstance(params, GdpaParams):
            raise Unsupported(f"{name} computes gdpa, not {inputs.subject}")
        readable = with_gluon.readable(inputs.q, inputs.k, inputs.v)
        call = Call(
            "gdpa", inputs.device, inputs.dtype, params.heads, params.head_dim, params.masked, readable=readable
        )
        if reason := refusal(call, "gluon"):
            raise Unsupported(f"{name} is impl='gluon' with one thing changed: {reason}")
        from gem.kernels.hopper import ops

        self.inputs, self._ops = inputs, ops
        self.computes = peers.computes(name, inputs.subject)
        self.no_backward = f"{name} is a forward: the backward of impl='gluon' has not the part that it changes"
        self.leaves = inputs.leaves
        self.negated = inputs.v
        self._how: dict[str, Any] = {
            "activation": params.activation if self.computes == "same" else self.computes,
            "qk_scale": params.qk_scale,
            "out_scale": params.out_scale,
            "variant": _CHANGES[name](ops.choose(self._batch(), params.head_dim), params),
        }

    def _batch(self) -> Any:
        inputs = self.inputs
        q_offsets = None if inputs.shared_queries else inputs.q_offsets
        return self._ops.jagged_batch(inputs.q, inputs.k, q_offsets, inputs.k_offsets, -1, -1)

    def forward(self) -> Tensor:
        """The output's rows [T, H, D]."""
        inputs = self.inputs
        with on_device_of(inputs.q):
            return self._ops.gdpa_forward(inputs.q, inputs.k, inputs.v, self._batch(), **self._how)

    def gradient_in(self, d_out: Tensor) -> Tensor:
        """``d_out`` lies as the output does."""
        return d_out

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        """Outputs have the rows of the inputs already."""
        return tensor


def _unsorted(variant: "Variant", params: GdpaParams) -> "Variant":
    return replace(variant, zigzag=False)


def _drained(variant: "Variant", params: GdpaParams) -> "Variant":
    return replace(variant, pipelined=False)


def _tanh(variant: "Variant", params: GdpaParams) -> "Variant":
    if params.activation != "gelu_taylor":
        raise Unsupported(f"gluon_tanh has gelu_tanh in the place of gelu_taylor, and this case {params.activation}")
    return variant


def _plain(variant: "Variant", params: GdpaParams) -> "Variant":
    from gem.kernels.hopper.gdpa_plain import PLAIN

    if variant.kernel != "long" or variant.lanes != 1:
        raise Unsupported("gluon_plain stands beside the kernel for long keys and many queries; this batch has another")
    return PLAIN[params.head_dim]


_CHANGES: dict[str, Callable[["Variant", GdpaParams], "Variant"]] = {
    "gluon_unsorted": _unsorted,
    "gluon_drained": _drained,
    "gluon_tanh": _tanh,
    "gluon_plain": _plain,
}
