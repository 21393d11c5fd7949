"""Peers from gem's own past: earlier generations of its kernels, kept runnable so that a claim of progress is measured.

The current generation is no peer: it is the subject itself with ``impl="triton"``.
"""

from torch import Tensor

from gem.harness.params import JaggedAttentionParams
from gem.harness.peers import refuse_bias
from gem.harness.subjects import Inputs
from gem.harness.worker import Unsupported


class JfaV1:
    """``gem.kernels.jagged_attention_v1``, the first generation of Jagged Flash Attention.

    It is given the inputs as the subject is, strides and rows behind the last offset included. Its backward adds to dq
    by atomics, so two runs differ in the last bits.
    """

    computes = "same"
    repeatable = False
    no_backward = ""

    def __init__(self, inputs: Inputs, name: str) -> None:
        params, lengths = inputs.params, inputs.lengths
        if not isinstance(params, JaggedAttentionParams):
            raise Unsupported(f"{name} computes jagged_attention, not {inputs.subject}")
        if reason := refuse_bias(inputs, name):
            raise Unsupported(reason)
        try:
            from gem.kernels import device, jagged_attention_v1
        except ImportError as error:
            raise Unsupported(f"{name} needs triton ({error})") from error
        if reason := jagged_attention_v1.refusal(inputs.dtype, params.head_dim, params.heads, lengths.batch):
            raise Unsupported(f"{name} {reason}")
        if inputs.device != "cuda" and not device.INTERPRETED:
            raise Unsupported(f"{name} runs on CUDA only; on a CPU under TRITON_INTERPRET=1, set before the start")
        self._attend = jagged_attention_v1.jagged_attention_v1
        self._how = {
            "max_q_len": lengths.max_q,
            "max_k_len": lengths.max_k,
            "causal": params.causal,
            "window": params.window,
            "scale": params.scale,
        }
        self.inputs = inputs
        self.leaves = inputs.leaves
        self.negated = inputs.v

    def forward(self) -> Tensor:
        """The output's rows [T, H, D]."""
        inputs = self.inputs
        return self._attend(inputs.q, inputs.k, inputs.v, inputs.q_offsets, inputs.k_offsets, **self._how)

    def gradient_in(self, d_out: Tensor) -> Tensor:
        """``d_out`` lies as the output does."""
        return d_out

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        """Outputs and gradients have the rows of the inputs already."""
        return tensor
