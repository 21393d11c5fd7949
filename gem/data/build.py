"""Interaction logs -> training samples without a look into the future.

    schema, batches, report = build_samples("ml-100k.inter", part="train")
    report = build_dataset("ml-100k.inter", "ml-100k", BuildConfig(history=512))     train/ valid/ test/ and more

Each interaction (user, item, time) makes one sample: the ids ``user`` and ``item``; the sequence ``history``, the
user's earlier events (``item``, ``signal``, times); ``audience``, the item's earlier events (``user``, ``signal``); a
label for each task. Floats: ``since_user`` and ``since_item``, log(1 + seconds) since the last event of the sequence,
0 where there is none; ``hour_sin`` and ``hour_cos`` of the time of day in UTC.

Earlier is by the clock: an event of the same second is no past, wherever it stands in the file. Ids are numbered by
first appearance in training, so that an id says nothing of what comes later; 0 is whom training does not have. The
parts follow each other in time, ties never part. A signal is taken to be known as soon as its event is past.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gem.data.build_config import BuildConfig, Label, Report, Signal
from gem.data.build_log import Interactions, as_text, read_interactions
from gem.data.build_past import Past, find_past
from gem.data.parquet import appears_whole, refuse_occupied, write_samples, writing
from gem.data.samples import Events, Samples
from gem.data.schema import Feature, Schema, SequenceSchema, Table, Task
from gem.errors import RequestError

__all__ = ["PARTS", "BuildConfig", "Builder", "Interactions", "Label", "Report", "Signal", "build_dataset",
           "build_samples", "read_interactions"]  # fmt: skip

PARTS = ("train", "valid", "test")
FLOATS = ("since_user", "since_item", "hour_sin", "hour_cos")
_EVENTS = 1 << 22  # of all sequences of a batch: some 100 MB


def build_samples(
    log: str | Path | Interactions, *, config: BuildConfig | None = None, part: str | None = None
) -> tuple[Schema, Iterator[Samples], Report]:
    """(schema, batches in order of time, report) of a log, or of one of its PARTS; the report is of all parts."""
    builder = Builder(log, config)
    return builder.schema, builder.batches(part), builder.report


def build_dataset(log: str | Path | Interactions, folder: str | Path, config: BuildConfig | None = None) -> Report:
    """Write PARTS as datasets in `folder`, with report.json and, unless hashed, vocabulary/{user,item}.parquet.

    The folder appears when all of it is written. RequestError where it is there and holds something, or cannot be
    written.
    """
    folder = Path(folder)
    refuse_occupied(folder)  # before the work
    builder = Builder(log, config)
    with appears_whole(folder) as hidden:
        for part in PARTS:
            write_samples(hidden / part, builder.schema, builder.batches(part))
        with writing(folder):
            (hidden / "report.json").write_text(json.dumps(builder.report.values(), indent=1) + "\n")
            for name, vocabulary in builder.vocabularies().items():
                (hidden / "vocabulary").mkdir(exist_ok=True)
                pq.write_table(vocabulary, hidden / "vocabulary" / f"{name}.parquet")
    return builder.report


@dataclass(frozen=True, eq=False)
class _Ids:
    """Rows of a table for the values of a log."""

    rows: int  # of the table
    of_value: np.ndarray  # int64 [distinct values]: the row of each
    sharing: int  # values whose row is another's too, unknown ones aside


class Builder:
    """A log, sorted and numbered, from which batches are made one by one.

    schema, report    as build_samples returns them
    bounds            samples of part i: bounds[i] … bounds[i + 1] - 1, in order of time
    """

    def __init__(self, log: str | Path | Interactions, config: BuildConfig | None = None) -> None:
        self._config = config = config or BuildConfig()
        log = log if isinstance(log, Interactions) else read_interactions(log, config)
        _check_values(log, config)
        self._log = log
        order = np.argsort(log.times, kind="stable")
        repeats = _repeats(log, order, config.value_columns)
        duplicates = int(repeats.sum())
        if config.duplicates == "drop":
            order = order[~repeats]
        self._row = order  # the sample's row in the log
        self._times = times = log.times[order]
        self.bounds = _split(times, config.split, log.where)
        trained = self.bounds[1]
        self._users, self._items = (
            _hashed(values, config.hash_rows) if config.hash_rows else _numbered(codes[order[:trained]], len(values))
            for codes, values in ((log.user, log.users), (log.item, log.items))
        )
        self._user, self._item = self._users.of_value[log.user[order]], self._items.of_value[log.item[order]]
        signal = config.signal_used
        edges = np.array(signal.edges)
        self._signal = np.searchsorted(edges, log.values[signal.column][order], side="right").astype(np.int64)
        self._labels, counts = _labels(log, order, config)
        self._pasts = {
            "history": find_past(log.user[order], times, config.history),
            "audience": find_past(log.item[order], times, config.audience),
        }
        self._floats = np.stack([*(self._since(past) for past in self._pasts.values()), *_hour(times)], 1)
        self.schema = self._schema()
        self.report = self._report(duplicates, counts)
        # Columns in the order of each past, so that a batch reads stretches of memory.
        history, audience = self._pasts["history"].order, self._pasts["audience"].order
        self._events = {
            "history": {"item": self._item[history], "signal": self._signal[history]},
            "audience": {"user": self._user[audience], "signal": self._signal[audience]},
        }
        self._event_times = {"history": times[history]}

    def batches(self, part: str | None = None) -> Iterator[Samples]:
        """Samples of a part (None: of all) in order of time, at most config.batch at a time."""
        if part is not None and part not in PARTS:
            raise RequestError(f"part {part!r}; accepted: {', '.join(PARTS)}")
        start, stop = (0, self.bounds[-1]) if part is None else self.bounds[PARTS.index(part) :][:2]
        return self._batches(start, stop)

    def _batches(self, start: int, stop: int) -> Iterator[Samples]:
        events = np.cumsum(sum(past.lengths for past in self._pasts.values()))
        while start < stop:
            before = int(events[start - 1]) if start else 0
            fits = int(np.searchsorted(events, before + _EVENTS, side="right"))
            end = max(start + 1, min(stop, start + self._config.batch, fits))
            yield self._samples(start, end)
            start = end

    def _samples(self, start: int, stop: int) -> Samples:
        sequences = {}
        for name, past in self._pasts.items():
            offsets, places = past.gather(start, stop)
            ids = {feature: torch.from_numpy(x[places]) for feature, x in self._events[name].items()}
            times = self._event_times.get(name)
            sequences[name] = Events(
                torch.from_numpy(offsets), ids, None if times is None else torch.from_numpy(times[places])
            )
        # Copies: a batch is its owner's to change.
        return Samples(
            torch.from_numpy(self._row[start:stop].copy()),
            {name: torch.from_numpy(x[start:stop].copy()) for name, x in (("user", self._user), ("item", self._item))},
            torch.from_numpy(self._floats[start:stop].copy()),
            sequences,
            {name: torch.from_numpy(x[start:stop].copy()) for name, x in self._labels.items()},
        )

    def vocabularies(self) -> dict[str, pa.Table]:
        """By table, the columns id and value (as text) of those in training, by id; nothing when hashed."""
        if self._config.hash_rows:
            return {}
        found = {}
        for name, ids, values in (("user", self._users, self._log.users), ("item", self._items, self._log.items)):
            known = np.flatnonzero(ids.of_value)
            known = known[np.argsort(ids.of_value[known])]
            text = as_text(values).take(pa.array(known))
            found[name] = pa.table({"id": pa.array(ids.of_value[known]), "value": text})
        return found

    def _since(self, past: Past) -> np.ndarray:
        last = past.last()
        seconds = self._times - self._times[np.maximum(last, 0)]
        return np.where(last >= 0, np.log1p(seconds.astype(np.float64)), 0).astype(np.float32)

    def _schema(self) -> Schema:
        config, signal = self._config, Feature(name="signal", table="signal")
        user, item = (Feature(name=name, table=name) for name in ("user", "item"))
        return Schema(
            tables=[
                Table(name="user", rows=self._users.rows),
                Table(name="item", rows=self._items.rows),
                Table(name="signal", rows=len(config.signal_used.edges) + 1),
            ],
            ids=[user, item],
            floats=list(FLOATS),
            sequences=[
                SequenceSchema(name="history", features=[item, signal], longest=config.history, timed=True),
                SequenceSchema(name="audience", features=[user, signal], longest=config.audience),
            ],
            tasks=[Task(name=one.name, given=one.given) for one in config.labels],
        )

    def _report(self, duplicates: int, labels: dict[str, dict[str, int]]) -> Report:
        log, pasts = self._log, self._pasts
        unknown, unknown_ids = {}, {}
        if not self._config.hash_rows:
            for name, ids, sample_ids, sequence in (
                ("user", self._users, self._user, "audience"),
                ("item", self._items, self._item, "history"),
            ):
                unknown[name] = int((ids.of_value == 0).sum())
                unknown_ids[name] = int((sample_ids == 0).sum())
                past = pasts[sequence]
                before = np.concatenate([[0], np.cumsum(sample_ids[past.order] == 0)])
                unknown_ids[f"{sequence}.{name}"] = int((before[past.end] - before[past.begin]).sum())
        sharing = {"user": self._users.sharing, "item": self._items.sharing} if self._config.hash_rows else {}
        return Report(
            source=log.source,
            rows=len(log),
            users=len(log.users),
            items=len(log.items),
            disordered=int((log.times < np.maximum.accumulate(log.times)).sum()),
            duplicates=duplicates,
            dropped=len(log) - len(self._row),
            parts={name: self.bounds[i + 1] - self.bounds[i] for i, name in enumerate(PARTS)},
            starts={
                name: int(self._times[self.bounds[i]]) if self.bounds[i] < self.bounds[i + 1] else None
                for i, name in enumerate(PARTS)
            },
            empty={name: int((past.lengths == 0).sum()) for name, past in pasts.items()},
            events={name: int(past.lengths.sum()) for name, past in pasts.items()},
            cut={name: int((past.earlier - past.lengths).sum()) for name, past in pasts.items()},
            tied={name: past.tied for name, past in pasts.items()},
            unknown=unknown,
            unknown_ids=unknown_ids,
            sharing=sharing,
            labels=labels,
        )


def _hour(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    angle = (times % 86_400) * (2 * np.pi / 86_400)
    return np.sin(angle).astype(np.float32), np.cos(angle).astype(np.float32)


def _split(times: np.ndarray, shares: tuple[float, float, float], where: str) -> list[int]:
    """Bounds of the parts in `times` (rising): each begins at a time's first event, at or before its share."""
    n = len(times)
    bounds = [0]
    for share in (shares[0], shares[0] + shares[1]):
        k = round(share * n)
        bounds.append(n if k >= n else int(np.searchsorted(times, times[k], side="left")))
    if bounds[1] == 0:
        raise RequestError(
            f"{where}: no training samples, since the first {shares[0]:.0%} of {n} do not end before the time "
            f"{times[0] if n else 'of any'}; accepted: a log of more times, or a larger first share of split"
        )
    return [*bounds, n]


def _numbered(trained: np.ndarray, distinct: int) -> _Ids:
    """Rows 1 … by first appearance among `trained` (numbers of values, in order of time); 0 for all else."""
    values, first = np.unique(trained, return_index=True)
    of_value = np.zeros(distinct, dtype=np.int64)
    of_value[values[np.argsort(first)]] = np.arange(1, len(values) + 1)
    return _Ids(len(values) + 1, of_value, 0)


def _hashed(values: pa.Array, rows: int) -> _Ids:
    """Rows by a hash of each distinct value's text, the same for every log and machine."""

    def row(text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % rows

    of_value = np.fromiter((row(text) for text in as_text(values).to_pylist()), dtype=np.int64, count=len(values))
    _, counts = np.unique(of_value, return_counts=True)
    return _Ids(rows, of_value, int(counts[counts > 1].sum()))


def _repeats(log: Interactions, order: np.ndarray, columns: list[str]) -> np.ndarray:
    """bool [n], along `order`: rows equal to one above them in every column used."""
    values = [np.nan_to_num(log.values[name][order], nan=np.inf) for name in columns]  # a NaN equals a NaN here
    keys = [*values, log.item[order], log.user[order], log.times[order]]
    sorted_ = np.lexsort(keys)  # stable: the first of equal rows is the first in the log
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for key in keys:
        same &= key[sorted_][1:] == key[sorted_][:-1]
    repeats = np.zeros(len(order), dtype=bool)
    repeats[sorted_[1:][same]] = True
    return repeats


def _check_values(log: Interactions, config: BuildConfig) -> None:
    """RequestError for a value that is needed and not there, or that is neither 0 nor 1 where it must be."""

    def refuse(bad: np.ndarray, column: str, accepted: str) -> None:
        if bad.any():
            at = int(bad.argmax())
            found = log.values[column][at]
            what = "no value" if np.isnan(found) else f"{found:g}"
            raise RequestError(f"{log.where}: row {at + 1}, column {column}: {what}; accepted: {accepted}")

    refuse(np.isnan(log.values[config.signal_used.column]), config.signal_used.column, "a number, for the signal")
    ones: dict[str, np.ndarray] = {}
    for label in config.labels:
        values = log.values[label.column]
        missing = np.isnan(values)
        if label.at_least is None:
            refuse(~missing & (values != 0) & (values != 1), label.column, "0 or 1, or at_least= for a threshold")
        needed = np.ones(len(log), dtype=bool) if label.given is None else ones[label.given]
        refuse(missing & needed, label.column, f"a number, for label {label.name}")
        ones[label.name] = needed & _reached(values, label)


def _reached(values: np.ndarray, label: Label) -> np.ndarray:
    return values >= (1 if label.at_least is None else label.at_least)  # NaN does not


def _labels(
    log: Interactions, order: np.ndarray, config: BuildConfig
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, int]]]:
    """(fp32 [n] by task, NaN where not defined; counts by task)."""
    labels: dict[str, np.ndarray] = {}
    counts = {}
    for label in config.labels:
        reached = _reached(log.values[label.column][order], label)
        defined = np.ones(len(order), dtype=bool) if label.given is None else labels[label.given] == 1
        labels[label.name] = np.where(defined, reached, np.nan).astype(np.float32)
        counts[label.name] = dict(
            positive=int((reached & defined).sum()),
            negative=int((~reached & defined).sum()),
            undefined=int((~defined).sum()),
            ignored=int((reached & ~defined).sum()),
        )
    return labels, counts
