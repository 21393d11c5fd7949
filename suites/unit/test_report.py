"""The HTML report: every row is shown, every text escaped, nothing fetched, and plots agree with their numbers."""

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pytest

from gem.errors import RequestError
from gem.harness import plots
from gem.harness.plots import Bar, Ceilings, Point
from gem.harness.report import render, write_report
from gem.harness.results import Document, Row
from gem.harness.timing import summarize

nan = math.nan
SUITE = "suites/throughput/jagged_attention.toml"
NASTY = '<script>alert("1")</script>&\'"'


def row(**fields: Any) -> Row:
    given: dict[str, Any] = dict(
        suite=SUITE, case="cpu_self_d64", impl="torch", direction="forward", metric="ms", status="pass"
    )
    return Row(**(given | fields))


def timed(impl: str, ms: float, tflops: float, gbps: float, **fields: Any) -> list[Row]:
    samples = [ms * (1 + k / 100) for k in range(-5, 6)]
    return [
        row(impl=impl, value=ms, unit="ms", samples=samples, **fields),
        row(impl=impl, metric="tflops", value=tflops, unit="TFLOP/s", better="higher", **fields),
        row(impl=impl, metric="gbps", value=gbps, unit="GB/s", better="higher", **fields),
    ]


def document(rows: list[Row]) -> Document:
    sides = {"total": 6, "mean": 2.0, "p50": 2.0, "max": 3, "histogram": {"edges": [0, 1, 2, 4], "counts": [0, 1, 2]}}
    return Document(
        environment={"time": "2026-11-29T10:00:00", "gpu": None, "cpu": "Test CPU", "settings": {"OMP_NUM_THREADS": 2}},
        request={"argv": ["gem", "run"], "lengths": None},
        fixtures={"cpu_self": {"batch": 3, "source": "drawn by seed 1", "q": sides, "k": dict(sides)}},
        rows=rows,
        ceilings={"tflops": {"float32": 0.2}, "gbps": 20.0},
    )


class Page(HTMLParser):
    """What a browser would see: tags with attributes, and the text outside style elements."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr", "wbr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        assert self.open == [], f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def drawn(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def test_failed_and_skipped_rows_are_shown_with_their_reasons() -> None:
    rows = [
        *timed("torch", 10.0, 0.1, 5.0),
        row(impl="flex", status="error", reason="worker died with signal 11"),
        row(impl="nested", status="oom", reason="asked for 3 TiB"),
        row(impl="sdpa_padded", status="fail", value=5.0, reason="max_error 0.3 > 1e-5"),
        row(impl="torch_varlen", status="skipped", reason="needs cuda: no NVIDIA GPU here"),
    ]
    page = Page(render(document(rows)))
    for line in rows:
        assert line.impl in page.text and line.reason in page.text
    for status in ("error", "oom", "fail", "skipped"):
        assert f"{status} " in page.text
    assert "7 rows" in page.text
    # What did not pass is told without the notes of what did.
    mixed = [row(value=1.0, reason="few samples"), row(metric="ratio_to.flex", status="fail", reason="expected >= 2")]
    problems = re.search(r'<ul class="problems">(.*?)</ul>', render(document(mixed)), re.DOTALL)
    assert problems and "expected &gt;= 2" in problems[1] and "few samples" not in problems[1]
    # A contestant that did not run keeps its place among the bars.
    assert "skipped: needs cuda" in page.text


def test_every_metric_of_a_row_lands_in_the_table() -> None:
    rows = [
        row(metric="ms", value=12.34),
        row(metric="ratio_to.flex", value=1.75),
        row(metric="ratio_to.nested", value=0.91),
        row(metric="determinism", value=77.0, unit="bits"),
        row(metric="max_error", value=3.25e-7),
        row(metric="ms", value=98.76),  # twice the same metric: the second one is not lost
    ]
    text = Page(render(document(rows))).text
    for expected in ("12.3", "flex 1.75×", "nested 0.910×", "determinism 77 bits", "3.25e-07", "ms 98.8"):
        assert expected in text


@pytest.mark.parametrize("place", ["suite", "case", "impl", "direction", "metric", "reason", "unit"])
def test_texts_of_rows_stay_text(place: str) -> None:
    rows = [*timed("torch", 10.0, 0.1, 5.0, **({place: NASTY} if place not in ("impl", "metric", "unit") else {}))]
    rows.append(row(**({"impl": "x", "metric": "y", "value": 1.0} | {place: NASTY})))
    page = Page(render(document(rows)))
    assert [tag for tag, _ in page.tags if tag == "script"] == []
    assert NASTY in page.text


def test_texts_outside_the_rows_stay_text() -> None:
    doc = document(timed("torch", 10.0, 0.1, 5.0))
    doc.environment = {NASTY: NASTY, "cpu": NASTY}
    doc.request = {"argv": [NASTY]}
    doc.fixtures = {NASTY: doc.fixtures["cpu_self"] | {"source": NASTY}}
    doc.ceilings = {"tflops": {NASTY: 0.5}, "gbps": 20.0}
    page = Page(render(doc, title=NASTY))
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert page.text.count(NASTY) >= 6


def test_nothing_is_fetched_from_outside() -> None:
    html = render(document(timed("torch", 10.0, 0.1, 5.0)))
    for tag, attrs in Page(html).tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed")
        for name, value in attrs.items():
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href"):
                assert value and value.startswith("#")
    assert not re.search(r"url\(|@import|https?:", html)


def test_plots_are_named_and_described() -> None:
    page = Page(render(document(timed("torch", 10.0, 0.1, 5.0) + timed("flex", 20.0, 0.05, 2.5))))
    images = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(images) == 3  # bars, roofline, one histogram: queries and keys have the same lengths
    assert all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in images)
    assert [tag for tag, _ in page.tags].count("desc") == 3


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(status="skipped", reason="needs cuda"), row(impl="flex", status="skipped", reason="needs cuda")],
        [row(metric="", impl="", direction="", status="error", reason="no such file")],
        [row(value=None), row(metric="tflops", value=None)],
        [row(value=0.0, samples=[0.0] * 8), row(metric="tflops", value=0.0), row(metric="gbps", value=0.0)],
    ],
    ids=["none", "all skipped", "no metric", "no values", "zeros"],
)
def test_documents_with_little_in_them(rows: list[Row]) -> None:
    doc = document(rows)
    for one in (doc, Document(rows=rows)):  # the second without environment, fixtures and ceilings
        page = Page(render(one))
        assert "nan" not in page.text.lower().split()
        assert f"{len(rows)} row" in page.text


def test_a_very_long_reason_is_folded_not_cut() -> None:
    reason = "Traceback: " + "frame " * 20_000 + "the end"
    html = render(document([row(status="error", reason=reason)]))
    assert html.count(reason) >= 2 and "<summary>Traceback" in html


def test_thousands_of_rows_are_quick() -> None:
    rows = [one for k in range(1500) for one in timed("torch", 10.0 + k, 0.1, 5.0, case=f"case_{k}")]
    html = render(document(rows))
    assert "4500 rows" in html and "case_1499" in html
    assert len(html) < 12e6


def test_report_is_written_whole(tmp_path) -> None:
    path = write_report(document([row(value=1.0)]), tmp_path / "new" / "report.html")
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_broken_histogram_names_the_place() -> None:
    doc = document([])
    doc.fixtures["cpu_self"]["k"] = {"histogram": {"edges": [0, 1], "counts": [1, 2, 3]}}
    with pytest.raises(RequestError, match=r"fixtures\.cpu_self\.k\.histogram: .*2 edges for 3 counts.*accepted"):
        render(doc)


def test_bar_lengths_and_whiskers_go_with_the_values() -> None:
    svg = drawn(
        plots.bars(
            [
                (
                    "forward",
                    [
                        Bar("torch", 40.0, 36.0, 44.0, role="subject"),
                        Bar("flex", 10.0),
                        Bar("nested", None, note="oom: x"),
                    ],
                )
            ],
            unit="GFLOP/s",
            title="t",
        )
    )
    widths = [float(r.get("width", "nan")) for r in svg.iter("rect")]
    assert len(widths) == 2
    assert widths[0] / widths[1] == pytest.approx(4.0, rel=2e-2)
    whisker = next(line for line in svg.iter("line") if line.get("class") == "whisker")
    start = float(next(svg.iter("rect")).get("x", "nan"))
    scale = widths[0] / 40.0
    assert float(whisker.get("x1", "nan")) == pytest.approx(start + 36 * scale, abs=0.2)
    assert float(whisker.get("x2", "nan")) == pytest.approx(start + 44 * scale, abs=0.2)
    assert "oom: x" in "".join(svg.itertext())


def test_whiskers_of_work_per_second_turn_the_times_around() -> None:
    rows = timed("torch", 10.0, 0.1, 5.0)
    times = summarize(rows[0].samples)
    fast, slow = times.low, times.high
    assert fast < 10.0 < slow
    tip = next(t for t in re.findall(r"<title>(torch: [^<]*)</title>", render(document(rows))))
    # 1 GFLOP is done in 10 ms at 0.1 TFLOP/s, so GFLOP/s = 1000 / ms.
    assert tip == f"torch: 100 GFLOP/s, median within {plots.number(1000 / slow)} to {plots.number(1000 / fast)}"


def test_roofline_points_lie_at_intensity_and_rate() -> None:
    ceilings = Ceilings({"float32": 0.1}, 10.0)  # the ridge is at 1000 * 0.1 / 10 = 10 FLOP/byte
    points = [Point("on the slope", 1.0, 0.01), Point("on the roof", 100.0, 0.1, direction="backward")]
    svg = drawn(plots.roofline(points, ceilings, title="t"))
    roofs = [line for line in svg.iter("line") if line.get("class") == "roof"]
    slope, roof = roofs

    def at(line: ET.Element, name: str) -> float:
        return float(line.get(name, "nan"))

    circle = next(svg.iter("circle"))
    assert at(circle, "cx") == pytest.approx(at(slope, "x1"), abs=0.2)
    assert at(circle, "cy") == pytest.approx(at(slope, "y1"), abs=0.2)
    assert at(roof, "y1") == at(roof, "y2") == pytest.approx(at(slope, "y2"), abs=0.2)
    assert at(roof, "x1") == pytest.approx(at(slope, "x2"), abs=0.2)
    # Log scale: intensity 1 -> 10 is as wide as 10 -> 100, where the triangle of the second point stands.
    triangle = next(p for p in svg.iter("path") if "point" in (p.get("class") or ""))
    x = float(re.match(r"M([\d.]+)", triangle.get("d", ""))[1])  # type: ignore[index]
    assert x - at(roof, "x1") == pytest.approx(at(roof, "x1") - at(circle, "cx"), abs=0.3)


def test_intensity_is_work_over_traffic() -> None:
    # 0.1 TFLOP/s at 5 GB/s is 20 FLOP a byte.
    assert "cpu_self_d64 torch forward: 100 GFLOP/s at 20 FLOP/byte" in render(document(timed("torch", 10.0, 0.1, 5.0)))


@pytest.mark.parametrize("points", [[], [Point("a", 1.0, 2.0)], [Point("a", math.inf, 1.0), Point("b", 0.0, 1.0)]])
def test_roofline_without_ceilings_or_points(points: list[Point]) -> None:
    finite = [p for p in points if math.isfinite(p.intensity)]
    svg = plots.roofline(finite, Ceilings({}), title="t")
    assert "not measured" in svg and "nan" not in svg


def test_histogram_bars_hold_the_counts() -> None:
    svg = drawn(plots.histogram([0, 1, 2, 4, 8, 16], [0, 0, 5, 10, 0], title="t"))
    heights = [float(r.get("height", "nan")) for r in svg.iter("rect")]
    assert len(heights) == 2 and heights[1] == pytest.approx(2 * heights[0], abs=0.2)  # empty ends left out
    labels = "".join(svg.itertext())
    assert "2 to below 4: 5 samples" in labels and "15 samples" in labels


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (0.12345, "0.123"),
        (1234.5, "1,234"),
        (18.0, "18"),
        (3.2e-7, "3.20e-07"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert plots.number(value) == text


def chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


@pytest.mark.skipif(chromium() is None, reason="no chromium on PATH to render the report with")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_lays_the_report_out(tmp_path, width: int) -> None:
    """The page is as wide as the window (wide tables scroll inside it) and its plots have a size."""
    rows = [
        *timed("torch", 10.0, 0.1, 5.0),
        *timed("flex", 20.0, 0.05, 2.5),
        row(impl="nested", status="oom", reason="x" * 900),
    ]
    html = render(document(rows))
    # The report itself has no script; the test adds one that reports the layout in an attribute.
    probe = (
        "<script>document.documentElement.dataset.layout = JSON.stringify({page: document.documentElement.scrollWidth,"
        "window: innerWidth, svg: [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)})"
        "</script></body>"
    )
    path = tmp_path / "report.html"
    path.write_text(html.replace("</body>", probe), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    command = [str(chromium()), *flags.split(), "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r'data-layout="([^"]*)"', dom)
    assert found, "the page did not run"
    layout = json.loads(found[1].replace("&quot;", '"'))
    assert layout["page"] <= layout["window"]
    assert len(layout["svg"]) == 3 and min(layout["svg"]) > 80
