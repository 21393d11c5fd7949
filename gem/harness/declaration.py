"""The tables of a suite file before they are cases: the [suite] table, defaults merged in, matrices expanded, errors.

Whatever is wrong is a RequestError of one line. Nothing here knows what a subject does.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gem.errors import RequestError
from gem.harness import names


class Head(BaseModel):
    """The `[suite]` table."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: str
    subject: str
    description: str = ""
    defaults: dict[str, Any] = {}


def read_head(
    document: dict[str, Any], file: Path, kinds: Mapping[str, tuple[str, ...]], fields: Callable[[str], tuple[str, ...]]
) -> Head:
    """The [suite] table, checked. `kinds`: subject → its kinds; `fields`: subject → fields of its [[case]] tables."""
    for field in document:
        if field not in ("suite", "case"):
            near = names.nearest(field, ("suite", "case"))
            raise RequestError(f"{file}: unknown table [{field}]; accepted: [suite], [[case]]{near}")
    table = document.get("suite")
    if not isinstance(table, dict):
        raise RequestError(f"{file}: no [suite] table; accepted: [suite] with kind and subject, then [[case]] tables")
    try:
        head = Head.model_validate(table)
    except ValidationError as error:
        raise RequestError(f"{file}: [suite]: {explain(error, Head.model_fields)}") from None
    if head.kind not in names.KINDS:
        known = ", ".join(names.KINDS)
        if head.kind in names.KINDS_WITHOUT_RUNNER:
            raise RequestError(f"{file}: [suite]: kind = {head.kind!r} has no runner yet; accepted: {known}")
        near = names.nearest(head.kind, names.KINDS)
        raise RequestError(f"{file}: [suite]: unknown kind {head.kind!r}; accepted: {known}{near}")
    if head.subject not in kinds:
        near = names.nearest(head.subject, kinds)
        raise RequestError(
            f"{file}: [suite]: unknown subject {head.subject!r}; accepted: {names.accepted_list(kinds)}{near}"
        )
    if head.kind not in kinds[head.subject]:
        accepted = ", ".join(kinds[head.subject])
        raise RequestError(f"{file}: [suite]: kind = {head.kind!r}; accepted of subject {head.subject}: {accepted}")
    accepted = [one for one in fields(head.subject) if one != "name"]
    for field in head.defaults:
        if field not in accepted:
            near = names.nearest(field, accepted)
            raise RequestError(
                f"{file}: [suite.defaults]: unknown field {field!r}; accepted: {names.accepted_list(accepted)}{near}"
            )
    return head


def merge(defaults: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """The case over the defaults; the tables params, expect and gate are merged key by key."""
    swept = case.get("matrix")
    if isinstance(swept, dict):
        # A matrix is the nearer word: what it sweeps drops the suite's default (the case's own value is an error).
        defaults = {key: value for key, value in defaults.items() if key not in swept}
        if isinstance(defaults.get("params"), dict):
            defaults["params"] = {key: value for key, value in defaults["params"].items() if key not in swept}
    merged = {**defaults, **case}
    for table in ("params", "expect", "gate"):
        below, above = defaults.get(table), case.get(table)
        if isinstance(below, dict) and isinstance(above, dict):
            merged[table] = {**below, **above}
    return merged


def expand(case: dict[str, Any], where: str, subject: str, swept: list[str]) -> list[dict[str, Any]]:
    """One case a combination of `matrix`, named ``<name>-<value>_d<head_dim>`` in the order of its keys.

    `swept`: what the subject lets a matrix sweep.
    """
    matrix = case.pop("matrix", None)
    if matrix is None:
        return [case]
    if not isinstance(matrix, dict) or not matrix:
        raise RequestError(f"{where}: matrix = {matrix!r}; accepted: a table of parameter = [values]")
    accepted = swept
    for key, values in matrix.items():
        if key not in accepted:
            near = names.nearest(key, accepted)
            raise RequestError(
                f"{where}: matrix: unknown param {key!r} of {subject}; accepted: {names.accepted_list(accepted)}{near}"
            )
        if not isinstance(values, list) or not values:
            raise RequestError(f"{where}: matrix.{key} = {values!r}; accepted: a list of one or more values")
        if key in case or key in (case.get("params") or {}):
            raise RequestError(f"{where}: {key!r} is in matrix and in the case; accepted: one of them")
    expanded = []
    for combination in itertools.product(*matrix.values()):
        chosen = dict(zip(matrix, combination, strict=True))
        suffix = "".join(_suffix(key, value) for key, value in chosen.items())
        variant = {**case, "name": f"{case.get('name', '')}{suffix}"}
        if "fixture" in chosen:
            variant["fixture"] = chosen.pop("fixture")
        variant["params"] = {**(case.get("params") or {}), **chosen}
        expanded.append(variant)
    return expanded


def _suffix(key: str, value: object) -> str:
    """A matrix value as part of a name: ``_d128`` for a head size, a flag by its name, a window as ``-256_0``."""
    if key == "head_dim":
        return f"_d{value}"
    if isinstance(value, bool):
        return f"-{key}" if value else f"-no_{key}"
    if isinstance(value, list):
        return "-" + "_".join(str(one) for one in value)
    return f"-{PurePosixPath(value).stem}" if key == "fixture" and isinstance(value, str) else f"-{value}"


def explain(errors: ValidationError, known: Iterable[str], prefix: str = "", subject: str = "") -> str:
    """The first of pydantic's errors in our words: field, value, what is accepted.

    `known`: the fields that there are. An unknown field goes before a missing one: a required field misspelt is both,
    and the misspelling is the mistake.
    """
    found = errors.errors(include_url=False)
    error = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    path = ".".join(str(part) for part in (prefix, *error["loc"]) if part != "")
    value, kind = error["input"], error["type"]
    context: dict[str, Any] = error.get("ctx") or {}
    if kind == "extra_forbidden":
        accepted = tuple(known)
        what = f"unknown param {error['loc'][-1]!r} of {subject}" if prefix else f"unknown field {error['loc'][-1]!r}"
        return f"{what}; accepted: {names.accepted_list(accepted)}{names.nearest(error['loc'][-1], accepted)}"
    if kind == "missing":
        return f"missing field {path!r}"
    if kind == "value_error":  # ours: it says it all
        return str(context.get("error", error["msg"]))
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        return f"{path} = {value!r}; accepted: {expected}{names.nearest(value, expected.split(', '))}"
    if kind == "string_pattern_mismatch":
        return f"{path} = {value!r}; accepted: letters, digits and _ . + - (it becomes part of a test id)"
    message = error["msg"].removeprefix("Input should be ")
    return f"{path} = {value!r}; accepted: {message}"
