"""All-gathers in 8 bits: the weights that arrive, the bytes that move, what is learnt, and what a checkpoint holds."""

import copy
import math
from typing import Any, cast

import numpy as np
import pytest
import sharding_program
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from model_data import small_schema
from test_sharding_plans import CLUSTER, CONFIG, RANKS, SHARES, STEPS, batch, config, model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from gem.errors import RequestError
from gem.model.gem_model import key
from gem.sharding.lowbits import EightBit, Gather, dequantise, gather_bytes, gather_in_fp8, quantise
from gem.sharding.mesh import Plan
from gem.sharding.start import sharded_stepper
from gem.sharding.state import global_names
from gem.sharding.step import ShardedStepper
from gem.sharding.tables import sliced
from gem.train.checkpoint import Checkpoints
from gem.train.config import parse_config
from gem.train.optimizers import RowwiseAdagrad, dense_optimizer
from gem.train.world import World

F64 = torch.float64
# Rows and columns: whole blocks, more than ranks divide, fewer than ranks, one; columns less and more than blocks.
SHAPES = [(8, 256), (5, 130), (1, 300), (3, 7), (4, 128), (9, 1)]
MESHES = {"fsdp": (4,), "2d": (2, 2), "one replica": (1, 4), "ddp": (4, 1)}
FSDP = Plan(1)
PLANS = {"ddp": Plan(4), "all": Plan(2, expert=2, tables="v3", table_replicas=2)}
HANDED_ON: list[tuple[Gather, Gather]] = [("fp8", "full"), ("full", "fp8")]
# All values of e4m3 that are not negative, by its definition: 4 bits of exponent, 3 of mantissa, the last a NaN.
CODES = np.array(
    [(c % 8) / 8 * 2.0**-6 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)], np.float32
)


def nearest(weight: Tensor) -> Tensor:
    """What [R, C] becomes, by the definition: of e4m3's values the nearest, ties to even codes, block by block."""
    found = weight.float().numpy().copy()
    for row in found:
        for first in range(0, len(row), 128):
            x = row[first : first + 128]
            finite = np.isfinite(x)
            amax = np.max(np.abs(x[finite]), initial=np.float32(0))
            unit = np.abs(x[finite]) / (amax or np.float32(1)) * np.float32(448)
            distance = np.abs(unit[:, None].astype(np.float64) - CODES)
            near = distance == distance.min(1, keepdims=True)
            code = np.argmax(near * (2 - np.arange(127) % 2), 1)
            x[finite] = np.copysign(CODES[code] / np.float32(448) * amax, x[finite])
            x[~finite] = np.nan
    return torch.from_numpy(found).to(weight.dtype)


def layers() -> nn.Sequential:
    """Linear layers of odd shapes, with values of all sizes, and a norm."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    found = [nn.Linear(columns, rows) for rows, columns in SHAPES]
    for layer in found:
        size = 10.0 ** torch.randint(-4, 4, layer.weight.shape, generator=draw)
        layer.weight.data = torch.randn(layer.weight.shape, generator=draw) * size
    weight = found[0].weight.data
    weight[1], weight[2, :3] = 0.0, torch.tensor([math.nan, math.inf, -math.inf])
    weight[3] *= 1e-42
    weight[4] *= 1e33
    return nn.Sequential(*found, nn.LayerNorm(6))


def arrived(mesh: tuple[int, ...]) -> dict[str, Any]:
    """Weights that FSDP's modules have in a forward, twice: the second time they have been changed since."""
    one = layers()
    names = ("replicate", "shard")[-len(mesh) :]
    made = fully_shard(one, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    names = gather_in_fp8(one)
    found = {"names": names, "bytes": (gather_bytes(one, "full"), gather_bytes(one, "fp8"))}
    for time in ("first", "second"):
        made.unshard()
        found[time] = {name: p.detach().clone() for name, p in one.named_parameters()}
        made.reshard()
        for p in one.parameters():
            p.data.mul_(1.7)
    return found


class TwoLayers(nn.Module):
    """Of 5 rows and of 1: shards of two rows, one and none."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(150, 5, dtype=dtype), nn.Linear(5, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def inputs(dtype: torch.dtype) -> Tensor:
    return torch.randn(12, 150, dtype=dtype, generator=torch.Generator().manual_seed(5))


def gradients(mesh: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Of each rank's three samples, summed, behind two micro-batches."""
    one = TwoLayers(dtype)
    on = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    for part in (one.up, one.down, one):
        made = fully_shard(part, mesh=on)
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
    gather_in_fp8(one)
    x = inputs(dtype)[3 * dist.get_rank() :]
    for piece in (x[:2], x[2:3]):
        one(piece).square().sum().backward()
    assert all(type(p.grad) is DTensor and p.grad.dtype == dtype for p in one.parameters())
    return {name: p.grad.full_tensor() for name, p in one.named_parameters()}  # type: ignore[union-attr]


class Counted:
    """FSDP's all-gather, noting what it sends."""

    def __init__(self, noted: list[tuple[torch.dtype, int]]) -> None:
        self.noted = noted

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.noted.append((input_tensor.dtype, input_tensor.nbytes * (dist.get_world_size(group) - 1)))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def sharded(plan: Plan, gather: Gather, dtype: torch.dtype = F64) -> ShardedStepper:
    one = model(dtype)
    whole = {table.name: one.tables[key(table.name)].detach() for table in small_schema().tables}
    world = World(dist.get_rank(), RANKS, torch.device("cpu"))
    return ShardedStepper(one, small_schema(), config(), world, plan, CLUSTER, sliced(whole), gather=gather)  # type: ignore[arg-type]


def train(
    plan: Plan, gather: Gather, steps: range = range(STEPS), folder: str = "", save: bool = False
) -> dict[str, Any]:
    stepper = sharded(plan, gather)
    found: dict[str, Any] = {"losses": [], "norms": []}
    if folder:
        stepper.number = (Checkpoints(folder).load(stepper.state()) or -1) + 1
        assert stepper.number == steps.start
    for step in steps:
        first = sum(SHARES[step][: dist.get_rank()])
        done = stepper.step(batch(step).take(first, first + SHARES[step][dist.get_rank()]))
        found["losses"].append(float(done.loss))
        found["norms"].append(float(done.norm))  # type: ignore[arg-type]
    if save:
        Checkpoints(folder).save(stepper.number - 1, stepper.state())
    rename, state = global_names(stepper.model), stepper.model.state_dict()
    kinds = {(type(x), type(x._local_tensor), x.dtype) for x in state.values()}
    whole = {rename(name): x.full_tensor() for name, x in state.items()}
    return found | {"state": whole, "kinds": sorted(map(str, kinds))}


def moved(gather: Gather) -> dict[str, Any]:
    """What the formula says of a forward and of a part of the model, and what all-gathers sent."""
    stepper = sharded(Plan(1, expert=2), gather, torch.float32)
    noted: list[tuple[torch.dtype, int]] = []
    for part in stepper.model.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(Counted(noted))  # type: ignore[arg-type]
    said = gather_bytes(stepper.model, gather)
    stepper.experts.expect(4, torch.device("cpu"))
    stepper.tables.gather()
    with torch.no_grad():
        stepper.model(batch(0).take(0, 4))
    sent = sum(count for _, count in noted)
    stepper.model.reshard()  # type: ignore[operator]
    one = stepper.model.tower[0]
    noted.clear()
    one.unshard()  # type: ignore[operator]
    one.reshard()  # type: ignore[operator]
    part = (gather_bytes(one, gather), sum(count for _, count in noted))
    return {"model": (said, sent), "part": part, "types": sorted(str(dtype) for dtype, _ in noted)}


def replaced() -> str:
    one = TwoLayers(torch.float32)
    fully_shard(one, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))
    gather_in_fp8(one)
    one(inputs(torch.float32))
    one.reshard()  # type: ignore[operator]
    one.load_state_dict(one.state_dict())
    one(inputs(torch.float32))
    one.reshard()  # type: ignore[operator]
    one.load_state_dict(one.state_dict(), assign=True)
    with pytest.raises(RuntimeError) as caught:
        one(inputs(torch.float32))
    return str(caught.value)


def wired(gather: str) -> list[str]:
    """Linear layers whose weights travel in 8 bits, in a run that was told so by its configuration."""
    told = parse_config(CONFIG | {"plan": {"gather": gather}}, "test")
    one = sharded_stepper(small_schema(), told, World(dist.get_rank(), RANKS, torch.device("cpu"))).model
    layers = {name: part.weight for name, part in one.named_modules() if isinstance(part, nn.Linear)}
    return [name for name, weight in layers.items() if type(cast(DTensor, weight)._local_tensor) is EightBit]


def everything(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"arrived {name}": arrived(mesh) for name, mesh in MESHES.items()}
    for dtype in (torch.float32, F64):
        found |= {f"gradients {mesh} {dtype}": gradients(mesh, dtype) for mesh in ((1, 4), (2, 2))}
    found |= {f"train {name}": train(plan, "fp8") for name, plan in PLANS.items()}
    for before, after in HANDED_ON:
        run = f"{folder}/{before}-{after}"
        found[f"before {before}"] = train(PLANS["all"], before, range(3), run, save=True)
        found[f"after {after}"] = train(FSDP, after, range(3, STEPS), run)
    return found | {f"moved {gather}": moved(gather) for gather in ("full", "fp8")} | {
        "replaced": replaced(), "wired": wired("fp8"), "not wired": wired("full")
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return sharding_program.on_ranks(RANKS, folder, everything, str(folder))


def linear(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


@torch.no_grad()
def through(module: nn.Module) -> list[Tensor]:
    """Put dequantised weights in the linear layers' place; what they were."""
    before = [layer.weight.data for layer in linear(module)]
    for layer in linear(module):
        layer.weight.data = nearest(layer.weight)
    return before


def put_back(module: nn.Module, weights: list[Tensor]) -> None:
    for layer, weight in zip(linear(module), weights, strict=True):
        layer.weight.data = weight


def alone(gathers: list[Gather]) -> dict[str, Any]:
    """One process, whole batches, by the definitions: forward and backward through what was dequantised."""
    one, c, found = model(F64), config(), {"losses": [], "norms": []}
    tables = RowwiseAdagrad({t.name: one.tables[key(t.name)] for t in small_schema().tables}, c.table_lr)
    named = [(name, p) for name, p in one.named_parameters() if not name.startswith("tables.")]
    dense = dense_optimizer(named, c.lr, weight_decay=c.weight_decay)
    for step, gather in enumerate(gathers):
        rate = min(1.0, (step + 1) / (c.warmup + 1))
        tables.lr = c.table_lr * rate
        for group in dense.param_groups:
            group["lr"] = c.lr * rate
        tables.zero_grad()
        dense.zero_grad()
        masters = through(one) if gather == "fp8" else None
        loss = one.losses(batch(step)).mean()
        loss.backward()
        if masters is not None:
            put_back(one, masters)
        grads = [p.grad for _, p in named if p.grad is not None]
        norm = (sum(g.square().sum() for g in grads) + tables.sparse_grad_norm() ** 2).sqrt()
        scale = (CONFIG["clip"] / norm).clamp(max=1.0)
        for g in grads:
            g.mul_(scale)
        dense.step()
        tables.step(scale)
        found["losses"].append(float(loss.detach()))
        found["norms"].append(float(norm))
    return found | {"state": {name: p.detach() for name, p in named}}


def assert_equal(mine: dict[str, Any], wanted: dict[str, Any], first: int = 0) -> None:
    assert mine["losses"] == pytest.approx(wanted["losses"][first:], rel=1e-9)
    assert mine["norms"] == pytest.approx(wanted["norms"][first:], rel=1e-9)
    for name, x in mine["state"].items():
        torch.testing.assert_close(x, wanted["state"][name], rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return alone(["fp8"] * STEPS)


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_arrive_as_one_process_dequantises_them(mesh, found):
    for mine in found:
        one, got = layers(), mine[f"arrived {mesh}"]
        assert got["names"] == [f"{number}.weight" for number in range(len(SHAPES))]
        for time in ("first", "second"):
            for name, p in one.named_parameters():
                wanted = nearest(p.detach()) if name in got["names"] else p.detach()
                torch.testing.assert_close(got[time][name], wanted, rtol=0, atol=0, equal_nan=True)
                p.data = p.data * 1.7


@pytest.mark.parametrize("mesh", MESHES)
def test_bytes_are_those_of_padded_shards(mesh, found):
    ranks = MESHES[mesh][-1]
    rows = [-(-rows // ranks) for rows, _ in SHAPES]
    rest = sum(4 * r for r in rows) + 2 * 4 * -(-6 // ranks)  # biases, and the norm's two
    full = sum(4 * r * columns for r, (_, columns) in zip(rows, SHAPES, strict=True))
    fp8 = sum(r * (columns + 4 * math.ceil(columns / 128)) for r, (_, columns) in zip(rows, SHAPES, strict=True))
    for mine in found:
        assert mine[f"arrived {mesh}"]["bytes"] == ((ranks - 1) * (full + rest), (ranks - 1) * (fp8 + rest))


@given(st.integers(-149, 127), st.integers(0, 20), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_errors_are_within_half_a_step_of_the_largest_code(top, spread, columns, seed):
    draw = torch.Generator().manual_seed(seed)
    size = torch.randint(-spread, 1, (3, columns), generator=draw) + float(top)
    x = ((torch.rand(3, columns, generator=draw, dtype=F64) * 2 - 1) * 2.0**size).float()
    back = dequantise(*quantise(x))
    for first in range(0, columns, 128):
        block, error = x[:, first : first + 128].double(), (back - x.double())[:, first : first + 128].abs()
        amax = block.abs().amax(1, keepdim=True)
        # Two roundings of fp32 beside it.
        assert (error <= amax / 28 * (1 + 2**-20) + 2.0**-149).all()
        largest = block.abs() == amax
        assert torch.equal(back[:, first : first + 128].double()[largest], block[largest])


def test_zeros_come_back_as_zeros_and_what_is_not_finite_as_nan_in_its_place():
    x = torch.zeros(4, 260)
    x[1, 5], x[1, 6], x[1, 7], x[1, 200] = math.nan, math.inf, 1.0, -math.inf
    x[2] = math.inf
    x[3, 0], x[3, 1], x[3, 130] = 3.4e38, -3.4e38, 2.0**-149
    back = dequantise(*quantise(x))
    assert torch.equal(back.isnan(), ~x.isfinite())
    assert torch.equal(back[x.isfinite()], x[x.isfinite()])


def test_codes_are_gone_once_they_are_weights():
    """FSDP would keep them for as long as the weight."""
    shard = torch.randn(6, 130).as_subclass(EightBit)
    shard.whole = torch.Size((6, 130))
    codes = torch.cat([x.contiguous().view(torch.uint8).flatten() for x in reversed(quantise(shard))])
    weight, inner = shard.fsdp_post_all_gather((codes,), 1, torch.float32) or (None, ())
    assert codes.untyped_storage().nbytes() == 0 and len(inner) == 1 and inner[0] is weight
    assert weight is not None and torch.equal(weight, dequantise(*quantise(shard)))


def test_codes_are_of_eight_bits_and_there_may_be_no_rows():
    codes, amax = quantise(torch.ones(0, 130))
    assert (codes.dtype, codes.shape, amax.dtype, amax.shape) == (torch.float8_e4m3fn, (0, 130), torch.float32, (0, 2))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)])
def test_gradients_are_those_of_the_dequantised_weights(mesh, dtype, found):
    one = TwoLayers(dtype)
    through(one)
    one(inputs(dtype)).square().sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for mine in found:
        for name, p in one.named_parameters():
            assert p.grad is not None
            grad = mine[f"gradients {mesh} {dtype}"][name]
            torch.testing.assert_close(grad, p.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_as_one_process_through_dequantised_weights(plan, found, reference):
    for mine in found:
        assert_equal(mine[f"train {plan}"], reference)


def test_the_reference_is_not_that_in_full(reference):
    full = alone(["full"] * STEPS)
    assert all(abs(a - b) > 1e-6 for a, b in zip(full["losses"], reference["losses"], strict=True))


@pytest.mark.parametrize(("before", "after"), HANDED_ON)
def test_a_run_with_the_other_gather_goes_on_from_a_checkpoint(before, after, found):
    wanted = alone([before] * 3 + [after] * (STEPS - 3))
    for mine in found:
        assert_equal(mine[f"after {after}"], wanted, 3)


def test_state_is_of_plain_tensors_in_the_masters_type(found):
    plain = [str((DTensor, Tensor, F64))]
    for mine in found:
        assert {tuple(mine[f"train {plan}"]["kinds"]) for plan in PLANS} == {tuple(plain)}


@pytest.mark.parametrize("gather", ["full", "fp8"])
def test_all_gathers_send_what_the_formula_says(gather, found):
    for mine in found:
        of = mine[f"moved {gather}"]
        assert of["model"][0] == of["model"][1] > 0
        assert of["part"][0] == of["part"][1] > 0
        assert of["types"] == ["torch.uint8" if gather == "fp8" else "torch.float32"]
        assert mine["moved fp8"]["model"][1] < 0.5 * mine["moved full"]["model"][1]


def test_a_weight_whose_tensor_was_replaced_is_not_gathered_in_full_without_a_word(found):
    message = "up.weight: its tensor was replaced, it would not travel in 8 bits; load in place instead"
    assert [mine["replaced"] for mine in found] == [message] * RANKS


def test_other_ways_to_gather_are_refused():
    world = World(0, RANKS, torch.device("cpu"))
    with pytest.raises(RequestError, match=r"^gather: 'fp4'; accepted: full, fp8$"):
        ShardedStepper(
            model(F64), small_schema(), config(), world, Plan(1), CLUSTER, sliced({}), gather="fp4"  # type: ignore[arg-type]
        )  # fmt: skip
    with pytest.raises(RequestError, match="accepted: full, fp8"):
        gather_bytes(nn.Linear(2, 2), "half")  # type: ignore[arg-type]


def test_what_is_not_sharded_is_refused():
    one = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"^0\.weight: not sharded by rows"):
        gather_in_fp8(one)
    with pytest.raises(ValueError, match=r"^0\.weight: gathered now, or not sharded"):
        gather_bytes(copy.deepcopy(one), "fp8")


def test_a_configuration_chooses_how_weights_travel(found):
    for one in found:
        assert one["not wired"] == [] and len(one["wired"]) == len(linear(model(torch.float32)))
