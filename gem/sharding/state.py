"""State of a sharded run for checkpoints, named as one process names it: any plan can load what another has saved.

Tensors are DTensors on the plan's meshes; torch.distributed.checkpoint reads a rank's pieces from whichever files they
lie in. What only some ranks hold (a table on one rank, an expert) is an entry of theirs alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gem.model import GemModel
from gem.model.gem_model import key
from gem.sharding.experts import ShardedMixture
from gem.sharding.mesh import Meshes
from gem.sharding.placement import Table
from gem.sharding.tables import ShardedTables
from gem.train.optimizers import DenseState


def global_names(model: GemModel) -> Callable[[str], str]:
    """From a rank's name of a parameter to everybody's: a rank counts its own experts from 0."""
    first = {
        f"interactions.{number}.mixture.experts.": layer.mixture.first
        for number, layer in enumerate(model.interactions)
        if isinstance(layer.mixture, ShardedMixture)
    }

    def rename(name: str) -> str:
        for prefix, start in first.items():
            if name.startswith(prefix):
                expert, _, rest = name.removeprefix(prefix).partition(".")
                return f"{prefix}{int(expert) + start}.{rest}"
        return name

    return rename


class ModelState:
    """Dense parameters and tables, as ``GemModel.state_dict`` of one process has them. Loaded in place."""

    def __init__(self, model: GemModel, tables: ShardedTables, meshes: Meshes) -> None:
        self.model, self.tables, self.meshes = model, tables, meshes
        self.rename = global_names(model)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that are trained, not copies."""
        found = {self.rename(name): x.detach() for name, x in self.model.state_dict().items()}
        for name, table in self.tables.tables.items():
            weight = _of_table(self.tables, self.meshes, table, self.tables.weights[name])
            if weight is not None:
                found[f"tables.{key(name)}"] = weight
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The checkpoint's reader has filled tensors in place; of tables, what was gathered before is out of date."""
        self.tables.release()


class DenseMoments:
    """gem.train.optimizers.DenseState by everybody's names."""

    def __init__(self, dense: DenseState, model: GemModel) -> None:
        self.dense, self.rename = dense, global_names(model)
        self.parameters = dict(model.named_parameters())

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's own tensors, which are of this rank's shards, placed as their parameters are."""
        found = {}
        for name, tensors in self.dense.state_dict().items():
            whole = self.parameters[name]
            assert isinstance(whole, DTensor)
            mesh, placements, shape = whole.device_mesh, list(whole.placements), tuple(whole.shape)
            found[self.rename(name)] = {
                key: _whole(x, mesh, placements, shape) if x.dim() else x for key, x in tensors.items()
            }
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Filled in place already."""


class TableSums:
    """What row-wise Adagrad keeps, as ``RowwiseAdagrad.state_dict`` of one process has it."""

    def __init__(self, tables: ShardedTables, meshes: Meshes) -> None:
        self.tables, self.meshes = tables, meshes

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's own tensors."""
        found = {}
        for name, table in self.tables.tables.items():
            sums = _of_table(self.tables, self.meshes, table, self.tables.sums[name])
            if sums is not None:
                found[name] = sums
        return {"sums": found, "rests": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Filled in place already."""


def _of_table(tables: ShardedTables, meshes: Meshes, table: Table, own: Tensor) -> Tensor | None:
    """This rank's piece of [R, D] weights or [R] sums as everybody's tensor; None where it holds nothing."""
    shape = (table.rows, table.dim)[: own.dim()]
    along_columns = table.cut == "column" and own.dim() == 2
    replicas = meshes.tables["table_replica"]
    if table.cut == "row" or along_columns:
        shard = Shard(1 if along_columns else 0)
        if tables.kind == "v3":
            return _whole(own, meshes.tables, [shard, Shard(0)], shape)
        return _whole(own, meshes.tables, [Replicate(), shard], shape)
    # Whole on each rank that has it: on one, or the sums of a table cut in columns on all that hold some.
    if tables.owners.rank not in tables.placement.owners(table):
        return None
    if tables.kind == "v3":
        return _whole(own, replicas, [Shard(0)], shape)
    return own


def _whole(own: Tensor, mesh: DeviceMesh, placements: list[Placement], shape: tuple[int, ...]) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
