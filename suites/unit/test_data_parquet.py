"""Datasets on disk: what is written is read back bit for bit, or nothing is there."""

import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored_samples import SCHEMA, assert_equal, draw, read_all, tensors

from gem.data import parquet_columns
from gem.data.parquet import Dataset, write_samples
from gem.data.samples import Events, Samples, merge
from gem.data.schema import Feature, Schema, SequenceSchema, Table, Task
from gem.errors import RequestError

# ---- round trip


@st.composite
def schemas(draw_: Any) -> Schema:
    tables = [
        Table(name=f"t{i}", rows=draw_(st.integers(1, (1 << 40) - 1) if i else st.integers(1, 3))) for i in range(2)
    ]

    def features(low: int) -> list[Feature]:
        return [Feature(name=f"f{i}", table=f"t{draw_(st.integers(0, 1))}") for i in range(draw_(st.integers(low, 3)))]

    sequences = [
        SequenceSchema(
            name=f"s{i}", features=features(1), longest=draw_(st.integers(1, 20)), timed=draw_(st.booleans())
        )
        for i in range(draw_(st.integers(0, 2)))
    ]
    tasks = [Task(name="a"), Task(name="b", given="a"), Task(name="c")][: draw_(st.integers(1, 3))]
    floats = [f"x{i}" for i in range(draw_(st.integers(0, 2)))]
    return Schema(tables=tables, ids=features(0), floats=floats, sequences=sequences, tasks=tasks)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schema=schemas(),
    sizes=st.lists(st.integers(0, 40), max_size=5),
    row_group=st.integers(1, 30),
    groups_per_file=st.integers(1, 3),
)
def test_what_is_written_is_read(tmp_path_factory, schema, sizes, row_group, groups_per_file):
    folder = tmp_path_factory.mktemp("data") / "set"
    batches = [draw(schema, size, seed) for seed, size in enumerate(sizes)]
    total = sum(sizes)
    per_file = row_group * groups_per_file
    assert write_samples(folder, schema, iter(batches), rows_per_file=per_file, row_group=row_group) == total
    data = Dataset.open(folder)
    assert data.schema == schema and data.rows == total
    # Row groups of the declared size, but for the last; full files, but for the last.
    sizes_found = [rows for groups in data.groups for rows in groups if rows]
    assert sizes_found == [row_group] * (total // row_group) + [total % row_group] * (total % row_group > 0)
    assert [sum(groups) for groups in data.groups[:-1]] == [per_file] * (len(data.files) - 1)
    assert sorted(path.name for path in folder.iterdir()) == [path.name for path in data.files]
    if total:
        written = merge([x for x in batches if len(x)])
        assert_equal(merge([x for x in read_all(data) if len(x)]), written)
        expected = sum((e.lengths for e in written.sequences.values()), torch.zeros(total, dtype=torch.int64))
        assert data.lengths().tolist() == expected.tolist()
        for name, x in data.group_lengths(len(data.files) - 1, 0).items():
            assert x.tolist() == data.read(len(data.files) - 1, 0).sequences[name].lengths.tolist()
    else:
        assert data.lengths().tolist() == []


def test_reading_copies_no_ids_and_warns_of_nothing(tmp_path, monkeypatch):
    write_samples(tmp_path / "set", SCHEMA, [draw(SCHEMA, 300)])
    data = Dataset.open(tmp_path / "set")
    tables = []
    real = parquet_columns.from_table

    def spy(schema, table, place):
        tables.append(table)
        return real(schema, table, place)

    monkeypatch.setattr("gem.data.parquet.from_table", spy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = data.read(0, 0)
    lists = tables[0].column("seen.ad").chunk(0)
    assert samples.sequences["seen"].ids["ad"].data_ptr() == lists.values.buffers()[1].address
    assert samples.keys.data_ptr() == tables[0].column("key").chunk(0).buffers()[1].address


def test_samples_outlive_the_dataset(tmp_path):
    batch = draw(SCHEMA, 2000)
    write_samples(tmp_path / "set", SCHEMA, [batch])
    found = Dataset.open(tmp_path / "set").read(0, 0)
    pa.default_memory_pool().release_unused()
    _ = [np.full(1 << 16, 7) for _ in range(50)]  # whatever was freed is written over
    assert_equal(found, batch)


def test_a_dataset_can_be_pickled_for_workers(tmp_path):
    write_samples(tmp_path / "set", SCHEMA, [draw(SCHEMA, 50)], row_group=20, rows_per_file=40)
    data = Dataset.open(tmp_path / "set")
    again = pickle.loads(pickle.dumps(data))
    assert again.groups == ((20, 20), (10,))
    assert_equal(again.read(0, 1), data.read(0, 1))


def test_tables_of_others_are_read(tmp_path):
    """Large lists, sliced arrays, columns in another order and more of them, a name of one's own."""
    batch = draw(SCHEMA, 30)
    schema = parquet_columns.arrow_schema(SCHEMA)
    table = parquet_columns.to_table(SCHEMA, batch)
    columns = {name: table.column(name) for name in reversed(schema.names)}
    columns["seen.ad"] = columns["seen.ad"].cast(pa.large_list(pa.int64()))
    other = pa.table({**columns, "comment": ["x"] * 30}).replace_schema_metadata(schema.metadata)
    pq.write_table(other, tmp_path / "mine.parquet", row_group_size=7)
    data = Dataset.open(tmp_path)
    assert data.groups == ((7, 7, 7, 7, 2),)
    assert_equal(merge(read_all(data)), batch)
    sliced = parquet_columns.from_table(SCHEMA, table.slice(5, 9), lambda column, row: f"{column} {row}")
    assert_equal(sliced, batch.take(5, 14))


# ---- writing


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "set").mkdir()
    write_samples(tmp_path / "set", SCHEMA, [draw(SCHEMA, 5)])  # an empty one is not
    before = {path: path.read_bytes() for path in (tmp_path / "set").iterdir()}

    def work():
        raise AssertionError("refused only after the work")
        yield

    with pytest.raises(RequestError, match="set: the folder is not empty; accepted: a new or empty folder"):
        write_samples(tmp_path / "set", SCHEMA, work())

    def while_others_write():
        (tmp_path / "raced").mkdir()
        (tmp_path / "raced" / "theirs").write_text("x")
        yield draw(SCHEMA, 6)

    with pytest.raises(RequestError, match="raced: the folder is not empty"):
        write_samples(tmp_path / "raced", SCHEMA, while_others_write())
    assert {path: path.read_bytes() for path in (tmp_path / "set").iterdir()} == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="file: not a folder"):
        write_samples(tmp_path / "file", SCHEMA, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "raced", "set"]


def test_an_error_among_the_batches_leaves_nothing(tmp_path):
    def batches():
        yield draw(SCHEMA, 100)
        raise KeyError("the source broke")

    with pytest.raises(KeyError):
        write_samples(tmp_path / "set", SCHEMA, batches(), row_group=10, rows_per_file=20)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_no_half_dataset(tmp_path):
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from stored_samples import SCHEMA, draw
from gem.data.parquet import write_samples
def batches():
    for i in range(1000):
        yield draw(SCHEMA, 64)
        if i == 3:
            print("writing", flush=True)
            time.sleep(60)
write_samples({str(tmp_path / "set")!r}, SCHEMA, batches(), row_group=64, rows_per_file=64)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
    assert not (tmp_path / "set").exists()
    assert any(path.name.startswith(".set.") for path in tmp_path.iterdir()), "the test killed it too early"
    assert write_samples(tmp_path / "set", SCHEMA, [draw(SCHEMA, 5)]) == 5  # and the next try is not hindered


def spoil(samples: Samples, **changes: Any) -> Samples:
    """The samples with values changed: `name=(place, value)`, names as in tensors() with _ for a space."""
    changed = samples.apply(lambda x: x.clone())
    found = tensors(changed)
    for name, (at, value) in changes.items():
        found[name.replace("_", " ")][at] = value
    return changed


def test_samples_that_could_not_be_read_are_not_written(tmp_path):
    batch = draw(SCHEMA, 10)

    def refused(samples: Samples, **sizes: int) -> str:
        with pytest.raises(RequestError) as caught:
            write_samples(tmp_path / "set", SCHEMA, [draw(SCHEMA, 3), samples], **sizes)
        assert list(tmp_path.iterdir()) == []
        return str(caught.value)

    message = refused(spoil(batch, ids_ad=(4, 50)))
    assert message == "batch 1: row 5, column ad: id 50; accepted: 0 to 49, the rows of table ad"
    assert "row 2, column price: nan; accepted: finite" in refused(spoil(batch, floats=((1, 0), float("nan"))))
    assert "batch 1: ids ad, kind, x; accepted: ad, kind" in refused(
        Samples(batch.keys, {**batch.ids, "x": batch.keys}, batch.floats, batch.sequences, batch.labels)
    )
    message = refused(Samples(batch.keys.int(), batch.ids, batch.floats, batch.sequences, batch.labels))
    assert message.startswith("batch 1: keys: torch.int32 of shape (10,) on cpu; accepted: torch.int64")
    untimed = {**batch.sequences, "seen": Events(batch.sequences["seen"].offsets, batch.sequences["seen"].ids)}
    assert "times missing" in refused(Samples(batch.keys, batch.ids, batch.floats, untimed, batch.labels))
    assert "offsets that fall" in refused(spoil(batch, others_offsets=(3, 10_000)))
    assert "rows_per_file 30, row_group 20; accepted" in refused(batch, rows_per_file=30, row_group=20)


def test_column_names_must_differ():
    clash = SCHEMA.model_copy(update={"floats": ["key"]})
    with pytest.raises(RequestError, match="two columns are named 'key'"):
        parquet_columns.arrow_schema(clash)
