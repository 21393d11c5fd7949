"""Which rank of a group holds which rows and columns of which table.

A table lies whole on one rank ("table"), in ranges of rows ("row") or in ranges of columns ("column"). Ranges are
torch.chunk's, as DTensor cuts: the first ranks hold ceil(n / ranks) each, the last ones less or nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gem.errors import RequestError

Cut = Literal["table", "row", "column"]


@dataclass(frozen=True)
class Table:
    """A table to be placed."""

    name: str
    rows: int
    dim: int
    cut: Cut = "row"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.dim < 1:
            raise RequestError(f"table {self.name!r}: {self.rows} rows of {self.dim}; accepted: 1 or more")
        if self.cut not in ("table", "row", "column"):
            raise RequestError(f"table {self.name!r}: cut {self.cut!r}; accepted: table, row, column")


@dataclass(frozen=True)
class Range:
    """From ``start`` up to and without ``stop``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def chunk(self, ranks: int, rank: int) -> "Range":
        """This rank's part, in the same counting."""
        size = -(-len(self) // ranks)
        start = min(self.start + rank * size, self.stop)
        return Range(start, min(start + size, self.stop))


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one table; rows or columns may be none."""

    rows: Range
    columns: Range

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, columns."""
        return len(self.rows), len(self.columns)


class Placement:
    """Tables over the ranks of a group."""

    def __init__(self, tables: Sequence[Table], ranks: int) -> None:
        self.tables, self.ranks = list(tables), ranks
        if len({table.name for table in tables}) < len(self.tables):
            raise RequestError(f"tables: {[table.name for table in tables]}; accepted: each name once")
        self.owner: dict[str, int] = {}  # of whole tables
        load = [0] * ranks
        # The largest first to who holds least: the sum on a rank exceeds the mean by a table at most.
        for table in sorted(tables, key=lambda table: -table.rows * table.dim):
            if table.cut == "table":
                rank = load.index(min(load))
                self.owner[table.name] = rank
                load[rank] += table.rows * table.dim

    def piece(self, table: Table, rank: int) -> Piece:
        """What a rank holds of a table."""
        rows, columns = Range(0, table.rows), Range(0, table.dim)
        if table.cut == "row":
            return Piece(rows.chunk(self.ranks, rank), columns)
        if table.cut == "column":
            columns = columns.chunk(self.ranks, rank)
            return Piece(rows if len(columns) else Range(0, 0), columns)
        there = rank == self.owner[table.name]
        return Piece(rows if there else Range(0, 0), columns)

    def owners(self, table: Table) -> list[int]:
        """Ranks that hold something of a table, in the order of what they hold."""
        return [rank for rank in range(self.ranks) if self.piece(table, rank).shape[0]]

    def bounds(self, table: Table) -> list[int]:
        """For tables cut in rows: the first row of each rank, and the end; [ranks + 1]."""
        return [self.piece(table, rank).rows.start for rank in range(self.ranks)] + [table.rows]


@dataclass(frozen=True, eq=False)
class Group:
    """Tables of one width, cut in columns or not: on each rank their pieces lie in one matrix, one behind the other.

    All ids of a group are numbered on: id i of a table is ``offsets`` of that table + i. So numbered they fall into
    blocks, runs of rows that lie side by side on one owner; ``shift`` is what leads from a number to the owner's row.
    An owner's matrix is what its replicas gather, replica after replica, ``rows`` of each: the last rows of a table
    that replicas do not divide are padding. Tables cut in columns have the same rows on all owners, so that their
    blocks have no owner.
    """

    names: list[str]
    dim: int
    by_column: bool
    columns: list[Range]  # by owner; all of them where tables are not cut in columns
    rows: list[int]  # by owner, of one replica
    first: list[dict[str, int]]  # by owner and table: its first row on a replica
    offsets: dict[str, int]
    bounds: list[int]  # numbers at which blocks begin, and the end
    owners: list[int]  # by block
    shifts: list[int]  # by block

    @property
    def tables(self) -> int:
        """How many there are."""
        return len(self.names)


def grouped(placement: Placement, replicas: int) -> list[Group]:
    """Groups of all tables, in the order in which they appear; ``replicas``: that a piece's rows are cut over."""
    found: dict[tuple[int, bool], list[Table]] = {}
    for table in placement.tables:
        found.setdefault((table.dim, table.cut == "column"), []).append(table)
    return [_group(placement, tables, *key, replicas) for key, tables in found.items()]


def _group(placement: Placement, tables: list[Table], dim: int, by_column: bool, replicas: int) -> Group:
    ranks = range(placement.ranks)
    rows = [0 for _ in ranks]
    first: list[dict[str, int]] = [{} for _ in ranks]
    runs = {}  # what an owner has of a table, whatever its columns
    for table in tables:
        for rank in ranks:
            run = Range(0, table.rows) if by_column else placement.piece(table, rank).rows
            runs[table.name, rank] = run
            first[rank][table.name] = rows[rank]
            rows[rank] += -(-len(run) // replicas)
    offsets, bounds, owners, shifts, end = {}, [], [], [], 0
    for table in tables:
        offsets[table.name] = end
        for owner in ranks[:1] if by_column else ranks:
            for replica in range(replicas):
                part = runs[table.name, owner].chunk(replicas, replica)
                if len(part):
                    bounds.append(end + part.start)
                    owners.append(owner)
                    shifts.append(replica * rows[owner] + first[owner][table.name] - bounds[-1])
        end += table.rows
    columns = [Range(0, dim).chunk(placement.ranks, rank) if by_column else Range(0, dim) for rank in ranks]
    names = [table.name for table in tables]
    return Group(names, dim, by_column, columns, rows, first, offsets, [*bounds, end], owners, shifts)
