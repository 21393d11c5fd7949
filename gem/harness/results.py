"""The results document: what a run measured, where, and what became of each case. Written whole or not at all."""

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gem.errors import RequestError
from gem.harness.names import PEERS

SCHEMA_VERSION = 2  # 2: waterfalls. A document of version 1 is read as it is, it has none

Status = Literal["pass", "fail", "error", "oom", "skipped"]
# From harmless to worst.
SEVERITY: tuple[Status, ...] = ("skipped", "pass", "fail", "oom", "error")


class Row(BaseModel):
    """One measured number (or the reason why there is none).

    `impl` is an implementation of the subject or a peer; `direction` is forward, backward, or '' for what concerns the
    whole case, as every row of a measured case does. `samples` are the raw timings in ms of a `ms` row, else the single
    measurements behind the value, in its unit, or nothing. `value` is finite or None: a NaN that
    reaches a row turns it into an error, since NaN compares false with every bound and would pass half the checks.
    """

    model_config = ConfigDict(extra="forbid")

    suite: str
    case: str
    impl: str
    direction: str
    metric: str
    value: float | None = None
    unit: str = ""
    better: Literal["higher", "lower"] = "lower"
    samples: list[float] = Field(default_factory=list)
    status: Status
    reason: str = ""

    @model_validator(mode="after")
    def _finite(self) -> "Row":
        if self.value is not None and not math.isfinite(self.value):
            note = f"{self.metric} is {self.value}"
            self.reason = f"{note}; {self.reason}" if self.reason else note
            self.value = None
            self.status = "error"
        bad = [s for s in self.samples if not math.isfinite(s)]
        if bad:
            note = f"{len(bad)} of {len(self.samples)} samples are not finite"
            self.reason = f"{self.reason}; {note}" if self.reason else note
            self.samples = [s for s in self.samples if math.isfinite(s)]
            self.status = "error"
        return self

    @property
    def case_id(self) -> str:
        """``suites/throughput/gdpa.toml::name``."""
        return f"{self.suite}::{self.case}"


PartOf = Literal["model", "optimizer", "recompute", "communication", "skew", "input", "rest"]
PART_OF: tuple[PartOf, ...] = get_args(PartOf)


class WaterfallPart(BaseModel):
    """A part of a training step's time, and what it is `of`: a slice of gem.efficiency. Parts add up to the step.

    model: useful compute of one module; recompute: activations computed a second time; communication: what no compute
    hides; skew: waiting for the heaviest rank; input: waiting for samples; rest: what is left of the step. `ms` is
    below 0 where modules that were timed alone took longer than together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    part: str = Field(min_length=1)
    ms: float = Field(allow_inf_nan=False)
    of: PartOf


class Document(BaseModel):
    """One run: where it ran, what was asked, the lengths it ran on, every row, and the ceilings measured in the run.

    `waterfalls`: ``<case id>/<impl>`` of a row → where the time of that contestant's step went.
    """

    # Bare NaN is no JSON, and half of the readers refuse the whole file for one.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")

    schema_version: Literal[1, 2] = SCHEMA_VERSION
    environment: dict[str, Any] = Field(default_factory=dict)
    request: dict[str, Any] = Field(default_factory=dict)  # argv, lengths file, batch, device, …
    fixtures: dict[str, Any] = Field(default_factory=dict)  # fixture name → Lengths.stats()
    rows: list[Row] = Field(default_factory=list)
    ceilings: dict[str, Any] = Field(default_factory=dict)  # dtype → TFLOP/s, and the copy bandwidth
    waterfalls: dict[str, list[WaterfallPart]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _waterfalls_belong_to_rows(self) -> "Document":
        if self.waterfalls and self.schema_version < 2:
            raise ValueError("waterfalls in a document of schema_version 1; accepted: from schema_version 2 on")
        known = {waterfall_key(row.case_id, row.impl) for row in self.rows} if self.waterfalls else set()
        stray = next((key for key in self.waterfalls if key not in known), None)
        if stray is not None:
            raise ValueError(f"waterfalls.{stray}: no row is of that case and impl; accepted: <suite>::<case>/<impl>")
        return self


def waterfall_key(case_id: str, impl: str) -> str:
    """``suites/throughput/e2e.toml::name/gem``."""
    return f"{case_id}/{impl}"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; ``document`` has the cases that were done, their fixtures and the ceilings."""

    def __init__(self, document: Document) -> None:
        super().__init__()
        self.document = document


def worst(statuses: Sequence[Status]) -> Status:
    """The status of a group of rows: the worst of them; "skipped" only when all are skipped or there are none."""
    return max(statuses, key=SEVERITY.index) if statuses else "skipped"


def own_status(rows: list[Row]) -> Status:
    """The status of one case from its rows: the worst of the subject's rows.

    What a peer does wrong (out of memory, a crash, wrong numbers) is a finding about the peer, shown in its own row; it
    fails the case only through an `expect` on the ratio to that peer, which then has no value.
    """
    own: list[Status] = [row.status for row in rows if row.impl not in PEERS]
    return worst(own) if own else "error"  # nothing said of the subject is no pass, and no skip either


def case_status(rows: list[Row]) -> dict[str, Status]:
    """Case id → status of the case (see `own_status`), in the order of the rows."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.case_id, []).append(row)
    return {case: own_status(of_case) for case, of_case in grouped.items()}


def _plain(value: Any) -> Any:
    """A free-form part (environment, ceilings) as plain values: numpy scalars and paths are not JSON's."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    # A numpy scalar, a path: the nearest plain thing.
    return _plain(value.item()) if hasattr(value, "item") else str(value)


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` to `path` whole or not at all: to a temporary beside it, then renamed. Returns the path.

    Raises RequestError when the directory cannot be made or written.
    """
    path = Path(path).resolve()  # through a symlink: its target is what the caller means to replace
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory")
        if path.exists() and not path.is_file():
            raise OSError(f"{path} is no regular file, and renaming onto it would replace it")
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a result is for everyone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def write_document(document: Document, path: str | Path) -> Path:
    """Write the document as JSON, atomically. Returns the path; raises RequestError when it cannot be written."""
    for part in ("environment", "request", "fixtures", "ceilings"):
        setattr(document, part, _plain(getattr(document, part)))
    return write_text(path, document.model_dump_json(indent=1) + "\n")


def read_document(path: str | Path) -> Document:
    """Read a document that `write_document` wrote.

    Raises RequestError in one line: a missing file, no JSON, or the first field that is not as the schema says.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        detail = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestError(f"{path}: cannot be read: {detail}; accepted: a JSON document written by gem run") from error
    try:
        return Document.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise RequestError(
            f"{path}: {where}: {first['msg']}; accepted: a JSON document of schema_version 1 or {SCHEMA_VERSION}"
        ) from error
