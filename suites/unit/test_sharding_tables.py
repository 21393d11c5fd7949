"""Sharded tables: every generation and cut learns what one process learns, and says how much it sent and holds."""

import math
from typing import Any, cast

import pytest
import sharding_program
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tables_program import adagrad_f64

from gem.errors import RequestError
from gem.sharding.mesh import Cluster, Plan, build
from gem.sharding.placement import Placement, Range, Table
from gem.sharding.tables import ShardedTables, drawn, sliced

F64 = torch.float64
# Rows and columns that ranks do not divide, a table smaller than the ranks, columns fewer than ranks.
TABLES = [
    Table("items", 37, 6, "row"), Table("few", 3, 4, "row"), Table("users", 20, 5, "table"),
    Table("ads", 11, 2, "table"), Table("wide", 13, 7, "column"), Table("thin", 9, 3, "column"),
]  # fmt: skip
PLANS = {
    "v1": Plan(1, 4), "v2": Plan(1, 4, 1, "v2", 2), "v3": Plan(1, 4, 1, "v3", 2), "v2-all": Plan(1, 4, 1, "v2", 4),
    "v3-all": Plan(1, 4, 1, "v3", 4),
}  # fmt: skip
STEPS, PIECES, RANKS = 5, 2, 4
CLUSTER = Cluster(1, 1, RANKS)


def whole() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {table.name: torch.randn(table.rows, table.dim, dtype=F64, generator=draw) for table in TABLES}


def requests_of(step: int, piece: int, rank: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(table, ids, gradient rows): repeated ids, none at all for some, and a table asked for twice."""
    draw = torch.Generator().manual_seed(1000 * step + 100 * piece + rank)
    found = []
    for number, table in enumerate([*TABLES, TABLES[0]]):
        count = 0 if (rank + number + step) % 4 == 0 else int(torch.randint(1, 15, (), generator=draw))
        shape = (count,) if number % 2 else (count, 1)
        ids = torch.randint(table.rows, shape, generator=draw)
        found.append((table.name, ids, torch.randn(*shape, table.dim, dtype=F64, generator=draw)))
    return found


def learn(plan: Plan) -> dict:
    tables = ShardedTables(TABLES, build(plan, CLUSTER, "cpu"), sliced(whole()), lr=0.1)
    rank, read, norms = dist.get_rank(), [], []
    for step in range(STEPS):
        tables.zero_grad()
        tables.gather()
        for piece in range(PIECES):
            asked = requests_of(step, piece, rank)
            rows = tables.fetch([(name, ids) for name, ids, _ in asked])
            read.append([row.detach() for row in rows])
            torch.autograd.backward(rows, [gradient for _, _, gradient in asked])
        tables.release()
        tables.exchange_gradients()
        norms.append(float(tables.sparse_grad_norm()))
        tables.step(0.5)
    return {
        "read": read, "norms": norms, "held": tables.held, "weights": tables.weights, "sums": tables.sums,
        "sent": dict(tables.traffic.sent),
    }  # fmt: skip


def alone() -> dict:
    """The same in one process, in float64, by the definition of row-wise Adagrad."""
    weights = whole()
    sums = {name: torch.zeros(len(weight), dtype=F64) for name, weight in weights.items()}
    read, norms = {}, []
    for step in range(STEPS):
        everything = [(rank, piece, requests_of(step, piece, rank)) for piece in range(PIECES) for rank in range(RANKS)]
        gradients: dict[str, list] = {table.name: [] for table in TABLES}
        for rank, piece, asked in everything:
            read[rank, step, piece] = [weights[name][ids] for name, ids, _ in asked]
            for name, ids, rows in asked:
                gradients[name].append((ids.flatten(), rows.reshape(-1, weights[name].shape[1])))
        square = 0.0
        for name, parts in gradients.items():
            ids, rows = (torch.cat(x) for x in zip(*parts, strict=True))
            square += float(torch.zeros_like(weights[name]).index_add_(0, ids, rows).square().sum())
            weights[name], sums[name] = adagrad_f64(weights[name], sums[name], ids, rows, 0.1, 0.5)
        norms.append(math.sqrt(square))
    return {"read": read, "norms": norms, "weights": weights, "sums": sums}


def count_bytes(plan: Plan) -> dict:
    """One step of one request a rank: rank r asks for rows r and r + 1 of 8 rows of 4 columns, fp32."""
    tables = ShardedTables([Table("t", 8, 4)], build(plan, CLUSTER, "cpu"), drawn(0), lr=0.1)
    rank = dist.get_rank()
    (rows,) = tables.fetch([("t", torch.tensor([rank, rank + 1]))])
    rows.backward(torch.ones_like(rows))
    tables.exchange_gradients()
    tables.step()
    return dict(tables.traffic.sent) | {"memory": tables.memory_bytes()}


def ask_wrongly(plan: Plan) -> list[str]:
    tables = ShardedTables([Table("t", 8, 4)], build(plan, CLUSTER, "cpu"), drawn(0), lr=0.1)
    said = []
    wrong = [("u", torch.tensor([0])), ("t", torch.tensor([8])), ("t", torch.tensor([-1])), ("t", torch.ones(2))]
    for name, ids in wrong:
        with pytest.raises(RequestError) as caught:
            tables.fetch([(name, ids)])
        said.append(str(caught.value))
    return said


def everything() -> dict:
    """All that needs ranks, in one group: processes take longer to start than to learn."""
    counted = {name: count_bytes(PLANS[name]) for name in ("v1", "v2", "v3")}
    return {name: learn(plan) for name, plan in PLANS.items()} | {"counted": counted, "said": ask_wrongly(PLANS["v1"])}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """By rank."""
    return sharding_program.on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), everything)


@pytest.fixture(scope="module")
def reference() -> dict:
    return alone()


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_learns_what_one_process_learns(name, found, reference):
    covered = {table.name: torch.zeros(table.rows, table.dim, dtype=torch.int64) for table in TABLES}
    for rank, mine in enumerate(one[name] for one in found):
        for number, rows in enumerate(mine["read"]):
            wanted = reference["read"][rank, *divmod(number, PIECES)]
            for got, want in zip(rows, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
        assert mine["norms"] == pytest.approx(reference["norms"], rel=1e-12)
        for table, piece in mine["held"].items():
            rows, columns = slice(piece.rows.start, piece.rows.stop), slice(piece.columns.start, piece.columns.stop)
            wanted = reference["weights"][table][rows, columns]
            torch.testing.assert_close(mine["weights"][table], wanted, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(mine["sums"][table], reference["sums"][table][rows], rtol=1e-11, atol=1e-12)
            covered[table][rows, columns] += 1
    copies = PLANS[name].table_replicas if PLANS[name].tables == "v2" else 1
    assert all((count == copies).all() for count in covered.values())


def test_copies_of_v2_keep_the_same_bits(found):
    for one, other in ((0, 2), (1, 3)):  # ranks of the same shard
        for table in TABLES:
            for kind in ("weights", "sums"):
                assert torch.equal(found[one]["v2"][kind][table.name], found[other]["v2"][kind][table.name])


def test_bytes_that_were_sent_are_those_of_the_formula(found):
    """Rank r holds rows 2r and 2r + 1 in v1: an id of 4 bytes to another owner, 16 bytes of a row back, and again."""
    owner = [0, 0, 1, 1, 2, 2, 3, 3]
    asked = {rank: [owner[i] for i in (rank, rank + 1)] for rank in range(RANKS)}
    for rank, sent in enumerate(one["counted"]["v1"] for one in found):
        others = sum(o != rank for o in asked[rank])
        answered = sum(o == rank for other in range(RANKS) if other != rank for o in asked[other])
        assert sent["counts"] == 8 * (RANKS - 1)
        assert sent.get("ids", 0) == 4 * others and sent.get("rows", 0) == 16 * answered
        assert sent.get("gradients", 0) == 16 * others
    for rank, one in enumerate(found):
        # v3, two shards of four rows: each replica gives the other the two that it keeps. v2 gathers nothing.
        assert one["counted"]["v3"]["table shards"] == 2 * 16, rank
        assert one["counted"]["v2"]["copies' gradients"] > 0 and "table shards" not in one["counted"]["v2"]


def test_memory_of_v3_is_that_of_v1_and_of_v2_a_copy_a_group(found):
    v1, v2, v3 = ([one["counted"][name]["memory"] for one in found] for name in ("v1", "v2", "v3"))
    assert v1 == [2 * (4 * 4 + 4)] * RANKS  # two rows of four columns and a sum, fp32
    assert v3 == v1 and v2 == [2 * x for x in v1]


def test_wrong_requests_are_refused_in_one_line(found):
    for one in found:
        assert one["said"] == [
            "table 'u'; accepted: t", "table 't': id 8; accepted: 0 to 7", "table 't': id -1; accepted: 0 to 7",
            "table 't': ids of torch.float32; accepted: int32, int64",
        ]  # fmt: skip


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 20))
def test_ranges_are_cut_as_torch_cuts(length, ranks, start):
    whole = Range(start, start + length)
    pieces = [whole.chunk(ranks, rank) for rank in range(ranks)]
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(start, start + length))
    chunks = [len(x) for x in torch.arange(length).chunk(ranks)] if length else []
    assert [len(piece) for piece in pieces if len(piece)] == [n for n in chunks if n]


def test_whole_tables_go_to_who_holds_least():
    tables = [Table(name, rows, 4, "table") for name, rows in (("a", 100), ("b", 90), ("c", 60), ("d", 50))]
    placement = Placement(tables, 2)
    load = [sum(t.rows for t in tables if placement.owner[t.name] == rank) for rank in range(2)]
    assert load == [150, 150]


def test_rows_begin_alike_whoever_draws_them():
    table = Table("t", 10_000, 3)
    everything = drawn(5)(table, Placement([table], 1).piece(table, 0))
    parts = [drawn(5)(table, Placement([table], 3).piece(table, rank)) for rank in range(3)]
    assert torch.equal(torch.cat(parts), everything)
    assert float(everything.std()) == pytest.approx(0.05, rel=0.02)
    assert not torch.equal(everything, drawn(5)(Table("u", 10_000, 3), Placement([table], 1).piece(table, 0)))


@pytest.mark.parametrize(
    ("table", "what"),
    [
        (lambda: Table("t", 0, 4), "table 't': 0 rows of 4; accepted: 1 or more"),
        (lambda: Table("t", 1, 4, cast(Any, "diagonal")), "cut 'diagonal'; accepted: table, row, column"),
        (lambda: Placement([Table("t", 1, 1), Table("t", 2, 1)], 1), "accepted: each name once"),
    ],
)
def test_wrong_tables_are_refused(table, what):
    with pytest.raises(RequestError, match=what):
        table()
