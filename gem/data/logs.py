"""Interaction logs -> history lengths, one per user: the real input of `gem run --lengths FILE`.

    read_lengths("ml-100k.inter")                       format by header and suffix
    read_lengths("events.csv", column="customer", format="csv")     rows per value of that column
    read_lengths("users.parquet", column="history_length")          the column's values themselves

Accepted, see log_layout.FORMATS: RecBole .inter, MovieLens (ratings.csv of all ages, ratings.dat, u.data), KuaiRand,
any CSV with a user column, Yambda parquet (flat or sequential) and other parquet, "user item" lines, and a bare column
of lengths (CSV, text, parquet, npy, npz). Text is UTF-8, one row a line, one separator; it may be gzipped.
A file is read whole or refused whole. Only the users are held in memory: 100 M rows need well under 2 GB.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gem.data.batch import as_lengths, check_batch, choose, describe_lengths
from gem.data.log_layout import BINARY_FORMATS, FORMATS, check_format
from gem.data.log_stream import fault

__all__ = ["FORMATS", "LogLengths", "read_lengths"]

_MAGIC = {b"PAR1": "parquet", b"\x93NUM": "numpy", b"PK\x03\x04": "numpy"}
_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".npy": "numpy", ".npz": "numpy"}

LONGEST = 2**31 - 1  # events of one user; beyond it a column of lengths is a column of something else


@dataclass(frozen=True, eq=False)
class LogLengths:
    """History lengths found in a file.

    lengths     int64 [users], read-only, users in order of first appearance
    format      as detected or requested, one of FORMATS
    rows        rows of the file (interactions, or users where a row is a user)
    source      one line: file, rows, format, column, users
    """

    name: str
    lengths: np.ndarray
    format: str
    rows: int
    source: str

    def draw(self, batch: int | None = None, seed: int = 0) -> "LogLengths":
        """`batch` of the users, chosen by a permutation seeded with `seed`, in their order; None or too many: all."""
        check_batch(batch, self.name)
        users = len(self.lengths)
        if batch is None or batch >= users:
            return self
        chosen = as_lengths(self.lengths[choose(users, batch, seed)], self.name)
        return replace(self, lengths=chosen, source=f"{self.source}; {batch:,} of {users:,} users, seed {seed}")

    def stats(self) -> dict[str, Any]:
        """Plain JSON values: name, format, rows, source, users, and the lengths as in describe_lengths."""
        return dict(name=self.name, format=self.format, rows=self.rows, source=self.source, users=len(self.lengths),
                    **describe_lengths(self.lengths))  # fmt: skip


def read_lengths(
    path: str | Path,
    *,
    format: str | None = None,
    column: str | int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> LogLengths:
    """History lengths of the users in the log at `path`.

    format      one of FORMATS; None: by header, content and suffix
    column      name, or number from 1, of the user column (or of the lengths, where they are read)
    progress    called as progress(bytes_done, bytes_total, rows) now and then, at last with bytes_done == bytes_total
    Raises RequestError: `FILE:LINE:COLUMN: what; accepted: ...`.
    """
    check_format(format)
    path = Path(path)
    report = progress or (lambda done, total, rows: None)
    kind = _content(path)
    if format in BINARY_FORMATS and kind != "parquet":
        raise fault(path, f"not parquet; accepted for format {format}: {FORMATS[format]}")
    if format is not None and format not in (*BINARY_FORMATS, "lengths") and kind != "text":
        raise fault(path, f"a {kind} file; accepted for format {format}: {FORMATS[format]}")
    # Imported late: pyarrow takes 0.2 s, and a listing of cases needs LogLengths only for its type.
    if kind == "text":
        from gem.data.log_text import read_text

        lengths, rows, layout = read_text(path, format, column, report)
        found, name = layout.format, layout.label(layout.column)
    else:
        from gem.data.log_binary import read_numpy, read_parquet

        read = read_parquet if kind == "parquet" else read_numpy
        lengths, rows, found, name = read(path, format, column, report)
    lengths = as_lengths(lengths, str(path))
    if len(lengths) and int(lengths.max()) > LONGEST:
        raise fault(path, f"a history of {int(lengths.max())} events; accepted: at most {LONGEST}")
    source = f"{path.name}: {rows:,} rows of format {found}, column {name}, {len(lengths):,} histories"
    return LogLengths(path.name.removesuffix(".gz").rsplit(".", 1)[0] or path.name, lengths, found, rows, source)


def _content(path: Path) -> str:
    """ "text", "parquet" or "numpy", by the first bytes; a suffix that promises something else is an error."""
    try:
        if path.is_dir():
            raise fault(path, "a directory; accepted: one file")
        if path.exists() and not path.is_file():
            raise fault(path, "not a regular file; accepted: a file, which is read more than once")
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError as error:
        raise fault(path, f"{error.strerror or error}; accepted: a readable log file") from None
    if not head:
        raise fault(path, "the file is empty; accepted: at least one row")
    found = _MAGIC.get(head, "text")
    promised = _SUFFIXES.get(path.suffix.lower())
    if promised is not None and found != promised:
        raise fault(path, f"not a {path.suffix[1:]} file although named so (it begins with {head!r})")
    return found
