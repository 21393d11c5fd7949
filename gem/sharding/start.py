"""From a run's configuration to its sharded stepper."""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from gem.data.schema import Schema
from gem.errors import RequestError
from gem.model import GemModel
from gem.model.gem_model import Read, initial_rows
from gem.sharding.mesh import Cluster, Plan
from gem.sharding.placement import Piece, Table
from gem.sharding.step import ShardedStepper
from gem.sharding.tables import Weights
from gem.train.config import PlanConfig, TrainConfig
from gem.train.starter import told
from gem.train.world import World


def sharded_stepper(schema: Schema, config: TrainConfig, world: World) -> ShardedStepper:
    """By ``config.plan``, from the weights that a run without one begins with. RequestError for what does not fit."""
    assert config.plan is not None
    if not dist.is_initialized():
        raise RequestError(
            "plan: one process alone; accepted: torchrun's, as in torchrun --nproc-per-node 4 -m gem train"
        )
    _quiet()
    cluster = cluster_of(config.plan, world.size)
    p = config.plan
    names = [table.name for table in schema.tables]
    if odd := sorted(p.cuts.keys() - set(names)):
        raise RequestError(f"plan.cuts.{odd[0]}: no such table; accepted: {', '.join(names)}")

    def model(read: Read) -> GemModel:
        with world.device:
            return GemModel(schema, config.sizes(), read=read)

    torch.manual_seed(config.seed)  # ranks draw alike, and as one process does: tables, then what is dense
    plan = Plan(p.replicate, p.shard, p.expert, p.tables, p.table_replicas)
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


def cluster_of(plan: PlanConfig, size: int) -> Cluster:
    """The cluster that torchrun's ``size`` processes are on."""
    gpus = plan.gpus or told("LOCAL_WORLD_SIZE", size, least=1)
    hosts, rest = divmod(size, plan.zones * gpus)
    if rest or not hosts:
        raise RequestError(
            f"plan: zones = {plan.zones} with gpus = {gpus} a host do not make {size} ranks; accepted: numbers whose "
            "product divides it"
        )
    return Cluster(plan.zones, hosts, gpus)


def _quiet() -> None:
    """What torch tells each rank of itself at its first steps; where a rank then fails, nobody would find its line."""
    # Newer names of collectives, which older torch has not.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # No part's output is changed in place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
