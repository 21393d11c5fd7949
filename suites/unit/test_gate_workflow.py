"""The workflow for GitHub: it parses, what it calls is there, and it gives nobody more than they need."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gem import paths

yaml = pytest.importorskip("yaml")
ROOT = paths.checkout_root()
pytestmark = pytest.mark.skipif(ROOT is None or not (ROOT / ".github").is_dir(), reason="not run from a checkout")

WORKFLOW = Path(".github/workflows/ci.yml")
ACTIONS = ("ci/github/test/action.yml", "ci/github/gate/action.yml")


def parsed(file: str | Path) -> dict[Any, Any]:
    assert ROOT is not None
    return yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))


def steps() -> list[tuple[str, dict[str, Any]]]:
    found = [(str(WORKFLOW), step) for job in parsed(WORKFLOW)["jobs"].values() for step in job["steps"]]
    return found + [(file, step) for file in ACTIONS for step in parsed(file)["runs"]["steps"]]


def test_every_action_is_there_or_pinned_to_a_major_version() -> None:
    assert ROOT is not None
    used = [(file, step["uses"]) for file, step in steps() if "uses" in step]
    assert len(used) >= 8
    for file, action in used:
        if action.startswith("./"):
            assert f"{action[2:]}/action.yml" in ACTIONS, (file, action)
            assert (ROOT / action / "action.yml").is_file()
        else:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", action), (file, action)


def test_every_command_is_there() -> None:
    assert ROOT is not None
    scripts = [step["run"] for _, step in steps() if "run" in step]
    called = {word for script in scripts for word in re.findall(r"\./ci/\w+", script)}
    assert called == {"./ci/test", "./ci/gate"}
    for command in called:
        assert os.access(ROOT / command, os.X_OK)
        subprocess.run(["bash", "-n", str(ROOT / command)], check=True)
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        # What somebody else may name (a branch, a title) reaches a script as a variable, never as its text.
        assert "${{" not in script


def test_the_gate_writes_what_the_summary_shows() -> None:
    assert ROOT is not None
    told = "\n".join(step.get("run", "") for step in parsed(ACTIONS[1])["runs"]["steps"])
    (shown,) = set(re.findall(r"\S*gate\.md", told))
    assert "out=results/gate" in (ROOT / "ci/gate").read_text()
    assert shown == "results/gate.md"
    assert "$GITHUB_STEP_SUMMARY" in told
    assert 'merge-base HEAD "origin/$BASE"' in told


def test_inputs_are_those_that_the_action_has() -> None:
    for file, step in steps():
        if step.get("uses", "").startswith("./"):
            accepted = parsed(f"{step['uses']}/action.yml").get("inputs", {})
            given = step.get("with", {})
            assert set(given) <= set(accepted), (file, step)
            assert {name for name, one in accepted.items() if one.get("required")} <= set(given), (file, step)


def test_minimal_rights_limits_and_one_run_at_a_time() -> None:
    workflow = parsed(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 180, name
        assert "permissions" not in job, name
    for _, step in steps():
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
    # A workflow of pull_request_target runs a stranger's code with the repository's rights.
    triggers = workflow[True]  # YAML takes the key `on` for a truth value
    assert set(triggers) == {"push", "pull_request", "workflow_dispatch"}


def test_a_machine_of_ones_own_runs_no_strangers_code() -> None:
    own = {name: job for name, job in parsed(WORKFLOW)["jobs"].items() if "self-hosted" in job["runs-on"]}
    assert set(own) == {"gpu"}
    condition = " ".join(own["gpu"]["if"].split())
    by_hand, by_label = condition.split(" || ", 1)
    assert by_hand == "github.event_name == 'workflow_dispatch'"
    for guard in (
        "github.event.pull_request.head.repo.full_name == github.repository",
        "contains(github.event.pull_request.labels.*.name, 'gpu')",
    ):
        assert f"{guard} &&" in by_label
