"""Code blocks of the documentation, as the tests run them.

The info string of a block says what becomes of it: ```` ```python gem/harness/peers.py after REGISTRY = { ```` puts it
behind that line of that file (``before``, ``replace`` likewise); a path alone makes the file, or adds to its end.
Readers see the language; the text beside the block says the same in words.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(?P<language>\w+)(?: (?P<info>[^\n]+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
PLACES = ("after", "before", "replace")


@dataclass(frozen=True)
class Block:
    """One code block: the section that it stands in, and where it goes ('' = nowhere)."""

    section: str
    language: str
    text: str
    path: str = ""
    place: str = ""
    line: str = ""


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a Markdown page, in order."""
    text = page.read_text("utf-8")
    found = []
    for match in _FENCE.finditer(text):
        headings = _HEADING.findall(text[: match.start()])
        path, _, rest = (match["info"] or "").partition(" ")
        place, _, line = rest.partition(" ")
        section = headings[-1] if headings else ""
        found.append(Block(section, match["language"], match["text"], path, place, line))
    return found


def apply(block: Block, root: Path) -> None:
    """Put the block where it says, below `root`. AssertionError where the line it names is not there, or is twice."""
    file = root / block.path
    if not block.place:
        before = file.read_text("utf-8").rstrip("\n") + "\n\n\n" if file.exists() else ""
        file.write_text(before + block.text, "utf-8")
        return
    assert block.place in PLACES, f"{block.path} {block.place!r}: accepted are {PLACES}"
    lines = file.read_text("utf-8").splitlines(keepends=True)
    at = [number for number, line in enumerate(lines) if line.strip() == block.line.strip()]
    assert len(at) == 1, f"{block.path}: {len(at)} lines are {block.line!r}"
    first = at[0] + (block.place == "after")
    last = at[0] + (block.place in ("after", "replace"))
    file.write_text("".join([*lines[:first], block.text, *lines[last:]]), "utf-8")
