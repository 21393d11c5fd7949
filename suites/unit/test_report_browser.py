"""The report in a real browser: it sorts, filters, copies, restores what a link says; on a phone, in both themes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
from result_rows import RACE, ROWS
from test_report import document, row, timed

from gem.harness.report import write_report
from gem.harness.results import Document, WaterfallPart

LIMIT_BYTES = 3_000_000


def mixed() -> Document:
    """Every kind of thing that a report shows."""
    rows = [
        *timed("torch", 10.0, 0.1, 5.0, case="cpu_self_d64"),
        *timed("flex", 20.0, 0.05, 2.5, case="cpu_self_d64"),
        row(metric="ratio_to.flex", value=2.0, better="higher"),
        row(metric="max_error", value=2.5e-7),
        *timed("torch", 3.0, 0.3, 9.0, case="cpu_cross_d64", direction="backward"),
        row(case="cpu_cross_d64", impl="flex", direction="backward", status="oom", reason="asked for 3 TiB"),
        row(case="cpu_bad_d64", metric="max_error", value=0.5, status="fail", reason="max_error 0.5 > 0.01"),
        row(case="gone", impl="", direction="", metric="", status="skipped", reason="needs cuda"),
        *RACE,
        row(suite="suites/scaling/bbs.toml", case="a", impl="gem", direction="", metric="share_closed", value=0.5),
        row(suite="suites/scaling/bbs.toml", case="b", impl="gem", direction="", metric="share_closed", value=0.9),
    ]
    made = document(rows)
    made.request["argv"] = ["run", "suites/throughput", "--budget", "2", "--json", "x.json"]
    parts = [WaterfallPart(part="tower", ms=6.0, of="model"), WaterfallPart(part="rest", ms=-1.0, of="rest")]
    return made.model_copy(update={"waterfalls": {"suites/throughput/e2e.toml::tiny/gem": parts}})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(mixed(), tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture
def page(file: Path) -> Iterator[Any]:
    with browser.open_page(file) as opened:
        yield opened
        assert browser.errors(opened) == []
        assert browser.requests(opened) == [file.as_uri()]


def column(page: Any, table: str, at: int) -> list[str]:
    return page.locator(f"#{table} tbody tr:not([hidden]) > :nth-child({at + 1})").all_text_contents()


def overflow(page: Any) -> int:
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


# ---- sort


def test_a_click_on_a_head_sorts(page: Any) -> None:
    heads = page.locator("#results-1 thead th").all_text_contents()
    at = heads.index("ms")
    before = column(page, "results-1", at)
    head = page.locator("#results-1 thead th").nth(at)
    assert head.get_attribute("aria-sort") == "none"
    head.locator("button").dispatch_event("click")  # by the event: what moves beneath a pointer has a test of its own
    assert head.get_attribute("aria-sort") == "ascending"
    values = column(page, "results-1", at)
    assert [value for value in values if value not in ("", "–", "✕ –")] == ["3.00", "10.0", "20.0"] == values[:3]
    head.locator("button").focus()
    page.keyboard.press("Enter")  # the other way round; what has no value stays last
    assert head.get_attribute("aria-sort") == "descending"
    assert column(page, "results-1", at)[:3] == ["20.0", "10.0", "3.00"]
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "none" and column(page, "results-1", at) == before
    more = page.locator("#results-1 thead th").nth(heads.index("GFLOP/s"))
    more.locator("button").dispatch_event("click")  # of what is better higher the highest comes first
    assert more.get_attribute("aria-sort") == "descending"


def test_five_thousand_lines_are_sorted_at_the_price_of_moving_them(tmp_path: Path) -> None:
    """What the page spends on a core, laying out included, is some 1 time what turning the lines round costs: both are
    as slow on busy cores. A sort whose work grows with the square would cost tens of times that."""
    rows = [row(case=f"case_{k:04}", value=(7919 * k) % 5000 + 0.5, reason="a note") for k in range(5000)]
    file = write_report(document(rows), tmp_path / "many.html")
    assert file.stat().st_size < LIMIT_BYTES
    with browser.open_page(file) as page:
        measure = page.context.new_cdp_session(page)
        measure.send("Performance.enable", {"timeDomain": "threadTicks"})

        def spent(script: str) -> float:
            def until_now() -> float:
                found = measure.send("Performance.getMetrics")["metrics"]
                return next(one["value"] for one in found if one["name"] == "TaskDuration")

            before = until_now()
            page.evaluate(f"() => {{ {script}; document.body.getBoundingClientRect(); }}")
            return until_now() - before

        moved = spent(
            "const body = document.querySelector('#results-1 tbody'); body.append(...[...body.rows].reverse())"
        )
        heads = "[...document.querySelectorAll('#results-1 thead th')]"
        assert spent(f"{heads}.find((head) => head.textContent === 'ms').querySelector('button').click()") < 4 * moved
        values = page.evaluate(
            "[...document.querySelectorAll('#results-1 tbody tr')].map((row) => Number(row.cells[3].dataset.v))"
        )
        assert values == sorted(values) and len(values) == 5000


# ---- filter, and the state in the address


def test_words_and_chips_filter(page: Any) -> None:
    everything = len(column(page, "results-1", 0))
    page.locator("#filter").fill("CROSS -flex")
    assert column(page, "results-1", 0) == ["cpu_cross_d64"] and column(page, "results-1", 1) == ["torch"]
    assert re.fullmatch(r"1 of \d+ lines", page.locator("#found").text_content())
    assert page.locator("#peers .card:visible").count() == 0  # its card has flex in it
    page.locator("#filter").fill("cross")
    assert page.locator("#peers .card:visible .name").all_text_contents() == ["cpu_cross_d64"]
    assert page.locator("#results-2, #throughput-1, #scaling-1").locator("visible=true").count() == 0
    assert page.locator("#scaling h3").is_hidden()
    page.locator("#filter").fill("")
    assert page.locator("#scaling h3").is_visible()
    chip = page.locator('.chip[data-status="oom"]')
    chip.click()
    assert chip.get_attribute("aria-pressed") == "true"
    at = page.locator("#results-1 thead th").all_text_contents().index("status")
    assert column(page, "results-1", at) == ["oom"]
    page.locator('.chip[data-status="fail"]').click()
    assert sorted(column(page, "results-1", at)) == ["fail", "oom"]
    chip.click()
    page.locator('.chip[data-status="fail"]').click()
    assert len(column(page, "results-1", 0)) == everything
    page.locator("#own").click()
    assert "flex" not in column(page, "results-1", 1)


@pytest.mark.parametrize("short, long", [("fwd", "forward"), ("BWD", "backward")])
def test_directions_are_found_as_the_terminal_writes_them(page: Any, short: str, long: str) -> None:
    page.locator("#filter").fill(short)
    at = page.locator("#results-1 thead th").all_text_contents().index("direction")
    assert set(column(page, "results-1", at)) == {long}
    names = page.locator("#peers .card:visible .name").all_text_contents()
    assert ("cpu_cross_d64" in names) == (long == "backward") != ("cpu_self_d64" in names)
    page.locator("#filter").fill(f"-{short}")
    assert long not in column(page, "results-1", at) and len(column(page, "results-1", at)) > 1


def test_where_nothing_matches_a_line_says_what_is_searched(page: Any) -> None:
    nothing = page.locator("#nothing")
    assert nothing.is_hidden()
    page.locator("#filter").fill("cpu_ sideways")
    assert page.locator("#found").text_content().startswith("0 of ")
    assert nothing.is_visible() and "case, contestant, run, direction" in nothing.inner_text()
    page.locator("#filter").fill("cpu_")
    assert nothing.is_hidden()
    page.locator('.chip[data-status="oom"]').click()
    page.locator("#own").click()  # a peer was out of memory
    assert nothing.is_visible() == (page.locator("[id^=results-] tbody tr:visible").count() == 0)


def test_a_link_restores_what_its_sender_saw(file: Path) -> None:
    with browser.open_page(file) as page:
        page.locator("#filter").fill("cpu_ torch")
        page.locator('.chip[data-status="pass"]').click()
        page.locator("#results-1 thead th", has_text="GFLOP/s").locator("button").click()
        page.locator("nav a", has_text="All results").click()
        url = page.url
        seen = column(page, "results-1", 0)
        assert page.evaluate("document.activeElement.textContent") == "All results"
    assert seen == ["cpu_cross_d64", "cpu_self_d64"]
    with browser.open_page(url) as page:
        assert column(page, "results-1", 0) == seen
        assert page.locator("#filter").input_value() == "cpu_ torch"
        assert page.locator('.chip[data-status="pass"]').get_attribute("aria-pressed") == "true"
        sorted_by = page.locator("#results-1 thead th[aria-sort=descending]")
        assert sorted_by.all_text_contents() == ["GFLOP/s"]
        assert page.evaluate("scrollY") > 100
        page.evaluate("location.hash = ''")  # as going back does
        page.wait_for_function("document.querySelector('#filter').value === ''")
        assert len(column(page, "results-1", 0)) > 2
        assert browser.errors(page) == []


STRANGE = [
    "#q=%",
    "#status=x.y&sort=a.1.d,,results-1.99.a&at=nowhere",
    "#<script>",
    "#status=%22]",
    "#%E0%A4%A",
    "#results",
]


def test_a_strange_link_does_no_harm(file: Path) -> None:
    with browser.open_page(file.as_uri() + STRANGE[0]) as page:
        assert page.evaluate("document.documentElement.dataset.ready") == "1"
        for strange in STRANGE[1:]:
            page.evaluate("(hash) => { location.hash = hash }", strange)
            page.wait_for_timeout(20)
        page.wait_for_function("document.activeElement.textContent === 'All results'")
        assert len(column(page, "results-1", 0)) == 6
        assert browser.errors(page) == []


# ---- copy


def told(page: Any) -> None:
    """Wait for the word that something was copied, not for its being shown: after four seconds it no longer is."""
    page.locator("#toast", has_text="Copied").wait_for(state="attached")


def test_a_click_copies_a_number_with_its_command(file: Path) -> None:
    with browser.open_page(file, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.locator("#results-1 td.n", has_text="10.0").first.click()
        told(page)
        text = page.evaluate("navigator.clipboard.readText()")
        command = "gem run suites/throughput/jagged_attention.toml::cpu_self_d64 --budget 2"
        assert text == f"jagged_attention cpu_self_d64 torch forward 10.0 ms ± 4.0 % — {command}"
        assert page.locator("#toast").text_content() == f"Copied: {text}"
        assert page.locator("td.copied").count() == 1


def test_a_key_copies_where_there_is_no_clipboard(file: Path) -> None:
    with browser.open_page(file, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.evaluate("""() => {
            window.real = navigator.clipboard;
            Object.defineProperty(navigator, "clipboard", { value: undefined });
        }""")
        page.locator("#results-1 td.n[tabindex='0']").focus()
        page.keyboard.press("End")  # the notes are the last stop of a line
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        told(page)
        text = page.evaluate("window.real.readText()")
        assert text.startswith("jagged_attention cpu_self_d64 flex forward 50.0 GFLOP/s") and " — gem run " in text
        assert browser.errors(page) == []


def test_where_no_script_may_copy_the_text_is_offered(file: Path) -> None:
    with browser.open_page(file) as page:
        page.evaluate("""() => {
            Object.defineProperty(navigator, "clipboard", { value: undefined });
            document.execCommand = () => false;
        }""")
        page.locator("#results-1 td.n", has_text="10.0").first.click()
        assert "10.0 ms" in page.locator("#toast.shown textarea").input_value()  # until something else is copied
        assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"


def test_a_click_is_for_the_cell_that_it_began_on(page: Any) -> None:
    """Where the page moves between press and release, a browser names what both lie in; of a drag over cells too."""
    texts = page.evaluate("""() => {
        const texts = [], value = { writeText: async (text) => { texts.push(text) } };
        Object.defineProperty(navigator, "clipboard", { value });
        const table = document.querySelector("#results-1");
        const cells = [...table.querySelectorAll("tbody td.n")].filter((cell) => cell.textContent);
        const at = (clientX, clientY) => ({ bubbles: true, detail: 1, clientX, clientY });
        const press = (target, x, y) => target.dispatchEvent(new PointerEvent("pointerdown", at(x, y)));
        const release = (target, x, y) => target.dispatchEvent(new MouseEvent("click", at(x, y)));
        press(cells[0], 50, 50); release(table, 51, 50);  // moved from beneath the pointer
        press(cells[1], 50, 50); release(cells[1], 50, 50);  // as ever
        press(cells[2], 50, 50); release(table, 50, 80);  // a drag
        press(table, 50, 50); release(cells[3], 50, 50);  // moved beneath it
        return [texts, cells.slice(0, 2).map((cell) => cell.textContent)];
    }""")
    copied, shown = texts
    assert len(copied) == 2 and all(number in text for text, number in zip(copied, shown, strict=True))


def test_each_number_of_every_table_can_be_copied(page: Any) -> None:
    page.evaluate("""() => {
        window.texts = [];
        Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => { texts.push(text) } } });
    }""")
    count = page.evaluate("""async () => {
        const cells = [...document.querySelectorAll("tbody td.n")].filter((cell) => cell.textContent);
        for (const cell of cells) { cell.click(); await null; }
        return cells.length;
    }""")
    texts = page.evaluate("window.texts")
    assert len(texts) == count > 60
    for text in texts:
        said, _, command = text.partition(" — ")
        assert said and shlex.split(command)[:2] == ["gem", "run"], text
        assert "undefined" not in text and "  " not in said
    assert any(text.startswith("e2e tiny gem tower 6 ms — gem run suites/throughput/e2e.toml::tiny") for text in texts)


# ---- figures


def test_figures_of_the_page_are_those_of_the_document(file: Path, page: Any) -> None:
    cells = page.evaluate("""() => [...document.querySelectorAll("#results-1 tbody tr")].map((row) => {
        const heads = [...row.closest("table").tHead.rows[0].cells].map((head) => head.textContent);
        return Object.fromEntries([...row.cells].map((cell, at) => [heads[at], cell.dataset.v ?? cell.textContent]));
    })""")
    heads = {"ms": "ms", "tflops": "GFLOP/s", "gbps": "GB/s", "max_error": "max error", "ratio_to.flex": "×\u00a0flex"}
    checked = 0
    for one in mixed().rows:
        if one.metric not in heads or one.suite.endswith("e2e.toml"):
            continue
        found = [
            cell for cell in cells
            if (cell["case"], cell["contestant"], cell["direction"]) == (one.case, one.impl, one.direction)
        ]  # fmt: skip
        assert len(found) == 1
        shown = found[0][heads[one.metric]]
        if one.value is None:
            assert shown == "✕ –"
        else:
            assert float(shown) == pytest.approx(one.value, rel=1e-5)
            checked += 1
    assert checked > 10


def test_the_head_of_all_results_counts_what_is_below_it(page: Any) -> None:
    elsewhere = ("e2e.toml", "bbs.toml")  # in sections of their own
    own = [one for one in mixed().rows if not one.suite.endswith(elsewhere)]
    figures = sum(one.value is not None for one in own)
    lines = {(one.suite, one.case, one.impl, one.direction) for one in own}
    assert page.locator("#results tbody tr").count() == len(lines)
    said = page.locator("#results > p").first.text_content()
    assert said.startswith(f"{figures} figures in {len(lines)} lines, ") and len(own) > figures > len(lines)


def test_no_value_is_shown_as_such(tmp_path: Path) -> None:
    rows = [row(value=float("nan")), row(impl="flex", value=None, status="skipped", reason="no compiler")]
    rows.append(row(impl="nested", value=float("inf")))
    file = write_report(document(rows), tmp_path / "r.html")
    with browser.open_page(file) as page:
        assert sorted(column(page, "results-1", 3)) == ["–", "✕ –", "✕ –"]
        text = page.locator("main").inner_text()
        assert not re.search(
            r"\b(NaN|nan|None|null|undefined|inf|Infinity)\b", text.replace("ms is nan", "").replace("ms is inf", "")
        )
        assert "ms is nan" in text  # why there is none


DOCUMENTS = {
    "empty": Document(),
    "schema 1": Document.model_validate({"schema_version": 1, "rows": [one.model_dump() for one in ROWS]}),
    "race": Document(rows=RACE),
    "interrupted": document([row(value=1.0)]).model_copy(update={"request": {"argv": ["run"], "interrupted": True}}),
    "skipped": document([row(status="skipped", reason="needs cuda")]),
    "no environment": Document(rows=ROWS),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_with_little_in_them_open(tmp_path: Path, name: str) -> None:
    file = write_report(DOCUMENTS[name], tmp_path / "r.html")
    with browser.open_page(file, width=390) as page:
        assert overflow(page) <= 0
        assert page.evaluate("document.documentElement.dataset.ready") == "1"
        assert browser.errors(page) == [] and browser.requests(page) == [file.as_uri()]
        assert ("Interrupted." in page.locator("#summary").inner_text()) == (name == "interrupted")
