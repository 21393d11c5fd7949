"""asv's results as the repository keeps them: nothing of the host, one series a machine; documents as results."""

import json
import math
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import asv_package
import pytest

from gem import paths
from gem.errors import RequestError
from gem.harness.needs import Facts
from gem.harness.results import Document, Row
from gem.harness.suites import load_suite, load_suites

ROOT = paths.checkout_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="not run from a checkout")
KEPT = (ROOT or Path()) / "ci" / "measured" / "asv"
HERE = {
    "cpu": "AMD EPYC",
    "cores": 2,
    "memory_gib": 23.4,
    "gpu": None,
    "python": "3.11.7",
    "torch": "2.13.0",
    "threads": 2,
}
NAME = "benchmarks.bbs__a.track_max_over_mean"


@pytest.fixture(scope="module")
def store() -> Any:
    return asv_package.load("store")


@pytest.fixture(scope="module")
def documents() -> Any:
    return asv_package.load("documents")


def left_by_asv(value: float | None = 1.25, commit: str = "ab" * 20, name: str = NAME) -> dict[str, Any]:
    """A result file as asv 0.6.6 writes it."""
    row = [[value], [["'gem'"]], "v1", 5, 0.5, None, None, None, None, None, None, [[1.0, 1.5]], {"x": "profile"}]
    columns = ["result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b", "stats_q_25"]
    columns += ["stats_q_75", "stats_number", "stats_repeat", "samples", "profile"]
    python = "/home/ada/gem/.venv/bin/python"
    return {
        "commit_hash": commit, "env_name": "existing-py_home_ada_gem_.venv_bin_python", "date": 1000,
        "params": {"machine": "cpu", "os": "Linux 6.1.0-ada", "ram": "24512345", "python": python},
        "python": python, "requirements": {}, "env_vars": {"HOME": "/home/ada"}, "result_columns": columns,
        "results": {name: row}, "durations": {"<build>": 0.1}, "version": 2,
    }  # fmt: skip


def kept(store: Any, folder: Path, **given: Any) -> Path:
    machine = store.machine_facts("cpu", HERE)
    return store.keep(store.clean_result(left_by_asv(**given), machine, store.software(HERE)), machine, folder)


# ---- of which machine


@pytest.mark.parametrize(
    "gpu, name",
    [(None, "cpu"), ("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"), ("Tesla T4", "tesla-t4")],
)
def test_machines_are_named_by_their_kind(store: Any, gpu: str | None, name: str) -> None:
    assert store.machine_name(gpu) == name and store.checked_name(name) == name


def test_a_name_is_a_folder(store: Any) -> None:
    for bad in ("", "../x", "a/b", "Host Name"):
        with pytest.raises(RequestError, match="--machine"):
            store.checked_name(bad)


def test_nothing_of_the_host_is_kept(store: Any, tmp_path: Path) -> None:
    path = kept(store, tmp_path)
    assert path == tmp_path / "cpu" / "abababab-py3.11-torch2.13.0-threads2.json"
    text = path.read_text(encoding="utf-8")
    assert "ada" not in text and "/home" not in text and "24512345" not in text and "profile" not in text.split("[")[-1]
    document = json.loads(text)
    assert document["params"] == {"machine": "cpu", "python": "3.11", "torch": "2.13.0", "threads": "2"}
    assert document["results"] == {NAME: [[1.25], [["'gem'"]], "v1", 5, 0.5]}
    machine = json.loads((tmp_path / "cpu" / "machine.json").read_text(encoding="utf-8"))
    assert machine["ram"] == "23 GiB" and machine["machine"] == "cpu" and platform.node() not in machine.values()


@pytest.mark.parametrize("name", ["benchmarks.a(/work/x/y.toml)", "/usr/bin/python3", "see /home/ada/x"])
def test_a_path_that_gets_through_is_an_error(store: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is a path of this machine"):
        kept(store, tmp_path, name=name)


def test_this_host_s_name_is_an_error(store: Any) -> None:
    with pytest.raises(ValueError, match="name of this host"):
        store.refuse_places({"params": {"machine": platform.node()}})
    store.refuse_places({"a": ["1 / rate", "x/y.toml::z", "GiB/s", 3.0, None]})  # no paths of a machine


def test_results_of_two_runs_of_a_commit_merge(store: Any, tmp_path: Path) -> None:
    kept(store, tmp_path, name="benchmarks.x")
    kept(store, tmp_path, name="benchmarks.y")
    path = kept(store, tmp_path, name="benchmarks.x", value=2.5)
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert {name: row[0] for name, row in results.items()} == {"benchmarks.x": [2.5], "benchmarks.y": [1.25]}
    assert len(list((tmp_path / "cpu").glob("*-*.json"))) == 1


def test_another_machine_of_the_same_name_is_refused(store: Any, tmp_path: Path) -> None:
    kept(store, tmp_path)
    other = store.machine_facts("cpu", HERE | {"cpu": "Other"})
    with pytest.raises(RequestError, match=r"its cpu was AMD EPYC and is Other here; accepted: another name"):
        store.keep(store.clean_result(left_by_asv(), other, store.software(HERE)), other, tmp_path)
    more = store.machine_facts("cpu", HERE | {"memory_gib": 99.0})  # the same in what decides
    store.keep(store.clean_result(left_by_asv(), more, store.software(HERE)), more, tmp_path)


def test_failures_are_told_from_what_does_not_apply(store: Any) -> None:
    results = {"fine": [[1.0, math.nan]], "failed": [[1.0, None]], "all_failed": [None], "away": [[math.nan]]}
    assert store.failures({"results": results}) == 2


def test_a_commit_that_was_not_measured_is_noted_once(store: Any, tmp_path: Path) -> None:
    commit, other = "ab" * 20, "cd" * 20
    store.note_failure(tmp_path, "cpu", commit, "ImportError: no name x (/tmp/gem-asv-1/tree/gem/x.py)")
    store.note_failure(tmp_path, "cpu", other, "")
    store.note_failure(tmp_path, "cpu", commit, "ImportError: no name y (/tmp/gem-asv-2/tree/gem/x.py)")
    path = tmp_path / "cpu" / "not-measured.txt"
    assert path.read_text() == "cdcdcdcdcd no reason given\nababababab ImportError: no name y\n"
    kept(store, tmp_path, commit=commit)
    assert path.read_text() == "cdcdcdcdcd no reason given\n"


# ---- documents


SUITE = '[suite]\nkind = "throughput"\nsubject = "gdpa"\n[[case]]\nname = "c"\nfixture = "f"\nneeds = "cuda"\n'
GPU_ENV = {
    "time": "2026-11-30T03:33:43+00:00", "git_dirty": None, "device": "cuda", "gpu": "NVIDIA H200", "capability": "9.0",
    "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.3", "platform": "Linux-6.1.0-x86_64-with-glibc2.39",
    "host": "node17", "cpu": "Xeon", "cores": 16, "memory_gib": 126.0,
}  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    assert ROOT is not None
    here = tmp_path / "repository"
    (here / "suites" / "throughput").mkdir(parents=True)
    (here / "fixtures" / "lengths").mkdir(parents=True)
    (here / "suites" / "throughput" / "x.toml").write_text(SUITE)
    shutil.copy(ROOT / "fixtures" / "lengths" / "single_token.toml", here / "fixtures" / "lengths" / "f.toml")
    profile = here / "fixtures" / "lengths" / "f.toml"
    profile.write_text(profile.read_text().replace("single_token", "f"))
    git(here, "init", "-q", "-b", "main")
    commit(here, "start")
    return here


def git(here: Path, *words: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(["git", "-C", str(here), *who, *words], check=True, capture_output=True, text=True, env=env)
    return done.stdout.strip()


def commit(here: Path, message: str) -> str:
    git(here, "add", "-A")
    git(here, "commit", "-q", "-m", message)
    return git(here, "rev-parse", "HEAD")


def document(commit: str | None, case: str = "c", **env: Any) -> Document:
    def row(impl: str, metric: str, value: float | None, status: Any = "pass", samples: tuple[float, ...] = ()) -> Row:
        return Row(suite="suites/throughput/x.toml", case=case, impl=impl, direction="forward", metric=metric,
                   value=value, samples=list(samples), status=status)  # fmt: skip

    rows = [
        row("triton", "ms", 2.0, samples=(1.0, 2.0, 4.0)),
        row("triton", "tflops", 300.0),
        row("gluon", "ms", None, "error"),
        row("fa4", "ms", 1.0, samples=(1.0,)),
    ]
    return Document(environment=GPU_ENV | {"git_commit": commit} | env, rows=rows)


def test_a_document_becomes_the_results_that_asv_would_have(documents: Any, store: Any, repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    result, machine = documents.convert(document(head[:8]), repository)
    assert result["commit_hash"] == head and result["date"] == 1000 * int(git(repository, "log", "-1", "--format=%at"))
    assert machine["machine"] == "h200" and result["params"]["machine"] == "h200" and machine["arch"] == "x86_64"
    assert "node17" not in json.dumps([result, machine])
    assert sorted(result["results"]) == [
        f"benchmarks.gdpa__c.track_forward_{what}" for what in ("seconds", "tflops_shown")
    ]
    told = dict(
        zip(result["result_columns"], result["results"]["benchmarks.gdpa__c.track_forward_seconds"], strict=False)
    )
    assert told["params"] == [["'torch'", "'triton'", "'gluon'"]]
    torch, triton, gluon = told["result"]
    assert math.isnan(torch) and triton == 0.002 and gluon is None  # not there, measured, failed
    assert told["stats_repeat"] == [None, 3, None] and told["stats_q_25"][1] < 0.002 < told["stats_q_75"][1]
    # The version is that of the benchmark that the declaration makes.
    profiles = asv_package.load("cases").load_profile
    (case,) = load_suite(repository / "suites" / "throughput" / "x.toml", {"f"})
    (made,) = asv_package.load("cases").generate(
        [case], Facts(device="cuda", capabilities=(90,)),
        profile=lambda name: profiles(repository / "fixtures" / "lengths" / f"{name}.toml"),
    ).values()  # fmt: skip
    assert told["version"] == made.version


def test_a_case_declared_otherwise_then_is_another_series(documents: Any, repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    suite = repository / "suites" / "throughput" / "x.toml"
    suite.write_text(SUITE + "params = { causal = true }\n")
    second = commit(repository, "causal")
    suite.write_text(SUITE + 'description = "the same, described"\n')
    third = commit(repository, "described")
    versions = [
        row[2] for one in (first, second, third)
        for name, row in documents.convert(document(one), repository)[0]["results"].items() if "seconds" in name
    ]  # fmt: skip
    assert versions[0] == versions[2] != versions[1]


def test_what_is_of_no_commit_is_refused(documents: Any, repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    for told, why in (
        (document(None), "of no commit"),
        (document(head, git_dirty=True), "a checkout with changes"),
        (document("12345678"), "accepted: a commit of this repository"),
        (document(head, case="unknown"), "without a row of a declared benchmark"),
    ):
        with pytest.raises(RequestError, match=why):
            documents.convert(told, repository)


def test_all_revisions_of_a_document_are_read(documents: Any, repository: Path) -> None:
    path = repository / "measured.json"
    for number in (1, 2):
        path.write_text(document(f"{number}" * 8).model_dump_json())
        commit(repository, f"measure {number}")
    path.write_text(document("3" * 8).model_dump_json())  # not committed yet
    found = [one.environment["git_commit"] for one in documents.revisions(repository, path)]
    assert found == ["11111111", "22222222", "33333333"]


# ---- what is kept


def test_kept_results_are_of_no_one_machine_and_of_commits_that_there_are(store: Any) -> None:
    assert ROOT is not None
    files = sorted(KEPT.glob("*/*.json"))
    assert files, "no results are kept"
    commits: dict[str, set[str]] = {}
    for path in [*files, KEPT / "benchmarks.json"]:
        found = json.loads(path.read_text(encoding="utf-8"))
        store.refuse_places(found)
        if path.parent != KEPT and path.name != "machine.json":
            assert path.name.startswith(found["commit_hash"][:8]) and found["params"]["machine"] == path.parent.name
            commits.setdefault(path.parent.name, set()).add(found["commit_hash"])
    assert len(commits["cpu"]) >= 10 and len(commits["h200"]) >= 3
    if git(ROOT, "rev-parse", "--is-shallow-repository") == "false":
        for one in set().union(*commits.values()):
            assert git(ROOT, "cat-file", "-t", one) == "commit"


def test_all_results_of_what_is_declared_today_are_published(store: Any) -> None:
    """asv leaves out what its list does not have: a list from before a case was declared hides that case's results."""
    assert ROOT is not None
    cases, publish = asv_package.load("cases"), asv_package.load("publish")
    both = Facts(device="cpu"), Facts(device="cuda", capabilities=(90,), triton=True)
    made = cases.generate(load_suites([ROOT / "suites" / kind for kind in cases.KINDS]), *both)
    today = {
        (f"benchmarks.{name}.{key}", one.version)
        for name, one in made.items() for key in vars(one) if key.startswith(("track_", "peakmem_"))
    }  # fmt: skip
    listed = json.loads((KEPT / "benchmarks.json").read_text(encoding="utf-8"))
    shown = {(name, one["version"]) for name, one in listed.items() if name != "version"}
    hidden = (publish.with_results(KEPT) & today) - shown
    assert not hidden, f"{len(hidden)} hidden, as {min(hidden)}: run ci/asv documents, which lists them"
    assert len(shown & today) >= 250


def test_every_h200_document_of_a_commit_is_in_the_history() -> None:
    assert ROOT is not None
    compared = 0
    for path in sorted((ROOT / "ci" / "measured" / "h200").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        env = found.get("environment", {}) if isinstance(found, dict) else {}
        if not env.get("git_commit") or env.get("git_dirty"):
            continue
        kept_of = list((KEPT / "h200").glob(f"{env['git_commit'][:7]}*-*.json"))
        rows = [row for row in found["rows"] if row["metric"] == "ms" and row["impl"] == "triton" and row["value"]]
        assert kept_of or not rows, f"{path}: take it in by ci/asv documents {path}"
        for row in rows:
            case = re.sub(r"\W", "_", f"{Path(row['suite']).stem}__{row['case']}")
            name = f"benchmarks.{case}.track_{row['direction']}_seconds"
            told = [json.loads(one.read_text(encoding="utf-8"))["results"].get(name, [[]])[0] for one in kept_of]
            assert any(
                value == pytest.approx(row["value"] / 1e3, rel=1e-5) for one in told for value in one if value
            ), name
            compared += 1
    assert compared >= 40
