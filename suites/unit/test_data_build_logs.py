"""Logs as files: every format gives the same samples, broken ones are named; datasets on disk are what was built."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from build_oracle import log_of, plain_samples
from pydantic import ValidationError
from stored_samples import assert_equal

from gem.data.build import PARTS, BuildConfig, Builder, Interactions, Label, build_dataset, build_samples
from gem.data.build import read_interactions as log_from
from gem.data.parquet import Dataset, write_samples
from gem.data.samples import merge
from gem.errors import RequestError
from gem.paths import fixtures_dir

LOGS = fixtures_dir() / "samples"


@pytest.mark.parametrize("name", ["recbole.inter", "recbole.inter.gz", "movielens_ratings.csv", "movielens_quoted.csv",
                                  "movielens_ratings.dat", "u.data"])  # fmt: skip
def test_formats_of_one_log_give_the_same_samples(name):
    config = BuildConfig(history=8)
    raw = (LOGS / "recbole.inter").read_text().splitlines()[1:]
    rows = [(u, i, int(t), float(r)) for u, i, r, t in (line.split("\t") for line in raw)]
    if name in ("u.data", "movielens_quoted.csv"):  # which hold ratings of their own
        found, expected = plain_samples(config, log_from(LOGS / name, config)), plain_samples(config, log_of(rows))
        assert [(x["key"], x["user"], x["history"][0]) for x in found] == [
            (x["key"], x["user"], x["history"][0]) for x in expected
        ]
        return
    assert plain_samples(config, log_from(LOGS / name, config)) == plain_samples(config, log_of(rows))


def test_kuairand_has_clicks_and_milliseconds():
    config = BuildConfig(
        labels=[Label(name="ctr", column="is_click"), Label(name="cvr", column="long_view", given="ctr")]
    )
    raw = [line.split(",") for line in (LOGS / "kuairand.csv").read_text().splitlines()[1:]]
    schema, batches, report = build_samples(LOGS / "kuairand.csv", config=config)
    all_ = merge(list(batches))
    keys = all_.keys.tolist()
    assert sorted(keys) == list(range(66)) and schema.rows("signal") == 2
    assert all_.labels["ctr"].tolist() == [float(raw[k][5]) for k in keys]
    for k, label in zip(keys, all_.labels["cvr"].tolist(), strict=True):
        assert label == float(raw[k][11]) if raw[k][5] == "1" else math.isnan(label)
    times = all_.sequences["history"].times
    assert times is not None and set(times.tolist()) <= {int(line[4]) // 1000 for line in raw}
    ignored = sum(line[11] == "1" and line[5] == "0" for line in raw)
    assert report.labels["cvr"]["ignored"] == ignored


def test_parquet_of_several_types(tmp_path):
    rows = [(f"u{i % 3}", i % 4, 1000 + i, i % 2) for i in range(30)]
    users, items, times, clicks = zip(*rows, strict=True)
    config = BuildConfig(user="who", item="What", time="when", labels=[Label(name="ctr", column="hit")])
    expected = plain_samples(
        config.model_copy(update=dict(labels=[Label(name="ctr", column="hit")])),
        Interactions.of(users, items, times, {"hit": np.array(clicks)}),
    )
    for when, hit in (
        (pa.array(times, pa.int32()), pa.array(clicks, pa.int8())),
        (pa.array([t * 1000 + 7 for t in times], pa.timestamp("ms")), pa.array([bool(x) for x in clicks])),
        (pa.array([t + 0.9 for t in times]), pa.array(clicks, pa.float32())),
        (pa.array([str(t) for t in times]), pa.array([str(x) for x in clicks])),
    ):
        who = pa.array(users).dictionary_encode()
        pq.write_table(pa.table({"who": who, "what": items, "when": when, "hit": hit}), tmp_path / "log.parquet",
                       row_group_size=7)  # fmt: skip
        assert plain_samples(config, log_from(tmp_path / "log.parquet", config)) == expected


def test_time_units(tmp_path):
    path = tmp_path / "log.csv"
    for unit, factor in (("ms", 1000), ("us", 10**6), ("ns", 10**9)):
        path.write_text(
            "user,item,time,rating\n" + "".join(f"a,b,{(1_700_000_000 + i) * factor + 5},4\n" for i in range(9))
        )
        log = log_from(path, BuildConfig(time_unit=unit))  # type: ignore[arg-type]
        assert log.times.tolist() == [1_700_000_000 + i for i in range(9)]
        with pytest.raises(RequestError, match=r"row 9, column time: .* no time in seconds.*accepted: time_unit="):
            log_from(path, BuildConfig())


HEAD = "user_id,item_id,rating,timestamp\n"
GOOD = "a,x,4,10\nb,y,5,20\n"
FAULTS = {
    "empty": ("", ": the file is empty"),
    "no rows": (HEAD, ": no rows; accepted: at least one"),
    "no item": ("user_id,rating,timestamp\na,4,1\n", ":1: no item column among user_id, rating"),
    "no time": ("user_id,item_id,rating\na,x,4\n", ":1: no time column among user_id, item_id"),
    "no rating": ("user_id,item_id,timestamp\na,x,4\n", ":1: no column 'rating'; accepted: user_id, "),
    "rating no number": (HEAD + GOOD + "a,z,good,30\n", ": row 3, column rating: 'good'; accepted: a number"),
    "rating empty": (HEAD + GOOD + "a,z,,30\n", " row 3, column rating: no value; accepted: a number, for the signal"),
    "rating infinite": (HEAD + GOOD + "a,z,inf,30\n", ": row 3, column rating: inf; accepted: a finite number"),
    "time no number": (HEAD + GOOD + "a,z,3,noon\n", ": row 3, column timestamp: 'noon'; accepted: a time in seconds"),
    "time empty": (HEAD + GOOD + "a,z,3,\n", ": row 3, column timestamp: no value; accepted: a time in seconds"),
    "time nan": (HEAD + GOOD + "a,z,3,nan\n", ": row 3, column timestamp: nan; accepted: a time in seconds"),
    "time before all": (
        HEAD + GOOD + f"a,z,3,{-(2**63)}\n",
        f": row 3, column timestamp: {-(2**63)}; accepted: a time in seconds, at most 2^53 s from 1970",
    ),
    "time beyond int64": (
        HEAD + GOOD + f"a,z,3,{2**64}\n", f": row 3, column timestamp: {2**64}; accepted: a time in seconds",
    ),
    "user empty": (HEAD + GOOD + ",z,3,30\n", ": row 3, column user_id: no value; accepted: a value in every row"),
    "fields missing": (HEAD + GOOD + "a,z,3\n", ":4:3: 3 fields; accepted: 4 (user_id, item_id, rating, timestamp)"),
    "one time": (HEAD + "a,x,4,10\nb,x,4,10\na,y,4,10\nb,y,4,10\n", ": no training samples, since the first 80%"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_broken_logs_are_named(tmp_path, kind):
    content, expected = FAULTS[kind]
    path = tmp_path / "log.csv"
    path.write_text(content)
    with pytest.raises(RequestError) as caught:
        build_samples(path)
    message = str(caught.value)
    assert message.startswith(str(path) + ":") and expected in message and "\n" not in message


@pytest.mark.parametrize(("kind", "time", "unit", "words"), [
    (pa.uint64(), 2**63 + 1, None, f"{2**63 + 1}; accepted: a time in seconds"),
    (pa.uint64(), 2**63 + 1, "ns", f"{2**63 + 1}; accepted: a time in 1/1,000,000,000 seconds"),
    (pa.int64(), 2**63 - 1, "s", f"{2**63 - 1}; accepted: a time in seconds, at most 2^53 s from 1970"),
    (pa.int64(), -(2**63), "ms", f"{-(2**63)}; accepted: a time in 1/1,000 seconds, at most 2^53 s from 1970"),
    (pa.timestamp("ms"), 2**63 - 1, None, f"{2**63 - 1}; accepted: a time in 1/1,000 seconds, at most 2^53 s"),
])  # fmt: skip
def test_times_of_parquet_that_are_none_are_named(tmp_path, kind, time, unit, words):
    path = tmp_path / "log.parquet"
    times = pa.array([10, 20, time], pa.int64() if pa.types.is_timestamp(kind) else kind).cast(kind)
    pq.write_table(pa.table({"user": ["a"] * 3, "item": ["x"] * 3, "rating": [4] * 3, "timestamp": times}), path)
    with pytest.raises(RequestError) as caught:
        build_samples(path, config=BuildConfig(time_unit=unit))
    assert str(caught.value).startswith(f"{path}: row 3, column timestamp: {words}")


def test_whole_numbers_of_any_size_are_values(tmp_path):
    path = tmp_path / "log.parquet"
    ratings = pa.array([1, 2**53 + 1, 2**64 - 1], pa.uint64())
    pq.write_table(pa.table({"user": ["a"] * 3, "item": ["x"] * 3, "rating": ratings, "timestamp": [1, 2, 3]}), path)
    assert log_from(path, BuildConfig()).values["rating"].tolist() == [1.0, 2.0**53, 2.0**64]


def test_labels_that_do_not_fit():
    log = Interactions.of(
        "aabb", "xyxy", [1, 2, 3, 4], {"click": np.array([0, 1, 2, 1]), "buy": np.array([0, np.nan, 0, 0])}
    )
    with pytest.raises(RequestError, match="row 3, column click: 2; accepted: 0 or 1, or at_least="):
        Builder(log, BuildConfig(labels=[Label(name="ctr", column="click")]))
    labels = [Label(name="ctr", column="click", at_least=1), Label(name="cvr", column="buy", given="ctr")]
    with pytest.raises(RequestError, match="row 2, column buy: no value; accepted: a number, for label cvr"):
        Builder(log, BuildConfig(labels=labels))
    log.values["click"][1] = 0  # where it is not defined no value is needed
    assert Builder(log, BuildConfig(labels=labels, split=(0.5, 0.25, 0.25))).report.labels["cvr"]["undefined"] == 2
    # A value that is missing is not the value 0: rows that differ in that are no repeats.
    same = Interactions.of("aab", "xxy", [1, 1, 2], {"click": np.zeros(3), "buy": np.array([0, np.nan, 0])})
    assert Builder(same, BuildConfig(labels=labels)).report.duplicates == 0
    gone = Interactions.of("aab", "xxy", [1, 1, 2], {"click": np.zeros(3), "buy": np.array([np.nan, np.nan, 0])})
    assert Builder(gone, BuildConfig(labels=labels)).report.duplicates == 1
    for wrong in (
        dict(split=(0.5, 0.1, 0.1)),
        dict(split=(0.0, 0.5, 0.5)),
        dict(labels=[]),
        dict(labels=[dict(name="cvr", column="x", given="ctr")]),
        dict(signal=dict(column="x", edges=[2, 1])),
        dict(history=0),
        dict(histroy=5),
    ):
        with pytest.raises(ValidationError):
            BuildConfig.model_validate(wrong)


# ---- on disk


def test_a_built_dataset_is_what_was_built(tmp_path):
    config = BuildConfig(history=6, audience=3, batch=7)
    path = LOGS / "recbole.inter"
    report = build_dataset(path, tmp_path / "out", config)
    builder = Builder(path, config)
    for part in PARTS:
        data = Dataset.open(tmp_path / "out" / part)
        assert data.schema == builder.schema and data.rows == report.parts[part]
        assert_equal(merge([data.read(0, g) for g in range(len(data.groups[0]))]), merge(list(builder.batches(part))))
    assert report == builder.report
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == json.loads(json.dumps(report.values()))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "report.json", "test", "train", "valid", "vocabulary",
    ]  # fmt: skip
    # The vocabulary says whom each row stands for.
    raw = [line.split("\t") for line in path.read_text().splitlines()[1:]]
    all_ = merge(list(builder.batches()))
    for column, name in enumerate(("user", "item")):
        table = pq.read_table(tmp_path / "out" / "vocabulary" / f"{name}.parquet").to_pydict()
        assert table["id"] == list(range(1, builder.schema.rows(name)))
        value_of = dict(zip(table["id"], table["value"], strict=True))
        for key, row in zip(all_.keys.tolist(), all_.ids[name].tolist(), strict=True):
            assert value_of.get(row, raw[key][column]) == raw[key][column]
    with pytest.raises(RequestError, match="out: the folder is not empty"):
        build_dataset(path, tmp_path / "out", config)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_empty_part_is_a_dataset_too(tmp_path):
    report = build_dataset(LOGS / "recbole.inter", tmp_path / "out", BuildConfig(split=(0.9, 0.0, 0.1)))
    assert report.parts["valid"] == 0 and report.starts["valid"] is None
    assert Dataset.open(tmp_path / "out" / "valid").rows == 0
    with pytest.raises(RequestError, match="part 'dev'; accepted: train, valid, test"):
        Builder(LOGS / "recbole.inter").batches("dev")


def test_write_in_other_batches_is_the_same(tmp_path):
    for size in (1, 5, 1000):
        builder = Builder(LOGS / "u.data", BuildConfig(batch=size))
        write_samples(tmp_path / str(size), builder.schema, builder.batches())
    a, b, c = ((tmp_path / str(size) / "part-00000-of-00001.parquet").read_bytes() for size in (1, 5, 1000))
    assert a == b == c
