"""Every collective that this process starts, counted beneath torch.distributed: also FSDP's, which nobody else counts.

A dispatch mode, as torch's CommDebugMode: it sees the c10d operators with the tensors that they move, whoever calls
them. So the counts do not rest on the arithmetic of who sends (gem.sharding.collectives), and FSDP's own collectives
stay as they are. It costs time at every operator: for a step or two, not for a run.

Bytes are those that a rank has to send to others, G ranks in a group, b bytes of its own part:

    all-gather        (G - 1) * b
    reduce-scatter    (G - 1) * b, b of the part that it is left with
    all-reduce        both of them, b of ceil(elements / G) elements
    all-to-all        what is for others
    barrier           nothing

That is what has to be sent, not what a backend does send: gloo and NCCL choose rings or trees by size.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gem.sharding.collectives import SUMS, Traffic, sum_bytes, told
from gem.sharding.mesh import Meshes

PARAMETERS, GRADIENTS = "dense parameters", "dense gradients"
EXPERTS_PARAMETERS, EXPERTS_GRADIENTS = "experts' parameters", "experts' gradients"
COPIES, EXPERTS_COPIES = "dense copies' gradients", "experts' copies' gradients"


@dataclass(frozen=True)
class Kind:
    """Collectives for one purpose among the same ranks."""

    what: str
    ranks: tuple[int, ...]  # of the group, in the whole job's numbers


class Counter(TorchDispatchMode):
    """Counts what collectives send while it is entered. ``traffic``: gets what its callers do not count themselves.

    RuntimeError at a collective that it does not know: a sum without it would be wrong.
    """

    def __init__(self, meshes: Meshes, traffic: Traffic | None = None) -> None:
        super().__init__()
        self.sent: dict[Kind, int] = defaultdict(int)
        self._traffic, self._names = traffic, _names(meshes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def by_purpose(self) -> dict[str, int]:
        """Bytes by what they were for."""
        found: dict[str, int] = defaultdict(int)
        for kind, count in self.sent.items():
            found[kind.what] += count
        return dict(found)

    def _count(self, name: str, args: Sequence[Any]) -> None:
        if name == "barrier":
            return
        if name not in _BYTES:
            raise RuntimeError(f"c10d::{name}: not known; accepted: {', '.join(_BYTES)}, barrier")
        group = next(group for x in args if (group := _group(x)) is not None)
        ranks = tuple(dist.get_process_group_ranks(group))
        count = _BYTES[name](args, group) if len(ranks) > 1 else 0
        mine = told()
        kind = Kind(mine or self._name(name, group), ranks)
        self.sent[kind] += count
        if mine is None and self._traffic is not None:
            self._traffic.add(kind.what, count)

    def _name(self, name: str, group: dist.ProcessGroup) -> str:
        """Of what nobody named: FSDP's, by their groups; it reduces in backwards alone, where nothing else sums."""
        if name == "allreduce_" and torch._C._current_graph_task_id() < 0:
            return SUMS
        return self._names.get((name, group.group_name), f"unnamed {name}")


def _names(meshes: Meshes) -> dict[tuple[str, str], str]:
    """By operator and group: the dense part's where a group is both, as without experts on ranks of their own."""
    found: dict[tuple[str, str], str] = {}
    parts = (
        (meshes.expert_parameters, EXPERTS_PARAMETERS, EXPERTS_GRADIENTS, EXPERTS_COPIES),
        (meshes.dense, PARAMETERS, GRADIENTS, COPIES),
    )
    for mesh, gathered, scattered, summed in parts:
        copies, shards = (mesh.get_group(name).group_name for name in cast(tuple[str, ...], mesh.mesh_dim_names))
        found["_allgather_base_", shards] = gathered
        found["_reduce_scatter_base_", shards] = scattered
        found["allreduce_", copies] = summed
    return found


def _group(x: Any) -> dist.ProcessGroup | None:
    if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
        return dist.ProcessGroup.unbox(x)
    return None


def _nbytes(x: Any) -> int:
    """Of a tensor, or of all in a list of lists."""
    return x.nbytes if isinstance(x, Tensor) else sum(map(_nbytes, x))


def _all_gather(args: Sequence[Any], group: dist.ProcessGroup) -> int:
    return (group.size() - 1) * _nbytes(args[1])


def _reduce_scatter(args: Sequence[Any], group: dist.ProcessGroup) -> int:
    return (group.size() - 1) * _nbytes(args[0])


def _all_reduce(args: Sequence[Any], group: dist.ProcessGroup) -> int:
    return sum(sum_bytes(x.numel(), x.itemsize, group.size()) for x in args[0])


def _all_to_all(args: Sequence[Any], group: dist.ProcessGroup) -> int:
    _, x, _, _, send = args[:5]
    if not send:  # parts alike
        return x.nbytes // group.size() * (group.size() - 1)
    return (sum(send) - send[group.rank()]) * x.shape[1:].numel() * x.itemsize


_BYTES: Mapping[str, Callable[[Sequence[Any], dist.ProcessGroup], int]] = {
    "_allgather_base_": _all_gather,
    "allgather_": _all_gather,
    "_reduce_scatter_base_": _reduce_scatter,
    "allreduce_": _all_reduce,
    "alltoall_base_": _all_to_all,
}
