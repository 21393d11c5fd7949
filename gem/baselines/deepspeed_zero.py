"""The GEM model trained by DeepSpeed's ZeRO, the baseline of end-to-end training: AdamW on all of it, tables included.

Tables are dense parameters here: DeepSpeed's sparse gradients fail at every stage of ZeRO above 0, so each step's
gradient of a table, its reduction and its update are as large as the table. A step is otherwise DeepSpeed's own:
``engine(…)``, ``engine.backward``, ``engine.step``, with torch's AdamW (its own needs nvcc), fused on a GPU.

Precisions: ``bf16`` is DeepSpeed's bf16 mode, in which the model is bf16 and ZeRO holds fp32 weights, the fastest and
smallest of what it offers; ``autocast`` leaves weights and gradients fp32, as gem.train does; ``fp32``.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem.data.samples import Samples
from gem.errors import RequestError
from gem.model import GemModel
from gem.train.optimizers import decays

Stage = Literal[0, 1, 2, 3]
Precision = Literal["fp32", "bf16", "autocast"]
_BUCKET = 500_000_000  # elements DeepSpeed reduces at once, its default; it sets that much memory aside


class DeepSpeedTrainer:
    """``step`` after ``step`` on a model that it takes over. A context manager, or ``close`` it: a process that
    does not leave its group may abort at exit.

    Alone, or one of the ranks that torchrun started (or whoever called init_process_group before), each with its batch.
    One process has one of these at a time. ``overrides`` are laid over DeepSpeed's configuration, section by section.
    RequestError where DeepSpeed cannot be imported, or was, for another device.
    """

    def __init__(
        self, model: GemModel, stage: Stage, *, device: torch.device | str = "cpu", precision: Precision = "fp32",
        lr: float = 1e-3, weight_decay: float = 0.01, clip: float | None = 1.0,
        overrides: dict[str, dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.device, self.precision = torch.device(device), precision
        small = [name for name, p in model.named_parameters() if p.dim() == 0]
        if small:
            raise RequestError(f"deepspeed: parameter {small[0]!r} has no dimension; accepted: one or more, as [1]")
        self._deepspeed = _import(self.device)
        self._owns_group = _join(self.device)
        self.ranks = dist.get_world_size()
        self._deepspeed.init_distributed(verbose=False)
        losses = _LossSums(model.to(self.device))
        self.engine: Any
        self.engine, *_ = self._deepspeed.initialize(
            model=losses,
            model_parameters=_groups(losses, weight_decay),
            config=_config(model, stage, self.device, precision, lr, clip, overrides or {}),
        )
        self._tasks = [task.name for task in model.schema.tasks]

    def step(self, batch: Samples | Sequence[Samples], look: Callable[[], None] = lambda: None) -> Tensor:
        """Learn from this rank's batch, which lies on its device; the loss before it, fp32 [], not waited for.

        The sum of the tasks' means over all ranks' samples, as in gem.train. A batch in pieces is accumulated; all
        ranks have as many. ``look`` is called when the gradients are there, before the optimizer.
        """
        pieces = [batch] if isinstance(batch, Samples) else list(batch)
        counts = torch.zeros(len(self._tasks), device=self.device)
        for piece in pieces:
            counts += torch.stack([(~piece.labels[task].isnan()).sum() for task in self._tasks])
        if self.ranks > 1:
            dist.all_reduce(counts)
        total = torch.zeros((), device=self.device)
        for number, piece in enumerate(pieces):
            # DeepSpeed's own count of pieces is fixed in its configuration.
            self.engine.set_gradient_accumulation_boundary(number == len(pieces) - 1)
            if self.precision == "bf16":
                piece = replace(piece, floats=piece.floats.bfloat16())
            sums = self.engine(piece)
            loss = (torch.stack([sums[task] for task in self._tasks]) / counts.clamp_min(1)).sum()
            # DeepSpeed averages over ranks what is to be added up.
            self.engine.backward(loss * self.ranks)
            if number == len(pieces) - 1:
                look()
            self.engine.step()
            total += loss.detach()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total

    def table_norm(self) -> float:
        """Of all tables' gradients together, as ``look`` of a step sees them."""
        tables = self.engine.module.model.tables.values()
        grads = [self._deepspeed.utils.safe_get_full_grad(table) for table in tables]
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x.float()) for x in grads])))

    def set_table_lr(self, lr: float) -> None:
        """AdamW's learning rate of the tables; that of the rest stays."""
        self.engine.optimizer.param_groups[-1]["lr"] = lr

    def close(self) -> None:
        """Let go of memory, and leave the process group if it was made here. Safe to call twice."""
        if self.engine is None:
            return
        self.engine.destroy()
        self.engine = None
        if self._owns_group:
            comm = self._deepspeed.comm
            comm.destroy_process_group()
            comm.comm.cdb = None  # else the next one in this process takes it for alive

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LossSums(nn.Module):
    """The model as DeepSpeed wants it: a module whose call gives tensors."""

    def __init__(self, model: GemModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, samples: Samples) -> dict[str, Tensor]:
        return self.model.losses(samples).sums


def _import(device: torch.device) -> Any:
    """DeepSpeed for that kind of device, quiet."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise RequestError(
            f"deepspeed: {error}; accepted: pip install --no-deps -r ci/requirements-deepspeed.txt"
        ) from None
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise RequestError(f"deepspeed: this process has it for {found}, not {device.type}; accepted: DS_ACCELERATOR")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)  # two a step: it calls by old names
    # An all-reduce for inference alone, which the first initialisation would compile: half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _join(device: torch.device) -> bool:
    """Be in a process group; whether it was made here."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if dist.is_initialized():
        return False
    backend = "nccl" if device.type == "cuda" else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return True


def _groups(losses: _LossSums, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for the dense part's matrices; none for the rest; tables, without any, are the last group."""
    named = [(name.removeprefix("model."), p) for name, p in losses.named_parameters()]
    tables = [p for name, p in named if name.startswith("tables.")]
    dense = [(decays(name, p), p) for name, p in named if not name.startswith("tables.")]
    return [
        {"params": [p for decayed, p in dense if decayed], "weight_decay": weight_decay},
        {"params": [p for decayed, p in dense if not decayed], "weight_decay": 0.0},
        {"params": tables, "weight_decay": 0.0},
    ]


def _config(
    model: GemModel, stage: Stage, device: torch.device, precision: Precision, lr: float, clip: float | None,
    overrides: dict[str, dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    optimizer: dict[str, Any] = {"lr": lr, "torch_adam": True}
    if device.type == "cuda":
        optimizer["fused"] = True
    size = sum(p.numel() for p in model.parameters())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # asked for, and compared with no batch
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": min(_BUCKET, size)},
        "gradient_clipping": 0.0 if clip is None else clip,
        "steps_per_print": 10**9,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    for section, values in overrides.items():
        config[section] = config.get(section, {}) | values
    return config
