"""Peer: the padded batch through cuDNN's attention, which torch offers as one of SDPA's backends. CUDA only.

cuDNN has no boolean masks: padding, causal and window masks reach it as an additive bias in the inputs' dtype. torch
expands that bias to one row a query, with stride 0 where all queries of a sample see the same keys; whether cuDNN reads
such strides differs by its version, so the forms are tried, the one with the least memory traffic first.
"""

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gem.harness.peer_padded import SdpaPadded
from gem.harness.peers import refuse_bias
from gem.harness.subjects import Inputs
from gem.harness.worker import Unsupported

# Hides a key as well as -inf, exp(-65504 + score) is 0, but leaves no row of a tile without a finite maximum: some
# releases of cuDNN give NaN there. It is float16's lowest value, and torch's own choice for them.
HIDDEN = -65504.0
# What cuDNN's errors say where it has no kernel for a case, as against one that failed.
REFUSALS = ("cudnn frontend", "cudnn_frontend", "cudnn_status_not_supported")
MASK_ALIGNMENT = 8  # keys: 16 bytes of float16 or bfloat16, so that each row of a mask starts where a wide load may


class CudnnPadded(SdpaPadded):
    """``SdpaPadded`` by ``SDPBackend.CUDNN_ATTENTION`` and no other backend."""

    backend = SDPBackend.CUDNN_ATTENTION
    devices: tuple[str, ...] = ("cuda",)

    def __init__(self, inputs: Inputs, name: str) -> None:
        if inputs.device not in self.devices:
            raise Unsupported("cuDNN attention runs on CUDA only")
        if inputs.dtype not in (torch.float16, torch.bfloat16):
            raise Unsupported(f"cuDNN attention takes float16 and bfloat16, not {inputs.params.dtype}")
        # A dense bias asks for its gradient, which torch's cuDNN backend does not give.
        if reason := refuse_bias(inputs, "cuDNN attention"):
            raise Unsupported(reason)
        super().__init__(inputs, name)
        if self._mask is not None:
            self._mask.clamp_(min=HIDDEN)
        self._choose_mask()

    def key_room(self, longest: int) -> int:
        seg = self.segments
        unmasked = self.causal_alone() or (not seg.masked and bool((seg.k == longest).all()))
        if unmasked or seg.cos is not None:  # no mask to align; rotated keys lie as their queries do
            return longest
        return -(-longest // MASK_ALIGNMENT) * MASK_ALIGNMENT

    def forward(self) -> Tensor:
        with sdpa_kernel(self.backend):
            return super().forward()

    def _choose_mask(self) -> None:
        """The first form that cuDNN takes, forward and backward; Unsupported with its words when it takes none."""
        refusal = ""
        for mask in _forms(self._mask, self.q_len):
            self._mask = mask
            refusal = self._refusal()
            if not refusal:
                return
        raise Unsupported(f"cuDNN attention refuses this case: {refusal}")

    def _refusal(self) -> str:
        """Why cuDNN does not run this forward and backward, "" when it does. Other failures are raised."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                out = self.forward()
                torch.autograd.grad(out, list(self.leaves.values()), torch.ones_like(out))
            except RuntimeError as error:
                text = str(error)
                if "No available kernel" in text:
                    return _reasons([str(warning.message) for warning in said]) or text
                if not any(sign in text.lower() for sign in REFUSALS):
                    raise
                return text
        return ""


def _forms(mask: Tensor | None, q_len: int) -> Iterator[Tensor | None]:
    """The mask as it is, then with a row for every query: made only when asked for, as it may take gigabytes."""
    yield mask
    if mask is not None and mask.shape[2] < q_len:
        yield mask.expand(-1, -1, q_len, -1).contiguous()


def _reasons(said: Sequence[str]) -> str:
    """What torch warned of cuDNN's backend, in one line: its warnings name one backend after the other."""
    reasons, ours = [], False
    for line in (text.partition(" (Triggered internally")[0].strip() for text in said):
        if line.lower().endswith("not used because:"):
            ours = line.lower().startswith("cudnn")
        elif ours:
            reasons.append(line)
    return "; ".join(reasons)
