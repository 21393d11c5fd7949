"""The tests' browser sees what goes wrong in a page, and leaves the process as it was."""

import asyncio
from pathlib import Path

import browser
import pytest

PAGE = """<!doctype html><meta charset="utf-8"><title>t</title><body>
<script>console.error("said"); setTimeout(() => { throw new Error("thrown") }, 0)</script>
<img src="absent.png" alt=""></body>"""


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(PAGE, encoding="utf-8")
    return path


def test_errors_and_requests_are_seen(page_file: Path) -> None:
    with browser.open_page(page_file) as page:
        page.wait_for_timeout(50)
        said = browser.errors(page)
        assert "said" in said and any("thrown" in one for one in said)
        assert browser.requests(page) == [page_file.as_uri(), (page_file.parent / "absent.png").as_uri()]


def test_width_and_colour_scheme_are_set(page_file: Path) -> None:
    with browser.open_page(page_file.as_uri(), width=390, height=700, dark=True) as page:
        assert page.evaluate("[innerWidth, innerHeight]") == [390, 700]
        assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        # Two pages beside each other keep apart.
        with browser.open_page(page_file) as other:
            assert not other.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")


def test_other_event_loops_run_afterwards(page_file: Path) -> None:
    async def answer() -> int:
        return 42

    with browser.open_page(page_file):
        pass
    assert asyncio.run(answer()) == 42
    with browser.open_page(page_file) as page:
        assert page.title() == "t"
