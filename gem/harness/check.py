"""Is a contestant right? Its output and gradients against the float64 oracle, within bounds that come from a plain run.

For every tensor (out, and the gradients of q, k, v and a bias), on inputs ~ N(0, 1), error = max |x - oracle|:

- error <= 2 * error of the same computation by plain PyTorch in the inputs' own precision + a floor of a few roundings;
- error <= an absolute bound by dtype, since the plain run may itself be bad;
- everything is finite (compared so that NaN fails), rows behind the last offset are 0.

A large batch is checked on some of its samples: the shortest, the longest that is affordable, and random ones. The
gradient of the output is 0 outside them, so that gradients summed over samples (shared queries, bias tables) compare.

Legend: T rows of all samples, H heads, D head_dim.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gem.data.lengths import Lengths
from gem.harness.params import SubjectParams
from gem.harness.subjects import GARBAGE, Inputs, build_inputs, one_sample, run_reference

# Relative to max(1, max |oracle|). The floor allows for roundings that cancel exactly in the plain run alone, as in the
# softmax gradient of a query with a single key: exactly 0 there, but d_out v - rowsum(out d_out) times a query where
# the two sums run in different order, 3.1e-6 on a GPU. The bound is what no sound implementation of that dtype exceeds.
FLOOR = {torch.float64: 2e-14, torch.float32: 6e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BOUND = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Root mean square of the error over that of the oracle: some ten times what sound implementations show.
RELATIVE_RMS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 3e-2}
MAX_SAMPLES = 64  # the oracle is a loop over samples
SCORES_CPU = 6_000_000  # scores (heads * queries * keys) that the oracle may hold: some 0.5 s on two cores
SCORE_BYTES = 512  # what a score of one sample costs the oracle in memory: eight bytes in some tens of tensors


def choose_samples(lengths: Lengths, heads: int, scores: int, seed: int = 0, limit: int = MAX_SAMPLES) -> list[int]:
    """Indices of the samples to check, ascending: all when their scores fit into ``scores``, else a mixture of lengths.

    Always the shortest and the longest whose scores fit into half the budget, then random ones while they fit. The one
    with the fewest scores is taken even where it alone exceeds the budget: no check at all would pass anything.
    """
    cost = lengths.q * lengths.k * heads
    if int(cost.sum()) <= scores and lengths.batch <= limit:
        return list(range(lengths.batch))
    order = np.argsort(cost, kind="stable")
    chosen = [int(order[0])]
    filled = order[cost[order] > 0]
    if len(filled):
        chosen.append(int(filled[0]))  # the shortest that computes anything
        affordable = filled[cost[filled] <= scores // 2]
        if len(affordable):
            chosen.append(int(affordable[-1]))
    chosen = list(dict.fromkeys(chosen))
    left = scores - int(cost[chosen].sum())
    for sample in np.random.RandomState(seed).permutation(lengths.batch):
        if len(chosen) >= limit:
            break
        if sample not in chosen and cost[sample] <= left:
            chosen.append(int(sample))
            left -= int(cost[sample])
    return sorted(chosen)


def score_budget(device: str) -> int:
    """Scores that the oracle may hold on this device."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory // SCORE_BYTES // 2
    return SCORES_CPU


# ---- the oracle's answer, made once a case and read by every contestant


@dataclass
class Answer:
    """What is right, on the checked samples: float64 ``tensors`` (rows of those samples; whole for shared tensors)."""

    samples: list[int]
    batch: int
    tensors: dict[str, Tensor]
    plain_error: dict[str, float]

    def scope(self) -> str:
        """ "" when all samples are checked, else which."""
        return "" if len(self.samples) == self.batch else f"checked on {len(self.samples)} of {self.batch} samples"


def rows_of(inputs: Inputs, name: str, samples: list[int]) -> Tensor | None:
    """Row indices of ``samples`` in the tensor ``name``; None for one that all samples share."""
    if name == "bias" or (name == "q" and inputs.shared_queries):
        return None
    offsets = inputs.lengths.offsets_k() if name in ("k", "v") else inputs.lengths.offsets_q()
    parts = [np.arange(offsets[b], offsets[b + 1]) for b in samples]
    return torch.as_tensor(np.concatenate([np.empty(0, np.int64), *parts])).to(inputs.device)


def filled_rows(inputs: Inputs, name: str) -> int | None:
    """Rows of ``name`` that belong to a sample; None for one that all samples share."""
    if name == "bias" or (name == "q" and inputs.shared_queries):
        return None
    return inputs.lengths.tokens_k if name in ("k", "v") else inputs.lengths.tokens_q


def masked_d_out(inputs: Inputs, samples: list[int]) -> Tensor:
    """The gradient of the output, 0 for samples that are not checked, huge behind the last offset."""
    rows = rows_of(inputs, "out", samples)
    masked = torch.zeros_like(inputs.d_out)
    masked[rows] = inputs.d_out[rows]
    masked[inputs.lengths.tokens_q :] = GARBAGE
    return masked


def make_answer(inputs: Inputs, computes: str, samples: list[int], directions: list[str]) -> Answer:
    """Run the oracle in float64 and, for the bounds, the same code in the inputs' own precision."""
    exact = _run(inputs, computes, torch.float64, samples, directions)
    plain = exact if inputs.dtype == torch.float64 else _run(inputs, computes, inputs.dtype, samples, directions)
    error = {name: _distance(plain[name], exact[name]) for name in exact}
    return Answer(samples, inputs.lengths.batch, exact, error)


def _run(
    inputs: Inputs, computes: str, dtype: torch.dtype, samples: list[int], directions: list[str]
) -> dict[str, Tensor]:
    """Sample by sample: the time and memory of the samples that are checked, however large the batch."""
    backward = "backward" in directions
    names = [name for name in inputs.leaves if computes == "same" or name != "bias"] if backward else []
    parts: dict[str, list[Tensor]] = {name: [] for name in ("out", *names)}
    shared = {
        name: torch.zeros_like(inputs.leaves[name], dtype=torch.float64, requires_grad=False)
        for name in names
        if rows_of(inputs, name, []) is None
    }
    for sample in samples:
        one = one_sample(inputs, sample, dtype)
        with torch.set_grad_enabled(backward):
            out = run_reference(one, computes)
        parts["out"].append(out.detach().double())
        grads = [None] * len(names)
        if out.requires_grad:  # not where the sample is empty
            grads = torch.autograd.grad(out, [one.leaves[name] for name in names], one.d_out, allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            grad = torch.zeros_like(one.leaves[name]) if grad is None else grad
            if name not in shared:
                parts[name].append(grad.double())
            elif grad.shape == shared[name].shape:
                shared[name] += grad.double()
            else:  # a bias that has a part for each sample
                shared[name][sample] += grad[0].double()
    shapes = {name: (0, *inputs.d_out.shape[1:]) for name in parts if name not in shared}
    empty = {name: torch.zeros(shape, dtype=torch.float64, device=inputs.device) for name, shape in shapes.items()}
    return {name: shared[name] if name in shared else torch.cat([empty[name], *parts[name]]) for name in parts}


def _distance(x: Tensor, exact: Tensor) -> float:
    """max |x - exact|; NaN where either is."""
    return float((x.double() - exact).abs().max()) if exact.numel() else 0.0


class Oracle:
    """Lives in a worker of its own (it is the run's own code, so one serves all cases)."""

    def make(
        self,
        subject: str,
        params: SubjectParams,
        lengths: Lengths,
        device: str,
        directions: list[str],
        paths: dict[str, str],
    ) -> str:
        """Write the answer of each way to compute in ``paths`` (way -> file). Returns which samples it covers."""
        inputs = build_inputs(subject, params, lengths, device)
        samples = choose_samples(lengths, params.heads, score_budget(device), params.seed)
        scope = ""
        for computes, path in paths.items():
            answer = make_answer(inputs, computes, samples, directions)
            torch.save(vars(answer), path)
            scope = answer.scope()
            del answer
        del inputs
        if device == "cuda":  # this worker lives on beside the contestants
            torch.cuda.empty_cache()
        return scope


def load_answer(path: str | Path, device: str) -> Answer:
    """Read an answer onto ``device``."""
    return Answer(**torch.load(path, map_location=device, weights_only=True))


# ---- the verdict


@dataclass
class Verdict:
    """Of one contestant in one direction. ``error`` belongs to the tensor that is worst against what it is allowed."""

    error: float = 0.0
    worst: str = ""
    allowed: float = 0.0
    problems: list[str] = field(default_factory=list)
    scope: str = ""

    @property
    def right(self) -> bool:
        """No problem was found."""
        return not self.problems

    def reason(self) -> str:
        """One line for the row: what is wrong, or how good the worst tensor is."""
        text = "; ".join(self.problems) or f"{self.worst} {self.error:.2g}, allowed {self.allowed:.2g}"
        return f"{text} ({self.scope})" if self.scope else text


def compare(actual: Mapping[str, Tensor], answer: Answer, inputs: Inputs, *, timed: bool = False) -> Verdict:
    """Hold ``actual`` (rows as the inputs' own) against the oracle.

    ``timed``: the gradients are those of the full gradient of the output. Then only rows of checked samples compare,
    not what all samples share; else the gradients of samples that were left out must be 0.
    """
    verdict = Verdict(scope=answer.scope())
    worst_share = -1.0
    for name, x in actual.items():
        rows, filled = rows_of(inputs, name, answer.samples), filled_rows(inputs, name)
        label = name if name == "out" else f"d{name}"
        if not bool(torch.isfinite(x).all()):  # counting makes an int64 of each value: 8 bytes beside its 2
            not_finite = sum(int((~torch.isfinite(part)).sum()) for part in x.split(65536))
            verdict.problems.append(f"{label}: {not_finite} of {x.numel()} values are not finite")
        if filled is not None and bool((x[filled:] != 0).any()):
            verdict.problems.append(f"{label}: rows behind the last offset are not 0")
        if timed and rows is None:
            continue
        exact = answer.tensors[name]
        part = x if rows is None else x[rows]
        if part.shape != exact.shape:
            verdict.problems.append(f"{label}: shape {tuple(x.shape)} has not the rows of its input")
            continue
        if rows is not None and name != "out" and not timed:
            others = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
            others[rows], others[filled:] = False, False
            if bool((x[others] != 0).any()):
                verdict.problems.append(f"{label}: not 0 for samples whose output gradient is 0")
        error, allowed = _distance(part, exact), _allowed(name, answer, inputs.dtype)
        if not error <= allowed:
            plain = answer.plain_error[name]
            verdict.problems.append(f"{label}: error {error:.2g} above {allowed:.2g} (plain run {plain:.2g})")
        rms, allowed_rms = _rms(part, exact), _allowed_rms(exact, inputs.dtype)
        # Not what samples share: sums over all of them that cancel to near 0 have no size to be relative to.
        if rows is not None and not rms <= allowed_rms:
            verdict.problems.append(f"{label}: RMS error {rms:.2g} above {allowed_rms:.2g}")
        share = error / allowed if allowed > 0 else (0.0 if error == 0 else float("inf"))
        if not share <= worst_share:  # NaN is the worst
            worst_share, verdict.error, verdict.worst, verdict.allowed = share, error, label, allowed
    return verdict


class Spot:
    """Some rows of one result after another against the oracle: what there is time for between timed calls."""

    ROWS = 16

    def __init__(self, answer: Answer, inputs: Inputs, direction: str) -> None:
        self.problems: list[str] = []
        self._judged = 0
        self._kept: dict[str, Tensor] = {}
        self._wanted: dict[str, tuple[Tensor, Tensor, float]] = {}  # rows, what they should be, allowed error
        for name in ["out"] if direction == "forward" else [name for name in answer.tensors if name != "out"]:
            rows = rows_of(inputs, name, answer.samples)
            if rows is not None and len(rows):
                some = np.random.default_rng().choice(len(rows), min(self.ROWS, len(rows)), replace=False)
                at = torch.as_tensor(some).to(inputs.device)
                self._wanted[name] = rows[at], answer.tensors[name][at], _allowed(name, answer, inputs.dtype)

    def keep(self, results: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the rows of a result, which may be gone when they are judged. ``results``: name, rows of the inputs."""
        self._kept = {name: x[self._wanted[name][0]] for name, x in results if name in self._wanted}

    def judge(self) -> None:
        """Note what is wrong with the rows kept last; the first time is enough."""
        self._judged += 1
        for name, x in self._kept.items():
            _, exact, allowed = self._wanted[name]
            error = _distance(x, exact)
            if not error <= allowed and not self.problems:
                label = name if name == "out" else f"d{name}"
                self.problems.append(f"{label}: error {error:.2g} above {allowed:.2g} in turn {self._judged}")
        self._kept = {}


def missing_or_recast(actual: Mapping[str, Tensor], answer: Answer, inputs: Inputs, direction: str) -> list[str]:
    """What a contestant did not hand over, and what it handed over in another dtype.

    What is not handed over cannot be wrong: a backward that leaves a gradient out must not pass, nor be timed.
    """
    wanted = {"out"} if direction == "forward" else set(answer.tensors) - {"out"}
    problems = [] if set(actual) == wanted else [f"gave {sorted(actual)}, wanted {sorted(wanted)}"]
    return problems + [
        f"{name}: {x.dtype}, the inputs are {inputs.dtype}" for name, x in actual.items() if x.dtype != inputs.dtype
    ]


def _rms(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact.double()).square().mean().sqrt()) if exact.numel() else 0.0


def _allowed_rms(exact: Tensor, dtype: torch.dtype) -> float:
    """Largest errors alone would pass a result that is 10 % off everywhere: long samples' outputs are that small."""
    if not exact.numel():
        return 0.0
    scale = max(1.0, float(exact.abs().max()))
    return RELATIVE_RMS[dtype] * float(exact.double().square().mean().sqrt()) + FLOOR[dtype] / 16 * scale


def _allowed(name: str, answer: Answer, dtype: torch.dtype) -> float:
    exact = answer.tensors[name]
    scale = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
    bound = BOUND[dtype] * scale
    relative = 2 * answer.plain_error[name] + FLOOR[dtype] * scale
    return min(bound, relative) if relative == relative else bound  # a plain run that is NaN allows no more


def same_bits(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Names of tensors that differ in any bit between two runs; -0.0 and 0.0 differ, NaN equals itself."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return [
        name
        for name, x in first.items()
        if not torch.equal(*(t.contiguous().view(integer[t.element_size()]) for t in (x, second[name])))
    ]
