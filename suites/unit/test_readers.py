"""Readers: every sample once, whole and in an order that only the seed decides; resumed anywhere; budgets kept."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from gem.data.reader_cost import Cost, bounds
from gem.data.reader_plan import Plan
from gem.data.reader_select import Picker, select
from gem.data.reader_source import weights_of
from gem.data.readers import READER_STRATEGIES, Batches, MemorySource, Reader, StoredSource
from gem.data.samples import Events, Samples, merge
from gem.data.schema import Schema
from gem.errors import RequestError

SCHEMA = Schema.model_validate({
    "tables": [{"name": "items", "rows": 1000}],
    "ids": [{"name": "item", "table": "items"}],
    "floats": ["age"],
    "sequences": [
        {"name": "history", "features": [{"name": "seen", "table": "items"}], "longest": 9000, "timed": True},
        {"name": "audience", "features": [{"name": "who", "table": "items"}], "longest": 9},
    ],
    "tasks": [{"name": "ctr"}],
})  # fmt: skip


def samples_of(lengths: np.ndarray) -> Samples:
    """Samples 0, 1, … whose every value follows from the sample's key and the event's number."""
    keys = np.arange(len(lengths))
    audience = keys % 4

    def events(length: np.ndarray, timed: bool) -> Events:
        offsets = np.concatenate([[0], np.cumsum(length)])
        of = np.repeat(keys, length)
        number = np.arange(offsets[-1]) - np.repeat(offsets[:-1], length)
        ids = torch.from_numpy(of * 10_000 + number)
        return Events(
            torch.from_numpy(offsets), {"who": ids} if not timed else {"seen": ids}, ids * 2 if timed else None
        )

    return Samples(
        torch.from_numpy(keys),
        {"item": torch.from_numpy(keys * 7)},
        torch.from_numpy(keys[:, None].astype(np.float32)),
        {"history": events(lengths, True), "audience": events(audience, False)},
        {"ctr": torch.from_numpy((keys % 2).astype(np.float32))},
    )


def check_whole(batch: Samples) -> None:
    """Every value of the batch is that of its key."""
    keys = batch.keys
    assert torch.equal(batch.ids["item"], keys * 7)
    assert torch.equal(batch.floats[:, 0], keys.float())
    assert torch.equal(batch.labels["ctr"], (keys % 2).float())
    for name, feature in (("history", "seen"), ("audience", "who")):
        events = batch.sequences[name]
        assert len(events.offsets) == len(keys) + 1 and events.offsets[0] == 0
        length = events.lengths
        number = torch.arange(int(events.offsets[-1])) - events.offsets[:-1].repeat_interleave(length)
        assert torch.equal(events.ids[feature], keys.repeat_interleave(length) * 10_000 + number)
    times = batch.sequences["history"].times
    assert times is not None and torch.equal(times, batch.sequences["history"].ids["seen"] * 2)
    assert torch.equal(batch.sequences["audience"].lengths, keys % 4)


def lengths_of(count: int, seed: int = 0, group: int = 1, mean: float = 2.0) -> np.ndarray:
    """Lognormal lengths; ``group`` neighbours share half of the variance."""
    draw = np.random.default_rng(seed)
    shared = np.repeat(draw.normal(size=-(-count // group)), group)[:count]
    return np.exp(mean + 0.7 * shared + 0.7 * draw.normal(size=count)).astype(np.int64)


def source_of(count: int, chunk: int, **how: Any) -> MemorySource:
    return MemorySource(SCHEMA, samples_of(lengths_of(count, **how)), chunk)


def keys_of(batches: Any) -> list[list[int]]:
    return [batch.keys.tolist() for batch in batches]


class Counting(MemorySource):
    """Remembers what was read."""

    def __init__(self, samples: Samples, chunk: int) -> None:
        super().__init__(SCHEMA, samples, chunk)
        self.reads: list[int] = []

    def read_chunk(self, index: int) -> Samples:
        self.reads.append(index)
        return super().read_chunk(index)


# -- what is read ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(40, 400),
    chunk=st.integers(1, 150),
    ranks=st.integers(1, 3),
    strategy=st.sampled_from(READER_STRATEGIES),
    shuffle=st.sampled_from(["samples", "chunks", "none"]),
    drop_last=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_sample_is_read_once_and_whole_but_for_those_counted(
    count, chunk, ranks, strategy, shuffle, drop_last, seed
):
    source = source_of(count, chunk, seed=seed)
    how = {"batch": 8, "base": 4, "pool": 6, "strategy": strategy, "shuffle": shuffle, "drop_last": drop_last}
    seen: list[int] = []
    for rank in range(ranks):
        reader = Reader(source, **how, seed=seed, rank=rank, ranks=ranks)
        batches = list(Batches(reader))
        assert len(batches) == reader.steps and min(map(len, batches)) > 0
        if strategy != "budget":
            assert {len(b) for b in batches} <= ({8} if drop_last else set(range(1, 9)))
        check_whole(merge(batches))
        seen += itertools.chain.from_iterable(keys_of(batches))
    assert len(seen) == len(set(seen)) == count - reader.dropped
    assert 0 <= reader.dropped < 8 * ranks and f"{reader.dropped} of {count} samples dropped" in reader.describe()
    if strategy == "budget" or not drop_last:
        assert reader.dropped == 0


def test_epochs_differ_in_order_and_in_what_they_drop():
    reader = Reader(source_of(130, 16), batch=32, base=8, pool=8, seed=3, epochs=2)
    found = keys_of(Batches(reader))
    first, second = (sorted(itertools.chain.from_iterable(e)) for e in (found[:4], found[4:]))
    assert len(found) == 8 and found[:4] != found[4:] and first != second
    assert found == keys_of(reader) and reader.dropped == 2
    assert found != keys_of(Reader(reader.source, batch=32, base=8, pool=8, seed=4, epochs=2))
    endless = Reader(reader.source, batch=32, base=8, pool=8, seed=3, epochs=None)
    assert keys_of(itertools.islice(Batches(endless), 9))[:8] == found


def test_what_shuffle_and_none_leave_in_order():
    source = source_of(64, 16)
    as_stored = Reader(source, batch=16, base=4, pool=8, strategy="none", shuffle="none")
    assert list(itertools.chain.from_iterable(keys_of(as_stored))) == list(range(64))
    chunks = keys_of(Reader(source, batch=16, base=4, pool=4, strategy="none", shuffle="chunks"))
    assert sorted(chunks) == np.arange(64).reshape(4, 16).tolist() != chunks
    merged = keys_of(Reader(source, batch=16, base=4, pool=16, strategy="bbs", shuffle="chunks"))
    runs = [keys[i : i + 4] for keys in merged for i in range(0, 16, 4)]
    assert sorted(runs) == np.arange(64).reshape(16, 4).tolist()  # base batches stay whole
    within = keys_of(Reader(source, batch=16, base=4, pool=4, strategy="none", shuffle="samples"))
    assert sorted(map(sorted, within)) == np.arange(64).reshape(4, 16).tolist() and within != chunks


def test_one_process_reads_each_chunk_once_an_epoch():
    source = Counting(samples_of(lengths_of(300)), 10)  # pools of 48: their edges are within chunks
    for strategy in ("samples", "budget"):
        reader = Reader(source, batch=8, base=4, pool=12, strategy=strategy, drop_last=False)
        source.reads = []
        list(reader)
        assert sorted(source.reads) == list(range(30))  # the first one also for its size, before


# -- workers and resuming ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source() -> MemorySource:
    return source_of(400, 23, group=8)


@pytest.mark.parametrize("strategy", ["bbs", "budget"])
def test_workers_do_not_change_the_order(source, strategy):
    reader = Reader(source, batch=16, base=4, pool=12, strategy=strategy, seed=1, epochs=2, rank=1, ranks=2)
    alone = keys_of(Batches(reader))
    assert len(alone) == 24 and reader.plan.batches(reader.plan.pools - 1) == 3
    state = torch.get_rng_state()
    for workers, prefetch in ((1, 2), (3, 1)):
        assert keys_of(Batches(reader, workers=workers, prefetch=prefetch)) == alone
    assert torch.equal(torch.get_rng_state(), state)  # nor what is drawn elsewhere
    assert keys_of(DataLoader(reader, batch_size=None, num_workers=2)) == alone


@pytest.mark.parametrize("strategy", READER_STRATEGIES)
def test_resumed_after_any_batch_the_rest_follows(source, strategy):
    def fresh() -> Batches:
        return Batches(Reader(source, batch=16, base=4, pool=12, strategy=strategy, seed=1, epochs=2))

    whole = keys_of(fresh())
    steps = fresh().reader.steps
    assert len(whole) == 2 * steps == 50
    for count in (*range(1, 12), steps - 1, steps, steps + 1, 2 * steps - 1, 2 * steps):
        first = fresh()
        stream = iter(first)
        assert keys_of(itertools.islice(stream, count)) == whole[:count]
        assert (first.epoch, first.step) == divmod(count, steps)
        second = fresh()
        second.load_state_dict(first.state_dict())
        assert keys_of(second) == whole[count:]
        assert keys_of(stream) == whole[count:] and keys_of(first) == []


def test_resumed_with_other_workers(source):
    reader = Reader(source, batch=16, base=4, pool=12, strategy="samples", seed=1, epochs=2)
    whole = keys_of(Batches(reader))
    first = Batches(reader, workers=2)
    assert keys_of(itertools.islice(first, 7)) == whole[:7]
    second = Batches(reader, workers=3)
    second.load_state_dict(first.state_dict())
    assert keys_of(itertools.islice(second, 20)) == whole[7:27]
    third = Batches(reader)
    third.load_state_dict(second.state_dict())
    assert keys_of(third) == whole[27:]


def test_resuming_reads_no_pool_that_is_done():
    source = Counting(samples_of(lengths_of(320)), 16)
    reader = Reader(source, batch=16, base=4, pool=16, strategy="bbs")
    batches = Batches(reader)
    batches.load_state_dict({"delivered": 17, "reader": reader.key()})
    source.reads = []
    assert len(keys_of(batches)) == 3
    assert len(source.reads) == 4


def test_the_state_of_another_reader_is_refused(source):
    state = Batches(Reader(source, batch=16, base=4, pool=12)).state_dict()
    other = Batches(Reader(source, batch=32, base=4, pool=16))
    with pytest.raises(RequestError, match=r"^reader state: batch 16; accepted: 32, as this reader has it$"):
        other.load_state_dict(state)
    for broken in ({}, {"delivered": "x", "reader": {}}, {"delivered": 1, "reader": 3}):
        with pytest.raises(RequestError, match="not one"):
            other.load_state_dict(broken)
    with pytest.raises(RequestError, match="0 or more"):
        other.load_state_dict({**other.state_dict(), "delivered": -1})


class Broken(MemorySource):
    def read_chunk(self, index: int) -> Samples:
        if index == 2:
            raise RequestError("part-2: row 5, column item: -1; accepted: 0 to 999")
        return super().read_chunk(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_source_refuses_arrives_as_one_line(workers):
    reader = Reader(Broken(SCHEMA, samples_of(lengths_of(64)), 16), batch=8, base=4, pool=4, shuffle="none")
    found = []
    with pytest.raises(RequestError) as error:
        found += Batches(reader, workers=workers)
    assert str(error.value) == "part-2: row 5, column item: -1; accepted: 0 to 999"


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", ["tokens", "pairs", Cost(tokens=1.0, pairs=0.01, samples=20.0)])
def test_batches_cut_by_cost_cost_alike_on_all_ranks(cost):
    source = source_of(8192, 256, group=32, mean=3.0)
    found = {}
    for strategy in ("random", "samples", "budget"):
        readers = [
            Reader(source, batch=256, base=32, pool=32, strategy=strategy, cost=cost, shuffle="chunks", rank=r, ranks=4)
            for r in range(4)
        ]
        found[strategy] = np.array([[readers[0].cost(_lengths(b), len(b)).sum() for b in Batches(r)] for r in readers])
        assert found[strategy].shape == (4, 8)
    cost_N = readers[0].cost(_lengths(source.samples), len(source))
    mean, heaviest = cost_N.sum() / 32, cost_N.max()
    # A cut is wrong by less than the sample it falls on, and so is a deal; the floor of 1/32 adds a few percent.
    assert abs(found["budget"] - mean).max() < heaviest + 0.05 * mean
    spread = {strategy: each.std() for strategy, each in found.items()}
    assert spread["budget"] * 3 < spread["samples"] < spread["random"]


def _lengths(samples: Samples) -> dict[str, np.ndarray]:
    return {name: e.lengths.numpy() for name, e in samples.sequences.items()}


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=300), st.integers(4, 64))
def test_no_stretch_that_weighs_a_batch_is_empty_or_crowded(cost, batch):
    least, most = bounds(np.array(cost), batch)
    weight = np.clip(cost, least, most)
    assert most <= batch * weight.mean() / 2 * (1 + 1e-3) and least * 33 >= weight.mean()


@settings(deadline=None)
@example([5] * 8 + [3000, 4000] + [3] * 7, 16, 3, 0)
@given(
    st.lists(st.sampled_from([0, 1, 3, 20, 400, 9000]), min_size=4, max_size=40), st.sampled_from([4, 8, 16]),
    st.integers(1, 4), st.integers(0, 3),
)  # fmt: skip
def test_batches_cut_by_cost_that_drop_nothing_hold_samples_each(lengths, batch, ranks, seed):
    """Also where batches hold far fewer than ``batch``, down to one."""
    source = MemorySource(SCHEMA, samples_of(np.array(lengths)), 5)
    of = {"batch": batch, "base": 4, "pool": batch // 4, "strategy": "budget", "cost": "pairs", "seed": seed}
    found = [list(Batches(Reader(source, **of, rank=r, ranks=ranks, drop_last=False))) for r in range(ranks)]
    assert {len(each) for each in found} == {-(-len(lengths) // (batch * ranks))}
    assert min(len(batch) for each in found for batch in each) >= 1
    assert sorted(merge([b for each in found for b in each]).keys.tolist()) == list(range(len(lengths)))


def test_a_few_huge_samples_and_many_empty_ones_leave_no_batch_empty():
    lengths = np.zeros(640, dtype=np.int64)
    lengths[::100] = 9000
    source = MemorySource(SCHEMA, samples_of(lengths), 64)
    reader = Reader(source, batch=8, base=4, pool=4, strategy="budget", cost="pairs")
    batches = list(Batches(reader))
    assert len(batches) == 80 and min(map(len, batches)) >= 1 and max(map(len, batches)) <= 8 * 32
    assert sorted(merge(batches).keys.tolist()) == list(range(640))


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4),
    st.integers(0, 3),
)  # fmt: skip
def test_pieces_tile_the_line(weights, ranks, steps, per_pool, seed):
    """Any sample at any place of a chunk is in exactly one pool of one rank."""
    weight_C = np.array(weights)
    draw, found = np.random.default_rng(seed), np.zeros(len(weights))
    weight_of = [draw.integers(1, 9, max(w, 1)).astype(float) for w in weights]
    for rank in range(ranks):
        plan = Plan(weight_C, 1, per_pool, steps, rank, ranks, seed, "samples", True)
        for pool in range(plan.pools):
            for piece in plan.pieces(0, pool):
                start, stop = piece.range(weight_of[piece.chunk], len(weight_of[piece.chunk]))
                found[piece.chunk] += stop - start
    assert found.tolist() == [len(of) if w else 0 for w, of in zip(weights, weight_of, strict=True)]


def test_chunks_weigh_what_their_samples_do_within_bounds():
    weights = weights_of([np.array([0.0, 100.0]), np.array([2.0, 1.0, 1.0])], (1.0, 2.0))
    assert weights.tolist() == pytest.approx([3 / 7 * 5 * 2**20, 4 / 7 * 5 * 2**20], abs=1)


def test_cost_by_hand():
    cost = Cost(tokens=2.0, pairs=0.5, samples=10.0)
    assert cost({"a": np.array([0, 4]), "b": np.array([2, 0])}, 2).tolist() == [10 + 4 + 2, 10 + 8 + 8]


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [0.5, 5.0])  # short samples are gathered, long ones copied
@pytest.mark.parametrize("rows", [[3, 1, 1, 7], list(range(20, 60)), [], [*range(30), *range(50, 80)], [39, 38]])
def test_select_is_the_samples_one_by_one(mean, rows):
    samples = samples_of(lengths_of(80, mean=mean))
    found = select(samples, np.array(rows, dtype=np.int64))
    assert found.keys.tolist() == rows
    check_whole(found)
    if rows:
        wanted = merge([samples.take(r, r + 1) for r in rows])
        assert torch.equal(found.sequences["history"].offsets, wanted.sequences["history"].offsets)
        assert found.keys.untyped_storage().nbytes() == found.keys.nbytes  # not a view of all


def test_a_picker_of_several_parts_is_one_of_their_whole():
    """Short and long samples, whose stretches cross the parts' edges, in turn gathered and copied."""
    lengths = np.concatenate([np.zeros(3), np.full(20, 300), np.zeros(9), np.ones(40)]).astype(np.int64)
    whole = samples_of(lengths)
    picker = Picker([whole.take(a, b) for a, b in itertools.pairwise([0, 2, 10, 10, 26, 29, 50, 72])])
    for rows in (
        range(72),
        range(30, 72),
        range(5, 25),
        range(22, 4, -1),
        [0, 1, 27, 28],
        [71, 3, 40, 4, 5],
        range(28),
    ):
        found = picker.pick(np.array(rows, dtype=np.int64))
        assert found.keys.tolist() == list(rows)
        assert found.sequences["history"].lengths.tolist() == lengths[list(rows)].tolist()
        check_whole(found)


def test_a_stored_dataset_is_read_as_it_was_written(tmp_path):
    parquet = pytest.importorskip("gem.data.parquet")
    wanted = samples_of(lengths_of(100))
    low = Schema.model_validate({**SCHEMA.model_dump(), "tables": [{"name": "items", "rows": 10_000_000}]})
    parquet.write_samples(tmp_path / "data", low, [wanted], rows_per_file=48, row_group=16)
    source = StoredSource(parquet.Dataset.open(tmp_path / "data"))
    assert list(source.chunk_sizes()) == [16] * 6 + [4] and len(source) == 100
    assert source.chunk_lengths(2)["history"].tolist() == wanted.sequences["history"].lengths[32:48].tolist()
    reader = Reader(source, batch=10, base=5, pool=4, strategy="budget", seed=1)
    found = list(Batches(reader, workers=1))
    assert sorted(merge(found).keys.tolist()) == list(range(100))
    check_whole(merge(found))
    memory = MemorySource(low, wanted, 16)
    assert keys_of(found) == keys_of(Reader(memory, batch=10, base=5, pool=4, strategy="budget", seed=1))


@pytest.mark.parametrize(("how", "words"), [
    ({"batch": 10, "base": 4}, "batch a multiple of base"),
    ({"pool": 5}, "a multiple of the 2 base batches"),
    ({"strategy": "best"}, "accepted: none, random, bbs, lpt, samples, budget"),
    ({"shuffle": "yes"}, "accepted: samples, chunks, none"),
    ({"cost": "time"}, "accepted: tokens, pairs, or a Cost"),
    ({"rank": 2, "ranks": 2}, "0 to ranks - 1"),
    ({"epochs": 0}, "epochs >= 1"),
    ({"seed": -1}, "seed >= 0"),
    ({"ranks": 9}, "accepted: 72 samples or more"),
    ({"batch": 2, "base": 1, "strategy": "budget"}, "accepted: 4 or more"),
])  # fmt: skip
def test_bad_requests_say_what_is_accepted(how, words):
    with pytest.raises(RequestError) as error:
        Reader(source_of(64, 16), **{"batch": 8, "base": 4, "pool": 4, **how})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_bad_costs_workers_and_sources_are_refused():
    for cost in ({}, {"tokens": -1.0}, {"pairs": float("nan")}):
        with pytest.raises(RequestError, match="one of them above 0"):
            Cost(**cost)
    reader = Reader(source_of(64, 16), batch=8, base=4, pool=4)
    with pytest.raises(RequestError, match="workers >= 0"):
        Batches(reader, workers=-1)

    class Uneven(MemorySource):
        def read_chunk(self, index: int) -> Samples:
            return super().read_chunk(index).take(0, 16 - index % 2)

    with pytest.raises(RequestError, match=r"^chunk [13]: 15 samples; accepted: 16, as"):
        list(Reader(Uneven(SCHEMA, samples_of(lengths_of(64)), 16), batch=8, base=4, pool=4))
