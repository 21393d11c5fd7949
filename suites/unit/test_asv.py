"""asv: benchmarks are made from the declared cases, and hand on the harness's own rows."""

import json
import re
from pathlib import Path
from typing import Any

import asv_package
import pytest

from gem import paths
from gem.data.lengths import load_profile
from gem.harness import names
from gem.harness.case import AnyCase, Case, MeasuredCase, build_cases
from gem.harness.measured_params import MEASURED, BbsParams
from gem.harness.needs import Facts
from gem.harness.params import GdpaParams
from gem.harness.suites import load_suites

ROOT = paths.checkout_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="not run from a checkout")
CPU = Facts(device="cpu")
GPU = Facts(device="cuda", capabilities=(90,), triton=True)


@pytest.fixture(scope="module")
def asv_cases() -> Any:
    return asv_package.load("cases")


def declare(subject: str = "gdpa", kind: str = "throughput", **fields: Any) -> AnyCase:
    suite = {"kind": kind, "subject": subject}
    case = {"name": "a"} | ({} if subject in MEASURED else {"fixture": "cpu_self_longtail"}) | fields
    document = {"suite": suite, "case": [case]}
    fixtures = frozenset({"cpu_self_longtail", "cpu_dense_512", "single_token"})
    label = Path("suites/throughput/x.toml")
    (made,) = build_cases(document, file=Path("x.toml"), label=label, fixtures=fixtures)
    return made


def benchmarks(made: type) -> list[str]:
    return sorted(name for name in vars(made) if name.startswith(("track_", "peakmem_", "time_")))


# ---- which benchmarks there are


def test_only_what_this_machine_can_run_becomes_a_benchmark(asv_cases: Any) -> None:
    cases = [
        declare(name="cpu-case"),
        declare(name="gpu_case", needs="cuda:sm90"),
        declare(name="checked", kind="correctness"),
        declare(name="one_way", directions=["forward"]),
    ]
    made = asv_cases.generate(cases, CPU)
    assert list(made) == ["gdpa__cpu_case", "gdpa__one_way"]
    assert made["gdpa__cpu_case"].params == (["torch"],)
    assert benchmarks(made["gdpa__one_way"]) == [
        "peakmem_calls",
        "track_forward_seconds",
        "track_forward_tflops_shown",
    ]
    on_gpu = asv_cases.generate(cases, GPU)
    assert on_gpu["gdpa__gpu_case"].params == (["torch", "triton", "gluon"],)
    assert "track_peak_memory" in benchmarks(on_gpu["gdpa__gpu_case"])
    of_both = asv_cases.generate(cases, CPU, GPU)
    assert {"track_peak_memory", "peakmem_calls"} <= set(benchmarks(of_both["gdpa__one_way"]))


def test_races_and_measured_subjects_are_benchmarks(asv_cases: Any) -> None:
    race = declare("e2e", params={"batches": [4], "step_samples": 8})
    balance = declare("bbs", "scaling", name="b", params={"strategy": "bbs"}, expect={"share_closed": ">= 0.5"})
    rate = declare("bbs", "scaling", name="r", params={"measure": "merge_rate"}, expect={"samples_per_s": ">= 1"})
    learns = declare("bbs", "scaling", name="unlike")
    made = asv_cases.generate([race, balance, rate, learns], CPU)
    assert benchmarks(made["e2e__a"]) == ["track_peak_memory", "track_qps_shown", "track_step_seconds"]
    assert made["e2e__a"].params == (["gem"],)  # without its peers
    assert benchmarks(made["bbs__b"]) == benchmarks(made["bbs__unlike"]) == ["track_share_closed_shown"]
    assert benchmarks(made["bbs__r"]) == ["track_samples_per_s_seconds", "track_samples_per_s_shown"]


def test_what_a_plan_costs_has_a_history(asv_cases: Any) -> None:
    """Of every case, whatever is expected of the others; and a race keeps nothing that it never tells."""
    plan = declare("sharding", "scaling", name="p")
    tables, dense = (declare(f"sharded_{what}", name=what[0], params={"batches": [4]}) for what in ("tables", "dense"))
    made = asv_cases.generate([plan, tables, dense], CPU)
    assert benchmarks(made["sharding__p"]) == [
        "track_bytes_sent", "track_cpu_ms", "track_flops_per_rank", "track_memory_dense", "track_memory_optimizer",
        "track_memory_tables",
    ]  # fmt: skip
    assert benchmarks(made["sharded_tables__t"])[:2] == ["track_cpu_ms", "track_memory_tables"]
    assert benchmarks(made["sharded_dense__d"])[0] == "track_cpu_ms"
    assert "track_peak_memory" not in benchmarks(made["sharded_tables__t"]) + benchmarks(made["sharded_dense__d"])
    found = [row("gem", metric, value, "") for metric, value in (("cpu_ms", 3.0), ("bytes_sent", 8.0))]
    one = made["sharding__p"]()
    assert (one.track_cpu_ms(found, "gem"), one.track_bytes_sent(found, "gem")) == (3.0, 8.0)
    assert one.track_bytes_sent.unit == "bytes"


def test_a_subject_that_is_new_brings_what_it_expects(asv_cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subject of a later day, declared as any other, with a metric that some case of it is expected to reach."""
    from gem.harness import measured_params

    new = measured_params.MeasuredSubject(BbsParams, ("scaling",), "somewhere:Simulated")
    monkeypatch.setitem(measured_params.MEASURED, "simulated", new)
    fields = {"file": Path("x"), "suite": Path("x.toml"), "kind": "scaling", "subject": "simulated"}
    told = MeasuredCase(**fields, name="one", params=BbsParams(), expect={"mfu": ">= 0.4", "input_wait": "<= 0.1"})
    quiet = MeasuredCase(**fields, name="two", params=BbsParams())
    made = asv_cases.generate([told, quiet], CPU)
    assert benchmarks(made["simulated__two"]) == ["track_input_wait", "track_mfu_shown"]


def test_two_cases_of_one_name_are_an_error(asv_cases: Any) -> None:
    with pytest.raises(ValueError, match="gdpa__a_b"):
        asv_cases.generate([declare(name="a.b"), declare(name="a-b")], CPU)


def test_every_declared_case_is_a_benchmark_and_what_rises_is_never_gated(asv_cases: Any) -> None:
    assert ROOT is not None
    cases = load_suites([ROOT / "suites" / kind for kind in asv_cases.KINDS])
    made = asv_cases.generate(cases, CPU, GPU)
    assert len(made) == len(cases)
    text = re.sub(r"^\s*//.*$", "", (ROOT / "asv.conf.json").read_text(encoding="utf-8"), flags=re.MULTILINE)
    (shown,) = json.loads(text)["regressions_first_commits"].items()
    assert shown[1] is None  # asv: no regression is looked for
    found = set()
    for name, made_class in made.items():
        for key in benchmarks(made_class):
            metric = next((one for one in names.METRICS if re.fullmatch(rf"track_(\w+_)?{one}(_shown)?", key)), "ms")
            rises = names.METRICS[metric].better == "higher"
            # As asv asks: the name with its parameters and branch.
            assert bool(re.match(shown[0], f"benchmarks.{name}.{key}('torch')@main")) == rises, key
            assert ("never gated" in getattr(made_class, key).pretty_name) == rises, key
            found.add(rises)
    assert found == {True, False}


# ---- versions


def test_version_follows_the_declaration(asv_cases: Any) -> None:
    version = asv_cases.version_of
    base = version(declare())
    assert base == version(declare(peers=["padded"], description="text", expect={}))  # do not change what is measured
    assert base != version(declare(params={"head_dim": 32}))
    assert base != version(declare(fixture="cpu_dense_512"))
    assert base != version(declare(subject="block_attention"))
    assert base != version(declare(directions=["forward"]))


def test_version_does_not_follow_a_parameter_that_was_not_there(asv_cases: Any) -> None:
    case = declare(params={"head_dim": 32})

    class Wider(GdpaParams):
        later: int = 3

    wider = case.model_copy(update={"params": Wider(head_dim=32)})
    assert wider.params.model_dump() != case.params.model_dump()
    assert asv_cases.version_of(wider) == asv_cases.version_of(case)


def test_version_follows_the_length_profile(asv_cases: Any) -> None:
    profile = load_profile("cpu_self_longtail")
    larger = profile.model_copy(update={"batch": profile.size + 1})
    assert asv_cases.version_of(declare()) != asv_cases.version_of(declare(), lambda name: larger)


# ---- what they hand on


def row(impl: str, metric: str, value: float | None, direction: str = "forward", **more: Any) -> dict[str, Any]:
    given = {"impl": impl, "direction": direction, "metric": metric, "value": value, "samples": [], "reason": ""}
    return given | {"status": "pass"} | more


def test_benchmarks_give_the_rows_in_asv_s_units(asv_cases: Any) -> None:
    from asv_runner.benchmarks.mark import SkipNotImplemented

    made = asv_cases.generate([declare(impls=["torch", "triton", "gluon"])], CPU)["gdpa__a"]
    found = [
        row("torch", "ms", 20.0, samples=[10.0, 20.0, 30.0]),
        row("torch", "tflops", 1.5),
        row("triton", "max_error", 0.3, status="fail", reason="out: bound 2e-5"),
        row("triton", "ms", None, status="fail", reason="out: bound 2e-5"),
        row("gluon", "ms", None, status="skipped", reason="no Gluon kernel for the CPU"),
    ]
    own = made()
    assert own.track_forward_seconds(found, "torch") == {"samples": [0.01, 0.02, 0.03], "number": 1}
    assert own.track_forward_tflops_shown(found, "torch") == 1.5
    with pytest.raises(RuntimeError, match="bound 2e-5"):
        own.track_forward_seconds(found, "triton")
    with pytest.raises(SkipNotImplemented, match="no Gluon kernel"):
        own.track_forward_tflops_shown(found, "gluon")
    assert (own.track_forward_seconds.unit, own.track_forward_tflops_shown.unit) == ("seconds", "TFLOP/s")


def test_step_time_and_rate_are_one_measurement(asv_cases: Any) -> None:
    made = asv_cases.generate([declare("e2e", params={"batches": [4], "step_samples": 8})], CPU)["e2e__a"]
    found = [row("gem", "qps", 4.0, "", samples=[2.0, 4.0, 8.0]), row("gem", "peak_memory", 7.0, "")]
    assert made().track_step_seconds(found, "gem") == {"samples": [4.0, 2.0, 1.0], "number": 1}
    assert made().track_qps_shown(found, "gem") == 4.0 and made().track_peak_memory(found, "gem") == 7.0
    assert made().track_peak_memory.unit == "bytes"


def test_each_class_has_a_cache_of_its_own(asv_cases: Any) -> None:
    """asv would give the first class's results to all whose setup_cache is of one line."""
    from asv_runner.benchmarks._base import get_setup_cache_key

    made = asv_cases.generate([declare(name="a"), declare(name="b")], CPU)
    keys = {get_setup_cache_key(one().setup_cache) for one in made.values()}
    assert len(keys) == 2


def test_a_case_is_run_by_the_harness_without_its_peers(asv_cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEM_DEVICE", "cpu")
    monkeypatch.setenv("GEM_ASV_BUDGET_S", "0.1")
    params = {"heads": 2, "head_dim": 16}
    bound = {"forward.ratio_to.padded": ">= 1e9"}
    case = declare(fixture="single_token", params=params, directions=["forward"], peers=["padded"], expect=bound)
    assert isinstance(case, Case)
    found = asv_cases.measure(case)
    assert {one["impl"] for one in found} == {"torch"} and all(one["status"] == "pass" for one in found)
    made = asv_cases.generate([case], CPU)["gdpa__a"]()
    told = made.track_forward_seconds(found, "torch")
    (ms,) = [one["value"] for one in found if one["metric"] == "ms"]
    assert len(told["samples"]) >= 3 and min(told["samples"]) <= ms / 1e3 <= max(told["samples"])


def test_foreign_package_is_refused(asv_cases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="not that of"):
        asv_cases.check_checkout(tmp_path)
    assert ROOT is not None
    asv_cases.check_checkout(ROOT)
    monkeypatch.setenv(asv_cases.CHECKOUT, str(tmp_path))
    with pytest.raises(RuntimeError, match="not that of"):
        asv_cases.check_checkout(ROOT)
