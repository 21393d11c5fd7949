"""All-gathers without SMs: what is missing is named, buffers go round alike on all ranks, and FSDP trains by them as by
its own. Peers' memory is a file that processes of one CPU share, in place of symmetric memory of GPUs."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding_program import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from gem.errors import RequestError
from gem.sharding.sm_free import (
    ALIGNED,
    Offer,
    PulledAllGather,
    Ring,
    atomics_between,
    checked,
    gathered_bytes,
    install,
    lacking,
    own_parameters,
    tried,
    use_backend,
    users,
)

# ---- what is missing

WHOLE = Offer(
    backend="nccl", device="cuda", ranks=8, hosts=1, linked=True, nccl=(2, 28, 9), settings={}, policy=True,
    symmetric=True, custom=True, no_engine="",
)  # fmt: skip


UNTOLD = "which of the shard group's GPUs have NVLink cannot be told; each rank must see all of them"


@pytest.mark.parametrize(
    ("changed", "copy_engine", "zero_cta"),
    [
        ({}, "", ""),
        ({"ranks": 1}, *["each shard group is one rank, which gathers nothing"] * 2),
        ({"device": "cpu", "backend": "gloo"}, *["the ranks are on cpu; it needs GPUs"] * 2),
        ({"backend": "gloo"}, *["the shard group talks gloo; it needs nccl"] * 2),
        ({"custom": False}, *[f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather"] * 2),
        ({"symmetric": False}, *[f"torch {torch.__version__} has no symmetric memory"] * 2),
        ({"hosts": 2}, *["the shard group spans 2 hosts; it needs one"] * 2),
        ({"linked": False}, *["two GPUs of the shard group have no NVLink between them"] * 2),
        ({"linked": None}, UNTOLD, UNTOLD),
        ({"no_engine": "the driver has none"}, "the driver has none", ""),
        ({"nccl": (2, 27, 5)}, "", "NCCL 2.27.5; it needs 2.28 or later"),
        ({"nccl": (3, 0)}, "", ""),
        ({"policy": False}, "", f"torch {torch.__version__} has no NCCL_CTA_POLICY_ZERO"),
        ({"settings": {"NCCL_CUMEM_ENABLE": "0"}}, "", "NCCL_CUMEM_ENABLE=0 is set"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(changed: dict[str, Any], copy_engine: str, zero_cta: str) -> None:
    offer = dataclasses.replace(WHOLE, **changed)
    assert (lacking("copy_engine", offer), lacking("zero_cta", offer)) == (copy_engine, zero_cta)
    assert lacking("default", offer) == ""


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(RequestError, match=r"transport: 'sm'; accepted: default, copy_engine, zero_cta"):
        checked("sm")
    from gem.train.config import parse_config

    document = {"data": {"kind": "synthetic"}, "plan": {"transport": "copy_engine"}}
    plan = parse_config(document, "run.toml").plan
    assert plan is not None and plan.transport == "copy_engine"
    with pytest.raises(RequestError, match=r"plan\.transport"):
        parse_config({**document, "plan": {"transport": "sm"}}, "run.toml")


class Driver:
    """Of two GPUs with atomics in each other's memory, and a third that has none."""

    def cuDeviceGetP2PAttribute(self, found: Any, attribute: int, one: int, other: int) -> int:
        """CUDA's answer, 0 where it has one."""
        assert attribute == 3
        if other > 2:
            return 101  # CUDA_ERROR_INVALID_DEVICE
        found._obj.value = int({one, other} == {0, 1})
        return 0


def test_nvlink_is_told_by_atomics_too() -> None:
    def of(one: int, other: int) -> bool:
        return atomics_between(one, other, lambda name: Driver())

    assert of(0, 1) and of(1, 0) and not of(0, 2) and not of(0, 3)

    def none(name: str) -> Any:
        raise OSError(name)

    assert not atomics_between(0, 1, none)


class Backends:
    """torch.distributed._symmetric_memory of torch 2.11: what is set from the start is not among those to choose."""

    def __init__(self, begun: str) -> None:
        self.set, self.others = begun, {"CUDA", "NCCL", "NVSHMEM"} - {begun}

    def get_backend(self, device: torch.device) -> str:
        """What is set."""
        return self.set

    def set_backend(self, name: str) -> None:
        """As torch says it."""
        if name not in self.others:
            raise RuntimeError(f"SymmetricMemory does not find allocation backend {name}")
        self.set = name


@pytest.mark.parametrize("begun", ["CUDA", "NCCL", "NVSHMEM"])  # by TORCH_SYMMMEM
@pytest.mark.parametrize("name", ["CUDA", "NCCL"])
def test_a_backend_is_set_where_it_is_not_yet(begun: str, name: str) -> None:
    memory = Backends(begun)
    use_backend(memory, name, torch.device("cuda", 0))
    assert memory.set == name


# ---- buffers in turns


class Memory:
    """A slot of one rank."""

    def __init__(self, nbytes: int) -> None:
        self.own = torch.zeros(nbytes, dtype=torch.uint8)

    def peer(self, rank: int) -> Tensor:
        """Nobody else is there."""
        return self.own

    def barrier(self) -> None:
        """Nobody to wait for."""


def test_a_ring_goes_round_and_grows_by_what_was_asked_alone() -> None:
    made: list[int] = []

    def make(nbytes: int) -> Memory:
        made.append(nbytes)
        return Memory(nbytes)

    ring = Ring(make, count=3)
    places = []
    for nbytes in (10, 600, 512, 512, 512, 513, 0):
        found = ring.take(nbytes)
        assert found.numel() == nbytes
        places.append(found.untyped_storage().data_ptr())
        assert ring.of(found[: nbytes // 2]).own.data_ptr() == places[-1]
        del found
    # Turns 0 1 2 0 1 2 0: of 512, 1,024, 512; the sixth needs more than its slot had.
    assert made == [512, 1024, 512, 1024]
    assert places[3] == places[0] and places[4] == places[1] and places[6] == places[0]
    made.clear()
    ring = Ring(make, count=2, least=600)
    for nbytes in (10, 600, 1024, 1025):
        assert ring.take(nbytes).numel() == nbytes
    assert made == [1024, 1024, 1536]


def test_what_is_still_in_use_is_not_handed_out_again() -> None:
    ring = Ring(Memory, count=2)
    first = ring.take(100).view(torch.float32)[3:]  # a view of a view keeps it
    ring.take(100)
    with pytest.raises(RuntimeError, match="2 all-gathers are in flight already"):
        ring.take(100)
    ring.take(100)  # the other one's turn, and that is free
    del first
    assert ring.take(8).numel() == 8


def test_users_are_counted_by_memory() -> None:
    one = torch.zeros(8)
    alone = users(one)
    other = one[2:4].view(torch.int32)
    assert users(one) == users(other) == alone + 1
    del other
    assert users(one) == alone


def test_memory_that_shows_something_else_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"symmetric memory of rank 0 shows \[\[1, 1\]\]"):
        tried(Memory(64), 0, 2)


# ---- ranks


class File:
    """A slot in files, one a rank; making one is a collective, as it is of symmetric memory."""

    made = 0

    def __init__(self, nbytes: int, folder: str) -> None:
        File.made += 1
        rank = dist.get_rank()
        paths = [f"{folder}/{File.made}-{other}" for other in range(dist.get_world_size())]
        self.own = torch.from_file(paths[rank], shared=True, size=nbytes, dtype=torch.uint8)
        dist.barrier()
        self._peers = [torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths]

    def peer(self, rank: int) -> Tensor:
        """Another rank's."""
        return self._peers[rank]

    def barrier(self) -> None:
        """Of the processes."""
        dist.barrier()


def copies(targets: list[Tensor], sources: list[Tensor]) -> None:
    """What a copy engine does."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def pulled(folder: str, slow_s: float = 0.0) -> PulledAllGather:
    """By files; copies begin ``slow_s`` late."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def late(targets: Any, sources: Any) -> None:
        time.sleep(slow_s)
        copies(targets, sources)

    return PulledAllGather(Ring(lambda nbytes: tried(File(nbytes, folder), rank, ranks)), late)


def at_odd_times(folder: str) -> list[list[int]]:
    """Three gathers, where one rank puts its part there late, and another pulls late while the rest go on at once."""
    rank, found = dist.get_rank(), []
    gather = pulled(folder, slow_s=0.1 * (rank == 2))
    for turn in range(6):
        out = gather.allocate((2 * dist.get_world_size(),), dtype=torch.int32, device=torch.device("cpu"))
        part = out[2 * rank : 2 * rank + 2]
        if turn and rank == 0:
            time.sleep(0.05)
        part[:] = torch.tensor([100 * turn + rank, -rank])
        gather(out, part, dist.group.WORLD)  # type: ignore[arg-type]
        # This rank's part is its own again at once.
        seen = out.tolist()
        part.fill_(-7)
        found.append(seen)
    return found


class Layers(nn.Module):
    """Shards of unlike sizes on three ranks, some empty; one layer is used twice, one is within another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.twice = nn.Linear(7, 20), nn.Linear(20, 20)
        self.inner = nn.Sequential(nn.Linear(20, 5), nn.LayerNorm(5))
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.twice(self.twice(self.first(x).tanh()).tanh())
        return self.last(self.inner(hidden))


def trained(folder: str, by: str) -> dict[str, Tensor]:
    """Parameters after four steps, gathered by FSDP itself or from files."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = Layers()
    inner = model.inner
    parts = [fully_shard(part, mesh=mesh) for part in (model.first, model.twice, inner[0], inner, model.last)]
    fully_shard(model, mesh=mesh)
    model.first.set_modules_to_forward_prefetch([model.twice])  # type: ignore[operator]
    gather = None
    if by == "files":
        gather = pulled(folder)
        for part in (*parts, model):
            assert isinstance(part, FSDPModule)
            part.set_custom_all_gather(gather)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(4):
        model(torch.randn(6, 7, generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if gather is not None:  # what FSDP asked for, not more
        needed = max(gathered_bytes(part, dist.get_world_size()) for part in parts)  # type: ignore[arg-type]
        assert max(slot.own.nbytes for slot in gather.ring._slots if slot) == -(-needed // ALIGNED) * ALIGNED
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def refused() -> list[str]:
    """What a plan's model says on gloo, and which parameters a module gathers itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = Layers()
    fully_shard(model.inner[0], mesh=mesh)
    fully_shard(model.inner, mesh=mesh)
    found = []
    for transport in ("copy_engine", "zero_cta"):
        try:
            install(model, transport, torch.device("cpu"))
        except RequestError as error:
            found.append(str(error))
    assert [p.shape for p in own_parameters(model.inner)] == [(5,), (5,)]
    assert install(model, "default", torch.device("cpu")) == 0
    return found


def all_of_it(folder: str) -> dict[str, Any]:
    """One start of processes for all."""
    return {
        "odd": at_odd_times(folder), "files": trained(folder, "files"), "fsdp": trained(folder, "fsdp"),
        "slots": File.made, "refused": refused(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of three ranks."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return on_ranks(3, folder, all_of_it, str(folder))


def test_a_gather_has_all_parts_whoever_is_late(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["odd"] == [[100 * turn, 0, 100 * turn + 1, -1, 100 * turn + 2, -2] for turn in range(6)]


def test_fsdp_trains_by_it_as_by_its_own(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["files"].keys() == found["fsdp"].keys() and len(found["files"]) == 10
        for name, weight in found["files"].items():
            assert torch.equal(weight, found["fsdp"][name]), name
    assert {found["slots"] for found in ranks} == {ranks[0]["slots"]}  # alike on all, else they would not meet
    assert not torch.equal(ranks[0]["files"]["first.weight"], Layers().first.weight)


def test_gloo_is_told_why_not(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["refused"] == [
            f"plan.transport = {transport!r}: the ranks are on cpu; it needs GPUs; accepted here: 'default'"
            for transport in ("copy_engine", "zero_cta")
        ]
