"""Where a run's samples come from: synthetic data, folders of parquet files, or a log, which is made into such."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gem.data.build import build_dataset
from gem.data.parquet import Dataset
from gem.data.readers import Source, StoredSource
from gem.data.samples import Samples
from gem.data.schema import Schema
from gem.data.synthetic import Synthetic
from gem.data.synthetic_teacher import Floor
from gem.errors import RequestError
from gem.train.config import FolderData, LogData, SyntheticData, TrainConfig
from gem.train.world import World

WHOLE = 8 * 2**30  # bytes of all files, up to which each is read to the end
_END = 2**20  # bytes at each end of a file that are looked at where there are more

_CONTENT = "content of the files"
_ENDS = f"times, first and last bytes of the files (more than {WHOLE >> 30} GiB are not read whole)"

Floors = Callable[[Samples], dict[str, Floor]]


@dataclass(frozen=True)
class Sources:
    """Training and validation data of one schema; ``floors``: the lowest possible NE of samples, where it is known."""

    schema: Schema
    train: Source
    valid: Source | None
    floors: Floors | None = None
    files: tuple[Path, ...] = ()  # what it was all read from, in order


def open_sources(
    config: TrainConfig, folder: Path, world: World, say: Callable[[str], None] = lambda line: None
) -> Sources:
    """Open what ``config.data`` names. ``folder``: the run's, where a log's samples go. RequestError where there is
    nothing, or no sample in it."""
    data = config.data
    if isinstance(data, SyntheticData):
        train = Synthetic(data.train)
        return Sources(train.schema, train, Synthetic(data.valid()), train.floors)
    if isinstance(data, FolderData):
        return _stored(Path(data.train), None if data.valid is None else Path(data.valid))
    built = _built(data, folder, world, say)
    valid = built / "valid"
    found = _stored(built / "train", valid if Dataset.open(valid).rows else None)
    return replace(found, files=(Path(data.path),))


def _stored(train: Path, valid: Path | None) -> Sources:
    found = [Dataset.open(path) for path in (train, valid) if path is not None]
    for dataset, path in zip(found, (train, valid), strict=False):
        if not dataset.rows:
            raise RequestError(f"{path}: no samples; accepted: one or more")
        if dataset.schema != found[0].schema:
            raise RequestError(f"{path}: another schema than {train}; accepted: the same")
    sources = [StoredSource(dataset) for dataset in found]
    files = tuple(path for dataset in found for path in dataset.files)
    return Sources(found[0].schema, sources[0], sources[1] if len(sources) > 1 else None, files=files)


def fingerprint(sources: Sources) -> dict[str, Any]:
    """What tells data from other data of the same name, as JSON values; places of files do not count.

    Up to ``WHOLE`` bytes of files: a hash of all of them, at 1 to 2 GB/s. Beyond, where that would take long: of each
    its size, its time and its first and last ``_END`` bytes; a copy without its time is other data then.
    """
    sizes = sizes_of(sources)
    whole = sizes["bytes"] <= WHOLE
    return sizes | ({_CONTENT: _hash(sources.files)} if whole else {_ENDS: _ends(sources.files)})


def differences(before: Any, now: dict[str, Any]) -> list[str]:
    """The names of what is not the same in two fingerprints. A former one is held to its sizes alone."""
    if not isinstance(before, dict):
        return list(now)
    names = [name for name in now if name not in (_CONTENT, _ENDS)] if is_former(before) else list(now)
    return [name for name in names if before.get(name) != now[name]]


def is_former(found: Any) -> bool:
    """Whether a fingerprint is of before all of the files was read: their middle is not in it."""
    return isinstance(found, dict) and "first and last bytes of the files" in found


def sizes_of(sources: Sources) -> dict[str, Any]:
    """The part of it that reads no file."""
    valid = sources.valid
    return {
        "schema": hashlib.sha256(sources.schema.model_dump_json().encode()).hexdigest(),
        "training samples": len(sources.train),
        "validation samples": 0 if valid is None else len(valid),
        "bytes": sum(path.stat().st_size for path in sources.files),
    }


def _hash(files: tuple[Path, ...]) -> str:
    found = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _ends(files: tuple[Path, ...]) -> str:
    found = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            found.update(size.to_bytes(8, "little"))
            found.update(str(os.fstat(file.fileno()).st_mtime_ns).encode())
            for start in (0, max(0, size - _END)):
                file.seek(start)
                found.update(file.read(_END))
    return found.hexdigest()


def _built(data: LogData, folder: Path, world: World, say: Callable[[str], None]) -> Path:
    """The samples of a log, made by the first rank unless an earlier run has. Named after all that they depend on."""
    log = Path(data.path)
    try:
        stat = log.stat()
    except OSError as error:
        raise RequestError(f"{log}: {error.strerror}; accepted: an interaction log") from None
    key = [str(log.resolve()), stat.st_size, stat.st_mtime_ns, data.build.model_dump(mode="json")]
    target = folder / "data" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def make() -> None:
        if target.exists():
            return
        for part in target.parent.glob(".*.partial"):  # of a run that was killed: this one has the folder to itself
            shutil.rmtree(part, ignore_errors=True)
        say(f"making samples of {log} in {target}")
        for line in build_dataset(log, target, data.build).lines():
            say(line)

    world.first_alone(f"making samples of {log}", make)
    return target
