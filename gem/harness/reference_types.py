"""What a declaration's models say of their fields, as text: type, accepted values, default, and the code's own comment.

The comment beside or above a field in the source is its description: there is no second one that could differ.
"""

import ast
import enum
import inspect
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", Any: "anything"}
_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def accepted(annotation: Any, named: Mapping[Any, str] | None = None) -> str:
    """The values that `annotation` takes, in words. `named`: annotations that have words of their own."""
    for known, words in (named or {}).items():
        if annotation is known or annotation == known:
            return words
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _bounded(accepted(arguments[0], named), arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{_toml(one)}`" for one in arguments)
    if origin in (typing.Union, types.UnionType):
        parts = [accepted(one, named) for one in arguments if one is not type(None)]
        return "; or ".join(parts) + ("; or left out" if type(None) in arguments else "")
    if origin is tuple and Ellipsis not in arguments:
        return f"list of {len(arguments)}: " + " and ".join(dict.fromkeys(accepted(one, named) for one in arguments))
    if origin in (list, tuple):
        return f"list of: {accepted(arguments[0], named)}"
    if origin is dict:
        return f"table of: {accepted(arguments[1], named)}"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ", ".join(f"`{_toml(one.value)}`" for one in annotation)
    return _PLAIN.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _bounded(words: str, metadata: Iterable[Any]) -> str:
    """`words` and the bounds among an Annotated's metadata, those inside a pydantic Field too."""
    flat: list[Any] = []
    for one in metadata:
        flat += one.metadata if isinstance(one, FieldInfo) else [one]
    bounds = [f"{sign} {_number(getattr(one, name))}" for one in flat for name, sign in _BOUNDS if hasattr(one, name)]
    if any(getattr(one, "min_length", None) for one in flat):
        bounds.append("at least one")
    return f"{words} {', '.join(bounds)}".rstrip()


def _number(value: Any) -> str:
    powers = {2**31 - 1: "2³¹ − 1", 2**63: "2⁶³"}
    return powers.get(value, f"{value:g}" if isinstance(value, float) else str(value))


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {_toml(one)}" for key, one in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return str(value)


def default_of(field: FieldInfo) -> str:
    """The default as TOML writes it; "" where there is none to write, "required" where one must be given."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, BaseModel) or value == "":
        return ""
    return f"`{_toml(value)}`"


def comments_of(source: str) -> dict[int, tuple[str, bool]]:
    """Line number → (comment, whether it has the line to itself)."""
    found: dict[int, tuple[str, bool]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line[: token.start[1]].strip() == ""
            found[token.start[0]] = (token.string.lstrip("# ").rstrip(), alone)
    return found


def note_at(comments: dict[int, tuple[str, bool]], first: int, last: int) -> str:
    """The comment behind what stands on lines `first` to `last`, or else those right above it."""
    beside = [comments[line][0] for line in range(first, last + 1) if line in comments and not comments[line][1]]
    if beside:
        return " ".join(beside)
    above: list[str] = []
    line = first - 1
    while line in comments and comments[line][1]:
        above.insert(0, comments[line][0])
        line -= 1
    return " ".join(above)


def notes_of(model: type[BaseModel]) -> dict[str, str]:
    """Field → the comment that its declaration carries, those of inherited fields included."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if one is BaseModel or not issubclass(one, BaseModel):
            continue
        source = textwrap.dedent(inspect.getsource(one))
        comments = comments_of(source)
        (body,) = ast.parse(source).body
        assert isinstance(body, ast.ClassDef)
        for statement in body.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                note = note_at(comments, statement.lineno, statement.end_lineno or statement.lineno)
                found[statement.target.id] = note
    return found


def tables_in(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Fields of the model that are tables with fields of their own: name → model."""

    def inside(annotation: Any) -> list[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return [annotation]
        return [one for part in typing.get_args(annotation) for one in inside(part)]

    hints = typing.get_type_hints(model, include_extras=True)
    return {name: found[0] for name in model.model_fields if (found := inside(hints[name]))}


def fields_table(
    model: type[BaseModel],
    leave_out: Iterable[str] = (),
    named: Mapping[Any, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> str:
    """A Markdown table of the model's fields: name, accepted, default, comment. `defaults`: those given elsewhere."""
    hints, notes = typing.get_type_hints(model, include_extras=True), notes_of(model)
    rows = [
        [f"`{name}`", accepted(hints[name], named), (defaults or {}).get(name, default_of(field)), notes.get(name, "")]
        for name, field in model.model_fields.items()
        if name not in leave_out
    ]
    return table(["field", "accepted", "default", ""], rows)


def table(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
