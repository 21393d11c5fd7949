"""One training step: losses of a batch, gradients, clipping, both optimizers. Alone or with data-parallel ranks.

Losses are means over the *global* batch: each rank divides its sums by all ranks' counts, so that CVR, whose labels are
as many as there were clicks, is learnt alike however samples lie on ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gem.data.samples import Samples
from gem.data.schema import Schema
from gem.model import GemModel
from gem.model.gem_model import key
from gem.train.config import TrainConfig
from gem.train.optimizers import DenseState, RowwiseAdagrad, clip, dense_optimizer, lookup, schedule
from gem.train.world import World


@dataclass(frozen=True, eq=False)
class StepResult:
    """Tensors stay where they are: reading one waits for the device."""

    loss: Tensor  # fp32 []: sum of the tasks' means over the global batch
    logits: dict[str, Tensor]  # by task, fp32 [B], of this rank, in the order of the batch
    norm: Tensor | None  # fp32 []: of all gradients, before clipping; None without clipping


class _Losses(nn.Module):
    """The model as DDP wants it: a module whose call gives tensors."""

    def __init__(self, model: GemModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, samples: Samples) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        found = self.model.losses(samples)
        return found.sums, found.logits


def opened(batch: Samples | Sequence[Samples], world: World) -> tuple[list[Samples], list[str], Tensor]:
    """(pieces, tasks, how many labels each task has on all ranks) of a step."""
    pieces = [batch] if isinstance(batch, Samples) else list(batch)
    if not pieces:
        raise ValueError("step: a batch of no pieces; accepted: samples, or one piece or more of them")
    tasks = list(pieces[0].labels)
    counts = torch.stack([sum((~p.labels[task].isnan()).sum() for p in pieces) for task in tasks]).float()  # type: ignore[misc]
    return pieces, tasks, world.sum(counts)


class Stepper:
    """Model and optimizers. ``mark``: called with a name when a stage of the step ends, for who times it."""

    def __init__(self, schema: Schema, config: TrainConfig, world: World, **model: Any) -> None:
        torch.manual_seed(config.seed)  # ranks start alike
        self.config, self.world = config, world
        with world.device:  # where a billion weights are drawn in no time
            self.model = GemModel(schema, config.sizes(), lookup=lookup, **model)
        self.table_optimizer = RowwiseAdagrad(
            {t.name: self.model.tables[key(t.name)] for t in schema.tables}, config.table_lr
        )
        dense = [(n, p) for n, p in self.model.named_parameters() if not n.startswith("tables.")]
        self.dense_optimizer = dense_optimizer(dense, config.lr, weight_decay=config.weight_decay)
        self.dense_state = DenseState(self.dense_optimizer)
        self.number = 0  # steps done
        self.table_factor = 1.0  # of the tables' learning rate, for who compares with others' optimizers
        if config.compile:
            self.model.compile_parts()
        losses: nn.Module = _Losses(self.model)
        if world.size > 1:
            # Tables' gradients are rows, exchanged by their optimizer; buffers are the same on every rank.
            apart = [f"model.tables.{name}" for name in self.model.tables]
            apart += [name for name, _ in losses.named_buffers()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(losses, apart)
            losses = DistributedDataParallel(losses, gradient_as_bucket_view=True)
            world.before_leaving(self._let_go)
        self._losses: nn.Module | None = losses

    def autocast(self) -> AbstractContextManager:
        """Of forwards, in the run's precision."""
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    def step(self, batch: Samples | Sequence[Samples], mark: Callable[[str], None] = lambda name: None) -> StepResult:
        """Learn from this rank's batch, which lies on its device: whole, or in pieces one after the other.

        Gradients of pieces add up to those of the whole. RuntimeError once the ranks have parted.
        """
        if self._losses is None:
            raise RuntimeError("the ranks have parted: a Stepper steps inside the join that gave it its world")
        self._set_rates()
        pieces, tasks, counts = opened(batch, self.world)
        if self.world.size > 1:
            mark("others")  # all have their batches
        loss, logits = torch.zeros((), device=self.world.device), []
        for number, piece in enumerate(pieces):
            with self._exchange(number == len(pieces) - 1):
                with self.autocast():
                    sums, found = self._losses(piece)
                share = (torch.stack([sums[task] for task in tasks]) / counts.clamp_min(1)).sum()
                mark("forward")
                # DDP averages over ranks what is to be added up.
                (share * self.world.size).backward()
                mark("backward")
            loss += share.detach()
            logits.append(found)
        if self.world.size > 1:
            self.table_optimizer.average_gradients()
            mark("exchange")
        norm, scale = None, 1.0
        if self.config.clip is not None:
            norm, scale = clip(self.model.dense_parameters(), self.config.clip, self.table_optimizer)
        self.dense_optimizer.step()
        self.table_optimizer.step(scale)
        self.dense_optimizer.zero_grad(set_to_none=True)
        self.table_optimizer.zero_grad()
        self.number += 1
        mark("optimizer")
        return StepResult(self.world.sum(loss), {t: torch.cat([x[t].detach() for x in logits]) for t in tasks}, norm)

    @torch.no_grad()
    def predict(self, samples: Samples) -> dict[str, Tensor]:
        """fp32 logits [B] by task. Not compiled: without gradients all would be compiled once more."""
        stance = torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()
        with self.autocast(), stance:
            return self.model(samples)

    shared = False  # each rank has the whole model, and predicts alone

    def counts(self) -> dict[str, int]:
        """Parameters."""
        return {
            "dense": sum(p.numel() for p in self.model.dense_parameters()),
            "of tables": sum(p.numel() for p in self.model.tables.values()),
        }

    def own_weights(self) -> Iterator[Tensor]:
        """What this rank holds."""
        return (parameter.detach() for parameter in self.model.parameters())

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it; loaded in place."""
        return {"model": self.model, "dense": self.dense_state, "tables": self.table_optimizer}

    def _exchange(self, last: bool) -> AbstractContextManager:
        """Around a backward: gradients go between the ranks with the last one's."""
        return (
            self._losses.no_sync() if isinstance(self._losses, DistributedDataParallel) and not last else nullcontext()
        )

    def _let_go(self) -> None:
        self._losses = None

    def _set_rates(self) -> None:
        c = self.config
        factor = schedule(self.number, c.warmup, c.steps, c.decay)
        for group in self.dense_optimizer.param_groups:
            group["lr"] = c.lr * factor
        self.table_optimizer.lr = c.table_lr * factor * self.table_factor
