"""Tables of README and docs come from committed documents; a page that differs from them is stale."""

from pathlib import Path

import pytest
from result_rows import RACE

from gem.errors import RequestError
from gem.harness.markdown import fill, main, render_markdown
from gem.harness.results import Document, Row, write_document

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def row(**given) -> Row:
    fields = {"suite": "s/throughput/gdpa.toml", "case": "one", "impl": "torch", "direction": "forward", "metric": "ms"}
    return Row.model_validate({**fields, "value": 1.0, "status": "pass", **given})


ROWS = [
    row(value=2.0),
    row(metric="tflops", value=0.05),
    row(metric="ratio_to.flex", value=1.5),
    row(metric="ratio_to.nested", value=None, status="skipped", reason="no ratio: nested errored"),
    row(impl="flex", value=3.0),
    row(impl="nested", value=None, status="error", reason="killed by SIGSEGV"),
    row(case="two", impl="", direction="", metric="", value=None, status="skipped", reason="needs cuda"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_up_to_date(page):
    assert fill(page) == page.read_text(encoding="utf-8"), f"python -m gem.harness.markdown {page.name}"


def test_nothing_is_left_out():
    text = render_markdown(Document(rows=ROWS))
    assert "| gdpa one | gem torch fwd | 2.00 | 50.0 |  | 1.50* | – | right |" in text
    assert "the peer was timed fewer than 6 times" in text
    assert "- nested error: killed by SIGSEGV (gdpa one fwd)" in text
    assert "- skipped: needs cuda (gdpa two)" in text


def test_measured_cases_are_a_table_of_their_own():
    text = render_markdown(Document(rows=[*ROWS, *RACE]))
    assert "| gdpa one | gem torch fwd |" in text
    assert "| case |  | qps | input_wait | peak_memory | × flex | check |" in text
    assert "| e2e tiny | gem | 1,200 ± 10 | 1.25 % | 3.00 GiB | 3.00 | fail |" in text
    assert "| e2e tiny | flex | 400 (2 runs) |  |  |  | pass |" in text
    assert "- gem oom: out of memory (e2e gone)" in text
    assert "GFLOP/s" not in render_markdown(Document(rows=RACE))


def test_a_wrong_subject_is_not_called_right():
    text = render_markdown(Document(rows=[row(), row(metric="max_error", value=3.0, status="fail", reason="dq 3")]))
    assert "| fail |" in text and "right" not in text and "- torch fail: dq 3 (gdpa one fwd)" in text


def test_only_what_lies_between_the_marks_is_replaced(tmp_path):
    write_document(Document(rows=ROWS), tmp_path / "r.json")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: r.json -->\nold\n<!-- /table -->\nafter\n")
    main([str(page)])
    text = page.read_text()
    assert text.startswith("before\n<!-- table: r.json -->\n") and text.endswith("<!-- /table -->\nafter\n")
    assert "old" not in text and "gdpa one" in text
    with pytest.raises(RequestError, match="no page"):
        main([])


def test_an_expression_takes_some_cases(tmp_path):
    write_document(Document(rows=ROWS), tmp_path / "doc.json")
    page = tmp_path / "page.md"
    page.write_text('<!-- table: doc.json -k "two" -->\nold\n<!-- /table -->\nafter\n')
    main([str(page)])
    text = page.read_text()
    assert "- skipped: needs cuda (gdpa two)" in text and "gdpa one" not in text and "old" not in text
    assert text.startswith('<!-- table: doc.json -k "two" -->\n') and text.endswith("<!-- /table -->\nafter\n")
    page.write_text('<!-- table: doc.json -k "three" -->\n<!-- /table -->\n')
    with pytest.raises(RequestError, match=r"-k 'three' has no row of doc\.json"):
        fill(page)
