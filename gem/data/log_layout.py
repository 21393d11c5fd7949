"""What a text log looks like: separator, header, and which column holds the users (or the lengths).

Detection reads the first two lines only, prefers an error to a guess, and its result is stated beside the lengths.
"""

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gem.data.log_stream import fault
from gem.errors import RequestError

FORMATS = {
    "inter": "RecBole .inter: tab separated, typed header such as user_id:token",
    "movielens": "MovieLens ratings.csv: header with userId and movieId, quoted or not",
    "movielens_dat": "MovieLens ratings.dat: user::movie::rating::timestamp, no header",
    "kuairand": "KuaiRand CSV: header user_id,video_id,date,hourmin,time_ms,...",
    "csv": "any table with a header and one interaction a row; separated by comma, semicolon, tab or one space",
    "text": "user item [more fields] without a header, one interaction a line; separated by one tab or space (u.data)",
    "sequences": "user item item item ...: one user a line; only when asked for",
    "yambda": "Yambda parquet: uid,timestamp,item_id,..., a row an interaction or (lists) a row a user",
    "parquet": "any parquet with a user column, a row an interaction; or with a list column of items",
    "lengths": "one column of lengths: CSV or text with or without a header, parquet, npy, npz",
}
BINARY_FORMATS = ("yambda", "parquet")

USER_NAMES = ("userid", "user", "uid", "users", "customerid", "reviewerid", "visitorid", "sessionid")
ITEM_NAMES = ("itemid", "item", "items", "itemids", "movieid", "videoid", "trackid", "productid", "asin", "iid", "adid")
LENGTH_NAMES = ("length", "lengths", "len", "seqlen", "seqlens", "seqlength", "seqlengths", "historylength",
                "historylengths", "historylen", "count", "counts", "numitems")  # fmt: skip

_TYPED = re.compile(r"^[^:\s]+:(token|token_seq|float|float_seq)$")
_NUMBER = re.compile(r"^\s*-?\d+(\.\d+)?([eE][+-]?\d+)?\s*$")
_WORD = re.compile(r"^\s*[^\W\d]")  # begins with a letter or underscore, as names do and numbers do not

Kind = Literal["users", "lengths", "sequences"]


@dataclass(frozen=True)
class Layout:
    """How to read a text log. `column` counts from 0; `names` are invented where there is no header."""

    format: str
    kind: Kind
    delimiter: str  # "" = one column; may be "::"
    names: list[str] = field(default_factory=list)
    column: int = 0
    header: bool = False
    quoted: bool = False

    def label(self, index: int) -> str:
        """The name of a field for messages."""
        return self.names[index] if index < len(self.names) else f"field {index + 1}"


def plain(name: str) -> str:
    """A column name without case, punctuation and RecBole type: `user_id:token` and `userId` are both `userid`."""
    return re.sub(r"[\W_]", "", name.split(":")[0].lower())


def split(line: str, delimiter: str, quoted: bool) -> list[str]:
    """The fields of one line."""
    if not delimiter:
        return next(csv.reader([line])) if quoted and line.startswith('"') else [line]
    return next(csv.reader([line], delimiter=delimiter)) if quoted else line.split(delimiter)


def find_column(path: Path, names: list[str], column: str | int, line: int | None = None) -> int:
    """Index of the column that the request named, by name or by number from 1."""
    if str(column) in names:
        return names.index(str(column))
    if str(column).isdigit() and 1 <= int(column) <= len(names):
        return int(column) - 1
    raise fault(path, f"no column {column!r}; accepted: {shown(names)}, or a number 1 to {len(names)}", line)


def shown(names: list[str]) -> str:
    """Column names for a message, shortened."""
    text = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return text if len(text) <= 300 else text[:297] + "..."


def choose_column(
    path: Path, names: list[str], column: str | int | None, format: str | None, line: int | None = None
) -> tuple[int, Kind]:
    """Which column to read and as what, by the request and the names. An unclear request is an error, never a guess."""
    plains = [plain(name) for name in names]
    users = [i for u in USER_NAMES for i, name in enumerate(plains) if name == u]
    lengths = [i for i, name in enumerate(plains) if name in LENGTH_NAMES]
    if column is not None:
        index = find_column(path, names, column, line)
        if format == "lengths" or (format is None and (index in lengths or (len(names) == 1 and not users))):
            return index, "lengths"
        if format is not None or index in users:
            return index, "users"
        message = f"column {names[index]!r} may hold users or lengths; accepted: format='csv' (rows per value)"
        raise fault(path, f"{message} or format='lengths' (its values)".replace("'csv'", _table_format(path)), line)
    if format == "lengths" or (format is None and lengths and not any(name in ITEM_NAMES for name in plains)):
        if len(lengths) == 1 or len(names) == 1:
            return (lengths or [0])[0], "lengths"
        raise fault(path, f"which column holds the lengths? accepted: column= one of {shown(names)}", line)
    if users:
        return users[0], "users"
    if len(names) == 1 and format is None:
        return 0, "lengths"
    raise fault(path, f"no user column among {shown(names)}; accepted: user_id, userId, user, uid, or column=", line)


def _table_format(path: Path) -> str:
    return "'parquet'" if path.suffix in (".parquet", ".pq") else "'csv'"


def detect(path: Path, head: list[str], format: str | None, column: str | int | None) -> Layout:
    """The layout of a text log from its first one or two lines (without line ends)."""
    layout = _detect(path, head, format, column)
    if format is not None and format not in (layout.format, "csv"):
        raise fault(path, f"not of format {format} but {layout.format}; accepted: {FORMATS[format]}", 1)
    return layout


def _detect(path: Path, head: list[str], format: str | None, column: str | int | None) -> Layout:
    first = head[0]
    if not first.strip():
        raise fault(path, "the first line is empty; accepted: a header or data", 1)
    if format == "sequences":
        return Layout("sequences", "sequences", "\t" if "\t" in first else " ", ["user", "items"])
    delimiter = next((d for d in ("\t", "::", ",", ";", " ") if d in first.strip()), "")
    if "::" not in delimiter and _TYPED.match(first.strip().split("\t")[0]):
        delimiter = "\t"
    quoted = delimiter in (",", ";", "") or (delimiter == "\t" and first.startswith('"'))
    try:
        names = split(first, delimiter, quoted)
        second = split(head[1], delimiter, quoted) if len(head) > 1 else []
    except csv.Error as error:
        raise RequestError(f"{path}:1: {error}; accepted: lines that end in \\n") from None
    typed = [bool(_TYPED.match(name)) for name in names]
    if any(typed) or path.name.removesuffix(".gz").endswith(".inter") or format == "inter":
        if not all(typed):
            at = typed.index(False)
            raise fault(path, f"header field {names[at]!r}; accepted in .inter: name:token, name:float, ...", 1, at + 1)
        return _with_header(path, "inter", "\t", names, format, column, quoted=False)
    if format != "text" and _is_header(names, second, delimiter, column):
        return _with_header(path, "csv", delimiter, names, format, column, quoted)
    return _without_header(path, delimiter, len(names), format, column, quoted)


def _is_header(names: list[str], second: list[str], delimiter: str, column: str | int | None) -> bool:
    if any(plain(name) in USER_NAMES + LENGTH_NAMES and _WORD.match(name) for name in names):
        return True
    if column is not None and not str(column).isdigit():
        return True
    if delimiter in (",", ";", ""):
        return any(_WORD.match(name) for name in names) and not any(_NUMBER.match(name) for name in names)
    # Ids of plain text may be words: a header only if a word stands above a number.
    return any(_WORD.match(a) and _NUMBER.match(b) for a, b in zip(names, second, strict=False))


def _with_header(
    path: Path, found: str, delimiter: str, names: list[str], format: str | None, column: str | int | None, quoted: bool
) -> Layout:
    for at, name in enumerate(names):
        if name in names[:at]:
            raise fault(path, f"header names {name!r} twice (column {names.index(name) + 1}, {at + 1})", 1, at + 1)
    index, kind = choose_column(path, names, column, format, 1)
    plains = {plain(name) for name in names}
    if kind == "lengths":
        found = "lengths"
    elif found == "csv" and {"userid", "movieid"} <= plains:
        found = "movielens"
    elif found == "csv" and {"userid", "videoid"} <= plains and plains & {"timems", "date"}:
        found = "kuairand"
    return Layout(found, kind, delimiter, names, index, True, quoted)


def _without_header(
    path: Path, delimiter: str, fields: int, format: str | None, column: str | int | None, quoted: bool
) -> Layout:
    names = ["user", "item", "rating", "timestamp"][:fields] + [f"field {i + 1}" for i in range(4, fields)]
    index = find_column(path, names, column, 1) if column is not None else 0
    if format == "lengths" or (fields == 1 and format in (None, "lengths")):
        if fields > 1 and column is None:
            raise fault(path, f"{fields} columns without a header; accepted: column=NUMBER of the lengths", 1)
        return Layout("lengths", "lengths", delimiter, names if fields > 1 else ["length"], index, False, quoted)
    if fields == 1:
        raise fault(path, "one field; accepted: user and item, separated by a tab, a space, a comma or ::", 1, 1)
    if delimiter == "::":
        return Layout("movielens_dat", "users", delimiter, names, index)
    if delimiter in (",", ";"):
        # Tables without a header put the item first about as often as the user.
        if column is None:
            raise fault(path, "no header; accepted: a header with a user column, or column=NUMBER of the users", 1)
        return Layout("csv", "users", delimiter, names, index, False, quoted)
    return Layout("text", "users", delimiter, names, index)


def check_format(format: str | None) -> None:
    """RequestError unless `format` is None or one of FORMATS."""
    if format is not None and format not in FORMATS:
        raise RequestError(f"log format {format!r}; accepted: {', '.join(FORMATS)}")
