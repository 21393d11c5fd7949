"""Sharded tables: every generation and cut learns what one process learns, and says how much it sent and holds."""

import math
from itertools import pairwise
from typing import Any, cast

import pytest
import sharding_program
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from model_data import small_schema
from tables_program import adagrad_f64

from gem.errors import RequestError
from gem.model import gem_model
from gem.model.config import preset
from gem.sharding.adagrad import rounded
from gem.sharding.mesh import Cluster, Plan, build
from gem.sharding.placement import Cut, Placement, Range, Table
from gem.sharding.start import as_alone
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
CUTS: tuple[Cut, ...] = ("table", "row", "column")
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


def whole_tables_read(plan: Plan) -> list[tuple[str, bool]]:
    """Tables of 1 to 9 rows, each cut in each way: whether all their rows come back as they are, and sums of them."""
    listed = [Table(f"{cut}{rows}", rows, 3, cut) for rows in range(1, 10) for cut in CUTS]
    begun = {t.name: torch.arange(t.rows * 3.0).view(-1, 3) + 100 * t.rows for t in listed}
    tables = ShardedTables(listed, build(plan, CLUSTER, "cpu"), sliced(begun), lr=0.1)
    rows = tables.fetch([(t.name, torch.arange(t.rows)) for t in listed])
    pairs = torch.tensor([0, 1, 1, 2])  # the last row; no row; the first
    sums = tables.pooled([(t.name, torch.tensor([t.rows - 1, 0]), pairs) for t in listed])
    found = []
    for table, row, two in zip(listed, rows, sums, strict=True):
        whole = begun[table.name]
        right = torch.equal(row, whole) and torch.equal(two, torch.stack([whole[-1], torch.zeros(3), whole[0]]))
        found.append((table.name, right))
    return found


def learn_sums(plan: Plan, whole_rows: bool = True) -> dict:
    """As ``learn``, by bags: of each request's ids three to a sample, the last sample without any."""
    tables = ShardedTables(TABLES, build(plan, CLUSTER, "cpu"), sliced(whole()), lr=0.1, whole_rows=whole_rows)
    read = []
    for step in range(STEPS):
        tables.zero_grad()
        asked = [
            (name, ids.flatten(), rows.reshape(-1, rows.shape[-1]))
            for name, ids, rows in requests_of(step, 0, dist.get_rank())
        ]
        sums = tables.pooled([(name, ids, ends_of(len(ids))) for name, ids, _ in asked])
        read.append([x.detach() for x in sums])
        torch.autograd.backward(sums, [by_sample(rows) for *_, rows in asked])
        tables.exchange_gradients()
        tables.step(0.5)
    return {"read": read, "held": tables.held, "weights": tables.weights, "sums": tables.sums}


def ends_of(ids: int) -> torch.Tensor:
    return torch.tensor([*range(0, ids, 3), ids, ids])


def by_sample(rows: torch.Tensor) -> torch.Tensor:
    """Gradients of the samples: each first of three ids' noise."""
    return torch.cat([rows[::3], rows.new_ones(1, rows.shape[1])])


def learn_in_bf16(plan: Plan, gradient: float = 1.0, steps: int = 40) -> dict:
    """Steps of Adagrad on all rows, of constant gradients: from 1 down, by less and less."""
    listed = [Table("t", 40, 64), Table("c", 6, 8, "column")]
    begun = {t.name: torch.ones(t.rows, t.dim, dtype=torch.bfloat16) for t in listed}
    tables = ShardedTables(listed, build(plan, CLUSTER, "cpu"), sliced(begun), lr=1e-3, dtype=torch.float32)
    for step in range(steps):
        tables.zero_grad()
        rows = tables.fetch([(t.name, torch.arange(t.rows)) for t in listed])
        factor = gradient * (1 + 0.01 * math.sin(step))
        torch.autograd.backward(rows, [torch.full_like(x, factor / RANKS) for x in rows])
        tables.exchange_gradients()
        tables.step()
    kinds = {str(x.dtype) for x in rows} | {str(x.dtype) for x in tables.sums.values()}
    return {"weights": tables.weights, "sums": tables.sums, "memory": tables.memory_bytes(), "kinds": sorted(kinds)}


def raise_(error: Exception) -> None:
    raise error


def ask_wrongly(plan: Plan) -> list[str]:
    tables = ShardedTables([Table("t", 8, 4)], build(plan, CLUSTER, "cpu"), drawn(0), lr=0.1)
    said = []
    wrong = [("u", torch.tensor([0])), ("t", torch.tensor([8])), ("t", torch.tensor([-1])), ("t", torch.ones(2))]
    for name, ids in wrong:
        with pytest.raises(RequestError) as caught:
            tables.fetch([(name, ids)])
        said.append(str(caught.value))
    for offsets in ([], [0, 1], [1, 2], [0, 2, 1, 2]):
        with pytest.raises(RequestError, match=r"table 't': offsets .* of ids \(2,\); accepted: \[samples \+ 1\]"):
            tables.pooled([("t", torch.tensor([1, 2]), torch.tensor(offsets, dtype=torch.int64))])
    with pytest.raises(RequestError, match=r"table 't': offsets of torch.float32; accepted: int32, int64"):
        tables.pooled([("t", torch.tensor([1, 2]), torch.tensor([0.0, 2.0]))])
    odd: dict[str, Any]
    for odd in ({"lr": math.nan}, {"lr": -1.0}, {"lr": 0.1, "eps": 0.0}, {"lr": 0.1, "initial": -1.0}):
        with pytest.raises(RequestError, match=r"tables: (lr|eps|initial) \S+; accepted: finite, \S+ or more"):
            ShardedTables([Table("t", 8, 4)], build(plan, CLUSTER, "cpu"), drawn(0), **odd)
    with pytest.raises(RequestError, match="tables: none; accepted: one or more"):
        ShardedTables([], build(plan, CLUSTER, "cpu"), drawn(0), lr=0.1)
    narrow = torch.tensor([1, 2], dtype=torch.int32)
    wide = tables.pooled([("t", narrow, torch.tensor([0, 2], dtype=torch.int32))])[0]
    assert torch.equal(wide, tables.pooled([("t", narrow.long(), torch.tensor([0, 2]))])[0])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(LookupError) as numbers:
        patch.setitem(tables._groups[0].offsets, "t", 2**31)  # as if so many rows came before
        patch.setattr("gem.sharding.tables.RowRoute", lambda roads, numbered, *_: raise_(LookupError(numbered)))
        tables.fetch([("t", narrow)])
    assert numbers.value.args[0][0].tolist() == [2**31 + 1, 2**31 + 2]
    with pytest.raises(RequestError, match="id 8; accepted: 0 to 7"):
        tables.pooled([("t", torch.tensor([8]), torch.tensor([0, 1]))])
    return said


def everything() -> dict:
    """All that needs ranks, in one group: processes take longer to start than to learn."""
    counted = {name: count_bytes(PLANS[name]) for name in ("v1", "v2", "v3")}
    found = {name: learn(plan) for name, plan in PLANS.items()} | {"counted": counted, "said": ask_wrongly(PLANS["v1"])}
    found |= {f"{name} sums": learn_sums(plan) for name, plan in PLANS.items()}
    found |= {f"{name} bf16": learn_in_bf16(PLANS[name]) for name in ("v1", "v2", "v3")}
    return found | {f"{name} read": whole_tables_read(plan) for name, plan in PLANS.items()}


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


@pytest.mark.parametrize("name", PLANS)
def test_sums_are_formed_and_learnt_from_as_in_one_process(name, found, reference_sums):
    for rank, mine in enumerate(one[f"{name} sums"] for one in found):
        for got, want in zip(mine["read"], reference_sums["read"][rank], strict=True):
            for x, y in zip(got, want, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
        for table, piece in mine["held"].items():
            rows, columns = slice(piece.rows.start, piece.rows.stop), slice(piece.columns.start, piece.columns.stop)
            wanted = reference_sums["weights"][table][rows, columns]
            torch.testing.assert_close(mine["weights"][table], wanted, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(mine["sums"][table], reference_sums["sums"][table][rows], rtol=1e-11, atol=1e-12)


@pytest.fixture(scope="module")
def reference_sums() -> dict:
    """One process, bag by bag."""
    weights = whole()
    sums = {name: torch.zeros(len(weight), dtype=F64) for name, weight in weights.items()}
    read: list[list] = [[] for _ in range(RANKS)]
    for step in range(STEPS):
        gradients: dict[str, list] = {table.name: [] for table in TABLES}
        for rank in range(RANKS):
            read[rank].append([])
            for name, ids, rows in requests_of(step, 0, rank):
                ids, noise = ids.flatten(), by_sample(rows.reshape(-1, rows.shape[-1]))
                ends = ends_of(len(ids)).tolist()
                out = [weights[name][ids[a:b]].sum(0) for a, b in pairwise(ends)]
                read[rank][-1].append(torch.stack(out))
                for number, (a, b) in enumerate(pairwise(ends)):
                    gradients[name].append((ids[a:b], noise[number].expand(b - a, -1)))
        for name, parts in gradients.items():
            ids, rows = (torch.cat(x) for x in zip(*parts, strict=True))
            weights[name], sums[name] = adagrad_f64(weights[name], sums[name], ids, rows, 0.1, 0.5)
    return {"read": read, "weights": weights, "sums": sums}


@pytest.mark.parametrize("name", PLANS)
def test_every_row_is_read_where_replicas_do_not_divide_them(name, found):
    """Shards of fully sharded 2D are padded to be gathered; what is behind the padding must be found."""
    for one in found:
        assert [table for table, right in one[f"{name} read"] if not right] == []
        assert len(one[f"{name} read"]) == 9 * len(CUTS)


@pytest.mark.parametrize("name", ["v1", "v2", "v3"])
def test_bf16_tables_learn_what_fp32_would(name, found):
    """40 steps from 1 by 1e-3 / sqrt(step), each less than half of what lies between bf16's numbers below 1."""
    fell = sum(1e-3 / math.sqrt(step) for step in range(1, 41))
    assert torch.finfo(torch.bfloat16).eps / 4 > 1e-3  # rounded to nearest nothing would move
    mine = [one[f"{name} bf16"] for one in found]
    held = torch.cat([one["weights"]["t"].float().flatten() for one in mine])
    assert 1 - float(held.mean()) == pytest.approx(fell, rel=0.03)  # of 2,560 numbers, to three deviations
    assert len(held.unique()) > 2
    for one in mine:
        assert one["kinds"] == ["torch.float32"]
        assert {x.dtype for x in one["weights"].values()} == {torch.bfloat16}


def test_memory_in_bf16_is_half_the_weights_and_the_sums(found):
    """Of 40 rows of 64 in rows, and 6 rows of 8 in columns: two bytes a number, four a row."""
    memory = [found[0][f"{name} bf16"]["memory"] for name in ("v1", "v2", "v3")]
    assert memory == [10 * 132 + 6 * 8, 20 * 132 + 6 * 12, 10 * 132 + 3 * 12]


def test_copies_in_bf16_round_alike(found):
    for one, other in ((0, 2), (1, 3)):
        for kind in ("weights", "sums"):
            for table in ("t", "c"):
                assert torch.equal(found[one]["v2 bf16"][kind][table], found[other]["v2 bf16"][kind][table])


def test_rounding_is_right_on_average_and_apart_by_row_column_and_value():
    torch.manual_seed(0)
    exact = torch.randn(400, 500) * torch.logspace(-30, 30, 400)[:, None]
    low = (exact.view(torch.int32) & -0x10000).view(torch.float32)  # towards zero
    high = ((exact.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    found = rounded(exact, torch.rand(400), torch.arange(400)).float()
    assert ((found == low) | (found == high)).all()
    share = (exact - low) / (high - low)
    up = (found == high).float()
    for part in range(10):  # rounded up as often as the exact number lies up
        of = (share >= part / 10) & (share < (part + 1) / 10)
        assert float(up[of].mean()) == pytest.approx(float(share[of].mean()), abs=5 * 0.5 / math.sqrt(int(of.sum())))
    same = torch.full((300, 300), 1.0 + 2**-8)  # halfway
    up = (rounded(same, torch.ones(300), torch.arange(300)).float() > 1).float()
    assert float(up.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(up.mean(0).std()) < 0.05 and float(up.mean(1).std()) < 0.05
    other_column = rounded(same, torch.ones(300), torch.arange(300), column=100).float()
    assert torch.equal(other_column[:, :200], rounded(same, torch.ones(300), torch.arange(300)).float()[:, 100:])
    odd = torch.tensor([[math.inf, -math.inf, math.nan, 0.0]])
    assert torch.equal(rounded(odd, torch.ones(1), torch.arange(1)).float().nan_to_num(7), odd.nan_to_num(7))


def test_copies_of_v2_keep_the_same_bits(found):
    for one, other in ((0, 2), (1, 3)):  # ranks of the same shard
        for table in TABLES:
            for kind in ("weights", "sums"):
                assert torch.equal(found[one]["v2"][kind][table.name], found[other]["v2"][kind][table.name])
    for other in range(1, RANKS):  # four copies of all: what four groups learnt has to be added up in one order
        for table in TABLES:
            for kind in ("weights", "sums"):
                assert torch.equal(found[0]["v2-all"][kind][table.name], found[other]["v2-all"][kind][table.name])


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


def test_owners_begin_with_what_one_process_begins_with(monkeypatch):
    """Tables and, drawn behind them, all that is dense, whatever the blocks in which numbers are drawn."""
    monkeypatch.setattr(gem_model, "_BLOCK", 7)
    assert [(first, len(rows)) for first, rows in gem_model.initial_rows(20, 2)] == [(0, 7), (7, 7), (14, 6)]
    schema, sizes = small_schema(), preset("tiny", dim=16, heads=1)
    torch.manual_seed(3)
    whole = gem_model.GemModel(schema, sizes)
    placed = [Table(t.name, t.rows, sizes.table_dim, cut) for t, cut in zip(schema.tables, CUTS, strict=True)]
    for rank in range(3):
        torch.manual_seed(3)
        weights, placement = as_alone(torch.device("cpu")), Placement(placed, 3)
        for table in placed:
            piece = placement.piece(table, rank)
            own = whole.tables[gem_model.key(table.name)][piece.rows.start : piece.rows.stop]
            assert torch.equal(weights(table, piece), own[:, piece.columns.start : piece.columns.stop])
        dense = gem_model.GemModel(schema, sizes, read=lambda requests: [])
        assert all(torch.equal(x, whole.get_parameter(name)) for name, x in dense.named_parameters())


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
