"""The journal of a run: each finished case is on the disk at once, so that a run that was killed can be gone on with.

Beside the results document ``FILE`` lies ``FILE.partial`` while a run goes on: JSON, a line each. The first line says
what the run is: what was asked, the cases as declared, the code, the machine. A line follows for each finished case,
and one for each session that went on. Only a run that is the same in all of it may go on; others are refused, since
their rows would stand in one document as if they had been measured alike. The file is locked while a run writes it, and
removed once the document is written.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from gem import paths
from gem.errors import RequestError
from gem.harness.case import AnyCase, Case
from gem.harness.results import Document, Row, WaterfallPart, waterfall_key

FORMAT = 1
START = b'{"journal": '  # of the first line
# Of environment.capture: what decides whether two measurements belong into one document.
SAME = (
    "gem", "git_commit", "git_dirty", "device", "gpu", "capability", "driver", "power_limit_w", "torch", "triton",
    "cuda", "numpy", "python", "host", "cpu", "cpu_capability", "cores", "memory_gib", "settings", "peers",
)  # fmt: skip


def partial_of(target: Path) -> Path:
    """Where the journal of the document ``target`` lies: beside the file that a link leads to."""
    real = target.resolve()
    return real.with_name(f"{real.name}.partial")


def identity(cases: Sequence[AnyCase], asked: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for a run to go on: {"request", "cases" (id → digest), "code", "environment"}.

    ``asked``: the run's options by name. Lengths of a log are told by their digest, a case by its declaration and the
    profile that its lengths are drawn from.
    """
    log = asked.get("lengths")
    lengths = None if log is None else {"name": log.name, "digest": _digest(log.lengths.tobytes())}
    found = {
        "request": {**asked, "lengths": lengths},
        "cases": {case.id: _digest(_declaration(case).encode()) for case in cases},
        "code": code_digest(),
        "environment": {key: environment.get(key) for key in SAME},
    }
    return json.loads(json.dumps(found, default=str))  # as it reads back from a file


def _declaration(case: AnyCase) -> str:
    from gem.data.lengths import load_profile

    drawn = load_profile(case.fixture).model_dump_json() if isinstance(case, Case) else ""
    return case.model_dump_json(exclude={"file"}) + drawn


def code_digest() -> str:
    """Of all sources of gem and its kernels: a tree with uncommitted changes can change without becoming dirtier."""
    package = Path(paths.__file__).parent
    root = paths.checkout_root()
    folders = [package, root / "kernels"] if root else [package]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return _digest(b"".join(file.read_bytes() for file in files))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class _Part(BaseModel):
    """Of a file that anybody may have changed: read as written or not at all."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Identity(_Part):
    """As `identity` gives it."""

    request: dict[str, Any]
    cases: dict[str, str]
    code: str
    environment: dict[str, Any]


class _Session(_Part):
    time: str
    host: str


class _Went(_Part):
    """The line of a session that goes on."""

    session: _Session


class _Head(_Went):
    """The first line."""

    journal: Literal[1]  # FORMAT
    identity: _Identity


class _Finished(_Part):
    """The line of a finished case; what its parts are the document says."""

    case: str
    rows: list[Any]
    fixtures: dict[str, Any]
    ceilings: dict[str, Any]
    waterfalls: dict[str, list[Any]]


class Journal:
    """The open, locked journal of the document ``target``. RequestError in one line where that may not be.

    ``resume``: go on with an unfinished run if there is one; else one that has finished cases is refused, for they took
    time and the answer is one word. ``warn`` is told, once, when the disk takes no more. Then ``begin``; ``keep`` each
    case; ``done`` once the document is written. ``close`` in any case.
    """

    def __init__(self, target: Path, resume: bool, warn: Callable[[str], None]) -> None:
        self.target, self.path = target, partial_of(target)
        self.sessions: list[dict[str, Any]] = []  # earlier ones: {"time", "host", "cases": ids finished in it}
        self.finished: dict[str, list[Row]] = {}
        self.fixtures: dict[str, Any] = {}
        self.ceilings: dict[str, Any] = {}
        self.waterfalls: dict[str, list[WaterfallPart]] = {}
        self._warn, self._warned = warn, False
        self._waiting = b""  # lines that a full disk did not take
        self._header: dict[str, Any] | None = None
        self._gone = False
        self._fd = self._lock()
        try:
            self._size = self._read()
            if self.finished and not resume:
                raise RequestError(
                    f"{target}: an unfinished run, {self.progress}, is in {self.path.name}; accepted: --resume to go "
                    "on with it, or remove that file to begin anew"
                )
        except BaseException:
            os.close(self._fd)
            raise
        # What a run that was killed while it wrote the document left of it. Nobody else writes it: that is the lock.
        for stray in self.path.parent.glob(f".{glob.escape(self.path.stem)}.*.part"):
            stray.unlink(missing_ok=True)

    @property
    def progress(self) -> str:
        """``3 of 9 cases finished``."""
        declared = len((self._header or {}).get("identity", {}).get("cases", {}))
        return f"{len(self.finished)} of {declared} cases finished"

    def earlier(self) -> list[dict[str, Any]]:
        """``request.resumed`` of the document: the sessions before this one that finished cases, and which."""
        told = [{**one, "cases": list(one["cases"])} for one in self.sessions]
        return [one for one in told if one["cases"]]

    def _lock(self) -> int:
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise RequestError(f"{self.path}: cannot be written: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                        return fd
                # The run that held the lock finished just now and removed the file: this is another one.
            except BlockingIOError:
                os.close(fd)
                raise RequestError(
                    f"{self.target}: another run writes it now ({self.path.name} is locked); accepted: another file"
                ) from None
            except OSError as error:
                os.close(fd)
                raise RequestError(
                    f"{self.path}: cannot be locked: {error.strerror}; accepted: a file where locks work"
                ) from error
            os.close(fd)

    def _read(self) -> int:
        """Take up what the file holds; the bytes of it that are whole lines. A torn last line is not."""
        data = b"".join(iter(lambda: os.read(self._fd, 1 << 20), b""))
        *lines, torn = data.split(b"\n")
        size = 0
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
            except ValueError:
                if number == len(lines) > 1 and not torn:  # of a machine that went down, the end alone may be there
                    break
                raise self._alien(number, "no JSON") from None
            except RecursionError:
                raise self._alien(number, "JSON nested too deeply") from None
            try:
                self._take(entry)
            except ValueError:
                raise self._alien(number, "not as this gem run writes it") from None
            size += len(line) + 1
        if self._header is None and not START.startswith(torn[: len(START)]):
            raise self._alien(1, "no journal of gem run")
        return size

    def _alien(self, line: int, what: str) -> RequestError:
        return RequestError(f"{self.path}:{line}: {what}; accepted: a journal of gem run; or remove it to begin anew")

    def _take(self, entry: Any) -> None:
        """One line. ValueError (pydantic's is one) where it is not as written here, or could not be written again."""
        if self._header is None:
            head = _Head.model_validate(entry)
            self._header = {"journal": FORMAT, "identity": _plain_of(head.identity)}
            self.sessions.append({**_plain_of(head.session), "cases": []})
            return
        if isinstance(entry, dict) and "session" in entry:
            self.sessions.append({**_plain_of(_Went.model_validate(entry).session), "cases": []})
            return
        found = _Finished.model_validate(entry)
        rows = [Row.model_validate(row) for row in found.rows]
        parts = {
            key: [WaterfallPart.model_validate(part) for part in of_impl] for key, of_impl in found.waterfalls.items()
        }
        whole = Document(rows=rows, fixtures=found.fixtures, ceilings=found.ceilings, waterfalls=parts)
        whole.model_dump_json()  # as it will be written
        self.finished[found.case] = rows
        self.sessions[-1]["cases"].append(found.case)
        self.fixtures |= found.fixtures
        self.ceilings = found.ceilings
        self.waterfalls |= parts

    def begin(self, identity: dict[str, Any], session: dict[str, Any]) -> None:
        """Write what this run is, or hold it against the run that is gone on with: RequestError where they differ.

        ``session``: what the document shall say of this session when another one goes on with it: "time", "host".
        """
        head = {"journal": FORMAT, "identity": identity} if not self.finished else {}
        if self._header is not None and self.finished:
            self._compare(self._header["identity"], identity)
        if not self.finished:
            self.sessions, self._size = [], 0
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._size)
        self._header = self._header if self.finished else head
        self._append({**head, "session": session})

    def _compare(self, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        def refuse(what: str, were: Any, are: Any) -> None:
            raise RequestError(
                f"{self.path.name}: the unfinished run there has {what} {_short(were)}, this one {_short(are)}; "
                "accepted with --resume: the same request, code and machine; or remove that file to begin anew"
            )

        for part in ("request", "environment"):
            for key in dict.fromkeys([*theirs[part], *ours[part]]):
                if theirs[part].get(key) != ours[part].get(key):
                    refuse(key, theirs[part].get(key), ours[part].get(key))
        if theirs["code"] != ours["code"]:
            refuse("gem's sources of digest", theirs["code"], ours["code"])
        for case in dict.fromkeys([*theirs["cases"], *ours["cases"]]):
            were, are = (one["cases"].get(case, "none") for one in (theirs, ours))
            if were != are:
                refuse(f"for {case} the declaration", were, are)

    def keep(
        self,
        case: str,
        rows: Sequence[Row],
        fixtures: dict[str, Any],
        ceilings: dict[str, Any],
        waterfalls: dict[str, list[WaterfallPart]],
    ) -> None:
        """Put a finished case on the disk, with what the run has found by now of fixtures, ceilings and waterfalls."""
        own = {waterfall_key(row.case_id, row.impl) for row in rows}
        entry = {
            "case": case,
            "rows": [row.model_dump(mode="json") for row in rows],
            "fixtures": {name: stats for name, stats in fixtures.items() if name not in self.fixtures},
            "ceilings": ceilings,
            "waterfalls": {
                key: [part.model_dump(mode="json") for part in parts] for key, parts in waterfalls.items() if key in own
            },
        }
        self.finished[case] = list(rows)
        self.fixtures |= entry["fixtures"]
        self._append(entry)

    def _append(self, entry: dict[str, Any]) -> None:
        self._waiting += json.dumps(entry, default=_plain).encode() + b"\n"
        left = self._waiting
        try:
            while left:
                left = left[os.write(self._fd, left) :]
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no half lines before the next try
            if not self._warned:
                self._warned = True
                self._warn(f"{self.path}: {error.strerror}: what finishes from here on is lost if the run is killed")
        else:
            self._size += len(self._waiting)
            self._waiting = b""

    def done(self) -> None:
        """The document is written: it is on the disk before the journal is not."""
        for path in (self.target.resolve(), self.path.parent):
            fd = os.open(path, os.O_RDONLY)
            with contextlib.suppress(OSError):
                os.fsync(fd)
            os.close(fd)
        self.path.unlink(missing_ok=True)
        self._gone = True

    def close(self) -> None:
        """Let others have it. A journal without a finished case goes: there is nothing to go on with."""
        if not self.finished and not self._gone:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)  # and with it the lock


def _plain_of(model: BaseModel) -> dict[str, Any]:
    """As plain values. ValueError for what a document cannot take up: half a character, hundreds of levels."""
    model.model_dump_json()
    return model.model_dump()


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
