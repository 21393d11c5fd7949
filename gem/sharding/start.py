"""From a run's configuration to its sharded stepper."""

import math
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from gem.data.schema import Schema
from gem.errors import RequestError
from gem.model import GemModel
from gem.model.gem_model import Read, initial_rows
from gem.sharding.mesh import Cluster, Plan, complete, nearest, toml
from gem.sharding.placement import Piece, Table
from gem.sharding.sm_free import lacking, offer
from gem.sharding.step import ShardedStepper
from gem.sharding.tables import Weights
from gem.train.config import PlanConfig, TrainConfig
from gem.train.starter import told
from gem.train.world import World


def sharded_stepper(schema: Schema, config: TrainConfig, world: World) -> ShardedStepper:
    """By ``config.plan``, from the weights that a run without one begins with. RequestError for what does not fit."""
    assert config.plan is not None
    _refuse_one_process()
    _quiet()
    p = config.plan
    plan, cluster = placed(p, config.sizes().experts, world.size)
    names = [table.name for table in schema.tables]
    if odd := sorted(p.cuts.keys() - set(names)):
        raise RequestError(f"plan.cuts.{odd[0]}: no such table; accepted: {', '.join(names)}")

    def model(read: Read) -> GemModel:
        with world.device:
            return GemModel(schema, config.sizes(), read=read)

    torch.manual_seed(config.seed)  # ranks draw alike, and as one process does: tables, then what is dense
    stepper = ShardedStepper(
        model, schema, config, world, plan, cluster, as_alone(world.device), dict(p.cuts), gather=p.gather,
        transport=p.transport,
    )  # fmt: skip
    world.before_leaving(stepper.tables.release)  # gathered for a step that does not come
    return stepper


def as_alone(device: torch.device) -> Weights:
    """Pieces of what GemModel's tables begin with in one process: all numbers are drawn, and those of the piece kept.

    To be asked for all tables in their order, from the seed on: the generator's place is part of it.
    """

    def weights(table: Table, piece: Piece) -> Tensor:
        rows, columns = piece.rows, slice(piece.columns.start, piece.columns.stop)
        with device:
            found = torch.empty(piece.shape)
            for first, block in initial_rows(table.rows, table.dim):
                start, stop = max(first, rows.start), min(first + len(block), rows.stop)
                if start < stop:
                    found[start - rows.start : stop - rows.start] = block[start - first : stop - first, columns]
        return found

    return weights


def check_plan(config: TrainConfig, world: World) -> None:
    """RequestError for what of ``config.plan`` does not fit and no data are needed to see: before those are read, or
    made of a log for hours. All ranks call it."""
    p = config.plan
    if p is None:
        return
    _refuse_one_process()
    plan, _ = placed(p, config.sizes().experts, world.size)
    if p.transport == "default":
        return
    assert plan.shard is not None
    found = offer(dist.group.WORLD, world.device)  # type: ignore[arg-type]
    if plan.shard < world.size:  # what is between the GPUs of a shard group is seen once there is one
        found = replace(found, ranks=plan.shard, hosts=1, linked=True)
    if missing := lacking(p.transport, found):
        raise RequestError(f"plan.transport = {p.transport!r}: {missing}; accepted here: 'default'")


def _refuse_one_process() -> None:
    if not dist.is_initialized():
        raise RequestError(
            "plan: one process; accepted: two or more of torchrun's (torchrun --nproc-per-node 4 -m gem train …), or "
            "--set plan=none"
        )


def placed(p: PlanConfig, experts: int, size: int) -> tuple[Plan, Cluster]:
    """A configuration's plan on torchrun's ``size`` processes. RequestError that names the nearest that fits."""
    wanted = Plan(p.replicate, p.shard, p.expert, p.tables, p.table_replicas)
    gpus = p.gpus or told("LOCAL_WORLD_SIZE", size, least=1)
    if size % (p.zones * gpus):
        zones, each = _nearest_hosts(p.zones, gpus, size)
        near = nearest(wanted, Cluster(zones, size // zones // each, each), experts)
        hosts = f"plan.gpus = {gpus}" if p.gpus else f"{gpus} ranks a host, as torchrun started them,"
        raise RequestError(
            f"plan.zones = {p.zones} times {hosts} does not divide {size} ranks; accepted, as the nearest that fits: "
            f"{', '.join(filter(None, (str(near), _rest(p, zones, each))))}"
        )
    cluster = Cluster(p.zones, size // p.zones // gpus, gpus)
    return complete(wanted, cluster, experts, _rest(p, p.zones, p.gpus)), cluster


def _nearest_hosts(zones: int, gpus: int, size: int) -> tuple[int, int]:
    """(zones, ranks a host) whose product divides ``size``, by the doublings between them and those wanted."""
    parts = [n for n in range(1, size + 1) if size % n == 0]
    return min(
        ((a, b) for a in parts for b in parts if size % (a * b) == 0),
        key=lambda pair: abs(math.log2(pair[0] / zones)) + abs(math.log2(pair[1] / gpus)),
    )


def _rest(p: PlanConfig, zones: int, gpus: int | None) -> str:
    """What a plan says beside its numbers, as fields of ``[plan]``; of zones and hosts what is not to be seen."""
    said = {"cuts": p.cuts, "gather": p.gather, "transport": p.transport, "zones": zones, "gpus": gpus}
    usual = PlanConfig().model_dump()
    return ", ".join(f"{name} = {toml(value)}" for name, value in said.items() if value != usual[name])


def _quiet() -> None:
    """What torch tells each rank of itself at its first steps; where a rank then fails, nobody would find its line."""
    # Newer names of collectives, which older torch has not.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # No part's output is changed in place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
