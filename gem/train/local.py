"""Local MFU: each layer of the model alone on one device, forward and backward, on the inputs that it gets in a step.

The peak is a matrix product in the precision of the run, measured on the same device in the same run: a data sheet's
figure is reached by nobody, and a CPU has none.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gem.data.samples import Samples
from gem.efficiency import Part
from gem.model.work import TRAINING, Work
from gem.train.step import Stepper


def measure_parts(stepper: Stepper, samples: Samples, repeats: int = 5) -> list[Part]:
    """Medians of ``repeats`` runs of each of the model's parts; ``samples`` on the stepper's device."""
    work = Work.of(samples)
    parts = stepper.model.parts()
    calls = _capture(stepper, parts, samples)
    found = []
    for name, module in parts.items():
        arguments = calls[name]

        def run(module: nn.Module = module, arguments: tuple = arguments) -> None:
            with stepper.autocast():
                out = module(*arguments)
            outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
            torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])

        def clear(module: nn.Module = module, arguments: tuple = arguments) -> None:
            for x in [*module.parameters(), *_tensors(arguments)]:
                x.grad = None

        seconds = _median_seconds(run, clear, stepper.world.device, repeats)
        clear()
        found.append(Part(name, TRAINING * module.flops(work), seconds))  # type: ignore[operator]
    return found


def measure_compute(stepper: Stepper, samples: Samples, repeats: int = 5) -> float:
    """Seconds of forward and backward of the whole model on this rank alone, no gradient exchanged; median."""
    model = stepper.model

    def run() -> None:
        with stepper.autocast():
            loss = model.losses(samples).mean()
        loss.backward()

    def clear() -> None:
        model.zero_grad(set_to_none=True)
        stepper.table_optimizer.zero_grad()

    seconds = _median_seconds(run, clear, stepper.world.device, repeats)
    clear()
    return seconds


def measure_peak(device: torch.device, precision: str, budget_s: float = 0.5) -> float:
    """FLOP/s of a square matrix product of normal values: the median over ``budget_s``."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = 8192 if device.type == "cuda" else 512

    def product(size: int) -> tuple[Callable[[], Any], float]:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        return lambda: a @ b, 2.0 * size**3

    run, flops = product(size)
    while device.type == "cpu" and size < 4096 and _median_seconds(run, None, device, 2) < 8e-3:
        size *= 2
        run, flops = product(size)
    once = _median_seconds(run, None, device, 3)
    return flops / _median_seconds(run, None, device, max(5, min(100, int(budget_s / once))))


def _capture(stepper: Stepper, parts: dict[str, nn.Module], samples: Samples) -> dict[str, tuple]:
    """The arguments that each part gets in a forward, cut from the graph."""
    found: dict[str, tuple] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple], None]:
        def hook(module: nn.Module, arguments: tuple) -> None:
            found[name] = _cut(arguments)

        return hook

    hooks = [module.register_forward_pre_hook(keep(name)) for name, module in parts.items()]
    try:
        stepper.predict(samples)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _cut(x: Any) -> Any:
    """Arguments with fresh leaves in the place of floating tensors; lists and tuples are gone through."""
    if isinstance(x, Tensor):
        if not x.is_floating_point():
            return x
        leaf = x.detach().clone().requires_grad_()
        for dim in getattr(x, "_dynamo_weak_dynamic_indices", ()):  # else compiled parts are compiled anew
            torch._dynamo.maybe_mark_dynamic(leaf, dim)
        return leaf
    if isinstance(x, (tuple, list)):
        return type(x)(_cut(one) for one in x)
    return x


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [t for one in x for t in _tensors(one)] if isinstance(x, (tuple, list)) else []


def _median_seconds(
    run: Callable[[], Any], clear: Callable[[], None] | None, device: torch.device, repeats: int
) -> float:
    """Of one run, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        if clear is not None:
            clear()
        if device.type == "cuda":
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(2_000_000)  # about a millisecond, while the host queues the run
            events[0].record()
            run()
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]) * 1e-3)
        else:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
