"""All-gathers of the dense part that leave the multiprocessors to the work beside them, where they are asked for.

NCCL's all-gather is a kernel that holds some 24 SMs for as long as it lasts. Moving bytes needs none:

    copy_engine   each rank copies its peers' shards from symmetric memory by its copy engine; what is left of SMs is
                  one, for the two barriers around it
    zero_cta      NCCL does that itself, on a communicator with the zero-CTA policy and buffers in symmetric windows
                  (NCCL 2.28 and later, within a host)

Reductions stay NCCL's kernels: copy engines cannot add. Both ways plug into FSDP2 (``set_custom_all_gather``) and give
bitwise the same parameters. Where one is not to be had, ``install`` says what is missing; nothing is used in its place.

Buffers are symmetric: every rank makes the same ones in the same order, and a peer's place is known by that order
alone. So they are handed out in turns, never by what is free on this rank.

Legend: G ranks of the shard group.
"""

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.cuda import nccl as nccl_library
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem.errors import RequestError
from gem.sharding.copy_engine import CopyEngine, NoCopyEngine

Transport = Literal["default", "copy_engine", "zero_cta"]
SLOTS = 4  # outputs of FSDP alive at a time: two in flight, one kept till the next is copied out, one to spare
ALIGNED = 512  # bytes: every slot begins and grows so
BARRIER_MS = 600_000  # who does not come by then is gone: the device's error ends this rank, torchrun the others
FIRST_NCCL = (2, 28)  # with copy-engine collectives
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def checked(transport: str) -> None:
    """RequestError where ``transport`` is no way to gather."""
    if transport not in get_args(Transport):
        raise RequestError(f"transport: {transport!r}; accepted: {', '.join(get_args(Transport))}")


# ---- what there is, and what is missing


@dataclass(frozen=True)
class Offer:
    """What a shard group, its machine and its software have."""

    backend: str  # of the group, on this rank's device: "nccl", "gloo"
    device: str
    ranks: int
    hosts: int
    linked: bool | None  # every two of its GPUs by NVLink; None: that cannot be told
    nccl: tuple[int, ...]
    settings: dict[str, str]  # variables that take from NCCL what zero_cta needs
    policy: bool  # torch's ProcessGroupNCCL knows the zero-CTA policy
    symmetric: bool  # torch has symmetric memory
    custom: bool  # FSDP2 takes an all-gather of one's own
    no_engine: str  # why the driver's batched copy is not there, or ""


def lacking(transport: Transport, offer: Offer) -> str:
    """The first thing that is missing, in words; "" where nothing is."""
    if transport == "default":
        return ""
    if offer.ranks == 1:
        return "each shard group is one rank, which gathers nothing"
    if offer.device != "cuda":
        return f"the ranks are on {offer.device}; it needs GPUs"
    if offer.backend != "nccl":
        return f"the shard group talks {offer.backend}; it needs nccl"
    if not offer.custom:
        return f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather"
    if not offer.symmetric:
        return f"torch {torch.__version__} has no symmetric memory"
    if offer.hosts > 1:
        return f"the shard group spans {offer.hosts} hosts; it needs one"
    if offer.linked is None:
        return "which of the shard group's GPUs have NVLink cannot be told; each rank must see all of them"
    if not offer.linked:
        return "two GPUs of the shard group have no NVLink between them"
    if transport == "copy_engine":
        return offer.no_engine
    if offer.nccl < FIRST_NCCL:
        return f"NCCL {'.'.join(map(str, offer.nccl))}; it needs {'.'.join(map(str, FIRST_NCCL))} or later"
    if not offer.policy:
        return f"torch {torch.__version__} has no NCCL_CTA_POLICY_ZERO"
    return next((f"{name}={value} is set" for name, value in offer.settings.items()), "")


def offer(group: dist.ProcessGroup, device: torch.device) -> Offer:
    """What ``group`` has; every rank of it calls this."""
    on_gpu = device.type == "cuda"
    mine = (socket.gethostname(), device.index if device.index is not None else 0)
    places: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, mine, group=group)
    no_engine = ""
    try:
        if on_gpu:
            CopyEngine()
    except NoCopyEngine as reason:
        no_engine = str(reason)
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    off = {"NCCL_CUMEM_ENABLE": "0", "NCCL_WIN_ENABLE": "0"}
    return Offer(
        backend=dist.get_backend_config(group).split(f"{device.type}:")[-1].split(",")[0],
        device=device.type,
        ranks=len(places),
        hosts=len({host for host, _ in places}),
        linked=_linked([index for _, index in places]) if on_gpu else None,
        nccl=tuple(int(x) for x in nccl_library.version()[:3]) if on_gpu else (),
        settings={name: value for name, value in off.items() if os.environ.get(name) == value},
        policy=hasattr(nccl, "NCCL_CTA_POLICY_ZERO"),
        symmetric=_symmetric() is not None,
        custom=hasattr(FSDPModule, "set_custom_all_gather"),
        no_engine=no_engine,
    )


def _linked(devices: Sequence[int]) -> bool | None:
    """Whether each two of these GPUs of this host have an NVLink (through a switch or not)."""
    from torch._C import _autograd, _distributed_c10d

    # Ranks that see one GPU each call it alike.
    if len(set(devices)) < len(devices) or not hasattr(_distributed_c10d, "_detect_dma_connectivity"):
        return None
    links = _distributed_c10d._detect_dma_connectivity(_autograd.DeviceType.CUDA, "nvlink").matrix  # type: ignore[attr-defined]
    return all(links[a][b] or atomics_between(a, b) for a in devices for b in devices if a != b)


def atomics_between(one: int, other: int, driver: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """Whether a GPU has native atomics in the other's memory, as over NVLink and not over PCIe.

    A virtual machine's driver may not tell what is at the other end of a link, which is what torch asks it.
    """
    try:
        library = driver("libcuda.so.1")
    except OSError:
        return False
    found = ctypes.c_int()
    return not library.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, one, other) and bool(found.value)


def _symmetric() -> Any:
    try:
        import torch.distributed._symmetric_memory as found
    except ImportError:
        return None
    return found if hasattr(found, "rendezvous") and hasattr(found, "_SymmetricMemory") else None


def use_backend(memory: Any, name: str, device: torch.device) -> None:
    """Of symmetric memory, before any is there. The one that is set from the start torch 2.11 does not find by name."""
    if memory.get_backend(device) != name:
        memory.set_backend(name)


# ---- buffers


class Slot(Protocol):
    """One buffer on every rank of a group, uint8 [N]."""

    own: Tensor

    def peer(self, rank: int) -> Tensor:
        """Another rank's, uint8 [N]."""
        ...

    def barrier(self) -> None:
        """What the ranks queued before it is done before what any queues behind it begins."""
        ...


class Ring:
    """Slots handed out in turns; one that is too small is made anew, by all ranks alike.

    ``make``: of so many bytes. ``least``: of every slot, best what the largest gather needs: one that is made anew
    frees memory that NCCL still has in a window, since torch gives no window back.
    """

    def __init__(self, make: Callable[[int], Slot], count: int = SLOTS, least: int = 1) -> None:
        self._slots: list[Slot | None] = [None] * count
        self._make, self._idle, self._turn, self._least = make, [0] * count, 0, max(least, 1)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of the next slot. RuntimeError where somebody still holds what lay there."""
        at, self._turn = self._turn, (self._turn + 1) % len(self._slots)
        slot = self._slots[at]
        if slot is not None and users(slot.own) > self._idle[at]:
            raise RuntimeError(f"{len(self._slots)} all-gathers are in flight already; they have no more buffers")
        if slot is None or slot.own.nbytes < nbytes:
            self._slots[at] = slot = None  # its memory first
            self._slots[at] = slot = self._make(-(-max(nbytes, self._least) // ALIGNED) * ALIGNED)
            self._idle[at] = users(slot.own)
        return slot.own[:nbytes]

    def of(self, tensor: Tensor) -> Slot:
        """The slot that a tensor lies in."""
        at = tensor.untyped_storage().data_ptr()
        return next(s for s in self._slots if s is not None and s.own.data_ptr() == at)


def users(x: Tensor) -> int:
    """How many tensors and others share x's memory."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


class SymmetricSlot:
    """In torch's symmetric memory. Making one is a collective."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        memory = _symmetric()
        # Not from its pool: a tensor of a pool begins anywhere in its allocation.
        self.own = memory._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        self._handle = memory.rendezvous(self.own, group.group_name)

    def peer(self, rank: int) -> Tensor:
        """See Slot."""
        return self._handle.get_buffer(rank, (self.own.numel(),), torch.uint8)

    def barrier(self) -> None:
        """See Slot; a kernel of one block."""
        self._handle.barrier(timeout_ms=BARRIER_MS)


def tried(slot: Slot, rank: int, ranks: int) -> Slot:
    """The slot, once each rank has read in every other's what that wrote there; RuntimeError otherwise."""
    slot.own.fill_(rank + 1)
    slot.barrier()
    ends = [[int(slot.peer(other)[at]) for at in (0, -1)] for other in range(ranks) if other != rank]
    slot.barrier()
    if ends != [[other + 1] * 2 for other in range(ranks) if other != rank]:
        raise RuntimeError(f"symmetric memory of rank {rank} shows {ends} where the others wrote their numbers")
    return slot


# ---- the all-gathers, as FSDP2 calls them


class _FromRing:
    """An all-gather whose output lies in a ring's slot."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The output, of FSDP's size [G n]."""
        (count,) = size
        return self.ring.take(int(count) * dtype.itemsize).view(dtype)


class PulledAllGather(_FromRing):
    """Each rank copies the others' parts of their outputs into its own. ``copies``: of (targets, sources), queued."""

    def __init__(self, ring: Ring, copies: Callable[[Sequence[Tensor], Sequence[Tensor]], None]) -> None:
        super().__init__(ring)
        self.copies = copies

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Queued on the current stream, on whose event FSDP waits; FSDP has put this rank's part in its place."""
        slot, rank, ranks = self.ring.of(output_tensor), dist.get_rank(group), dist.get_world_size(group)
        part = input_tensor.nbytes
        assert input_tensor.data_ptr() == output_tensor.data_ptr() + rank * part, "this rank's part lies elsewhere"
        # From the next rank on, so that not all read from one.
        others = [(rank + step) % ranks for step in range(1, ranks)]
        places = {other: slice(other * part, (other + 1) * part) for other in others}
        slot.barrier()  # all have put their parts there
        if part:
            self.copies([slot.own[places[o]] for o in others], [slot.peer(o)[places[o]] for o in others])
        slot.barrier()  # all have what they need of this rank's, which may be overwritten now


class WindowAllGather(_FromRing):
    """NCCL's own on a communicator of its own, which has the zero-CTA policy."""

    def __init__(self, ring: Ring, group: dist.ProcessGroup) -> None:
        super().__init__(ring)
        self.group = group

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """See FSDP's AllGather; ``group``, whose ranks this one's are, is not used."""
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=self.group, async_op=async_op)


# ---- into a model


def install(model: nn.Module, transport: Transport, device: torch.device) -> int:
    """Let the parameters of the FSDP modules within travel so; how many modules. All ranks call it.

    RequestError that names what is missing. Modules whose shards lie on one rank have nothing to gather.
    """
    checked(transport)
    if transport == "default":
        return 0
    groups: dict[str, tuple[dist.ProcessGroup, list[FSDPModule]]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule) and (own := own_parameters(module)):
            mesh = own[0].device_mesh
            group = mesh.get_group(mesh.ndim - 1)
            groups.setdefault(group.group_name, (group, []))[1].append(module)
    many = [pair for pair in groups.values() if dist.get_world_size(pair[0]) > 1]
    for group, _ in many or list(groups.values())[:1]:
        if missing := lacking(transport, offer(group, device)):
            raise RequestError(f"plan.transport = {transport!r}: {missing}; accepted here: 'default'")
    for group, modules in many:
        largest = max(gathered_bytes(module, dist.get_world_size(group)) for module in modules)  # type: ignore[arg-type]
        gather = _gather(transport, group, device, largest)
        for module in modules:
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
    return sum(len(modules) for _, modules in many)


def own_parameters(module: nn.Module) -> list[DTensor]:
    """The sharded parameters that this FSDP module gathers itself, not one within it."""
    inner = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
    taken = {id(p) for m in inner for p in m.parameters()}  # type: ignore[attr-defined]
    return [p for p in module.parameters() if id(p) not in taken and isinstance(p, DTensor)]


def gathered_bytes(module: nn.Module, ranks: int) -> int:
    """Of the output of its all-gather, in full; what travels in 8 bits is less but where rows are a few numbers."""
    own = own_parameters(module)
    return ranks * sum(-(-p.shape[0] // ranks) * p.shape[1:].numel() * p.itemsize for p in own)


def _gather(
    transport: Transport, group: dist.ProcessGroup, device: torch.device, largest: int
) -> PulledAllGather | WindowAllGather:
    """``largest``: bytes of an output."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    memory = _symmetric()
    if transport == "copy_engine":
        use_backend(memory, "CUDA", device)
        engine = CopyEngine()
        ring = Ring(lambda nbytes: tried(SymmetricSlot(nbytes, group, device), rank, ranks), least=largest)

        def copies(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
            engine.copies(targets, sources, torch.cuda.current_stream(device).cuda_stream)

        return PulledAllGather(ring, copies)
    use_backend(memory, "NCCL", device)
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
    own = dist.new_group(
        dist.get_process_group_ranks(group), backend="nccl", pg_options=options, use_local_synchronization=True
    )
    assert isinstance(own, dist.ProcessGroup)
    # Makes its communicator, which windows are registered with.
    dist.all_reduce(torch.zeros(1, device=device), group=own)
    gather = WindowAllGather(Ring(lambda nbytes: SymmetricSlot(nbytes, own, device), least=largest), own)
    found = gather.allocate((ranks,), dtype=torch.float32, device=device)
    found[rank] = rank
    gather(found, found[rank : rank + 1], group)
    if found.tolist() != list(range(ranks)):
        raise RuntimeError(f"an all-gather in NCCL's windows gave {found.tolist()}")
    return gather
