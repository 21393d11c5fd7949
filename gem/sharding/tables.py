"""Embedding tables over ranks: one class for three generations (TECHNIQUES of Meta's GEM, the sparse part).

    v1   one copy over all ranks
    v2   a copy in each group of ranks; groups exchange gradients and keep equal copies, weights and optimizer state
    v3   fully sharded 2D: one copy over all ranks, and each group of replicas gathers its shard before it is read

A step: ``gather`` (v3; it runs beside whatever comes next), ``fetch`` for each piece of the batch, backwards,
``exchange_gradients``, ``step``. Each rank asks each owner once for each distinct id, of all tables in one exchange of
ids and one of rows; gradients go back the same way and are added up on the owner in the order of the ranks. The
optimizer is row-wise Adagrad on the owner (gem.train.optimizers), whose state is as long as the rows it holds.

Where the source (v3) gathers shards again in the backward, updates them and reduce-scatters parameters, gradients' rows
are sent to whose slice they are for: the same sums and no second gathered copy.

Legend: N ids of a request, U distinct ones of a table, D columns, G ranks that a copy is cut over.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from gem.errors import RequestError
from gem.sharding.collectives import Traffic, Wire
from gem.sharding.mesh import Meshes
from gem.sharding.placement import Piece, Placement, Range, Table
from gem.train.optimizers import GradientRows, accumulators, lookup, recorded, summed, update_rows

Weights = Callable[[Table, Piece], Tensor]  # what a piece begins with


@dataclass(eq=False)
class _Route:
    """One exchange of ids: who asked whom for what, and what was handed out."""

    tables: list[str]  # in the order of the exchange
    send: dict[str, list[int]]  # by table: distinct ids that go to each rank
    receive_GT: list[list[int]]  # from each rank, by table
    asked: dict[str, list[Tensor]]  # by table: local row numbers that each rank asked for
    handed: dict[str, Parameter] = field(default_factory=dict)  # by table: rows [U, D], which lookups read


class ShardedTables:
    """Tables of a plan on this rank. Every rank makes the same calls in the same order.

    weights   gives the piece of a table that this rank begins with; see ``sliced``
    lr        of the next step; a plain attribute, for schedules
    """

    def __init__(
        self, tables: Sequence[Table], meshes: Meshes, weights: Weights, *, lr: float, eps: float = 1e-8,
        initial: float = 0.0, device: torch.device | None = None, traffic: Traffic | None = None,
    ) -> None:  # fmt: skip
        self.kind, self.lr, self.eps = meshes.plan.tables, lr, eps
        self.traffic = traffic or Traffic()
        self.owners = Wire(meshes.tables.get_group("table_shard"), self.traffic)
        self.replicas = Wire(meshes.tables.get_group("table_replica"), self.traffic)
        self.placement = Placement(tables, self.owners.size)
        self.tables = {table.name: table for table in tables}
        self.pieces = {table.name: self.placement.piece(table, self.owners.rank) for table in tables}
        self.held = {name: self._held(piece) for name, piece in self.pieces.items()}
        self.weights = {name: weights(self.tables[name], piece).to(device) for name, piece in self.held.items()}
        for name, piece in self.held.items():
            if tuple(self.weights[name].shape) != piece.shape:
                found = tuple(self.weights[name].shape)
                raise RequestError(f"table {name!r}: weights {found} of rank's piece; accepted: {piece.shape}")
        self.sums = {name: accumulators(weight, initial) for name, weight in self.weights.items()}
        self._shards: dict[str, Tensor] = {}  # what lookups read on this rank
        self._waiting: list[tuple[str, Tensor, Any]] = []
        self._routes: list[_Route] = []
        self._gradients: dict[str, GradientRows] = {}

    def _held(self, piece: Piece) -> Piece:
        """What this rank keeps of its group's piece: v3 cuts its rows over the replicas."""
        if self.kind != "v3":
            return piece
        return Piece(piece.rows.chunk(self.replicas.size, self.replicas.rank), piece.columns)

    # -- reading -------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Start to collect the shards that ``fetch`` reads. Only v3 has to; to the others it means nothing."""
        self._shards = {}
        for name, own in self.weights.items():
            if self.kind != "v3" or self.replicas.size == 1:
                self._shards[name] = own
                continue
            piece = self.pieces[name]
            room = -(-len(piece.rows) // self.replicas.size)
            padded = own.new_zeros(room, own.shape[1])
            padded[: len(own)] = own
            shard = own.new_empty(room * self.replicas.size, own.shape[1])
            work = self.replicas.gather_into(shard, padded, "table shards", async_op=True)
            self._waiting.append((name, shard, work))

    def release(self) -> None:
        """Drop what ``gather`` collected: after the last ``fetch`` of a step, before activations are at their peak."""
        self._arrived()
        self._shards = {}

    def _arrived(self) -> None:
        for name, shard, work in self._waiting:
            work.wait()
            # Chunks but the last are full, so the rows lie as they are numbered, and what is behind them is padding.
            self._shards[name] = shard[: len(self.pieces[name].rows)]
        self._waiting.clear()

    def fetch(self, requests: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Rows [*ids.shape, D] for each (table, ids of any shape); their gradients are recorded as backwards run."""
        for name, ids in requests:
            if name not in self.tables:
                raise RequestError(f"table {name!r}; accepted: {', '.join(self.tables)}")
            if ids.dtype not in (torch.int32, torch.int64):
                raise RequestError(f"table {name!r}: ids of {ids.dtype}; accepted: int32, int64")
        if not self._shards and not self._waiting:
            self.gather()
        wanted: dict[str, list[Tensor]] = {name: [] for name in self.tables}
        for name, ids in requests:
            wanted[name].append(ids.reshape(-1).long())
        distinct, which = {}, {}
        for name, parts in wanted.items():
            flat_N = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=self._device)
            distinct[name], inverse_N = torch.unique(flat_N, return_inverse=True)
            which[name] = iter(inverse_N.split([len(part) for part in parts]))
            self._check_ids(name, distinct[name])
        route = self._ask(distinct)
        self._routes.append(route)
        return [lookup(next(which[name]).reshape(ids.shape), route.handed[name]) for name, ids in requests]

    def _check_ids(self, name: str, ids_U: Tensor) -> None:
        if len(ids_U) and not (int(ids_U[0]) >= 0 and int(ids_U[-1]) < self.tables[name].rows):
            wrong = int(ids_U[0]) if int(ids_U[0]) < 0 else int(ids_U[-1])
            raise RequestError(f"table {name!r}: id {wrong}; accepted: 0 to {self.tables[name].rows - 1}")

    @property
    def _device(self) -> torch.device:
        return next(iter(self.weights.values())).device

    def _ask(self, distinct: Mapping[str, Tensor]) -> _Route:
        """Exchange ids and rows."""
        names, ranks = list(self.tables), range(self.owners.size)
        send: dict[str, list[int]] = {}
        parts: list[list[Tensor]] = [[] for _ in ranks]  # by rank, by table: row numbers of the owner
        for name in names:
            table, ids_U = self.tables[name], distinct[name]
            if table.cut == "row":
                bounds = torch.tensor(self.placement.bounds(table), device=ids_U.device)
                at = torch.searchsorted(ids_U, bounds).tolist()
                ranges = [(at[g], at[g + 1], int(bounds[g])) for g in ranks]
            else:
                owners = set(self.placement.owners(table))
                ranges = [(0, len(ids_U) if g in owners else 0, 0) for g in ranks]
            send[name] = [stop - start for start, stop, _ in ranges]
            for g, (start, stop, first) in enumerate(ranges):
                parts[g].append(ids_U[start:stop] - first)
        counts_GT = torch.tensor([[send[name][g] for name in names] for g in ranks], device=self._device)
        receive_GT = self.owners.transpose(counts_GT, "counts").tolist()
        to, from_ = [sum(row) for row in counts_GT.tolist()], [sum(row) for row in receive_GT]
        ids_N = self.owners.all_to_all(torch.cat([x for part in parts for x in part]), to, from_, "ids")
        asked: dict[str, list[Tensor]] = {name: [] for name in names}
        for row, part_N in zip(receive_GT, ids_N.split(from_), strict=True):
            for name, local in zip(names, part_N.split(row), strict=True):
                asked[name].append(local)
        route = _Route(names, send, receive_GT, asked)
        self._answer(route)
        return route

    @torch.no_grad()
    def _answer(self, route: _Route) -> None:
        self._arrived()
        ranks = range(self.owners.size)
        rows = [self._shards[name].index_select(0, route.asked[name][g]) for g in ranks for name in route.tables]
        found = self._rows_back(route, torch.cat([x.reshape(-1) for x in rows]), "rows", backwards=False)
        for name, parts in found.items():
            table = self.tables[name]
            whole = torch.cat(parts, 1) if table.cut == "column" else torch.cat(parts, 0)
            route.handed[name] = Parameter(whole)

    def _rows_back(self, route: _Route, flat: Tensor, what: str, backwards: bool) -> dict[str, list[Tensor]]:
        """Rows over a route: from owners to who asked, by table and rank; ``backwards``: gradients, the other way."""
        ranks, names = range(self.owners.size), route.tables
        width = {(name, g): len(self.placement.piece(self.tables[name], g).columns) for name in names for g in ranks}
        own = self.owners.rank
        asking = [[route.send[name][g] * width[name, g] for name in names] for g in ranks]  # elements
        owning = [[n * width[name, own] for name, n in zip(names, route.receive_GT[g], strict=True)] for g in ranks]
        send, receive = (asking, owning) if backwards else (owning, asking)
        got = self.owners.all_to_all(flat, [sum(x) for x in send], [sum(x) for x in receive], what)
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        for g, part in zip(ranks, got.split([sum(x) for x in receive]), strict=True):
            for name, values in zip(names, part.split(receive[g]), strict=True):
                columns = width[name, own] if backwards else width[name, g]
                count = route.receive_GT[g][names.index(name)] if backwards else route.send[name][g]
                found[name].append(values.reshape(count, columns))
        if not backwards:
            owners = {name: self.placement.owners(self.tables[name]) for name in names}
            found = {name: [parts[g] for g in owners[name]] for name, parts in found.items()}
        return found

    # -- learning ------------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget the gradients, and what was handed out."""
        self._routes.clear()
        self._gradients.clear()

    @torch.no_grad()
    def exchange_gradients(self) -> None:
        """Bring the sums of all ranks' gradients to who keeps the rows. After the last backward of a step."""
        parts: dict[str, list[GradientRows]] = {name: [] for name in self.tables}
        for route in self._routes:
            for name, found in self._to_owners(route).items():
                parts[name] += found
        self._routes.clear()
        for name in self.tables:
            total = summed(parts[name]) if parts[name] else self._none(name)
            self._gradients[name] = self._among_replicas(name, total)

    def _to_owners(self, route: _Route) -> dict[str, list[GradientRows]]:
        gradients = {}
        for name, rows_UD in route.handed.items():
            records = recorded(rows_UD)
            gradient_UD = torch.zeros_like(rows_UD, dtype=self._sums_dtype(name))
            if records:
                ids_V, rows_VD, _ = summed(records)
                gradient_UD.index_copy_(0, ids_V, rows_VD.to(gradient_UD.dtype))
            gradients[name] = gradient_UD
        flat = []
        for g in range(self.owners.size):
            for name in route.tables:
                table, count = self.tables[name], route.send[name][g]
                if table.cut == "column":
                    columns = self.placement.piece(table, g).columns
                    flat.append(gradients[name][:count, columns.start : columns.stop])
                else:
                    start = sum(route.send[name][:g]) if table.cut == "row" else 0
                    flat.append(gradients[name][start : start + count])
        found = self._rows_back(route, torch.cat([x.reshape(-1) for x in flat]), "gradients", backwards=True)
        return {
            name: [GradientRows(ids, rows) for ids, rows in zip(route.asked[name], parts, strict=True)]
            for name, parts in found.items()
        }

    def _sums_dtype(self, name: str) -> torch.dtype:
        return self.sums[name].dtype

    def _none(self, name: str) -> GradientRows:
        rows = torch.empty(0, self.weights[name].shape[1], dtype=self._sums_dtype(name), device=self._device)
        return GradientRows(torch.empty(0, dtype=torch.int64, device=self._device), rows, True)

    def _among_replicas(self, name: str, own: GradientRows) -> GradientRows:
        """v2: the sum of all groups' gradients, on each. v3: that of this rank's slice, with its own row numbers."""
        wire, ranks = self.replicas, self.replicas.size
        if ranks == 1:
            return own
        if self.kind == "v2":
            ids, rows = (wire.all_gather(x, "copies' gradients") for x in own[:2])
            return summed([GradientRows(i, r) for i, r in zip(ids, rows, strict=True)])
        rows = Range(0, len(self.pieces[name].rows))
        starts = torch.tensor([rows.chunk(ranks, r).start for r in range(ranks)] + [len(rows)], device=self._device)
        at = torch.searchsorted(own.ids_N, starts).tolist()
        send = [b - a for a, b in pairwise(at)]
        receive = wire.transpose(torch.tensor(send, device=self._device)[:, None], "counts")[:, 0].tolist()
        ids = wire.all_to_all(own.ids_N, send, receive, "slices' gradients").split(receive)
        values = wire.all_to_all(own.rows_ND, send, receive, "slices' gradients").split(receive)
        first = int(starts[wire.rank])
        return summed([GradientRows(i - first, v) for i, v in zip(ids, values, strict=True)])

    @torch.no_grad()
    def sparse_grad_norm(self) -> Tensor:
        """[]: the norm of all tables' gradients together, as if they were dense and of one process."""
        squares = [self._gradients[name].rows_ND.square().sum() for name in self.tables]
        total = self.owners.sum(torch.stack(squares).sum())
        if self.kind == "v3":
            self.replicas.sum(total)
        return total.sqrt()

    @torch.no_grad()
    def step(self, scale: float | Tensor = 1.0) -> None:
        """Update the rows that were touched anywhere by their gradients times ``scale``."""
        for name, table in self.tables.items():
            ids_U, rows_UD, _ = self._gradients.get(name) or self._none(name)
            g_UD, mean_U = rows_UD * scale, None
            if table.cut == "column":
                # All owners of columns were asked for the same rows; those without columns add nothing.
                mean_U = self._sum_of_columns(table, ids_U, g_UD.square().sum(1)) / table.dim
            if len(ids_U):
                update_rows(self.weights[name], self.sums[name], None, ids_U, g_UD, self.lr, self.eps, mean_U)
        self._shards = {}
        self._gradients.clear()

    def _sum_of_columns(self, table: Table, ids_U: Tensor, squares_U: Tensor) -> Tensor:
        owners = self.placement.owners(table)
        if len(owners) == 1:
            return squares_U
        if self.owners.rank not in owners:  # takes part with what it was not asked for
            count = torch.zeros(1, dtype=torch.int64, device=self._device)
        else:
            count = torch.tensor([len(ids_U)], device=self._device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self.owners.group)
        padded = squares_U.new_zeros(int(count))
        padded[: len(squares_U)] = squares_U
        return self.owners.sum(padded)[: len(squares_U)]

    # -- state ---------------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        """Of weights and optimizer state between steps."""
        return sum(x.nbytes for kind in (self.weights, self.sums) for x in kind.values())


def sliced(whole: Mapping[str, Tensor]) -> Weights:
    """Pieces of whole tables, for who has them all."""

    def weights(table: Table, piece: Piece) -> Tensor:
        rows, columns = piece.rows, piece.columns
        return whole[table.name][rows.start : rows.stop, columns.start : columns.stop].detach().clone()

    return weights


def drawn(seed: int, deviation: float = 0.05, dtype: torch.dtype = torch.float32) -> Weights:
    """Normal numbers that are a row's own: the same for every plan, and no rank draws more than it keeps.

    Each block of rows has a generator of its own, seeded by table and block.
    """
    block = 4096

    def weights(table: Table, piece: Piece) -> Tensor:
        rows, columns = piece.rows, piece.columns
        found = torch.empty(piece.shape, dtype=dtype)
        for number in range(rows.start // block, math.ceil(rows.stop / block)):
            name = sum(byte * 257**i for i, byte in enumerate(table.name.encode())) % 2**31
            generator = torch.Generator().manual_seed((seed * 1_000_003 + name) * 65_537 + number)
            first, last = number * block, min((number + 1) * block, table.rows)
            drawn = torch.randn(last - first, table.dim, generator=generator, dtype=dtype) * deviation
            start, stop = max(first, rows.start), min(last, rows.stop)
            found[start - rows.start : stop - rows.start] = drawn[
                start - first : stop - first, columns.start : columns.stop
            ]
        return found

    return weights
