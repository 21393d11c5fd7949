"""A real browser for the tests of pages: one Chromium a process, driven by playwright.

``with browser.open_page(path) as page:`` yields playwright's Page; what went wrong in it is in `errors(page)`, what it
asked for in `requests(page)`. Where there is no Chromium or no playwright the test is skipped with that reason.
"""

import asyncio
import atexit
import contextlib
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # tests run as root in containers, where Chromium's sandbox does not start
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
TIMEOUT_MS = 30_000


@dataclass
class _Seen:
    """What a page has said and asked for so far."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


_seen: "weakref.WeakKeyDictionary[Any, _Seen]" = weakref.WeakKeyDictionary()


def missing() -> str | None:
    """Why no page can be opened here, or None."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError as error:
        return f"playwright is not installed: {error}"
    return None if _executable() else f"no Chromium on PATH (looked for {', '.join(NAMES)})"


def errors(page: Any) -> list[str]:
    """Errors on the page's console and exceptions that its scripts did not catch, in order."""
    return _seen[page].errors


def requests(page: Any) -> list[str]:
    """The address of every request, the page's own first; of `data:` and `blob:` too."""
    return _seen[page].requests


@contextlib.contextmanager
def open_page(
    url_or_path: str | Path, width: int = 1280, height: int = 900, dark: bool = False, **context: Any
) -> Iterator[Any]:
    """The page at an address or in a file, loaded, in a browser context of its own (no storage of other pages).

    `width`, `height` in CSS pixels; `dark`: the colour scheme that the reader's system prefers; `context`: further
    arguments of playwright's ``Browser.new_context``, as permissions=["clipboard-read"].
    """
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    text = str(url_or_path)
    url = text if "://" in text else Path(text).resolve().as_uri()
    scheme = "dark" if dark else "light"
    chromium = _start()
    with _running(chromium.loop):
        own = chromium.browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **context)
        try:
            own.set_default_timeout(TIMEOUT_MS)
            page = own.new_page()
            _watch(page)
            page.goto(url, wait_until="load")
            yield page
        finally:
            own.close()


def _watch(page: Any) -> None:
    seen = _seen[page] = _Seen()
    page.on("console", lambda message: seen.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))


def _executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True)
class _Chromium:
    """The browser, what drives it, and the event loop in which playwright waits."""

    driver: Any
    browser: Any
    loop: asyncio.AbstractEventLoop


@cache
def _start() -> _Chromium:
    """The process's browser, started with the first page and closed with the process."""
    from playwright.sync_api import sync_playwright

    with _running(None):  # puts back what playwright leaves
        driver = sync_playwright().start()
        browser = driver.chromium.launch(executable_path=_executable(), args=list(FLAGS))
        chromium = _Chromium(driver, browser, asyncio.get_running_loop())
    atexit.register(_close, chromium)
    return chromium


@contextlib.contextmanager
def _running(loop: asyncio.AbstractEventLoop | None) -> Iterator[None]:
    """Mark the loop as running, as playwright leaves it between its calls and wants to find it, only for so long:
    otherwise asyncio.run refuses to start in every test that follows."""
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(before)


def _close(chromium: _Chromium) -> None:
    # The process ends: a browser that is gone already is closed.
    with _running(chromium.loop), contextlib.suppress(Exception):
        chromium.browser.close()
        chromium.driver.stop()
