"""Every plan trains as one process: losses, norms, gradients and parameters of five steps, in float64 and float32."""

import weakref
from collections.abc import Sequence
from typing import Any, cast

import pytest
import sharding_program
import torch
import torch.distributed as dist
from model_data import random_samples, small_schema
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gem.data.samples import Samples
from gem.errors import RequestError
from gem.model import GemModel
from gem.model.gem_model import key
from gem.sharding.mesh import Cluster, Plan
from gem.sharding.state import global_names
from gem.sharding.step import ShardedStepper
from gem.sharding.tables import sliced
from gem.train.checkpoint import Checkpoints
from gem.train.config import TrainConfig, parse_config
from gem.train.optimizers import RowwiseAdagrad, dense_optimizer, lookup
from gem.train.world import World

RANKS, STEPS = 4, 5
CLUSTER = Cluster(1, 2, 2)
PLANS = {
    "ddp": Plan(4), "fsdp": Plan(1), "2d": Plan(2), "fsdp-experts": Plan(1, expert=2), "2d-experts": Plan(2, expert=2),
    "v2": Plan(1, tables="v2", table_replicas=2), "v3": Plan(1, tables="v3", table_replicas=2),
    "all": Plan(2, expert=2, tables="v3", table_replicas=2),
}  # fmt: skip
SIZES = {"dim": 16, "heads": 2, "layers": 2, "experts": 4, "expert_hidden": 16, "head_hidden": 16, "feed_forward": 1.0}
CONFIG = {"data": {"kind": "synthetic"}, "lr": 2e-3, "table_lr": 0.05, "clip": 0.5, "warmup": 2, "model": SIZES}
# Samples of each rank, step by step: alike, more here than there, none on one rank.
SHARES = [[4, 4, 4, 4], [7, 1, 3, 5], [5, 6, 0, 5], [4, 4, 4, 4], [1, 2, 3, 10]]
# Who takes over from whose checkpoint after three steps.
HANDED_ON = [("all", "fsdp"), ("fsdp", "all"), ("v3", "v2")]
CUTS = {"item": "row", "user": "column", "signal": "table"}


FP32 = ("ddp", "2d", "all")  # what rounds apart: sums of copies, of shards, and both with experts and tables


def config() -> TrainConfig:
    return parse_config(CONFIG, "test")


def batch(step: int) -> Samples:
    history = [(7 * i + 3 * step) % 40 for i in range(16)]
    return random_samples(history, [(i + step) % 6 for i in range(16)], seed=step)


def model(dtype: torch.dtype) -> GemModel:
    torch.manual_seed(0)
    return GemModel(small_schema(), config().sizes(), lookup=lookup).to(dtype)


def alone(dtype: torch.dtype) -> dict[str, Any]:
    """One process, whole batches, by the definitions."""
    one, c, found = model(dtype), config(), {"losses": [], "norms": [], "gradients": [], "of tables": []}
    names = [table.name for table in small_schema().tables]
    tables = RowwiseAdagrad({name: one.tables[key(name)] for name in names}, c.table_lr)
    dense = dense_optimizer(
        [(n, p) for n, p in one.named_parameters() if not n.startswith("tables.")], c.lr, weight_decay=c.weight_decay
    )
    for step in range(STEPS):
        rate = min(1.0, (step + 1) / (c.warmup + 1))
        tables.lr, dense.param_groups[0]["lr"] = c.table_lr * rate, c.lr * rate
        for group in dense.param_groups:
            group["lr"] = c.lr * rate
        tables.zero_grad()
        dense.zero_grad()
        loss = one.losses(batch(step)).mean()
        loss.backward()
        square = sum(p.grad.square().sum() for p in one.dense_parameters() if p.grad is not None)
        norm = (square + tables.sparse_grad_norm() ** 2).sqrt()
        scale = (CONFIG["clip"] / norm).clamp(max=1.0)
        for p in one.dense_parameters():
            if p.grad is not None:
                p.grad.mul_(scale)
        found["gradients"].append({n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None})
        found["of tables"].append(
            {name: dense_of(one.tables[key(name)].shape, *tables.gradient(name)[:2]) for name in names}
        )
        dense.step()
        tables.step(scale)
        found["losses"].append(float(loss))
        found["norms"].append(float(norm))
    with torch.no_grad():
        found["predictions"] = one(batch(0))
    return found | {"state": {name: x.detach() for name, x in one.state_dict().items()}}


def dense_of(shape: Sequence[int], ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return rows.new_zeros(shape).index_copy_(0, ids, rows)


def watched(stepper: ShardedStepper) -> dict[str, list[Any]]:
    """Filled step by step: this rank's pieces of all gradients, as they are when the optimizers begin."""
    found: dict[str, list[Any]] = {"gradients": [], "of tables": [], "under way": [], "copies at parts": []}
    rename = global_names(stepper.model)

    def look(scale: torch.Tensor) -> None:
        pieces = {}
        for name, p in stepper.model.named_parameters():
            grad = cast(DTensor, p.grad)
            shape, offset = compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)
            own = grad.to_local()
            assert own.shape == torch.Size(shape)
            pieces[rename(name)] = (own.clone(), offset[0] if offset else 0)
        found["gradients"].append(pieces)
        rows = stepper.tables.gradients().items()
        found["of tables"].append({name: dense_of(stepper.tables.weights[name].shape, *x) for name, x in rows})
        step_tables(scale)

    def of_v3(*_: Any) -> None:
        tables = stepper.tables
        own = {x.data_ptr() for x in tables._own}
        copies[:] = [weakref.ref(x) for x in tables._shards if x.data_ptr() not in own]
        found["under way"].append((len(copies), len(tables._waiting)))

    def at_a_part(*_: Any) -> None:
        found["copies at parts"].append(sum(one() is not None for one in copies))

    copies: list[weakref.ref] = []  # of shards, of the step that comes
    step_tables = stepper.tables.step
    stepper.tables.step = look  # type: ignore[method-assign]
    stepper.dense_optimizer.register_step_pre_hook(of_v3)
    for part in stepper.model.parts().values():
        part.register_forward_pre_hook(at_a_part)
    return found


def train(
    plan: Plan, dtype: torch.dtype, steps: range = range(STEPS), folder: str = "", save: bool = False
) -> dict[str, Any]:
    """On this rank; on from the newest checkpoint in ``folder``, if there is one. ``save``: one after the last step."""
    one = model(dtype)
    whole = {table.name: one.tables[key(table.name)].detach() for table in small_schema().tables}
    world = World(dist.get_rank(), RANKS, torch.device("cpu"))
    stepper = ShardedStepper(one, small_schema(), config(), world, plan, CLUSTER, sliced(whole), CUTS)  # type: ignore[arg-type]
    found: dict[str, Any] = {"losses": [], "norms": []} | watched(stepper)
    if folder:
        stepper.number = (Checkpoints(folder).load(stepper.state()) or -1) + 1
        assert stepper.number == steps.start
    for step in steps:
        shares = SHARES[step]
        first = sum(shares[: world.rank])
        own = batch(step).take(first, first + shares[world.rank])
        done = stepper.step(own.split(2) if step == 3 else own)
        assert all(logits.shape == (shares[world.rank],) for logits in done.logits.values())
        assert done.norm is not None
        found["losses"].append(float(done.loss))
        found["norms"].append(float(done.norm))
    found |= evaluated(stepper, batch(0).take(4 * world.rank, 4 * world.rank + 4))
    if save:
        Checkpoints(folder).save(stepper.number - 1, stepper.state())
    rename = global_names(one)
    state = {rename(n): x.full_tensor() if isinstance(x, DTensor) else x for n, x in one.state_dict().items()}
    return found | {"state": state, "held": stepper.tables.held, "tables": stepper.tables.weights}


def evaluated(stepper: ShardedStepper, samples: Samples) -> dict[str, Any]:
    """Predictions, and what is gathered or kept behind them: whatever follows, a checkpoint say, finds shards."""
    predictions = stepper.predict(samples)
    kept = [name for name, p in stepper.model.named_parameters() if not isinstance(p, DTensor)]
    tables = stepper.tables
    assert sum(x.numel() for x in stepper.own_weights()) and not (tables._shards or tables._routes)
    return {"predictions": predictions, "gathered": kept}


def refused() -> str:
    one = model(torch.float32)
    world = World(dist.get_rank(), RANKS, torch.device("cpu"))
    with pytest.raises(RequestError) as caught:
        whole = {table.name: one.tables[key(table.name)].detach() for table in small_schema().tables}
        del cast(Any, one.interactions[0]).mixture.experts[3]
        ShardedStepper(one, small_schema(), config(), world, Plan(1, expert=2), CLUSTER, sliced(whole))
    return str(caught.value)


def everything(folder: str) -> dict[str, Any]:
    """All plans in one group of processes."""
    found: dict[str, Any] = {name: train(plan, torch.float64) for name, plan in PLANS.items()}
    for before, after in HANDED_ON:
        run = f"{folder}/{before}-{after}"
        train(PLANS[before], torch.float64, range(3), run, save=True)
        found[f"{before}-{after}"] = train(PLANS[after], torch.float64, range(3, STEPS), run)
    found |= {f"{name} fp32": train(PLANS[name], torch.float32) for name in FP32}
    return found | {"refused": refused()}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return sharding_program.on_ranks(RANKS, folder, everything, str(folder))


def assert_equal(mine: list[dict[str, Any]], wanted: dict[str, Any], tolerance: float) -> None:
    assert_gradients_equal(mine, wanted, tolerance)
    for one in mine:
        assert one["losses"] == pytest.approx(wanted["losses"], rel=tolerance)
        assert one["norms"] == pytest.approx(wanted["norms"], rel=tolerance)
        assert one["state"].keys() <= wanted["state"].keys()
        for name, x in one["state"].items():
            torch.testing.assert_close(x, wanted["state"][name], rtol=tolerance, atol=tolerance)
        for name, piece in one["held"].items():
            rows, columns = slice(piece.rows.start, piece.rows.stop), slice(piece.columns.start, piece.columns.stop)
            whole = wanted["state"][f"tables.{key(name)}"][rows, columns]
            torch.testing.assert_close(one["tables"][name], whole, rtol=tolerance, atol=tolerance)
        assert one["gathered"] == []
    for task, wanted_B in wanted["predictions"].items():
        predicted_B = torch.cat([one["predictions"][task] for one in mine])
        torch.testing.assert_close(predicted_B, wanted_B, rtol=10 * tolerance, atol=10 * tolerance)
    # Together the ranks have every dense parameter.
    names = {name for one in mine for name in one["state"]}
    assert names == {name for name in wanted["state"] if not name.startswith("tables.")}


def assert_gradients_equal(mine: list[dict[str, Any]], wanted: dict[str, Any], tolerance: float) -> None:
    """Every rank's piece of every gradient, after clipping; of tables before it. Together they are all there are."""
    for step, (dense, tables) in enumerate(zip(wanted["gradients"], wanted["of tables"], strict=True)):
        covered = {name: torch.zeros(len(x) if x.dim() else 1, dtype=torch.bool) for name, x in dense.items()}
        for one in mine:
            for name, (piece, first) in one["gradients"][step].items():
                whole = dense[name][first : first + len(piece)]
                torch.testing.assert_close(piece, whole, rtol=tolerance, atol=tolerance, msg=f"{name}, step {step}")
                covered[name][first : first + len(piece)] = True
            for name, piece in one["held"].items():
                rows, columns = slice(piece.rows.start, piece.rows.stop), slice(piece.columns.start, piece.columns.stop)
                whole = tables[name][rows, columns]
                torch.testing.assert_close(one["of tables"][step][name], whole, rtol=tolerance, atol=tolerance)
        assert all(rows.all() for rows in covered.values())


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return alone(torch.float64)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_trains_as_one_process_does(name, found, reference):
    assert_equal([one[name] for one in found], reference, 1e-9)


@pytest.mark.parametrize("plans", HANDED_ON, ids="-".join)
def test_another_plan_goes_on_from_a_checkpoint_as_if_nothing_had_been(plans, found, reference):
    later = {name: x if name in ("state", "predictions") else x[3:] for name, x in reference.items()}
    assert_equal([one["-".join(plans)] for one in found], later, 1e-9)


@pytest.fixture(scope="module")
def reference_fp32() -> dict[str, Any]:
    return alone(torch.float32)


@pytest.mark.parametrize("name", FP32)
def test_in_float32_too(name, found, reference_fp32):
    assert_equal([one[f"{name} fp32"] for one in found], reference_fp32, 1e-5)


@pytest.mark.parametrize("name", PLANS)
def test_clipped_gradients_of_all_ranks_have_the_norm_that_is_allowed(name, found):
    """Of each gradient's pieces one copy: a norm that counts replicas more than once would clip to less."""
    for step in range(STEPS):
        pieces = {}
        for one in (one[name] for one in found):
            factor = min(1.0, CONFIG["clip"] / one["norms"][step])
            pieces |= {(n, first): piece for n, (piece, first) in one["gradients"][step].items() if len(piece)}
            pieces |= {(n, *vars(at).values()): factor * one["of tables"][step][n] for n, at in one["held"].items()}
        norm = torch.stack([piece.square().sum() for piece in pieces.values()]).sum().sqrt()
        assert float(norm) == pytest.approx(CONFIG["clip"], rel=1e-9)


@pytest.mark.parametrize("name", ["v3", "all"])
def test_v3_gathers_beside_the_dense_optimizer_and_has_no_copy_left_when_layers_work(name, found):
    """Between, the copies' lookup frees them; where a step has two pieces (the fourth), that of the second one."""
    for one in (one[name] for one in found):
        assert all(copies == waiting > 0 for copies, waiting in one["under way"]) and len(one["under way"]) == STEPS
        parts = one["copies at parts"]
        each = len(parts) // (STEPS + 2)  # the second piece, and what predicts
        of_pieces = [set(parts[i : i + each]) for i in range(0, len(parts), each)]
        copies = one["under way"][0][0]
        assert of_pieces == [{0}, {0}, {0}, {copies}, {0}, {0}, {0}]


def test_the_reference_learns(reference):
    """Else all plans could agree on nothing: it clips, and every table and weight moves."""
    assert min(reference["norms"]) > CONFIG["clip"]
    before = model(torch.float64).state_dict()
    assert all(not torch.equal(before[name], x) for name, x in reference["state"].items())


def test_experts_that_cannot_be_dealt_are_refused(found):
    for one in found:
        assert one["refused"] == "plan.expert = 2: 3 experts a layer; accepted: a number of ranks that divides it"
