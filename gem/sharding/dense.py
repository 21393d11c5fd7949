"""The dense part over ranks: 2D FSDP (shards within a group, replicas across groups), and experts on their own mesh.

torch's FSDP2 does it, module by module: a layer's parameters are all-gathered just before it runs, while the layer
before it still does, and freed behind it. Gradients are sums, not means: the trainer's losses are shares of the global
batch's already (gem.train.step), and experts would be divided by too few ranks, since each sees its group's samples.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from gem.model import GemModel
from gem.sharding.collectives import Traffic, Wire
from gem.sharding.experts import ExpertGroup, ShardedMixture
from gem.sharding.mesh import Meshes


def shard_model(model: GemModel, meshes: Meshes, traffic: Traffic | None = None) -> ExpertGroup:
    """Shard a model without tables in place. RequestError where its experts cannot be dealt to the plan's ranks."""
    group = ExpertGroup(Wire(meshes.experts.get_group("expert"), traffic or Traffic()))
    parts: list[nn.Module] = []
    for name, part in model.parts().items():
        if name.startswith("interaction.") and meshes.plan.expert > 1:
            part.mixture = ShardedMixture(part.mixture, group)  # type: ignore[arg-type]
            parts.append(_shard(part.mixture, meshes.expert_parameters))
        parts.append(_shard(part, meshes.dense))
    _shard(model, meshes.dense)
    _prefetch([part for part in parts if isinstance(part, FSDPModule)])
    return group


def _shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    found = fully_shard(module, mesh=mesh)
    found.set_gradient_divide_factor(1.0)
    # Else sums times a factor, which gloo does not know.
    found.set_force_sum_reduction_for_comms(True)
    return module


def _prefetch(parts: Sequence[FSDPModule]) -> None:
    """Each part's parameters travel while the part before it runs; in the backward, while the part behind it does."""
    for one, following in zip(parts, parts[1:], strict=False):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])


@torch.no_grad()
def square_norm(parameters: Iterable[nn.Parameter], meshes: Meshes) -> Tensor:
    """[]: the squared norm of all ranks' gradients, each counted once whatever its copies."""
    gradients = [p.grad for p in parameters if isinstance(p.grad, DTensor)]
    total = None
    for dimensions in (("shard",), ("expert_shard", "expert")):
        own = [g.to_local() for g in gradients if g.device_mesh.mesh_dim_names[-1] == dimensions[0]]  # type: ignore[index]
        if not own:
            continue
        square = torch.stack([g.square().sum() for g in own]).sum()
        mesh = meshes.dense if dimensions == ("shard",) else meshes.experts
        for name in dimensions:
            torch.distributed.all_reduce(square, group=mesh.get_group(name))
        total = square if total is None else total + square
    assert total is not None, "no parameter has a gradient"
    return total
