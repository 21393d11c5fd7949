"""Where a text log is broken: a slow second look, taken only after the fast reader gave up.

Arrow's CSV errors name no line (its reader is parallel), so the lines from the last good batch on are read again here,
one by one, up to the first that breaks the layout.
"""

import csv
import io
import itertools
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gem.data.log_layout import Layout
from gem.data.log_stream import TextStream, fault
from gem.errors import RequestError

MAX_LINE = 4 << 20  # bytes; also the block of the fast reader, which cannot read a longer line


def first_fault(path: Path, layout: Layout, good_rows: int) -> RequestError | None:
    """The first fault behind `good_rows` sound data rows as FILE:LINE:COLUMN, or None if every line fits the layout."""
    with io.BufferedReader(TextStream(path, layout.delimiter.encode()), MAX_LINE) as source:
        # A row is at least one line, so the good rows end on this line or behind it.
        skipped = good_rows + int(layout.header)
        try:
            deque(itertools.islice(source, skipped), maxlen=0)
            for line, fields in _rows(path, source, layout, skipped):
                problem = _problem(layout, fields)
                if problem is not None:
                    column, message = problem
                    return fault(path, message, line, column)
        except RequestError as error:
            return error
    return None


def _lines(path: Path, source: IO[bytes], line: int) -> Iterator[str]:
    while raw := source.readline(MAX_LINE + 1):
        line += 1
        if len(raw) > MAX_LINE:
            raise fault(path, f"the line is longer than {MAX_LINE:,} bytes; accepted: one row a line", line)
        text = raw.decode("utf-8", errors="replace")
        yield text.rstrip("\r\n") + "\n"


def _rows(path: Path, source: IO[bytes], layout: Layout, skipped: int) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of each row; the line is the one it starts on."""
    lines = _lines(path, source, skipped)
    if not layout.quoted:
        for line, text in enumerate(lines, skipped + 1):
            yield line, text[:-1].split(layout.delimiter) if layout.delimiter else [text[:-1]]
        return
    reader = csv.reader(lines, delimiter=layout.delimiter or "\x01", strict=True)
    while True:
        line = skipped + reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise fault(path, f"quotes do not match ({error}); accepted: quotes closed within a field", line) from None
        yield line, row or [""]


def _problem(layout: Layout, fields: list[str]) -> tuple[int, str] | None:
    """(column from 1, message) of a bad row."""
    wanted = len(layout.names)
    if fields == [""] and wanted > 1:
        return None  # an empty line is no row
    if len(fields) != wanted:
        names = ", ".join(layout.names[:12])
        at = min(len(fields), wanted) + (1 if len(fields) > wanted else 0)
        other = ", or format='sequences' (user item item ...)" if layout.format == "text" else ""
        count = f"{len(fields)} {'field' if len(fields) == 1 else 'fields'}"
        return at, f"{count}; accepted: {wanted} ({names}){other}"
    value, name = fields[layout.column], layout.label(layout.column)
    if layout.kind == "users":
        return None if value else (layout.column + 1, f"{name} is empty; accepted: a user")
    if not value.strip().isdigit() or not value.isascii():
        return layout.column + 1, f"{name} = {value[:40]!r}; accepted: a length, a whole number 0 or more"
    if int(value) >= 2**63:
        return layout.column + 1, f"{name} = {value[:40]}; accepted: a length below 2**63"
    return None
