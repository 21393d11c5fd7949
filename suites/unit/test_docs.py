"""The documentation is true: its reference is what the code says, its links lead somewhere, its commands are commands,
its picture has the imports that there are."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from docs_blocks import blocks_of
from test_layout import allowed, edges, layer_of

from gem import cli, paths
from gem.commands.examples import EXAMPLES, epilog
from gem.commands.reference import PAGES
from gem.data.logs import read_lengths
from gem.efficiency import attention_pairs
from gem.harness.results import read_document
from gem.harness.suites import load_suites

ROOT = paths.checkout_root() or Path()
pytestmark = pytest.mark.skipif(paths.checkout_root() is None, reason="not run from a checkout")
DOCS = ROOT / "docs"
WRITTEN = sorted(DOCS.glob("*.md"))
ALL = [ROOT / "README.md", ROOT / "ci" / "README.md", *sorted(DOCS.rglob("*.md"))]
COLUMNS = 80
CLI: Any = typer.main.get_command(cli.app)


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# ---- the reference


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_what_the_code_says(name: str) -> None:
    made = (DOCS / "reference" / name).read_text("utf-8")
    assert made == PAGES[name](), "python -m gem.commands.reference makes it anew"


def test_no_page_of_the_reference_is_left_over() -> None:
    assert {page.name for page in (DOCS / "reference").iterdir()} == set(PAGES)


def test_the_reference_has_every_name() -> None:
    """Against the code by another way than the pages are made."""
    from gem.harness import names
    from gem.harness.case import Case
    from gem.harness.measured_params import MEASURED
    from gem.harness.params import SUBJECTS

    text = {name: (DOCS / "reference" / name).read_text("utf-8") for name in PAGES}
    for metric, one in names.METRICS.items():
        assert re.search(
            rf"^\| `{metric}` \| {re.escape(one.unit or '–')} \| {one.better} \|", text["metrics.md"], re.M
        )
    assert all(f"| `{peer}` |" in text["peers.md"] for peer in names.PEERS)
    declared = {*Case.model_fields, *(f for model in SUBJECTS.values() for f in model.model_fields)} - {"suite", "file"}
    declared |= {f for one in MEASURED.values() for f in one.params.model_fields}
    assert [field for field in declared if f"| `{field}` |" not in text["declarations.md"]] == []
    options = {option for command in CLI.commands.values() for one in command.params for option in one.opts}
    assert [one for one in options if one.startswith("-") and one != "--help" and one not in text["commands.md"]] == []


# ---- links


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of the headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[str, str]]:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield file, anchor


@pytest.mark.parametrize("page", ALL, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{file} is not there"
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}: it has {sorted(anchors(target))}"


def test_the_index_names_every_page() -> None:
    linked = {(DOCS / file).resolve() for file, _ in links(DOCS / "README.md") if file}
    assert [shown(page) for page in DOCS.rglob("*.md") if page not in linked and page.name != "README.md"] == []


@pytest.mark.parametrize("page", WRITTEN, ids=shown)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`((?:gem|kernels|suites|fixtures|ci|docs)/[\w./-]+\.(?:py|toml|csv|txt|json|md))`", text)
    made = {block.path for block in blocks_of(page)}  # files that the page tells how to make
    assert [one for one in named if one not in made and not (ROOT / one).exists() and "FILE" not in one] == []


# ---- commands


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a checkout, with the files in it that the examples take for given."""
    for name in ("ci", "fixtures", "suites"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "results").mkdir()
    for page in WRITTEN:
        for block in blocks_of(page):
            if block.path.endswith(".toml"):
                (tmp_path / block.path).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gem_words(text: str) -> Iterator[list[str]]:
    """The words of every `gem` command in shell text, without what stands before `gem`."""
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if re.search(r"\S {2,}[^#\s]", line):
            continue  # no command: a synopsis, with what it is for in a column beside it
        if not line.lstrip().startswith("#") and re.search(r"(^|\s|/)gem [a-z]", line):
            words = shlex.split(line, comments=True)
            at = next((n for n, word in enumerate(words) if re.fullmatch(r"([^=]*/)?gem", word)), None)
            if at is not None and all("=" in word or word in ("-m", "torchrun", "python3") for word in words[:at][-1:]):
                yield words[at + 1 :]


def parse(words: list[str]) -> dict[str, Any]:
    """What the command line makes of a command's arguments; click's error when it refuses them."""
    name, *rest = words
    return CLI.commands[name].make_context(name, list(rest), parent=None).params


EVERY = [(name, what, line) for name, examples in EXAMPLES.items() for what, line in examples]


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == set(CLI.commands)


@pytest.mark.parametrize("name, what, line", EVERY, ids=[f"{name}: {what}" for name, what, _ in EVERY])
def test_an_example_is_understood(place: Path, name: str, what: str, line: str) -> None:
    found = list(gem_words(line))
    scripts = [word for word in shlex.split(line) if word.startswith("./")]
    assert found or scripts
    assert all(os.access(ROOT / one, os.X_OK) for one in scripts)
    for words in found:
        given = parse(words)
        if name in ("run", "list"):
            assert load_suites(given["paths"] or [], given["k"]), what


@pytest.mark.parametrize(
    "line",
    [line for name, _, line in EVERY if name in ("list", "report")],
)
def test_quick_examples_work(place: Path, line: str) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-euc", line], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout, done.stderr


PAGES_WITH_COMMANDS = [page for page in ALL if "reference" not in page.parts and page.name != "training.md"]


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=shown)
def test_commands_of_a_page_are_understood(place: Path, page: Path) -> None:
    """Options, their values, suites and cases exist. (What the extending page does is run by a test of its own.)"""
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    blocks = [text for language, text in fences if language in ("", "bash")]
    for block in blocks:
        made = dict(re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", block, re.MULTILINE | re.DOTALL))
        for file, text in made.items():
            (place / file).write_text(text)
        for words in gem_words(block):
            if {"CONFIG", "PATHS", "…"} & set(words) or "[" in " ".join(words):
                continue  # a placeholder: no command to be typed
            given = parse(words)
            if words[0] in ("run", "list") and page.name != "extending.md":
                assert load_suites(given["paths"] or [], given["k"])


@pytest.mark.parametrize("name", [None, *EXAMPLES])
def test_help_is_readable_on_80_columns(name: str | None) -> None:
    env = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "gem", *([name] if name else []), "--help"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if len(line) > COLUMNS] == []
    told = [line.rstrip() for line in epilog(name).splitlines()[1:]]
    assert [line.strip() for line in lines[-len(told) :]] == [line.strip() for line in told], "examples stay as written"


# ---- figures of the tutorial


def tutorial() -> str:
    return " ".join((DOCS / "tutorial.md").read_text("utf-8").split())


def test_what_the_tutorial_says_of_its_lengths(place: Path) -> None:
    (script,) = re.findall(r"^python - <<'END'\n(.*?)^END$", (DOCS / "tutorial.md").read_text("utf-8"), re.M | re.S)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    log = read_lengths(place / "results" / "events.csv")
    users = log.draw(32).lengths
    padded = len(users) * int(users.max()) ** 2
    full, window = attention_pairs(users, users), attention_pairs(users, users, True, (64, 0))
    assert f"draws one, {len(log.lengths)} users" in tutorial()
    assert (
        f"{padded / full:.0f} times the pairs that are needed, with the window {padded / window:.0f} times"
        in tutorial()
    )
    assert f"not padding, {users.sum() / len(users) / users.max():.2f} here" in tutorial()


def test_what_the_tutorial_says_of_the_h200() -> None:
    rows = [
        row for row in read_document(ROOT / "ci" / "measured" / "h200" / "attention.json").rows
        if row.case.startswith("self_long") and row.value is not None
    ]  # fmt: skip

    def span(*peers: str) -> tuple[float, float]:
        found = [row.value for row in rows if row.metric in {f"ratio_to.{peer}" for peer in peers} and row.value]
        return min(found), max(found)

    flash, varlen, padded = span("fa3", "fa4"), span("torch_varlen"), span("sdpa_padded")
    said = (
        f"long sequences {flash[0]:.2f} to {flash[1]:.2f} of FlashAttention's speed, "
        f"{varlen[0]:.1f} to {varlen[1]:.1f} times torch's varlen attention, "
        f"{padded[0]:.0f} to {padded[1]:.0f} times the padded batch"
    )
    assert said in tutorial()


# ---- the picture


def part_of(module: str) -> str:
    """The part of the picture that a module belongs to; "" for what all may import."""
    if layer_of(module) == "base":
        return ""
    second = module.split(".")[1]
    if second in ("commands", "cli", "__main__"):
        return "commands"
    return second if second in ("harness", "train", "baselines", "model", "kernels", "data") else layer_of(module)


def test_the_picture_has_the_imports_that_there_are() -> None:
    """Drawn arrows = imports between parts, and none against the layers."""
    (picture, *_) = re.findall(r"^```mermaid\n(flowchart.*?)^```$", (DOCS / "architecture.md").read_text(), re.M | re.S)
    drawn = set(re.findall(r"^ +(\w+) --> (\w+)$", picture, re.MULTILINE))
    imported = {(part_of(a), part_of(b)): (a, b) for a, b in edges()}
    actual = {(a, b) for a, b in imported if a and b and a != b}
    assert sorted(drawn - actual) == [], "drawn, but nothing imports so"
    assert sorted((arrow, imported[arrow]) for arrow in actual - drawn) == [], "imported, but not drawn"
    assert all(allowed(layer_of(a), layer_of(b)) for a, b in imported.values())
    named = set(re.findall(r"^ +(\w+)\[", picture, re.MULTILINE))
    assert named == {part for arrow in drawn for part in arrow}


def test_the_layout_names_every_part() -> None:
    """Files and folders of the tree appear in its picture by name (a star stands for several)."""
    text = (DOCS / "layout.md").read_text("utf-8")
    words = set(re.findall(r"[\w*]+", text))
    stars = tuple(word.removesuffix("*") for word in words if word.endswith("*"))
    modules = [*(ROOT / "gem").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]
    names = {file.stem for file in modules if file.stem not in ("__init__",) and "kernels" not in file.parts[:-1][-1:]}
    names |= {file.stem for file in (ROOT / "kernels").glob("*.py") if file.stem != "__init__"}
    missing = [name for name in sorted(names) if name not in words and not name.startswith(stars)]
    assert missing == []
