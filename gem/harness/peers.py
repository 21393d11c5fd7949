"""The public kernels that a subject is compared with, by name; and what every contestant offers to be measured.

A peer is one class in a module of its family, ``peer_<family>.py``; adding one = that file and a line in ``REGISTRY``
(and in ``names.PEERS``, where declarations are checked without torch). A peer that computes another function of the
same FLOPs (softmax, or another of GDPA's activations) is checked against the oracle of what it does compute.

Legend: T rows of all samples (TQ, TK), B samples, H heads, D head_dim.
"""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gem.efficiency import Ints, window_edges
from gem.errors import RequestError
from gem.harness.params import BlockAttentionParams, JaggedAttentionParams
from gem.harness.subjects import Inputs

REGISTRY = {
    "sdpa_padded": "gem.harness.peer_padded:SdpaPadded",
    "cudnn_padded": "gem.harness.peer_cudnn:CudnnPadded",
    "sdpa_blocks": "gem.harness.peer_padded:SdpaBlocks",
    "padded": "gem.harness.peer_padded:GdpaPadded",
    "nested": "gem.harness.peer_nested:Nested",
    "flex": "gem.harness.peer_flex:Flex",
    "torch_varlen": "gem.harness.peer_varlen:TorchVarlen",
    "fa3": "gem.harness.peer_varlen:FlashAttention3",
    "fa4": "gem.harness.peer_varlen:FlashAttention4",
    "mkl_gdpa": "gem.harness.peer_gdpa:MklGdpa",
    "hstu": "gem.harness.peer_gdpa:Hstu",
    "jfa_v1": "gem.harness.peer_generations:JfaV1",
    "gluon_unsorted": "gem.harness.peer_ablation:Changed",
    "gluon_drained": "gem.harness.peer_ablation:Changed",
    "gluon_tanh": "gem.harness.peer_ablation:Changed",
    "gluon_plain": "gem.harness.peer_ablation:Changed",
}
_SAME_FOR_GDPA = ("padded", "mkl_gdpa", "hstu", "gluon_unsorted", "gluon_drained", "gluon_plain")
_OTHER_ACTIVATION = {"gluon_tanh": "gelu_tanh"}


class Contestant(Protocol):
    """What the subject and every peer offer. Built from ``Inputs`` and its name; building may take its time.

    computes      "same" = the case's subject, "softmax" = softmax attention of equal FLOPs, the name of an activation
                  = GDPA with that one
    repeatable    promises bitwise the same result for the same inputs
    no_backward   why it has no backward here, "" when it has
    leaves        its own input tensors, in its own form, by name: the gradients that ``backward`` yields
    negated       v in the contestant's form, [..., D]: between timed calls its channels change their signs in place
                  (fresh.py), and the output's follow
    """

    computes: str
    repeatable: bool
    no_backward: str
    leaves: dict[str, Tensor]
    negated: Tensor

    def forward(self) -> Tensor:
        """The timed call: the output in the contestant's own form."""
        ...

    def gradient_in(self, d_out: Tensor) -> Tensor:
        """The output's gradient [T, H, D] in the form of ``forward``'s result."""
        ...

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        """The output ("out") or a leaf's gradient as rows [T, H, D] of the case's inputs."""
        ...


def load(name: str) -> Callable[[Inputs, str], Contestant]:
    """The class of a peer. Raises RequestError for a name that is none."""
    check_name(name)
    module, _, attribute = REGISTRY[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def check_name(name: str) -> None:
    """RequestError naming the accepted ones unless ``name`` is a peer."""
    if name not in REGISTRY:
        close = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RequestError(f"unknown peer {name!r}; accepted: {', '.join(REGISTRY)}{hint}")


def computes(name: str, subject: str) -> str:
    """ "same" when the peer computes the subject's own function, else "softmax" or the activation that it has."""
    if subject != "gdpa" or name in _SAME_FOR_GDPA:
        return "same"
    return _OTHER_ACTIVATION.get(name, "softmax")


# ---- what peers share: a case as softmax attention over contiguous segments of rows


@dataclass(frozen=True)
class Segments:
    """Samples, or the blocks of block attention: softmax attention inside each. ``cos``, ``sin``: [TQ, D // 2]."""

    q: Ints
    k: Ints
    causal: bool
    window: tuple[int, int]
    scale: float
    cos: Tensor | None = None
    sin: Tensor | None = None

    @property
    def edges(self) -> tuple[int, int]:
        """(left, right) reach of a query around its position, -1 = unlimited."""
        return window_edges(self.causal, self.window)

    @property
    def masked(self) -> bool:
        """Whether positions matter at all."""
        return self.edges != (-1, -1)

    def first_visible(self) -> Ints:
        """Queries at the start of each segment that see no key at all (more queries than keys under a causal mask)."""
        right = self.edges[1]
        return np.where(self.k == 0, self.q, np.clip(self.q - self.k - right, 0, self.q) if right >= 0 else 0)


def segments(inputs: Inputs, to_longest: bool = False) -> Segments:
    """The case as segments; block attention becomes one segment a block, its rotation a table by row.

    ``to_longest``: every sample gets as many blocks as the longest one, empty ones at its end.
    """
    params, lengths = inputs.params, inputs.lengths
    default = params.head_dim**-0.5
    if not isinstance(params, BlockAttentionParams):
        causal, window = inputs.mask
        scale = params.scale if isinstance(params, JaggedAttentionParams) else None
        return Segments(lengths.q, lengths.k, causal, window, default if scale is None else scale)
    most = -(-int(lengths.max_q) // params.block)
    starts = np.arange(most) * params.block
    size_BN = np.clip(lengths.q[:, None] - starts, 0, params.block)  # rows of each sample in its n-th block
    size = size_BN.ravel() if to_longest else size_BN[size_BN > 0]
    cos = sin = None
    if inputs.rope is not None:
        positions = np.concatenate([np.empty(0, np.int64), *(np.arange(n) for n in lengths.q)])
        index = torch.as_tensor(positions).to(inputs.device)
        cos, sin = (table[index].to(inputs.dtype) for table in inputs.rope)
    scale = default if params.scale is None else params.scale
    return Segments(size, size, False, (-1, -1), scale, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., D], pairing x[..., :D/2] with x[..., D/2:]; tables broadcast to [..., D // 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class PackedRows:
    """Leaves of peers that work on packed rows: the filled rows alone, contiguous; shared queries stay shared."""

    computes = "softmax"
    repeatable = False
    no_backward = ""

    def __init__(self, inputs: Inputs, name: str) -> None:
        self.inputs = inputs
        self.computes = computes(name, inputs.subject)
        self.segments = segments(inputs)
        self.leaves = {leaf: self._filled(leaf, inputs.leaves[leaf]) for leaf in ("q", "k", "v")}
        self.negated = self.leaves["v"]

    def _count(self, name: str) -> int:
        lengths = self.inputs.lengths
        return lengths.tokens_k if name in ("k", "v") else lengths.tokens_q

    def _filled(self, name: str, x: Tensor) -> Tensor:
        shared = name == "q" and self.inputs.shared_queries
        return (x if shared else x[: self._count(name)]).detach().clone().contiguous().requires_grad_()

    def attended(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [T, H, D] as attention reads them: queries repeated for every sample, rotated where the case says."""
        q, k, v = (self.leaves[name] for name in ("q", "k", "v"))
        if self.inputs.shared_queries:
            q = q.repeat(self.inputs.lengths.batch, 1, 1)
        cos, sin = self.segments.cos, self.segments.sin
        if cos is not None and sin is not None:
            q, k = (rotate(x, cos[:, None], sin[:, None]) for x in (q, k))
        return q, k, v

    def gradient_in(self, d_out: Tensor) -> Tensor:
        return d_out[: self._count("out")]

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        return with_tail(self.inputs, name, tensor)


def with_tail(inputs: Inputs, name: str, rows: Tensor) -> Tensor:
    """Filled rows followed by zeros for those behind the last offset."""
    if name == "q" and inputs.shared_queries:
        return rows
    total = {"out": inputs.d_out, "q": inputs.q, "k": inputs.k, "v": inputs.v}[name].shape[0]
    return torch.cat([rows, rows.new_zeros(total - rows.shape[0], *rows.shape[1:])]) if total > len(rows) else rows


def refuse_bias(inputs: Inputs, what: str, accepted: tuple[str, ...] = ()) -> str:
    """Why a peer cannot run this case's bias, "" when it can."""
    bias: Any = getattr(inputs.params, "bias", "none")
    return "" if bias == "none" or bias in accepted else f"{what} takes no {bias} bias"
