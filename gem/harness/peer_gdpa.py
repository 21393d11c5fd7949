"""Peers that compute GDPA itself on packed rows: two public Triton kernels of Meta. CUDA only.

Neither scales where ``gem.gdpa`` does. A factor that a kernel lacks is folded into one of its inputs beforehand, where
a model would fold it into the projection that makes this input, and out of that input's gradient afterwards: the timed
call is the kernel's own.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from gem.data.batch import offsets_of
from gem.harness.params import GdpaParams
from gem.harness.peer_varlen import Varlen
from gem.harness.subjects import Inputs
from gem.harness.worker import Unsupported

# gem's activations as ads_model_kernel_library calls them: its faster forms (tanh and exp of the hardware) where it has
# two, which bfloat16 and float16 do not tell apart. It has a name for the Taylor polynomial too,
# "fast_gelu_taylor_approx", but its Triton kernel knows no such activation and takes the scores as they are.
MKL_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "fast_gelu",
    "silu": "fast_silu",
    "relu": "relu",
    "relu_squared": "relu_square",
    "identity": "raw",
}
HOMOGENEOUS = {"relu": 1, "relu_squared": 2, "identity": 1}  # act(s x) = s^n act(x) for s >= 0


class _Gdpa(Varlen, ABC):
    """Shared by the two: the check of what they compute, the import, the factors folded into inputs."""

    module = ""
    function = ""

    def __init__(self, inputs: Inputs, name: str) -> None:
        if not isinstance(inputs.params, GdpaParams):
            raise Unsupported(f"{self.what} computes gdpa, not {inputs.subject}")
        if reason := self.refusal(inputs, inputs.params):
            raise Unsupported(reason)
        super().__init__(inputs, name)
        self._attend = getattr(self._import(self.module), self.function)
        self._params = inputs.params
        self._factors: dict[str, float] = {}

    @abstractmethod
    def refusal(self, inputs: Inputs, params: GdpaParams) -> str:
        """Why the kernel does not compute this case, "" when it does."""

    def fold(self, name: str, factor: float) -> None:
        """Multiply the leaf ``name`` by ``factor`` now, and its gradient whenever it is asked for."""
        self._factors[name] = factor
        self.leaves[name] = (self.leaves[name].detach() * factor).requires_grad_()
        self.negated = self.leaves["v"]

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        return super().rows(name, tensor * self._factors[name] if name in self._factors else tensor)


class MklGdpa(_Gdpa):
    """``generalized_dot_product_attention`` of facebookresearch/ads_model_kernel_library (gdpa/triton).

    It computes qk_scale * act(q k^T) v: its ``qk_scale`` is ``out_scale`` here, and the scores have no factor. Theirs
    goes into q, or past a homogeneous activation: rounding q would move scores across the kink of relu.
    Queries behind ``max_seq_len_q`` are left out without a word, so it is given the longest length.
    """

    what = "ads_model_kernel_library's GDPA"
    module = "ads_mkl.ops.oss.gdpa.triton.triton_generalized_dot_product_attention"
    function = "generalized_dot_product_attention"
    install = "its folder gdpa belongs on PYTHONPATH as ads_mkl/ops/oss/gdpa"

    def __init__(self, inputs: Inputs, name: str) -> None:
        super().__init__(inputs, name)
        params = self._params
        self._scale = params.out_scale
        if params.activation in HOMOGENEOUS and params.qk_scale >= 0:
            self._scale *= params.qk_scale ** HOMOGENEOUS[params.activation]
        else:
            self.fold("q", params.qk_scale)
        self._out_offsets = self.q_offsets
        if inputs.shared_queries:  # they are its one segment of queries, read by every segment of keys
            count = self.leaves["q"].shape[0]
            self.q_offsets = torch.tensor([0, count], dtype=torch.int32, device=inputs.device)

    def refusal(self, inputs: Inputs, params: GdpaParams) -> str:
        if params.activation not in MKL_ACTIVATIONS:
            return f"{self.what} has no {params.activation}; it has {', '.join(MKL_ACTIVATIONS)}"
        if inputs.mask != (False, (-1, -1)):
            return f"{self.what} has neither causal masks nor windows of this kind"
        return ""

    def forward(self) -> Tensor:
        q, k, v = (self.leaves[name] for name in ("q", "k", "v"))
        return self._attend(
            query=q, key=k, value=v, query_offset=self.q_offsets, key_offset=self.k_offsets,
            output_offset=self._out_offsets, max_seq_len_q=self.q_max, max_seq_len_kv=self.k_max,
            qk_scale=self._scale, broadcast_q=self.inputs.shared_queries,
            activation=MKL_ACTIVATIONS[self._params.activation],
        )  # fmt: skip


class Hstu(_Gdpa):
    """``triton_hstu_mha`` of meta-recsys/generative-recommenders: silu(alpha q k^T) v / N, causal, self attention.

    N is the longest length, which is both its divisor and its bound on the lengths.
    """

    what = "generative-recommenders' HSTU attention"
    # In float16, silu(.) / N is subnormal for long samples and v * N, which makes up for it, overflows.
    dtypes = (torch.bfloat16, torch.float32)
    module = "generative_recommenders.ops.triton.triton_hstu_attention"
    function = "triton_hstu_mha"
    install = "the package generative_recommenders belongs on PYTHONPATH"

    def __init__(self, inputs: Inputs, name: str) -> None:
        super().__init__(inputs, name)
        self.fold("v", self._params.out_scale * self.q_max)
        self._offsets = torch.as_tensor(offsets_of(self.segments.q)).to(inputs.device)  # int64, as its benchmark has

    def refusal(self, inputs: Inputs, params: GdpaParams) -> str:
        lengths = inputs.lengths
        if params.activation != "silu":
            return f"{self.what} has no {params.activation}; it has silu"
        if not params.causal or params.window != (-1, -1):
            return f"{self.what} is causal and, here, without a window"
        if inputs.shared_queries or not np.array_equal(lengths.q, lengths.k):
            return f"{self.what} is self attention: as many queries as keys in every sample"
        if params.head_dim < 16 or params.head_dim & (params.head_dim - 1):
            return f"{self.what} takes a head_dim that is a power of two from 16, not {params.head_dim}"
        return ""

    def forward(self) -> Tensor:
        # Longest samples first, as its own benchmark runs it: sorting the lengths is part of its call.
        return self._attend(
            N=self.q_max, alpha=self._params.qk_scale, q=self.leaves["q"], k=self.leaves["k"], v=self.leaves["v"],
            seq_offsets=self._offsets, sort_by_length=True,
        )  # fmt: skip
