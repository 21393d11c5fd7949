"""The way of ids to who holds their rows, of rows back to who asked, and of gradients the same way once more.

All tables travel together: one exchange of counts, one of ids, one of rows, and one of gradients. What a rank asks of
itself does not travel; it works at that while others' rows are under way. gem.sharding.lookups has what is asked for.

Gradient rows of equal ids are added up by ``embedding_bag`` over the sorted ids, in the order in which they were asked
for: the same bits on every run.

Legend: N ids, V distinct ones, K bags, R rows of a shard, D columns of a table, W of them on a rank, U or B rows that a
rank is handed, G owners, C groups of tables.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from gem.sharding.collectives import Wire
from gem.sharding.placement import Group

Shapes = list[list[tuple[int, int]]]  # [others][C]: rows and columns


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


class Lane(ABC):
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

    @abstractmethod
    def gradients_by_place(self) -> list[Tensor]:
        """Of the rows that each place gave."""

    def outgoing_gradients(self) -> Tensor | None:
        """All of them that go to others, where they lie one behind the other."""
        return None

    def learn(self, gradient: Tensor) -> None:
        """Of what was handed out; of several backwards the sum."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def learnt(self) -> Tensor:
        """The gradient, zeros where nothing was learnt."""
        return (
            self.handed.new_zeros(self.handed.shape, dtype=self.roads.dtype) if self.gradient is None else self.gradient
        )


class Route:
    """What both kinds do alike."""

    def __init__(self, roads: Roads, lanes: Sequence[Lane], device: torch.device) -> None:
        self.roads, self.lanes, self.device = roads, lanes, device

    def swap_counts(self, counts: list[list[int]]) -> list[list[int]]:
        return self.roads.wire.transpose(torch.tensor(counts, device=self.device), "counts").tolist()

    def swap_ids(self, flat: Tensor, counts: list[list[int]], received: list[list[int]]) -> Callable[[], Tensor]:
        """``counts``, ``received``: [G][…] ids that go to and come from each rank."""
        send, receive = [sum(x) for x in counts], [sum(x) for x in received]
        send[self.roads.wire.rank] = receive[self.roads.wire.rank] = 0
        return self.roads.wire.start_all_to_all(flat, send, receive, "ids")

    def swap_rows(self, flat: Tensor, out: Tensor | None = None, *, back: bool = False) -> Callable[[], Tensor]:
        """Rows to who asked for them, flat; ``back``: their gradients, the other way."""
        send, receive = ([0] * self.roads.wire.size for _ in range(2))
        for rank, given, gotten in zip(self.roads.others, self._given(), self.gotten(), strict=True):
            send[rank], receive[rank] = (sum(rows * width for rows, width in x) for x in (given, gotten))
        if back:
            return self.roads.wire.start_all_to_all(flat, receive, send, "gradients", out)
        return self.roads.wire.start_all_to_all(flat, send, receive, "rows", out)

    def _given(self) -> Shapes:
        """Of the rows that this rank gives to others."""
        return [[(lane.asked_by[at], lane.width) for lane in self.lanes] for at in range(len(self.roads.others))]

    def gotten(self) -> Shapes:
        """Of those that it gets from them."""
        widths = self.roads.widths
        return [[(lane.to[rank], widths[lane.number][rank]) for lane in self.lanes] for rank in self.roads.others]

    def apart(self, flat: Tensor, shapes: Shapes) -> list[list[Tensor]]:
        """[C][others]: the matrices of what came flat."""
        parts = iter(flat.split([rows * width for of_rank in shapes for rows, width in of_rank]))
        found = [[next(parts).view(shape) for shape in of_rank] for of_rank in shapes]
        return [[of_rank[number] for of_rank in found] for number in range(len(self.lanes))]

    def in_turns(self, blocks: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Tensor:
        """Of blocks [C][others] those for the first rank, those for the second, …; flat."""
        turns = [of_lane[at].reshape(-1) for at in range(len(self.roads.others)) for of_lane in blocks]
        if len(turns) == 1:
            return turns[0]
        return torch.cat(turns) if turns else torch.empty(0, dtype=dtype, device=self.device)

    def give(self, answers: Sequence[Tensor]) -> Tensor:
        """Rows that others wait for, by lane, as they travel."""
        if len(answers) == 1:
            return answers[0].view(-1)
        return self.in_turns(
            [a.split(lane.asked_by) for a, lane in zip(answers, self.lanes, strict=True)], answers[0].dtype
        )

    def gradients_back(self) -> Callable[[], list[Tensor]]:
        """By lane: others' gradients of this rank's rows, then its own, in one matrix."""
        blocks, shapes = [lane.gradients_by_place() for lane in self.lanes], self._given()
        whole = self.lanes[0].outgoing_gradients() if len(self.lanes) == 1 else None
        flat = self.in_turns(blocks, self.roads.dtype) if whole is None else whole.view(-1)
        if len(self.lanes) > 1:
            wait = self.swap_rows(flat, back=True)

            def gathered() -> list[Tensor]:
                found = self.apart(wait(), shapes)
                return [torch.cat([*parts, mine[-1]]) for parts, mine in zip(found, blocks, strict=True)]

            return gathered
        (lane,), own = self.lanes, blocks[0][-1]
        count = sum(lane.asked_by)
        room = own.new_empty(count + own.shape[0], lane.width)
        arrived = self.swap_rows(flat, room[:count].view(-1), back=True)
        room[count:] = own

        def filled() -> list[Tensor]:
            arrived()
            return [room]

        return filled
