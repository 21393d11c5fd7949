"""gem gate on documents of gem train: only runs of the same ranks and configuration are compared, by speed too."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from gate_documents import ENVIRONMENT, patch_file

from gem.errors import RequestError
from gem.harness import training
from gem.harness.gate import compare
from gem.harness.gate_pairs import read_pairs
from gem.harness.results import Document, write_document
from gem.train.config import parse_config
from gem.train.records import Progress, Result, StepEfficiency

RATES = [100.0, 101.0, 99.0, 100.5, 100.2, 99.9, 100.1]


def trained(ranks: int, changes: dict[str, Any], rates: list[float]) -> Document:
    """What a training by that configuration would leave."""
    config = parse_config({"data": {"kind": "synthetic"}} | changes, "test")
    figures = [
        Progress(step, 10, 0, 0.5, {}, rate, 0.1, 0.0, 1000, None) for step, rate in enumerate([1.0, *rates], start=1)
    ]
    speed = StepEfficiency(1e9, 0.1, statistics.harmonic_mean(rates), 0.0, 0.1, [])
    result = Result(10, None, [], figures, speed, {}, "16 steps an epoch")
    return training.document_of(result, config, "a", ENVIRONMENT, ranks)


# The change's ranks and configuration -> what of it the base's, on 1 rank without any, contradicts.
OTHER: dict[str, tuple[int, dict[str, Any]]] = {
    "request.ranks: 1 against 2": (2, {}),
    "request.config.plan: None against {": (1, {"plan": {"expert": 2}}),
    "request.config.lr: 0.001 against 0.01": (1, {"lr": 0.01}),
    "request.config.clip: 1.0 against None": (1, {"clip": "none"}),
    "request.config.reader.strategy: 'samples' against 'bbs'": (1, {"reader": {"strategy": "bbs"}}),
    "request.model.dim: 64 against 32": (1, {"model": {"dim": 32}}),
}


@pytest.mark.parametrize("said", OTHER)
def test_trainings_of_other_ranks_plans_or_configurations_are_refused(said: str, tmp_path: Path) -> None:
    ranks, changes = OTHER[said]
    base, new, again = (tmp_path / f"{name}.json" for name in ("base", "new", "again"))
    for path, made in ((base, trained(1, {}, RATES)), (new, trained(ranks, changes, RATES))):
        write_document(made, path)
    with pytest.raises(RequestError) as caught:
        read_pairs(base, new)
    assert said in str(caught.value)
    # Once ranks were not told, nor what was None; a field may be newer than a document.
    former = json.loads(base.read_text())
    del former["request"]["ranks"], former["request"]["config"]["plan"], former["request"]["config"]["timeout_s"]
    again.write_text(json.dumps(former))
    assert read_pairs(base, again)[1] == []
    if "plan" in changes:
        with pytest.raises(RequestError, match=r"request\.config\.plan"):
            read_pairs(again, new)


def test_plans_are_compared_field_by_field(tmp_path: Path) -> None:
    """A field that one document has not, of a later version, is none of it; cuts are told whole."""
    base, new = tmp_path / "base.json", tmp_path / "new.json"
    write_document(trained(4, {"plan": {"expert": 2}}, RATES), base)
    patch_file(base, lambda data: data["request"]["config"]["plan"].pop("transport"))
    write_document(trained(4, {"plan": {"expert": 4, "cuts": {"user": "table"}}}, RATES), new)
    assert read_pairs(base, new, allow_different=True)[1] == [
        "request.config.plan.expert: 2 against 4",
        "request.config.plan.cuts: {} against {'user': 'table'}",
    ]


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "same"), (0.5, "worse"), (2.0, "better")])
def test_the_speed_of_a_training_is_judged_by_its_reports(factor: float, verdict: str, tmp_path: Path) -> None:
    base, new = tmp_path / "base.json", tmp_path / "new.json"
    write_document(trained(1, {}, RATES), base)
    write_document(trained(1, {}, [factor * rate for rate in RATES]), new)
    found = {line.metric: line.verdict for line in compare(read_pairs(base, new)[0]).lines}
    assert found == {"qps": verdict if factor != 1.0 else "ambiguous", "peak_memory": "same"}
