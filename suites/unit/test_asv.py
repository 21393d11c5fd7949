"""asv: benchmarks are made from the declared cases, and asv itself finds, runs and stores them."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gem import paths
from gem.data.lengths import load_profile
from gem.harness.case import Case, build_cases, ops_only
from gem.harness.needs import Facts

ROOT = paths.checkout_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="not run from a checkout")

SUITE = """
[suite]
kind = "throughput"
subject = "gdpa"
[[case]]
name = "tiny.d16"
fixture = "single_token"
params = { heads = 2, head_dim = 16 }
[[case]]
name = "needs_gpu"
fixture = "cross_short_kv"
needs = "cuda:sm90"
"""


@pytest.fixture(scope="module")
def asv_cases() -> ModuleType:
    assert ROOT is not None
    spec = importlib.util.spec_from_file_location("asv_cases", ROOT / "suites" / "asv" / "cases.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def declare(subject: str = "gdpa", kind: str = "throughput", **fields: Any) -> Case:
    suite = {"kind": kind, "subject": subject}
    case = {"name": "a", "fixture": "cpu_self_longtail"} | fields
    document = {"suite": suite, "case": [case]}
    fixtures = frozenset({"cpu_self_longtail", "cpu_dense_512", "single_token"})
    label = Path("suites/throughput/x.toml")
    (case,) = ops_only(build_cases(document, file=Path("x.toml"), label=label, fixtures=fixtures))
    return case


def test_only_what_this_machine_can_run_becomes_a_benchmark(asv_cases: ModuleType) -> None:
    cases = [
        declare(name="cpu-case"),
        declare(name="gpu_case", needs="cuda:sm90"),
        declare(name="checked", kind="correctness"),
        declare(name="one_way", directions=["forward"]),
    ]
    made = asv_cases.generate(cases, Facts(device="cpu"))
    assert list(made) == ["gdpa__cpu_case", "gdpa__one_way"]
    assert made["gdpa__cpu_case"].params == (["torch"],)
    methods = {name for name in vars(made["gdpa__one_way"]) if name.startswith(("time_", "track_"))}
    assert methods == {"time_forward", "track_forward_tflops"}
    on_gpu = asv_cases.generate(cases, Facts(device="cuda", capabilities=(90,)))
    assert "gdpa__gpu_case" in on_gpu and "triton" in on_gpu["gdpa__gpu_case"].params[0]


def test_two_cases_of_one_name_are_an_error(asv_cases: ModuleType) -> None:
    with pytest.raises(ValueError, match="gdpa__a_b"):
        asv_cases.generate([declare(name="a.b"), declare(name="a-b")], Facts())


def test_version_follows_the_declaration(asv_cases: ModuleType) -> None:
    version = asv_cases.version_of
    base = version(declare())
    assert base == version(declare(peers=["padded"], description="text", expect={}))  # do not change what is timed
    assert base != version(declare(params={"head_dim": 32}))
    assert base != version(declare(fixture="cpu_dense_512"))
    assert base != version(declare(subject="block_attention"))


def test_version_follows_the_length_profile(asv_cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = asv_cases.version_of(declare())
    profile = load_profile("cpu_self_longtail")
    monkeypatch.setattr(asv_cases, "load_profile", lambda name: profile.model_copy(update={"batch": profile.size + 1}))
    assert asv_cases.version_of(declare()) != before


@pytest.mark.parametrize(
    "subject, params, direction, pairs",
    [
        # cpu_dense_512: every sample has 512 queries and 512 keys.
        ("gdpa", {}, "forward", 512 * 512),
        ("gdpa", {"causal": True}, "forward", 512 * 513 // 2),
        ("jagged_attention", {}, "backward", 512 * 512),
        ("block_attention", {"block": 64}, "forward", 8 * 64 * 64),
    ],
)
def test_useful_flops(asv_cases: ModuleType, subject: str, params: dict[str, Any], direction: str, pairs: int) -> None:
    case = declare(subject=subject, fixture="cpu_dense_512", params={"heads": 3, "head_dim": 32, **params})
    lengths = load_profile("cpu_dense_512").draw()
    assert set(lengths.q.tolist()) == {512}
    per_pair = 4 * 3 * 32 * (1 if direction == "forward" else 2.5)
    assert asv_cases.useful_flops(case, lengths, direction) == per_pair * pairs * lengths.batch


def test_foreign_package_is_refused(asv_cases: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not that of"):
        asv_cases.check_checkout(tmp_path)
    assert ROOT is not None
    asv_cases.check_checkout(ROOT)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkout of its own, with a declared case that is quick, committed."""
    assert ROOT is not None
    here = tmp_path_factory.mktemp("asv") / "checkout"
    junk = shutil.ignore_patterns("__pycache__")
    for folder in ("gem", "kernels", "fixtures", "suites/asv"):
        shutil.copytree(ROOT / folder, here / folder, symlinks=True, ignore=junk)
    for file in ("pyproject.toml", "asv.conf.json"):
        shutil.copy(ROOT / file, here / file)
    (here / "suites" / "throughput").mkdir()
    (here / "suites" / "throughput" / "tiny.toml").write_text(SUITE, encoding="utf-8")
    git = ["git", "-C", str(here), "-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    return here


def run_asv(checkout: Path, *words: str) -> str:
    home = checkout.parent / "home"  # asv keeps what it knows of machines in ~/.asv-machine.json
    home.mkdir(exist_ok=True)
    # asv clears PYTHONPATH; this checkout is to be measured, not the installed one.
    env = {**os.environ, "HOME": str(home), "ASV_PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "asv", *words], cwd=checkout, env=env, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_asv_runs_and_stores_a_declared_case(checkout: Path) -> None:
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    run_asv(checkout, "machine", "--machine", "here", "--yes")
    how = ["-E", "existing:same", "--set-commit-hash", commit, "--machine", "here", "--quick"]
    run_asv(checkout, "run", *how, "-b", "forward")
    stored = list((checkout / "results" / "asv" / "results" / "here").glob(f"{commit[:8]}-*.json"))
    assert len(stored) == 1
    document = json.loads(stored[0].read_text(encoding="utf-8"))
    assert document["commit_hash"] == commit
    results = document["results"]
    assert sorted(results) == [
        "benchmarks.gdpa__tiny_d16.time_forward",
        "benchmarks.gdpa__tiny_d16.track_forward_tflops",
    ]
    for name, result in results.items():
        column = dict(zip(document["result_columns"], result, strict=False))
        assert len(column["result"]) == 1 and 0 < column["result"][0] < 60, name
        assert len(column["version"]) == 64
