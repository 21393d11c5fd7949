"""One training step of a sharded model: gem.train.step's, on a plan's meshes.

Losses are means over the global batch, gradients sums over ranks; clipping is by the norm of all parameters together,
tables included.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gem.data.samples import Samples
from gem.data.schema import Schema
from gem.model import GemModel
from gem.model.gem_model import Read
from gem.sharding.collectives import Traffic
from gem.sharding.dense import OwnShards, shard_model, square_norm
from gem.sharding.lowbits import Gather, checked
from gem.sharding.mesh import Cluster, Plan, build, described
from gem.sharding.placement import Cut, Table
from gem.sharding.sm_free import Transport, install
from gem.sharding.state import DenseMoments, ModelState, TableSums
from gem.sharding.tables import ShardedTables, Weights
from gem.train.config import TrainConfig
from gem.train.optimizers import DenseState, dense_optimizer, schedule
from gem.train.step import StepResult, opened
from gem.train.world import World


class ShardedStepper:
    """Model and optimizers over ranks. Every rank makes the same calls.

    model     of the whole schema: its own tables are dropped, and its dense parameters, the same on every rank, are
              sharded. Or what makes it with another ``read``, once the tables are there: none has room for them whole
    weights   what tables begin with (gem.sharding.start.as_alone; tables.drawn, or sliced)
    cuts      how tables are cut, by name; in rows if nothing is said
    gather    how dense parameters travel, "full" or "fp8" (gem.sharding.lowbits)
    transport by what they do, NCCL's kernels or without SMs (gem.sharding.sm_free)
    """

    def __init__(
        self, model: GemModel | Callable[[Read], GemModel], schema: Schema, config: TrainConfig, world: World,
        plan: Plan, cluster: Cluster, weights: Weights, cuts: dict[str, Cut] | None = None, *, gather: Gather = "full",
        transport: Transport = "default",
    ) -> None:  # fmt: skip
        checked(gather)
        self.config, self.world, self.traffic = config, world, Traffic()
        self.meshes = build(plan, cluster, world.device.type)
        self.described = described(plan, cluster)
        dim = config.sizes().table_dim
        tables = [Table(t.name, t.rows, dim, (cuts or {}).get(t.name, "row")) for t in schema.tables]
        self.tables = ShardedTables(
            tables, self.meshes, weights, lr=config.table_lr, device=world.device, traffic=self.traffic
        )
        if not isinstance(model, GemModel):
            model = model(self.tables.fetch)
        model.tables = torch.nn.ParameterDict()
        model.read = self.tables.fetch
        self.experts = shard_model(model, self.meshes, self.traffic, gather=gather)
        install(model, transport, world.device)
        self.model = model
        self.shards = OwnShards(model)
        self.dense_optimizer = dense_optimizer(self.shards.items(), config.lr, weight_decay=config.weight_decay)
        self.number = 0  # steps done
        self.tables.gather()

    def autocast(self) -> AbstractContextManager:
        """Of forwards, in the run's precision."""
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    def step(self, batch: Samples | Sequence[Samples], mark: Callable[[str], None] = lambda name: None) -> StepResult:
        """Learn from this rank's batch, whole or in pieces; all ranks have the same number of pieces."""
        self._set_rates()
        pieces, tasks, counts = opened(batch, self.world)
        mark("others")  # all have their batches
        self.tables.zero_grad()
        self.tables.gather()  # where an evaluation has come in between
        self.tables.expect(len(pieces))
        loss, logits = torch.zeros((), device=self.world.device), []
        for number, piece in enumerate(pieces):
            self.experts.expect(len(piece), self.world.device)
            self.model.set_requires_gradient_sync(number == len(pieces) - 1)  # type: ignore[operator]
            with self.autocast():
                losses = self.model.losses(piece)
            share = (torch.stack([losses.sums[task] for task in tasks]) / counts.clamp_min(1)).sum()
            mark("forward")
            share.backward()
            mark("backward")
            loss = loss + share.detach()
            logits.append(losses.logits)
        self.tables.exchange_gradients()
        mark("exchange")
        norm, scale = None, torch.ones(())
        if self.config.clip is not None:
            norm, scale = self._clip(self.config.clip)
        self.tables.step(scale)
        self.tables.gather()  # for the next step: it travels beside what follows here, and beside that step's beginning
        self.shards.take_gradients()
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad(set_to_none=True)
        self.number += 1
        mark("optimizer")
        return StepResult(self.world.sum(loss), {t: torch.cat([x[t].detach() for x in logits]) for t in tasks}, norm)

    shared = True  # the ranks have one model together, and predict together

    @torch.no_grad()
    def predict(self, samples: Samples) -> dict[str, Tensor]:
        """fp32 logits [B] by task. All ranks call it, also those that have no samples."""
        self.experts.expect(len(samples), self.world.device)
        self.tables.expect(1)
        try:
            with self.autocast():
                return self.model(samples)
        finally:
            self.tables.release()
            self.tables.zero_grad()
            for module in self.model.modules():  # FSDP leaves the root gathered where no backward comes
                if isinstance(module, FSDPModule):
                    module.reshard()

    def counts(self) -> dict[str, int]:
        """Parameters, of all ranks."""
        experts = sum(p.numel() for name, p in self.model.named_parameters() if ".mixture." in name)
        dense = sum(p.numel() for p in self.model.parameters()) - experts
        tables = sum(table.rows * table.dim for table in self.tables.tables.values())
        return {"dense": dense + experts * self.meshes.plan.expert, "of tables": tables}

    def own_weights(self) -> Iterator[Tensor]:
        """What this rank holds."""
        for parameter in self.model.parameters():
            yield parameter.detach().to_local()  # type: ignore[attr-defined]
        yield from self.tables.weights.values()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, as of gem.train.step.Stepper; loaded in place, by this plan or any other."""
        return {
            "model": ModelState(self.model, self.tables, self.meshes),
            "dense": DenseMoments(DenseState(self.dense_optimizer), self.model),
            "tables": TableSums(self.tables, self.meshes),
        }

    def _clip(self, most: float) -> tuple[Tensor, Tensor]:
        square = square_norm(self.model.parameters(), self.meshes)
        norm = (square + self.tables.sparse_grad_norm().to(square.dtype).square()).sqrt()
        scale = (most / norm).clamp(max=1.0)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.to_local().mul_(scale)  # type: ignore[attr-defined]
        return norm, scale

    def _set_rates(self) -> None:
        c = self.config
        factor = schedule(self.number, c.warmup, c.steps, c.decay)
        for group in self.dense_optimizer.param_groups:
            group["lr"] = c.lr * factor
        self.tables.lr = c.table_lr * factor
