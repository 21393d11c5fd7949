"""What a step sends: the formula, the senders' own counts and those taken beneath torch.distributed are one number."""

from itertools import pairwise
from typing import Any

import pytest
import sharding_program
import torch
import torch.distributed as dist
from model_data import random_samples, small_schema
from torch.utils._python_dispatch import TorchDispatchMode

from gem.data.samples import Samples
from gem.errors import RequestError
from gem.model import gem_model
from gem.sharding.collectives import Traffic, sum_bytes, telling
from gem.sharding.counting import COPIES, PARAMETERS, Counter
from gem.sharding.mesh import Cluster, Plan, build
from gem.sharding.start import sharded_stepper
from gem.sharding.tables import ShardedTables, drawn
from gem.sharding.volume import step_bytes
from gem.train.config import parse_config
from gem.train.world import World

RANKS = 4
CUTS = {"item": "row", "user": "column", "signal": "table"}
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"replicate": 4},
    "fp8": {"gather": "fp8"},
    "experts on all": {"expert": 4, "tables": "v3", "table_replicas": 4},
    "v2": {"replicate": 2, "tables": "v2", "table_replicas": 2, "cuts": CUTS},
    "all": {"replicate": 2, "expert": 2, "tables": "v3", "table_replicas": 2, "cuts": CUTS},
    "bf16": {"replicate": 2, "expert": 2, "tables": "v3", "table_replicas": 2},  # the run and its tables
}
# Sizes that no number of ranks divides: shards have padding.
SIZES = {"dim": 18, "heads": 1, "head_dim": 16, "layers": 2, "experts": 4, "expert_hidden": 13, "head_hidden": 7}
SHARES = [7, 1, 3, 5]


def batches() -> list[Samples]:
    whole = random_samples([(7 * i) % 40 for i in range(16)], [i % 6 for i in range(16)], seed=1)
    ends = [sum(SHARES[:rank]) for rank in range(RANKS + 1)]
    return [whole.take(a, b) for a, b in pairwise(ends)]


def on_this_rank() -> dict[str, Any]:
    found: dict[str, Any] = {"primitives": primitives()}
    world = World(dist.get_rank(), RANKS, torch.device("cpu"))
    setattr(gem_model, "_table", None)  # noqa: B010 - a rank that made one whole would call it
    for name, plan in PLANS.items():
        document = {"data": {"kind": "synthetic"}, "clip": 0.5, "model": SIZES, "plan": {"gpus": 2, **plan}}
        document["precision"] = "bf16" if name == "bf16" else "fp32"
        stepper = sharded_stepper(small_schema(), parse_config(document, "test"), world)
        if name == "bf16":  # handed out in fp32
            tables, begun = list(stepper.tables.tables.values()), drawn(0, dtype=torch.bfloat16)
            stepper.tables = ShardedTables(
                tables, stepper.meshes, begun, lr=0.1, traffic=stepper.traffic, dtype=torch.float32
            )
            stepper.tables.gather()
            stepper.model.read = stepper.tables.fetch
        wanted = step_bytes(stepper, batches())
        counts = []
        for _ in range(2):  # the first step makes what it needs, and may not send for it
            stepper.traffic.sent.clear()
            with Counter(stepper.meshes, stepper.traffic) as counter:
                stepper.step(batches()[world.rank])
            counts.append((counter.by_purpose(), dict(stepper.traffic.sent)))
        found[name] = (wanted, counts)
        cuts = {table.name: table.cut for table in stepper.tables.tables.values()}
        assert cuts == {name: plan.get("cuts", {}).get(name, "row") for name in CUTS}
    document["plan"] = {"gpus": 2, "transport": "copy_engine"}
    with pytest.raises(RequestError, match=r"plan\.transport = 'copy_engine': the ranks are on cpu; it needs GPUs"):
        sharded_stepper(small_schema(), parse_config(document, "test"), world)
    return found


def primitives() -> dict[str, Any]:
    """Bytes of single collectives, whose numbers are known; and one that the counter does not know."""
    meshes, rank = build(Plan(2), Cluster(1, 2, 2), "cpu"), dist.get_rank()
    x, found = torch.ones(6, dtype=torch.float64), {}
    calls = {
        "gather": lambda: dist.all_gather_into_tensor(x.new_empty(24), x),
        "scatter": lambda: dist.reduce_scatter_tensor(x.new_empty(2), x.new_ones(8)),
        "sum": lambda: dist.all_reduce(x),
        "exchange": lambda: dist.all_to_all_single(
            x.new_empty(4 * (rank + 1)), x.new_ones(10), [rank + 1] * 4, [1, 2, 3, 4]
        ),
        "alone": lambda: dist.all_gather_into_tensor(x.new_empty(6), x, group=meshes.experts.get_group("expert")),
        "barrier": dist.barrier,
    }
    for name, call in calls.items():
        traffic = Traffic()
        with Counter(meshes, traffic) as counter, telling(name):
            call()
        assert not traffic.sent  # whose purpose is told is counted by its sender
        found[name] = counter.by_purpose().get(name, 0)
    with pytest.raises(RuntimeError, match=r"c10d::broadcast_: not known; accepted: _allgather_base_"), Counter(meshes):
        dist.broadcast(x, 0)
    assert isinstance(Counter(meshes), TorchDispatchMode)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    return sharding_program.on_ranks(RANKS, tmp_path_factory.mktemp("volume"), on_this_rank)


def test_single_collectives_send_what_their_definition_says(found):
    for rank, one in enumerate(found):
        # Six numbers of eight bytes to three others; two; twice a part of ceil(6 / 4); all of ten but its own share.
        wanted = {"gather": 144, "scatter": 48, "sum": 96, "exchange": 8 * (10 - rank - 1), "alone": 0, "barrier": 0}
        assert one["primitives"] == wanted


@pytest.mark.parametrize("plan", PLANS)
def test_formula_senders_and_counter_agree_to_the_byte(plan, found):
    for one in found:
        wanted, counts = one[plan]
        for counted, sent in counts:
            told = [{what: n for what, n in of_one.items() if n} for of_one in (wanted, counted, sent)]
            assert told[0] == told[1] == told[2]


def test_what_is_sent_is_what_the_plan_is_for(found):
    sent = {plan: found[0][plan][0] for plan in PLANS}
    assert not sent["ddp"].get(PARAMETERS) and sent["ddp"][COPIES] > 0
    assert 0 < sent["fp8"][PARAMETERS] < sent["fp8"]["dense gradients"]
    assert sent["experts on all"]["experts' activations"] and not sent["experts on all"].get("experts' parameters")
    assert sent["v2"]["copies' gradients"] and sent["all"]["table shards"] and sent["all"]["slices' gradients"]


def test_a_sum_is_a_scatter_and_a_gather():
    assert [sum_bytes(n, 4, 4) for n in (0, 1, 4, 5, 8)] == [0, 24, 24, 48, 48]
    assert sum_bytes(100, 8, 1) == 0
