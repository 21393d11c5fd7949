"""Races of rank processes: contestants draw the same batches, agree on losses, and a rank's fault is a row."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gem.harness import subject_sharded
from gem.harness.case import MeasuredCase, build_cases
from gem.harness.measured_params import ShardedTablesParams
from gem.harness.results import Row, own_status
from gem.harness.runner import RunOptions, open_session, run_case
from gem.harness.subject_sharded import TablesRank

FILE = Path("suites/throughput/some.toml")
TABLES = {"ranks": 2, "rows": [300, 100], "dim": 8, "batches": [16, 32], "check_batch": 8, "turn_steps": 2}


def rows_of(subject: str, case: dict[str, Any]) -> list[Row]:
    document = {"suite": {"kind": "throughput", "subject": subject}, "case": [{"name": "a", "timeout_s": 200, **case}]}
    (built,) = build_cases(document, file=FILE, label=FILE, fixtures=frozenset())
    assert isinstance(built, MeasuredCase)
    options = RunOptions(device="cpu", budget_s=0.05)
    with open_session(options) as session:
        return run_case(built, options, session, lambda said: None)


def found(rows: list[Row], impl: str, metric: str) -> Row:
    return next(row for row in rows if (row.impl, row.metric) == (impl, metric))


@pytest.mark.skipif(find_spec("torchrec") is None, reason="torchrec is not installed")
def test_tables_are_raced_with_torchrec():
    params = {**TABLES, "cut": "row", "check_steps": 4, "tolerance": 1e-5}
    rows = rows_of("sharded_tables", {"params": params, "peers": ["torchrec"]})
    assert own_status(rows) == "pass", [row.reason for row in rows]
    agreed = found(rows, "torchrec", "max_error").value
    assert agreed is not None and agreed <= 1e-5
    ratio = found(rows, "gem", "ratio_to.torchrec").value
    ours, theirs = (found(rows, impl, "qps").value for impl in ("gem", "torchrec"))
    assert ours and theirs and ratio == pytest.approx(ours / theirs)
    # 300 and 100 rows of 8 numbers and a sum, fp32, half of them on each rank.
    assert {found(rows, impl, "memory_tables").value for impl in ("gem", "torchrec")} == {(150 + 50) * 9 * 4}
    assert "batch 64" in found(rows, "gem", "qps").reason or "batch 32" in found(rows, "gem", "qps").reason


def test_the_dense_part_races_alone_too():
    model = {"dim": 16, "heads": 1, "layers": 1, "experts": 1, "expert_hidden": 16, "interactions": ["mlp"]}
    params = {"ranks": 2, "batches": [4], "check_batch": 4, "turn_steps": 1, "model": model}
    rows = rows_of("sharded_dense", {"params": params})
    assert own_status(rows) == "pass", [row.reason for row in rows]
    assert (found(rows, "gem", "qps").value or 0) > 0


def test_what_a_rank_cannot_do_is_its_row():
    rows = rows_of("sharded_dense", {"params": {"ranks": 2, "batches": [4], "model": {"heads": 0}}})
    assert own_status(rows) == "error"
    assert "RankFailure: rank " in rows[0].reason and "model.heads" in rows[0].reason


def test_contestants_draw_the_same_batches_and_steps_others():
    params = ShardedTablesParams(**{**TABLES, "rows": (300, 100), "batches": (16,)})  # type: ignore[arg-type]
    one, other = (TablesRank(1, 2, params, target) for target in ("of gem", "of a peer"))
    for number in range(3):
        for a, b in zip(one._draw(number, 16), other._draw(number, 16), strict=True):
            assert a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))
    drawn = {(n, rank): TablesRank(rank, 2, params, "")._draw(n, 16)[0][1].tolist() for n in (0, 1) for rank in (0, 1)}
    assert len({tuple(ids) for ids in drawn.values()}) == 4
    ids = torch.cat([one._draw(n, 64)[0][1] for n in range(20)])
    assert int(ids.min()) >= 0 and int(ids.max()) < 300
    assert (ids < 75).float().mean() == pytest.approx(0.5, abs=0.05)  # a square of an even number: half below a quarter


def test_only_on_a_cpu():
    with pytest.raises(subject_sharded.Unsupported, match="over gloo, on the CPU alone"):
        subject_sharded.TablesRacer(ShardedTablesParams(batches=(4,)), "cuda")
