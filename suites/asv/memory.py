"""Peak memory of an op's calls, inputs included: of the process on a CPU, of the device on a GPU."""

from collections.abc import Callable
from typing import Any

from gem.data.lengths import load_profile
from gem.harness import environment
from gem.harness.case import Case


def peak_of_process(case: Case) -> Callable[..., None]:
    """asv itself takes the process's peak: it has nothing but these calls (and torch) in it."""

    def peakmem_calls(self: Any, found: object, impl: str) -> None:
        _on("cpu")
        call(case, impl, "cpu")

    peakmem_calls.pretty_name = f"{case.subject} {case.name}: peak memory of a process with its calls"  # type: ignore[attr-defined]
    return peakmem_calls


def peak_on_gpu(case: Case) -> Callable[..., int]:
    """Bytes that torch held at most."""

    def track_peak_memory(self: Any, found: object, impl: str) -> int:
        _on("cuda")
        call(case, impl, "cuda")
        import torch

        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    track_peak_memory.pretty_name = f"{case.subject} {case.name}: peak device memory of its calls"  # type: ignore[attr-defined]
    track_peak_memory.measures_itself = True  # type: ignore[attr-defined]  # it is no row of the case
    track_peak_memory.unit = "bytes"  # type: ignore[attr-defined]
    return track_peak_memory


def call(case: Case, impl: str, device: str) -> None:
    """Each declared direction once. asv's SkipNotImplemented with the reason where `impl` cannot run here."""
    import torch
    from asv_runner.benchmarks.mark import SkipNotImplemented

    from gem import dispatch
    from gem.harness.subjects import Subject, build_inputs

    params = case.params
    dtype = getattr(torch, params.dtype)
    wanted = dispatch.Call(case.subject, device, dtype, params.heads, params.head_dim, params.masked, params.biased)
    if reason := dispatch.refusal(wanted, impl):
        raise SkipNotImplemented(reason)
    inputs = build_inputs(case.subject, params, load_profile(case.fixture).draw(), device)
    subject = Subject(inputs, impl)
    out = subject.forward()
    if "backward" in case.directions:
        torch.autograd.grad(out, list(subject.leaves.values()), subject.gradient_in(inputs.d_out))


def _on(device: str) -> None:
    from asv_runner.benchmarks.mark import SkipNotImplemented

    if environment.facts().device != device:
        raise SkipNotImplemented(f"not on {device} here")
