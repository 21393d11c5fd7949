"""Whole training steps, ours and what a user has today, as a race on one stream of synthetic samples.

    gem                gem.train on packed events
    torch_padded       the same trainer on batches padded to their longest history
    deepspeed_padded   the padded model in DeepSpeed's ZeRO, AdamW on all of it

A step is of the same samples for all. Padded contestants get what helps them: a step's samples sorted by length and cut
into pieces, each padded, by the loader's workers, to its own longest history, as many samples to a piece as is best for
each. Batches come from reader processes in every step: nobody gets time without input.
"""

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gem.baselines.deepspeed_zero import DeepSpeedTrainer
from gem.baselines.padded import Padded, pad
from gem.data.reader_select import select
from gem.data.readers import Batches, Reader
from gem.data.samples import Samples
from gem.data.synthetic import Synthetic
from gem.efficiency import mfu
from gem.harness.measured import DoesNotFit, Findings, Metric, Ready, Report, best_batch
from gem.harness.measured_params import E2eParams
from gem.harness.worker import Unsupported
from gem.model import GemModel
from gem.model.work import TRAINING, Work
from gem.train.config import TrainConfig, parse_config
from gem.train.local import measure_peak
from gem.train.profile import measure_efficiency
from gem.train.step import Stepper
from gem.train.window import Closed, Window, memory_bytes
from gem.train.world import World

BASE = 128  # samples of a base batch, at most
POOL = 4  # batches that a reader balances at a time
PREFETCH = 1  # batches that each reader holds ready
MOST = 0.9  # of the device's memory that the others leave: other batches need a little more than the first ones


class _Contestant(ABC):
    """What they have in common: data, batch sizes, turns. How each trains is its own."""

    name: str
    padded = False
    model: GemModel

    def __init__(self, params: E2eParams, device: str) -> None:
        self.params = params
        if device == "cuda" and not torch.cuda.is_available():
            raise Unsupported("no GPU")
        where = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.world = World(0, 1, where)
        self.config = config_of(params, self.name)
        assert self.config.data.kind == "synthetic"
        self.source = Synthetic(self.config.data.train)
        self._stream: Iterator[list[Samples]] = iter(())
        self._peaks: list[tuple[int, float]] = []  # rows of the largest piece and bytes at the peak, by rising size
        if device == "cuda":
            # The harness has its workers compile in one thread, so as not to disturb others' turns; here nobody's turn
            # comes before all have compiled.
            import torch._inductor.config as inductor

            inductor.compile_threads = min(32, os.cpu_count() or 1)
            # Pieces are of many shapes, which else leave holes that no later piece fits into.
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        if self.padded:
            # cuDNN's attention, SDPA's first choice here, plans anew for every shape, and each piece is one of its own:
            # on an H200 the first steps took several times as long as the device worked (profiled by hand).
            torch.backends.cuda.enable_cudnn_sdp(False)
        # Pieces are many small tensors, more than a process may have files open.
        torch.multiprocessing.set_sharing_strategy("file_system")

    @abstractmethod
    def _step(self, pieces: list[Samples]) -> Tensor:
        """Train on a batch whose pieces lie on the device; the loss before it."""

    @abstractmethod
    def _watched(self, pieces: list[Samples]) -> dict[str, float]:
        """The same; loss, norm of all gradients, norm of the tables'."""

    @abstractmethod
    def _set_table_rate(self, factor: float) -> None:
        """What the rate of the tables' optimizer is multiplied by."""

    def losses(self) -> dict[str, float]:
        """Of the first samples, in two pieces each step. Tables rest: their optimizer is not the baselines'."""
        size, found = self.params.check_batch, {}
        chunk = self.source.read_chunk(0)
        self._set_table_rate(0.0)
        for number in range(self.params.check_steps):
            batch = chunk.take(number * size, (number + 1) * size)
            pieces = cut(batch, -(-size // 2), "samples", self.padded)
            figures = self._watched([piece.to(self.world.device) for piece in pieces])
            found |= {f"{what} of batch {number + 1}": x for what, x in figures.items()}
        self._set_table_rate(1.0)
        return found

    def setup(self, report: Report) -> Ready:
        """The pieces with which the most samples/s are trained; training goes on from where the search has got to."""
        found = best_batch(self.params.batches, self._rate, report)
        self._stream = self._batches(found.batch)
        of = "samples" if self.params.pieces == "samples" else "Ki rows"
        return Ready(self.params.step_samples, note=f"pieces of {found} {of}".replace("batch ", "", 1))

    def turn(self) -> float:
        """Seconds of ``turn_steps`` steps, behind as many as use up what readers got ready in others' turns."""
        return self._timed(self._stream)

    def finish(self) -> Findings:
        """What steps in a row made of the device, peak memory and the time that input was waited for."""
        peak = measure_peak(self.world.device, self.params.precision)
        window, heaviest = self._steps_in_a_row()
        memory = float(memory_bytes(self.world.device))
        peak = max(peak, measure_peak(self.world.device, self.params.precision))
        many = f"{window.steps} steps in a row; peak {peak / 1e12:.3g} TFLOP/s, of a GEMM in this run"
        metrics = [
            Metric("e2e_mfu", mfu(window.flops, window.seconds, peak), note=many),
            Metric("input_wait", window.waited / window.seconds),
            Metric("peak_memory", memory),
        ]
        return self._in_depth(metrics, window, heaviest, peak)

    def _in_depth(self, metrics: list[Metric], window: Closed, heaviest: Samples, peak: float) -> Findings:
        return Findings(metrics)

    # -- batches -------------------------------------------------------------------------------------------------------

    def _batches(self, size: int) -> Iterator[list[Samples]]:
        """Batches without end in pieces of ``size``, by the reader's workers."""
        p, base = self.params, int(np.gcd(self.params.step_samples, BASE))
        reader = _PiecesReader(
            self.source, batch=p.step_samples, base=base, pool=POOL * p.step_samples // base, strategy="samples",
            seed=p.seed, epochs=None,
        )  # fmt: skip
        reader.cut = partial(cut, size=size, of=p.pieces, padded=self.padded)
        pinned = self.world.device.type == "cuda"
        # Forked, readers see that their contestant is gone; from a server of their own they would outlive it.
        context = "fork" if p.workers else None
        batches = Batches(reader, workers=p.workers, prefetch=PREFETCH, pin_memory=pinned, context=context)
        return iter(batches)  # type: ignore[return-value]

    @property
    def _ahead(self) -> int:
        """Batches that readers may hold ready, and one to wake the device."""
        return PREFETCH * self.params.workers + 1

    def _rate(self, size: int) -> float:
        stream = self._batches(size)
        if self.world.device.type != "cuda":
            return self._samples_per_s(stream)
        first = next(stream)
        rows = max(rows_of(piece) for piece in first)
        rest, room = torch.cuda.memory_allocated(), MOST * _free_bytes()
        self._check_room(expected_peak(rows, rest, self._peaks), room)
        torch.cuda.reset_peak_memory_stats()
        rate = self._samples_per_s(itertools.chain([first], stream))
        peak = torch.cuda.max_memory_allocated()
        self._check_room(peak, room)
        self._peaks.append((rows, peak))
        return rate

    @staticmethod
    def _check_room(needed: float, room: float) -> None:
        # Before it is tried, where that can be told: who runs out of memory amid a step keeps what the step had got to
        # (gradients, an engine's buckets), and the others have the less of the device.
        if needed > room:
            raise DoesNotFit(f"it needs {needed / 2**30:.0f} GiB of {room / 2**30:.0f}")

    def _samples_per_s(self, stream: Iterator[list[Samples]]) -> float:
        return self.params.step_samples * self.params.turn_steps / self._timed(stream)

    def _timed(self, stream: Iterator[list[Samples]]) -> float:
        for _ in range(self._ahead):
            self._step([piece.to(self.world.device) for piece in next(stream)])
        self._synchronize()
        start = time.perf_counter()
        for _ in range(self.params.turn_steps):
            self._step([piece.to(self.world.device) for piece in next(stream)])
        self._synchronize()
        return time.perf_counter() - start

    def _steps_in_a_row(self) -> tuple[Closed, Samples]:
        """``row_steps`` steps, behind as many as use up what readers hold ready; the heaviest piece of the last one."""
        window = Window([task.name for task in self.source.schema.tasks], self.model, self.world.device)
        pieces: list[Samples] = []
        for number in range(self._ahead + self.params.row_steps):
            if number == self._ahead:
                window.restart()
                if self.world.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            pieces = next(self._stream)
            window.waited += time.perf_counter() - start
            window.samples += sum(map(len, pieces))
            window.flops += sum(TRAINING * self.model.flops(Work.of(piece)) for piece in pieces)
            window.clock.start()
            self._marked(window, [piece.to(self.world.device) for piece in pieces])
            window.steps += 1
        return window.close(), max(pieces, key=lambda piece: self.model.flops(Work.of(piece)))

    def _marked(self, window: Window, pieces: list[Samples]) -> None:
        self._step(pieces)
        window.clock.mark("step")

    def _synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()


class Gem(_Contestant):
    """gem.train's step."""

    name = "gem"

    def __init__(self, params: E2eParams, device: str) -> None:
        super().__init__(params, device)
        self.stepper = Stepper(self.source.schema, self.config, self.world, **self._layout())
        self.model = self.stepper.model
        if self.config.precision == "bf16":
            # As DeepSpeed does, whose fp32 weights are copies of bf16 ones: the first steps, smaller than half a bf16
            # unit of most weights, then show as little here as there. Else the second step's gradient norms differ by
            # nearly a factor of two on an H200 (seen by hand), far more than any tolerance.
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.copy_(weight.bfloat16())

    def _layout(self) -> dict:
        return {}

    def _step(self, pieces: list[Samples]) -> Tensor:
        return self.stepper.step(pieces).loss

    def _watched(self, pieces: list[Samples]) -> dict[str, float]:
        tables = torch.zeros(())

        def look(stage: str) -> None:
            nonlocal tables
            if stage == "backward":  # of each piece: the last one's are all
                tables = self.stepper.table_optimizer.sparse_grad_norm()

        done = self.stepper.step(pieces, look)
        assert done.norm is not None
        return {"loss": float(done.loss), "gradient norm": float(done.norm), "tables' norm": float(tables)}

    def _set_table_rate(self, factor: float) -> None:
        self.stepper.table_factor = factor

    def _marked(self, window: Window, pieces: list[Samples]) -> None:
        self.stepper.step(pieces, window.clock.mark)

    def _in_depth(self, metrics: list[Metric], window: Closed, heaviest: Samples, peak: float) -> Findings:
        found = measure_efficiency(self.stepper, [window], heaviest, peak)
        metrics += [Metric("local_mfu", found.local_mfu), Metric("scaling_ratio", found.scaling_ratio)]
        return Findings(metrics, found.waterfall)


class TorchPadded(Gem):
    """The same trainer on padded batches."""

    name = "torch_padded"
    padded = True

    def _layout(self) -> dict:
        return {"layout": Padded}

    def _in_depth(self, metrics: list[Metric], window: Closed, heaviest: Samples, peak: float) -> Findings:
        return Findings(metrics)


class DeepSpeedPadded(_Contestant):
    """The padded model under ZeRO."""

    name = "deepspeed_padded"
    padded = True

    def __init__(self, params: E2eParams, device: str) -> None:
        super().__init__(params, device)
        torch.manual_seed(self.config.seed)
        with self.world.device:
            self.model = GemModel(self.source.schema, self.config.sizes(), layout=Padded)
        if self.config.compile:
            self.model.compile_parts()
        c = self.config
        self.trainer = DeepSpeedTrainer(
            self.model, params.stage, device=self.world.device, precision=c.precision, lr=c.lr,
            weight_decay=c.weight_decay, clip=c.clip,
        )  # fmt: skip

    def _step(self, pieces: list[Samples]) -> Tensor:
        return self.trainer.step(pieces)

    def _watched(self, pieces: list[Samples]) -> dict[str, float]:
        tables = []
        loss = self.trainer.step(pieces, lambda: tables.append(self.trainer.table_norm()))
        norm = float(self.trainer.engine.get_global_grad_norm())
        return {"loss": float(loss), "gradient norm": norm, "tables' norm": tables[0]}

    def _set_table_rate(self, factor: float) -> None:
        self.trainer.set_table_lr(self.config.lr * factor)


class _PiecesReader(Reader):
    """Batches cut where they are read."""

    cut: Callable[[Samples], list[Samples]]

    def read(self, epoch: int, pool: int, wanted: Sequence[int]) -> Iterator[Any]:
        """See Reader; each batch as a list of its pieces."""
        yield from map(self.cut, super().read(epoch, pool, wanted))


def cut(batch: Samples, size: int, of: Literal["samples", "rows"], padded: bool) -> list[Samples]:
    """A batch in pieces of ``size`` samples, or of up to ``size`` times 1,024 rows; padded ones by falling length."""
    length_B = batch.sequences["history"].lengths.numpy()
    order_B = np.argsort(-length_B, kind="stable") if padded else np.arange(len(batch))
    starts = [0]
    for at in range(1, len(batch)):
        begun = length_B[order_B[starts[-1] : at + 1]]
        rows = len(begun) * begun[0] if padded else begun.sum()
        if len(begun) > size if of == "samples" else rows > 1024 * size:
            starts.append(at)
    pieces = [order_B[start:stop] for start, stop in zip(starts, [*starts[1:], len(batch)], strict=True)]
    if len(pieces) == 1 and not padded:
        return [batch]
    return [pad(select(batch, rows)) if padded else select(batch, rows) for rows in pieces]


def rows_of(piece: Samples) -> int:
    """Of its histories, padding included."""
    return next(iter(piece.sequences["history"].ids.values())).numel()


def expected_peak(rows: int, rest: float, peaks: Sequence[tuple[int, float]]) -> float:
    """Bytes at the peak of a step whose largest piece has ``rows``, from those of smaller ones; ``rest`` between steps.

    On a line through the last two; through the last one and ``rest`` where there is one alone; 0 where there is none.
    """
    if not peaks:
        return 0.0
    at, peak = peaks[-1]
    before, less = peaks[-2] if len(peaks) > 1 else (0, rest)
    return peak if at == before else peak + (peak - less) * (rows - at) / (at - before)


def _free_bytes() -> int:
    """What the device has for this process: free, or kept by torch for reuse, or in use here."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def config_of(params: E2eParams, name: str) -> TrainConfig:
    """What `gem train` would be told for contestant ``name``. RequestError for sizes that there are not."""
    base = int(np.gcd(params.step_samples, BASE))
    document = {
        "data": {"kind": "synthetic", "train": {"seed": params.seed} | params.data},
        "model": {"preset": params.preset} | params.model,
        "reader": {"batch": params.step_samples, "base": base, "pool": POOL * params.step_samples // base},
        "lr": params.lr, "warmup": 0, "precision": params.precision, "compile": name in params.compile,
        "seed": params.seed,
    }  # fmt: skip
    return parse_config(document, "params")
