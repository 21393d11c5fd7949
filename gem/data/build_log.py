"""Interaction logs -> columns in memory: users and items coded, int64 seconds, float64 values.

Text is looked at as read_lengths does (log_layout), parquet must be flat: a row an interaction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from gem.data.build_config import SECONDS, BuildConfig
from gem.data.log_faults import MAX_LINE, first_fault
from gem.data.log_layout import ITEM_NAMES, USER_NAMES, Layout, detect, find_column, plain, shown
from gem.data.log_stream import TextStream, fault, read_head
from gem.errors import RequestError

TIME_NAMES = ("timestamp", "time", "timems", "timestampms", "ts", "unixtime", "unixtimestamp", "unixreviewtime")
_BATCH_ROWS = 1 << 18
_MOST = 2**53  # seconds from 1970: differences of two fit, also as float64
_FAR = 32_503_680_000  # seconds to the year 3000; a later time is taken to be of another unit


@dataclass(frozen=True, eq=False)
class Interactions:
    """A log of n rows, in the order of the file.

    user, item    int64 [n], numbers of the distinct values, from 0 by first appearance
    users, items  those values, as Arrow arrays of integers or strings
    times         int64 [n], seconds, rounded down
    values        by column, float64 [n]; NaN where the log has none
    source        one line: file, format, columns
    where         the file, for messages
    """

    user: np.ndarray
    item: np.ndarray
    users: pa.Array
    items: pa.Array
    times: np.ndarray
    values: dict[str, np.ndarray]
    source: str
    where: str

    def __len__(self) -> int:
        return len(self.times)

    @staticmethod
    def of(
        users: Sequence | np.ndarray, items: Sequence | np.ndarray, times: Sequence[int] | np.ndarray,
        values: dict[str, np.ndarray], source: str = "interactions",
    ) -> "Interactions":  # fmt: skip
        """From columns in memory, one entry an interaction."""
        user, item = (_coded([pa.array(x)]) for x in (users, items))
        floats = {name: np.asarray(x, dtype=np.float64) for name, x in values.items()}
        times = np.asarray(times, dtype=np.int64)
        for name, x in {"users": user[0], "items": item[0], **floats}.items():
            if len(x) != len(times):
                raise RequestError(f"{source}: {len(x)} {name}; accepted: {len(times)}, as there are times")
        return Interactions(user[0], item[0], user[1], item[1], times, floats, source, source)


@dataclass(frozen=True)
class _Columns:
    """Which columns of a log are what; indices from 0."""

    user: int
    item: int
    time: int
    values: dict[str, int]  # by the name in the config
    per_second: int | None  # units of the time column in a second; None: not stated


def read_interactions(path: str | Path, config: BuildConfig) -> Interactions:
    """The columns that `config` needs of a log. RequestError: `FILE[:LINE]: what; accepted: …`, rows from 1."""
    path = Path(path)
    if path.is_dir():
        raise fault(path, "a directory; accepted: one file")
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise fault(path, f"{error.strerror or error}; accepted: a readable log file") from None
    if magic == b"PAR1":
        return _read_parquet(path, config)
    if path.suffix.lower() in (".parquet", ".pq"):
        raise fault(path, f"not a {path.suffix[1:]} file although named so (it begins with {magic!r})")
    return _read_text(path, config)


def _find(path: Path, names: list[str], config: BuildConfig, line: int | None) -> _Columns:
    plains = [plain(name) for name in names]

    def known(what: str, wanted: str | None, usual: tuple[str, ...]) -> int:
        if wanted is not None:
            same = [i for i, name in enumerate(plains) if name == plain(wanted)]
            return same[0] if len(same) == 1 and wanted not in names else find_column(path, names, wanted, line)
        for one in usual:
            if one in plains:
                return plains.index(one)
        raise fault(path, f"no {what} column among {shown(names)}; accepted: {', '.join(usual[:4])}, or {what}=", line)

    user, item = known("user", config.user, USER_NAMES), known("item", config.item, ITEM_NAMES)
    time = known("time", config.time, TIME_NAMES)
    values = {name: known("value", name, ()) for name in config.value_columns}
    taken = [user, item, time]
    for index in taken:
        if taken.count(index) > 1:
            raise fault(path, f"column {names[index]!r} for two of user, item and time; accepted: one each", line)
    unit = config.time_unit or ("ms" if plains[time].endswith("ms") else None)
    return _Columns(user, item, time, values, SECONDS[unit] if unit else None)


class _Gathered:
    """The columns of a log, batch by batch."""

    def __init__(self, path: Path, names: list[str], columns: _Columns) -> None:
        self._path, self._names, self._columns = path, names, columns
        self._ids: tuple[list[pa.Array], list[pa.Array]] = ([], [])
        self._times: list[np.ndarray] = []
        self._values: dict[str, list[np.ndarray]] = {name: [] for name in columns.values}
        self.rows = 0

    def add(self, batch: Callable[[int], pa.Array]) -> None:
        """The next rows; `batch` gives a column by its index."""
        for at, chunks in zip((self._columns.user, self._columns.item), self._ids, strict=True):
            column = batch(at)
            self._refuse(column.is_null(), lambda i: "no value", at, "a value in every row")
            chunks.append(column)
        times = self._seconds(batch(self._columns.time))
        self._times.append(times)
        for name, at in self._columns.values.items():
            self._values[name].append(self._numbers(batch(at), at))
        self.rows += len(times)

    def finish(self, source: str) -> Interactions:
        """All rows; RequestError where there are none."""
        if not self.rows:
            raise fault(self._path, "no rows; accepted: at least one")
        (user, users), (item, items) = (_coded(chunks) for chunks in self._ids)
        values = {name: np.concatenate(chunks) for name, chunks in self._values.items()}
        names = [self._names[i] for i in (self._columns.user, self._columns.item, self._columns.time)]
        source = f"{source}, columns {', '.join([*names, *values])}"
        return Interactions(user, item, users, items, np.concatenate(self._times), values, source, str(self._path))

    def _refuse(self, bad: pa.Array, say: Callable[[int], str], column: int, accepted: str) -> None:
        flags = bad.to_numpy(zero_copy_only=False)
        if flags.any():
            at = int(flags.argmax())
            where = f"row {self.rows + at + 1}, column {self._names[column]}"
            raise fault(self._path, f"{where}: {say(at)}; accepted: {accepted}")

    def _seconds(self, column: pa.Array) -> np.ndarray:
        at, per_second = self._columns.time, self._columns.per_second
        if pa.types.is_timestamp(column.type):
            per_second = SECONDS[column.type.unit]
            column = column.cast(pa.int64())
        accepted = f"a time in {'seconds' if per_second in (1, None) else f'1/{per_second:,} seconds'}"
        self._refuse(column.is_null(), lambda i: "no value", at, accepted)
        units = per_second or 1
        try:
            seconds = column.cast(pa.int64()).to_numpy() // units
        except pa.ArrowInvalid:  # not whole, or no number
            numbers = self._numbers(column, at, accepted)
            self._refuse(pa.array(~(np.abs(numbers) < 2**62)), lambda i: str(column[i]), at, accepted)
            seconds = np.floor(numbers / units).astype(np.int64)
        if per_second is None and len(seconds) and seconds.max() > _FAR:
            i = int(seconds.argmax())
            what = f"row {self.rows + i + 1}, column {self._names[at]}: {seconds[i]} is no time in seconds"
            raise fault(self._path, f"{what} before the year 3000; accepted: time_unit= s, ms, us or ns")
        far = (seconds < -_MOST) | (seconds > _MOST)
        self._refuse(pa.array(far), lambda i: str(column[i]), at, f"{accepted}, at most 2^53 s from 1970")
        return seconds

    def _numbers(self, column: pa.Array, at: int, accepted: str = "a number") -> np.ndarray:
        try:
            numbers = column.cast(pa.float64(), safe=False)  # integers of 2^53 and more are rounded
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            bad = [not _is_number(value) for value in column.to_pylist()]
            self._refuse(pa.array(bad), lambda i: repr(column[i].as_py())[:40], at, accepted)
            raise fault(self._path, f"column {self._names[at]} is {column.type}; accepted: numbers") from None
        values = numbers.to_numpy(zero_copy_only=False)  # null becomes NaN
        self._refuse(pa.array(np.isinf(values)), lambda i: str(values[i]), at, "a finite number")
        return np.array(values)


def _is_number(value: object) -> bool:
    try:
        return value is None or float(str(value)) is not None
    except ValueError:
        return False


def _coded(chunks: list[pa.Array]) -> tuple[np.ndarray, pa.Array]:
    """(int64 [n], the distinct values by first appearance) of chunks of plain or dictionary arrays."""
    plain_chunks = [x.cast(x.type.value_type) if pa.types.is_dictionary(x.type) else x for x in chunks]
    coded = pa.chunked_array(plain_chunks).combine_chunks().dictionary_encode()
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    return coded.indices.to_numpy().astype(np.int64), coded.dictionary


# ---- text


def _read_text(path: Path, config: BuildConfig) -> Interactions:
    head = read_head(path, 2, MAX_LINE)
    layout = detect(path, head, "csv", config.user)
    columns = _find(path, layout.names, config, 1)
    gathered = _Gathered(path, layout.names, columns)
    with TextStream(path, layout.delimiter.encode()) as stream:
        try:
            for batch in _open_csv(stream, layout, columns):
                gathered.add(lambda i, batch=batch: batch.column(batch.schema.get_field_index(str(i))))
        except pa.ArrowException as error:
            if "Empty CSV file" in str(error):  # Arrow's word for nothing behind the header
                raise fault(path, "a header and no rows; accepted: at least one row", 1) from None
            message = str(error).splitlines()[0][:200]
            raise first_fault(path, layout, gathered.rows) or fault(
                path, f"cannot be read as {layout.format}: {message}; accepted: a table of {shown(layout.names)}"
            ) from None
    return gathered.finish(f"{path.name} ({layout.format})")


def _open_csv(stream: TextStream, layout: Layout, columns: _Columns) -> pyarrow.csv.CSVStreamingReader:
    names = [str(i) for i in range(len(layout.names))]
    delimiter = layout.delimiter
    wanted = list(dict.fromkeys([columns.user, columns.item, columns.time, *columns.values.values()]))
    included = [names[i] for i in wanted]
    types: dict[str, pa.DataType] = dict.fromkeys(included, pa.string())
    if delimiter == "::":
        # Arrow splits at one character, which leaves an empty field at each "::". The null type refuses any other.
        delimiter, names = ":", [name for i in range(len(names)) for name in (str(i), f"gap {i}")][:-1]
        types |= dict.fromkeys(names[1::2], pa.null())
        included += names[1::2]
    return pyarrow.csv.open_csv(
        stream,
        read_options=pyarrow.csv.ReadOptions(block_size=MAX_LINE, column_names=names, skip_rows=int(layout.header)),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=delimiter, quote_char='"' if layout.quoted else False, newlines_in_values=layout.quoted
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=types, include_columns=included, null_values=[""], strings_can_be_null=True, check_utf8=False
        ),
    )


# ---- parquet


def _read_parquet(path: Path, config: BuildConfig) -> Interactions:
    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            names = list(file.schema_arrow.names)
            columns = _find(path, names, config, None)
            gathered = _Gathered(path, names, columns)
            wanted = dict.fromkeys([columns.user, columns.item, columns.time, *columns.values.values()])
            for i in wanted:
                _check_kind(path, file.schema_arrow.field(i), i in (columns.user, columns.item))
            chosen = [names[i] for i in wanted]
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=chosen, use_threads=False):
                gathered.add(lambda i, batch=batch: batch.column(batch.schema.get_field_index(names[i])))
    except (pa.ArrowException, OSError) as error:
        message = str(error).splitlines()[0][:200]
        raise fault(path, f"broken parquet: {message}; accepted: a whole parquet file") from None
    return gathered.finish(f"{path.name} (parquet)")


def _check_kind(path: Path, column: pa.Field, is_id: bool) -> None:
    kind = column.type
    if is_id and pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if is_id and not (text or pa.types.is_integer(kind)):
        raise fault(path, f"column {column.name} is {kind}; accepted: integers or strings, a row an interaction")
    if not is_id and not (number or text or pa.types.is_timestamp(kind)):
        raise fault(path, f"column {column.name} is {kind}; accepted: numbers, a row an interaction")


def as_text(values: pa.Array) -> pa.Array:
    """Raw ids as strings, the same whether a log holds them as text or as integers."""
    return pc.cast(values, pa.string())
