"""From a run's configuration to its sharded stepper."""

import warnings

import torch
import torch.distributed as dist

from gem.data.schema import Schema
from gem.errors import RequestError
from gem.model import GemModel
from gem.model.gem_model import key
from gem.sharding.mesh import Cluster, Plan
from gem.sharding.step import ShardedStepper
from gem.sharding.tables import sliced
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
    torch.manual_seed(config.seed)  # ranks draw alike
    with world.device:
        model = GemModel(schema, config.sizes())
    whole = {name: model.tables[key(name)] for name in names}
    plan = Plan(p.replicate, p.shard, p.expert, p.tables, p.table_replicas)
    stepper = ShardedStepper(
        model, schema, config, world, plan, cluster, sliced(whole), dict(p.cuts), gather=p.gather, transport=p.transport
    )
    world.before_leaving(stepper.tables.release)  # gathered for a step that does not come
    return stepper


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
