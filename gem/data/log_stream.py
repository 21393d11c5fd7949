"""The bytes of a text log, checked on their way: gunzipped, counted for progress, refused where not UTF-8 text.

Arrow's CSV reader does not look at columns it is not asked for, so a damaged one would pass unseen. Checking here is a
pass over bytes that are in the cache anyway.
"""

import codecs
import gzip
import io
import zlib
from pathlib import Path
from typing import IO

from gem.errors import RequestError

GZIP_MAGIC = b"\x1f\x8b"
_SCAN = 1 << 20


def fault(path: Path, message: str, line: int | None = None, column: int | None = None) -> RequestError:
    """The error of a broken file: `FILE:LINE:COLUMN: message`; line and column (field number) count from 1."""
    where = "".join(f":{part}" for part in (line, column) if part is not None)
    return RequestError(f"{path}{where}: {message}")


def _bad_byte(at: int, byte: int, what: str) -> str:
    return f"byte {at + 1} of the line is {byte:#04x}: {what}; accepted: UTF-8 text"


def read_head(path: Path, lines: int, longest: int) -> list[str]:
    """The first lines of a text, without their ends; the first one is checked, since all else is read by it.

    The others are left to the reading proper, which knows by then what separates the columns.
    """
    with io.BufferedReader(TextStream(path, check=False)) as stream:
        head = [line for line in (stream.readline(longest + 1) for _ in range(lines)) if line]
    if not head:
        raise fault(path, "the file is empty; accepted: at least one row")
    text = head[0].decode("utf-8", errors="surrogateescape")
    for at, letter in enumerate(text):
        if letter == "\0" or "\ud800" <= letter <= "\udfff":
            place = len(text[:at].encode("utf-8", errors="surrogateescape"))
            what = "not UTF-8" if letter != "\0" else "binary data"
            raise fault(path, _bad_byte(place, head[0][place], what), 1)
    if len(head[0]) > longest:
        raise fault(path, f"the line is longer than {longest:,} bytes; accepted: one row a line", 1)
    return [line.decode("utf-8", errors="replace").rstrip("\r\n") for line in head]


class TextStream(io.RawIOBase):
    """Readable binary stream of the unpacked text; a damaged byte or archive raises RequestError with its place."""

    def __init__(self, path: Path, delimiter: bytes = b"", check: bool = True) -> None:
        super().__init__()
        self._checked = check
        self._path = path
        self._delimiter = delimiter
        self._file: IO[bytes] = open(path, "rb")  # noqa: SIM115 - closed by close(), Arrow owns the stream meanwhile
        self.bytes_total = path.stat().st_size
        packed = self._file.read(2) == GZIP_MAGIC
        self._file.seek(0)
        self._source: IO[bytes] = gzip.GzipFile(fileobj=self._file) if packed else self._file  # type: ignore[assignment]
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._mid_character = False
        self._done = 0  # unpacked bytes handed out

    @property
    def bytes_done(self) -> int:
        """Bytes of the file (packed, if it is) consumed so far."""
        return min(self._file.tell(), self.bytes_total) if not self._file.closed else self.bytes_total

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        """Up to `size` bytes, b"" at the end."""
        chunk = self._unpack(size)
        if self._checked:
            self._check(chunk)
        first = self._done == 0
        self._done += len(chunk)
        if first and chunk.startswith(codecs.BOM_UTF8):
            return chunk[len(codecs.BOM_UTF8) :] or self.read(size)
        return chunk

    def readinto(self, buffer) -> int:  # type: ignore[override]
        chunk = self.read(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
            self._file.close()
        super().close()

    def _unpack(self, size: int) -> bytes:
        try:
            return self._source.read(size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            at = f"after {self._done:,} unpacked bytes"
            raise fault(self._path, f"broken gzip {at}: {error}; accepted: a whole gzip file") from None
        except OSError as error:
            raise fault(self._path, f"cannot be read: {error.strerror or error}") from None

    def _check(self, chunk: bytes) -> None:
        nul = chunk.find(b"\0")
        if nul >= 0:
            raise self._damaged(self._done + nul, 0, "binary data")
        if chunk.isascii() and not self._mid_character:
            return
        pending = len(self._decoder.getstate()[0])
        try:
            self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            at = self._done - pending + error.start
            raise self._damaged(at, error.object[error.start], "not UTF-8") from None
        self._mid_character = bool(self._decoder.getstate()[0])

    def _damaged(self, offset: int, byte: int, what: str) -> RequestError:
        """Find line and field of the byte at `offset` by a second pass: the first one need not count lines then."""
        line, tail = 1, b""
        left = offset
        with open(self._path, "rb") as file:
            source = gzip.GzipFile(fileobj=file) if file.read(2) == GZIP_MAGIC else file
            file.seek(0)
            while left > 0 and (chunk := source.read(min(left, _SCAN))):
                left -= len(chunk)
                newlines = chunk.count(b"\n")
                line += newlines
                tail = chunk[chunk.rfind(b"\n") + 1 :] if newlines else (tail + chunk)[: 4 * _SCAN]
        column = tail.count(self._delimiter) + 1 if self._delimiter else None
        return fault(self._path, _bad_byte(len(tail), byte, what), line, column)
