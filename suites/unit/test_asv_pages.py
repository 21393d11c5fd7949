"""asv's pages of the kept results, in a real browser: the grid and a graph show what was measured."""

import contextlib
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asv_package
import browser
import pytest

from gem import paths
from gem.errors import RequestError

ROOT = paths.checkout_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="not run from a checkout")
pytest.importorskip("asv")
KEPT = (ROOT or Path()) / "ci" / "measured" / "asv"
# Points of the graph's series, as flot has them once drawn: [label, [[revision, value or null], …]].
SERIES = (
    "() => { const plot = $('#main-graph').data('plot'); return plot && plot.getData().map(s => [s.label, s.data]); }"
)
# Pixels of the graph's canvas that are neither white nor grey: lines and points.
COLOURED = """() => { const c = document.querySelector('#main-graph canvas.flot-base');
    const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;
    for (let i = 0; i < d.length; i += 4)
        if (d[i + 3] && Math.max(d[i], d[i + 1], d[i + 2]) - Math.min(d[i], d[i + 1], d[i + 2]) > 60) n++;
    return n; }"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """asv's pages as asv makes them, of the results in the repository."""
    assert ROOT is not None
    shallow = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("not a whole repository: asv asks it for the commits of the results")
    html = tmp_path_factory.mktemp("asv") / "html"
    asv_package.load("publish").publish(ROOT, KEPT, html)
    return html


@pytest.fixture(scope="module")
def offline(published: Path) -> Path:
    """… with what they load beside them."""
    html = published.with_name("offline")
    shutil.copytree(published, html)
    try:
        asv_package.load("publish").bring_home(html)
    except RequestError as error:
        pytest.skip(f"asv's pages load scripts from elsewhere, which could not be had: {error}")
    return html


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, directory=str(folder), **named)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def kept_values(published: Path, machine: str, ending: str) -> tuple[str, list[float]]:
    """The benchmark with such a name that has the most results of a machine, and all that the files hold of it."""
    index = json.loads((published / "index.json").read_text(encoding="utf-8"))["benchmarks"]
    found: dict[str, list[tuple[str, float]]] = {name: [] for name in index if name.endswith(ending)}
    for path in KEPT.glob("*/*-*.json"):
        for name, row in json.loads(path.read_text(encoding="utf-8"))["results"].items():
            if name in found and row[0] and row[2] == index[name]["version"]:
                found[name] += [(path.parent.name, value) for value in row[0] if value is not None and value == value]
    best = max(found, key=lambda name: sum(one == machine for one, _ in found[name]))
    return best, [value for _, value in found[best]]


def test_what_is_published_is_what_was_kept(published: Path) -> None:
    """Without a browser: every benchmark that has results has a graph, with their values."""
    index = json.loads((published / "index.json").read_text(encoding="utf-8"))
    assert {one["machine"] for one in index["graph_param_list"]} >= {"cpu", "h200"}
    listed = set(index["benchmarks"])
    assert listed and all((published / "graphs" / "summary" / f"{name}.json").is_file() for name in listed)
    regressions = json.loads((published / "regressions.json").read_text(encoding="utf-8"))["regressions"]
    assert not [one[0] for one in regressions if "_shown" in one[0]]
    assert any("_shown" in name for name in listed)


@pytest.mark.parametrize("machine, ending", [("h200", "_seconds"), ("cpu", "track_step_seconds"), ("cpu", "_shown")])
def test_a_graph_shows_the_kept_values(offline: Path, machine: str, ending: str) -> None:
    benchmark, wanted = kept_values(offline, machine, ending)
    assert wanted
    with served(offline) as base, browser.open_page(f"{base}/index.html#{benchmark}") as page:
        page.wait_for_function(f"({SERIES})()?.length > 0")
        drawn = page.evaluate(SERIES)
        coloured = page.evaluate(COLOURED)
        assert all(one.startswith(base) for one in browser.requests(page))
        # asv asks for the other machines' graphs too, of which it cannot know that there are none.
        assert [text for text in browser.errors(page) if "404" not in text] == []
    values = [value for _, points in drawn for _, value in points if value is not None]
    assert sorted(values) == pytest.approx(sorted(wanted), rel=1e-4)
    assert coloured > 100


def test_the_grid_and_the_lists_show_every_benchmark(offline: Path) -> None:
    benchmarks = json.loads((offline / "index.json").read_text(encoding="utf-8"))["benchmarks"]
    with served(offline) as base, browser.open_page(f"{base}/index.html", height=2000) as page:
        page.wait_for_selector("#summarygrid-display canvas.flot-base")
        text = page.inner_text("#summarygrid-display")
        assert all(one["pretty_name"] in text for one in benchmarks.values())
        assert browser.errors(page) == [] and all(one.startswith(base) for one in browser.requests(page))
        page.goto(f"{base}/index.html#summarylist")
        page.wait_for_selector("#summarylist-display table tbody tr")
        listed = page.inner_text("#summarylist-display")
        assert sum(one["pretty_name"] in listed for one in benchmarks.values()) >= 5  # those of one machine
        page.goto(f"{base}/index.html#regressions")
        page.wait_for_selector("#regressions-display:not(:empty)")
        assert "_shown" not in page.inner_text("#regressions-display")
        assert browser.errors(page) == []


def test_a_page_that_is_not_known_here_is_said(tmp_path: Path) -> None:
    """A later asv may load something else: then nothing is rewritten in part."""
    page = tmp_path / "index.html"
    page.write_text('<script src="https://cdn.example.invalid/new.js"></script>')
    before = page.read_text()
    with pytest.raises(RequestError, match=r"loads https://cdn.example.invalid/new.js"):
        asv_package.load("publish").bring_home(tmp_path)
    assert page.read_text() == before and list(tmp_path.iterdir()) == [page]
