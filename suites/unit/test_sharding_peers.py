"""Beside TorchRec's tables and DeepSpeed's ZeRO-3: the same embeddings and losses, on two ranks of gloo."""

import math
from typing import Any

import pytest
import sharding_program
import torch
import torch.distributed as dist
from model_data import random_samples, small_schema
from torch import Tensor

from gem.errors import RequestError
from gem.model import GemModel
from gem.model.gem_model import key
from gem.sharding.mesh import Cluster, Plan, build
from gem.sharding.placement import Cut, Table
from gem.sharding.step import ShardedStepper
from gem.sharding.tables import ShardedTables, sliced
from gem.train.config import TrainConfig, parse_config
from gem.train.world import World

pytest.importorskip("torchrec", reason="torchrec is not installed (ci/requirements-torchrec.txt)")
pytest.importorskip("deepspeed", reason="deepspeed is not installed (ci/requirements-deepspeed.txt)")

RANKS, STEPS, LR, EPS, SAMPLES = 2, 5, 0.1, 1e-8, 6
CLUSTER = Cluster(1, 1, RANKS)
PLANS = {"v1": Plan(1, RANKS), "v2": Plan(1, RANKS, 1, "v2", RANKS), "v3": Plan(1, RANKS, 1, "v3", RANKS)}
CUTS: tuple[Cut, ...] = ("table", "row", "column")
# Rows that ranks do not divide; a table that two features read. TorchRec has one width where it gives rows.
SIZES = {"items": (37, 8), "users": (20, 8), "ads": (11, 8)}
FEATURES = {"liked": "items", "seen": "items", "who": "users", "ad": "ads"}
# fp32 on both sides, in another order: a row's gradient is a sum of some ten numbers near 1, whose last bits differ by
# 1e-7 of it; five Adagrad steps of 0.1 carry that into weights near 1.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
SHARES = [(4, 4), (7, 1), (2, 5), (3, 3)]
# None for AdamW's first steps, which divide small gradients by their own size.
DENSE: dict[str, Any] = {"data": {"kind": "synthetic"}, "lr": 1e-3, "clip": 0.5, "warmup": 0, "model": {
    "dim": 16, "heads": 2, "layers": 1, "experts": 2, "expert_hidden": 16, "head_hidden": 16, "feed_forward": 1.0,
}}  # fmt: skip


def whole() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(*size, generator=draw) for name, size in SIZES.items()}


def jagged(step: int, rank: int) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """(table, ids, lengths, noise [ids, D]) of each feature; samples without ids, a feature without any."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for number, table in enumerate(FEATURES.values()):
        rows, dim = SIZES[table]
        lengths = torch.randint(0, 5, (SAMPLES,), generator=draw) * int((step + number + rank) % 4 > 0)
        ids = torch.randint(rows, (int(lengths.sum()),), generator=draw)
        found.append((table, ids, lengths, torch.randn(len(ids), dim, generator=draw)))
    return found


def offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def gradients_of(rows: list[Tensor], asked: list[tuple[str, Tensor, Tensor, Tensor]]) -> list[Tensor]:
    return [
        noise[: len(x)] if len(noise) >= len(x) else noise.new_ones(x.shape)
        for x, (*_, noise) in zip(rows, asked, strict=True)
    ]


def ours(plan: Plan, cut: Cut, pooled: bool, **options: Any) -> dict[str, Any]:
    listed = [Table(name, *size, cut) for name, size in SIZES.items()]
    tables = ShardedTables(listed, build(plan, CLUSTER, "cpu"), sliced(whole()), lr=LR, eps=EPS, **options)
    read = []
    for step in range(STEPS):
        asked = jagged(step, dist.get_rank())
        tables.zero_grad()
        tables.gather()
        if pooled:
            rows = tables.pooled([(table, ids, offsets(lengths)) for table, ids, lengths, _ in asked])
        else:
            rows = tables.fetch([(table, ids) for table, ids, _, _ in asked])
        torch.autograd.backward(rows, gradients_of(rows, asked))
        tables.release()
        tables.exchange_gradients()
        tables.step()
        read.append([x.detach() for x in rows])
    return {"read": read, "held": tables.held, "weights": tables.weights, "sums": tables.sums}


def theirs(cut: Cut, pooled: bool) -> dict[str, Any]:
    from gem.baselines.torchrec_tables import TorchRecLookups

    listed = [Table(name, *size, cut) for name, size in SIZES.items()]
    tables = TorchRecLookups(listed, FEATURES, sliced(whole()), lr=LR, eps=EPS, pooled=pooled)
    read = []
    for step in range(STEPS):
        asked = jagged(step, dist.get_rank())
        rows = tables.fetch([(ids, lengths) for _, ids, lengths, _ in asked])
        torch.autograd.backward(rows, gradients_of(rows, asked))
        read.append([x.detach() for x in rows])
    return {"read": read, "shards": [tuple(shard) for shard in tables.shards]}


def raced(cut: Cut) -> dict[str, Any]:
    """A step of the race's contestant, and what it says of its weights."""
    from gem.baselines.torchrec_tables import TorchRecTables

    one = TorchRecTables(SIZES, whole(), lr=LR, eps=EPS, cut=cut)
    table, ids, lengths, _ = jagged(1, dist.get_rank())[2]
    target = torch.ones(SAMPLES, SIZES[table][1])
    before = one.weights()
    losses = [one.step([(table, ids, offsets(lengths), target)])]
    after = one.weights()
    losses.append(one.step([(table, ids, offsets(lengths), target)]))
    with pytest.raises(RequestError, match="a table once"):
        one.step([(table, ids, offsets(lengths), target)] * 2)
    return {"before": before, "after": after, "losses": losses, "asked": (table, ids, lengths, target)}


def dense_config() -> TrainConfig:
    return parse_config(DENSE, "test")


def batch_of(step: int, rank: int) -> Any:
    whole_batch = random_samples(
        [(7 * i + 3 * step) % 20 for i in range(sum(SHARES[step]))], [2] * sum(SHARES[step]), seed=step
    )
    first = sum(SHARES[step][:rank])
    return whole_batch.take(first, first + SHARES[step][rank])


def dense() -> dict[str, list[float]]:
    from gem.baselines.deepspeed_dense import Zero3

    config, rank = dense_config(), dist.get_rank()
    torch.manual_seed(config.seed)
    model = GemModel(small_schema(), config.sizes())
    tables = {table.name: model.tables[key(table.name)].detach() for table in small_schema().tables}
    world = World(rank, RANKS, torch.device("cpu"))
    stepper = ShardedStepper(model, small_schema(), config, world, Plan(1), CLUSTER, sliced(tables))
    found: dict[str, list[float]] = {"ours": [], "theirs": [], "norms": []}
    for step in range(len(SHARES)):
        stepper._set_rates = lambda: setattr(stepper.tables, "lr", 0.0)  # type: ignore[method-assign]
        done = stepper.step(batch_of(step, rank))
        found["ours"].append(float(done.loss))
        found["norms"].append(float(done.norm))  # type: ignore[arg-type]
    peer = Zero3(small_schema(), config, rank=rank, ranks=RANKS)
    peer.set_table_rate(0.0)
    found["theirs"] = [float(peer.step(batch_of(step, rank))) for step in range(len(SHARES))]
    peer.close()
    return found


def everything() -> dict[str, Any]:
    from gem.baselines.torchrec_tables import no_2d_on

    found: dict[str, Any] = {"2d": no_2d_on(torch.device("cpu"))}
    for cut in CUTS:
        for pooled in (False, True):
            mine = {name: ours(plan, cut, pooled, whole_rows=False) for name, plan in PLANS.items()}
            found[f"{cut} {pooled}"] = mine | {"theirs": theirs(cut, pooled)}
    found["whole rows"] = ours(PLANS["v1"], "column", True)
    found["raced"] = {cut: raced(cut) for cut in CUTS}
    return found | {"dense": dense()}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """By rank."""
    return sharding_program.on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), everything)


def assembled(of_ranks: list[dict[str, Any]], kind: str) -> dict[str, Tensor]:
    """Whole tables out of what ranks hold; NaN where nobody holds anything."""
    tables = {name: torch.full(size, math.nan) for name, size in SIZES.items()}
    for one in of_ranks:
        pieces = (
            one["shards"] if kind == "theirs" else [(n, p, one["weights"][n], None) for n, p in one["held"].items()]
        )
        for name, piece, weight, _ in pieces:
            tables[name][piece.rows.start : piece.rows.stop, piece.columns.start : piece.columns.stop] = weight
    return tables


# Over one owner and two replicas no columns are cut, which is another optimizer to TorchRec.
@pytest.mark.parametrize(("cut", "plan"), [(c, p) for c in CUTS for p in PLANS if c != "column" or p == "v1"])
@pytest.mark.parametrize("pooled", [False, True], ids=["rows", "sums"])
def test_embeddings_are_torchrecs(cut, pooled, plan, found):
    name = f"{cut} {pooled}"
    for one in found:
        for mine, other in zip(one[name][plan]["read"], one[name]["theirs"]["read"], strict=True):
            for a, b in zip(mine, other, strict=True):
                torch.testing.assert_close(a, b, **TOLERANCE)
    mine = assembled([one[name][plan] for one in found], "ours")
    other = assembled([one[name]["theirs"] for one in found], "theirs")
    for table, before in whole().items():
        torch.testing.assert_close(mine[table], other[table], **TOLERANCE)
        assert (mine[table] - before).abs().max() > 0.1  # it has learnt


@pytest.mark.parametrize("cut", CUTS)
def test_adagrads_sums_are_torchrecs(cut, found):
    for one in found:
        held = one[f"{cut} True"]["v1"]
        for table, piece, _, sums in one[f"{cut} True"]["theirs"]["shards"]:
            assert held["held"][table] == piece
            torch.testing.assert_close(held["sums"][table], sums, **TOLERANCE)


def test_of_columns_torchrec_learns_each_part_by_itself(found):
    """One process learns rows by the mean over whole rows: ShardedTables too, unless it is told to do as TorchRec."""
    alone, apart = (
        assembled([of(one) for one in found], "ours")
        for of in (lambda x: x["whole rows"], lambda x: x["column True"]["v1"])
    )
    assert max(float((alone[name] - apart[name]).abs().max()) for name in SIZES) > 1e-3


def test_2d_of_torchrec_is_refused_by_itself_on_a_cpu(found):
    assert {one["2d"] for one in found} == {"DMPCollection only supports CUDA or MTIA"}


@pytest.mark.parametrize("cut", CUTS)
def test_the_contestant_learns_by_the_definition(cut, found):
    """Gradients are sums over ranks; the first step of Adagrad from nothing is lr · g / rms(g), of a part's columns."""
    table = found[0]["raced"][cut]["asked"][0]
    gradient, weight = torch.zeros(SIZES[table]), whole()[table]
    for one in found:
        _, ids, lengths, target = one["raced"][cut]["asked"]
        samples = torch.repeat_interleave(torch.arange(SAMPLES), lengths)
        out = torch.zeros(target.shape).index_add_(0, samples, weight[ids])
        assert float(one["raced"][cut]["losses"][0]) == pytest.approx(
            float((out - target).square().sum() / 2), rel=1e-5
        )
        gradient.index_add_(0, ids, (out - target)[samples])
    parts = gradient.chunk(RANKS if cut == "column" else 1, 1)
    learnt = [part / (part.square().mean(1, keepdim=True).sqrt() + EPS) for part in parts]
    wanted = whole() | {table: weight - LR * torch.cat(learnt, 1)}
    for one in found:
        assert all(torch.equal(one["raced"][cut]["before"][name], x) for name, x in whole().items())
        for name, x in one["raced"][cut]["after"].items():
            torch.testing.assert_close(x, wanted[name], **TOLERANCE)
    first, second = (sum(float(one["raced"][cut]["losses"][step]) for one in found) for step in range(2))
    assert second < first


def test_zero3_has_the_losses_of_2d_fsdp(found):
    for one in found:
        # fp32 on both sides, sums in another order.
        assert one["dense"]["ours"] == pytest.approx(one["dense"]["theirs"], rel=1e-5)
        assert min(one["dense"]["norms"]) > DENSE["clip"]  # it clips
        assert len(set(one["dense"]["ours"])) == len(SHARES)
    assert found[0]["dense"] == found[1]["dense"]
