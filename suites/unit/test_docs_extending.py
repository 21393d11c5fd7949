"""docs/extending.md works as it is written: its blocks are put into a copy of the tree, its commands are run there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import Block, apply, blocks_of

from gem import paths
from gem.harness.results import Document, read_document

ROOT = paths.checkout_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="not run from a checkout")
BLOCKS = blocks_of(ROOT / "docs" / "extending.md") if ROOT else []
# Document that a section's commands leave → contestants that its rows must be of, and metrics that must have values.
LEFT: dict[str, tuple[set[str], set[str]]] = {
    "my_results.json": ({"torch", "sdpa_padded"}, {"ms", "max_error", "ratio_to.sdpa_padded"}),
    "peer.json": ({"torch", "sdpa_loop", "sdpa_padded"}, {"ms", "ratio_to.sdpa_loop"}),
    "pooling.json": ({"gem"}, {"samples_per_s", "max_error"}),
    "kernel.json": ({"rows"}, {"max_error"}),
    "op.json": ({"torch"}, {"max_error"}),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with every block of the page in its place."""
    assert ROOT is not None
    copy = tmp_path_factory.mktemp("extended")
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info", "unit", "asv")
    for folder in ("gem", "kernels", "suites", "fixtures"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=junk)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for block in BLOCKS:
        if block.path:
            apply(block, copy)
    return copy


def commands(section: str) -> str:
    return "".join(block.text for block in BLOCKS if block.section == section and block.language == "bash")


def run(tree: Path, script: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env = {**kept, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(tree)}
    env |= {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tree, env=env, capture_output=True, text=True, timeout=300
    )


SECTIONS = list(dict.fromkeys(block.section for block in BLOCKS if block.language == "bash"))


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_does_what_it_says(tree: Path, section: str) -> None:
    if section == "A kernel":
        pytest.importorskip("triton")
    script = commands(section)
    done = run(tree, script)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    documents = [name for name in LEFT if f"--json {name}" in script]
    assert documents, f"{section}: its commands leave no document that is looked at"
    for name in documents:
        _check(read_document(tree / name), *LEFT[name])


def _check(document: Document, contestants: set[str], metrics: set[str]) -> None:
    assert {row.impl for row in document.rows if row.impl} == contestants
    assert {row.status for row in document.rows} == {"pass"}, [row.reason for row in document.rows]
    assert metrics <= {row.metric for row in document.rows if row.value is not None}


def test_every_document_belongs_to_a_section() -> None:
    everything = "".join(commands(section) for section in SECTIONS)
    assert all(f"--json {name}" in everything for name in LEFT)


def test_the_page_has_a_section_for_each_thing_to_add() -> None:
    assert SECTIONS == ["A case", "A peer", "A measured subject", "A kernel", "An op"]
    assert any(block.section == "A fixture" and block.path == "my_lengths.toml" for block in BLOCKS)


def test_python_of_the_page_is_as_neat_as_the_code(tree: Path) -> None:
    """Files that the page makes or adds to pass ruff, formatted too."""
    assert ROOT is not None
    files = sorted({block.path for block in BLOCKS if block.path.endswith(".py")})
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for how in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *how, *config, *files], cwd=tree, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("place, text", [("after", "a\nX\nb\n"), ("before", "X\na\nb\n"), ("replace", "X\nb\n")])
def test_blocks_go_where_they_say(tmp_path: Path, place: str, text: str) -> None:
    (tmp_path / "f").write_text("a\nb\n")
    apply(Block("", "python", "X\n", "f", place, "a"), tmp_path)
    assert (tmp_path / "f").read_text() == text
    with pytest.raises(AssertionError, match="0 lines are 'c'"):
        apply(Block("", "python", "X\n", "f", "after", "c"), tmp_path)
