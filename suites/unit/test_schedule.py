"""Tile lists of gem.kernels.schedule: against a plain enumeration, and kept exactly as long as they hold."""

import gc
import weakref
from itertools import accumulate, pairwise

import pytest
import torch
from attention_laws import offsets
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed: gem.kernels cannot be imported")

from gem.kernels import schedule
from gem.kernels.schedule import FIELDS, NO_SAMPLE, Batch, Limits

PROPERTY = settings(max_examples=150, deadline=None)

length = st.one_of(st.sampled_from([0, 0, 1, 2]), st.integers(0, 90))
side = st.one_of(st.just(-1), st.integers(0, 3), st.integers(4, 100))
blocks = st.sampled_from([1, 7, 16, 32, 64, 128])


@st.composite
def batches(draw, smallest: int = 0):
    """A batch and the lengths it was made of, (queries, keys) a sample, and those behind the last offset at the end."""
    lens = draw(st.lists(st.tuples(length, length), min_size=smallest, max_size=7))
    shared = draw(st.sampled_from([0, 0, 1, 20]))
    if shared:
        lens = [(shared, k) for _, k in lens]
    rest = (0 if shared else draw(st.integers(0, 70)), draw(st.integers(0, 70)))
    q_lens, k_lens = [q for q, _ in lens], [k for _, k in lens]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    q_rows = shared or sum(q_lens) + rest[0]
    batch = Batch(
        None if shared else offsets(q_lens, dtype), offsets(k_lens, dtype), q_rows, sum(k_lens) + rest[1], draw(side),
        draw(side), shared,
    )  # fmt: skip
    return batch, [*lens, rest]


def visited(batch: Batch, side: str, tile: range, q_len: int, k_len: int) -> int:
    """Rows of the other side that any row of the tile sees or is seen by, counted one by one."""

    def sees(i: int, j: int) -> bool:
        position = i + k_len - q_len
        return (batch.left < 0 or j >= position - batch.left) and (batch.right < 0 or j <= position + batch.right)

    if side == "q":
        return sum(any(sees(i, j) for i in tile) for j in range(k_len))
    return sum(any(sees(i, j) for j in tile) for i in range(q_len))


def enumerated(batch: Batch, lens: list[tuple[int, int]], side: str, block: int) -> list[tuple[int, list[int]]]:
    """(rows visited, record) of every tile, sample after sample."""
    q_starts = [0] * len(lens) if batch.shared else [0, *accumulate(q for q, _ in lens)]
    k_starts = [0, *accumulate(k for _, k in lens)]
    found = []
    for sample, (q_len, k_len) in enumerate(lens):
        own = q_len if side == "q" else k_len
        behind = sample == len(lens) - 1
        for row in range(0, own, block):
            tile = range(row, min(row + block, own))
            seen = 0 if behind else visited(batch, side, tile, q_len, k_len)
            kept = (q_len, 0) if side == "q" else (0, k_len)  # of the rest: it sees nothing and nothing sees it
            q, k = kept if behind else (q_len, k_len)
            found.append((seen, [sample, row, q_starts[sample], q, k_starts[sample], k, 0, 0]))
    return found


@PROPERTY
@given(batches(), st.sampled_from("qk"), blocks)
def test_a_list_holds_every_tile_once_the_longest_work_first(batch_and_lens, side, block):
    batch, lens = batch_and_lens
    expected = sorted(enumerated(batch, lens, side, block), key=lambda entry: -entry[0])
    tiles = batch.tiles(side, block)
    assert tiles.dtype == torch.int32 and tiles.shape[1] == FIELDS and tiles.is_contiguous()
    records = tiles.tolist()
    assert records[: len(expected)] == [record for _, record in expected]
    assert all(record[0] == NO_SAMPLE for record in records[len(expected) :])


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from("qk"), blocks)
def test_an_unsorted_list_holds_the_same_records_in_the_batchs_order(batch_and_lens, side, block):
    batch, lens = batch_and_lens
    found = enumerated(batch, lens, side, block)
    expected = [record for _, record in found]
    records = batch.tiles(side, block, sorted=False).tolist()
    assert records[: len(expected)] == expected
    assert all(record[0] == NO_SAMPLE for record in records[len(expected) :])
    by_work = [record for _, record in sorted(found, key=lambda entry: -entry[0])]
    assert batch.tiles(side, block).tolist()[: len(found)] == by_work  # kept apart, though of one batch
    assert batch.tiles(side, block, sorted=False) is batch.tiles(side, block, sorted=False)


@PROPERTY
@given(batches(smallest=1), st.sampled_from("qk"), blocks, st.randoms(use_true_random=False))
def test_shapes_alone_decide_how_long_a_list_is(batch_and_lens, side, block, random):
    """The host learns the grid without reading the device, and nothing is compiled or captured anew for a batch."""
    batch, lens = batch_and_lens
    rows = batch.shared * batch.size if batch.shared and side == "q" else (batch.q_rows, batch.k_rows)[side == "k"]
    assert batch.tiles(side, block).shape[0] <= rows // block + batch.size + 1
    ends = sorted(random.randint(0, batch.k_rows) for _ in range(batch.size))
    other = Batch(
        batch.q_offsets, torch.tensor([0, *ends]), batch.q_rows, batch.k_rows, batch.left, batch.right, batch.shared
    )
    assert other.tiles(side, block).shape == batch.tiles(side, block).shape
    assert len(lens) == batch.size + 1


limits = st.builds(Limits, *[st.sampled_from([0, 1, 20, 64, 1000])] * 2)


@PROPERTY
@given(batches(), limits, st.sampled_from("qk"), blocks)
def test_each_sample_is_within_limits_or_beyond_them(batch_and_lens, limits, side, block):
    batch, lens = batch_and_lens
    q_starts = [0] * len(lens) if batch.shared else [0, *accumulate(q for q, _ in lens)]
    k_starts = [0, *accumulate(k for _, k in lens)]

    def fits(q_len: int, k_len: int) -> bool:
        return q_len <= limits.queries and k_len <= limits.keys

    whole = [[i, 0, q_starts[i], q, k_starts[i], k, 0, 0] for i, (q, k) in enumerate(lens[:-1]) if fits(q, k)]
    whole.sort(key=lambda record: -(record[3] * record[5] + record[3] + record[5]))
    found = batch.samples(limits)
    assert found.dtype == torch.int32 and found.is_contiguous()
    assert found.tolist()[: len(whole)] == whole
    assert [record[0] for record in found.tolist()[len(whole) :]] == [NO_SAMPLE] * (batch.size - len(whole))
    tiles = batch.tiles(side, block).tolist()
    there = [record for record in tiles if record[0] == batch.size or (record[0] >= 0 and not fits(*lens[record[0]]))]
    beyond = batch.tiles(side, block, beyond=limits)
    assert beyond.shape[0] == len(tiles) and beyond.tolist()[: len(there)] == there
    assert all(record[0] == NO_SAMPLE for record in beyond.tolist()[len(there) :])


@PROPERTY
@given(batches(smallest=1), blocks)
def test_blocks_are_samples_of_their_own(batch_and_lens, block):
    batch, lens = batch_and_lens
    starts = [0, *accumulate(k for _, k in lens)]
    expected = [row for (a, b), _ in zip(pairwise(starts), lens[:-1], strict=False) for row in range(a, b, block)]
    cut = batch.blocks(block)
    found = cut.k_offsets.tolist()
    assert cut.q_offsets is cut.k_offsets and (cut.q_rows, cut.k_rows) == (batch.q_rows, batch.k_rows)
    assert found[: len(expected)] == expected
    assert found[len(expected) :] and set(found[len(expected) :]) == {starts[len(lens) - 1]}


@pytest.mark.parametrize("rows", [0, 5, 70])
def test_a_batch_of_no_samples_has_nothing_but_the_rest(rows):
    none = torch.zeros(1, dtype=torch.int64)
    batch = Batch(none, none, rows, rows)
    assert batch.blocks(16) is batch
    for side in "qk":
        found = [record for record in batch.tiles(side, 32).tolist() if record[0] != NO_SAMPLE]
        own = (rows, 0) if side == "q" else (0, rows)
        assert found == [[0, row, 0, own[0], 0, own[1], 0, 0] for row in range(0, rows, 32)]
    shared = Batch(None, none, 4, rows, shared=4)
    assert [record for record in shared.tiles("q", 32).tolist() if record[0] != NO_SAMPLE] == []


# -- keeping -----------------------------------------------------------------------------------------------------------


def samples_of(tiles) -> list[int]:
    """Rows of the samples' keys, in the order of the samples."""
    return [k_len for _, k_len in sorted({(record[0], record[5]) for record in tiles.tolist() if record[0] >= 0})]


def test_layers_share_a_list_and_other_questions_get_their_own():
    o = offsets([5, 9])
    first = Batch(o, o, 14, 14, right=0).tiles("q", 4)
    assert Batch(o, o, 14, 14, right=0).tiles("q", 4) is first
    others = [
        Batch(o, o, 14, 14, right=0).tiles("k", 4), Batch(o, o, 14, 14, right=0).tiles("q", 8),
        Batch(o, o, 14, 14).tiles("q", 4), Batch(o, o, 14, 14, left=2, right=0).tiles("q", 4),
        Batch(o, o, 16, 14, right=0).tiles("q", 4), Batch(o, o, 14, 16, right=0).tiles("q", 4),
        Batch(None, o, 3, 14, right=0, shared=3).tiles("q", 4), Batch(o.clone(), o, 14, 14, right=0).tiles("q", 4),
        Batch(o, o.clone(), 14, 14, right=0).tiles("q", 4),
    ]  # fmt: skip
    assert len({id(x) for x in [first, *others]}) == 1 + len(others)
    cut = Batch(o, o, 14, 14).blocks(4)
    assert Batch(o, o, 14, 14).blocks(4).k_offsets is cut.k_offsets
    assert cut.tiles("q", 4) is Batch(o, o, 14, 14).blocks(4).tiles("q", 4)


@pytest.mark.parametrize("written", ["q", "k"])
@pytest.mark.parametrize("ask", [
    lambda batch: batch.tiles("q", 4), lambda batch: batch.tiles("q", 4, sorted=False),
    lambda batch: batch.samples(Limits(5, 5)),
], ids=["sorted", "unsorted", "samples"])  # fmt: skip
def test_offsets_that_were_written_to_get_a_new_list_and_the_old_one_is_dropped(written, ask):
    q, k = offsets([6, 8]), offsets([6, 8])
    for turn in range(5):
        tiles = ask(Batch(q, k, 14, 14))
        assert sorted(tiles.tolist()) == sorted(ask(Batch(q.clone(), k.clone(), 14, 14)).tolist())
        old = weakref.ref(tiles)
        del tiles
        (q if written == "q" else k)[1] += (-1) ** turn * (turn + 1)
        ask(Batch(q, k, 14, 14))
        gc.collect()
        assert old() is None


def test_lists_of_keys_that_stay_do_not_pile_up():
    """New queries every step, or masks without end, beside keys' offsets that live as long as the model."""
    k, at_once = offsets([6, 8]), []
    for _ in range(5):
        q = offsets([5, 9])
        at_once.append(torch.empty_like(q))  # so that the next queries lie elsewhere
        Batch(q, k, 14, 14).tiles("q", 4)
        del q
    assert len(schedule._kept[id(k)][1]) == 1
    for left in range(3 * schedule._MOST_LISTS):
        Batch(k, k, 14, 14, left=left).tiles("q", 4)
    assert len(schedule._kept[id(k)][1]) <= schedule._MOST_LISTS


def test_nothing_is_kept_of_offsets_that_died():
    gc.collect()
    before = set(schedule._kept)
    o = offsets([5, 9])
    old = weakref.ref(Batch(o, o, 14, 14).tiles("q", 4))
    assert set(schedule._kept) - before == {id(o)} and old() is not None
    del o
    gc.collect()
    assert set(schedule._kept) == before and old() is None


def test_another_tensor_with_the_number_of_a_dead_one_gets_its_own_list():
    old, new = offsets([5, 9]), offsets([3, 11])
    Batch(old, old, 14, 14).tiles("q", 4)
    reference, lists = schedule._kept[id(old)]
    # As if ``new`` had been made where ``old`` was: same id, same address, same version.
    state = schedule._state(new)
    lists = {(*key[:2], (state, state), *key[3:]): value for key, value in lists.items()}
    schedule._kept[id(new)] = reference, lists
    assert samples_of(Batch(new, new, 14, 14).tiles("q", 4)) == [3, 11]
    assert schedule._kept[id(new)][0]() is new  # so that the entry goes when this one does
    del old
    gc.collect()
    assert samples_of(Batch(new, new, 14, 14).tiles("q", 4)) == [3, 11]


def test_another_tensor_of_queries_at_the_same_address_gets_its_own_list():
    numpy = pytest.importorskip("numpy")
    memory, k = numpy.array([0, 5, 14]), offsets([14, 0])
    tiles = []
    for end in (5, 3):  # a tensor's memory is freed and the next one, as young, is made there
        memory[1] = end
        q = torch.from_numpy(memory)
        tiles.append(Batch(q, k, 14, 14).tiles("q", 4).tolist())
        del q
    assert {record[3] for record in tiles[0] if record[0] >= 0} == {5, 9}
    assert {record[3] for record in tiles[1] if record[0] >= 0} == {3, 11}


def test_nothing_is_kept_of_tensors_that_count_no_versions():
    with torch.inference_mode():
        o = offsets([5, 9])
        batch = Batch(o, o, 14, 14)
        assert batch.tiles("q", 4) is not batch.tiles("q", 4) and id(o) not in schedule._kept
        o[1] = 3
        assert samples_of(batch.tiles("q", 4)) == [3, 11]


def test_more_rows_than_a_record_holds_are_refused():
    few = torch.tensor([0, 8])
    for rows in ((2**31, 8, 0), (8, 2**31, 0), (8, 8, 2**31)):
        q_rows, k_rows, shared = rows
        with pytest.raises(ValueError, match=r"32 bits: got 2147483648 rows; accepted: fewer than 2\*\*31"):
            Batch(few, few, q_rows, k_rows, shared=shared)
    Batch(few, few, 2**31 - 1, 2**31 - 1)
