"""A model's dense part over ranks by DeepSpeed's ZeRO-3, the baseline of gem.sharding.step: parameters, gradients and
AdamW's state are cut over all ranks, and gathered layer by layer.

Tables are parameters like others (gem.baselines.deepspeed_zero), of another optimizer than gem's: beside it they rest.
"""

import torch
from torch import Tensor

from gem.baselines.deepspeed_zero import DeepSpeedTrainer
from gem.data.samples import Samples
from gem.data.schema import Schema
from gem.errors import RequestError
from gem.model import GemModel
from gem.train.config import TrainConfig


class Zero3:
    """A contestant of the race of dense parts. The process group of all ranks is there; one of these at a time.

    It begins with the weights that gem.train.step.Stepper begins with. No warm-up. RequestError where DeepSpeed cannot
    be imported, or the configuration asks for what is not done here.
    """

    def __init__(self, schema: Schema, config: TrainConfig, *, rank: int, ranks: int) -> None:
        if config.precision != "fp32" or config.decay != "constant":
            raise RequestError(
                f"zero3: precision {config.precision!r}, decay {config.decay!r}; accepted: 'fp32', 'constant'"
            )
        torch.manual_seed(config.seed)
        model = GemModel(schema, config.sizes())
        self.trainer = DeepSpeedTrainer(model, 3, lr=config.lr, weight_decay=config.weight_decay, clip=config.clip)
        if self.trainer.ranks != ranks:
            raise RequestError(f"zero3: {self.trainer.ranks} ranks in the process group; accepted: {ranks}")
        self._lr = config.lr

    def step(self, batch: Samples) -> Tensor:
        """Learn from this rank's batch; the global loss before it, [], the same on every rank."""
        return self.trainer.step(batch)

    def set_table_rate(self, factor: float) -> None:
        """Of the learning rate, for tables; 0: they rest."""
        self.trainer.set_table_lr(self._lr * factor)

    def close(self) -> None:
        """Let go of memory; the process group stays."""
        self.trainer.close()
