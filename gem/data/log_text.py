"""Text logs -> lengths, streamed: Arrow parses blocks of 4 MB, only the wanted column is converted."""

import io
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from gem.data.group_count import GroupCount
from gem.data.log_faults import MAX_LINE, first_fault
from gem.data.log_layout import Layout, detect
from gem.data.log_stream import TextStream, fault, read_head

Progress = Callable[[int, int, int], None]

# One user's whole history may stand on one line of the "sequences" format; 64 MB hold some ten million items.
_MAX_SEQUENCE = 64 << 20


def read_text(
    path: Path, format: str | None, column: str | int | None, progress: Progress
) -> tuple[np.ndarray, int, Layout]:
    """(int64 lengths, rows read, layout) of a text log, packed or not. RequestError with file, line and column."""
    head = read_head(path, 2, MAX_LINE)
    layout = detect(path, head, format, column)
    if layout.header and len(head) == 1:
        raise fault(path, "a header and no rows; accepted: at least one row", 1)
    with TextStream(path, layout.delimiter.encode()) as stream:
        if layout.kind == "sequences":
            lengths, rows = _sequences(path, stream, progress)
        else:
            lengths, rows = _table(path, stream, layout, progress)
        progress(stream.bytes_total, stream.bytes_total, rows)
    if not rows:
        raise fault(path, "a header and no rows; accepted: at least one row", 1)
    return lengths, rows, layout


def _open_csv(stream: TextStream, layout: Layout) -> pyarrow.csv.CSVStreamingReader:
    names = [str(i) for i in range(len(layout.names))]  # by position: an invented name may clash with a real one
    delimiter = layout.delimiter or "\x01"
    types = {names[layout.column]: pa.int64() if layout.kind == "lengths" else pa.string()}
    wanted = [names[layout.column]]
    if delimiter == "::":
        # Arrow splits at one character, which leaves an empty field at each "::". The null type refuses any other.
        delimiter, names = ":", [name for i in range(len(names)) for name in (str(i), f"gap {i}")][:-1]
        types |= {name: pa.null() for name in names[1::2]}
        wanted += names[1::2]
    return pyarrow.csv.open_csv(
        stream,
        read_options=pyarrow.csv.ReadOptions(block_size=MAX_LINE, column_names=names, skip_rows=int(layout.header)),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=delimiter,
            quote_char='"' if layout.quoted else False,
            newlines_in_values=layout.quoted,
            # In a column of lengths an empty line is a length that is missing.
            ignore_empty_lines=len(layout.names) > 1,
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=types,
            include_columns=wanted,
            null_values=[""],
            strings_can_be_null=True,
            check_utf8=False,  # TextStream did
        ),
    )


def _table(path: Path, stream: TextStream, layout: Layout, progress: Progress) -> tuple[np.ndarray, int]:
    counter, lengths, rows = GroupCount(), array("q"), 0
    try:
        for batch in _open_csv(stream, layout):
            values = batch.column(0)
            if values.null_count:
                raise pa.ArrowInvalid("an empty value")
            if layout.kind == "users":
                counter.add(values)
            elif len(values):
                numbers = values.to_numpy()
                if numbers.min() < 0:
                    raise pa.ArrowInvalid("a negative length")
                lengths.frombytes(numbers.tobytes())
            rows += len(values)
            progress(stream.bytes_done, stream.bytes_total, rows)
    except pa.ArrowException as error:
        if "Empty CSV file" in str(error):  # Arrow's word for nothing behind the header
            return np.zeros(0, dtype=np.int64), 0
        first_line = str(error).splitlines()[0][:200]
        raise first_fault(path, layout, rows) or fault(
            path, f"cannot be read as {layout.format}: {first_line}"
        ) from None
    if layout.kind == "users":
        return counter.finish(), rows
    return np.frombuffer(lengths, dtype=np.int64) if rows else np.zeros(0, dtype=np.int64), rows


def _sequences(path: Path, stream: TextStream, progress: Progress) -> tuple[np.ndarray, int]:
    """Lines of `user item item ...`; a user on several lines has the items of all of them."""
    items: dict[bytes, int] = {}
    line = 0
    lines = io.BufferedReader(stream, 1 << 20)
    while text := lines.readline(_MAX_SEQUENCE + 1):
        line += 1
        if len(text) > _MAX_SEQUENCE:
            raise fault(path, f"the line is longer than {_MAX_SEQUENCE:,} bytes; accepted: one user a line", line)
        fields = text.split()
        if not fields:
            raise fault(path, "the line is empty; accepted: user item item ...", line, 1)
        items[fields[0]] = items.get(fields[0], 0) + len(fields) - 1
        if line % 10_000 == 0:
            progress(stream.bytes_done, stream.bytes_total, line)
    return np.fromiter(items.values(), dtype=np.int64, count=len(items)), line
