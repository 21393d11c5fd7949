"""All-gathers of the dense part in 8 bits: a rank quantises its shard, codes and scales travel, each rank dequantises.

Meta's GEM gathers weights so (low-precision collectives: quantise the FSDP shard, then gather). torchao's float8
all-gather (pytorch/ao, torchao.float8, enable_fsdp_float8_all_gather) is prior art: FSDP2's extension hooks
``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, there with one scale a tensor. Here each block of 128 neighbours
in a row has one: FSDP never cuts a row, so the weights that a forward sees are the same for any number of ranks. Master
weights and the optimizer's state stay what they are; gradients are those of the dequantised weights, passed on as they
are.

A code is FP8 e4m3 of x / amax * 448; beside it travels the block's amax itself, in fp32, which unlike amax / 448
neither over- nor underflows. A finite x comes back within amax / 28 + 2^-149 (half a step of the codes next to 448, and
fp32's last bit), the largest as it was, zeros as zeros. NaN and infinity come back as NaN, in their place: e4m3 has one
code for them; amax is that of the block's finite values.

It is the weights of linear layers that travel so: not scales of norms, biases, learnt queries and tables of positions.

Legend: R rows, C columns, S blocks of a row, G ranks of the shard group, N bytes a rank sends to each other.
"""

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from gem.errors import RequestError

Gather = Literal["full", "fp8"]
BLOCK = 128
LARGEST = 448.0  # of e4m3
AMAX = torch.float32


def checked(gather: str) -> None:
    """RequestError where ``gather`` is no way to gather."""
    if gather not in get_args(Gather):
        raise RequestError(f"gather: {gather!r}; accepted: {', '.join(get_args(Gather))}")


def blocks(columns: int) -> int:
    """S: the last one of a row may be shorter."""
    return -(-columns // BLOCK)


def quantise(weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, e4m3 [R, C], and each block's amax, fp32 [R, S]. R may be 0."""
    columns = weight_RC.shape[1]
    x_RSB = F.pad(weight_RC.to(AMAX), (0, blocks(columns) * BLOCK - columns)).unflatten(1, (blocks(columns), BLOCK))
    finite = x_RSB.isfinite()
    amax_RS = x_RSB.where(finite, 0.0).abs().amax(-1)
    unit_RSB = (x_RSB / amax_RS.where(amax_RS > 0, 1.0)[..., None]).where(finite, torch.nan)
    return (unit_RSB * LARGEST).to(torch.float8_e4m3fn).flatten(1)[:, :columns], amax_RS


def dequantise(codes_RC: Tensor, amax_RS: Tensor) -> Tensor:
    """fp32 [R, C]."""
    return (codes_RC.float() / LARGEST).mul_(amax_RS.repeat_interleave(BLOCK, 1)[:, : codes_RC.shape[1]])


class EightBit(Tensor):
    """The local tensor of a parameter that travels in 8 bits: FSDP's own memory, with the hooks that FSDP looks for.

    What is computed from it, a state_dict's tensors among them, is a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    whole: torch.Size  # [rows of all ranks, C]

    # One tensor is gathered, amax and codes in one: groups of one rank know no second. By FSDP's longer signature it
    # would have to be of the padded shard's size, which leaves no room for amax; only ranks with padding would say so.
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], int]:
        """uint8 [N]: amax [R, S], then codes [R, C], R as in the largest shard, rows of zeros where there are none."""
        rows = _rows(self.whole[0], mesh.size())
        found = [x.contiguous().view(torch.uint8) for x in reversed(quantise(self))]
        return (torch.cat([F.pad(x, (0, 0, 0, rows - len(x))).flatten() for x in found]),), mesh.size()

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], ranks: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight in ``dtype``, and what FSDP frees with it; or into ``out``, for which FSDP has made room."""
        count, columns = self.whole
        rows, width = _rows(count, ranks), blocks(columns) * AMAX.itemsize
        amax_GN, codes_GN = gathered[0].view(ranks, -1).split([rows * width, rows * columns], 1)
        # Copies: a rank's part begins anywhere, fp32 must not. The padding lies behind the last row of all.
        amax_RS = amax_GN.contiguous().view(ranks * rows, width)[:count].view(AMAX)
        codes_RC = codes_GN.contiguous().view(ranks * rows, columns)[:count].view(torch.float8_e4m3fn)
        weight_RC = dequantise(codes_RC, amax_RS).to(dtype)
        # FSDP would keep the codes for as long as the weight; it makes room for them anew before each all-gather.
        gathered[0].untyped_storage().resize_(0)
        if out is None:
            return weight_RC, (weight_RC,)
        # As FSDP's own copy: autograd has saved this tensor in the forward, and the backward finds the same values.
        with torch.autograd._unsafe_preserve_version_counter(out):  # type: ignore[attr-defined]
            out.copy_(weight_RC)
        return None


def gather_in_fp8(module: nn.Module) -> list[str]:
    """Let the weights of linear layers within travel in 8 bits from the next all-gather on; their names.

    After ``fully_shard``, before the first forward, which raises RuntimeError where another tensor has since been put
    in a weight's place (``load_state_dict(assign=True)``): FSDP would gather that one in full without a word.
    """
    layers = _linear(module)
    for name, layer in layers.items():
        weight = layer.weight
        if not isinstance(weight, DTensor) or weight.placements[-1] != Shard(0):
            raise ValueError(f"{name}: not sharded by rows; accepted: modules after fully_shard")
        shard = weight._local_tensor.as_subclass(EightBit)
        shard.whole = weight.shape
        weight._local_tensor = shard
    module.register_forward_pre_hook(partial(_check, layers), prepend=True)
    return list(layers)


def gather_bytes(module: nn.Module, gather: Gather) -> int:
    """Bytes that this rank sends when each sharded parameter within is gathered once, in full or in 8 bits.

    (G - 1) * R * C * b for a parameter of C elements a row, of b bytes each, R = ceil(rows / G) with its padding;
    (G - 1) * R * (C + 4 * ceil(C / 128)) for a linear layer's weight in 8 bits. ValueError while one is gathered.
    """
    checked(gather)
    small = {id(layer.weight) for layer in _linear(module).values()} if gather == "fp8" else set()
    total = 0
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ValueError(f"{name}: gathered now, or not sharded; accepted: modules after fully_shard, at rest")
        ranks, columns = parameter.device_mesh.shape[-1], parameter.shape[1:].numel()
        row = columns + blocks(columns) * AMAX.itemsize if id(parameter) in small else columns * parameter.itemsize
        total += (ranks - 1) * _rows(parameter.shape[0], ranks) * row
    return total


def _rows(count: int, ranks: int) -> int:
    """Rows of the largest of so many shards."""
    return -(-count // ranks)


def _linear(module: nn.Module) -> dict[str, nn.Linear]:
    """By the names of their weights."""
    found = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    return {f"{name}.weight".removeprefix("."): layer for name, layer in found.items()}


def _check(layers: dict[str, nn.Linear], module: nn.Module, arguments: Any) -> None:
    for name, layer in layers.items():
        if isinstance(layer.weight, DTensor) and not isinstance(layer.weight._local_tensor, EightBit):
            raise RuntimeError(f"{name}: its tensor was replaced, it would not travel in 8 bits; load in place instead")
