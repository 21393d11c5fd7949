"""What is asked for over the roads between ranks: a row for each id, or a sum of rows for each sample.

Rows for each id (``RowRoute``) are asked for once however often an id occurs; sums of a sample's rows (``BagRoute``)
are formed by who holds them, so that one row a sample and owner travels. No step of it goes over rows in Python: ids
are numbered over all tables of a group and sorted once, which brings those of one owner together.

Legend: N ids asked for, U of them distinct, B bags (samples of a request), X bags by place, K those that are kept,
R rows of a shard, D columns of a table, W of them on a rank, G owners, C groups of tables.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gem.sharding.adagrad import picked
from gem.sharding.routes import Lane, Roads, Route, Sums, bags, ends, in_order

Arrived = Callable[[], Sequence[Tensor]]  # waits for the shards [R, W] by group, which nobody else may have then
_FULL = 0.7  # share of bags with ids from which on empty ones travel too, which saves to say which are not


class Asked(NamedTuple):
    """Ids of bags of one group."""

    addresses_N: Tensor
    places_N: Tensor | None  # of their owners (Roads.places); None: tables lie whole, and follow each other by place
    lengths_B: Tensor
    bags_at: list[int]  # by place how many bags it is asked for, where tables lie whole


class RowRoute(Route):
    """One batch's rows, one for each id. Every rank makes one, and calls ``gradients`` once."""

    def __init__(self, roads: Roads, numbered: Sequence[Tensor | None], arrived: Arrived, device: torch.device) -> None:
        """``numbered``: ids of all requests by group, in the group's numbers."""
        self.lanes: list[RowLane] = [RowLane(roads, number, ids, device) for number, ids in enumerate(numbered)]
        super().__init__(roads, self.lanes, device)
        counts = [[lane.to[rank] for lane in self.lanes] for rank in range(roads.wire.size)]
        received = self.swap_counts(counts)
        if roads.plain:
            flat = self.lanes[0].outgoing
        else:
            flat = self.in_turns([lane.addresses for lane in self.lanes], roads.id_type)
        wait = self.swap_ids(flat, counts, received)
        shards = arrived()
        own = [picked(shard, lane.addresses[-1]) for shard, lane in zip(shards, self.lanes, strict=True)]
        found = wait()
        shapes = [[(count, 1) for count in received[rank]] for rank in roads.others]
        for lane, parts in zip(self.lanes, self.apart(found, shapes), strict=True):
            lane.asked = found if len(self.lanes) == 1 else torch.cat(parts).view(-1) if parts else lane.asked
            lane.asked_by = [len(part) for part in parts]
        flat = self.give([picked(shard, lane.asked) for shard, lane in zip(shards, self.lanes, strict=True)])
        del shards  # their memory, before rows travel
        if roads.plain:
            (lane,), away = self.lanes, self.lanes[0].outgoing.shape[0]
            lane.handed = own[0].new_empty(sum(lane.to), lane.width)
            wait = self.swap_rows(flat, lane.handed[:away].view(-1))
            lane.handed[away:] = own[0]
            wait()
            return
        parts = self.apart(self.swap_rows(flat)(), self.gotten())
        for lane, blocks, mine in zip(self.lanes, parts, own, strict=True):
            lane.handed = lane.of_places([*blocks, mine])

    def gradients(self) -> list[Sums]:
        """By group: gradients of all ranks for this one's rows. Every rank calls it, whatever it has learnt."""
        wait = self.gradients_back()
        sums = [Sums(torch.cat([lane.asked, lane.addresses[-1]])) for lane in self.lanes]  # sorted while they travel
        return [one.of(matrix) for one, matrix in zip(sums, wait(), strict=True)]


class RowLane(Lane):
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

    def gradients_by_place(self) -> list[Tensor]:
        """Of the rows that each place gave."""
        return self.by_place(self.learnt())

    def outgoing_gradients(self) -> Tensor | None:
        """All of them that go to others."""
        return None if self.group.by_column else self.learnt()[: self.outgoing.shape[0]]

    def learn_rows(self, rows_ND: Tensor) -> None:
        """Gradients of all requests' rows, in the order in which they were asked for."""
        self.learn(bags(rows_ND, self.order_N, self.ends_U1, self.roads.dtype))


class BagRoute(Route):
    """One batch's sums of rows, one for each bag. Every rank makes one, and calls ``gradients`` once."""

    def __init__(self, roads: Roads, asked: Sequence[Asked | None], arrived: Arrived, device: torch.device) -> None:
        self.lanes: list[BagLane] = [BagLane(roads, number, one, device) for number, one in enumerate(asked)]
        super().__init__(roads, self.lanes, device)
        ranks = range(roads.wire.size)
        counts = [[n for lane in self.lanes for n in (lane.to[rank], lane.ids_to[rank])] for rank in ranks]
        received = self.swap_counts(counts)
        both = [part for lane in self.lanes for part in (lane.lengths, lane.addresses)]
        wait = self.swap_ids(self.in_turns(both, roads.id_type), counts, received)
        dtype, pairs = roads.dtype, list(zip(self.lanes, arrived(), strict=True))
        own = [bags(shard, lane.addresses[-1], ends(lane.lengths[-1]), dtype) for lane, shard in pairs]
        found = wait()
        parts = iter(found.split([n for rank in roads.others for n in received[rank]]))
        turns = [[(next(parts), next(parts)) for _ in self.lanes] for _ in roads.others]
        for number, lane in enumerate(self.lanes):
            mine = [of_rank[number] for of_rank in turns]
            lane.asked_by = [lengths.shape[0] for lengths, _ in mine]
            if mine:
                lane.asked_lengths, lane.asked = (torch.cat(list(x)) for x in zip(*mine, strict=True))
        flat = self.give([bags(shard, lane.asked, ends(lane.asked_lengths), dtype) for lane, shard in pairs])
        del pairs  # with the shards' memory, before sums travel
        first = self.lanes[0]
        if roads.plain and first.kept_K is None and first.whole:  # straight to where it is handed out
            away = first.bags - own[0].shape[0]
            first.handed = own[0].new_empty(first.bags, first.width)
            wait = self.swap_rows(flat, first.handed[:away].view(-1))
            first.handed[away:] = own[0]
            wait()
            return
        blocks = self.apart(self.swap_rows(flat)(), self.gotten())
        for lane, others, mine in zip(self.lanes, blocks, own, strict=True):
            lane.assemble([*others, mine])

    def gradients(self) -> list[Sums]:
        """By group: gradients of all ranks for this one's rows. Every rank calls it, whatever it has learnt."""
        wait = self.gradients_back()
        sums = []
        for lane in self.lanes:  # sorted while they travel
            lengths = torch.cat([lane.asked_lengths, lane.lengths[-1]])
            addresses = torch.cat([lane.asked, lane.addresses[-1]])
            numbers = torch.arange(lengths.shape[0], device=self.device)
            which = torch.repeat_interleave(numbers, lengths.long(), output_size=addresses.shape[0])
            sums.append(Sums(addresses, which))
        return [one.of(matrix) for one, matrix in zip(sums, wait(), strict=True)]


class BagLane(Lane):
    """One group's bags: of each what an owner has of it.

    An owner is asked for all bags of the tables that it has a part of, or, where many have no id of it, for the others.
    """

    def __init__(self, roads: Roads, number: int, asked: Asked | None, device: torch.device) -> None:
        super().__init__(roads, number, device)
        none = torch.empty(0, dtype=torch.int64, device=device)
        ranks, alike = roads.wire.size, self.group.by_column  # columns: of all owners alike
        addresses_N, places_N, lengths_X, bags_at = asked or Asked(none, None, none, [0] * ranks)
        self.bags, self.whole, self.asked_lengths = lengths_X.shape[0], places_N is None and not alike, self.asked
        if places_N is not None and not alike:
            numbers_B = torch.arange(self.bags, device=device)
            bags_N = torch.repeat_interleave(numbers_B, lengths_X, output_size=addresses_N.shape[0])
            keys_N, addresses_N = in_order(places_N * self.bags + bags_N, addresses_N)
            lengths_X, bags_at = torch.bincount(keys_N, minlength=ranks * self.bags), [self.bags] * ranks
        elif alike:
            bags_at = [self.bags]
        # X: bags, of each place's own numbering where each is asked for all. K: those that are kept.
        self.kept_K: Tensor | None = None  # None: all
        if int(lengths_X.count_nonzero()) < _FULL * lengths_X.shape[0]:
            self.kept_K = lengths_X.nonzero()[:, 0]
            firsts = torch.searchsorted(self.kept_K, torch.tensor([0, *accumulate(bags_at)], device=device))
            lengths_X, bags_at = lengths_X.index_select(0, self.kept_K), firsts.diff().tolist()
        firsts = torch.tensor([0, *accumulate(bags_at)], device=device)
        ids_at = ends(lengths_X).index_select(0, firsts).diff().tolist()
        lengths, addresses = lengths_X.to(roads.id_type).split(bags_at), addresses_N.to(roads.id_type).split(ids_at)
        times = ranks if alike else 1
        self.bags_at, self.lengths, self.addresses = bags_at * times, [*lengths] * times, [*addresses] * times
        of_ids = ids_at * times
        self.to, self.ids_to = ([counts[place] for place in roads.place_of] for counts in (self.bags_at, of_ids))

    def assemble(self, blocks: list[Tensor]) -> None:
        """Sums of each bag out of what each place has of it."""
        if self.group.by_column or self.whole:
            found = self.of_places(blocks)
            if self.kept_K is not None:
                found = found.new_zeros(self.bags, self.group.dim).index_copy_(0, self.kept_K, found)
        elif self.kept_K is None:
            found = blocks[-1]
            for block in blocks[:-1]:
                found += block
        else:
            found = blocks[0].new_zeros(self.bags, self.group.dim)
            for block, which in zip(blocks, self._kept(), strict=True):
                found.index_add_(0, which, block)
        self.handed = found

    def _kept(self) -> list[Tensor]:
        """Bags that are kept, by place."""
        assert self.kept_K is not None
        return list((self.kept_K % max(self.bags, 1)).split(self.bags_at))

    def gradients_by_place(self) -> list[Tensor]:
        """Of the bags that each place has rows of."""
        gradient_BD = self.learnt()
        if self.group.by_column or self.whole:
            kept = gradient_BD if self.kept_K is None else gradient_BD.index_select(0, self.kept_K)
            return self.by_place(kept)
        if self.kept_K is None:
            return [gradient_BD] * self.roads.wire.size
        return [gradient_BD.index_select(0, which) for which in self._kept()]

    def outgoing_gradients(self) -> Tensor | None:
        """All of them that go to others, where they lie one behind the other."""
        if self.whole and self.kept_K is None:
            return self.learnt()[: self.bags - self.bags_at[-1]]
        return None


class HandOut(torch.autograd.Function):
    """What a lane has for each request; in the backward the lane learns the gradients of all of them.

    ``shapes`` of what is handed out. ``anchor``: any tensor that takes a gradient, and gets none.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lane: RowLane | BagLane, shapes: list[torch.Size], dtype: torch.dtype) -> Any:
        ctx.lane = lane
        if isinstance(lane, BagLane):
            return tuple(part.to(dtype) for part in lane.handed.split([shape[0] for shape in shapes]))
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
