"""The wheel: gem.kernels, the command and the bundled suites and fixtures work outside the checkout."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import gem
from gem import paths
from gem.harness.case import ops_only
from gem.harness.results import read_document
from gem.harness.suites import load_suites

ROOT = paths.checkout_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="not run from a checkout")

# Fixtures whose cases cost next to nothing.
TINY = ("single_token", "batch_0")


def run(*command: str | Path, cwd: Path, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env = {**kept, "COLUMNS": "200", **variables}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def fine(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree as it is, without network, of a copy: a build in place would pick up old leftovers."""
    assert ROOT is not None
    copy = tmp_path_factory.mktemp("source") / "gem-recsys"
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("gem", "kernels", "fixtures", "suites"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=junk)
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / file).is_file():
            shutil.copy(ROOT / file, copy / file)
    out = copy.parent / "dist"
    how = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    fine(run(sys.executable, "-m", "pip", "wheel", *how, out, copy, cwd=copy.parent))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a virtual environment with the wheel; everything else it takes from this one's site-packages."""
    home = tmp_path_factory.mktemp("venv") / "venv"
    fine(run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home.parent))
    (site,) = home.glob("lib/python*/site-packages")
    # A path added by a .pth file is searched last and its own .pth files are not read: the editable gem stays out.
    theirs = [p for p in sys.path if p.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(theirs) + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--no-deps", "--no-index"]
    fine(run(*pip, wheel, cwd=home.parent))
    return home / "bin"


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_holds_code_suites_and_fixtures(wheel: Path) -> None:
    assert ROOT is not None
    held = set(names_in(wheel))
    code = {f.relative_to(ROOT).as_posix() for f in (ROOT / "gem").rglob("*.py")}
    code |= {f"gem/{f.relative_to(ROOT).as_posix()}" for f in (ROOT / "kernels").rglob("*.py")}
    data = {
        f"gem/{f.relative_to(ROOT).as_posix()}"
        for folder in ("suites", "fixtures")
        for f in (ROOT / folder).rglob("*")
        if f.is_file() and f.parts[-2] != "__pycache__" and (folder == "fixtures" or f.suffix == ".toml")
        if not {"unit", "asv"} & set(f.relative_to(ROOT).parts)
    }
    assert len(code) > 20 and len(data) > 20
    assert code - held == set(), "a package is missing in [tool.setuptools] packages"
    assert data - held == set()
    templates = ("report.html.j2", "parts.html.j2", "report.css", "report.js")
    assert {f"gem/harness/templates/{name}" for name in templates} <= held


def test_wheel_holds_no_tests(wheel: Path) -> None:
    tests = [name for name in names_in(wheel) if "/unit/" in name or "/asv/" in name or "/test_" in name]
    assert tests == []


def test_version_and_names_agree(wheel: Path) -> None:
    assert wheel.name == f"gem_recsys-{gem.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"gem_recsys-{gem.__version__}.dist-info/METADATA").decode()
    for line in ("Name: gem-recsys", "License-Expression: BSD-3-Clause", "Requires-Python: >=3.11"):
        assert line in metadata.splitlines()
    assert ROOT is not None
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dynamic"]


def test_installed_package_is_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = (
        "import gem, gem.kernels; from gem import paths;"
        "print(gem.__file__, gem.kernels.__file__, paths.checkout_root(), paths.suites_dir(), paths.fixtures_dir())"
    )
    package, kernels, root, suites, fixtures = fine(run(installed / "python", "-c", code, cwd=tmp_path)).split()
    site = str(installed.parent)
    assert all(path.startswith(site) for path in (package, kernels, suites, fixtures)) and root == "None"
    assert Path(suites).is_dir() and Path(fixtures, "lengths", "self_long.toml").is_file()


def test_bundled_suites_are_listed(installed: Path, tmp_path: Path) -> None:
    assert ROOT is not None
    out = fine(run(installed / "gem", "list", cwd=tmp_path))
    for suite in (ROOT / "suites").glob("*/*.toml"):
        assert f"suites/{suite.parent.name}/{suite.name}" in out


def test_a_bundled_case_runs(installed: Path, tmp_path: Path) -> None:
    """Found by the name it has in the checkout, since the suites that the wheel carries go by the same labels."""
    assert ROOT is not None
    declared = ops_only(load_suites([ROOT / "suites" / "correctness"]))
    tiny = next(case for case in declared if case.fixture in TINY and case.needs is None)
    files = ["--json", "r.json", "--html", "r.html"]
    done = run(installed / "gem", "run", tiny.id, *files, "--device", "cpu", cwd=tmp_path)
    assert "pass" in fine(done)
    rows = read_document(tmp_path / "r.json").rows
    assert {row.case for row in rows} == {tiny.name} and "pass" in {row.status for row in rows}
    assert "</html>" in (tmp_path / "r.html").read_text("utf-8")


def test_a_bare_checkout_works_without_installation(tmp_path: Path) -> None:
    """PYTHONPATH alone is enough, gem.kernels included: for machines on which nothing can be installed."""
    assert ROOT is not None
    code = "import gem.kernels, gem.paths; print(gem.kernels.__name__, gem.paths.checkout_root())"
    # -S leaves site-packages and its editable finder out: only the checkout and the standard library are there.
    out = fine(run(sys.executable, "-S", "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)))
    assert out.split() == ["gem.kernels", str(ROOT)]


@pytest.mark.parametrize("script", ["ci/setup", "ci/test", "ci/bench", ".ci/run"])
def test_scripts_can_be_called(script: str) -> None:
    assert ROOT is not None
    path = ROOT / script
    assert os.access(path, os.X_OK)
    text = path.read_text("utf-8")
    assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
    fine(run("bash", "-n", path, cwd=ROOT))


def test_setup_says_what_it_lacks(tmp_path: Path) -> None:
    """No Python >= 3.11: one clear line and exit 2, and nothing left behind."""
    assert ROOT is not None
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "setup", tmp_path / "ci" / "setup")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.8.18 && exit\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    done = run(tmp_path / "ci" / "setup", cwd=tmp_path, PYTHON=str(old))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "gem: error: no Python >= 3.11" in done.stderr and "Python 3.8.18" in done.stderr
    assert not (tmp_path / ".venv").exists()
