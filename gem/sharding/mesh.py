"""From a cluster and a plan to named meshes: which ranks share what, and on which tier their collectives run.

Ranks are numbered as torchrun numbers them: GPU after GPU of a host, host after host of a zone, zone after zone. The
dimension that communicates most lies innermost, where the network is fastest (TECHNIQUES of Meta's GEM: activations of
experts on NVLink, parameters within a zone, gradients of replicas across zones):

    dense parameters    [replicate, shard]                  2D FSDP
    expert parameters   [replicate, expert_shard, expert]   shard = expert_shard * expert; each rank works at one of
                                                            ``expert`` parts of the experts
    tables, V1 and V2   [table_replica, table_shard]        a whole copy in each group of table_shard neighbours
    tables, V3          [table_shard, table_replica]        replicas are neighbours: what a shard's copies share lies on
                                                            the fastest links
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gem.errors import RequestError

Tier = Literal["gpu", "host", "zone", "cluster"]
Tables = Literal["v1", "v2", "v3"]
_TIERS: tuple[Tier, ...] = get_args(Tier)  # from the fastest
# What the links of each tier are called where the technique comes from.
LINKS: dict[Tier, str] = {
    "gpu": "none", "host": "links within a host (GPUs: NVLink)", "zone": "the zone's network",
    "cluster": "the network between zones",
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Zones, hosts a zone, GPUs (or CPU processes) a host."""

    zones: int = 1
    hosts: int = 1
    gpus: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise RequestError(f"cluster: {field.name} = {getattr(self, field.name)}; accepted: 1 or more")

    @property
    def size(self) -> int:
        """Ranks."""
        return self.zones * self.hosts * self.gpus

    def tier_of(self, ranks: Sequence[int]) -> Tier:
        """The slowest tier that a collective between these ranks crosses."""
        if len(set(ranks)) <= 1:
            return "gpu"
        if len({rank // self.gpus for rank in ranks}) == 1:
            return "host"
        return "zone" if len({rank // (self.gpus * self.hosts) for rank in ranks}) == 1 else "cluster"

    def __str__(self) -> str:
        hosts = f"{_count(self.hosts, 'host')}{' a zone' * (self.zones > 1)}"
        return f"{_count(self.zones, 'zone')}, {hosts}, {_count(self.gpus, 'rank')} a host"


@dataclass(frozen=True)
class Plan:
    """How a model lies on a cluster. ``shard`` None: all ranks that ``replicate`` leaves."""

    replicate: int = 1  # copies of the dense parameters
    shard: int | None = None  # ranks that one copy is cut into
    expert: int = 1  # parts that the experts are dealt to, within a shard group
    tables: Tables = "v1"
    table_replicas: int = 1  # groups that work at the tables side by side

    def __str__(self) -> str:
        """As fields of ``[plan]``."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name} = {toml(value)}" for name, value in told.items() if value is not None)


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step."""

    what: str
    dimension: str
    ranks: int  # of a group
    tier: Tier

    def __str__(self) -> str:
        return f"{self.what}: {self.ranks} ranks ({self.dimension}) over {LINKS[self.tier]}"


def complete(plan: Plan, cluster: Cluster, experts: int | None = None, more: str = "") -> Plan:
    """The plan with its ``shard``; RequestError that names the nearest plan that fits where this one does not.

    ``experts``: of a layer of the model, where that is known. ``more``: what else the plan says, as fields of
    ``[plan]`` that the nearest one keeps.
    """
    plan = _with_shard(plan, cluster)
    if wrong := _misfit(plan, cluster, experts):
        near = ", ".join(filter(None, (str(nearest(plan, cluster, experts)), more)))
        raise RequestError(
            f"{wrong} ({_count(cluster.size, 'rank')}: {cluster}); accepted, as the nearest that fits: {near}"
        )
    return plan


def _with_shard(plan: Plan, cluster: Cluster) -> Plan:
    if plan.shard is None and plan.replicate >= 1 and cluster.size % plan.replicate == 0:
        return replace(plan, shard=cluster.size // plan.replicate)
    return plan


def nearest(plan: Plan, cluster: Cluster, experts: int | None = None) -> Plan:
    """Of the plans that fit; itself, with its ``shard``, where it does."""
    wanted = _with_shard(plan, cluster)
    return min(plans(cluster, plan.tables, experts), key=lambda other: _distance(wanted, other, cluster))


def plans(cluster: Cluster, tables: Tables, experts: int | None = None) -> Iterator[Plan]:
    """Every plan that fits; with ``experts`` a layer, where that is said."""
    parts = [n for n in range(1, cluster.size + 1) if cluster.size % n == 0]
    for replicate, expert, groups in itertools.product(parts, parts, parts):
        shard = cluster.size // replicate
        plan = Plan(replicate, shard, expert, tables, groups)
        if not _misfit(plan, cluster, experts):
            yield plan


def _misfit(plan: Plan, cluster: Cluster, experts: int | None) -> str:
    """What does not fit, or nothing."""
    size = cluster.size
    for name in ("replicate", "shard", "expert", "table_replicas"):
        if (value := getattr(plan, name)) is not None and value < 1:
            return f"plan.{name} = {value} is less than 1"
    if plan.shard is None:
        return f"plan.replicate = {plan.replicate} does not divide {size} ranks"
    if plan.replicate * plan.shard != size:
        return f"plan.replicate = {plan.replicate} times plan.shard = {plan.shard} is not {size} ranks"
    if plan.shard % plan.expert:
        return f"plan.expert = {plan.expert} does not divide plan.shard = {plan.shard}"
    if experts is not None and experts % plan.expert:
        return f"plan.expert = {plan.expert} does not divide model.experts = {experts}"
    if plan.tables == "v1" and plan.table_replicas != 1:
        return f'plan.table_replicas = {plan.table_replicas}, and plan.tables = "v1" lie once on all ranks'
    if size % plan.table_replicas:
        return f"plan.table_replicas = {plan.table_replicas} does not divide {size} ranks"
    return ""


def toml(value: Any) -> str:
    """A plain value as TOML has it, on one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{toml(name)} = {toml(inner)}' for name, inner in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _distance(wanted: Plan, other: Plan, cluster: Cluster) -> float:
    """Sum of the factors, in doublings, by which the dimensions differ."""
    shard = wanted.shard if wanted.shard is not None else cluster.size / max(wanted.replicate, 1)
    pairs = (
        (wanted.replicate, other.replicate), (shard, other.shard), (wanted.expert, other.expert),
        (wanted.table_replicas, other.table_replicas),
    )  # fmt: skip
    return sum(abs(math.log2(max(a, 0.5)) - math.log2(b or 1)) for a, b in pairs)


@dataclass(frozen=True)
class _Axes:
    """A mesh before there are processes: sizes and names from the outermost dimension on."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def groups(self, along: str) -> list[list[int]]:
        """Ranks of each group along this dimension."""
        found: list[list[int]] = [[0]]
        for name, size in zip(self.names, self.sizes, strict=True):
            if name == along:
                found = [[rank * size + i for rank in group for i in range(size)] for group in found]
            else:
                found = [[rank * size + i for rank in group] for group in found for i in range(size)]
        return found


def _axes(plan: Plan, cluster: Cluster) -> tuple[_Axes, _Axes, _Axes]:
    assert plan.shard is not None
    dense = _Axes(("replicate", "shard"), (plan.replicate, plan.shard))
    sizes = (plan.replicate, plan.shard // plan.expert, plan.expert)
    experts = _Axes(("replicate", "expert_shard", "expert"), sizes)
    owners = cluster.size // plan.table_replicas
    if plan.tables == "v3":
        return dense, experts, _Axes(("table_shard", "table_replica"), (owners, plan.table_replicas))
    return dense, experts, _Axes(("table_replica", "table_shard"), (plan.table_replicas, owners))


def collectives(plan: Plan, cluster: Cluster) -> list[Collective]:
    """What ranks say to each other in a step, and where; nothing of groups of one."""
    plan = complete(plan, cluster)
    dense, experts, tables = _axes(plan, cluster)
    found = [
        ("dense parameters all-gathered, gradients reduce-scattered", "shard", dense),
        ("dense gradients all-reduced", "replicate", dense),
    ]
    if plan.expert > 1:
        found += [
            ("experts' parameters all-gathered, gradients reduce-scattered", "expert_shard", experts),
            ("activations all-gathered for experts, outputs reduce-scattered", "expert", experts),
        ]
    found.append(("ids and embeddings exchanged (all-to-all)", "table_shard", tables))
    if plan.tables == "v2":
        found.append(("gradients of the tables' copies exchanged", "table_replica", tables))
    if plan.tables == "v3":
        found.append(("table shards all-gathered, updates reduce-scattered", "table_replica", tables))
    told = []
    for what, name, axes in found:
        groups = axes.groups(name)
        if len(groups[0]) > 1:  # where groups lie differently, each step waits for the slowest
            told.append(Collective(what, name, len(groups[0]), max(map(cluster.tier_of, groups), key=_TIERS.index)))
    return told


def described(plan: Plan, cluster: Cluster) -> list[str]:
    """A line for each collective of a step, and one for each that a smaller group would keep on faster links."""
    lines, plan = [], complete(plan, cluster)
    for one in collectives(plan, cluster):
        lines.append(f"plan: {one}")
        of_zone = cluster.hosts * cluster.gpus
        if one.dimension == "shard" and one.tier == "cluster":
            fits = math.gcd(one.ranks, of_zone)
            lines.append(
                f"plan.shard = {one.ranks} crosses zones of {of_zone} ranks: parameters go between zones; "
                f"within a zone: replicate = {cluster.size // fits}, shard = {fits}"
            )
        if one.dimension == "expert" and one.tier != "host":
            lines.append(
                f"plan.expert = {one.ranks} crosses hosts of {cluster.gpus} ranks: activations go between "
                f"hosts; within a host: expert = {math.gcd(one.ranks, cluster.gpus)}"
            )
    return lines


@dataclass(frozen=True, eq=False)
class Meshes:
    """The named meshes of a plan, on the ranks of this job."""

    plan: Plan
    dense: DeviceMesh  # [replicate, shard]
    experts: DeviceMesh  # [replicate, expert_shard, expert]
    tables: DeviceMesh  # [table_replica, table_shard], or V3's the other way round

    @property
    def expert_parameters(self) -> DeviceMesh:
        """[replicate, expert_shard]: what one expert's parameters are cut over."""
        return self.experts["replicate", "expert_shard"]


def build(plan: Plan, cluster: Cluster, device_type: str) -> Meshes:
    """Meshes on the default process group; every rank of it calls this. RequestError where the plan does not fit."""
    plan = complete(plan, cluster)
    made = [init_device_mesh(device_type, axes.sizes, mesh_dim_names=axes.names) for axes in _axes(plan, cluster)]
    return Meshes(plan, *made)
