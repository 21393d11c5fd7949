"""Counting rows per user in one pass, when neither the rows of a user lie together nor all rows fit in memory.

Batches are collected and folded into a running table (user, rows, first row) by Arrow's hash group-by. Folding only
when the collected rows are half as many as the users known so far keeps the work linear. Users are dealt to partitions
that fold one at a time, because a fold holds its table twice and a hash table besides.
"""

import numpy as np
import pyarrow as pa

PARTITIONS = 8  # a power of two
# Collected rows of a partition that are worth a fold, while its users are few.
FOLD_ROWS = 64_000


class GroupCount:
    """Adds up rows per user, batch by batch; users are integers, strings or binary, all of one type."""

    def __init__(self, fold_rows: int = FOLD_ROWS) -> None:
        self._partitions = [_Partition(fold_rows) for _ in range(PARTITIONS)]
        self._seen = 0

    def add(self, users: pa.Array, weights: pa.Array | None = None) -> None:
        """Count `users` [n] once each, or by int64 `weights` [n]. No nulls: callers report those with their place."""
        ones = weights if weights is not None else pa.array(np.ones(len(users), dtype=np.int64))
        first = pa.array(np.arange(self._seen, self._seen + len(users)))
        self._seen += len(users)
        partition = _partition_of(users)
        # A stable sort of bytes is a radix sort: one pass.
        table = pa.table([users, ones, first], names=_NAMES).take(pa.array(np.argsort(partition, kind="stable")))
        start = 0
        for part, rows in zip(self._partitions, np.bincount(partition, minlength=PARTITIONS).tolist(), strict=True):
            part.add(table.slice(start, rows))
            start += rows

    def finish(self) -> np.ndarray:
        """int64 [users]: the rows of each user, users in order of first appearance."""
        counts, firsts = zip(*(part.finish() for part in self._partitions), strict=True)
        # The order of groups is Arrow's own affair; a log must give the same lengths on every machine and release.
        return np.concatenate(counts)[np.argsort(np.concatenate(firsts))]


_NAMES = ["user", "rows", "first"]


class _Partition:
    """The users of one partition: those folded and the rows collected since."""

    def __init__(self, fold_rows: int) -> None:
        self._fold_rows = fold_rows
        self._known: pa.Table | None = None
        self._pending: list[pa.Table] = []
        self._pending_rows = 0

    def add(self, table: pa.Table) -> None:
        self._pending.append(table)
        self._pending_rows += len(table)
        if self._pending_rows > max(self._fold_rows, 0 if self._known is None else len(self._known) // 2):
            self._fold()

    def _fold(self) -> None:
        tables = ([] if self._known is None else [self._known]) + self._pending
        # One thread: on two cores, more threads cost twice the processor time and no less of the clock's.
        grouped = pa.concat_tables(tables).group_by("user", use_threads=False)
        self._known = grouped.aggregate([("rows", "sum"), ("first", "min")]).rename_columns(_NAMES)
        self._pending, self._pending_rows = [], 0

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 (rows, first row) of each user; the users themselves are let go."""
        if self._pending_rows:
            self._fold()
        known, self._known = self._known, None
        if known is None:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        return known.column("rows").to_numpy(), known.column("first").to_numpy()


def _partition_of(users: pa.Array) -> np.ndarray:
    """uint8 [n]: the partition of each user, from the low bits of a number or of a string's last byte."""
    if pa.types.is_integer(users.type):
        return (users.to_numpy() & (PARTITIONS - 1)).astype(np.uint8)
    large = pa.types.is_large_string(users.type) or pa.types.is_large_binary(users.type)
    _, ends, data = users.buffers()
    offsets = np.frombuffer(ends, dtype=np.int64 if large else np.int32)[users.offset : users.offset + len(users) + 1]
    letters = np.frombuffer(data if data is not None and data.size else b"\0", dtype=np.uint8)
    last = letters[np.maximum(offsets[1:] - 1, 0)] & (PARTITIONS - 1)
    last[offsets[1:] == offsets[:-1]] = 0  # an empty string has no last byte
    return last
