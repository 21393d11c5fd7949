"""What a run's steps made of the device: E2E MFU from the steps, Local MFU from the layers alone, and the waterfall."""

import torch
import torch.distributed as dist

from gem.data.samples import Samples
from gem.efficiency import Part, Slice, local_mfu, mfu, waterfall
from gem.model.work import TRAINING, Work
from gem.train.local import measure_compute, measure_parts
from gem.train.records import Efficiency, StepEfficiency
from gem.train.step import Stepper
from gem.train.window import Closed
from gem.train.world import World


def measure_efficiency(stepper: Stepper, windows: list[Closed], batch: Samples, peak: float) -> Efficiency:
    """Of the steps in ``windows``; ``batch``, on the host, is what the layers are run on. All ranks call it.

    Figures are means over the ranks, the same on each. Layers are timed on one batch, which is heavier or lighter than
    the mean one: their times are scaled by FLOPs. Ranks alone, without exchange, show skew (the slowest above the
    mean); what the steps took beyond the slowest is communication that nothing hid, the tables' exchange with it. A
    rank that waits for another's input waits for input.
    """
    world = stepper.world
    steps = sum(w.steps for w in windows)
    flops = sum(w.flops for w in windows) / steps
    to_mean = flops / (TRAINING * stepper.model.flops(Work.of(batch)))
    on_device = batch.to(world.device)
    parts = measure_parts(stepper, on_device)
    names = list(windows[0].stages)
    own = [sum(w.seconds for w in windows) / steps, sum(w.waited for w in windows) / steps, flops, peak]
    own += [sum(w.samples for w in windows) / steps]
    own += [sum(w.stages[name] * w.steps for w in windows) / steps for name in names]
    own += [x * to_mean for part in parts for x in (part.flops, part.seconds)]
    step_s, wait_s, flops, peak, samples, *more = _mean(world, own)
    stages = dict(zip(names, more, strict=False))
    scaled = more[len(names) :]
    parts = [Part(p.name, *pair) for p, pair in zip(parts, zip(scaled[::2], scaled[1::2], strict=True), strict=True)]
    together, communication, skew = stages["forward"] + stages["backward"], 0.0, 0.0
    if world.size > 1:
        alone = measure_compute(stepper, on_device) * to_mean
        mean, slowest = _mean(world, [alone])[0], torch.tensor(alone, device=world.device, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        skew = float(slowest) - mean
        together += stages["exchange"]
        wait_s += stages["others"]
        communication = max(0.0, together - float(slowest))
    slices = waterfall(
        parts, step_s=step_s, wait_s=wait_s, compute_s=together - communication - skew,
        optimizer_s=stages["optimizer"], communication_s=communication, skew_s=skew,
    )  # fmt: skip
    local, whole = local_mfu(parts, peak), mfu(flops, step_s, peak)
    rate = samples * world.size / step_s
    return Efficiency(
        peak=peak, local_mfu=local, e2e_mfu=whole, scaling_ratio=whole / local, samples_per_s=rate,
        input_wait=wait_s / step_s, step_s=step_s, parts=parts, waterfall=slices,
    )  # fmt: skip


def measure_steps(world: World, windows: list[Closed], peak: float) -> StepEfficiency:
    """Of the steps in ``windows`` of a model that is cut over ranks, whose layers cannot be timed alone.

    So its waterfall has stages in place of layers: collectives that a forward or backward waits for are in its time.
    Figures are means over the ranks, the same on each; all ranks call it.
    """
    steps = sum(w.steps for w in windows)
    names = list(windows[0].stages)
    own = [sum(getattr(w, what) for w in windows) / steps for what in ("seconds", "waited", "flops", "samples")]
    own += [peak, *(sum(w.stages[name] * w.steps for w in windows) / steps for name in names)]
    step_s, wait_s, flops, samples, peak, *more = _mean(world, own)
    stages = dict(zip(names, more, strict=True))
    wait_s += stages["others"]  # for their input
    slices = [
        Slice("input wait", 1e3 * wait_s, "input"),
        Slice("forward, collectives with it", 1e3 * stages["forward"], "model"),
        Slice("backward, collectives with it", 1e3 * stages["backward"], "model"),
        Slice("exchange", 1e3 * stages["exchange"], "communication"),
        Slice("optimizer", 1e3 * stages["optimizer"], "optimizer"),
    ]
    slices.append(Slice("rest", 1e3 * step_s - sum(one.ms for one in slices), "rest"))
    return StepEfficiency(
        peak=peak, e2e_mfu=mfu(flops, step_s, peak), samples_per_s=samples * world.size / step_s,
        input_wait=wait_s / step_s, step_s=step_s, waterfall=slices,
    )  # fmt: skip


def _mean(world: World, values: list[float]) -> list[float]:
    """Over the ranks, each by itself."""
    return (world.sum(torch.tensor(values, device=world.device, dtype=torch.float64)) / world.size).tolist()
