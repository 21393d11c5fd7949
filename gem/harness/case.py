"""A declared case and the check of its declaration: what to run, on which lengths, against whom, expecting what.

Every mistake is one RequestError that names file, case, field, value and what is accepted. Imports no torch: a thousand
cases are declared, checked and listed before any of them runs. Suites on disk are found in suites.py.
"""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    StringConstraints,
    ValidationError,
    model_validator,
)

from gem.errors import RequestError
from gem.harness import names
from gem.harness.needs import parse_needs
from gem.harness.params import SUBJECTS, SubjectParams

Direction = Literal["forward", "backward"]
_BOUND = re.compile(r"\s*(>=|<=|==|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True)
class Expectation:
    """``"forward.ratio_to.flex" = ">= 1.5"``: a bound that a metric of the subject must keep."""

    direction: str
    metric: str
    op: str
    bound: float

    def met(self, value: float | None) -> bool:
        """Whether `value` keeps the bound; None and NaN never do."""
        if value is None or value != value:
            return False
        return {
            ">=": value >= self.bound,
            "<=": value <= self.bound,
            "==": value == self.bound,
            ">": value > self.bound,
            "<": value < self.bound,
        }[self.op]

    def __str__(self) -> str:
        return f"{self.direction}.{self.metric} {self.op} {self.bound:g}"


def parse_expectation(key: str, text: str) -> Expectation:
    """The bound that `key` = `text` declares. Raises ValueError naming what is wrong and what is accepted."""
    direction, _, metric = key.partition(".")
    if direction not in names.DIRECTIONS or not metric:
        raise ValueError(f"expect key {key!r}; accepted: <forward|backward>.<metric>, as in 'forward.roofline'")
    if names.metric(metric) is None:
        known = [*names.METRICS, "ratio_to.<peer>"]
        raise ValueError(
            f"expect key {key!r}: unknown metric {metric!r}; accepted: {', '.join(known)}{names.nearest(metric, known)}"
        )
    match = _BOUND.fullmatch(text)
    if match is None:
        raise ValueError(
            f"expect {key!r} = {text!r}; accepted: a comparison (>=, <=, >, <, ==) and a number, as in '>= 1.5'"
        )
    return Expectation(direction, metric, match[1], float(match[2]))


def _known(what: str, accepted: "tuple[str, ...]") -> AfterValidator:
    def check(value: str) -> str:
        if value not in accepted:
            near = names.nearest(value, accepted)
            raise ValueError(f"unknown {what} {value!r}; accepted: {names.accepted_list(accepted)}{near}")
        return value

    return AfterValidator(check)


def _check_needs(value: str) -> str:
    parse_needs(value)
    return value


class Case(BaseModel):
    """One checked case. `suite` is the label in ids and results; `file` is where the declaration was read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    suite: Annotated[Path, Field(strict=False)]
    file: Annotated[Path, Field(strict=False)]
    kind: Literal["correctness", "throughput"]
    subject: str
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$")]
    description: str = ""
    fixture: str  # name of a length profile, or the path of one
    params: SerializeAsAny[SubjectParams]
    directions: Annotated[list[Direction], Field(min_length=1)] = ["forward", "backward"]
    # None: every implementation of the subject that this machine can run.
    impls: list[Annotated[str, _known("implementation", names.IMPLEMENTATIONS)]] | None = None
    peers: list[Annotated[str, _known("peer", tuple(names.PEERS))]] = []
    needs: Annotated[str, AfterValidator(_check_needs)] | None = None
    expect: dict[str, str] = {}
    timeout_s: Annotated[float, Field(gt=0)] = 60.0

    @property
    def id(self) -> str:
        """``suites/throughput/gdpa.toml::name``, as a pytest node id."""
        return f"{PurePosixPath(self.suite)}::{self.name}"

    @property
    def expectations(self) -> list[Expectation]:
        """The bounds of `expect`, parsed."""
        return [parse_expectation(key, text) for key, text in self.expect.items()]

    @model_validator(mode="after")
    def _parts_agree(self) -> "Case":
        for field in ("directions", "peers", "impls"):
            values = getattr(self, field) or []
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"{field} names {twice!r} twice; accepted: each once")
        for peer in self.peers:
            subjects = names.PEERS[peer].subjects
            if self.subject not in subjects:
                raise ValueError(
                    f"peers: {peer!r} does not compute {self.subject}; it is a peer of {', '.join(subjects)}"
                )
        for bound in self.expectations:
            key = f"{bound.direction}.{bound.metric}"
            if bound.direction not in self.directions:
                raise ValueError(f"expect {key!r}: the case runs only {', '.join(self.directions)}")
            peer = bound.metric.removeprefix(names.RATIO_PREFIX)
            if peer != bound.metric and peer not in self.peers:
                peers = ", ".join(self.peers) or "none"
                raise ValueError(f"expect {key!r}: {peer!r} is not among the case's peers ({peers})")
        return self


class _SuiteHead(BaseModel):
    """The `[suite]` table."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: str
    subject: str
    description: str = ""
    defaults: dict[str, Any] = {}


# What a [[case]] table may say; matrix is expanded before the model sees it.
CASE_FIELDS = (*(name for name in Case.model_fields if name not in ("suite", "file", "kind", "subject")), "matrix")


def build_cases(document: dict[str, Any], *, file: Path, label: Path, fixtures: "frozenset[str]") -> list[Case]:
    """The cases that a parsed suite file declares, its defaults merged and its matrices expanded.

    `file` names the suite in errors, `label` in ids; `fixtures` are the length profiles that exist.
    Raises RequestError.
    """
    head = _suite_head(document, file)
    declared = document.get("case")
    if not isinstance(declared, list) or not declared or not all(isinstance(one, dict) for one in declared):
        raise RequestError(f"{file}: no cases; accepted: one or more [[case]] tables after [suite]")
    cases: list[Case] = []
    seen: dict[str, int] = {}
    for number, one in enumerate(declared, start=1):
        name = one.get("name")
        where = f"{file}: case {name!r}" if isinstance(name, str) else f"{file}: case number {number}"
        if name is None:
            raise RequestError(f"{where}: missing field 'name'")
        for variant in _expand(_merge(head.defaults, one), where, head.subject):
            case = _build_case(variant, where, head, file, label, fixtures)
            if case.name in seen:
                raise RequestError(
                    f"{file}: duplicate case name {case.name!r} (cases number {seen[case.name]} and {number}); "
                    "accepted: a name once a file"
                )
            seen[case.name] = number
            cases.append(case)
    return cases


def _suite_head(document: dict[str, Any], file: Path) -> _SuiteHead:
    for field in document:
        if field not in ("suite", "case"):
            near = names.nearest(field, ("suite", "case"))
            raise RequestError(f"{file}: unknown table [{field}]; accepted: [suite], [[case]]{near}")
    table = document.get("suite")
    if not isinstance(table, dict):
        raise RequestError(f"{file}: no [suite] table; accepted: [suite] with kind and subject, then [[case]] tables")
    try:
        head = _SuiteHead.model_validate(table)
    except ValidationError as error:
        raise RequestError(f"{file}: [suite]: {_explain(error, _SuiteHead)}") from None
    if head.kind not in names.KINDS:
        kinds = ", ".join(names.KINDS)
        if head.kind in names.KINDS_WITHOUT_RUNNER:
            raise RequestError(f"{file}: [suite]: kind = {head.kind!r} has no runner yet; accepted: {kinds}")
        near = names.nearest(head.kind, names.KINDS)
        raise RequestError(f"{file}: [suite]: unknown kind {head.kind!r}; accepted: {kinds}{near}")
    if head.subject not in SUBJECTS:
        near = names.nearest(head.subject, SUBJECTS)
        raise RequestError(
            f"{file}: [suite]: unknown subject {head.subject!r}; accepted: {names.accepted_list(SUBJECTS)}{near}"
        )
    for field in head.defaults:
        if field not in CASE_FIELDS or field == "name":
            accepted = [one for one in CASE_FIELDS if one != "name"]
            near = names.nearest(field, accepted)
            raise RequestError(
                f"{file}: [suite.defaults]: unknown field {field!r}; accepted: {names.accepted_list(accepted)}{near}"
            )
    return head


def _merge(defaults: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """The case over the defaults; the tables params and expect are merged key by key."""
    swept = case.get("matrix")
    if isinstance(swept, dict):
        # A matrix is the nearer word: what it sweeps drops the suite's default (the case's own value is an error).
        defaults = {key: value for key, value in defaults.items() if key not in swept}
        if isinstance(defaults.get("params"), dict):
            defaults["params"] = {key: value for key, value in defaults["params"].items() if key not in swept}
    merged = {**defaults, **case}
    for table in ("params", "expect"):
        below, above = defaults.get(table), case.get(table)
        if isinstance(below, dict) and isinstance(above, dict):
            merged[table] = {**below, **above}
    return merged


def _expand(case: dict[str, Any], where: str, subject: str) -> list[dict[str, Any]]:
    """One case a combination of `matrix`, named ``<name>-<value>_d<head_dim>`` in the order of its keys."""
    matrix = case.pop("matrix", None)
    if matrix is None:
        return [case]
    if not isinstance(matrix, dict) or not matrix:
        raise RequestError(f"{where}: matrix = {matrix!r}; accepted: a table of parameter = [values]")
    accepted = [*SUBJECTS[subject].model_fields, "fixture"]
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


def _build_case(
    declared: dict[str, Any], where: str, head: _SuiteHead, file: Path, label: Path, fixtures: "frozenset[str]"
) -> Case:
    for field in ("suite", "file", "kind", "subject"):
        if field in declared:
            raise RequestError(f"{where}: unknown field {field!r}; accepted: {names.accepted_list(CASE_FIELDS)}")
    model = SUBJECTS[head.subject]
    raw = declared.get("params", {})
    if not isinstance(raw, dict):
        raise RequestError(f"{where}: params = {raw!r}; accepted: a table, as in {{ heads = 4, head_dim = 64 }}")
    try:
        params = model.model_validate(raw)
    except ValidationError as error:
        raise RequestError(f"{where}: {_explain(error, model, 'params', head.subject)}") from None
    fields = {**declared, "params": params, "suite": label, "file": file, "kind": head.kind, "subject": head.subject}
    try:
        case = Case.model_validate(fields)
    except ValidationError as error:
        raise RequestError(f"{where}: {_explain(error, Case)}") from None
    if case.fixture in fixtures:
        return case
    if case.fixture.endswith(".toml"):
        # A profile of one's own, given relative to the suite file, or to where the command runs.
        for path in (file.parent / case.fixture, Path(case.fixture)):
            if path.is_file():
                return case.model_copy(update={"fixture": str(path)})
    near = names.nearest(case.fixture, fixtures)
    raise RequestError(
        f"{where}: unknown fixture {case.fixture!r}; accepted: {names.accepted_list(sorted(fixtures))}, "
        f"or the path of a length profile (.toml){near}"
    )


def _explain(errors: ValidationError, model: type[BaseModel], prefix: str = "", subject: str = "") -> str:
    """The first of pydantic's errors in our words: field, value, what is accepted.

    An unknown field goes before a missing one: a required field misspelt is both, and the misspelling is the mistake.
    """
    found = errors.errors(include_url=False)
    error = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    path = ".".join(str(part) for part in (prefix, *error["loc"]) if part != "")
    value, kind = error["input"], error["type"]
    context: dict[str, Any] = error.get("ctx") or {}
    if kind == "extra_forbidden":
        accepted = CASE_FIELDS if model is Case else tuple(model.model_fields)
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
