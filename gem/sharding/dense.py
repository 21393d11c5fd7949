"""The dense part over ranks: 2D FSDP (shards within a group, replicas across groups), and experts on their own mesh.

torch's FSDP2 does it, module by module: a layer's parameters are all-gathered just before it runs, while the layer
before it still does, and freed behind it. Gradients are sums, not means: the trainer's losses are shares of the global
batch's already (gem.train.step), and experts would be divided by too few ranks, since each sees its group's samples.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from gem.model import GemModel
from gem.sharding.collectives import Traffic, Wire
from gem.sharding.experts import ExpertGroup, ShardedMixture
from gem.sharding.lowbits import Gather, checked, gather_in_fp8
from gem.sharding.mesh import Meshes


def shard_model(
    model: GemModel, meshes: Meshes, traffic: Traffic | None = None, *, gather: Gather = "full"
) -> ExpertGroup:
    """Shard a model without tables in place. RequestError where its experts cannot be dealt to the plan's ranks.

    ``gather``: how parameters travel, "full" or, weights of linear layers, in "fp8" (gem.sharding.lowbits).
    """
    checked(gather)
    group = ExpertGroup(Wire(meshes.experts.get_group("expert"), traffic or Traffic()))
    parts: list[nn.Module] = []
    for name, part in _in_turn(model).items():
        inner: list[nn.Module] = []
        if name.startswith("interaction.") and meshes.plan.expert > 1:
            part.mixture = ShardedMixture(part.mixture, group)  # type: ignore[arg-type]
            inner = [_shard(part.mixture, meshes.expert_parameters)]
        parts += [_shard(part, meshes.dense), *inner]
    _shard(model, meshes.dense)
    if gather == "fp8":
        gather_in_fp8(model)
    _prefetch([part for part in parts if isinstance(part, FSDPModule)])
    return group


def _shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    found = fully_shard(module, mesh=mesh)
    found.set_gradient_divide_factor(1.0)
    # Else sums times a factor, which gloo does not know.
    found.set_force_sum_reduction_for_comms(True)
    return module


def _in_turn(model: GemModel) -> dict[str, nn.Module]:
    """The model's parts in the order in which a forward comes to them, which prefetching has to follow.

    A part prefetched after its turn would be gathered once more, for nothing, and stay.
    """
    parts, config = model.parts(), model.config
    layers = [f"{kind}.{number}" for number in range(config.layers) for kind in ("tower", "interaction")]
    names = [f"events.{config.keys}", "short_pooling", f"events.{config.history}", *layers]
    return {name: parts[name] for name in dict.fromkeys([*names, *parts]) if name in parts}


def _prefetch(parts: Sequence[FSDPModule]) -> None:
    """Each part's parameters travel while the part before it runs; in the backward, while the part behind it does."""
    for one, following in pairwise(parts):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])


class OwnShards:
    """This rank's piece of each parameter as a parameter of its own, in the same memory: what an optimizer updates.

    An update of an element needs nothing of other ranks. Of the DTensors themselves, torch works out for each list of
    parameters how an update is placed, which took longer than all else in a short run (docs/measured.md).
    """

    def __init__(self, model: nn.Module) -> None:
        self.wholes = dict(model.named_parameters())
        self.own = {name: nn.Parameter(_local(p), p.requires_grad) for name, p in self.wholes.items()}

    def items(self) -> Iterable[tuple[str, nn.Parameter]]:
        """By the parameters' names."""
        return self.own.items()

    def take_gradients(self) -> None:
        """From the parameters, which have none then. Their memory is looked at anew: FSDP may have moved it."""
        for name, whole in self.wholes.items():
            own, local = self.own[name], _local(whole)
            if own.data_ptr() != local.data_ptr():
                own.data = local
            own.grad = None if whole.grad is None else _local(whole.grad)
            whole.grad = None


def _local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


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
