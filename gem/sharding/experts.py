"""Experts over ranks: each works at its part of a layer's experts, for the samples of all ranks of its group.

As Meta describes GEM's expert parallelism: activations are all-gathered on the innermost tier, the local experts see
the whole group's batch, and their outputs are reduce-scattered; the backward is the mirror image. The experts' own
parameters are FSDP's business, on a mesh of their own (gem.sharding.mesh).

Legend: B samples of this rank, P of the rank that has most (with rows of padding), G ranks of the group, M tokens in, O
tokens out, E width of a token, X experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem.errors import RequestError
from gem.model.interaction import Mixture
from gem.model.work import Work
from gem.sharding.collectives import Wire


@dataclass(eq=False)
class ExpertGroup:
    """The ranks that one set of experts is dealt to. Every rank calls ``expect`` before a forward."""

    wire: Wire
    room: int = 0  # P

    def expect(self, samples: int, device: torch.device) -> None:
        """Say how many samples this rank's next forward has; the ranks may have different numbers, none included."""
        most = torch.tensor([samples], device=device)
        if self.wire.size > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.wire.group)
        self.room = int(most)


class ShardedMixture(nn.Module):
    """In the place of gem.model.interaction.Mixture, with this rank's part of its experts."""

    def __init__(self, mixture: Mixture, group: ExpertGroup) -> None:
        super().__init__()
        parts, everything = group.wire.size, len(mixture.experts)
        if everything % parts:
            raise RequestError(
                f"plan.expert = {parts}: {everything} experts a layer; accepted: a number of ranks that divides it"
            )
        local = everything // parts
        self.group, self.first = group, group.wire.rank * local
        self.experts = nn.ModuleList(list(mixture.experts)[self.first : self.first + local])

    def forward(self, x_BME: Tensor, share_BX: Tensor) -> Tensor:
        """[B, O, E]."""
        room = self.group.room
        if len(x_BME) > room:
            raise ValueError(f"{len(x_BME)} samples, {room} were expected: call ExpertGroup.expect before each forward")
        # Under autocast some layers give fp32: what travels is in the run's precision all the same.
        kind = x_BME.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BME.dtype
        x = _Gather.apply(x_BME.to(dtype), room, self.group.wire)
        share = _Gather.apply(share_BX.to(dtype), room, self.group.wire)[:, self.first : self.first + len(self.experts)]
        found = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = (found * share[:, :, None, None].to(found.dtype)).sum(1)
        return _Scatter.apply(mixed.to(dtype), len(x_BME), self.group.wire)  # type: ignore[no-any-return]

    def flops(self, work: Work) -> float:
        """Forward, of a rank's share: its experts on the group's samples."""
        return self.group.wire.size * sum(expert.flops(work) for expert in self.experts)  # type: ignore[operator]


class _Gather(torch.autograd.Function):
    """[B, …] of each rank to [G P, …]; gradients are reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, room: int, wire: Wire) -> Tensor:
        ctx.own, ctx.wire = len(x), wire
        return wire.gather_padded(x, room, "experts' activations")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.wire.reduce_scatter(gradient, "experts' activations")[: ctx.own], None, None


class _Scatter(torch.autograd.Function):
    """The ranks' sum of [G P, …], of which each gets its [B, …]; gradients are all-gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: int, wire: Wire) -> Tensor:
        ctx.room, ctx.wire = len(x) // wire.size, wire
        return wire.reduce_scatter(x, "experts' outputs")[:own]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.wire.gather_padded(gradient, ctx.room, "experts' outputs"), None, None
