"""What a run's steps made of the device: E2E MFU from the steps, Local MFU from the layers alone, and the waterfall."""

import torch
import torch.distributed as dist

from gem.data.samples import Samples
from gem.efficiency import Part, local_mfu, mfu, waterfall
from gem.model.work import TRAINING, Work
from gem.train.local import measure_compute, measure_parts
from gem.train.records import Efficiency
from gem.train.step import Stepper
from gem.train.window import Closed


def measure_efficiency(stepper: Stepper, windows: list[Closed], batch: Samples, peak: float) -> Efficiency:
    """Of the steps in ``windows``; ``batch``, on the host, is what the layers are run on. All ranks call it.

    Layers are timed on one batch, which is heavier or lighter than the mean one: their times are scaled by FLOPs.
    Ranks alone, without exchange, show skew (the slowest above the mean); what the steps took beyond the slowest is
    communication that nothing hid.
    """
    world = stepper.world
    steps, seconds = sum(w.steps for w in windows), sum(w.seconds for w in windows)
    flops, waited = sum(w.flops for w in windows), sum(w.waited for w in windows)
    stages = {name: sum(w.stages[name] * w.steps for w in windows) / steps for name in windows[0].stages}
    to_mean = flops / steps / (TRAINING * stepper.model.flops(Work.of(batch)))
    on_device = batch.to(world.device)
    parts = [Part(p.name, p.flops * to_mean, p.seconds * to_mean) for p in measure_parts(stepper, on_device)]
    together, communication, skew = stages["forward"] + stages["backward"], 0.0, 0.0
    if world.size > 1:
        alone = torch.tensor([measure_compute(stepper, on_device) * to_mean], device=world.device, dtype=torch.float64)
        slowest = alone.clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        mean = float(world.sum(alone)) / world.size
        skew = float(slowest) - mean
        communication = max(0.0, together - float(slowest))
    step_s = seconds / steps
    slices = waterfall(
        parts, step_s=step_s, wait_s=waited / steps, compute_s=together - communication - skew,
        optimizer_s=stages["optimizer"], communication_s=communication, skew_s=skew,
    )  # fmt: skip
    local, whole = local_mfu(parts, peak), mfu(flops / steps, step_s, peak)
    samples = torch.tensor([sum(w.samples for w in windows)], device=world.device, dtype=torch.float64)
    rate = float(world.sum(samples)) / seconds
    return Efficiency(peak, local, whole, whole / local, rate, waited / seconds, step_s, parts, slices)
