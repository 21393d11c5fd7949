"""A declared case and the check of its declaration: what to run, against whom, expecting what.

A ``Case`` runs a public op on lengths; a ``MeasuredCase`` runs a subject that measures itself (see measured.py).
Every mistake is one RequestError that names file, case, field, value and what is accepted. Imports no torch: a thousand
cases are declared, checked and listed before any of them runs. Suites on disk are found in suites.py.
"""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeAlias

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
from gem.harness.declaration import Head, expand, explain, merge, read_head
from gem.harness.expect import Expectation, parse_expectation
from gem.harness.measured_params import MEASURED
from gem.harness.needs import parse_needs
from gem.harness.params import SUBJECTS, Params, SubjectParams

Direction = Literal["forward", "backward"]


def _known(what: str, accepted: "tuple[str, ...] | dict[str, Any]") -> AfterValidator:
    def check(value: str) -> str:
        if value not in accepted:
            near = names.nearest(value, accepted)
            raise ValueError(f"unknown {what} {value!r}; accepted: {names.accepted_list(accepted)}{near}")
        return value

    return AfterValidator(check)


def _check_needs(value: str) -> str:
    parse_needs(value)
    return value


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$")]
Implementation = Annotated[str, _known("implementation", names.IMPLEMENTATIONS)]
PeerName = Annotated[str, _known("peer", names.PEERS)]
Needs = Annotated[str, AfterValidator(_check_needs)]
Somewhere = Annotated[Path, Field(strict=False)]
_CHECKED = ConfigDict(extra="forbid", strict=True, frozen=True)


class GateParams(BaseModel):
    """`[case.gate]`: how much slower than its base a change may make the case, as a share."""

    model_config = _CHECKED

    threshold: Annotated[float, Field(ge=0.001, le=1.0, allow_inf_nan=False)] = 0.05


class Case(BaseModel):
    """One checked case of an op. `suite` is the label in ids and results; `file` is where the declaration was read."""

    model_config = _CHECKED

    suite: Somewhere
    file: Somewhere
    kind: Literal["correctness", "throughput"]
    subject: str
    name: Name
    description: str = ""
    fixture: str  # name of a length profile, or the path of one
    params: SerializeAsAny[SubjectParams]
    directions: Annotated[list[Direction], Field(min_length=1)] = ["forward", "backward"]
    impls: list[Implementation] | None = None  # None: every one of the subject's that this machine can run
    peers: list[PeerName] = []
    needs: Needs | None = None
    expect: dict[str, str] = {}
    gate: GateParams | None = None  # None: as gem gate does without a word
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
        for bound in _check_parts(self, ("directions", "peers", "impls")):
            if bound.direction not in self.directions:
                raise ValueError(f"expect {bound.key!r}: the case runs only {', '.join(self.directions)}")
        return self


class MeasuredCase(BaseModel):
    """One checked case of a subject that measures itself, or whose contestants race each other: no lengths fixture."""

    model_config = _CHECKED

    suite: Somewhere
    file: Somewhere
    kind: Literal["throughput", "scaling", "quality"]
    subject: str
    name: Name
    description: str = ""
    params: SerializeAsAny[Params]
    peers: list[PeerName] = []  # of a race
    needs: Needs | None = None
    expect: dict[str, str] = {}
    gate: GateParams | None = None  # None: as gem gate does without a word
    timeout_s: Annotated[float, Field(gt=0)] = 60.0  # of the whole measurement; in a race, of each of its steps

    @property
    def id(self) -> str:
        """``suites/throughput/gdpa.toml::name``, as a pytest node id."""
        return f"{PurePosixPath(self.suite)}::{self.name}"

    @property
    def expectations(self) -> list[Expectation]:
        """The bounds of `expect`, parsed; they have no direction."""
        return [parse_expectation(key, text, directed=False) for key, text in self.expect.items()]

    @model_validator(mode="after")
    def _parts_agree(self) -> "MeasuredCase":
        _check_parts(self, ("peers",))
        return self


AnyCase: TypeAlias = Case | MeasuredCase


def _check_parts(case: AnyCase, lists: tuple[str, ...]) -> list[Expectation]:
    """The case's bounds, once its peers and its lists of names are in order. Raises ValueError."""
    for field in lists:
        values = getattr(case, field) or []
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"{field} names {twice!r} twice; accepted: each once")
    for peer in case.peers:
        subjects = names.PEERS[peer].subjects
        if case.subject not in subjects:
            raise ValueError(f"peers: {peer!r} does not compute {case.subject}; it is a peer of {', '.join(subjects)}")
    for bound in case.expectations:
        peer = bound.metric.removeprefix(names.RATIO_PREFIX)
        if peer != bound.metric and peer not in case.peers:
            peers = ", ".join(case.peers) or "none"
            raise ValueError(f"expect {bound.key!r}: {peer!r} is not among the case's peers ({peers})")
    return case.expectations


def ops_only(cases: Iterable[AnyCase]) -> list[Case]:
    """Those of the cases that run a public op on lengths."""
    return [case for case in cases if isinstance(case, Case)]


# ---- from a suite file


def _fields(subject: str) -> tuple[str, ...]:
    """What a [[case]] table of `subject` may say; matrix is expanded before the model sees it."""
    model = MeasuredCase if subject in MEASURED else Case
    return (*(name for name in model.model_fields if name not in ("suite", "file", "kind", "subject")), "matrix")


def _kinds(subject: str) -> tuple[str, ...]:
    return MEASURED[subject].kinds if subject in MEASURED else names.OP_KINDS


def build_cases(document: dict[str, Any], *, file: Path, label: Path, fixtures: "frozenset[str]") -> list[AnyCase]:
    """The cases that a parsed suite file declares, its defaults merged and its matrices expanded.

    `file` names the suite in errors, `label` in ids; `fixtures` are the length profiles that exist.
    Raises RequestError.
    """
    head = read_head(document, file, {name: _kinds(name) for name in (*SUBJECTS, *MEASURED)}, _fields)
    declared = document.get("case")
    if not isinstance(declared, list) or not declared or not all(isinstance(one, dict) for one in declared):
        raise RequestError(f"{file}: no cases; accepted: one or more [[case]] tables after [suite]")
    cases: list[AnyCase] = []
    seen: dict[str, int] = {}
    for number, one in enumerate(declared, start=1):
        name = one.get("name")
        where = f"{file}: case {name!r}" if isinstance(name, str) else f"{file}: case number {number}"
        if name is None:
            raise RequestError(f"{where}: missing field 'name'")
        for variant in expand(merge(head.defaults, one), where, head.subject, _swept(head.subject)):
            case = _build_case(variant, where, head, file, label)
            if isinstance(case, Case):
                case = _with_fixture(case, where, fixtures)
            if case.name in seen:
                raise RequestError(
                    f"{file}: duplicate case name {case.name!r} (cases number {seen[case.name]} and {number}); "
                    "accepted: a name once a file"
                )
            seen[case.name] = number
            cases.append(case)
    return cases


def _params_model(subject: str) -> type[Params]:
    return MEASURED[subject].params if subject in MEASURED else SUBJECTS[subject]


def _swept(subject: str) -> list[str]:
    """What a matrix may sweep."""
    return [*_params_model(subject).model_fields, *(["fixture"] if subject in SUBJECTS else [])]


def _build_case(declared: dict[str, Any], where: str, head: Head, file: Path, label: Path) -> AnyCase:
    fields = _fields(head.subject)
    for field in ("suite", "file", "kind", "subject"):
        if field in declared:
            raise RequestError(f"{where}: unknown field {field!r}; accepted: {names.accepted_list(fields)}")
    params_model = _params_model(head.subject)
    raw = declared.get("params", {})
    if not isinstance(raw, dict):
        raise RequestError(f"{where}: params = {raw!r}; accepted: a table, as in {{ seed = 1 }}")
    try:
        params = params_model.model_validate(raw)
    except ValidationError as error:
        raise RequestError(f"{where}: {explain(error, params_model.model_fields, 'params', head.subject)}") from None
    given = {**declared, "params": params, "suite": label, "file": file, "kind": head.kind, "subject": head.subject}
    model = MeasuredCase if head.subject in MEASURED else Case
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise RequestError(f"{where}: {explain(error, fields)}") from None


def _with_fixture(case: Case, where: str, fixtures: "frozenset[str]") -> Case:
    """The case, its fixture a shipped profile or the path of one's own."""
    if case.fixture in fixtures:
        return case
    if case.fixture.endswith(".toml"):
        # A profile of one's own, given relative to the suite file, or to where the command runs.
        for path in (case.file.parent / case.fixture, Path(case.fixture)):
            if path.is_file():
                return case.model_copy(update={"fixture": str(path)})
    near = names.nearest(case.fixture, fixtures)
    raise RequestError(
        f"{where}: unknown fixture {case.fixture!r}; accepted: {names.accepted_list(sorted(fixtures))}, "
        f"or the path of a length profile (.toml){near}"
    )
