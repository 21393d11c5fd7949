"""The tables that a run prints: what is in them, what is said once, what is marked; and the progress beside them."""

import io

import pytest
from result_rows import RACE, ROWS, row
from rich.console import Console

from gem.harness.events import Event
from gem.harness.progress import LiveProgress, ReadProgress
from gem.harness.results import Document, Row
from gem.harness.table import Line, lines_of, machine_text, number, quantity, results_tables, summarise


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (12.3456, "12.3"),
        (1.5, "1.50"),
        (0.0012345, "0.00123"),
        (0.00012345, "1.23e-04"),
        (999.6, "1,000"),
        (12345.6, "12,300"),
        (-0.5, "-0.500"),
        (2.5e9, "2.50e+09"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("ranks", 1.0, "1"), ("ranks", 128.0, "128"), ("bytes_sent", 0.0, "0 B"), ("bytes_sent", 1000.0, "1,000 B"),
        ("bytes_sent", 1536.0, "1.50 KiB"), ("memory_tables", 3 * 2**20, "3.00 MiB"),
        ("peak_memory", 2**31, "2.00 GiB"), ("input_wait", 0.25, "25.0 %"), ("cpu_ms", 1.0, "1.00"),
        ("bytes_sent", None, ""),
    ],
)  # fmt: skip
def test_quantities_are_in_their_unit(metric: str, value: float | None, text: str) -> None:
    assert quantity(metric, value) == text


def test_no_row_is_left_out_of_the_table() -> None:
    lines = lines_of(ROWS)
    assert [(line.impl, line.direction, line.status) for line in lines] == [
        ("torch", "forward", "pass"),
        ("flex", "forward", "pass"),
        ("flex", "backward", "oom"),
        ("", "", "skipped"),
    ]
    mixed = Line("s", "a", "torch", "forward")
    for one in (
        row(reason="noisy"),
        row(metric="roofline", status="fail", reason="expected >= 0.9"),
        row(reason="noisy"),
    ):
        mixed.add(one)
    assert mixed.status == "fail" and mixed.reasons == ["noisy", "expected >= 0.9"]


def test_why_a_peer_has_no_ratio_is_told_once() -> None:
    absent = row(metric="ratio_to.flex", value=None, status="skipped", reason="no ratio: flex skipped: no compiler")
    peer = row(impl="flex", value=None, status="skipped", reason="no compiler")
    subject, flex = lines_of([row(), absent, peer])
    assert (subject.reasons, subject.status, flex.reasons) == ([], "pass", ["no compiler"])
    (alone,) = lines_of([row(), absent])
    assert alone.reasons == ["no ratio: flex skipped: no compiler"]
    missed = absent.model_copy(update={"status": "fail"})  # an expected ratio that has no value is the subject's matter
    assert lines_of([row(), missed, peer])[0].reasons == ["no ratio: flex skipped: no compiler"]


def shown(rows: list[Row], verbose: bool = False) -> str:
    out = io.StringIO()
    for part in results_tables(Document(rows=rows), verbose):
        Console(file=out, width=200).print(part)
    return out.getvalue()


def test_a_metric_of_its_own_gets_a_column() -> None:
    text = shown([row(metric="qps", value=1234.0)])
    assert "qps" in text and "1,230" in text


def test_measured_cases_have_no_direction_and_a_column_a_metric() -> None:
    text = shown(RACE)
    assert "dir" not in text and "max error" not in text
    for cell in ("1,200 ± 10", "400 (2 runs)", "1.25 %", "3.00 GiB", "× flex", "3.00", "batch 64", "out of memory"):
        assert cell in text, cell
    assert "right within" not in shown([RACE[0].model_copy(update={"metric": "max_error", "samples": []})])


def test_passing_checks_are_one_line_and_failing_ones_are_all_there() -> None:
    right = [row(case=f"c{i}", metric="max_error", value=1e-7, reason="out 1e-07, allowed 4e-06") for i in range(3)]
    wrong = row(case="bad", metric="max_error", value=2.0, status="fail", reason="dk 2, allowed 4e-06")
    text = shown([*right, wrong])
    assert "3 cases right" in text and "c1" not in text
    assert "bad" in text and "dk 2, allowed 4e-06" in text
    assert "c1" in shown([*right, wrong], verbose=True)
    timed = shown([right[0], row(case="c0", value=2.0, reason="few samples")])
    assert "c0" in timed and "few samples" in timed and "allowed" not in timed


def test_small_rates_are_shown_in_gigaflops() -> None:
    assert "GFLOP/s" in shown([row(), row(metric="tflops", value=0.117)]) and "117" in shown(
        [row(), row(metric="tflops", value=0.117)]
    )
    assert "TFLOP/s" in shown([row(), row(metric="tflops", value=0.117), row(case="b", metric="tflops", value=12.0)])


def test_a_failing_peer_is_counted_but_not_as_the_case() -> None:
    summary = summarise(Document(rows=[row(), row(impl="flex", status="fail")]))
    assert (summary.passed, summary.failed, summary.peers_in_trouble, summary.exit_code) == (1, 0, 1, 0)


def test_progress_on_a_terminal_is_a_bar_and_elsewhere_lines() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=120, markup=False, highlight=False)
        with LiveProgress(2, console) as progress:
            progress(Event("case_started", "s::a", 0, 2))
            progress(Event("step", "s::a", 0, 2, "timing torch 3/9 [x]"))
            if terminal:
                assert progress._bar is not None
                progress._bar.refresh()
            progress(Event("case_finished", "s::a", 0, 2, rows=(row(),)))
            progress(Event("case_finished", "s::b", 1, 2, rows=(row(status="fail", reason="[dq] too far off"),)))
        text = out.getvalue()
        assert "s::b" in text and "[dq] too far off" in text
        assert ("timing torch 3/9 [x]" in text) is terminal
        assert ("[1/2] s::a pass" in text) is not terminal


def test_reading_a_large_file_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        out = io.StringIO()
        now = [0.0]
        monkeypatch.setattr("gem.harness.progress.time.monotonic", lambda now=now: now[0])
        with ReadProgress("log.csv", Console(file=out, force_terminal=terminal, width=120)) as progress:
            progress(10, 100, 7)
            assert terminal or not out.getvalue()  # a small file is read before a line is due
            now[0] = ReadProgress.EVERY_S
            progress(50, 100, 1234)
            if progress._bar:
                progress._bar.refresh()
        assert "reading log.csv" in out.getvalue() and "1,234 rows" in out.getvalue()
        assert terminal or "50%" in out.getvalue()


def test_other_work_on_the_cores_stands_above_the_table():
    quiet, busy = ({"device": "cpu", "cpu": "Z80", "threads": 2, "cores": 2, "busy_cores": n} for n in (0.05, 0.98))
    assert "busy" not in machine_text(Document(environment=quiet))
    assert "other work kept 0.980 of 2 cores busy" in machine_text(Document(environment=busy))


def test_a_run_that_was_gone_on_with_says_so():
    request = {"resumed": [{"time": "2026-01-01T00:00:00Z", "host": "h", "cases": ["a"]}]}
    assert "in 2 sessions (--resume)" in machine_text(Document(request=request))
    assert "sessions" not in machine_text(Document())


@pytest.mark.parametrize("width", [200, 120, 100, 80, 60])
def test_names_and_numbers_are_whole_at_any_width(width: int) -> None:
    rows = [one.model_copy(update={"case": f"a_case_of_a_long_name_{one.case}"}) for one in [*ROWS, *RACE]]
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False)
    for part in results_tables(Document(rows=rows), console=console):
        console.print(part)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for whole in (
        "a_case_of_a_long_name_one",
        "1.00 ± 0.20",
        "81",
        "2.50",
        "out of memory: [malloc] failed",
        "needs cuda",
    ):
        assert whole in text, whole
    for whole in ("a_case_of_a_long_name_tiny", "1,200 ± 10", "3.00 GiB", "400 (2 runs)", "expected >= 4, is 3"):
        assert whole in text, whole
