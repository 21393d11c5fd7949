"""The way of ids to who holds their rows, of rows back to who asked, and of gradients the same way once more.

All tables travel together: one exchange of counts, one of ids, one of rows, and one of gradients. Rows for each id
(``RowRoute``) are asked for once however often an id occurs; sums of a sample's rows (``BagRoute``) are formed by who
holds them, so that one row a sample and owner travels. What a rank asks of itself does not travel.

No step of it goes over rows in Python: ids are numbered over all tables of a group and sorted once, which brings those
of one owner together. Gradient rows of equal ids are added up by ``embedding_bag`` over that order, in the order in
which they were asked for: the same bits on every run.

Legend: N ids asked for, U of them distinct, B bags (samples of a request), K bags that an owner has rows of, V rows
that are asked for by any rank, R rows of a shard, D columns of a table, W of them on a rank, G owners, C groups.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from gem.sharding.adagrad import picked
from gem.sharding.collectives import Wire
from gem.sharding.placement import Group

Shapes = list[list[tuple[int, int]]]  # [others][C]: rows and columns


class Asked(NamedTuple):
    """Ids of bags of one group."""

    addresses_N: Tensor
    places_N: Tensor  # of their owners (Roads.places)
    bags_N: Tensor
    bags: int  # B
    in_order: bool  # already, by place and bag


def in_order(keys_N: Tensor, values_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Keys ascending and their values, int64; by value where keys are equal. ``values`` None: where each key was.

    Both are integers that are not negative.
    """
    values_N = torch.arange(keys_N.shape[0], device=keys_N.device) if values_N is None else values_N.long()
    if keys_N.device.type == "cpu" and keys_N.numel():
        bits = int(values_N.max()).bit_length()
        if int(keys_N.max()).bit_length() + bits < 64:
            # Both in one number: numpy sorts numbers by vector instructions, several times as fast as torch pairs.
            packed_N = (keys_N.long() << bits).bitwise_or_(values_N)
            packed_N.numpy().sort()
            return packed_N >> bits, packed_N.bitwise_and_((1 << bits) - 1)
    values_N, order_N = torch.sort(values_N)
    found = torch.sort(keys_N.long().index_select(0, order_N), stable=True)
    return found.values, values_N.index_select(0, found.indices)


def bags(table_RW: Tensor, which_N: Tensor, ends_K1: Tensor, dtype: torch.dtype) -> Tensor:
    """[K, W] in ``dtype``: sums of the rows ``which[ends[k]:ends[k + 1]]``."""
    if not table_RW.shape[1] or ends_K1.shape[0] == 1 or not which_N.shape[0]:
        return table_RW.new_zeros(ends_K1.shape[0] - 1, table_RW.shape[1], dtype=dtype)
    if table_RW.dtype != dtype:  # bf16 is added up in fp32
        table_RW = table_RW.index_select(0, which_N).to(dtype)
        which_N = torch.arange(len(which_N), device=which_N.device)
    return torch.embedding_bag(table_RW, which_N, ends_K1.to(which_N.dtype), include_last_offset=True)[0]


class Sums:
    """Gradients of a shard's rows: distinct addresses [V], ascending, and the sum of each one's rows, formed when read.

    Read a piece after the other they are as few as fit in a cache, and never all there.
    """

    def __init__(self, addresses_N: Tensor, which_N: Tensor | None = None) -> None:
        """Row ``addresses[n]`` gets row ``which[n]`` (None: n) of the matrix that ``of`` will be told."""
        ids_N, self._which_N = in_order(addresses_N, which_N)
        self.ids_V, counts_V = torch.unique_consecutive(ids_N, return_counts=True)
        self._ends_V1 = ends(counts_V)

    def of(self, matrix_MW: Tensor) -> Self:
        """Of these gradients, whose dtype the sums have."""
        self._matrix = matrix_MW
        return self

    @classmethod
    def total(cls, parts: Sequence["Sums"], width: int, dtype: torch.dtype, device: torch.device) -> "Sums":
        """The sum of several."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls(torch.empty(0, dtype=torch.int64, device=device)).of(
                torch.empty(0, width, dtype=dtype, device=device)
            )
        return cls(torch.cat([one.ids_V for one in parts])).of(torch.cat([one.rows_VW for one in parts]))

    @cached_property
    def rows_VW(self) -> Tensor:
        """All of them."""
        return bags(self._matrix, self._which_N, self._ends_V1, self._matrix.dtype)

    def pieces(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Places in ``ids_V``, and their rows [≤ size, W]; ``rows_VW`` where that has been read."""
        count = self.ids_V.shape[0]
        starts = self._ends_V1[::size].tolist()
        for number, first in enumerate(range(0, count, size)):
            at = slice(first, min(first + size, count))
            if "rows_VW" in self.__dict__:
                yield at, self.rows_VW[at]
                continue
            which_N = self._which_N[starts[number] : starts[number + 1] if at.stop < count else None]
            ends_K1 = self._ends_V1[first : at.stop + 1] - starts[number]
            yield at, bags(self._matrix, which_N, ends_K1, self._matrix.dtype)


def ends(counts_K: Tensor) -> Tensor:
    """[K + 1]: 0, and where each of so many ends."""
    return F.pad(counts_K.cumsum(0), (1, 0))


class Roads:
    """What routes between the same ranks share. ``replicas``: that a shard is gathered from; ``dtype``: of sums."""

    def __init__(self, wire: Wire, groups: list[Group], replicas: int, dtype: torch.dtype) -> None:
        self.wire, self.groups, self.dtype, own = wire, groups, dtype, wire.rank
        self.others = [rank for rank in range(wire.size) if rank != own]
        # The order in which a rank keeps what it asks for: what travels, then its own.
        self.places = [*self.others, own]
        self.place_of = [self.places.index(rank) for rank in range(wire.size)]
        self.widths = [[len(columns) for columns in group.columns] for group in groups]  # [C][G]
        most = max(rows for group in groups for rows in group.rows) * replicas
        self.id_type = torch.int32 if most < 2**31 else torch.int64  # on the way
        # Blocks of each group in the order of their owners' places.
        self.turns = [sorted(range(len(g.owners)), key=lambda s, g=g: self.place_of[g.owners[s]]) for g in groups]
        # One matrix goes and comes as it is; several are sent one behind the other.
        self.plain = len(groups) == 1 and not groups[0].by_column


class _Lane:
    """One group's part of a route."""

    to: list[int]  # rows that come back, by owner
    addresses: list[Tensor]  # that this rank asks for, by place

    def __init__(self, roads: Roads, number: int, device: torch.device) -> None:
        self.roads, self.number, self.group = roads, number, roads.groups[number]
        self.width = roads.widths[number][roads.wire.rank]  # W
        self.asked = torch.empty(0, dtype=roads.id_type, device=device)  # addresses that others want, rank after rank
        self.asked_by: list[int] = []  # how many rows each of them gets
        self.handed = torch.empty(0)  # what came back: [U, D] in the order of places, or [B, D]
        self.gradient: Tensor | None = None  # of it

    def by_place(self, rows_UD: Tensor) -> list[Tensor]:
        """Rows in the order of places: each place's, and of tables cut in columns its columns."""
        places = self.roads.places
        if self.group.by_column:
            return [rows_UD[:, self.group.columns[rank].start : self.group.columns[rank].stop] for rank in places]
        return list(rows_UD.split([self.to[rank] for rank in places]))

    def of_places(self, blocks: Sequence[Tensor]) -> Tensor:
        """The other way round."""
        if not self.group.by_column:
            return torch.cat(list(blocks))
        return torch.cat([blocks[place] for place in self.roads.place_of], 1)

    def learn(self, gradient: Tensor) -> None:
        """Of what was handed out; of several backwards the sum."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def learnt(self) -> Tensor:
        """The gradient, zeros where nothing was learnt."""
        return (
            self.handed.new_zeros(self.handed.shape, dtype=self.roads.dtype) if self.gradient is None else self.gradient
        )


class _Route:
    """What both kinds do alike."""

    def __init__(self, roads: Roads, lanes: Sequence[_Lane], device: torch.device) -> None:
        self.roads, self.lanes, self.device = roads, lanes, device

    def _swap_counts(self, counts: list[list[int]]) -> list[list[int]]:
        return self.roads.wire.transpose(torch.tensor(counts, device=self.device), "counts").tolist()

    def _swap_ids(self, flat: Tensor, counts: list[list[int]], received: list[list[int]]) -> Callable[[], Tensor]:
        """``counts``, ``received``: [G][…] ids that go to and come from each rank."""
        send, receive = [sum(x) for x in counts], [sum(x) for x in received]
        send[self.roads.wire.rank] = receive[self.roads.wire.rank] = 0
        return self.roads.wire.start_all_to_all(flat, send, receive, "ids")

    def _swap_rows(self, flat: Tensor, out: Tensor | None = None, *, back: bool = False) -> Callable[[], Tensor]:
        """Rows to who asked for them, flat; ``back``: their gradients, the other way."""
        send, receive = ([0] * self.roads.wire.size for _ in range(2))
        for rank, given, gotten in zip(self.roads.others, self._given(), self._gotten(), strict=True):
            send[rank], receive[rank] = (sum(rows * width for rows, width in x) for x in (given, gotten))
        if back:
            return self.roads.wire.start_all_to_all(flat, receive, send, "gradients", out)
        return self.roads.wire.start_all_to_all(flat, send, receive, "rows", out)

    def _given(self) -> Shapes:
        """Of the rows that this rank gives to others."""
        return [[(lane.asked_by[at], lane.width) for lane in self.lanes] for at in range(len(self.roads.others))]

    def _gotten(self) -> Shapes:
        """Of those that it gets from them."""
        widths = self.roads.widths
        return [[(lane.to[rank], widths[lane.number][rank]) for lane in self.lanes] for rank in self.roads.others]

    def _apart(self, flat: Tensor, shapes: Shapes) -> list[list[Tensor]]:
        """[C][others]: the matrices of what came flat."""
        parts = iter(flat.split([rows * width for of_rank in shapes for rows, width in of_rank]))
        found = [[next(parts).view(shape) for shape in of_rank] for of_rank in shapes]
        return [[of_rank[number] for of_rank in found] for number in range(len(self.lanes))]

    def _in_turns(self, blocks: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Tensor:
        """Of blocks [C][others] those for the first rank, those for the second, …; flat."""
        turns = [of_lane[at].reshape(-1) for at in range(len(self.roads.others)) for of_lane in blocks]
        return torch.cat(turns) if turns else torch.empty(0, dtype=dtype, device=self.device)

    def _give(self, answers: Sequence[Tensor]) -> Tensor:
        """Rows that others wait for, by lane, as they travel."""
        if len(answers) == 1:
            return answers[0].view(-1)
        return self._in_turns(
            [a.split(lane.asked_by) for a, lane in zip(answers, self.lanes, strict=True)], answers[0].dtype
        )

    def _gradients_back(self, blocks: Sequence[Sequence[Tensor]]) -> Callable[[], list[Tensor]]:
        """By lane: others' gradients of this rank's rows, then its own, in one matrix. ``blocks`` by lane and place."""
        flat, shapes = self._in_turns(blocks, self.roads.dtype), self._given()
        if len(self.lanes) > 1:
            wait = self._swap_rows(flat, back=True)

            def gathered() -> list[Tensor]:
                found = self._apart(wait(), shapes)
                return [torch.cat([*parts, mine[-1]]) for parts, mine in zip(found, blocks, strict=True)]

            return gathered
        (lane,), own = self.lanes, blocks[0][-1]
        count = sum(lane.asked_by)
        room = own.new_empty(count + own.shape[0], lane.width)
        arrived = self._swap_rows(flat, room[:count].view(-1), back=True)
        room[count:] = own

        def filled() -> list[Tensor]:
            arrived()
            return [room]

        return filled


class RowRoute(_Route):
    """One batch's rows, one for each id. Every rank makes one, and calls ``gradients`` once."""

    def __init__(
        self, roads: Roads, numbered: Sequence[Tensor | None], shards: Sequence[Tensor], device: torch.device
    ) -> None:
        """``numbered``: ids of all requests by group, in the group's numbers. ``shards``: [R, W] by group."""
        self.lanes: list[RowLane] = [RowLane(roads, number, ids, device) for number, ids in enumerate(numbered)]
        super().__init__(roads, self.lanes, device)
        counts = [[lane.to[rank] for lane in self.lanes] for rank in range(roads.wire.size)]
        received = self._swap_counts(counts)
        if roads.plain:
            flat = self.lanes[0].outgoing
        else:
            flat = self._in_turns([lane.addresses for lane in self.lanes], roads.id_type)
        wait = self._swap_ids(flat, counts, received)
        own = [picked(shard, lane.addresses[-1]) for shard, lane in zip(shards, self.lanes, strict=True)]
        found = wait()
        shapes = [[(count, 1) for count in received[rank]] for rank in roads.others]
        for lane, parts in zip(self.lanes, self._apart(found, shapes), strict=True):
            lane.asked = found if len(self.lanes) == 1 else torch.cat(parts).view(-1) if parts else lane.asked
            lane.asked_by = [len(part) for part in parts]
        flat = self._give([picked(shard, lane.asked) for shard, lane in zip(shards, self.lanes, strict=True)])
        if roads.plain:
            (lane,), away = self.lanes, self.lanes[0].outgoing.shape[0]
            lane.handed = own[0].new_empty(sum(lane.to), lane.width)
            wait = self._swap_rows(flat, lane.handed[:away].view(-1))
            lane.handed[away:] = own[0]
            wait()
            return
        parts = self._apart(self._swap_rows(flat)(), self._gotten())
        for lane, blocks, mine in zip(self.lanes, parts, own, strict=True):
            lane.handed = lane.of_places([*blocks, mine])

    def gradients(self) -> list[Sums]:
        """By group: gradients of all ranks for this one's rows. Every rank calls it, whatever it has learnt."""
        wait = self._gradients_back([lane.by_place(lane.learnt()) for lane in self.lanes])
        sums = [Sums(torch.cat([lane.asked, lane.addresses[-1]])) for lane in self.lanes]  # sorted while they travel
        return [one.of(matrix) for one, matrix in zip(sums, wait(), strict=True)]


class RowLane(_Lane):
    """One group's ids: distinct, by owner."""

    def __init__(self, roads: Roads, number: int, ids: Tensor | None, device: torch.device) -> None:
        super().__init__(roads, number, device)
        group, turns = self.group, roads.turns[number]
        values_N, self.order_N = in_order(torch.empty(0, dtype=torch.int64, device=device) if ids is None else ids)
        cuts = torch.searchsorted(values_N, torch.tensor(group.bounds, device=device)).tolist()
        if turns != sorted(turns):
            values_N, self.order_N = (
                torch.cat([x[cuts[s] : cuts[s + 1]] for s in turns]) for x in (values_N, self.order_N)
            )
        distinct_U, which_N, counts_U = torch.unique_consecutive(values_N, return_inverse=True, return_counts=True)
        self.ends_U1 = ends(counts_U)
        self.position_N = torch.empty_like(self.order_N)  # of each id's row in ``handed``
        self.position_N[self.order_N] = which_N
        till_S = torch.tensor([0, *accumulate(cuts[s + 1] - cuts[s] for s in turns)], device=device)
        per_block = [b - a for a, b in pairwise(F.pad(which_N + 1, (1, 0))[till_S].tolist())]  # distinct ones
        shifts = torch.tensor([group.shifts[s] for s in turns], device=device)
        times = torch.tensor(per_block, device=device)
        addresses_U = distinct_U + torch.repeat_interleave(shifts, times, output_size=distinct_U.shape[0])
        addresses_U = addresses_U.to(roads.id_type)
        self.to = [0] * roads.wire.size
        if group.by_column:
            self.to = [addresses_U.shape[0]] * roads.wire.size
            self.addresses = [addresses_U] * roads.wire.size
            return
        for s, count in zip(turns, per_block, strict=True):
            self.to[group.owners[s]] += count
        self.addresses = list(addresses_U.split([self.to[rank] for rank in roads.places]))
        self.outgoing = addresses_U[: addresses_U.shape[0] - self.addresses[-1].shape[0]]

    def learn_rows(self, rows_ND: Tensor) -> None:
        """Gradients of all requests' rows, in the order in which they were asked for."""
        self.learn(bags(rows_ND, self.order_N, self.ends_U1, self.roads.dtype))


class BagRoute(_Route):
    """One batch's sums of rows, one for each bag. Every rank makes one, and calls ``gradients`` once."""

    def __init__(
        self, roads: Roads, asked: Sequence[Asked | None], shards: Sequence[Tensor], device: torch.device
    ) -> None:
        self.lanes: list[BagLane] = [BagLane(roads, number, one, device) for number, one in enumerate(asked)]
        super().__init__(roads, self.lanes, device)
        ranks = range(roads.wire.size)
        counts = [[n for lane in self.lanes for n in (lane.to[rank], lane.ids_to[rank])] for rank in ranks]
        received = self._swap_counts(counts)
        both = [part for lane in self.lanes for part in (lane.lengths, lane.addresses)]
        wait = self._swap_ids(self._in_turns(both, roads.id_type), counts, received)
        dtype, pairs = roads.dtype, list(zip(self.lanes, shards, strict=True))
        own = [bags(shard, lane.addresses[-1], ends(lane.lengths[-1]), dtype) for lane, shard in pairs]
        found = wait()
        parts = iter(found.split([n for rank in roads.others for n in received[rank]]))
        turns = [[(next(parts), next(parts)) for _ in self.lanes] for _ in roads.others]
        for number, lane in enumerate(self.lanes):
            mine = [of_rank[number] for of_rank in turns]
            lane.asked_by = [lengths.shape[0] for lengths, _ in mine]
            if mine:
                lane.asked_lengths, lane.asked = (torch.cat(list(x)) for x in zip(*mine, strict=True))
        flat = self._give([bags(shard, lane.asked, ends(lane.asked_lengths), dtype) for lane, shard in pairs])
        blocks = self._apart(self._swap_rows(flat)(), self._gotten())
        for lane, others, mine in zip(self.lanes, blocks, own, strict=True):
            lane.assemble([*others, mine])

    def gradients(self) -> list[Sums]:
        """By group: gradients of all ranks for this one's rows. Every rank calls it, whatever it has learnt."""
        wait = self._gradients_back([lane.of_bags() for lane in self.lanes])
        sums = []
        for lane in self.lanes:  # sorted while they travel
            lengths = torch.cat([lane.asked_lengths, lane.lengths[-1]])
            addresses = torch.cat([lane.asked, lane.addresses[-1]])
            numbers = torch.arange(lengths.shape[0], device=self.device)
            which = torch.repeat_interleave(numbers, lengths.long(), output_size=addresses.shape[0])
            sums.append(Sums(addresses, which))
        return [one.of(matrix) for one, matrix in zip(sums, wait(), strict=True)]


class BagLane(_Lane):
    """One group's bags: of each what an owner has of it."""

    def __init__(self, roads: Roads, number: int, asked: Asked | None, device: torch.device) -> None:
        super().__init__(roads, number, device)
        none = torch.empty(0, dtype=torch.int64, device=device)
        addresses_N, places_N, keys_N, self.bags, ordered = asked or Asked(none, none, none, 0, True)
        ranks, count = roads.wire.size, max(self.bags, 1)
        self.asked_lengths = self.asked
        if not self.group.by_column:
            keys_N = keys_N + places_N * count
            if not ordered:
                keys_N, addresses_N = in_order(keys_N, addresses_N)
        keys_K, lengths_K = torch.unique_consecutive(keys_N, return_counts=True)
        addresses_N = addresses_N.to(roads.id_type)
        if self.group.by_column:  # of all owners alike
            self.to, self.ids_to = [keys_K.shape[0]] * ranks, [addresses_N.shape[0]] * ranks
            self.lengths, self.addresses = [lengths_K.to(roads.id_type)] * ranks, [addresses_N] * ranks
            self.bags_of = [keys_K] * ranks
            return
        firsts = torch.searchsorted(keys_K, torch.arange(ranks + 1, device=device) * count)
        of_bags, of_ids = firsts.diff().tolist(), ends(lengths_K)[firsts].diff().tolist()
        self.to, self.ids_to = ([counts[place] for place in roads.place_of] for counts in (of_bags, of_ids))
        self.lengths = list(lengths_K.to(roads.id_type).split(of_bags))  # of bags, by place
        self.addresses = list(addresses_N.split(of_ids))
        self.bags_of = list((keys_K % count).split(of_bags))

    def assemble(self, blocks: list[Tensor]) -> None:
        """Sums of each bag out of what each place has of it."""
        self.handed = blocks[0].new_zeros(self.bags, self.group.dim)
        if self.group.by_column:
            self.handed.index_copy_(0, self.bags_of[0], self.of_places(blocks))
            return
        for block, which in zip(blocks, self.bags_of, strict=True):
            self.handed.index_add_(0, which, block)

    def of_bags(self) -> list[Tensor]:
        """Gradients of the bags that each place has rows of."""
        gradient_BD = self.learnt()
        if self.group.by_column:
            return self.by_place(gradient_BD.index_select(0, self.bags_of[0]))
        return [gradient_BD.index_select(0, which) for which in self.bags_of]


class HandOut(torch.autograd.Function):
    """What a lane has for each request; in the backward the lane learns the gradients of all of them.

    ``shapes`` of what is handed out. ``anchor``: any tensor that takes a gradient, and gets none.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lane: RowLane | BagLane, shapes: list[torch.Size], dtype: torch.dtype) -> Any:
        ctx.lane = lane
        if isinstance(lane, BagLane):
            return tuple(part.to(dtype, copy=True) for part in lane.handed.split([shape[0] for shape in shapes]))
        which = lane.position_N.split([shape[:-1].numel() for shape in shapes])
        rows = [lane.handed.index_select(0, one).to(dtype) for one in which]
        return tuple(x.view(shape) for x, shape in zip(rows, shapes, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        lane = ctx.lane
        flat = [gradient.reshape(-1, lane.group.dim).to(lane.roads.dtype) for gradient in gradients]
        rows = flat[0] if len(flat) == 1 else torch.cat(flat)
        if isinstance(lane, BagLane):
            lane.learn(rows)
        else:
            lane.learn_rows(rows)
        return None, None, None, None
