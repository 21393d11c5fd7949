"""How a log becomes samples, and what became of its rows."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gem.data.schema import Name

Column = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

SECONDS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}  # of each unit in a second


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Label(_Model):
    """A task: 1 where `column` is `at_least` that, else 0; the column itself, of 0 and 1, where that is None."""

    name: Name
    column: Column
    at_least: Finite | None = None
    given: Name | None = None  # not defined where this task, named before it, is not 1


class Signal(_Model):
    """What an earlier event was like: how many of the rising `edges` its `column` reaches."""

    column: Column
    edges: Annotated[list[Finite], Field(min_length=1)]

    @model_validator(mode="after")
    def _edges_rise(self) -> "Signal":
        if any(b <= a for a, b in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError(f"edges {self.edges}; accepted: numbers that rise")
        return self


_RATED = [Label(name="ctr", column="rating", at_least=4), Label(name="cvr", column="rating", at_least=5, given="ctr")]


class BuildConfig(_Model):
    """The defaults fit logs of ratings from 1 to 5: ctr is a rating of 4 or more, cvr one of 5 among those.

    Columns are found as in read_lengths: by their names, case, punctuation and RecBole types aside.
    """

    user: Column | None = None  # None: user_id, userId, uid, ...
    item: Column | None = None  # None: item_id, movieId, video_id, ...
    time: Column | None = None  # None: timestamp, time, time_ms, ...
    time_unit: Literal["s", "ms", "us", "ns"] | None = None  # None: of *_ms ms, else what parquet says, else s
    labels: Annotated[list[Label], Field(min_length=1)] = _RATED
    signal: Signal | None = None  # None: from the first label's column, see signal_used
    history: Count = 1024  # the most events kept of a user's
    audience: Count = 64  # and of an item's
    hash_rows: Annotated[int, Field(ge=2, lt=2**31)] | None = None  # None: ids by order of first appearance
    split: tuple[float, float, float] = (0.8, 0.1, 0.1)  # shares in time of training, validation, test
    duplicates: Literal["drop", "keep"] = "drop"  # rows equal in every column that is used
    batch: Count = 4096  # samples made at a time, fewer where histories are long

    @model_validator(mode="after")
    def _fits(self) -> "BuildConfig":
        before: set[str] = set()
        for label in self.labels:
            if label.name in before:
                raise ValueError(f"label {label.name!r} is named twice; accepted: once")
            if label.given is not None and label.given not in before:
                raise ValueError(f"label {label.name}: given {label.given!r}; accepted: a label named before it")
            before.add(label.name)
        if min(self.split) < 0 or abs(sum(self.split) - 1) > 1e-9 or self.split[0] == 0:
            raise ValueError(f"split {self.split}; accepted: shares that add up to 1, some of it training")
        return self

    @property
    def signal_used(self) -> Signal:
        """The signal; without one in the request, the first label's column: ratings by number, else by thresholds."""
        if self.signal is not None:
            return self.signal
        column = self.labels[0].column
        if self.labels == _RATED:
            return Signal(column=column, edges=[2.0, 3.0, 4.0, 5.0])
        edges = {1.0 if one.at_least is None else one.at_least for one in self.labels if one.column == column}
        return Signal(column=column, edges=sorted(edges))

    @property
    def value_columns(self) -> list[str]:
        """The columns of numbers that are read, each once."""
        return list(dict.fromkeys([*(one.column for one in self.labels), self.signal_used.column]))


@dataclass(frozen=True)
class Report:
    """What was read and made: rows = samples + dropped duplicates, samples = those of all parts."""

    source: str
    rows: int
    users: int  # distinct, in the whole log
    items: int
    disordered: int  # rows whose time is before that of a row above them; sorted, nothing lost
    duplicates: int  # rows that repeat an earlier one in every column used
    dropped: int  # of these, those that made no sample and are no event
    parts: dict[str, int]  # samples by part: train, valid, test
    starts: dict[str, int | None]  # the time that each part begins at (its first sample's); None where it is empty
    empty: dict[str, int]  # samples by sequence without events; kept
    events: dict[str, int]  # by sequence, of all samples
    cut: dict[str, int]  # by sequence, older events that did not fit into the longest, summed over samples
    tied: dict[str, int]  # by sequence, other events of the sample's own second, which are no past
    unknown: dict[str, int]  # by table, users and items that training does not have: row 0
    unknown_ids: dict[str, int]  # by feature, ids of samples and events that are therefore row 0
    sharing: dict[str, int]  # by table, users and items that share their row with others, by hashing
    labels: dict[str, dict[str, int]] = field(default_factory=dict)  # by task: positive, negative, undefined, ignored

    @property
    def samples(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())

    def values(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"samples": self.samples}

    def lines(self) -> list[str]:
        """The same for people, a fact a line."""
        lines = [
            f"{self.source}: {self.rows:,} rows, {self.users:,} users, {self.items:,} items",
            f"samples: {self.samples:,} = " + " + ".join(f"{name} {n:,}" for name, n in self.parts.items()),
        ]
        for task, n in self.labels.items():
            undefined = f", {n['undefined']:,} not defined" if n["undefined"] else ""
            ignored = f", {n['ignored']:,} positives ignored where not defined" if n["ignored"] else ""
            lines.append(f"label {task}: {n['positive']:,} of {n['positive'] + n['negative']:,}{undefined}{ignored}")
        for name, events in self.events.items():
            mean = events / max(self.samples, 1)
            lines.append(
                f"{name}: {events:,} events ({mean:.1f} a sample), {self.empty[name]:,} samples have none (kept), "
                f"{self.cut[name]:,} older events cut, {self.tied[name]:,} of the sample's own second left out"
            )
        if self.disordered:
            lines.append(f"rows out of time order: {self.disordered:,} (sorted)")
        if self.duplicates:
            what = "dropped" if self.dropped else "kept"
            lines.append(f"rows that repeat another: {self.duplicates:,} ({what})")
        for table, n in self.unknown.items():
            ids = ", ".join(f"{v:,} ids of {k}" for k, v in self.unknown_ids.items() if k.split(".")[-1] == table)
            lines.append(f"{table}s not in training: {n:,} (row 0: {ids})")
        for table, n in self.sharing.items():
            lines.append(f"{table}s that share a row: {n:,}")
        return lines
