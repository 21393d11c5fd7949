"""What a rank sends in a training step, by formula: from shapes, the plan and the ids of the ranks' batches alone.

docs/architecture.md has the formulas; gem.sharding.counting counts what is sent in truth. A step of one piece.

Legend: G ranks of a group, R replicas, P samples of the rank of a group that has most, M tokens in, O tokens out, E
width of a token, X experts of a layer, T tables.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem.data.samples import Samples
from gem.sharding import counting
from gem.sharding.collectives import SUMS, sum_bytes
from gem.sharding.lowbits import AMAX, EightBit, blocks
from gem.sharding.placement import Range, Table
from gem.sharding.step import ShardedStepper
from gem.sharding.tables import ShardedTables

COUNT = 8  # bytes of a count


def step_bytes(stepper: ShardedStepper, batches: Sequence[Samples]) -> dict[str, int]:
    """Bytes that this rank sends in a step in which rank r learns from ``batches[r]``, by what they are for.

    Before the step or after it, on one rank or on all: nothing is sent.
    """
    total: dict[str, int] = defaultdict(int)
    for one in (_dense(stepper.model), _experts(stepper, batches), _tables(stepper, batches), _sums(stepper, batches)):
        for what, count in one.items():
            total[what] += count
    return dict(total)


# -- the dense part


def _units(model: nn.Module) -> Iterator[tuple[bool, list[DTensor]]]:
    """(whether it is the whole model, its parameters) of each part that FSDP gathers by itself."""

    def own(module: nn.Module) -> Iterator[DTensor]:
        yield from module._parameters.values()  # type: ignore[misc]
        for child in module.children():
            if not isinstance(child, FSDPModule):
                yield from own(child)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module is model, [p for p in own(module) if p is not None]


def _dense(model: nn.Module) -> dict[str, int]:
    """FSDP's: each part gathered for the forward and once more for the backward, the model's own parameters once."""
    found: dict[str, int] = defaultdict(int)
    for whole, parameters in _units(model):
        if not parameters:
            continue
        mesh, size = parameters[0].device_mesh, parameters[0].itemsize
        copies, ranks = mesh.shape
        assert mesh.mesh_dim_names is not None
        of_experts = mesh.mesh_dim_names[-1] == "expert_shard"
        rows = [-(-p.shape[0] // ranks) for p in parameters]  # of the largest shard: the others are padded to it
        elements = sum(n * p.shape[1:].numel() for n, p in zip(rows, parameters, strict=True))
        gathered = (ranks - 1) * sum(n * _row_bytes(p) for n, p in zip(rows, parameters, strict=True))
        found[counting.EXPERTS_PARAMETERS if of_experts else counting.PARAMETERS] += gathered * (1 if whole else 2)
        found[counting.EXPERTS_GRADIENTS if of_experts else counting.GRADIENTS] += (ranks - 1) * elements * size
        found[counting.EXPERTS_COPIES if of_experts else counting.COPIES] += sum_bytes(elements, size, copies)
    return found


def _row_bytes(parameter: DTensor) -> int:
    columns = parameter.shape[1:].numel()
    if isinstance(parameter._local_tensor, EightBit):
        return columns + blocks(columns) * AMAX.itemsize
    return columns * parameter.itemsize


def _experts(stepper: ShardedStepper, batches: Sequence[Samples]) -> dict[str, int]:
    """(G - 1) P (M E + X) for activations and gates, (G - 1) P O E for outputs; the backward sends as much."""
    wire = stepper.experts.wire
    most = max(len(batches[rank]) for rank in _ranks(wire.group))
    # In the run's precision, as gem.sharding.experts sends them.
    size = 2 if stepper.config.precision == "bf16" else next(stepper.model.parameters()).itemsize
    given, taken = 0, 0
    for layer in cast(Any, stepper.model.interactions):
        given += layer.tokens * layer.dim + layer.gate.out_features
        taken += layer.shortcut.out_features * layer.dim
    if wire.size == 1:
        return {}
    each = 2 * (wire.size - 1) * most * size
    return {"experts' activations": each * given, "experts' outputs": each * taken}


# -- tables


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group)


class _Asked:
    """Which rows of which table the ranks of a step ask for."""

    def __init__(self, stepper: ShardedStepper, batches: Sequence[Samples]) -> None:
        self.tables: ShardedTables = stepper.tables
        mesh = stepper.meshes.tables
        names = mesh.mesh_dim_names
        assert names is not None
        # [replica, owner]: ranks
        self.grid: list[list[int]] = (mesh.mesh if names[0] == "table_replica" else mesh.mesh.T).tolist()
        self.ids = [_ids(stepper, batch) for batch in batches]
        self.replica, self.owner = stepper.tables.replicas.rank, stepper.tables.owners.rank

    def count(self, table: Table, rank: int, owner: int) -> int:
        """Distinct ids that a rank asks of an owner."""
        return len(self._within(table, self.ids[rank][table.name], owner))

    def touched(self, table: Table, replica: int, owner: int) -> Tensor:
        """Distinct rows of an owner's piece that all ranks of one replica ask for, in the piece's numbers."""
        ids = torch.cat([self.ids[rank][table.name] for rank in self.grid[replica]]).unique()
        return self._within(table, ids, owner) - self.rows(table, owner).start

    def rows(self, table: Table, owner: int) -> Range:
        """That an owner answers for; of a table cut in columns all, also where it has no column."""
        return Range(0, table.rows) if table.cut == "column" else self.tables.placement.piece(table, owner).rows

    def columns(self, table: Table, owner: int) -> int:
        """Of an owner."""
        return len(self.tables.placement.piece(table, owner).columns)

    def _within(self, table: Table, ids: Tensor, owner: int) -> Tensor:
        rows = self.rows(table, owner)
        return ids[(ids >= rows.start) & (ids < rows.stop)]


def _ids(stepper: ShardedStepper, batch: Samples) -> dict[str, Tensor]:
    """Distinct ids of a batch by table: of its features and of the events that the model reads."""
    schema, config = stepper.model.schema, stepper.model.config
    found: dict[str, list[Tensor]] = {table.name: [] for table in schema.tables}
    for feature in schema.ids:
        found[feature.table].append(batch.ids[feature.name])
    for name in (config.history, config.keys):
        for feature in schema.sequence(name).features if name is not None else ():
            found[feature.table].append(batch.sequences[name].ids[feature.name])  # type: ignore[index]
    return {name: torch.cat(parts).unique() if parts else torch.zeros(0) for name, parts in found.items()}


def _tables(stepper: ShardedStepper, batches: Sequence[Samples]) -> dict[str, int]:
    tables, asked = stepper.tables, _Asked(stepper, batches)
    found: dict[str, int] = defaultdict(int)
    owners, copies, own = tables.owners.size, tables.replicas.size, list(tables.tables.values())
    group, me = asked.grid[asked.replica], asked.owner
    held, sums = next(iter(tables.weights.values())).itemsize, next(iter(tables.sums.values())).itemsize
    address = tables.roads.id_type.itemsize
    kinds = len({(table.dim, table.cut == "column") for table in own})  # tables of a kind are counted together
    found["counts"] += (owners - 1) * kinds * COUNT
    for table in own:
        for other in (g for g in range(owners) if g != me):
            asks, is_asked = asked.count(table, group[me], other), asked.count(table, group[other], me)
            found["ids"] += asks * address
            found["rows"] += is_asked * asked.columns(table, me) * held
            found["gradients"] += asks * asked.columns(table, other) * sums
    if copies == 1 or tables.kind == "v1":
        return found
    found["counts"] += (copies - 1) * kinds * COUNT
    if tables.kind == "v2":
        touched = [[len(asked.touched(table, replica, me)) for table in own] for replica in range(copies)]
        values = [sum(n * asked.columns(t, me) for n, t in zip(of_one, own, strict=True)) for of_one in touched]
        most = max(map(sum, touched)) * address + max(values) * sums
        found["copies' gradients"] += (copies - 1) * most
        return found
    for table in own:
        rows, columns = asked.rows(table, me), asked.columns(table, me)
        found["table shards"] += (copies - 1) * -(-len(rows) // copies) * columns * held
        touched = asked.touched(table, asked.replica, me)
        elsewhere = len(touched) - _inside(touched, Range(0, len(rows)).chunk(copies, asked.replica))
        found["slices' gradients"] += elsewhere * (address + columns * sums)
    return found


def _inside(ids: Tensor, rows: Range) -> int:
    return int(((ids >= rows.start) & (ids < rows.stop)).sum())


# -- sums of a few numbers


def _sums(stepper: ShardedStepper, batches: Sequence[Samples]) -> dict[str, int]:
    world, meshes, tables = stepper.world.size, stepper.meshes, stepper.tables
    size = next(stepper.model.parameters()).itemsize
    sums = next(iter(tables.sums.values())).itemsize
    loss = 8 if size == 8 else 4
    total = sum_bytes(len(batches[0].labels), 4, world) + sum_bytes(1, loss, world)
    total += sum_bytes(1, COUNT, stepper.experts.wire.size)  # samples of the rank that has most
    if stepper.config.clip is not None:
        sizes = [meshes.dense["shard"].size()]
        sizes += [meshes.experts[name].size() for name in ("expert_shard", "expert")] if meshes.plan.expert > 1 else []
        total += sum(sum_bytes(1, size, ranks) for ranks in sizes)
        wires = [tables.owners, *([tables.replicas] if tables.kind == "v3" else [])]
        total += sum(sum_bytes(1, sums, wire.size) for wire in wires)
    asked, cut = _Asked(stepper, batches), 0
    for table in tables.tables.values():
        if table.cut == "column":  # squares of their rows, which no owner has whole
            replicas = range(tables.replicas.size)
            rows = torch.cat([asked.touched(table, replica, 0) for replica in replicas]).unique()
            mine = Range(0, table.rows).chunk(len(replicas), asked.replica)
            cut += _inside(rows, mine) if tables.kind == "v3" else len(rows)
    return {SUMS: total + sum_bytes(cut, sums, tables.owners.size)}
