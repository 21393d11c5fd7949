"""Logs to samples: the same as a plain reading of the rules, one sample at a time, and nothing of the future."""

import numpy as np
import pytest
from build_oracle import Oracle, log_of, plain_samples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from stored_samples import assert_equal

from gem.data.build import PARTS, BuildConfig, Builder, Interactions, Signal, build_samples
from gem.data.parquet_columns import check_form, check_samples
from gem.data.samples import merge
from gem.errors import RequestError

rows_ = st.lists(
    st.tuples(
        st.sampled_from("abcde"),
        st.sampled_from("pqrstu"),
        st.integers(-3, 12).map(lambda t: t * 5000),
        st.sampled_from([1.0, 2.5, 3.0, 4.0, 4.5, 5.0]),
    ),
    min_size=1,
    max_size=40,
)


configs = st.builds(
    BuildConfig,
    history=st.integers(1, 6),
    audience=st.integers(1, 4),
    split=st.sampled_from([(0.8, 0.1, 0.1), (0.5, 0.25, 0.25), (1.0, 0.0, 0.0), (0.6, 0.0, 0.4), (0.34, 0.66, 0.0)]),
    duplicates=st.sampled_from(["drop", "keep"]),
    batch=st.integers(1, 9),
)


@settings(max_examples=150, deadline=None)
@given(rows=rows_, config=configs)
def test_same_as_a_plain_reading_of_the_rules(rows, config):
    oracle = Oracle(rows, config)
    if "train" not in oracle.part:
        with pytest.raises(RequestError, match="no training samples"):
            build_samples(log_of(rows), config=config)
        return
    found = plain_samples(config, log_of(rows))
    expected = [oracle.sample(i) for i in range(len(oracle.rows))]
    for one, other in zip(found, expected, strict=True):
        assert one.pop("floats") == pytest.approx(other.pop("floats"), abs=1e-6)
        assert one == other

    # The parts are the whole, in order, and the report counts all of it.
    builder = Builder(log_of(rows), config)
    keys = {part: [k for batch in builder.batches(part) for k in batch.keys.tolist()] for part in PARTS}
    assert keys == {p: [r[0] for r, q in zip(oracle.rows, oracle.part, strict=True) if q == p] for p in PARTS}
    report = builder.report
    assert report.parts == {part: len(k) for part, k in keys.items()}
    assert report.rows == len(rows) == report.samples + report.dropped
    assert report.duplicates == oracle.repeats
    assert report.dropped == (oracle.repeats if config.duplicates == "drop" else 0)
    assert report.users == len({r[0] for r in rows}) and report.items == len({r[1] for r in rows})
    assert report.disordered == sum(any(r[2] > row[2] for r in rows[:i]) for i, row in enumerate(rows))
    assert report.empty == {s: sum(not e[s][0] for e in expected) for s in ("history", "audience")}
    assert report.events == {s: sum(len(e[s][0]) for e in expected) for s in ("history", "audience")}
    assert report.cut == {"history": oracle.cut(1, config.history), "audience": oracle.cut(2, config.audience)}
    assert report.unknown == {"user": report.users - len(oracle.ids[0]), "item": report.items - len(oracle.ids[1])}
    assert report.unknown_ids == {
        "user": sum(e["user"] == 0 for e in expected),
        "item": sum(e["item"] == 0 for e in expected),
        "history.item": sum(e["history"][0].count(0) for e in expected),
        "audience.user": sum(e["audience"][0].count(0) for e in expected),
    }
    for name, n in report.labels.items():
        labels = [e["labels"][name] for e in expected]
        assert (n["positive"], n["negative"], n["undefined"]) == tuple(labels.count(x) for x in (1.0, 0.0, None))
    # Every other event of an owner is past, future or tied; in ordered pairs past and future are as many.
    for name, column in (("history", 1), ("audience", 2)):
        sizes = [sum(r[column] == value for r in oracle.rows) for value in {r[column] for r in oracle.rows}]
        pairs = sum(n * (n - 1) for n in sizes)
        assert pairs == 2 * (report.events[name] + report.cut[name]) + report.tied[name]
    # And the samples are such as the schema admits.
    for batch in builder.batches():
        check_form(builder.schema, batch, "batch")
        check_samples(builder.schema, batch, lambda column, row: f"{column} {row}")


@settings(max_examples=80, deadline=None)
@given(rows=rows_, other=rows_, at=st.integers(0, 39), data=st.data())
def test_the_future_changes_no_sample(rows, other, at, data):
    """Rows later than a time are given other users, items and ratings: all samples up to it stay as they were."""
    rows = sorted(set(rows), key=lambda row: row[2])
    config = BuildConfig(duplicates="keep", history=5, audience=3)
    now = rows[at % len(rows)][2]
    changed = [row if row[2] <= now else (*data.draw(st.sampled_from(other))[:2], row[2], 1.5) for row in rows]
    changed_order = data.draw(st.permutations([row for row in changed if row[2] > now]))
    changed = [row for row in changed if row[2] <= now] + changed_order
    assume("train" in Oracle(rows, config).part)
    before, after = (plain_samples(config, log_of(x)) for x in (rows, changed))
    known = sum(row[2] <= now for row in rows)
    assert before[:known] == after[:known]


@settings(max_examples=80, deadline=None)
@given(rows=rows_, at=st.integers(0, 39), rating=st.sampled_from([1.0, 5.0]))
def test_a_sample_does_not_see_its_own_label(rows, at, rating):
    """Nor do those of the same second: only labels of the changed row itself, and what comes later, may differ."""
    rows = sorted(rows, key=lambda row: row[2])
    at %= len(rows)
    config = BuildConfig(duplicates="keep", history=5, audience=3)
    assume("train" in Oracle(rows, config).part)
    changed = [(*row[:3], rating) if i == at else row for i, row in enumerate(rows)]
    before, after = (plain_samples(config, log_of(x)) for x in (rows, changed))
    for one, other in zip(before, after, strict=True):
        if one["key"] == at:
            del one["labels"], other["labels"]
        if rows[one["key"]][2] <= rows[at][2]:
            assert one == other


# ---- by hand


def test_a_log_by_hand():
    """Unsorted, with ties, a repeated row, an unknown user and item, and a history that is too long."""
    rows = [
        ("u", "x", 400, 5.0),
        ("u", "x", 100, 3.0),
        ("u", "y", 200, 5.0),
        ("u", "z", 200, 1.0),  # with y: neither is the other's past
        ("v", "y", 300, 4.0),
        ("u", "y", 200, 5.0),  # a repeat
        ("w", "q", 500, 4.0),
    ]
    config = BuildConfig(history=2, split=(0.7, 0.15, 0.15))
    samples = {one["key"]: one for one in plain_samples(config, log_of(rows))}
    assert sorted(samples) == [0, 1, 2, 3, 4, 6]
    users, items = dict(u=1, v=2), dict(x=1, y=2, z=3)
    assert samples[1]["history"] == [[], [], []] and samples[1]["audience"] == [[], []]
    assert samples[2]["history"] == samples[3]["history"] == [[items["x"]], [2], [100]]
    assert samples[0]["history"] == [[items["y"], items["z"]], [4, 0], [200, 200]]  # of three the last two
    assert samples[4]["audience"] == [[users["u"]], [4]]
    assert (samples[6]["user"], samples[6]["item"]) == (0, 0)
    assert samples[1]["labels"] == {"ctr": 0.0, "cvr": None} and samples[2]["labels"] == {"ctr": 1.0, "cvr": 1.0}
    report = Builder(log_of(rows), config).report
    assert (report.rows, report.samples, report.duplicates, report.cut["history"]) == (7, 6, 1, 1)
    assert report.tied == {"history": 2, "audience": 0}
    text = "\n".join(report.lines())
    for words in (
        "7 rows, 3 users, 4 items",
        "samples: 6 = train 4 + valid 1 + test 1",
        "ctr: 4 of 6",
        "cvr: 2 of 4, 2 not defined",
        "1 older events cut",
        "2 of the sample's own second",
        "rows out of time order: 5 (sorted)",
        "repeat another: 1 (dropped)",
        "users not in training: 1 (row 0: 1 ids of user",
    ):
        assert words in text, words


def test_hashed_ids_do_not_depend_on_the_log():
    rows = [(f"u{i % 40}", f"i{i % 30}", i, 4.0) for i in range(200)]
    config = BuildConfig(hash_rows=16)
    schema, _, report = build_samples(log_of(rows), config=config)
    assert schema.rows("user") == schema.rows("item") == 16 and report.unknown == {}
    whole = {one["key"]: one for one in plain_samples(config, log_of(rows))}
    part = {one["key"]: one for one in plain_samples(config, log_of(rows[:50]))}
    assert all(part[key]["user"] == whole[key]["user"] and part[key]["item"] == whole[key]["item"] for key in part)
    used = [one["user"] for one in whole.values()]
    assert min(used) >= 0 and max(used) <= 15 and len(set(used)) > 8
    rows_of = {f"u{i}": {one["user"] for k, one in whole.items() if rows[k][0] == f"u{i}"} for i in range(40)}
    assert all(len(x) == 1 for x in rows_of.values())
    counts = [list(map(min, rows_of.values())).count(min(x)) for x in rows_of.values()]
    assert report.sharing["user"] == sum(n > 1 for n in counts)
    assert Builder(log_of(rows), config).vocabularies() == {}
    # Integers and their text are the same id.
    as_text = Interactions.of(["7", "12", "7"], ["1", "2", "3"], [1, 2, 3], {"rating": np.ones(3)})
    as_number = Interactions.of([7, 12, 7], [1, 2, 3], [1, 2, 3], {"rating": np.ones(3)})
    assert plain_samples(config, as_text) == plain_samples(config, as_number)


def test_a_batch_is_its_owners_to_change():
    builder = Builder(log_of([(f"u{i % 5}", f"i{i % 7}", i, 1.0 + i % 5) for i in range(60)]))
    first = list(builder.batches())
    kept = [batch.apply(lambda x: x.clone()) for batch in first]
    for batch in first:
        batch.apply(lambda x: x.zero_())
    for again, before in zip(builder.batches(), kept, strict=True):
        assert_equal(again, before)


def test_long_histories_make_smaller_batches(monkeypatch):
    monkeypatch.setattr("gem.data.build._EVENTS", 100)
    builder = Builder(log_of([("u", f"i{i}", i, 4.0) for i in range(120)]))
    batches = list(builder.batches())
    events = [sum(int(e.offsets[-1]) for e in batch.sequences.values()) for batch in batches]
    assert sum(map(len, batches)) == 120
    assert all(n <= 100 or len(batch) == 1 for n, batch in zip(events, batches, strict=True)) and max(events) > 50


def test_memory_is_that_of_a_batch():
    """Four million events in the histories of 20 000 rows: a batch of 64 holds no more than its share of them."""
    n = 20_000
    rng = np.random.default_rng(0)
    log = Interactions.of(
        rng.integers(0, 40, n), rng.integers(0, 200, n), np.arange(n), {"rating": rng.integers(1, 6, n).astype(float)}
    )
    builder = Builder(log, BuildConfig(batch=64))
    assert builder.report.events["history"] > 4_000_000
    largest = max(batch.nbytes() for batch in builder.batches("test"))
    assert largest < 64 * 600 * 3 * 8 * 1.5


def test_signal_edges():
    log = Interactions.of(
        "a" * 6, "xyzxyz", range(6), {"rating": np.ones(6), "secs": np.array([-1, 0, 3, 10, 11, 2.0])}
    )
    builder = Builder(log, BuildConfig(signal=Signal(column="secs", edges=[0, 3, 10])))
    last = merge(list(builder.batches())).take(5, 6)
    assert last.sequences["history"].ids["signal"].tolist() == [0, 1, 2, 3, 3] and builder.schema.rows("signal") == 4
