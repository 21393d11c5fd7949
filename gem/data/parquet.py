"""Datasets on disk: folders of parquet files, one row a sample, whose metadata carry the schema as JSON.

    write_samples("train", schema, batches)
    data = Dataset.open("train")
    data.rows, data.groups                  all samples; those of each row group of each file
    data.read(file, row_group)              Samples

Columns (int64 but where said): ``key``; one for each of the schema's ids; float32 for each float; for each sequence
lists ``<sequence>.<feature>`` and, if timed, ``<sequence>.time``; float32 ``label.<task>``, null = not defined.
Others are ignored. A damaged file raises RequestError: `FILE: row R, column C: what; accepted: …`, rows from 1.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.parquet_columns import (
    SCHEMA_KEY,
    arrow_schema,
    check_form,
    check_samples,
    check_types,
    from_table,
    lengths_of,
    sequence_columns,
    to_table,
)
from gem.data.samples import Samples, merge
from gem.data.schema import Schema, read_schema
from gem.errors import RequestError

__all__ = ["ROWS_PER_FILE", "ROW_GROUP", "Dataset", "write_samples"]

ROW_GROUP = 128 * 32  # samples that are read at a time: a few dozen base batches
ROWS_PER_FILE = ROW_GROUP * 64

_PART = re.compile(r"-(\d+)-of-(\d+)\.parquet$")


@dataclass(frozen=True, eq=False)
class Dataset:
    """An open dataset. It can be pickled, and holds no file open.

    files       in the order of their names
    groups      for each file, the rows of each of its row groups
    """

    folder: Path
    schema: Schema
    files: tuple[Path, ...]
    groups: tuple[tuple[int, ...], ...]
    _metadata: tuple[Any, ...] = field(repr=False)  # pq.FileMetaData of each file, so that it is parsed once

    @property
    def rows(self) -> int:
        """Samples of all files."""
        return sum(map(sum, self.groups))

    @staticmethod
    def open(folder: str | Path) -> "Dataset":
        """The dataset in `folder`, by its files' metadata; values are looked at when they are read."""
        folder = Path(folder)
        if not folder.is_dir():
            state = "not a folder" if folder.exists() else "no such folder"
            raise RequestError(f"{folder}: {state}; accepted: a folder of parquet files")
        files = tuple(sorted(path for path in folder.glob("*.parquet") if not path.name.startswith(".")))
        if not files:
            raise RequestError(f"{folder}: no file *.parquet in it; accepted: a folder of parquet files")
        _refuse_gaps(folder, files)
        metadata = []
        schema: Schema | None = None
        for path in files:
            found, one = _read_metadata(path)
            metadata.append(found)
            if schema is not None and one != schema:
                raise RequestError(f"{path}: its schema differs from that of {files[0].name}; accepted: the same")
            schema = one
        assert schema is not None
        groups = tuple(tuple(m.row_group(i).num_rows for i in range(m.num_row_groups)) for m in metadata)
        return Dataset(folder, schema, files, groups, tuple(metadata))

    def read(self, file: int, row_group: int) -> Samples:
        """The samples of a row group, checked; most tensors share the memory that parquet was decoded into."""
        before = sum(self.groups[file][:row_group])
        path = self.files[file]
        table = self._table(file, row_group, arrow_schema(self.schema).names)

        def place(column: str, row: int) -> str:
            return f"{path}: row {before + row + 1}, column {column}"

        samples = from_table(self.schema, table, place)
        check_samples(self.schema, samples, place)
        return samples

    def lengths(self) -> np.ndarray:
        """int64 [rows]: events of each sample, of all its sequences together."""
        found = [np.zeros(0, dtype=np.int64)]
        for file, groups in enumerate(self.groups):
            for group, rows in enumerate(groups):
                found.append(sum(self.group_lengths(file, group).values(), np.zeros(rows, dtype=np.int64)))
        return np.concatenate(found)

    def group_lengths(self, file: int, row_group: int) -> dict[str, np.ndarray]:
        """By sequence, int64 [rows of the row group]: events of each sample. Reads a sequence's smallest column."""
        if not self.schema.sequences:
            return {}
        with _whole_file(self.files[file]):
            smallest = {x.name: self._smallest(file, row_group, sequence_columns(x)) for x in self.schema.sequences}
        table = self._table(file, row_group, list(smallest.values()))
        path, before = self.files[file], sum(self.groups[file][:row_group])
        return {
            name: lengths_of(table, column, lambda c, row: f"{path}: row {before + row + 1}, column {c}")
            for name, column in smallest.items()
        }

    def _table(self, file: int, row_group: int, columns: list[str]) -> pa.Table:
        path = self.files[file]
        with (
            _whole_file(path),
            pq.ParquetFile(path, metadata=self._metadata[file], page_checksum_verification=True) as opened,
        ):
            table = opened.read_row_group(row_group, columns=columns, use_threads=False)
        if len(table) != self.groups[file][row_group]:
            raise RequestError(f"{path}: {len(table)} rows in row group {row_group}; accepted: as its metadata say")
        return table

    def _smallest(self, file: int, row_group: int, names: list[str]) -> str:
        """Of the columns `names`, the one of the fewest bytes."""
        group, size = self._metadata[file].row_group(row_group), dict.fromkeys(names, 0)
        for i in range(group.num_columns):
            column = group.column(i)
            name = column.path_in_schema.split(".list.")[0]
            if name in size:
                size[name] += column.total_compressed_size
        return min(names, key=size.__getitem__)


def write_samples(
    folder: str | Path,
    schema: Schema,
    batches: Iterable[Samples],
    *,
    rows_per_file: int = ROWS_PER_FILE,
    row_group: int = ROW_GROUP,
) -> int:
    """Write batches of any size as a dataset in row groups of `row_group` samples (the last may be smaller); the rows.

    All of it appears at once, when the last batch is written. RequestError for a folder that holds something, for one
    that cannot be written (a full disk: nothing is left of it), and for samples that could not be read back.
    """
    folder = Path(folder)
    if row_group < 1 or rows_per_file < row_group or rows_per_file % row_group:
        raise RequestError(
            f"rows_per_file {rows_per_file}, row_group {row_group}; accepted: row_group of 1 or more, rows_per_file a "
            "multiple of it"
        )
    rows = 0
    with appears_whole(folder) as hidden:
        count, writer = 0, None
        names = arrow_schema(schema)
        try:
            for samples in _regrouped(_checked(schema, batches), row_group):
                table = to_table(schema, samples)
                with writing(folder):
                    if rows % rows_per_file == 0:
                        if writer is not None:
                            writer.close()
                        writer, count = _open_writer(hidden / f"{count:05d}", names), count + 1
                    assert writer is not None
                    writer.write_table(table, row_group_size=row_group)
                rows += len(samples)
            if writer is None:  # no samples are a dataset too: its schema says of what
                with writing(folder):
                    writer, count = _open_writer(hidden / "00000", names), 1
        finally:
            if writer is not None:
                with writing(folder):
                    writer.close()
        for i in range(count):  # only now is it known of how many; a file that is lost later is missed by its number
            (hidden / f"{i:05d}").rename(hidden / f"part-{i:05d}-of-{count:05d}.parquet")
    return rows


@contextmanager
def appears_whole(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder` to write into, which gets its name at the end, or is removed upon an error."""
    refuse_occupied(folder)
    hidden = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.partial")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        hidden.mkdir()
    try:
        yield hidden
        refuse_occupied(folder)  # someone else may have been faster
        with writing(folder):
            os.rename(hidden, folder)  # takes the place of an empty folder
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the system says of `folder` while it is written, of a full disk say, as a RequestError."""
    try:
        yield
    except OSError as error:  # Arrow's own too, whose text is long
        what = os.strerror(error.errno) if error.errno else " ".join(str(error).split())[:200]
        try:
            place = next(path for path in (folder, *folder.parents) if path.exists())
            free = f"{shutil.disk_usage(place).free / 2**30:.2f} GiB"
        except OSError as fault:
            free = f"unknown ({fault.strerror})"
        raise RequestError(
            f"{folder}: cannot be written: {what}; free on its disk: {free}; accepted: a disk that can be written, "
            "with room for it"
        ) from None


def refuse_occupied(folder: Path) -> None:
    """RequestError unless a folder can be made at `folder`, or is there and empty."""
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise RequestError(f"{folder}: not a folder; accepted: a new or empty folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise RequestError(f"{folder}: the folder is not empty; accepted: a new or empty folder")


def _open_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    # Differences in as few bits as they need: for events both faster than dictionaries, which overflow at many
    # distinct ids or times, and smaller than plain values.
    events = {f"{one.name}.list.element": "DELTA_BINARY_PACKED" for one in schema if pa.types.is_list(one.type)}
    return pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, write_page_checksum=True,
        use_dictionary=[one.name for one in schema if not pa.types.is_list(one.type)],  # type: ignore[arg-type]
        column_encoding=events or None,
    )  # fmt: skip


def _checked(schema: Schema, batches: Iterable[Samples]) -> Iterator[Samples]:
    for i, batch in enumerate(batches):
        where = f"batch {i}"
        check_form(schema, batch, where)
        check_samples(schema, batch, lambda column, row, where=where: f"{where}: row {row + 1}, column {column}")
        yield batch


def _regrouped(batches: Iterable[Samples], size: int) -> Iterator[Samples]:
    """The same samples in batches of `size`, the last one smaller."""
    held: list[Samples] = []
    count = 0
    for batch in batches:
        start = 0
        while start < len(batch):
            stop = min(len(batch), start + size - count)
            held.append(batch.take(start, stop))
            count, start = count + stop - start, stop
            if count == size:
                yield merge(held)
                held, count = [], 0
    if held:
        yield merge(held)


@contextmanager
def _whole_file(path: Path) -> Iterator[None]:
    """What Arrow and the system say of a broken file, as a RequestError."""
    try:
        yield
    except RequestError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:  # damage shows in each of these ways
        message = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise RequestError(f"{path}: broken parquet: {message}; accepted: a whole parquet file") from None


def _read_metadata(path: Path) -> tuple[Any, Schema]:
    with _whole_file(path):
        with pq.ParquetFile(path) as file:
            metadata, found = file.metadata, file.schema_arrow
        text = (found.metadata or {}).get(SCHEMA_KEY)
        if text is None:
            raise RequestError(f"{path}: no {SCHEMA_KEY.decode()} in its metadata; accepted: files of write_samples")
        schema = read_schema(text, str(path))
        check_types(found, schema, str(path))
    return metadata, schema


def _refuse_gaps(folder: Path, files: tuple[Path, ...]) -> None:
    """RequestError where the files' own numbering says that some are missing, or that two datasets are mixed."""
    numbers = [match.groups() for path in files if (match := _PART.search(path.name))]
    if not numbers:
        return  # not of write_samples
    totals = {int(total) for _, total in numbers}
    if len(totals) > 1 or {int(i) for i, _ in numbers} != set(range(max(totals))) or len(numbers) < len(files):
        raise RequestError(
            f"{folder}: {len(files)} files, not those of one dataset: {', '.join(path.name for path in files)[:200]}; "
            f"accepted: all of {max(totals)} parts"
        )
