"""Makes asv benchmarks of declared cases: one class a case, named ``<subject>__<case>``.

The harness measures, asv keeps: a class's ``setup_cache`` runs the case as ``gem run`` does, without its peers, and its
benchmarks hand asv the rows. So a figure here is the figure there, checked against the oracle before it is timed, and a
results document can become asv results (documents.py).

    track_forward_seconds         a call's time on cold caches, with the samples; track_backward_seconds too
    track_forward_tflops_shown    useful TFLOP/s
    track_step_seconds            a training step; track_qps_shown: samples trained a second
    track_cpu_ms, track_bytes_sent, track_memory_tables   of ranks, where they tell
    track_peak_memory             of a training run; of an op's calls on a GPU. On a CPU peakmem_calls, of the process
    track_<metric>                what else a case measures, where lower is better; track_<metric>_shown where higher is
    track_<metric>_seconds        the inverse of a rate

asv takes lower as better for every benchmark (0.6.6 knows nothing else). So names end in ``_shown`` where higher is
better: asv.conf.json has no regressions looked for in those. Each has its time beside it, in which a loss is found.

Cases of ops, races and measured subjects of the kinds in KINDS become benchmarks as soon as they are declared, if this
machine meets their `needs`. The version of each is a hash of what is declared, its length profile included: a case that
was changed is a new series, not a regression. Discovery imports no torch.
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gem import paths
from gem.data.lengths import Profile, load_profile
from gem.harness import environment, names
from gem.harness.case import AnyCase, Case, MeasuredCase
from gem.harness.measured_params import MEASURED
from gem.harness.needs import Facts, check_needs

METHOD = "2"  # part of every version: raise it when what a benchmark measures changes
KINDS = ("throughput", "scaling")  # a case of quality trains for minutes
# What is kept of a subject that is no op, beside what is expected of one of its cases.
TOLD = {
    "e2e": ("qps", "peak_memory"),
    "sharded_tables": ("qps", "cpu_ms", "memory_tables"),
    "sharded_dense": ("qps", "cpu_ms"),
    "sharding": ("cpu_ms", "flops_per_rank", "bytes_sent", "memory_tables", "memory_dense", "memory_optimizer"),
}
CHECKOUT = "GEM_ASV_CHECKOUT"  # whose gem is measured, if not the one that these files belong to
BUDGET_S = "GEM_ASV_BUDGET_S"  # of a contestant's turns; the harness's own default where unset
HIGHER = "higher is better: shown, never gated"
_UNITS = {"s": "seconds", "B": "bytes"}  # as asv spells what it can scale

Found = list[dict[str, Any]]  # the rows of a case


def check_checkout(here: Path) -> None:
    """`asv run -E existing` measures whatever is importable; a gem from elsewhere would be filed under this commit.

    Raises RuntimeError unless gem is imported from the checkout `here`, or from that of GEM_ASV_CHECKOUT.
    """
    wanted = Path(os.environ.get(CHECKOUT, here)).resolve()
    if paths.checkout_root() != wanted:
        raise RuntimeError(f"the importable gem is {paths.__file__}, not that of {wanted}; install it with ./ci/setup")


def version_of(case: AnyCase, profile: Callable[[str], Profile] = load_profile) -> str:
    """Hash of all that is declared and decides what runs; where the file lies does not, nor who else takes part.

    What is left to its default is not in it: a new parameter would end every series.
    """
    left_out = {"suite", "file", "name", "description", "expect", "peers", "needs", "timeout_s", "gate"}
    parts = [METHOD, case.model_dump_json(exclude=left_out, exclude_unset=True)]
    if isinstance(case, Case):
        parts.append(profile(case.fixture).model_dump_json(exclude={"description"}, exclude_unset=True))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def class_name(case: AnyCase) -> str:
    """``gdpa__cpu_pma_q32_d64``: an identifier, since asv's names are Python's."""
    return re.sub(r"\W", "_", f"{case.subject}__{case.name}")


def contestants(case: AnyCase, device: str) -> list[str]:
    """The project's own: implementations of an op, else those of the race, else what `gem run` calls them."""
    if isinstance(case, MeasuredCase):
        return list(MEASURED[case.subject].own) or ["gem"]
    # Kernels run on a GPU only; the oracle is no contestant.
    return case.impls or (["torch", "triton", "gluon"] if device == "cuda" else ["torch"])


def metrics_of(case: MeasuredCase, cases: Iterable[AnyCase]) -> list[str]:
    """What a case that is no op tells: TOLD of its subject, and what is expected of any of the subject's cases."""
    rate = getattr(case.params, "measure", "") == "merge_rate"  # of bbs: two measurements with nothing in common
    expected = (bound.metric for one in cases if one.subject == case.subject for bound in one.expectations)
    race = MEASURED[case.subject].target is None
    found = [*TOLD.get(case.subject, ("qps",) if race else ())]
    found += [metric for metric in expected if metric in names.METRICS]
    if case.subject == "bbs":
        found = ["samples_per_s"] if rate else [metric for metric in found if metric != "samples_per_s"]
    return list(dict.fromkeys(found))


def generate(
    cases: Sequence[AnyCase],
    *facts: Facts,
    module: str = __name__,
    profile: Callable[[str], Profile] = load_profile,
) -> dict[str, type]:
    """Class name → class of `module`, for the cases that a machine of any of the `facts` can run.

    Raises ValueError when two cases make the same name.
    """
    classes: dict[str, type] = {}
    for case in cases:
        devices = [one.device for one in facts if check_needs(case.needs, one) is None]
        if case.kind not in KINDS or not devices:
            continue
        name = class_name(case)
        if name in classes:
            raise ValueError(f"{case.id}: another case makes the benchmark {name} too; rename one of them")
        members: dict[str, Any] = {
            "__module__": module,
            "__doc__": case.id,
            "param_names": ("impl",),
            "params": (list(dict.fromkeys(impl for device in devices for impl in contestants(case, device))),),
            "version": version_of(case, profile),
            "timeout": max(case.timeout_s, 60.0),
            "setup_cache": _cache(case, f"{module}.{name}"),
        }
        members |= _of_op(case, devices) if isinstance(case, Case) else _of_measured(case, cases)
        declared = case.model_dump_json(exclude={"suite", "file"}, exclude_unset=True, indent=1)
        for key, member in members.items():
            if callable(member):  # asv's pages show what is declared in place of the code, which is the same for all
                member.__qualname__ = f"{name}.{key}"
                member.pretty_source = "" if key == "setup_cache" else f"# {case.id}\n{declared}"  # type: ignore[attr-defined]
        classes[name] = type(name, (), members)
    return classes


def _of_op(case: Case, devices: list[str]) -> dict[str, Any]:
    from .memory import peak_of_process, peak_on_gpu

    members: dict[str, Any] = {}
    for direction in case.directions:
        what = f"{case.subject} {case.name} {direction}"
        members[f"track_{direction}_seconds"] = _timing(what, "ms", direction, lambda ms: ms / 1e3)
        members[f"track_{direction}_tflops_shown"] = _shown(what, "tflops", direction)
    if "cpu" in devices:
        members["peakmem_calls"] = peak_of_process(case)
    if "cuda" in devices:
        members["track_peak_memory"] = peak_on_gpu(case)
    return members


def _of_measured(case: MeasuredCase, cases: Sequence[AnyCase]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    what = f"{case.subject} {case.name}"
    for metric in metrics_of(case, cases):
        known = names.METRICS[metric]
        if metric == "qps" and hasattr(case.params, "step_samples"):
            samples = case.params.step_samples  # type: ignore[attr-defined]
            members["track_step_seconds"] = _timing(f"{what} step", metric, "", lambda qps, n=samples: n / qps)
        elif known.unit == "1/s":
            members[f"track_{metric}_seconds"] = _timing(f"{what} 1 / {metric}", metric, "", lambda rate: 1 / rate)
        if known.better == "higher":
            members[f"track_{metric}_shown"] = _shown(what, metric, "")
        else:
            members[f"track_{metric}"] = _plain(f"{what} {metric}", metric, known.unit)
    return members


# ---- the case, run once a class


def measure(case: AnyCase) -> Found:
    """Run the case as `gem run` does, by itself: no peers, and nothing judged but that its results are right."""
    from gem.harness.runner import RunOptions, open_session, run_case

    device = environment.facts(os.environ.get("GEM_DEVICE", "auto")).device
    told = os.environ.get(BUDGET_S)
    options = RunOptions(device=device, budget_s=float(told)) if told else RunOptions(device=device)
    with open_session(options) as session:
        rows = run_case(case.model_copy(update={"peers": [], "expect": {}}), options, session)
    return [row.model_dump() for row in rows]


def _cache(case: AnyCase, place: str) -> Callable[[Any], Found]:
    def setup_cache(self: Any) -> Found:
        return measure(case)

    # asv tells caches apart by module and line alone: without a module of its own each class would get the first's.
    sys.modules.setdefault(place, ModuleType(place))
    setup_cache.__module__ = place
    setup_cache.timeout = max(600.0, 6 * case.timeout_s)  # type: ignore[attr-defined]
    return setup_cache


def row_of(found: Found, impl: str, direction: str, metric: str) -> dict[str, Any]:
    """The row. Raises asv's SkipNotImplemented where there is none to be had here, RuntimeError where it went wrong."""
    from asv_runner.benchmarks.mark import SkipNotImplemented

    own = [row for row in found if row["impl"] in (impl, "") and row["direction"] in (direction, "")]
    for row in own:
        if (row["impl"], row["direction"], row["metric"]) == (impl, direction, metric) and row["value"] is not None:
            return row
    for row in own:
        if row["status"] not in ("pass", "skipped"):
            raise RuntimeError(f"{impl} {direction} {row['metric']}: {row['status']}: {row['reason']}")
    raise SkipNotImplemented(next((row["reason"] for row in own if row["reason"]), f"no {metric} of {impl} here"))


# ---- benchmarks of a class


def _timing(what: str, metric: str, direction: str, seconds: Callable[[float], float]) -> Callable[..., Any]:
    def track_seconds(self: Any, found: Found, impl: str) -> dict[str, Any] | float:
        row = row_of(found, impl, direction, metric)
        # As asv's own timing benchmarks give their samples: it makes the median and its interval of them.
        samples = [seconds(one) for one in row["samples"]]
        return {"samples": samples, "number": 1} if samples else seconds(row["value"])

    return _named(track_seconds, what, "seconds")


def _shown(what: str, metric: str, direction: str) -> Callable[..., Any]:
    unit = names.METRICS[metric].unit
    title = f"{what} {unit if metric == 'tflops' else metric} ({HIGHER})"
    return _named(_value(metric, direction), title, unit)


def _plain(what: str, metric: str, unit: str) -> Callable[..., Any]:
    return _named(_value(metric, ""), what, unit)


def _value(metric: str, direction: str) -> Callable[..., Any]:
    def track_value(self: Any, found: Found, impl: str) -> float:
        return row_of(found, impl, direction, metric)["value"]

    return track_value


def _named(benchmark: Callable[..., Any], title: str, unit: str) -> Callable[..., Any]:
    benchmark.pretty_name = title  # type: ignore[attr-defined]
    benchmark.unit = _UNITS.get(unit, unit)  # type: ignore[attr-defined]
    return benchmark
