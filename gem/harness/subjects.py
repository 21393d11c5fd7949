"""The inputs of a case, and the public op under measurement as a contestant.

Every worker builds its inputs anew from the same declaration: lengths, parameters and a seed give the same values in
every process on one device. Rows that nobody may read (behind the last offset, gaps between strided rows) hold huge
values, so that a leak shows in the error and not by luck in a zero.

Legend: T rows of all samples (TQ, TK), B samples, H heads, D head_dim, N shared queries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gem import ops, reference
from gem.bias import PositionBias, TimeBias
from gem.data.lengths import Lengths
from gem.harness.params import BlockAttentionParams, GdpaParams, JaggedAttentionParams, SubjectParams
from gem.harness.worker import Unsupported

GARBAGE = 1e4  # finite in float16 too: NaN would hide a leak behind masks that multiply by 0 or select
POSITION_REACH = 16  # position buckets -16 … 16
TIME_BUCKETS = 16


@dataclass
class Inputs:
    """The tensors of a case on its device. ``q`` is [N, H, D] where the queries are shared, else [TQ, H, D].

    ``leaves`` are those that a gradient is asked for, by the name of the gradient's row in a report: q, k, v, bias.
    ``d_out`` has the rows of the output, huge behind the last offset.
    """

    subject: str
    params: SubjectParams
    lengths: Lengths
    device: str
    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    d_out: Tensor
    shared_queries: bool = False
    bias: Any = None
    rope: tuple[Tensor, Tensor] | None = None
    leaves: dict[str, Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of q, k, v and the output."""
        return self.q.dtype

    @property
    def mask(self) -> tuple[bool, tuple[int, int]]:
        """(causal, window)."""
        if isinstance(self.params, JaggedAttentionParams | GdpaParams):
            return self.params.causal, self.params.window
        return False, (-1, -1)


def build_inputs(subject: str, params: SubjectParams, lengths: Lengths, device: str) -> Inputs:
    """Inputs ~ N(0, 1) for ``subject``, drawn on ``device`` from ``params.seed``."""
    generator = torch.Generator(device).manual_seed(params.seed)
    dtype = getattr(torch, params.dtype)
    H, D = params.heads, params.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    shared = lengths.pattern == "pma" and subject == "gdpa"
    tail_q = 0 if shared else lengths.tail_q
    q_rows = (lengths.queries or 0) if shared else lengths.tokens_q + tail_q
    k_rows = lengths.tokens_k + lengths.tail_k
    if lengths.pattern == "self":
        q, k, v = _lay_out(params.layout, 3, q_rows, (H, D), normal)
    else:
        q = _lay_out(params.layout, 1, q_rows, (H, D), normal)[0]
        k, v = _lay_out(params.layout, 2, k_rows, (H, D), normal)
    if lengths.pattern == "pma" and not shared and lengths.queries:  # the same queries for all, each sample its copy
        q[: lengths.tokens_q].unflatten(0, (-1, lengths.queries)).copy_(q[: lengths.queries].clone())
    out_rows = lengths.tokens_q if shared else q_rows
    d_out = normal(out_rows, H, D)
    if not shared:
        q[lengths.tokens_q :] = GARBAGE
        d_out[lengths.tokens_q :] = GARBAGE
    k[lengths.tokens_k :] = GARBAGE
    v[lengths.tokens_k :] = GARBAGE

    offsets_dtype = getattr(torch, params.offsets_dtype)
    q_offsets = torch.as_tensor(np.array(lengths.offsets_q())).to(device, offsets_dtype)
    same = lengths.pattern == "self"
    k_offsets = q_offsets if same else torch.as_tensor(np.array(lengths.offsets_k())).to(device, offsets_dtype)
    inputs = Inputs(subject, params, lengths, device, q, k, v, q_offsets, k_offsets, d_out, shared_queries=shared)
    inputs.leaves = {"q": q, "k": k, "v": v}
    if isinstance(params, JaggedAttentionParams):
        inputs.bias = _bias(params, inputs, normal, generator)
        if inputs.bias is not None:
            inputs.leaves["bias"] = inputs.bias if isinstance(inputs.bias, Tensor) else inputs.bias.table
    if isinstance(params, BlockAttentionParams) and params.rope:
        inputs.rope = rope_tables(lengths.max_q, D, device, torch.float64 if dtype == torch.float64 else torch.float32)
    for leaf in inputs.leaves.values():
        leaf.requires_grad_()
    return inputs


def _lay_out(layout: str, count: int, rows: int, shape: tuple[int, int], normal: Callable[..., Tensor]) -> list[Tensor]:
    """``count`` tensors [rows, H, D], packed, as slices of one projection, or with a row of garbage after each row."""
    if layout == "packed":
        return [normal(rows, *shape) for _ in range(count)]
    if layout == "fused_qkv":
        # At least two slices, so that the queries of a cross attention are no packed tensor either.
        return list(normal(rows, max(count, 2), *shape).unbind(1))[:count]
    spaced = []
    for _ in range(count):
        wide = normal(rows, 2, *shape)
        wide[:, 1] = GARBAGE
        spaced.append(wide[:, 0])
    return spaced


def _bias(params: JaggedAttentionParams, inputs: Inputs, normal: Callable[..., Tensor], generator: torch.Generator):
    lengths, H, device = inputs.lengths, params.heads, inputs.device
    if params.bias == "dense":
        return normal(lengths.batch, H, lengths.max_q, lengths.max_k)
    if params.bias == "dense_broadcast":
        return normal(1, 1, lengths.max_q, lengths.max_k)
    if params.bias == "position":
        return PositionBias.clipped(normal(2 * POSITION_REACH + 1, H))
    if params.bias == "time":
        # Seconds between events of one user: mostly minutes, some days (squares of a uniform draw).
        def times(rows: int) -> Tensor:
            gaps = torch.rand(rows, generator=generator, device=device, dtype=torch.float64) ** 4 * 2e5
            return gaps.long().cumsum(0)

        q_times = times(inputs.q.shape[0])
        k_times = q_times if lengths.pattern == "self" else times(inputs.k.shape[0])
        return TimeBias.log2(normal(TIME_BUCKETS, H), q_times, k_times)
    return None


def rope_tables(max_len: int, head_dim: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) [max_len, D // 2] with Llama's frequencies 10000 ** (-2 i / D)."""
    half = head_dim // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angle = torch.arange(max_len, dtype=torch.float64, device=device)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def one_sample(inputs: Inputs, sample: int, dtype: torch.dtype) -> Inputs:
    """Sample number ``sample`` as a batch of its own in ``dtype``: rows, bias and leaves. Shared tensors stay whole.

    The leaves are new, so that gradients come in ``dtype`` and cost what one sample costs, not what the batch does.
    """
    lengths = inputs.lengths.take([sample], "one sample")
    (q0, q1), (k0, k1) = (tuple(int(x) for x in edges[sample : sample + 2]) for edges in _edges(inputs.lengths))

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(dtype).requires_grad_()

    q = leaf(inputs.q if inputs.shared_queries else inputs.q[q0:q1])
    k, v = leaf(inputs.k[k0:k1]), leaf(inputs.v[k0:k1])
    leaves = {"q": q, "k": k, "v": v}
    bias = inputs.bias
    if isinstance(bias, Tensor):
        bias = leaves["bias"] = leaf(bias[sample : sample + 1] if bias.shape[0] > 1 else bias)
    elif isinstance(bias, PositionBias):
        leaves["bias"] = leaf(bias.table)
        bias = PositionBias(leaves["bias"], bias.boundaries)
    elif isinstance(bias, TimeBias):
        leaves["bias"] = leaf(bias.table)
        bias = TimeBias(leaves["bias"], bias.q_times[q0:q1], bias.k_times[k0:k1], bias.boundaries)
    q_offsets, k_offsets = (torch.tensor([0, n], device=inputs.device) for n in (q1 - q0, k1 - k0))
    return Inputs(
        inputs.subject, inputs.params, lengths, inputs.device, q, k, v, q_offsets, k_offsets,
        inputs.d_out[q0:q1].to(dtype), inputs.shared_queries, bias, inputs.rope, leaves,
    )  # fmt: skip


def _edges(lengths: Lengths) -> tuple[np.ndarray, np.ndarray]:
    return lengths.offsets_q(), lengths.offsets_k()


def run_reference(inputs: Inputs, computes: str) -> Tensor:
    """The oracle in the inputs' dtype. ``computes``: "same" = the subject itself, "softmax" = softmax on its q, k, v,
    the name of an activation = GDPA with it instead of the case's.

    Returns the output's rows [T, H, D], differentiable.
    """
    causal, window = inputs.mask
    how: dict[str, Any] = {"compute_dtype": inputs.dtype}
    q, k, v, q_offsets, k_offsets = inputs.q, inputs.k, inputs.v, inputs.q_offsets, inputs.k_offsets
    params = inputs.params
    if isinstance(params, GdpaParams):
        if computes == "softmax":
            rows = q.repeat(inputs.lengths.batch, 1, 1) if inputs.shared_queries else q
            return reference.jagged_attention(rows, k, v, q_offsets, k_offsets, causal=causal, window=window, **how)
        activation = params.activation if computes == "same" else computes
        how |= {"activation": activation, "qk_scale": params.qk_scale, "out_scale": params.out_scale}
        how |= {"causal": causal, "window": window, "broadcast_q": inputs.shared_queries}
        return reference.gdpa(q, k, v, None if inputs.shared_queries else q_offsets, k_offsets, **how)
    if isinstance(params, BlockAttentionParams):
        how |= {"block": params.block, "rope": inputs.rope, "scale": params.scale}
        return reference.block_attention(q, k, v, q_offsets, **how)
    assert isinstance(params, JaggedAttentionParams)
    how |= {"causal": causal, "window": window, "bias": inputs.bias, "scale": params.scale}
    return reference.jagged_attention(q, k, v, q_offsets, k_offsets, **how)


class Subject:
    """The public op with a named implementation, as a contestant (see ``peers`` for the interface)."""

    computes = "same"
    repeatable = True  # gem promises bitwise the same result for the same inputs
    no_backward = ""

    def __init__(self, inputs: Inputs, impl: str) -> None:
        self.inputs, self.impl = inputs, impl
        self._op = getattr(ops, inputs.subject)
        if inputs.params.compile:
            # inductor on the CPU needs a C++ compiler; that the op is traced whole shows without one.
            backend = "inductor" if inputs.device == "cuda" else "aot_eager"
            self._op = torch.compile(self._op, fullgraph=True, backend=backend)
        if inputs.params.nested and (inputs.lengths.tail_q or inputs.lengths.tail_k):
            raise Unsupported("nested tensors have no rows behind the last offset")
        self.leaves = inputs.leaves
        self.negated = inputs.v  # the output is odd in it, whatever the op

    def forward(self) -> Tensor:
        """The output's rows [T, H, D]."""
        inputs, params = self.inputs, self.inputs.params
        lengths = inputs.lengths
        q, k, v = inputs.q, inputs.k, inputs.v
        how: dict[str, Any] = {"impl": self.impl}
        q_offsets, k_offsets = inputs.q_offsets, (None if lengths.pattern == "self" else inputs.k_offsets)
        if inputs.shared_queries:
            q_offsets, k_offsets = None, inputs.k_offsets
        if params.nested:
            q = q if inputs.shared_queries else nest(q, inputs.q_offsets, lengths.q)
            k, v = (nest(x, inputs.k_offsets, lengths.k) for x in (k, v))
            q_offsets = k_offsets = None
        if isinstance(params, BlockAttentionParams):
            how |= {"block": params.block, "rope": inputs.rope, "scale": params.scale, "max_len": lengths.max_q}
            out = self._op(q, k, v, q_offsets, **how)
        else:
            causal, window = inputs.mask
            how |= {"causal": causal, "window": window, "max_q_len": lengths.max_q, "max_k_len": lengths.max_k}
            if isinstance(params, GdpaParams):
                how |= {"activation": params.activation, "qk_scale": params.qk_scale, "out_scale": params.out_scale}
                how |= {"broadcast_q": inputs.shared_queries}
            elif isinstance(params, JaggedAttentionParams):
                how |= {"bias": inputs.bias, "scale": params.scale}
            out = self._op(q, k, v, q_offsets, k_offsets, **how)
        return out.values() if out.is_nested else out

    def gradient_in(self, d_out: Tensor) -> Tensor:
        """``d_out`` [T, H, D] as the output of ``forward`` lies."""
        return d_out

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        """The output ("out") or the gradient of a leaf in the rows of the inputs."""
        return tensor


def nest(values: Tensor, offsets: Tensor, lengths: np.ndarray) -> Tensor:
    """The jagged nested tensor of these rows; its extremes are given, so that no device memory is read for them."""
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=int(lengths.min(initial=1)), max_seqlen=int(lengths.max(initial=1))
    )
