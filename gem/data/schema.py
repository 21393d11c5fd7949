"""What a dataset's samples consist of: tables, features, sequences, tasks. Checked once, kept with the data.

A *table* is a set of ids that share embeddings (items of the history and the item at hand). A *feature* reads one
table. A *sequence* is a jagged list of events for each sample, of one feature or several side by side. A *task* is a
0/1 label; one that is only defined where another is 1 (CVR: conversions of clicked ads) names it in ``given``.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from gem.errors import RequestError

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Table(_Model):
    """Ids 0 … rows - 1 that share embeddings."""

    name: Name
    rows: Annotated[int, Field(ge=1, lt=2**40)]


class Feature(_Model):
    """One id: of each sample, or of each event of a sequence."""

    name: Name
    table: Name


class SequenceSchema(_Model):
    """Events of a sample, oldest first."""

    name: Name
    features: Annotated[list[Feature], Field(min_length=1)]
    # Events a sample, at most. gem.data.build keeps the most recent and counts what it cuts; stored samples of more are
    # refused, by file and row.
    longest: Annotated[int, Field(ge=1)]
    timed: bool = False  # whether events carry a time (int64 seconds)


class Task(_Model):
    """A 0/1 label; NaN where it is not defined, which must be where the task ``given`` is not 1."""

    name: Name
    given: Name | None = None


class Schema(_Model):
    """All of it. Names are unique among their kind; every feature's table exists."""

    tables: Annotated[list[Table], Field(min_length=1)]
    ids: list[Feature] = []
    floats: list[Name] = []
    sequences: list[SequenceSchema] = []
    tasks: Annotated[list[Task], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_fit(self) -> "Schema":
        kinds = {"table": self.tables, "feature": self.ids, "sequence": self.sequences, "task": self.tasks}
        kinds |= {f"feature of {s.name}": s.features for s in self.sequences}
        for kind, found in kinds.items():
            _unique(kind, [one.name for one in found])
        _unique("float", self.floats)
        tables = {table.name for table in self.tables}
        for feature in [*self.ids, *(f for s in self.sequences for f in s.features)]:
            if feature.table not in tables:
                raise ValueError(f"feature {feature.name}: table {feature.table!r}; accepted: {', '.join(tables)}")
        before: set[str] = set()
        for task in self.tasks:
            if task.given is not None and task.given not in before:
                raise ValueError(f"task {task.name}: given {task.given!r}; accepted: a task named before it")
            before.add(task.name)
        return self

    def rows(self, table: str) -> int:
        """Rows of the table of that name."""
        return next(one.rows for one in self.tables if one.name == table)

    def sequence(self, name: str) -> SequenceSchema:
        """The sequence of that name; RequestError where there is none."""
        for one in self.sequences:
            if one.name == name:
                return one
        raise RequestError(f"sequence {name!r}; the data has {', '.join(s.name for s in self.sequences) or 'none'}")


def read_schema(text: str | bytes, where: str) -> Schema:
    """A schema from JSON; RequestError naming ``where`` and the field when it is none."""
    try:
        return Schema.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{where}: schema{'.' if path else ''}{path}: {first['msg']}") from None


def _unique(kind: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{kind} {name!r} is named twice; accepted: once")
