"""Embedding tables over ranks: one class for three generations (TECHNIQUES of Meta's GEM, the sparse part).

    v1   one copy over all ranks
    v2   a copy in each group of ranks; groups exchange gradients and keep equal copies, weights and optimizer state
    v3   fully sharded 2D: one copy over all ranks, and each group of replicas gathers its shard before it is read

A step: ``fetch`` or ``pooled`` for each piece of the batch, backwards, ``exchange_gradients``, ``step``, ``gather``: v3
collects what the next step reads, beside the dense optimizer's work and all that comes before the next lookup; what was
collected is dropped inside the last lookup (``expect``), as soon as rows are read from it. All tables share each
exchange (gem.sharding.routes, gem.sharding.lookups): counts, ids, rows, and gradients on the way back. The optimizer is
row-wise Adagrad on the owner (gem.sharding.adagrad), whose state is as long as the rows it holds.

Where the source (v3) gathers shards again in the backward, updates them and reduce-scatters parameters, gradients' rows
are sent to whose slice they are for: the same sums and no second gathered copy.

Legend: N ids of a request, B its samples, V rows that any rank asked for, R rows of a replica's shard, D columns of a
table, W of them on this rank, Q replicas, C groups of tables (gem.sharding.placement).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gem.errors import RequestError
from gem.sharding.adagrad import update
from gem.sharding.collectives import Traffic, Wire
from gem.sharding.lookups import Asked, BagRoute, HandOut, RowRoute
from gem.sharding.mesh import Meshes
from gem.sharding.placement import Group, Piece, Placement, Table, grouped
from gem.sharding.routes import Roads, Sums

Weights = Callable[[Table, Piece], Tensor]  # what a piece begins with
Lookup = tuple[str, Tensor]  # table, ids of any shape
Bags = tuple[str, Tensor, Tensor]  # table, ids [N], offsets [B + 1]: sample b has ids[offsets[b]:offsets[b + 1]]
_PIECE = 2**17  # elements updated at once on a CPU, so that they stay in its cache from sum to update


class ShardedTables:
    """Tables of a plan on this rank. Every rank makes the same calls in the same order.

    weights     gives the piece of a table that this rank begins with; see ``sliced``. All of one dtype: fp32, bf16
                (updated in fp32 and rounded stochastically, gem.sharding.adagrad) or fp64
    lr          of the next step; a plain attribute, for schedules
    dtype       of the rows that are handed out; None: the weights'
    whole_rows  of tables cut in columns: whether Adagrad's mean over a row is that of the whole row, as in one process,
                or of the columns that a rank has, as in TorchRec
    """

    def __init__(
        self, tables: Sequence[Table], meshes: Meshes, weights: Weights, *, lr: float, eps: float = 1e-8,
        initial: float = 0.0, device: torch.device | None = None, traffic: Traffic | None = None,
        dtype: torch.dtype | None = None, whole_rows: bool = True,
    ) -> None:  # fmt: skip
        for what, value, least in (("lr", lr, 0.0), ("eps", eps, 1e-30), ("initial", initial, 0.0)):
            if not (math.isfinite(value) and value >= least):
                raise RequestError(f"tables: {what} {value}; accepted: finite, {least} or more")
        if not tables:
            raise RequestError("tables: none; accepted: one or more")
        self.kind, self.lr, self.eps, self.whole_rows = meshes.plan.tables, lr, eps, whole_rows
        self.traffic = traffic or Traffic()
        self.owners = Wire(meshes.tables.get_group("table_shard"), self.traffic)
        self.replicas = Wire(meshes.tables.get_group("table_replica"), self.traffic)
        self.placement = Placement(tables, self.owners.size)
        self.tables = {table.name: table for table in tables}
        self.pieces = {table.name: self.placement.piece(table, self.owners.rank) for table in tables}
        self.held = {name: self._held(piece) for name, piece in self.pieces.items()}
        self._copies = self.replicas.size if self.kind == "v3" else 1  # that a shard is gathered from
        self._groups = grouped(self.placement, self._copies)
        begun = {name: weights(self.tables[name], piece).to(device) for name, piece in self.held.items()}
        for name, piece in self.held.items():
            if tuple(begun[name].shape) != piece.shape:
                found = tuple(begun[name].shape)
                raise RequestError(f"table {name!r}: weights {found} of rank's piece; accepted: {piece.shape}")
        kinds = {weight.dtype for weight in begun.values()}
        if len(kinds) > 1 or not kinds <= {torch.float32, torch.bfloat16, torch.float64}:
            raise RequestError(f"tables: weights of {sorted(map(str, kinds))}; accepted: one of fp32, bf16, fp64")
        self.dtype = dtype or next(iter(kinds))
        self._sums_dtype = torch.float64 if torch.float64 in kinds else torch.float32
        # By group [R, W] and [R]; by table its rows of them, which are what is trained.
        self._own = [self._matrix(group, begun) for group in self._groups]
        self._sums = [torch.full((len(own),), initial, dtype=self._sums_dtype, device=device) for own in self._own]
        self.weights, self.sums = self._views(self._own), self._views(self._sums)
        self.roads = Roads(self.owners, self._groups, self._copies, self._sums_dtype)
        self._places = {name: self._blocks_of(group, name) for group in self._groups for name in group.names}
        self._anchor = torch.zeros((), requires_grad=True, device=device)
        self._shards: list[Tensor] = []  # what is read on this rank, by group
        self._lookups = 0  # that are left until they are dropped; 0: nobody has said
        self._waiting: list[Any] = []
        self._routes: list[RowRoute | BagRoute] = []
        self._gradients: list[Sums] = []

    def _held(self, piece: Piece) -> Piece:
        """What this rank keeps of its group's piece: v3 cuts its rows over the replicas."""
        if self.kind != "v3":
            return piece
        return Piece(piece.rows.chunk(self.replicas.size, self.replicas.rank), piece.columns)

    def _matrix(self, group: Group, begun: Mapping[str, Tensor]) -> Tensor:
        rank = self.owners.rank
        width = len(group.columns[rank])
        found = begun[group.names[0]].new_zeros(group.rows[rank] if width else 0, width)
        for name in group.names:
            first = group.first[rank][name]
            found[first : first + len(begun[name])] = begun[name]
        return found

    def _views(self, matrices: Sequence[Tensor]) -> dict[str, Tensor]:
        found = {}
        for group, matrix in zip(self._groups, matrices, strict=True):
            for name in group.names:
                first = group.first[self.owners.rank][name]
                found[name] = matrix[first : first + len(self.held[name].rows)]
        return {name: found[name] for name in self.tables}

    # -- reading -------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Start to collect the shards that are read, unless they are there. To all but v3 it means nothing."""
        if self._shards:
            return
        self._shards = list(self._own)
        if self._copies == 1:
            return
        for number, own in enumerate(self._own):
            if own.numel():
                self._shards[number] = own.new_empty(self._copies * len(own), own.shape[1])
                work = self.replicas.gather_into(self._shards[number], own, "table shards", async_op=True)
                self._waiting.append(work)

    def expect(self, lookups: int) -> None:
        """Say how many lookups come until the next ``step``: within the last what ``gather`` collected is dropped."""
        self._lookups = lookups

    def release(self) -> None:
        """Drop what ``gather`` collected and no lookup has: the weights are others now, or nobody reads on."""
        self._wait()
        self._shards, self._lookups = [], 0

    def _wait(self) -> None:
        for work in self._waiting:
            work.wait()
        self._waiting.clear()

    def _arrived(self) -> list[Tensor]:
        """The shards, for one lookup; after the last one only its caller has them."""
        self._wait()
        found, self._lookups = self._shards, self._lookups - 1
        if self._lookups == 0:
            self._shards = []
        return found

    def fetch(self, requests: Sequence[Lookup]) -> list[Tensor]:
        """Rows [*ids.shape, D] for each request, of all tables in one go; backwards leave their gradients here."""
        self._check([(name, ids) for name, ids in requests])
        if not self._shards:
            self.gather()
        numbered: list[Tensor | None] = []
        members = self._members(requests)
        for group, mine in zip(self._groups, members, strict=True):
            # Of many tables together there may be more rows than int32 has numbers.
            ids = [requests[i][1].reshape(-1).long() + group.offsets[requests[i][0]] for i in mine]
            numbered.append(torch.cat(ids) if ids else None)
        with torch.no_grad():
            route = RowRoute(self.roads, numbered, self._arrived, self._device)
        shapes = [torch.Size((*ids.shape, self.tables[name].dim)) for name, ids in requests]
        return self._handed_out(route, members, shapes)

    def pooled(self, requests: Sequence[Bags]) -> list[Tensor]:
        """Sums [B, D] of each sample's rows, zeros where it has none; the owners form them, a row a sample."""
        self._check([(name, ids) for name, ids, _ in requests])
        for name, ids, offsets in requests:
            if offsets.dtype not in (torch.int32, torch.int64):
                raise RequestError(f"table {name!r}: offsets of {offsets.dtype}; accepted: int32, int64")
            right = ids.dim() == offsets.dim() == 1 and offsets.numel() > 0
            if not right or offsets[[0, -1]].tolist() != [0, len(ids)] or bool((offsets[1:] < offsets[:-1]).any()):
                raise RequestError(
                    f"table {name!r}: offsets {tuple(offsets.shape)} of ids {tuple(ids.shape)}; "
                    f"accepted: [samples + 1], from 0 to the number of ids, none less than the one before"
                )
        requests = [(name, ids.long(), offsets.long()) for name, ids, offsets in requests]
        if not self._shards:
            self.gather()
        members = self._members(requests)
        for mine in members:  # what goes to one owner together: whole tables then need no sorting
            mine.sort(key=lambda i: self._places[requests[i][0]][3])
        asked = [self._bags([requests[i] for i in mine]) if mine else None for mine in members]
        with torch.no_grad():
            route = BagRoute(self.roads, asked, self._arrived, self._device)
        shapes = [torch.Size((len(offsets) - 1, self.tables[name].dim)) for name, _, offsets in requests]
        return self._handed_out(route, members, shapes)

    def _handed_out(
        self, route: RowRoute | BagRoute, members: list[list[int]], shapes: list[torch.Size]
    ) -> list[Tensor]:
        self._routes.append(route)
        found: dict[int, Tensor] = {}
        for lane, mine in zip(route.lanes, members, strict=True):
            if mine:
                rows = HandOut.apply(self._anchor, lane, [shapes[i] for i in mine], self.dtype)
                found |= dict(zip(mine, rows, strict=True))
        return [found[i] for i in range(len(shapes))]

    def _members(self, requests: Sequence[Any]) -> list[list[int]]:
        """Of each group the requests' numbers."""
        return [[i for i, one in enumerate(requests) if one[0] in group.offsets] for group in self._groups]

    def _bags(self, requests: Sequence[Bags]) -> Asked:
        """All of one group, those of tables that lie whole in the order of their places."""
        lengths_B = torch.cat([offsets.diff() for _, _, offsets in requests])
        blocks = [self._places[name] for name, _, _ in requests]
        if all(place.shape[0] == 1 for _, place, _, _ in blocks):
            bags_at = [0] * self.owners.size
            for (_, _, offsets), (*_, place) in zip(requests, blocks, strict=True):
                bags_at[place] += offsets.shape[0] - 1
            addresses = [ids + shift for (_, ids, _), (_, _, shift, _) in zip(requests, blocks, strict=True)]
            return Asked(torch.cat(addresses), None, lengths_B, bags_at)
        addresses, places = [], []
        for (_, ids, _), (starts, place, shift, _) in zip(requests, blocks, strict=True):
            block = torch.bucketize(ids, starts, right=True)
            addresses.append(shift.index_select(0, block).add_(ids))
            places.append(place.index_select(0, block))
        return Asked(torch.cat(addresses), torch.cat(places), lengths_B, [])

    def _blocks_of(self, group: Group, name: str) -> tuple[Tensor, Tensor, Tensor, int]:
        """Ids at which a table's second and later blocks begin; of each block its owner's place, and address less id;
        the first block's place."""
        first = group.offsets[name]
        at = [s for s, bound in enumerate(group.bounds[:-1]) if first <= bound < first + self.tables[name].rows]
        starts = torch.tensor([group.bounds[s] - first for s in at[1:]], dtype=torch.int64, device=self._device)
        places = [self.roads.place_of[group.owners[s]] for s in at]
        shifts = torch.tensor([group.shifts[s] + first for s in at], device=self._device)
        return starts, torch.tensor(places, device=self._device), shifts, places[0]

    def _check(self, requests: Sequence[Lookup]) -> None:
        least_and_most = []
        for name, ids in requests:
            if name not in self.tables:
                raise RequestError(f"table {name!r}; accepted: {', '.join(self.tables)}")
            if ids.dtype not in (torch.int32, torch.int64):
                raise RequestError(f"table {name!r}: ids of {ids.dtype}; accepted: int32, int64")
            if ids.numel():
                least_and_most += ids.aminmax()
        found = iter(torch.stack([x.long() for x in least_and_most]).tolist() if least_and_most else [])
        for name, ids in requests:
            if ids.numel():
                least, most = next(found), next(found)
                if least < 0 or most >= self.tables[name].rows:
                    wrong = least if least < 0 else most
                    raise RequestError(f"table {name!r}: id {wrong}; accepted: 0 to {self.tables[name].rows - 1}")

    @property
    def _device(self) -> torch.device:
        return self._own[0].device

    # -- learning ------------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget the gradients, and what was handed out."""
        self._routes, self._gradients = [], []

    @torch.no_grad()
    def exchange_gradients(self) -> None:
        """Bring the sums of all ranks' gradients to who keeps the rows. After the last backward of a step."""
        parts: list[list[Sums]] = [[] for _ in self._groups]
        for route in self._routes:
            for mine, part in zip(parts, route.gradients(), strict=True):
                mine.append(part)
        self._routes = []
        found = [
            Sums.total(mine, own.shape[1], self._sums_dtype, self._device)
            for mine, own in zip(parts, self._own, strict=True)
        ]
        if self.replicas.size > 1:
            found = self._to_slices(found) if self.kind == "v3" else self._to_copies(found)
        self._gradients = found

    def _to_copies(self, own: list[Sums]) -> list[Sums]:
        """v2: the sum of all groups' gradients, on each: added up in the order of the groups, to the same bits."""
        wire, widths = self.replicas, [x.shape[1] for x in self._own]
        counts = wire.transpose(
            torch.tensor([[len(one.ids_V) for one in own]] * wire.size, device=self._device), "counts"
        ).tolist()
        flat = torch.cat([one.ids_V.to(self.roads.id_type) for one in own])
        ids = wire.all_gather(flat, "copies' gradients", [sum(of_rank) for of_rank in counts])
        lengths = [[n * width for n, width in zip(of_rank, widths, strict=True)] for of_rank in counts]
        values = [one.rows_VW.view(-1) for one in own]
        flat = values[0] if len(own) == 1 else torch.cat(values)
        rows = wire.all_gather(flat, "copies' gradients", [sum(of_rank) for of_rank in lengths])
        return self._sorted_out(
            [x.split(n) for x, n in zip(ids, counts, strict=True)],
            [x.split(n) for x, n in zip(rows, lengths, strict=True)],
        )

    def _to_slices(self, own: list[Sums]) -> list[Sums]:
        """v3: of the sum of all replicas' gradients those of this rank's slice, by its own row numbers."""
        wire, size = self.replicas, self.replicas.size
        send_CQ, sizes = [], [self._groups[number].rows[self.owners.rank] for number in range(len(own))]
        for one, rows in zip(own, sizes, strict=True):
            bounds = torch.arange(size + 1, device=self._device) * rows
            send_CQ.append(torch.searchsorted(one.ids_V, bounds).diff())
        send_QC = torch.stack(send_CQ, 1)
        receive = wire.transpose(send_QC, "counts").tolist()
        send, widths = send_QC.tolist(), [x.shape[1] for x in self._own]
        ids_CQ = [one.ids_V.split([of_rank[c] for of_rank in send]) for c, one in enumerate(own)]
        rows_CQ = [one.rows_VW.split([of_rank[c] for of_rank in send]) for c, one in enumerate(own)]
        turns = [(q, c) for q in range(size) for c in range(len(own))]
        flat = torch.cat([ids_CQ[c][q] - q * sizes[c] for q, c in turns]).to(self.roads.id_type)
        ids = wire.all_to_all(flat, [sum(n) for n in send], [sum(n) for n in receive], "slices' gradients")
        values = [rows_CQ[c][q].reshape(-1) for q, c in turns]
        there, back = (
            [[n * width for n, width in zip(of_rank, widths, strict=True)] for of_rank in x] for x in (send, receive)
        )
        flat = own[0].rows_VW.view(-1) if len(own) == 1 else torch.cat(values)
        rows = wire.all_to_all(flat, [sum(n) for n in there], [sum(n) for n in back], "slices' gradients")
        split_ids = ids.split([n for of_rank in receive for n in of_rank])
        split_rows = rows.split([n for of_rank in back for n in of_rank])
        step = len(own)
        return self._sorted_out(
            [split_ids[at : at + step] for at in range(0, size * step, step)],
            [split_rows[at : at + step] for at in range(0, size * step, step)],
        )

    def _sorted_out(self, ids_QC: Sequence[Sequence[Tensor]], rows_QC: Sequence[Sequence[Tensor]]) -> list[Sums]:
        found = []
        for number, own in enumerate(self._own):
            ids = torch.cat([of_rank[number] for of_rank in ids_QC])
            rows = torch.cat([of_rank[number] for of_rank in rows_QC])
            found.append(Sums(ids).of(rows.view(ids.shape[0], own.shape[1])))
        return found

    @torch.no_grad()
    def sparse_grad_norm(self) -> Tensor:
        """[]: the norm of all tables' gradients together, as if they were dense and of one process."""
        squares = [one.rows_VW.square().sum() for one in self._gradients]
        none = torch.zeros((), dtype=self._sums_dtype, device=self._device)
        total = self.owners.sum(torch.stack(squares).sum() if squares else none)
        if self.kind == "v3":
            self.replicas.sum(total)
        return total.sqrt()

    def gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By table, of ``exchange_gradients``: rows of this rank's ``weights`` [V], and their gradients [V, W]."""
        found = {}
        for group, one in zip(self._groups, self._gradients, strict=True):
            for name in group.names:
                first = group.first[self.owners.rank][name]
                start, stop = torch.searchsorted(
                    one.ids_V, torch.tensor([first, first + len(self.weights[name])], device=self._device)
                ).tolist()
                found[name] = (one.ids_V[start:stop] - first, one.rows_VW[start:stop])
        return found

    @torch.no_grad()
    def step(self, scale: float | Tensor = 1.0) -> None:
        """Update the rows that were touched anywhere by their gradients times ``scale``."""
        self.release()  # of the weights as they were
        means = self._means_of_rows() if self._gradients else []
        for number, one in enumerate(self._gradients):
            own, mean_V = self._own[number], means[number]
            if not own.shape[1]:
                continue
            size = _PIECE // own.shape[1] if own.device.type == "cpu" else len(one.ids_V)
            for at, rows in one.pieces(max(size, 1)):
                ids = one.ids_V[at]
                update(
                    own, self._sums[number], ids, rows, None if mean_V is None else mean_V[at],
                    lr=self.lr, eps=self.eps, scale=scale, **self._whereabouts(number, ids),
                )  # fmt: skip
        self._gradients = []

    def _whereabouts(self, number: int, ids_V: Tensor) -> dict[str, Any]:
        """What rounding of bf16 is drawn by: the rows' numbers among all of the group's, and their first column."""
        if self._own[number].dtype != torch.bfloat16:
            return {}
        group, rank = self._groups[number], self.owners.rank
        first = torch.tensor([group.first[rank][name] for name in group.names], device=self._device)
        of_first = torch.tensor([group.offsets[n] + self.held[n].rows.start for n in group.names], device=self._device)
        table_V = torch.bucketize(ids_V, first, right=True) - 1
        return {"numbers_V": ids_V + (of_first - first)[table_V], "column": group.columns[rank].start}

    def _means_of_rows(self) -> list[Tensor | None]:
        """Of squares over whole rows, for groups cut in columns: their owners were all asked for the same rows."""
        found: list[Tensor | None] = [None] * len(self._groups)
        cut = [c for c, group in enumerate(self._groups) if group.by_column and self.whole_rows]
        if not cut or self.owners.size == 1:
            return found
        squares = [self._gradients[c].rows_VW.square().sum(1) for c in cut]
        sums = self.owners.sum(torch.cat(squares)).split([len(x) for x in squares])
        for c, sums_V in zip(cut, sums, strict=True):
            found[c] = sums_V / self._groups[c].dim
        return found

    # -- state ---------------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        """Of weights and optimizer state, without what v3 gathers for the next lookup."""
        return sum(x.nbytes for kind in (self._own, self._sums) for x in kind)


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
