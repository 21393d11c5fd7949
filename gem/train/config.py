"""What ``gem train`` is told: one TOML file, every field checked, every error one line that says what is accepted."""

import json
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gem.data.build_config import BuildConfig
from gem.data.readers import ReaderStrategy
from gem.data.synthetic import SyntheticConfig
from gem.errors import RequestError
from gem.model.config import ModelConfig, preset

Positive = Annotated[int, Field(ge=1)]
_Ranks = Annotated[int, Field(ge=1, le=2**31)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SyntheticData(_Model):
    """Drawn from a teacher, so that the lowest possible NE is known. Validation data has another seed."""

    kind: Literal["synthetic"]
    train: SyntheticConfig = SyntheticConfig()
    valid_samples: Positive = 16_384

    def valid(self) -> SyntheticConfig:
        """The same teacher's other samples."""
        return self.train.model_copy(update={"seed": self.train.seed + 1_000_003, "samples": self.valid_samples})


class FolderData(_Model):
    """Folders of parquet files, as gem.data.parquet writes them. Paths are relative to where the command runs."""

    kind: Literal["parquet"]
    train: str
    valid: str | None = None


class LogData(_Model):
    """An interaction log; it is made into folders of parquet files beside the checkpoints, once."""

    kind: Literal["log"]
    path: str
    build: BuildConfig = BuildConfig()


class ReaderConfig(_Model):
    """How batches are made: gem.data.readers."""

    batch: Positive = 1024  # samples a rank and step
    base: Positive = 128  # samples of a base batch
    pool: Positive = 64  # base batches that are shuffled together
    strategy: ReaderStrategy = "samples"
    cost: Literal["tokens", "pairs"] = "tokens"  # what is balanced
    workers: Annotated[int, Field(ge=0, le=256)] = 0  # processes of each rank


class PlanConfig(_Model):
    """How the model lies on torchrun's processes: gem.sharding.mesh has what each dimension is."""

    zones: _Ranks = 1
    gpus: _Ranks | None = None  # ranks a host; None: as many as torchrun started on this one
    replicate: _Ranks = 1
    shard: _Ranks | None = None
    expert: _Ranks = 1
    tables: Literal["v1", "v2", "v3"] = "v1"
    table_replicas: _Ranks = 1
    cuts: dict[str, Literal["table", "row", "column"]] = {}  # by table; in rows where nothing is said
    gather: Literal["full", "fp8"] = "full"  # how weights of linear layers travel: gem.sharding.lowbits
    transport: Literal["default", "copy_engine", "zero_cta"] = "default"  # by what they do: gem.sharding.sm_free


class TrainConfig(_Model):
    """One training run."""

    data: Annotated[SyntheticData | FolderData | LogData, Field(discriminator="kind")]
    model: dict[str, Any] = {}  # preset = "tiny" and any size of gem.model.ModelConfig
    reader: ReaderConfig = ReaderConfig()
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    epochs: Positive | None = None
    steps: Positive | None = None  # whichever of the two ends first; neither: one epoch
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast; weights and optimizers stay fp32
    compile: bool = False  # torch.compile of the parts that work on events
    pieces: Positive = 1  # of a batch, one after the other, gradients added up: less memory, the same step
    lr: Annotated[float, Field(gt=0)] = 1e-3  # AdamW, everything but the tables
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup: Annotated[int, Field(ge=0)] = 100  # steps over which both learning rates rise
    decay: Literal["constant", "cosine"] = "constant"
    table_lr: Annotated[float, Field(gt=0)] = 0.02  # row-wise Adagrad, the tables
    clip: Annotated[float, Field(gt=0)] | None = 1.0  # global norm of all gradients together
    log_every: Positive = 20  # steps
    evaluate_every: Positive | None = None  # steps; None: at the end alone
    evaluate_batches: Positive | None = None  # of the validation data; None: all
    checkpoint_every: Positive | None = 500  # steps; None: at the end alone
    keep: Positive = 2  # checkpoints
    timeout_s: Annotated[float, Field(ge=5, le=1e6)] = 600.0  # after which a rank that goes no further ends all of them
    plan: PlanConfig | None = None  # None: every rank holds all of the model (DDP)

    @model_validator(mode="after")
    def _parts_agree(self) -> "TrainConfig":
        if self.reader.batch % self.reader.base:
            raise ValueError(f"reader.batch {self.reader.batch} is no multiple of reader.base {self.reader.base}")
        if self.pieces > self.reader.batch:
            raise ValueError(f"pieces {self.pieces}; accepted: up to reader.batch = {self.reader.batch}")
        if self.decay == "cosine" and self.steps is None:
            raise ValueError('decay = "cosine" falls over steps; accepted: steps = a number beside it')
        if self.reader.pool % (self.reader.batch // self.reader.base):
            raise ValueError(f"reader.pool {self.reader.pool} base batches are no whole number of batches")
        if self.plan is not None and self.compile:
            raise ValueError("compile = true beside a plan; accepted: one of the two")
        self.sizes()
        return self

    def sizes(self) -> ModelConfig:
        """The model's sizes: its preset, "tiny" where none is named, with what is said beside it."""
        chosen = dict(self.model)
        name = chosen.pop("preset", "tiny")
        if not isinstance(name, str):
            raise ValueError(f"model.preset {name!r}; accepted: a name")
        if odd := sorted(chosen.keys() - ModelConfig.model_fields.keys()):
            raise ValueError(f"unknown field 'model.{odd[0]}'; accepted: preset, {', '.join(ModelConfig.model_fields)}")
        try:
            return preset(name, **chosen)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(_explain({**first, "loc": ("model", *first["loc"])})) from None


def load_config(path: Path, changes: tuple[str, ...] = (), plan: Path | None = None) -> TrainConfig:
    """Read a TOML file; ``changes``: "lr=0.01", "reader.batch=512" lay over it. RequestError for what is wrong.

    ``plan``: a TOML file with the fields of [plan], in whose place they stand.
    """
    document = _read(path, "a TOML file that says what to train")
    if plan is not None:
        try:
            # By itself first, so that what is wrong with it is told of that file.
            PlanConfig.model_validate(chosen := _read(plan, "a TOML file with the fields of [plan]"))
        except ValidationError as error:
            raise RequestError(f"{plan}: {_explain(error.errors(include_url=False)[0], PlanConfig)}") from None
        document["plan"] = chosen
    for change in changes:
        _lay_over(document, change)
    return parse_config(document, str(path))


def _read(path: Path, accepted: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; accepted: {accepted}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: {error}; accepted: TOML") from None


def parse_config(document: dict[str, Any], where: str) -> TrainConfig:
    """Check a parsed document."""
    _refuse_non_finite(document, where)
    try:
        # As JSON, whose arrays a strict model takes for tuples.
        return TrainConfig.model_validate_json(json.dumps(_without(document)))
    except TypeError as error:
        raise RequestError(f"{where}: {error}; accepted: numbers, words, true, false, lists and tables") from None
    except ValidationError as error:
        first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
        raise RequestError(f"{where}: {_explain(first)}") from None
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None


# Fields that have a default and may be nothing; TOML has no null, so the word "none" says it.
_MAY_BE_NONE = ("model.history", "model.keys", "clip", "checkpoint_every", "plan")


def _without(document: dict[str, Any]) -> dict[str, Any]:
    found = dict(document)
    for path in _MAY_BE_NONE:
        table, _, name = path.rpartition(".")
        own = found.get(table) if table else found
        if isinstance(own, dict) and own.get(name) == "none":
            changed = own | {name: None}
            found = found | {table: changed} if table else changed
    return found


def _refuse_non_finite(value: Any, where: str, at: str = "") -> None:
    """TOML and JSON as Python reads it have nan and inf, and no bound (gt=0, le=1) keeps a nan out."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{where}: {at} = {value}; accepted: a finite number")
    named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in named:
        _refuse_non_finite(inner, where, f"{at}.{name}" if at else str(name))


def _lay_over(document: dict[str, Any], change: str) -> None:
    path, equals, text = change.partition("=")
    parts = [part.strip() for part in path.split(".")]
    if not equals or not all(parts):
        raise RequestError(f"--set {change!r}; accepted: NAME=VALUE, as in reader.batch=512")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a word without quotes
    table = document
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise RequestError(f"--set {change!r}: {part!r} is no table; accepted: NAME=VALUE, as in reader.batch=512")
    table[parts[-1]] = value


def _explain(error: Any, model: type[BaseModel] | None = None) -> str:
    """The first of pydantic's errors: field, value, what is accepted. ``model``: of the document, a TrainConfig's."""
    *names, known = _found(model or TrainConfig, error["loc"])
    at = ".".join(names)
    if not at and error["type"] != "value_error":
        return f"{type(error['input']).__name__}; accepted: a table of fields"
    kind, context = error["type"], error.get("ctx") or {}
    if kind == "extra_forbidden":
        *_, known = _found(model or TrainConfig, error["loc"][:-1])
        fields = known[0].model_fields if len(known) == 1 else ()
        return f"unknown field {at!r}" + (f"; accepted: {', '.join(fields)}" if fields else "")
    if kind == "missing":
        return f"missing field {at!r}"
    if kind == "value_error":
        return f"{at}: {context.get('error')}" if at else str(context.get("error"))
    if kind == "union_tag_invalid":
        return f"{at}.kind = {context['tag']!r}; accepted: {context['expected_tags']}"
    if kind == "union_tag_not_found":
        return f"missing field '{at}.kind'; accepted: {', '.join(repr(_tag(one)) for one in known)}"
    return f"{at} = {error['input']!r}: {error['msg']}"


def _found(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[Any, ...]:
    """(the names of pydantic's path without tags of unions, which no document has; the models that may lie there)."""
    names: list[str] = []
    models = [model]
    for part in loc:
        if len(models) > 1:
            models = [one for one in models if _tag(one) == part] or models
            continue
        names.append(str(part))
        if not isinstance(part, int):  # else an entry of a list, whose models these are
            field = models[0].model_fields.get(part) if models else None
            models = [] if field is None else _models(field.annotation)
    return *names, models


def _models(kind: Any) -> list[type[BaseModel]]:
    """Those in a type: a model, a union, a list of one."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [one for inner in get_args(kind) for one in _models(inner)]


def _tag(model: type[BaseModel]) -> str | None:
    """The word that tells a model of a union from the others."""
    field = model.model_fields.get("kind")
    return None if field is None else get_args(field.annotation)[0]
