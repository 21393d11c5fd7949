"""Rows from what contestants did, by hand: metrics, ratios, expectations, useful work; and the ceilings' arithmetic.

Kinds: a numerically broken contestant kept its ratio; failing cases were dropped from the table.
"""

from pathlib import Path
from typing import Any

import pytest

from gem.data.lengths import load_profile
from gem.harness import ceilings, score
from gem.harness.case import Case
from gem.harness.params import SUBJECTS, GdpaParams
from gem.harness.score import Outcome, Work, apply_expectations, throughput_rows, useful_work
from gem.harness.timing import summarize

SMALL: dict[str, Any] = {"heads": 2, "head_dim": 16}


def make_case(subject="jagged_attention", fixture="empty_middle", params: Any = None, expect=None, **given):
    case = Case(
        suite=Path("suites/test.toml"), file=Path("suites/test.toml"), kind="throughput", subject=subject, name="case",
        fixture=fixture, params=SUBJECTS[subject](**(SMALL | (params or {}))), **given,
    )  # fmt: skip
    return case.model_copy(update={"expect": expect or {}})


def pick(rows, impl, metric):
    return [r for r in rows if (r.impl, r.metric) == (impl, metric)]


def timed(impl, ms):
    return Outcome(impl, "forward", max_error=1e-6, error_note="out", timing=summarize([ms] * 7))


WORK = {"forward": Work(flops=2e9, n_bytes=1e8, least_ms=4.0)}


def test_metrics_by_hand():
    rows = throughput_rows(make_case(), [timed("torch", 10.0), timed("flex", 25.0)], WORK)
    values = {(r.impl, r.metric): r.value for r in rows}
    assert values["torch", "ms"] == 10.0
    assert values["torch", "tflops"] == pytest.approx(0.2)  # 2 GFLOP in 10 ms
    assert values["torch", "gbps"] == pytest.approx(10.0)
    assert values["torch", "roofline"] == pytest.approx(0.4)
    assert values["torch", "ratio_to.flex"] == pytest.approx(2.5)  # above 1: gem is faster
    assert ("flex", "ratio_to.torch") not in values
    assert {r.better for r in rows if r.metric in ("ms", "max_error")} == {"lower"}


def test_a_wrong_subject_gets_no_ratio():
    wrong = Outcome("torch", "forward", "fail", "out: error 0.3 above 1e-5", max_error=0.3, error_note="bad")
    rows = throughput_rows(make_case(), [wrong, timed("flex", 25.0)], WORK)
    assert [(r.metric, r.status, r.value) for r in rows if r.impl == "torch"] == [
        ("max_error", "fail", 0.3),
        ("ms", "fail", None),
        ("ratio_to.flex", "skipped", None),
    ]


@pytest.mark.parametrize(
    ("peer", "status", "text"),
    [
        (timed("flex", 25.0), "pass", ""),
        (timed("flex", 15.0), "fail", "expected forward.ratio_to.flex >= 2, is 1.5"),
        (Outcome("flex", "forward", "skipped", "no compiler"), "skipped", "no ratio"),
        (Outcome("flex", "forward", "oom", "killed"), "fail", "expected forward.ratio_to.flex >= 2, there is no value"),
    ],
)
def test_expectation_is_kept_broken_or_not_judged(peer, status, text):
    case = make_case(peers=["flex"], expect={"forward.ratio_to.flex": ">= 2"})
    outcomes = [timed("torch", 10.0), peer]
    rows = apply_expectations(case, throughput_rows(case, outcomes, WORK), outcomes)
    (ratio,) = pick(rows, "torch", "ratio_to.flex")
    assert ratio.status == status and text in ratio.reason


def test_expectation_is_judged_by_the_best_implementation():
    case = make_case(expect={"forward.roofline": ">= 0.8"})
    outcomes = [timed("torch", 40.0), timed("triton", 4.5)]  # shares 0.1 and 0.89
    rows = apply_expectations(case, throughput_rows(case, outcomes, WORK), outcomes)
    assert all(r.status == "pass" for r in rows)
    outcomes[1] = timed("triton", 6.0)
    rows = apply_expectations(case, throughput_rows(case, outcomes, WORK), outcomes)
    assert [(r.impl, r.metric) for r in rows if r.status == "fail"] == [("triton", "roofline")]


def test_useful_work_counts_what_the_mask_keeps_and_shared_queries_once():
    case = make_case(fixture="more_q_than_k", params={"causal": True})
    lengths = load_profile("more_q_than_k").draw()
    pairs = sum(
        sum(0 <= j <= i + k - q for j in range(k)) for q, k in zip(lengths.q, lengths.k, strict=True) for i in range(q)
    )
    assert useful_work(case, lengths, "forward")[0] == 4 * 2 * 16 * pairs
    assert useful_work(case, lengths, "backward")[0] == 10 * 2 * 16 * pairs
    pma = load_profile("cpu_pma_q32").draw()
    shared = make_case(subject="gdpa", fixture="cpu_pma_q32")
    row_bytes = 2 * 16 * 4
    assert useful_work(shared, pma, "forward")[1] == row_bytes * (32 + 32 * pma.batch + 2 * pma.tokens_k)
    assert isinstance(shared.params, GdpaParams) and score.ELEMENT_SIZE["float32"] == 4


def test_ceilings_are_flops_and_bytes_over_the_measured_time(monkeypatch):
    """A timer that says 10 ms for whatever it is given: rates by hand, and the roofline's longer side."""

    class TenMs:
        def __init__(self, device):
            pass

        def warm_up(self, call, cap_s):
            call()

        def turn(self, call):
            return 10.0

        def time(self, call, before, calls):
            return [10.0]

    monkeypatch.setattr(ceilings, "Timer", TenMs)
    monkeypatch.setattr(ceilings, "last_level_cache_bytes", lambda: 1 << 20)
    found = ceilings.Ceilings().measure("cpu", "float32", True)
    assert found["tflops"] == pytest.approx(2 * 512**3 / 1e-2 / 1e12)
    assert found["gbps"] == pytest.approx(2 * (1 << 27) / 1e-2 / 1e9)  # read and written
    assert ceilings.least_ms(flops=2e9, n_bytes=1e8, tflops=1.0, gbps=10.0) == pytest.approx(10.0)
    assert ceilings.least_ms(flops=2e9, n_bytes=1e8, tflops=0.1, gbps=10.0) == pytest.approx(20.0)
