"""Damaged datasets: real files, each broken in one way; the message names file, row and column."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored_samples import SCHEMA, assert_equal, draw, read_all

from gem.data import parquet_columns
from gem.data.parquet import Dataset, write_samples
from gem.data.schema import Table
from gem.errors import RequestError

ROWS = 40  # in two row groups of 20


def dataset(folder: Path, change: Callable[[pa.Table], pa.Table] = lambda table: table, name="a.parquet") -> Path:
    """A file of 40 rows, changed before it is written."""
    table = change(parquet_columns.to_table(SCHEMA, draw(SCHEMA, ROWS)))
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / name, row_group_size=20)
    return folder / name


def set_column(name: str, values: list[Any], kind: pa.DataType | None = None) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        field = pa.field(name, kind or table.schema.field(name).type)
        if pa.types.is_list(field.type):  # nullable inside, so that nulls can be put there
            field = pa.field(name, pa.list_(pa.int64()))
        return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))

    return change


def replace(name: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        values[row] = value
        return set_column(name, values)(table)

    return change


def both(*changes: Callable[[pa.Table], pa.Table]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        for one in changes:
            table = one(table)
        return table

    return change


def seen(row: int, ads: list, kinds: list, times: list) -> Callable[[pa.Table], pa.Table]:
    return both(replace("seen.ad", row, ads), replace("seen.kind", row, kinds), replace("seen.time", row, times))


VALUES = {
    "id too large": (replace("ad", 25, 50), "row 26, column ad: id 50; accepted: 0 to 49, the rows of table ad"),
    "id negative": (replace("kind", 3, -1), "row 4, column kind: id -1; accepted: 0 to 2, the rows of table kind"),
    "id null": (replace("ad", 25, None), "row 26, column ad: null; accepted: a value in every row"),
    "key null": (replace("key", 0, None), "row 1, column key: null; accepted: a value in every row"),
    "float null": (replace("hour", 39, None), "row 40, column hour: null; accepted: a value in every row"),
    "float infinite": (replace("hour", 22, np.inf), "row 23, column hour: inf; accepted: finite numbers"),
    "event's id too large": (
        seen(21, [1, 2, 50], [0, 1, 2], [5, 5, 6]),
        "row 22, column seen.ad, event 3: id 50; accepted: 0 to 49, the rows of table ad",
    ),
    "list null": (replace("seen.kind", 21, None), "row 22, column seen.kind: null; accepted: a value in every row"),
    "event null": (
        seen(21, [1, None, 3], [0, 1, 2], [5, 5, 6]),
        "row 22, column seen.ad, event 2: null; accepted: a value for every event",
    ),
    "lists of two lengths": (
        seen(30, [1, 2, 3], [0, 1], [5, 5, 6]),
        "row 31, column seen.kind: a list of 2; accepted: 3 events, as in seen.ad",
    ),
    "lists of two lengths, as many events in all": (
        both(seen(30, [1, 2], [0], [5, 5]), seen(31, [1, 2], [0, 1, 1], [5, 5])),
        "row 31, column seen.kind: a list of 1; accepted: 2 events, as in seen.ad",
    ),
    "times fewer than events": (
        seen(30, [1, 2, 3], [0, 1, 1], [5, 5]),
        "row 31, column seen.time: a list of 2; accepted: 3 events, as in seen.ad",
    ),
    "list over-long": (replace("others.ad", 33, [1] * 5), "row 34, column others.ad: 5; accepted: at most 4 events"),
    "times fall": (
        seen(20, [1, 2, 3], [0, 1, 2], [5, 7, 6]),
        "row 21, column seen.time, event 3: 6 after 7; accepted: times that do not fall",
    ),
    "label no 0 or 1": (
        replace("label.ctr", 24, 0.5),
        "row 25, column label.ctr: 0.5; accepted: 0, 1 or null",
    ),
    "label NaN": (replace("label.ctr", 24, np.nan), "row 25, column label.ctr: nan; accepted: 0, 1 or null"),
    "label where given is 0": (
        both(replace("label.ctr", 24, 0.0), replace("label.cvr", 24, 0.0)),
        "row 25, column label.cvr: 0.0; accepted: null, since label.ctr is not 1",
    ),
    "label where given is null": (
        both(replace("label.ctr", 24, None), replace("label.cvr", 24, 1.0)),
        "row 25, column label.cvr: 1.0; accepted: null, since label.ctr is not 1",
    ),
}


@pytest.mark.parametrize("damage", VALUES)
def test_a_bad_value_is_named_with_its_row(tmp_path, damage):
    change, expected = VALUES[damage]
    path = dataset(tmp_path / "set", change)
    with pytest.raises(RequestError) as caught:
        read_all(Dataset.open(path.parent))
    assert str(caught.value) == f"{path}: {expected}"


def test_ties_and_falls_between_samples_are_no_damage(tmp_path):
    times = both(seen(20, [1, 2], [0, 0], [9, 9]), seen(21, [], [], []), seen(22, [1], [0], [3]), seen(23, [], [], []))
    path = dataset(tmp_path / "set", times)
    assert len(Dataset.open(path.parent).read(0, 1)) == 20


def refusal(folder: Path) -> str:
    with pytest.raises(RequestError) as caught:
        Dataset.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(folder))


def test_files_that_are_none(tmp_path):
    assert refusal(tmp_path / "none") == ": no such folder; accepted: a folder of parquet files"
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == ": no file *.parquet in it; accepted: a folder of parquet files"
    path = dataset(tmp_path / "set")
    assert refusal(path) == ": not a folder; accepted: a folder of parquet files"
    whole = path.read_bytes()
    for content in (whole[:-100], whole[: len(whole) // 2], whole[:4], b"", b"a,b\n1,2\n" * 50):
        path.write_bytes(content)
        assert refusal(path.parent).startswith("/a.parquet: broken parquet: ")


def test_columns_that_do_not_fit(tmp_path):
    path = dataset(tmp_path / "set", lambda t: t.drop_columns(["seen.kind"]))
    missing = "/a.parquet: column seen.kind is missing; accepted: one column of type list<int64>"
    assert refusal(path.parent) == missing
    dataset(tmp_path / "set", set_column("kind", ["x"] * ROWS, pa.string()))
    assert refusal(path.parent) == "/a.parquet: column kind is string; accepted: int64"
    dataset(tmp_path / "set", set_column("hour", [1.0] * ROWS, pa.float64()))
    assert refusal(path.parent) == "/a.parquet: column hour is double; accepted: float"
    dataset(tmp_path / "set", set_column("seen.ad", [1] * ROWS, pa.int64()))
    assert refusal(path.parent).startswith("/a.parquet: column seen.ad is ")
    dataset(tmp_path / "set", lambda t: t.append_column("key", t.column("key")))
    assert refusal(path.parent) == "/a.parquet: column key is there 2 times; accepted: one column of type int64"


def test_schemas_that_do_not_fit(tmp_path):
    path = dataset(tmp_path / "set", lambda t: t.replace_schema_metadata({}))
    assert refusal(path.parent) == "/a.parquet: no gem.schema in its metadata; accepted: files of write_samples"
    dataset(tmp_path / "set", lambda t: t.replace_schema_metadata({"gem.schema": '{"tables": 3}'}))
    assert refusal(path.parent).startswith("/a.parquet: schema.tables: ")
    dataset(tmp_path / "set")
    other = SCHEMA.model_copy(update={"tables": [Table(name="ad", rows=51), Table(name="kind", rows=3)]})
    metadata = parquet_columns.arrow_schema(other).metadata
    dataset(tmp_path / "set", lambda t: t.replace_schema_metadata(metadata), name="b.parquet")
    assert refusal(path.parent) == "/b.parquet: its schema differs from that of a.parquet; accepted: the same"


def test_a_lost_part_is_missed(tmp_path):
    folder = tmp_path / "set"
    write_samples(folder, SCHEMA, [draw(SCHEMA, 50)], row_group=10, rows_per_file=20)
    (folder / "part-00001-of-00003.parquet").unlink()
    message = refusal(folder)
    assert message.startswith(": 2 files, not those of one dataset: ") and message.endswith("accepted: all of 3 parts")


def test_damage_anywhere_in_a_file_is_an_error_or_harmless(tmp_path):
    """Bytes changed one by one: a RequestError, or the very samples; never others, never another exception."""
    folder = tmp_path / "set"
    batch = draw(SCHEMA, 30)
    write_samples(folder, SCHEMA, [batch])
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(0, len(whole), 400).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ int(rng.integers(1, 256))]) + whole[at + 1 :])
        try:
            data = Dataset.open(folder)
            if data.schema != SCHEMA or data.rows != 30:
                continue  # the footer has no checksum
            found = data.read(0, 0)
            data.lengths()
        except RequestError as error:
            assert str(path) in str(error)
            refused += 1
            continue
        assert_equal(found, batch)
    assert refused > 50
