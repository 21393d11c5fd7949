"""Length profiles: TOML files that declare how a jagged batch is drawn.

description = "what it stands for"
pattern = "cross"                 # self | cross | pma
batch = 1024                      # samples; may be left out where every side is explicit
queries = 32                      # pma only
tail_q = 0                        # rows behind the last offset
tail_k = 0
[q]                               # self and cross: see gem/data/distributions.py for the kinds
kind = "lognormal"
...
[k]                               # cross and pma
"""

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gem import paths
from gem.data.batch import Lengths, Pattern, as_lengths, check_batch, choose
from gem.data.distributions import AnyDistribution, Explicit, Length
from gem.errors import RequestError

__all__ = ["Lengths", "Profile", "list_profiles", "load_profile", "with_history"]


class Profile(BaseModel):
    """A declared jagged batch. The same file draws the same lengths on every call."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = ""
    description: str
    pattern: Pattern
    batch: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None  # None: as many as the explicit lengths
    queries: Length | None = None
    tail_q: Length = 0
    tail_k: Length = 0
    q: AnyDistribution | None = None
    k: AnyDistribution | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sides = {"self": ("q",), "cross": ("q", "k"), "pma": ("k",)}[self.pattern]
        for side in ("q", "k"):
            if (getattr(self, side) is None) == (side in sides):
                wanted = " and ".join(f"[{s}]" for s in sides)
                raise ValueError(
                    f"[{side}] is {'missing' if side in sides else 'given'}; pattern {self.pattern} has {wanted}"
                )
        if (self.queries is None) == (self.pattern == "pma"):
            raise ValueError("queries belongs to pattern pma, and only to it")
        if self.pattern == "self" and self.tail_q != self.tail_k:
            raise ValueError(f"tail_q {self.tail_q} and tail_k {self.tail_k} differ; pattern self shares its rows")
        explicit = {side: len(d.values) for side in sides if isinstance(d := getattr(self, side), Explicit)}
        if self.batch is None and len(explicit) != len(sides):
            raise ValueError("batch is missing; it may be left out only where every side is explicit")
        for side, count in explicit.items():
            if count != self.size:
                raise ValueError(f"[{side}] has {count} explicit lengths, the batch {self.size}; as many as the batch")
        return self

    @property
    def size(self) -> int:
        """B, the declared number of samples."""
        if self.batch is not None:
            return self.batch
        return next(len(side.values) for side in (self.q, self.k) if isinstance(side, Explicit))

    def draw(self, batch: int | None = None, seed: int = 0) -> Lengths:
        """The declared lengths.

        batch below the declared one: that many of the declared samples, chosen by a permutation seeded with `seed`, in
        their order. Above it: drawn anew with that many samples (explicit lengths repeat). None: as declared.
        """
        check_batch(batch, f"profile {self.name}")
        lengths = self._draw(max(self.size, batch or 0))
        if batch is None or batch >= self.size:
            return lengths
        return lengths.take(choose(self.size, batch, seed), f"{batch} of {self.size} samples, seed {seed}")

    def _draw(self, n: int) -> Lengths:
        parts = [f"{side} {d.describe()}" for side, d in (("q", self.q), ("k", self.k)) if d is not None]
        return self._lengths(
            self.name, self._side(self.q, n), self._side(self.k, n), f"profile {self.name}: {', '.join(parts)}"
        )

    def _side(self, distribution: AnyDistribution | None, n: int) -> np.ndarray | None:
        return None if distribution is None else distribution.draw(n)

    def _lengths(self, name: str, q: np.ndarray | None, k: np.ndarray | None, source: str) -> Lengths:
        """Complete the side that the pattern implies."""
        if self.pattern == "self":
            k = q
        elif self.pattern == "pma" and k is not None:
            q = np.full(len(k), self.queries, dtype=np.int64)
        assert q is not None and k is not None  # kept by _consistent
        return Lengths(name, q, k, self.pattern, self.queries, self.tail_q, self.tail_k, source)


def with_history(profile: Profile, lengths_1d: Any, name: str, source: str) -> Lengths:
    """The profile with real history lengths [B'] in place of the drawn ones, pattern and tails kept.

    self: q = k = real; cross: q = real, k drawn from the profile for B' samples; pma: k = real.
    """
    real = as_lengths(lengths_1d, name)
    q, k = (None, real) if profile.pattern == "pma" else (real, profile._side(profile.k, len(real)))
    drawn = f", k {profile.k.describe()}" if profile.pattern == "cross" and profile.k is not None else ""
    return profile._lengths(name, q, k, f"{source}, in the pattern of {profile.name}{drawn}")


def list_profiles() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return sorted(path.stem for path in (paths.fixtures_dir() / "lengths").glob("*.toml"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by name, or any TOML file by path (anything with a slash or ending in .toml).

    RequestError names the file, the field, the value and what is accepted.
    """
    text = str(name_or_path)
    if "/" not in text and not text.endswith(".toml"):
        path = paths.fixtures_dir() / "lengths" / f"{text}.toml"
        if not path.is_file():
            close = difflib.get_close_matches(text, list_profiles(), n=3) or list_profiles()
            raise RequestError(
                f"length profile {text!r} does not exist; accepted: {', '.join(close)}, or the path of a .toml"
            )
    else:
        path = Path(text)
    data = _read_toml(path)
    if data.setdefault("name", path.stem) != path.stem:
        raise RequestError(
            f"{path}: name = {data['name']!r}; accepted: the file's own name {path.stem!r}, or leave it out"
        )
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise RequestError(f"{path}: {_first_error(error)}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except RecursionError:
        raise RequestError(f"{path}: tables nested too deeply; accepted: TOML text") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RequestError(
            f"{path}:{line}: byte {error.object[error.start]:#04x} is not UTF-8; accepted: TOML text"
        ) from None
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        at, message = (f":{where[1]}:{where[2]}", str(error)[: where.start()].strip()) if where else ("", str(error))
        raise RequestError(f"{path}{at}: not TOML: {message}") from None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}; accepted: a readable length profile (.toml)") from None


def _kinds() -> Iterator[str]:
    for model in get_args(get_args(AnyDistribution)[0]):
        yield get_args(model.model_fields["kind"].annotation)[0]


def _fields(location: list[str], kind: str | None) -> str:
    """The accepted field names of the profile, or of the distribution `kind` where the location is inside a side."""
    for model in get_args(get_args(AnyDistribution)[0]):
        if len(location) > 1 and kind == get_args(model.model_fields["kind"].annotation)[0]:
            return ", ".join(model.model_fields)
    return ", ".join(Profile.model_fields)


def _first_error(error: ValidationError) -> str:
    """`field = value: what is accepted` of the first error. One line: the rest often follow from it."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    kind = location.pop(1) if len(location) > 1 and location[1] in _kinds() else None  # pydantic's union tag, no field
    field = ".".join(location)
    problem = first["type"]
    if problem == "missing":
        return f"field {field} is missing; accepted fields: {_fields(location, kind)}"
    if problem == "extra_forbidden":
        return f"unknown field {field} = {_short(first['input'])}; accepted fields: {_fields(location, kind)}"
    if problem == "union_tag_invalid":
        return f"{field}.kind = {_short(first['input'].get('kind'))}; accepted: {', '.join(_kinds())}"
    if problem == "union_tag_not_found":
        return f"field {field}.kind is missing; accepted: {', '.join(_kinds())}"
    message = re.sub(r"^(Value error, |Input should be )", "", first["msg"])
    if problem == "value_error":
        return f"{field + ': ' if field else ''}{message}"
    return f"{field} = {_short(first['input'])}; accepted: {message}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
