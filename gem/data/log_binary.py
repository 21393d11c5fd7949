"""Parquet, npy and npz logs -> lengths. Parquet is read in batches of bounded bytes, whatever its row groups are."""

from array import array
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.group_count import GroupCount
from gem.data.log_layout import FORMATS, ITEM_NAMES, LENGTH_NAMES, choose_column, find_column, plain, shown
from gem.data.log_stream import fault
from gem.data.log_text import Progress
from gem.errors import RequestError

_BATCH_VALUES = 1 << 18  # values (rows, or items of list columns) decoded at a time


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_user(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or str(kind) in ("string", "large_string", "string_view", "binary", "large_binary")


def read_parquet(
    path: Path, format: str | None, column: str | int | None, progress: Progress
) -> tuple[np.ndarray, int, str, str]:
    """(int64 lengths, rows read, format, column name) of a parquet file. RequestError with file, column and row."""
    try:
        # Buffered and not pre-fetched: a log may be a single row group larger than the memory allowed.
        with pq.ParquetFile(path, memory_map=False, buffer_size=1 << 20, pre_buffer=False) as file:
            return _parquet(path, file, format, column, progress)
    except (pa.ArrowException, OSError) as error:
        message = str(error).splitlines()[0][:200]
        raise fault(path, f"broken parquet: {message}; accepted: a whole parquet file") from None


def _parquet(
    path: Path, file: pq.ParquetFile, format: str | None, column: str | int | None, progress: Progress
) -> tuple[np.ndarray, int, str, str]:
    schema = file.schema_arrow
    names = list(schema.names)
    for name in names:
        if names.count(name) > 1:
            raise fault(path, f"the schema names {name!r} twice")
    if not names:
        raise fault(path, "no columns; accepted: a user column or a column of lengths")
    value, user, kind = _columns(path, schema, format, column)
    found = "lengths" if kind == "lengths" else "yambda" if _is_yambda(names) else "parquet"
    if format is not None and format not in (found, "parquet"):
        raise fault(path, f"not of format {format} but {found} ({shown(names)}); accepted: {FORMATS[format]}")
    total, size = file.metadata.num_rows, path.stat().st_size
    counter, lengths, rows = GroupCount(), array("q"), 0
    wanted = [name for name in (value, user) if name is not None]
    for batch in file.iter_batches(batch_size=_batch_rows(file, value), columns=wanted, use_threads=False):
        for name in wanted:
            _refuse_nulls(path, name, batch.column(name), rows)
        values = batch.column(value)
        if _is_list(values.type):
            values = values.value_lengths().cast(pa.int64())
        if kind == "users":
            counter.add(_flat(batch.column(user)), None if user == value else values)
        else:
            lengths.frombytes(_as_lengths(path, value, values, rows).tobytes())
        rows += len(batch)
        progress(size * rows // max(total, 1), size, rows)
    if not rows:
        raise fault(path, "no rows; accepted: at least one")
    progress(size, size, rows)
    counted = counter.finish() if kind == "users" else np.frombuffer(lengths, dtype=np.int64)
    return counted, rows, found, value if user in (None, value) else f"{value} by {user}"


def _is_yambda(names: list[str]) -> bool:
    return {"uid", "timestamp", "item_id"} <= set(names)


def _columns(
    path: Path, schema: pa.Schema, format: str | None, column: str | int | None
) -> tuple[str, str | None, str]:
    """(value column, user column or None, "users" | "lengths"). A list of items is worth its length."""
    names = list(schema.names)
    lists = [name for name in names if _is_list(schema.field(name).type)]
    if column is not None and names[find_column(path, names, column)] in lists:
        value = names[find_column(path, names, column)]
    elif column is None and format != "lengths" and lists:
        items = [name for name in lists if plain(name) in ITEM_NAMES] or lists
        if len(items) > 1:
            raise fault(path, f"which list holds the history? accepted: column= one of {shown(items)}")
        value = items[0]
    else:
        index, kind = choose_column(path, names, column, format)
        value, field = names[index], schema.field(index).type
        if kind == "users" and not _is_user(field):
            raise fault(path, f"column {index + 1} ({value}) is {field}; accepted as users: integers or strings")
        if kind == "lengths" and not pa.types.is_integer(field):
            raise fault(path, f"column {index + 1} ({value}) is {field}; accepted as lengths: integers")
        return value, value if kind == "users" else None, kind
    rest = [name for name in names if name not in lists and plain(name) not in LENGTH_NAMES]
    if not any(_is_user(schema.field(name).type) for name in rest):
        return value, None, "lengths"
    index, kind = choose_column(path, rest, None, None)
    return (value, rest[index], "users") if kind == "users" else (value, None, "lengths")


def _batch_rows(file: pq.ParquetFile, name: str) -> int:
    """Rows a batch so that a list column decodes about _BATCH_VALUES items at a time."""
    rows, values = file.metadata.num_rows, 0
    for group in range(file.metadata.num_row_groups):
        columns = (file.metadata.row_group(group).column(i) for i in range(file.metadata.num_columns))
        values += max((c.num_values for c in columns if c.path_in_schema.split(".")[0] == name), default=0)
    return max(1, min(_BATCH_VALUES, _BATCH_VALUES * rows // max(values, 1)))


def _flat(users: pa.Array) -> pa.Array:
    """Users as an array of plain values, as GroupCount takes them."""
    users = users.dictionary_decode() if isinstance(users, pa.DictionaryArray) else users
    return users.cast(pa.string()) if str(users.type) == "string_view" else users


def _refuse_nulls(path: Path, name: str, values: pa.Array, before: int) -> None:
    if values.null_count:
        row = before + int(values.is_null().to_numpy(zero_copy_only=False).argmax()) + 1
        raise fault(path, f"row {row}, column {name}: null; accepted: a value in every row")


def _as_lengths(path: Path, name: str, values: pa.Array, before: int) -> np.ndarray:
    array_ = values.to_numpy(zero_copy_only=False)
    return _checked(path, f"column {name}", array_, before)


def _checked(path: Path, what: str, values: np.ndarray, before: int = 0) -> np.ndarray:
    """int64 [n] of integers 0 or more, or RequestError naming the first bad row (from 1)."""
    bad = (values < 0) | (values > np.iinfo(np.int64).max) if values.dtype.kind == "u" else values < 0
    if bad.any():
        at = int(bad.argmax())
        raise fault(path, f"row {before + at + 1}, {what}: {values[at]}; accepted: a length, a whole number 0 or more")
    return values.astype(np.int64)


def read_numpy(
    path: Path, format: str | None, column: str | int | None, progress: Progress
) -> tuple[np.ndarray, int, str, str]:
    """(int64 lengths, rows, "lengths", array name) of an .npy or .npz file."""
    if format not in (None, "lengths"):
        raise fault(path, f"not of format {format}; accepted for npy and npz: lengths")
    try:
        # Memory-mapped: the size that a broken header claims is checked against the file before memory is taken.
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            with loaded:
                index = _npz_member(path, loaded.files, column)
                name, values = loaded.files[index], loaded[loaded.files[index]]
        else:
            name, values = "array", loaded
    except RequestError:
        raise
    except Exception as error:  # numpy raises ValueError, EOFError, KeyError, BadZipFile, zlib.error, SyntaxError, ...
        raise fault(path, f"broken npy or npz: {str(error).splitlines()[0][:200]}; accepted: integers [n]") from None
    if not isinstance(values, np.ndarray):  # an archive of other things
        raise fault(path, f"{name} is no array; accepted: integers of one dimension")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise fault(path, f"{name} is {values.dtype} of shape {values.shape}; accepted: integers of one dimension")
    lengths = _checked(path, name, values)
    size = path.stat().st_size
    progress(size, size, len(lengths))
    if not len(lengths):
        raise fault(path, f"{name} is empty; accepted: at least one length")
    return lengths, len(lengths), "lengths", name


def _npz_member(path: Path, names: list[str], column: str | int | None) -> int:
    if column is not None:
        return find_column(path, names, column)
    if len(names) == 1:
        return 0
    raise fault(path, f"{len(names)} arrays; accepted: column= one of {shown(names)}")
