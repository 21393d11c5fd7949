"""Ranks of a plan as a measured case: the plan of few ranks, figures against others' arithmetic, faults as rows."""

import re
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gem.errors import RequestError
from gem.harness import measured_params, names, report, report_scaling
from gem.harness.case import MeasuredCase, build_cases
from gem.harness.report_lines import lines_of
from gem.harness.results import Document, Row, own_status
from gem.harness.runner import RunOptions, open_session, run_case
from gem.harness.sharding_params import ShardingParams
from gem.harness.sharding_rank import Found
from gem.harness.subject_sharding import Sharding, _work
from gem.harness.table import results_tables

FILE = Path("suites/scaling/some.toml")
MODEL = {"dim": 16, "heads": 1, "layers": 1, "experts": 2, "expert_hidden": 16, "interactions": ["mlp"]}
V2 = {"tables": "v2", "table_replicas": 2, "expert": 2, "scaling": "weak", "batch": 4, "model": MODEL}


def declare(*cases: dict[str, Any]) -> list[MeasuredCase]:
    document = {"suite": {"kind": "scaling", "subject": "sharding"}, "case": list(cases)}
    return build_cases(document, file=FILE, label=FILE, fixtures=frozenset())  # type: ignore[return-value]


class ShardingOfOneWithout(Sharding):
    """The first rank's losses go astray."""

    def measure(self, params, device, report):
        import gem.harness.sharding_rank as of_rank

        learn = of_rank._learn

        def astray(stepper, batch, found, **how):
            learn(stepper, batch, found, **how)
            if stepper.world.size > 1 and stepper.world.rank == 0 and params.seed == 1:
                found.losses[-1] *= 1 + 1e-6
            if stepper.world.size > 1 and stepper.world.rank == 1 and params.seed == 2:
                raise ValueError("no batch for this rank")

        of_rank._learn = astray
        if params.seed == 3:
            of_rank.step_bytes = lambda stepper, batches: {"sums": 8}
        return super().measure(params, device, report)


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    """By case; all in one session."""
    expect = {"max_error": "<= 1e-9", "bytes_unexplained": "== 0"}
    cases = declare(
        {"name": "v2", "params": V2, "matrix": {"ranks": [1, 2]}, "expect": expect, "timeout_s": 200},
        {"name": "ill", "params": {**V2, "ranks": 2}, "matrix": {"seed": [1, 2, 3]}, "expect": expect},
    )
    known = measured_params.MEASURED["sharding"]
    options = RunOptions(device="cpu", budget_s=0.05)
    found = {}
    with pytest.MonkeyPatch.context() as patch, open_session(options) as session:
        for case in cases:
            if case.name.startswith("ill"):
                ill = measured_params.MeasuredSubject(known.params, known.kinds, f"{__name__}:ShardingOfOneWithout")
                patch.setitem(measured_params.MEASURED, "sharding", ill)
            found[case.name] = run_case(case, options, session, lambda said: None)
    return found


def value(rows: list[Row], metric: str) -> float:
    return next(row.value for row in rows if row.metric == metric and row.value is not None)


def test_few_ranks_get_what_they_can_of_a_plan():
    def plan(ranks: int, **params: Any) -> dict[str, Any]:
        return {k: v for k, v in ShardingParams(ranks=ranks, **params).plan().items() if k not in ("cuts", "gather")}

    many = {"replicate": 2, "expert": 2, "tables": "v3", "table_replicas": 2}
    assert plan(8, **many) == {**many, "zones": 2, "gpus": 2}
    assert plan(2, **many) == {**many, "zones": 1, "gpus": 2, "expert": 1}
    assert plan(1, **many) == {**many, "zones": 1, "gpus": 1, "replicate": 1, "expert": 1, "table_replicas": 1}
    assert plan(4, replicate="ranks")["replicate"] == 4


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_shares_are_a_step_whole(scaling):
    params = ShardingParams(ranks=3, batch=11, scaling=scaling)
    ends = [params.share(rank) for rank in range(3)]
    assert ends[0][0] == 0 and ends[-1][1] == params.samples == (33 if scaling == "weak" else 11)
    assert all(a[1] == b[0] for a, b in pairwise(ends))


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"batch": 2, "ranks": 4}, "batch = 2 of all ranks; accepted: ranks = 4 or more"),
        ({"table_replicas": 2}, 'table_replicas = 2 with tables = "v1"'),
        ({"data": {"samples": 9}}, "data.samples: it follows from the other params"),
    ],
)
def test_a_mistake_is_one_line(params, what):
    with pytest.raises(RequestError, match=re.escape(what)):
        declare({"name": "a", "params": params})


def test_what_a_case_finds(rows):
    one, two = rows["v2-1"], rows["v2-2"]
    assert own_status(one) == own_status(two) == "pass", [row.reason for row in (*one, *two)]
    # The synthetic data's users, items, categories, cohorts and signals: 16 numbers and a sum a row, in float64;
    # half of them on each of two ranks with V1, all of them with V2.
    whole = (128 + 128 + 4 + 2 + 3) * (16 + 1) * 8
    half = (64 + 64 + 2 + 1 + 2) * (16 + 1) * 8
    assert value(one, "memory_tables") == value(two, "memory_tables") == whole
    assert value(two, "tables_over_v1") == pytest.approx(whole / half)
    assert value(one, "memory_optimizer") == pytest.approx(2 * value(one, "memory_dense"), rel=0.01)  # Adam's moments
    assert value(two, "memory_dense") == pytest.approx(value(one, "memory_dense") / 2, rel=0.1)
    assert value(one, "bytes_sent") == 0 < value(two, "bytes_sent")
    parts = {row.metric: row.value for row in two if row.metric.startswith("sent.")}
    assert sum(x or 0 for x in parts.values()) >= value(two, "bytes_sent")
    assert {"sent.experts_activations.host", "sent.copies_gradients.host"} <= parts.keys()
    assert value(two, "cpu_ms") > 0 and 0 < value(two, "work_ratio") < 2
    assert value(one, "flops_per_rank") > 0 and value(two, "max_over_mean") >= 1
    # In the notes of a line all metrics' words stand together: each says whose it is.
    noted = {row.metric: row.reason for row in two}
    assert all(noted[metric].startswith(f"{metric}: ") for metric in ("work_ratio", "cpu_ms", "collectives_ms"))


def test_what_is_wrong_fails_the_case(rows):
    found = {seed: rows[f"ill-{seed}"] for seed in (1, 2, 3)}
    assert own_status(found[1]) == "fail" and "expected max_error <= 1e-09, is 1" in found[1][0].reason
    assert own_status(found[2]) == "error"
    assert [row.reason for row in found[2]] == ["RankFailure: rank 1 of 2: ValueError: no batch for this rank"]
    bad = [row for row in found[3] if row.status == "fail"]
    assert [row.metric for row in bad] == ["bytes_unexplained"]


@pytest.mark.parametrize(("scaling", "share"), [("weak", 1.0), ("strong", 0.25)])
def test_work_is_that_of_the_rank_that_needs_most_against_its_share_of_one_process(scaling, share):
    """One process needs 8 s: for a rank's batch (weak), or for all four ranks' (strong). The slowest rank, 5 s."""
    found = [Found(cpu_s=[s, s, 9.0], flops=1.0, wall_s=1.0) for s in (2.0, 3.0, 5.0, 4.0)]
    params = ShardingParams(ranks=4, batch=8, scaling=scaling)
    told = {one.name: one.value for one in _work(params, Found(cpu_s=[8.0, 8.0, 90.0]), found)}
    assert told["work_ratio"] == pytest.approx(8.0 * share / 5.0) and told["cpu_ms"] == 5000.0


# ---- in the report


def test_the_report_draws_a_line_a_plan(rows):
    document = Document(rows=[*rows["v2-1"], *rows["v2-2"]])
    lines = lines_of(document.rows)
    (plan,) = report_scaling.plans(lines)
    assert (plan.label, sorted(plan.cases)) == ("v2", [1, 2])
    assert plan.points("bytes_sent") == [(1, 0.0), (2, value(rows["v2-2"], "bytes_sent"))]
    page = report.render(document)
    assert page.count('class="curve plan k0"') == len(report_scaling.DRAWN)
    # A plot's bytes are in the unit of the tables.
    assert {unit for metric, _, unit, _ in report_scaling.DRAWN if names.METRICS[metric].unit == "B"} == {"MiB"}
    assert {factor for _, factor, unit, _ in report_scaling.DRAWN if unit == "MiB"} == {2**-20}
    assert "bytes a rank sends in a step" in page and "experts activations" in page
    # Each part stands in its own table alone.
    assert "sent.counts.host" not in page
    held = [row.metric for line in report_scaling.without_parts(lines) for row in line.rows]
    assert not [metric for metric in held if metric.startswith("sent.")] and "bytes_sent" in held


def test_the_terminal_leaves_parts_to_who_asks(rows):
    document = Document(rows=rows["v2-2"])
    console = Console(width=400, file=StringIO())
    for verbose in (False, True):
        for one in results_tables(document, verbose, console):
            console.print(one)
        told = console.file.getvalue()  # type: ignore[attr-defined]
        assert "bytes_sent" in told and ("sent.counts.host" in told) == verbose


def test_a_case_that_failed_is_not_joined(rows):
    broken = [row.model_copy(update={"status": "fail"}) if row.metric == "max_error" else row for row in rows["v2-2"]]
    (plan,) = report_scaling.plans(lines_of([*rows["v2-1"], *broken]))
    assert plan.points("work_ratio") == [(1, value(rows["v2-1"], "work_ratio"))]
    assert "curve plan" in report.render(Document(rows=[*rows["v2-1"], *broken]))


def test_one_number_of_ranks_is_no_line(rows):
    assert report_scaling.plans(lines_of(rows["v2-2"])) == []
    assert "curve plan" not in report.render(Document(rows=rows["v2-2"]))
