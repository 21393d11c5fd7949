"""The head of the report: how each run ended, and what of a strange request or environment can be shown."""

from typing import Any

import pytest
from result_rows import ROWS, row

from gem.harness.report import render
from gem.harness.report_head import run_view
from gem.harness.results import Document, Row

SKIPPED = [row(f"case-{n}", impl="", direction="", metric="", value=None, status="skipped") for n in range(3)]
FAILED = row("bad", value=None, status="fail")


@pytest.mark.parametrize(
    ("rows", "interrupted", "verdict", "kind"),
    [
        ([row()], False, "The case passed.", "good"),
        ([row(), row("two")], False, "All 2 cases passed.", "good"),
        ([row(), *SKIPPED], False, "The case passed, 3 skipped.", "good"),
        ([row(), FAILED], False, "1 of 2 cases did not pass.", "bad"),
        ([FAILED], False, "The case did not pass.", "bad"),
        (SKIPPED, False, "Nothing ran: 3 cases skipped.", "bad"),
        (SKIPPED[:1], False, "Nothing ran: 1 case skipped.", "bad"),
        ([], False, "Nothing was run.", "none"),
        ([row()], True, "Interrupted. The case passed.", "bad"),
        (SKIPPED, True, "Interrupted. Nothing ran: 3 cases skipped.", "bad"),
        ([], True, "Interrupted. Nothing was run.", "bad"),
    ],
)
def test_only_a_whole_run_that_ran_something_and_passed_is_good(
    rows: list[Row], interrupted: bool, verdict: str, kind: str
) -> None:
    document = Document(rows=rows, request={"interrupted": True} if interrupted else {})
    view = run_view(document, "")
    assert (view.verdict, view.verdict_kind, view.interrupted) == (verdict, kind, interrupted)
    page = " ".join(render(document).split())
    assert f'class="verdict {kind}">{verdict}' in page


STRANGE: list[Any] = [3, -1.5, True, "x", "'", [], [3], {}, {"a": 3}, [{"cases": 3}], [{"cases": "abc"}], [[1]]]
ENVIRONMENT = ("time", "git_commit", "git_dirty", "gpu", "gpu_count", "cpu", "cores", "threads", "torch", "busy_cores")
REQUEST = ("argv", "interrupted", "lengths", "batch", "resumed")


@pytest.mark.parametrize(
    ("part", "key"), [("environment", key) for key in ENVIRONMENT] + [("request", key) for key in REQUEST]
)
def test_strange_values_cost_nothing_else(part: str, key: str) -> None:
    """Free-form parts, which the schema says nothing of; the rows are shown with them as without."""
    plain = render(Document(rows=ROWS))
    for value in STRANGE:
        html = render(Document.model_validate({"rows": ROWS, part: {key: value}}))
        assert html.count("<tr") >= plain.count("<tr")


@pytest.mark.parametrize(
    ("resumed", "told"),
    [
        ([{"cases": ["a", "b"]}], "2 cases kept from an earlier, unfinished run"),
        ([{"cases": ["a"]}, {"cases": 3}], "1 case kept from 2 earlier, unfinished runs"),
        ([{"cases": 3}], "cases kept from an earlier, unfinished run"),
        ([3, "abc"], "cases kept from 2 earlier, unfinished runs"),
    ],
)
def test_what_is_known_of_earlier_sessions_is_told(resumed: list[Any], told: str) -> None:
    assert (told, True) in run_view(Document(rows=ROWS, request={"resumed": resumed}), "").facts
