"""Meshes: where each dimension of a plan lies, and what becomes of a plan that does not fit."""

import itertools
import tomllib
from typing import Any

import pytest
import sharding_program
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gem.errors import RequestError
from gem.sharding.mesh import Cluster, Plan, build, collectives, complete, described, plans
from gem.sharding.start import placed
from gem.train.config import PlanConfig

PARTS = st.integers(1, 6)


@st.composite
def fitting(draw) -> tuple[Plan, Cluster]:
    """A cluster, and a plan built from factors, so that it fits by construction."""
    replicate, owners, expert = draw(PARTS), draw(PARTS), draw(PARTS)
    size = replicate * owners * expert
    tables = draw(st.sampled_from(["v1", "v2", "v3"]))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    groups = 1 if tables == "v1" else draw(st.sampled_from(divisors))
    gpus = draw(st.sampled_from(divisors))
    hosts = draw(st.sampled_from([n for n in range(1, size // gpus + 1) if size // gpus % n == 0]))
    cluster = Cluster(size // gpus // hosts, hosts, gpus)
    return Plan(replicate, owners * expert, expert, tables, groups), cluster


@given(fitting())
def test_what_is_made_of_factors_fits_and_is_among_all_plans(given):
    plan, cluster = given
    assert complete(plan, cluster) == plan
    assert plan in set(plans(cluster, plan.tables))
    assert complete(Plan(plan.replicate, None, plan.expert), cluster).shard == plan.shard


@given(fitting())
def test_groups_have_the_sizes_of_the_plan(given):
    plan, cluster = given
    sizes = {one.dimension: one.ranks for one in collectives(plan, cluster)}
    assert plan.shard is not None
    assert sizes.get("shard", 1) == plan.shard and sizes.get("replicate", 1) == plan.replicate
    assert sizes.get("expert", 1) == plan.expert
    if plan.expert > 1:
        assert sizes.get("expert_shard", 1) == plan.shard // plan.expert
    assert sizes.get("table_shard", 1) == cluster.size // plan.table_replicas
    assert sizes.get("table_replica", 1) == plan.table_replicas


def test_each_dimension_lies_on_the_tier_that_it_is_made_for():
    """The seeds' picture: two zones of 16 hosts of 8, a copy of the dense parameters a zone, experts within hosts."""
    cluster = Cluster(2, 16, 8)
    tiers = {one.dimension: one.tier for one in collectives(Plan(2, 128, 2, "v3", 8), cluster)}
    assert tiers == {
        "shard": "zone", "replicate": "cluster", "expert": "host", "expert_shard": "zone", "table_shard": "cluster",
        "table_replica": "host",
    }  # fmt: skip
    tiers = {one.dimension: one.tier for one in collectives(Plan(2, 128, tables="v2", table_replicas=2), cluster)}
    assert tiers == {"shard": "zone", "replicate": "cluster", "table_shard": "zone", "table_replica": "cluster"}


def test_a_tier_is_that_of_the_slowest_group():
    """Hosts of four, experts on three: ranks 0 to 2 share a host, 3 to 5 do not."""
    tiers = {one.dimension: one.tier for one in collectives(Plan(1, 12, 3), Cluster(1, 3, 4))}
    assert tiers == {"shard": "zone", "expert": "zone", "expert_shard": "zone", "table_shard": "zone"}
    tiers = {one.dimension: one.tier for one in collectives(Plan(2, 6), Cluster(3, 2, 2))}
    assert tiers == {"shard": "cluster", "replicate": "cluster", "table_shard": "cluster"}


def test_a_run_is_told_which_links_its_collectives_take():
    lines = described(Plan(2, 8, 2, "v3", 2), Cluster(2, 4, 2))
    assert lines[:2] == [
        "plan: dense parameters all-gathered, gradients reduce-scattered: 8 ranks (shard) over the zone's network",
        "plan: dense gradients all-reduced: 2 ranks (replicate) over the network between zones",
    ]
    assert len(lines) == 6 and all(line.startswith("plan: ") for line in lines)
    crossing = [line for line in described(Plan(1, 16, 4), Cluster(2, 4, 2)) if not line.startswith("plan: ")]
    assert crossing == [
        "plan.shard = 16 crosses zones of 8 ranks: parameters go between zones; within a zone: "
        "replicate = 2, shard = 8",
        "plan.expert = 4 crosses hosts of 2 ranks: activations go between hosts; within a host: expert = 2",
    ]


@pytest.mark.parametrize(
    ("plan", "what", "nearest"),
    [
        (Plan(3), "plan.replicate = 3 does not divide 16 ranks", Plan(4, 4)),
        (Plan(2, 4), "plan.replicate = 2 times plan.shard = 4 is not 16 ranks", None),
        (Plan(2, 8, 3), "plan.expert = 3 does not divide plan.shard = 8", Plan(2, 8, 4)),
        (Plan(1, 16, 1, "v1", 2), 'plan.table_replicas = 2, and plan.tables = "v1" lie once on all', Plan(1, 16)),
        (Plan(1, 16, 1, "v2", 5), "plan.table_replicas = 5 does not divide 16 ranks", Plan(1, 16, 1, "v2", 4)),
        (Plan(2, 10**400), "plan.replicate = 2 times", None),
        (Plan(0), "plan.replicate = 0 is less than 1", Plan(1, 16)),
    ],
)
def test_an_impossible_plan_is_refused_with_the_nearest_possible_one(plan, what, nearest):
    with pytest.raises(RequestError) as caught:
        complete(plan, Cluster(2, 2, 4))
    said = str(caught.value)
    assert said.startswith(what) and "(16 ranks: 2 zones, 2 hosts a zone, 4 ranks a host)" in said and "\n" not in said
    told = Plan(**fields_of(said))
    assert complete(told, Cluster(2, 2, 4)) == told
    assert nearest is None or told == nearest


def fields_of(said: str) -> dict[str, Any]:
    """The fields of the plan that a refusal names, as TOML has them."""
    return tomllib.loads(f"plan = {{ {said.partition('nearest that fits: ')[2]} }}")["plan"]


@given(
    st.integers(1, 12), st.integers(1, 12), st.none() | st.integers(1, 12), st.integers(1, 12),
    st.sampled_from(["v1", "v2", "v3"]), st.integers(1, 12), st.integers(1, 3), st.integers(1, 6),
)  # fmt: skip
def test_the_nearest_plan_fits_ranks_and_experts_and_keeps_the_rest(
    size, replicate, shard, expert, tables, groups, zones, experts
):
    cuts: Any = {"it em": "column", "user": "table"}
    p = PlanConfig(
        zones=zones, gpus=2, replicate=replicate, shard=shard, expert=expert, tables=tables, table_replicas=groups,
        cuts=cuts, gather="fp8",
    )  # fmt: skip
    try:
        plan, cluster = placed(p, experts, size)
    except RequestError as refused:
        told = fields_of(str(refused))
        assert told["cuts"] == cuts and told["gather"] == "fp8" and "transport" not in told, told
        plan, cluster = placed(PlanConfig(**told), experts, size)
    assert plan.shard is not None and plan.tables == tables and cluster.size == size
    assert plan.replicate * plan.shard == size and plan.shard % plan.expert == experts % plan.expert == 0


def test_no_cluster_is_empty():
    with pytest.raises(RequestError, match="hosts = 0; accepted: 1 or more"):
        Cluster(1, 0, 8)


def _look() -> dict[str, list[int]]:
    meshes = build(Plan(2, 4, 2, "v3", 2), Cluster(1, 2, 4), "cpu")
    groups = {}
    for mesh in (meshes.dense, meshes.experts, meshes.tables):
        for name in mesh.mesh_dim_names or ():
            groups[name] = dist.get_process_group_ranks(mesh.get_group(name))
    assert meshes.expert_parameters.shape == (2, 2)
    return groups


def test_processes_find_themselves_in_the_groups_that_were_told(tmp_path):
    found = sharding_program.on_ranks(8, tmp_path, _look)
    told = {one.dimension: one.ranks for one in collectives(Plan(2, 4, 2, "v3", 2), Cluster(1, 2, 4))}
    for name, ranks in told.items():
        assert all(rank in groups[name] and len(groups[name]) == ranks for rank, groups in enumerate(found))
        # Every rank of a group names the same group.
        assert all(
            found[a][name] == found[b][name] for a, b in itertools.product(range(8), range(8)) if a in found[b][name]
        )
    assert found[5]["shard"] == [4, 5, 6, 7] and found[5]["replicate"] == [1, 5]
    assert found[5]["expert"] == [4, 5] and found[5]["expert_shard"] == [5, 7]
    assert found[5]["table_replica"] == [4, 5] and found[5]["table_shard"] == [1, 3, 5, 7]
