"""Peers on packed rows with cumulative lengths: FlashAttention and torch's own variable-length attention. CUDA only."""

import importlib
from typing import Any

import torch
from torch import Tensor

from gem.data.batch import offsets_of
from gem.harness.peers import PackedRows, refuse_bias
from gem.harness.subjects import Inputs
from gem.harness.worker import Unsupported


class Varlen(PackedRows):
    """What kernels on packed rows share: what they take, and their arguments.

    ``q_offsets``, ``k_offsets``: int32 [S + 1] of the segments S; ``q_max``, ``k_max``: the longest ones.
    """

    what = ""  # as the reasons of skipped rows call it
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    install = ""  # how it gets there when it is not importable

    def __init__(self, inputs: Inputs, name: str) -> None:
        if inputs.device not in self.devices:
            raise Unsupported(f"{self.what} runs on CUDA only")
        if inputs.dtype not in self.dtypes:
            taken = " and ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            raise Unsupported(f"{self.what} takes {taken}, not {inputs.params.dtype}")
        if reason := refuse_bias(inputs, self.what):
            raise Unsupported(reason)
        super().__init__(inputs, name)
        seg = self.segments
        if not int(seg.q.sum()) or not int(seg.k.sum()):
            raise Unsupported(f"{self.what} takes no empty batch")
        self.q_offsets, self.k_offsets = (
            torch.as_tensor(offsets_of(lens)).to(inputs.device, torch.int32) for lens in (seg.q, seg.k)
        )
        self.q_max, self.k_max = int(seg.q.max()), int(seg.k.max())

    def _import(self, module: str) -> Any:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            hint = f"; {self.install}" if self.install else ""
            raise Unsupported(f"{self.what} is not installed ({error}){hint}") from error


class TorchVarlen(Varlen):
    """torch.nn.attention.varlen.varlen_attn."""

    what = "torch.nn.attention.varlen"

    def __init__(self, inputs: Inputs, name: str) -> None:
        super().__init__(inputs, name)
        self._attend = self._import("torch.nn.attention.varlen").varlen_attn

    def forward(self) -> Tensor:
        q, k, v = self.attended()
        return self._attend(
            q, k, v, self.q_offsets, self.k_offsets, self.q_max, self.k_max,
            scale=self.segments.scale, window_size=self.segments.edges,
        )  # fmt: skip


class FlashAttention3(Varlen):
    """flash_attn_interface.flash_attn_varlen_func."""

    what = "FlashAttention 3"
    module = "flash_attn_interface"

    def __init__(self, inputs: Inputs, name: str) -> None:
        super().__init__(inputs, name)
        self._attend = self._import(self.module).flash_attn_varlen_func

    def _window(self) -> tuple[int | None, int | None]:
        return self.segments.edges

    def forward(self) -> Tensor:
        seg = self.segments
        q, k, v = self.attended()
        out = self._attend(
            q, k, v, cu_seqlens_q=self.q_offsets, cu_seqlens_k=self.k_offsets, max_seqlen_q=self.q_max,
            max_seqlen_k=self.k_max, softmax_scale=seg.scale, causal=seg.causal, window_size=self._window(),
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out  # some releases return the log-sum-exp as well


class FlashAttention4(FlashAttention3):
    """flash_attn.cute.interface.flash_attn_varlen_func; unlimited is None there."""

    what = "FlashAttention 4"
    module = "flash_attn.cute.interface"

    def _window(self) -> tuple[int | None, int | None]:
        left, right = (None if side < 0 else side for side in self.segments.edges)
        return left, right
