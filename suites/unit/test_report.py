"""The HTML report: how the run ended comes first, every row is shown, every text escaped, nothing fetched."""

import base64
import hashlib
import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gem.errors import RequestError
from gem.harness import svg
from gem.harness.report import render, run_names, write_report
from gem.harness.results import Document, Row
from gem.harness.table import number
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
    """What a browser would see: tags with attributes, and the text outside of styles and scripts."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr", "wbr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
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
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def section(html: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?>(.*?)</section>', html, re.DOTALL)
    assert found, name
    return found[1]


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
    problems = section(render(document(mixed)), "problems")
    assert "expected &gt;= 2" in problems and "few samples" not in problems
    # A contestant that did not run keeps its place among the bars.
    assert "skipped: needs cuda" in Page(section(render(document(rows)), "peers")).text


def test_the_worst_news_comes_first() -> None:
    rows = [
        row(case="a", value=1.0, metric="ratio_to.flex", status="fail", reason="too slow"),
        row(case="b", status="oom", reason="no memory"),
        row(case="c", status="error", reason="crashed"),
        row(case="d", value=1.0),
        row(case="d", impl="flex", status="error", reason="the peer's own fault"),
    ]
    html = render(document(rows))
    text = Page(section(html, "problems")).text
    places = [text.index(reason) for reason in ("crashed", "no memory", "too slow", "the peer's own fault")]
    assert places == sorted(places)
    assert "3 of 4 cases did not pass." in Page(section(html, "summary")).text


def test_every_metric_of_a_row_lands_in_the_table() -> None:
    rows = [
        row(metric="ms", value=12.34),
        row(metric="ratio_to.flex", value=1.75),
        row(metric="ratio_to.nested", value=0.91),
        row(metric="determinism", value=77.0, unit="bits"),
        row(metric="max_error", value=3.25e-7),
        row(metric="ms", value=98.76),  # twice the same metric: the second one is not lost
    ]
    text = Page(section(render(document(rows)), "results")).text
    for expected in (
        "12.3, 98.8",
        "× flex",
        "1.75",
        "× nested",
        "0.910",
        "determinism",
        "77.0 bits",
        "3.25e-07",
    ):
        assert expected in text, expected


def harmless(page: Page) -> bool:
    """Whether the page holds its own two scripts and none of a document's."""
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    return scripts == [{"type": "application/json", "id": "commands"}, {}] and json.loads(page.scripts[0]) is not None


@pytest.mark.parametrize("place", ["suite", "case", "impl", "direction", "metric", "reason", "unit"])
def test_texts_of_rows_stay_text(place: str) -> None:
    rows = [*timed("torch", 10.0, 0.1, 5.0, **({place: NASTY} if place not in ("impl", "metric", "unit") else {}))]
    rows.append(row(**({"impl": "x", "metric": "y", "value": 1.0} | {place: NASTY})))
    page = Page(render(document(rows)))
    assert harmless(page)
    assert NASTY in page.text


def test_texts_outside_the_rows_stay_text() -> None:
    doc = document(timed("torch", 10.0, 0.1, 5.0))
    doc.environment = {NASTY: NASTY, "cpu": NASTY}
    doc.request = {"argv": [NASTY]}
    doc.fixtures = {NASTY: doc.fixtures["cpu_self"] | {"source": NASTY}}
    doc.ceilings = {"tflops": {NASTY: 0.5}, "gbps": 20.0}
    page = Page(render(doc, title=NASTY))
    assert harmless(page)
    assert page.text.count(NASTY) >= 6


def test_nothing_is_fetched_from_outside() -> None:
    html = render(document(timed("torch", 10.0, 0.1, 5.0)))
    page = Page(html)
    assert harmless(page)
    for tag, attrs in page.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form")
        for name, value in attrs.items():
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href"):
                # The empty icon keeps a browser from asking a server for one.
                assert value and (value.startswith("#") or (tag == "link" and value == "data:,"))
    assert not re.search(r"url\(|@import|https?:", html)


def test_the_content_policy_allows_the_page_s_script_alone() -> None:
    page = Page(render(document([])))
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert policy and f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy


def test_plots_are_named_and_described() -> None:
    page = Page(render(document(timed("torch", 10.0, 0.1, 5.0) + timed("flex", 20.0, 0.05, 2.5))))
    images = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(images) == 4  # two bars, roofline, one histogram: queries and keys have the same lengths
    assert all(attrs.get("role") == "img" for attrs in images)
    tags = [tag for tag, _ in page.tags]
    assert all(tags[at + 1] == "title" for at, tag in enumerate(tags) if tag == "svg")
    assert tags.count("desc") == 2
    assert tags.count("caption") == tags.count("table") > 3


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
    assert html.count(reason) >= 2 and re.search(r"<summary[^>]*>Traceback", html)


def test_thousands_of_rows_are_quick() -> None:
    rows = [one for k in range(1500) for one in timed("torch", 10.0 + k, 0.1, 5.0, case=f"case_{k}")]
    began = time.monotonic()
    html = render(document(rows))
    assert "4,500 rows" in html and "case_1499" in html
    assert len(html) < 3e6 and time.monotonic() - began < 10


def test_report_is_written_whole(tmp_path) -> None:
    path = write_report(document([row(value=1.0)]), tmp_path / "new" / "report.html")
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_broken_histogram_names_the_place() -> None:
    doc = document([])
    doc.fixtures["cpu_self"]["k"] = {"histogram": {"edges": [0, 1], "counts": [1, 2, 3]}}
    with pytest.raises(RequestError, match=r"fixtures\.cpu_self\.k\.histogram: .*2 edges for 3 counts.*accepted"):
        render(doc)


def test_whiskers_of_work_per_second_turn_the_times_around() -> None:
    rows = timed("torch", 10.0, 0.1, 5.0)
    times = summarize(rows[0].samples)
    fast, slow = times.low, times.high
    assert fast < 10.0 < slow
    html = render(document([*rows, row(impl="flex", status="skipped", reason="no compiler")]))
    tip = next(t for t in re.findall(r"<title>(torch: [^<]*)</title>", html))
    # 1 GFLOP is done in 10 ms at 0.1 TFLOP/s, so GFLOP/s = 1000 / ms.
    assert tip == f"torch: 100 GFLOP/s, median within {svg.number(1000 / slow)} to {svg.number(1000 / fast)}"


def test_intensity_is_work_over_traffic() -> None:
    # 0.1 TFLOP/s at 5 GB/s is 20 FLOP a byte.
    assert "cpu_self_d64 torch forward: 100 GFLOP/s at 20 FLOP/byte" in render(document(timed("torch", 10.0, 0.1, 5.0)))


# ---- the head


def test_the_head_says_what_was_run_and_on_what() -> None:
    doc = document([row(value=1.0)])
    doc.environment |= {"torch": "2.13.0", "git_commit": "abcdef0123456789", "git_dirty": True, "gpu": "NVIDIA H200"}
    doc.request["argv"] = ["run", "suites/throughput", "-k", "not cpu_"]
    text = Page(section(render(doc), "summary")).text
    for said in (
        "The case passed. 1 passed 0 failed 0 errored 0 skipped",
        "gem run suites/throughput -k 'not cpu_'",
        "NVIDIA H200 torch 2.13.0 commit abcdef012345 with uncommitted changes 2026-11-29 10:00:00",
    ):
        assert said in text, said
    doc.environment["git_dirty"] = False
    assert "commit abcdef012345, clean" in Page(render(doc)).text
    doc.environment["git_dirty"] = None  # not known
    assert "uncommitted" not in Page(section(render(doc), "summary")).text


def test_an_interrupted_run_says_so() -> None:
    doc = document([row(value=1.0)])
    assert "nterrupted" not in Page(section(render(doc), "summary")).text
    doc.request["interrupted"] = True
    assert "Interrupted. The case passed." in Page(section(render(doc), "summary")).text


def test_peers_are_counted_as_beaten_level_or_lost_to() -> None:
    def raced(case: str, own: float, peer: float, ratio: float) -> list[Row]:
        # Timings within 5 %: apart by more, their intervals do not meet.
        mine, theirs = timed("torch", own, 1.0, 1.0, case=case), timed("flex", peer, 1.0, 1.0, case=case)
        return [*mine, *theirs, row(case=case, metric="ratio_to.flex", value=ratio, better="higher")]

    rows = [*raced("won", 10.0, 20.0, 2.0), *raced("lost", 20.0, 10.0, 0.5), *raced("even", 10.0, 10.1, 1.01)]
    rows.append(row(case="none", metric="ratio_to.flex", status="skipped", reason="no ratio"))
    html = render(document(rows))
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", section(html, "record").split("</thead>")[1])
    assert cells[:4] == ["jagged_attention", "torch", "forward", "flex"]
    mean = number((2.0 * 0.5 * 1.01) ** (1 / 3))
    assert cells[4:] == ["1", "1", "1", "1", mean, "0.500", "lost", "2.00", "won"]
    said = Page(section(html, "summary")).text
    assert "Faster than the peer in 1 of 3 comparisons, level in 1, slower in 1" in said
    assert "the worst is jagged_attention lost torch forward against flex, 0.500×." in said


def test_a_resumed_run_says_what_it_kept() -> None:
    doc = document([row(value=1.0)])
    doc.request["resumed"] = [{"time": "2026-11-29T09:00:00", "cases": ["a", "b"]}]
    page = Page(render(doc))
    assert "2 cases kept from an earlier, unfinished run" in page.text
    assert "resumed.1.cases a b" in page.text and "{" not in page.text


# ---- several documents


def test_several_documents_keep_their_names() -> None:
    first, second = document(timed("torch", 10.0, 0.1, 5.0)), document([row(status="error", reason="crashed")])
    second.environment |= {"cpu": "Other CPU"}
    html = render([("old", first), ("new", second)])
    page = Page(html)
    assert "gem report: 2 runs on Test CPU and Other CPU" in page.text
    heads = re.findall(r"<h2>(.*?)</h2>", section(html, "summary"))
    assert heads == ["new", "old"]  # what went wrong is first
    table = section(html, "results")
    assert "<td>old</td>" in table and "<td>new</td>" in table
    assert "old: jagged_attention cpu_self_d64" in page.scripts[0]
    assert "4 rows" in page.text


def test_lengths_that_runs_share_are_drawn_once() -> None:
    first, second, third = (document([row(value=1.0)]) for _ in range(3))
    third.fixtures["cpu_self"] = third.fixtures["cpu_self"] | {"source": "drawn by seed 2"}
    html = section(render([("a", first), ("b", second), ("c", third)]), "fixtures")
    assert html.count("<figure") == 2
    assert "drawn by seed 1. a, b</p>" in html and "drawn by seed 2. c</p>" in html


def test_names_of_runs_are_as_short_as_keeps_them_apart() -> None:
    paths = [Path("ci/h200/throughput.json"), Path("ci/cpu/throughput.json"), Path("ci/cpu/gdpa.json")]
    assert run_names(paths) == ["h200/throughput", "cpu/throughput", "gdpa"]
    assert run_names([Path("a.json"), Path("a.json")]) == ["a", "a (2)"]
    assert run_names([Path("r.json"), Path("r.txt"), Path("s.json")]) == ["r.json", "r.txt", "s.json"]
    assert run_names([Path("x/r.json"), Path("y/r.json"), Path("y/r.txt")]) == ["x/r.json", "y/r.json", "r.txt"]
    again = [Path(f"{name}.json") for name in ("a", "a", "a (2)", "a")]
    assert run_names(again) == ["a", "a (2)", "a (2) (2)", "a (3)"]


def test_no_document_is_no_crash() -> None:
    assert "No document was given." in Page(render([])).text


@pytest.mark.parametrize(
    "suite, id",
    [("suites/claims.toml", "claim"), ("suites/scaling/x.toml", "scaling"), ("suites/ablation/x.toml", "ablation"),
     ("suites/quality/x.toml", "quality"), ("mine/ablation.toml", "ablation"),
     ("suites/throughput/gdpa_ablation.toml", "ablation")],
)  # fmt: skip
def test_sections_appear_with_their_documents(suite: str, id: str) -> None:
    html = render(document([row(suite=suite, case=f"c{k}", direction="", metric="qps", value=1.0 + k) for k in (1, 2)]))
    assert f'<a href="#{id}">' in html and f"Metrics of {suite}" in section(html, id)
    assert len(re.findall('class="strip"', section(html, id))) == 2  # bars of what they measure
    assert not re.search('<section id="(claim|scaling|ablation|quality)"', render(document([row(value=1.0)])))
