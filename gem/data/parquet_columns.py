"""Samples as parquet columns and back, and what is refused on the way. No Python loop runs over samples.

Legend: B samples, T events of all samples of a sequence.
"""

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from gem.data.samples import Events, Samples
from gem.data.schema import Feature, Schema, SequenceSchema
from gem.errors import RequestError

SCHEMA_KEY = b"gem.schema"
Place = Callable[[str, int], str]  # (column, row from 0) -> the words before the value in a message

_LIST = pa.list_(pa.field("element", pa.int64(), nullable=False))


def arrow_schema(schema: Schema) -> pa.Schema:
    """The columns of the schema's samples, and the schema itself as metadata; RequestError where two share a name."""
    fields = [pa.field("key", pa.int64(), nullable=False)]
    fields += [pa.field(one.name, pa.int64(), nullable=False) for one in schema.ids]
    fields += [pa.field(name, pa.float32(), nullable=False) for name in schema.floats]
    for sequence in schema.sequences:
        fields += [pa.field(name, _LIST, nullable=False) for name in sequence_columns(sequence)]
    fields += [pa.field(f"label.{task.name}", pa.float32()) for task in schema.tasks]
    names = [one.name for one in fields]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"schema: two columns are named {name!r}; accepted: names that differ")
    return pa.schema(fields, {SCHEMA_KEY: schema.model_dump_json().encode()})


def sequence_columns(sequence: SequenceSchema) -> list[str]:
    """The columns of a sequence: its features', then the time's."""
    names = [f"{sequence.name}.{feature.name}" for feature in sequence.features]
    return names + [f"{sequence.name}.time"] * sequence.timed


def check_types(found: pa.Schema, schema: Schema, where: str) -> None:
    """RequestError unless every column of the schema is there once, of its type."""
    for field in arrow_schema(schema):
        is_list = field.type == _LIST
        wanted = "list<int64>" if is_list else str(field.type)
        count = found.names.count(field.name)
        if count != 1:
            state = "is missing" if not count else f"is there {count} times"
            raise RequestError(f"{where}: column {field.name} {state}; accepted: one column of type {wanted}")
        kind = found.field(field.name).type
        if is_list:  # of 32 or 64 bit offsets, declared with nulls or without
            fits = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and kind.value_type == pa.int64()
        else:
            fits = kind == field.type
        if not fits:
            raise RequestError(f"{where}: column {field.name} is {kind}; accepted: {wanted}")


# ---- Samples -> table


def to_table(schema: Schema, samples: Samples) -> pa.Table:
    """The columns of checked samples (see check_samples), without copies but for labels and floats."""
    columns: list[pa.Array] = [pa.array(samples.keys.numpy())]
    columns += [pa.array(samples.ids[one.name].numpy()) for one in schema.ids]
    columns += [pa.array(np.ascontiguousarray(column)) for column in samples.floats.numpy().T]
    for sequence in schema.sequences:
        events = samples.sequences[sequence.name]
        total = int(events.offsets[-1])
        if total > np.iinfo(np.int32).max:
            raise RequestError(
                f"sequence {sequence.name}: {total} events in a row group of {len(samples)} rows; "
                f"accepted: below 2**31, so fewer rows"
            )
        offsets = pa.array(events.offsets.numpy().astype(np.int32))
        values = [events.ids[feature.name] for feature in sequence.features]
        if events.times is not None:
            values.append(events.times)
        columns += [pa.ListArray.from_arrays(offsets, pa.array(one.numpy()), type=_LIST) for one in values]
    columns += [pa.array(samples.labels[task.name].numpy(), from_pandas=True) for task in schema.tasks]
    return pa.Table.from_arrays(columns, schema=arrow_schema(schema))


# ---- table -> Samples


def from_table(schema: Schema, table: pa.Table, place: Place) -> Samples:
    """Samples of a table with the schema's columns; ids, keys, times and events share the table's memory.

    RequestError for nulls and lists of unequal length; the values themselves are left to check_samples.
    """
    floats = [_whole(table, name, place).to_numpy() for name in schema.floats]
    labels = {}
    for task in schema.tasks:
        column = _one(table, f"label.{task.name}")
        stated = column.drop_null().to_numpy()
        if not np.isfinite(stated).all():  # a NaN here would pass for a null below
            values = column.to_numpy(zero_copy_only=False)
            bad = column.is_valid().to_numpy(zero_copy_only=False) & ~np.isfinite(values)
            at = int(bad.argmax())
            raise RequestError(f"{place(f'label.{task.name}', at)}: {values[at]}; accepted: 0, 1 or null")
        labels[task.name] = torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False), dtype=np.float32))
    return Samples(
        _tensor(_whole(table, "key", place)),
        {one.name: _tensor(_whole(table, one.name, place)) for one in schema.ids},
        torch.from_numpy(np.stack(floats, 1)) if floats else torch.empty(len(table), 0),
        {one.name: _events(table, one, place) for one in schema.sequences},
        labels,
    )


def lengths_of(table: pa.Table, name: str, place: Place) -> np.ndarray:
    """int64 [B]: the lengths of a list column."""
    return np.diff(_offsets(_whole(table, name, place)))


def _one(table: pa.Table, name: str) -> pa.Array:
    chunks = table.column(name)
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def _whole(table: pa.Table, name: str, place: Place) -> pa.Array:
    """A column that has no nulls."""
    array = _one(table, name)
    if array.null_count:
        at = int(array.is_null().to_numpy(zero_copy_only=False).argmax())
        raise RequestError(f"{place(name, at)}: null; accepted: a value in every row")
    return array


def _offsets(array: pa.Array) -> np.ndarray:
    """int64 [B + 1], not from 0 where the array is part of another."""
    return array.offsets.to_numpy().astype(np.int64) if len(array) else np.zeros(1, dtype=np.int64)


def _events(table: pa.Table, sequence: SequenceSchema, place: Place) -> Events:
    names = sequence_columns(sequence)
    tensors, first = [], np.zeros(1, dtype=np.int64)
    for i, name in enumerate(names):
        lists = _whole(table, name, place)
        offsets = _offsets(lists)
        start = int(offsets[0])
        offsets -= start
        if i == 0:
            first = offsets
        elif not np.array_equal(offsets, first):
            at = int((np.diff(offsets) != np.diff(first)).argmax())
            found, wanted = (int(x[at + 1] - x[at]) for x in (offsets, first))
            raise RequestError(f"{place(name, at)}: a list of {found}; accepted: {wanted} events, as in {names[0]}")
        values = lists.values.slice(start, int(offsets[-1]))
        if values.null_count:
            event = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
            at, within = _row_of(offsets, event)
            raise RequestError(f"{place(name, at)}, event {within}: null; accepted: a value for every event")
        tensors.append(_tensor(values))
    times = tensors.pop() if sequence.timed else None
    ids = {feature.name: x for feature, x in zip(sequence.features, tensors, strict=True)}
    return Events(torch.from_numpy(first), ids, times)


def _tensor(array: pa.Array) -> Tensor:
    """The memory of an int64 array without nulls. DLPack, since from_numpy warns of memory that numpy may not write."""
    return torch.from_dlpack(array) if len(array) else torch.empty(0, dtype=torch.int64)


# ---- what samples must satisfy


def check_samples(schema: Schema, samples: Samples, place: Place) -> None:
    """RequestError for the first value that the schema does not admit."""
    for one in schema.ids:
        _check_ids(samples.ids[one.name], schema, one, lambda at, name=one.name: place(name, at))
    floats = samples.floats.numpy()
    if not np.isfinite(floats).all():
        at, column = (int(x[0]) for x in np.nonzero(~np.isfinite(floats)))
        raise RequestError(f"{place(schema.floats[column], at)}: {floats[at, column]}; accepted: finite numbers")
    for sequence in schema.sequences:
        _check_sequence(schema, sequence, samples.sequences[sequence.name], place)
    for task in schema.tasks:
        label = samples.labels[task.name].numpy()
        _refuse(~np.isnan(label) & (label != 0) & (label != 1), label, f"label.{task.name}", "0, 1 or null", place)
        if task.given is not None:
            bad = ~np.isnan(label) & (samples.labels[task.given].numpy() != 1)
            _refuse(bad, label, f"label.{task.name}", f"null, since label.{task.given} is not 1", place)


def _check_sequence(schema: Schema, sequence: SequenceSchema, events: Events, place: Place) -> None:
    offsets = events.offsets.numpy()
    names = sequence_columns(sequence)
    lengths = np.diff(offsets)
    _refuse(lengths > sequence.longest, lengths, names[0], f"at most {sequence.longest} events", place)

    def event_place(name: str) -> Callable[[int], str]:
        def say(event: int) -> str:
            at, within = _row_of(offsets, event)
            return f"{place(name, at)}, event {within}"

        return say

    for feature, name in zip(sequence.features, names, strict=False):
        _check_ids(events.ids[feature.name], schema, feature, event_place(name))
    if events.times is not None and len(events.times) > 1:
        times = events.times.numpy()
        falls = times[1:] < times[:-1]
        borders = offsets[1:-1] - 1  # from the last event of a sample to the first of another a time may fall
        falls[borders[(borders >= 0) & (borders < len(falls))]] = False
        if falls.any():
            at = int(falls.argmax()) + 1
            where = event_place(names[-1])(at)
            raise RequestError(f"{where}: {times[at]} after {times[at - 1]}; accepted: times that do not fall")


def _check_ids(values: Tensor, schema: Schema, feature: Feature, say: Callable[[int], str]) -> None:
    rows, ids = schema.rows(feature.table), values.numpy()
    # Two plain passes; which one it is matters only once it is known that there is one.
    if len(ids) and (ids.min() < 0 or ids.max() >= rows):
        at = int(((ids < 0) | (ids >= rows)).argmax())
        raise RequestError(f"{say(at)}: id {ids[at]}; accepted: 0 to {rows - 1}, the rows of table {feature.table}")


def _refuse(bad: np.ndarray, values: np.ndarray, column: str, accepted: str, place: Place) -> None:
    if bad.any():
        at = int(bad.argmax())
        raise RequestError(f"{place(column, at)}: {values[at]}; accepted: {accepted}")


def _row_of(offsets: np.ndarray, event: int) -> tuple[int, int]:
    """(row from 0, event within it from 1)."""
    at = int(np.searchsorted(offsets, event, side="right")) - 1
    return at, event - int(offsets[at]) + 1


def check_form(schema: Schema, samples: Samples, where: str) -> None:
    """RequestError unless the tensors are those of the schema: names, types, shapes, offsets that fit."""
    size = len(samples)
    _check_names(where, "ids", samples.ids, (one.name for one in schema.ids))
    _check_names(where, "sequences", samples.sequences, (one.name for one in schema.sequences))
    _check_names(where, "labels", samples.labels, (one.name for one in schema.tasks))
    _check_tensor(f"{where}: keys", samples.keys, torch.int64, size)
    _check_tensor(f"{where}: floats", samples.floats, torch.float32, size, len(schema.floats))
    for name, x in samples.ids.items():
        _check_tensor(f"{where}: ids {name}", x, torch.int64, size)
    for name, x in samples.labels.items():
        _check_tensor(f"{where}: labels {name}", x, torch.float32, size)
    for sequence in schema.sequences:
        events, name = samples.sequences[sequence.name], f"{where}: sequence {sequence.name}"
        _check_tensor(f"{name}, offsets", events.offsets, torch.int64, size + 1)
        if int(events.offsets[0]) != 0 or bool((events.offsets.diff() < 0).any()):
            raise RequestError(f"{name}: offsets that fall or begin behind 0; accepted: from 0, non-decreasing")
        total = int(events.offsets[-1])
        _check_names(name, "features", events.ids, (one.name for one in sequence.features))
        if (events.times is not None) != sequence.timed:
            raise RequestError(f"{name}: times {'missing' if sequence.timed else 'given'}; accepted: as in the schema")
        for feature, x in [*events.ids.items(), *([("time", events.times)] if events.times is not None else [])]:
            _check_tensor(f"{name}, {feature}", x, torch.int64, total)


def _check_names(where: str, what: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    has, wants = sorted(found), sorted(wanted)
    if has != wants:
        raise RequestError(f"{where}: {what} {', '.join(has) or 'none'}; accepted: {', '.join(wants) or 'none'}")


def _check_tensor(where: str, x: Tensor, dtype: torch.dtype, *shape: int) -> None:
    if x.dtype != dtype or x.shape != shape or x.device.type != "cpu":
        found = f"{x.dtype} of shape {tuple(x.shape)} on {x.device}"
        raise RequestError(f"{where}: {found}; accepted: {dtype} of shape {shape} on cpu")
