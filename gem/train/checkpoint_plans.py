"""What torch.distributed.checkpoint writes and reads: large tensors in pieces, and only into a state that matches."""

import dataclasses
import io
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from gem.errors import RequestError

PIECE_BYTES = 64 * 2**20  # read and written at a time
_MOST_NAMED = 5
_ZIP_WRITER = "inline_container"  # the file of torch's sources that writes; it is in the messages


class PiecewiseSave(DefaultSavePlanner):
    """Plain tensors in pieces of ``PIECE_BYTES`` along their first dimension.

    A piece is what is copied at a time, from a GPU on the way out and from the file on the way in: no table is held
    twice. Ranks that hold the same tensor share the pieces out.
    """

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[piece for item in plan.items for piece in self._pieces(item)])
        return self.plan

    def _pieces(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if item.type is not WriteItemType.TENSOR or data is None or not data.size or not data.size.numel():
            return [item]
        rows = max(1, PIECE_BYTES // (data.size[1:].numel() * data.properties.dtype.itemsize))
        if rows >= data.size[0]:
            return [item]
        found = []
        for first in range(0, data.size[0], rows):
            offsets = torch.Size([first] + [0] * (len(data.size) - 1))
            chunk = ChunkStorageMetadata(offsets, torch.Size([min(rows, data.size[0] - first), *data.size[1:]]))
            index = dataclasses.replace(item.index, offset=offsets)
            whole = dataclasses.replace(data, chunk=chunk)
            found.append(dataclasses.replace(item, index=index, type=WriteItemType.SHARD, tensor_data=whole))
        return found

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        whole, data = self.state_dict.get(write_item.index.fqn), write_item.tensor_data
        if write_item.type is WriteItemType.SHARD and type(whole) is not DTensor and isinstance(whole, Tensor):
            assert data is not None
            return whole.detach().narrow(0, data.chunk.offsets[0], data.chunk.sizes[0])
        return super().resolve_data(write_item)


class ExactLoad(DefaultLoadPlanner):
    """Every entry of the checkpoint has its place in the state and every place its entry, of one type and shape.

    A plain load leaves out what the state does not ask for, and casts. ``where``: for the error; ``others``: entries
    that no rank here asks for; ``gather``: every rank's value, as each may have places that others have not.
    """

    def __init__(self, where: str, others: Set[str], gather: Callable[[set[str]], list[set[str]]]) -> None:
        super().__init__()
        self.where, self.others, self.gather = where, others, gather

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        wanted: Mapping[str, Any] = self.state_dict
        elsewhere = set().union(*self.gather(set(wanted))) - wanted.keys()
        saved = {n: x for n, x in metadata.state_dict_metadata.items() if n not in self.others | elsewhere}
        for odd, side in ((saved.keys() - wanted.keys(), "checkpoint"), (wanted.keys() - saved.keys(), "state")):
            if odd:
                named = ", ".join(sorted(odd)[:_MOST_NAMED]) + (f" and {len(odd) - _MOST_NAMED} more" * (len(odd) > 5))
                raise RequestError(f"{self.where}: {named} only in the {side}; accepted: a state with the same entries")
        for name, entry in saved.items():
            found, here = _kind_of_entry(entry), _kind_of(wanted[name])
            if found != here:
                raise RequestError(
                    f"{self.where}: {name}: {found} was saved; accepted: the same in the state, not {here}"
                )


def _kind_of_entry(entry: TensorStorageMetadata | BytesStorageMetadata) -> str:
    if isinstance(entry, BytesStorageMetadata):
        return "no tensor"
    return f"{entry.properties.dtype} {list(entry.size)}"


def _kind_of(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else "no tensor"


def cause(error: CheckpointException) -> BaseException:
    """What went wrong, on the first rank where something did; a RequestError, OSError or Ctrl-C as it was raised there.

    CheckpointException is no Exception, and would pass every ``except Exception``.
    """
    rank, (found, _) = min(error.failures.items(), key=lambda failure: failure[0])
    within: BaseException | None = found
    while within is not None:  # torch's zip writer fails once more while it ends on a full disk's error
        if isinstance(within, (RequestError, OSError, KeyboardInterrupt)):
            return within
        within = within.__cause__ or within.__context__
    if isinstance(found, RuntimeError) and _ZIP_WRITER in str(found):  # from another rank, its context lost on the way
        return OSError(f"rank {rank}: {found}")
    return RuntimeError(f"checkpoint, rank {rank}: {type(found).__name__}: {found}")
