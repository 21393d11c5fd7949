"""Makes asv benchmarks of declared throughput cases: one class a case, named ``<subject>__<case>``.

``time_forward`` and ``time_backward`` are the measures to gate on (seconds, lower is better). ``track_forward_tflops``
and its backward show useful TFLOP/s; asv takes lower as better for every benchmark (asv 0.6.6 knows nothing else), so
its verdicts on those read the wrong way round: look at them, never gate on them. A ``track_*`` returns one number,
since one that returns a dict breaks ``asv publish``.

Only cases whose `needs` this machine meets become benchmarks. The version of each is a hash of its declaration and of
its length profile: a case that was changed is a new series, not a regression. Discovery imports no torch.
"""

import hashlib
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gem import paths
from gem.data.lengths import Lengths, load_profile
from gem.efficiency import attention_flops, attention_pairs, block_pairs
from gem.harness.case import AnyCase, Case
from gem.harness.needs import Facts, check_needs
from gem.harness.params import BlockAttentionParams, MaskedParams

METHOD = "1"  # part of every version: raise it when what a benchmark times changes
TRACK_SECONDS = 1.0


def check_checkout(here: Path) -> None:
    """`asv run -E existing` measures whatever is importable; a gem from elsewhere would be filed under this commit.

    Raises RuntimeError unless gem is imported from the checkout `here`.
    """
    if paths.checkout_root() != here:
        raise RuntimeError(f"the importable gem is {paths.__file__}, not that of {here}; install it with ./ci/setup")


def version_of(case: Case) -> str:
    """Hash of all that decides what the benchmark runs; where the file lies does not."""
    declaration = case.model_dump_json(exclude={"suite", "file", "description", "expect", "peers"})
    profile = load_profile(case.fixture).model_dump_json()
    return hashlib.sha256("\n".join((METHOD, declaration, profile)).encode()).hexdigest()


def useful_flops(case: Case, lengths: Lengths, direction: str) -> float:
    """FLOPs that the un-padded, unmasked pairs need."""
    params = case.params
    if isinstance(params, BlockAttentionParams):
        pairs = block_pairs(lengths.q, params.block)
    else:
        assert isinstance(params, MaskedParams)
        pairs = attention_pairs(lengths.q, lengths.k, params.causal, params.window)
    backward = direction == "backward"
    return attention_flops(pairs, params.heads, params.head_dim, "backward" if backward else "forward")


class _CaseBenchmark:
    """One declared case and implementation; subclasses made by ``generate`` set ``case``, ``device``, the methods."""

    case: Case
    device: str
    param_names = ("impl",)
    params: tuple[list[str], ...]
    # Few processes of few samples: inputs of the large shapes take seconds to draw.
    rounds = 2
    warmup_time = 0.1
    sample_time = 0.05

    def setup(self, impl: str) -> None:
        """Draw the inputs and run once. asv reports NotImplementedError as 'n/a', not as a failure."""
        import torch

        from gem import dispatch
        from gem.harness.subjects import Subject, build_inputs

        case, params = self.case, self.case.params
        call = dispatch.Call(case.subject, self.device, getattr(torch, params.dtype), params.heads, params.head_dim)
        if reason := dispatch.refusal(call, impl):
            raise NotImplementedError(reason)
        self.torch = torch
        self.lengths = load_profile(case.fixture).draw()
        inputs = build_inputs(case.subject, params, self.lengths, self.device)
        self.subject = Subject(inputs, impl)
        self.leaves = list(self.subject.leaves.values())
        self.d_out = self.subject.gradient_in(inputs.d_out)
        self.out = self.subject.forward()
        # Rows behind the last offset are 0 by the op's contract, so the whole output must be finite.
        if not bool(torch.isfinite(self.out).all()):
            raise RuntimeError(f"{case.id}: the output of {impl} is not finite; a wrong result is not timed")
        self.finish()

    def finish(self) -> None:
        """Wait for the device: a kernel that was only queued has not run."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def forward(self) -> None:
        """The op without a graph, as in inference."""
        with self.torch.no_grad():
            self.subject.forward()
        self.finish()

    def backward(self) -> None:
        """All gradients of one kept graph."""
        self.torch.autograd.grad(self.out, self.leaves, self.d_out, retain_graph=True)
        self.finish()

    def tflops(self, direction: str) -> float:
        """Useful TFLOP/s of the median call within about a second."""
        call = getattr(self, direction)
        call()
        samples: list[float] = []
        while not samples or (sum(samples) < TRACK_SECONDS and len(samples) < 50):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        return useful_flops(self.case, self.lengths, direction) / statistics.median(samples) / 1e12


def class_name(case: Case) -> str:
    """``gdpa__cpu_pma_q32_d64``: an identifier, since asv's names are Python's."""
    return re.sub(r"\W", "_", f"{case.subject}__{case.name}")


def generate(cases: Sequence[AnyCase], facts: Facts, module: str = __name__) -> dict[str, type]:
    """Class name → class of `module`, for the throughput cases of ops that this machine can run.

    A race (end-to-end training against peers) is no benchmark of asv's: its contestants must take turns.

    Raises ValueError when two cases make the same name.
    """
    classes: dict[str, type] = {}
    for case in cases:
        if not isinstance(case, Case) or case.kind != "throughput" or check_needs(case.needs, facts) is not None:
            continue
        name = class_name(case)
        if name in classes:
            raise ValueError(f"{case.id}: another case makes the benchmark {name} too; rename one of them")
        # Kernels run on a GPU only; the oracle is no contestant.
        impls = case.impls or (["torch", "triton", "gluon"] if facts.device == "cuda" else ["torch"])
        members: dict[str, Any] = {
            "__module__": module,
            "__doc__": case.id,
            "case": case,
            "device": facts.device,
            "params": (impls,),
            "version": version_of(case),
            "timeout": max(case.timeout_s, 60.0),
        }
        for direction in case.directions:
            members[f"time_{direction}"] = _timing(case, direction)
            members[f"track_{direction}_tflops"] = _tracking(case, direction)
        classes[name] = type(name, (_CaseBenchmark,), members)
    return classes


def _timing(case: Case, direction: str):
    def time_call(self: _CaseBenchmark, impl: str) -> None:
        getattr(self, direction)()

    time_call.pretty_name = f"{case.id} {direction}"  # type: ignore[attr-defined]
    return time_call


def _tracking(case: Case, direction: str):
    def track_tflops(self: _CaseBenchmark, impl: str) -> float:
        return self.tflops(direction)

    track_tflops.unit = "TFLOP/s"  # type: ignore[attr-defined]
    track_tflops.pretty_name = f"{case.id} {direction}, useful TFLOP/s (higher is better: never gate on it)"  # type: ignore[attr-defined]
    return track_tflops
