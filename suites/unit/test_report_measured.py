"""The report of measured cases: every metric with its unit and reason, and the waterfall agrees with its numbers."""

import re
import xml.etree.ElementTree as ET

import pytest
from result_rows import RACE, ROWS, measured
from test_report import NASTY, Page

from gem.harness import plots
from gem.harness.report import render
from gem.harness.results import Document, WaterfallPart

KEY = "suites/throughput/e2e.toml::tiny/gem"
PARTS = [
    ("input wait", 1.0, "input"),
    ("tower", 6.0, "model"),
    ("between", -2.0, "rest"),
    ("optimizer", 3.0, "optimizer"),
]


def document(parts: list[tuple[str, float, str]]) -> Document:
    made = [WaterfallPart.model_validate({"part": part, "ms": ms, "of": of}) for part, ms, of in parts]
    return Document(rows=[*ROWS, *RACE], waterfalls={KEY: made})


def section(html: str, name: str) -> str:
    found = re.search(rf'<section id="{name}">(.*?)</section>', html, re.DOTALL)
    assert found, name
    return found[1]


def test_metrics_are_a_table_of_their_own() -> None:
    html = render(document(PARTS))
    text = Page(section(html, "measured")).text
    for cell in (
        "qps 1/s ↑",
        "input_wait ↓",
        "1,200 (1,190 to 1,210)",
        "1.25 %",
        "3.00 GiB",
        "✕ 3.00",
        "out of memory",
    ):
        assert cell in text, cell
    results = Page(section(html, "results")).text
    assert "qps" not in results and "2.50×" in results  # each row in one of the tables
    assert "expected >= 4, is 3" in Page(section(html, "problems")).text


def test_a_report_of_measured_cases_alone_says_nothing_of_ops() -> None:
    html = render(Document(rows=RACE))
    Page(html)
    assert 'id="results"' not in html and "#results" not in html and "nothing was run" not in html
    assert 'id="waterfalls"' not in html
    assert "No rows: nothing was run." in render(Document())


def test_the_bars_of_a_race_are_samples_a_second() -> None:
    html = section(render(Document(rows=RACE)), "peers")
    assert "samples/s against peers" in html and "gem: 1,200 samples/s, median within 1,190 to 1,210" in html
    assert "batch 16" in html


def test_texts_stay_text() -> None:
    rows = [measured(NASTY, NASTY, metric="qps", reason=NASTY)]
    waterfalls = {f"suites/throughput/e2e.toml::{NASTY}/{NASTY}": [WaterfallPart(part=NASTY, ms=1.0, of="rest")]}
    page = Page(render(Document(rows=rows, waterfalls=waterfalls)))
    assert [tag for tag, _ in page.tags if tag == "script"] == [] and page.text.count(NASTY) >= 5


def test_waterfalls_are_shown_with_their_numbers() -> None:
    text = Page(section(render(document(PARTS)), "waterfalls")).text
    assert "tiny, gem" in text and "a step's time" in text
    for part, share in (("input wait", "12.5 %"), ("tower", "75 %"), ("between", "-25 %"), ("optimizer", "37.5 %")):
        assert part in text and share in text, (part, text)


def boxes(svg: str) -> list[tuple[str, float, float]]:
    """(class, x, width) of the slices drawn."""
    found = [e for e in ET.fromstring(svg).iter("rect") if "slice" in e.attrib["class"]]
    return [(e.attrib["class"], float(e.attrib["x"]), float(e.attrib["width"])) for e in found]


def test_each_bar_begins_where_the_one_above_it_ended() -> None:
    drawn = boxes(plots.waterfall(PARTS, title="t"))
    assert [kind for kind, _, _ in drawn] == ["slice input", "slice model", "slice below", "slice optimizer"]
    scale = drawn[0][2] / 1.0
    assert [width / scale for _, _, width in drawn] == pytest.approx([1.0, 6.0, 2.0, 3.0], rel=0.01)
    left = drawn[0][1]
    assert [(x - left) / scale for _, x, _ in drawn] == pytest.approx([0.0, 1.0, 5.0, 5.0], abs=0.02)
    assert "Waterfall of a step of 8 ms" in plots.waterfall(PARTS, title="t")


def test_contestants_of_a_case_have_one_scale() -> None:
    alone = boxes(plots.waterfall(PARTS, title="t"))
    beside = boxes(plots.waterfall(PARTS, title="t", limit=16.0))
    assert beside[1][2] == pytest.approx(alone[1][2] * 8 / 16, rel=0.01)


def test_nothing_to_draw_is_no_error() -> None:
    assert boxes(plots.waterfall([], title="t")) == []
    assert len(boxes(plots.waterfall([("a", 0.0, "model")], title="t"))) == 1


def test_a_training_run_is_called_one_and_has_no_peers_to_stand_against() -> None:
    own = [row.model_copy(update={"suite": "train"}) for row in RACE if row.impl == "gem" and "ratio" not in row.metric]
    assert any(row.metric == "qps" for row in own)
    html = render(Document(rows=own))
    assert "<h1>gem train</h1>" in html and 'id="peers"' not in html
    both = render(document(PARTS))
    assert "<h1>gem run</h1>" in both and 'id="peers"' in both
