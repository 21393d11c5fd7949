"""Where a run's samples come from: synthetic data, folders of parquet files, or a log, which is made into such."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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

Floors = Callable[[Samples], dict[str, Floor]]


@dataclass(frozen=True)
class Sources:
    """Training and validation data of one schema; ``floors``: the lowest possible NE of samples, where it is known."""

    schema: Schema
    train: Source
    valid: Source | None
    floors: Floors | None = None


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
    return _stored(built / "train", valid if Dataset.open(valid).rows else None)


def _stored(train: Path, valid: Path | None) -> Sources:
    found = [Dataset.open(path) for path in (train, valid) if path is not None]
    for dataset, path in zip(found, (train, valid), strict=False):
        if not dataset.rows:
            raise RequestError(f"{path}: no samples; accepted: one or more")
        if dataset.schema != found[0].schema:
            raise RequestError(f"{path}: another schema than {train}; accepted: the same")
    sources = [StoredSource(dataset) for dataset in found]
    return Sources(found[0].schema, sources[0], sources[1] if len(sources) > 1 else None)


def _built(data: LogData, folder: Path, world: World, say: Callable[[str], None]) -> Path:
    """The samples of a log, made by the first rank unless an earlier run has. Named after all that they depend on."""
    log = Path(data.path)
    try:
        stat = log.stat()
    except OSError as error:
        raise RequestError(f"{log}: {error.strerror}; accepted: an interaction log") from None
    key = [str(log.resolve()), stat.st_size, stat.st_mtime_ns, data.build.model_dump(mode="json")]
    target = folder / "data" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    if world.first and not target.exists():
        say(f"making samples of {log} in {target}")
        report = build_dataset(log, target, data.build)
        for line in report.lines():
            say(line)
    world.barrier()
    return target
