"""The report of measured cases: every metric with its unit and reason, and the waterfall agrees with its numbers."""

from result_rows import RACE, ROWS, measured
from test_report import NASTY, Page, harmless, section, timed
from test_report import document as ops

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


def test_metrics_are_a_table_of_their_own() -> None:
    html = render(document(PARTS))
    text = Page(section(html, "throughput")).text
    for cell in (
        "qps 1/s ↑",
        "input_ wait ↓",
        "1,200 0.83 %",
        "1.25 %",
        "3.00 GiB",
        "✕ 3.00",
        "out of memory",
        "2 runs",
    ):
        assert cell in text, cell
    results = Page(section(html, "results")).text
    assert "qps" not in results and "2.50" in results  # each row in one of the tables
    assert "expected >= 4, is 3" in Page(section(html, "problems")).text


def test_a_report_of_measured_cases_alone_says_nothing_of_ops() -> None:
    html = render(Document(rows=RACE))
    Page(html)
    assert 'id="results"' not in html and "#results" not in html and "nothing was run" not in html
    assert 'id="waterfalls"' not in html
    assert "No rows: nothing was run." in render(Document())


def test_the_bars_of_a_race_are_samples_a_second() -> None:
    html = section(render(Document(rows=RACE)), "peers")
    assert "samples/s, higher is better" in html and "gem: 1,200 samples/s, median within 1,190 to 1,210" in html


def test_texts_stay_text() -> None:
    rows = [measured(NASTY, NASTY, metric="qps", reason=NASTY)]
    waterfalls = {f"suites/throughput/e2e.toml::{NASTY}/{NASTY}": [WaterfallPart(part=NASTY, ms=1.0, of="rest")]}
    page = Page(render(Document(rows=rows, waterfalls=waterfalls)))
    assert harmless(page) and page.text.count(NASTY) >= 5


def test_waterfalls_are_shown_with_their_numbers() -> None:
    text = Page(section(render(document(PARTS)), "waterfalls")).text
    assert "tiny, gem" in text and "a step's time" in text and "step 8 ms" in text
    for part, share in (("input wait", "12.5 %"), ("tower", "75 %"), ("between", "-25 %"), ("optimizer", "37.5 %")):
        assert part in text and share in text, (part, text)


def test_a_training_run_is_called_one_and_has_no_peers_to_stand_against() -> None:
    own = [row.model_copy(update={"suite": "train"}) for row in RACE if row.impl == "gem" and "ratio" not in row.metric]
    assert any(row.metric == "qps" for row in own)
    html = render(Document(rows=own))
    assert "<h1>gem train on unknown machine</h1>" in html and 'id="peers"' not in html and 'id="train"' in html
    both = render(document(PARTS))
    assert "<h1>gem run on unknown machine</h1>" in both and 'id="peers"' in both


def rates(ms: float, tflops: float) -> Document:
    """A slow and a fast contestant: gem and a peer."""
    return ops([*timed("torch", ms, tflops, 5.0), *timed("flex", ms, tflops / 100, 5.0)])


def test_a_document_has_one_unit_of_work_per_second() -> None:
    for tflops, unit, other, figures in ((0.5, "GFLOP/s", "TFLOP/s", "500 5.00"), (3.0, "TFLOP/s", "GFLOP/s", "3.00")):
        html = render(rates(10.0, tflops))
        for name in ("peers", "roofline", "results"):
            own = section(html, name)
            assert unit in own and other not in own, (name, unit)
        for figure in figures.split():
            assert f">{figure}</td>" in section(html, "results") and f">{figure}</td>" in section(html, "peers")


def test_documents_of_two_units_in_one_table_say_each_in_its_own() -> None:
    own = section(render([("gpu", rates(1.0, 300.0)), ("cpu", rates(1.0, 0.5))]), "results")
    assert 'data-a="FLOP/s" data-f="descending">FLOP/s<' in own  # a copy reads 500 GFLOP/s
    for value, figure in (("300", "300 T"), ("3", "3.00 T"), ("0.5", "500 G"), ("0.005", "5.00 G")):
        assert f'data-v="{value}">{figure}</td>' in own  # sorted by what it is
