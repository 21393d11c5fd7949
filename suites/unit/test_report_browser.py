"""The report in a real browser: it sorts, filters, copies, restores what a link says; on a phone, in both themes."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
from result_rows import RACE, ROWS
from test_report import NASTY, document, row, timed

from gem.harness.report import render, run_names, write_report
from gem.harness.results import Document, Row, WaterfallPart, read_document

ROOT = Path(__file__).parents[2]
MEASURED = sorted(
    path for path in (ROOT / "ci" / "measured").glob("*/*.json") if "schema_version" in path.read_text()[:200]
)
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
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    values = column(page, "results-1", at)
    assert [value for value in values if value not in ("", "–", "✕ –")] == ["3.00", "10.0", "20.0"] == values[:3]
    head.locator("button").focus()
    page.keyboard.press("Enter")  # the other way round; what has no value stays last
    assert head.get_attribute("aria-sort") == "descending"
    assert column(page, "results-1", at)[:3] == ["20.0", "10.0", "3.00"]
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "none" and column(page, "results-1", at) == before
    more = page.locator("#results-1 thead th").nth(heads.index("TFLOP/s"))
    more.locator("button").click()  # of what is better higher the highest comes first
    assert more.get_attribute("aria-sort") == "descending"


def test_five_thousand_lines_are_sorted_within_a_second(tmp_path: Path) -> None:
    rows = [row(case=f"case_{k:04}", value=(7919 * k) % 5000 + 0.5, reason="a note") for k in range(5000)]
    file = write_report(document(rows), tmp_path / "many.html")
    assert file.stat().st_size < LIMIT_BYTES
    with browser.open_page(file) as page:
        # Laid out, too; the quickest of four clicks, since a test shares its cores.
        took = page.evaluate("""() => {
            const head = [...document.querySelectorAll("#results-1 thead th")].find((th) => th.textContent === "ms");
            return Math.min(...[1, 2, 3, 4].map(() => {
                const began = performance.now();
                head.querySelector("button").click();
                document.body.getBoundingClientRect();
                return performance.now() - began;
            }));
        }""")
        assert page.locator("#results-1 thead th[aria-sort=ascending]").count() == 1
        values = [float(text.replace(",", "")) for text in column(page, "results-1", 4)]
        assert values == sorted(values) and len(values) == 5000
        assert took < 1000
        opened = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        assert opened < 5000


# ---- filter, and the state in the address


def test_words_and_chips_filter(page: Any) -> None:
    everything = len(column(page, "results-1", 0))
    page.locator("#filter").fill("CROSS -flex")
    assert column(page, "results-1", 0) == ["cpu_cross_d64"] and column(page, "results-1", 1) == ["torch"]
    assert re.fullmatch(r"1 of \d+ lines", page.locator("#found").text_content())
    assert page.locator("#peers .card:visible").count() == 0  # its card has flex in it
    page.locator("#filter").fill("cross")
    assert page.locator("#peers .card:visible h4").all_text_contents() == ["cpu_cross_d64"]
    page.locator("#filter").fill("")
    chip = page.locator('.chip[data-status="oom"]')
    chip.click()
    assert chip.get_attribute("aria-pressed") == "true"
    assert column(page, "results-1", 3) == ["oom"]
    page.locator('.chip[data-status="fail"]').click()
    assert sorted(column(page, "results-1", 3)) == ["fail", "oom"]
    chip.click()
    page.locator('.chip[data-status="fail"]').click()
    assert len(column(page, "results-1", 0)) == everything
    page.locator("#own").click()
    assert "flex" not in column(page, "results-1", 1)


def test_a_link_restores_what_its_sender_saw(file: Path) -> None:
    with browser.open_page(file) as page:
        page.locator("#filter").fill("cpu_ torch")
        page.locator('.chip[data-status="pass"]').click()
        page.locator("#results-1 thead th", has_text="TFLOP/s").locator("button").click()
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
        assert sorted_by.all_text_contents() == ["TFLOP/s"]
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


def test_a_click_copies_a_number_with_its_command(file: Path) -> None:
    with browser.open_page(file, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.locator("#results-1 td.n", has_text="10.0").first.click()
        page.locator("#toast.shown").wait_for()
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
        page.locator("#toast.shown").wait_for()
        text = page.evaluate("window.real.readText()")
        assert text.startswith("jagged_attention cpu_self_d64 flex forward 0.0500 TFLOP/s") and " — gem run " in text
        assert browser.errors(page) == []


def test_where_no_script_may_copy_the_text_is_offered(file: Path) -> None:
    with browser.open_page(file) as page:
        page.evaluate("""() => {
            Object.defineProperty(navigator, "clipboard", { value: undefined });
            document.execCommand = () => false;
        }""")
        page.locator("#results-1 td.n", has_text="10.0").first.click()
        assert "10.0 ms" in page.locator("#toast textarea").input_value()
        assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"


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
    heads = {"ms": "ms", "tflops": "TFLOP/s", "gbps": "GB/s", "max_error": "max error", "ratio_to.flex": "×\u00a0flex"}
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


def test_no_value_is_shown_as_such(tmp_path: Path) -> None:
    rows = [row(value=float("nan")), row(impl="flex", value=None, status="skipped", reason="no compiler")]
    rows.append(row(impl="nested", value=float("inf")))
    file = write_report(document(rows), tmp_path / "r.html")
    with browser.open_page(file) as page:
        assert sorted(column(page, "results-1", 4)) == ["–", "✕ –", "✕ –"]
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


# ---- hostile texts


HOSTILE = [
    NASTY,
    "</script><script>window.hit = 1</script>",
    "--><img src=x onerror='window.hit = 1'>",
    "</style></table><svg onload=window.hit=1>",
    "${window.hit = 1} {{ 7 * 7 }} {% raw %}",
    "\u202eevil\u202c \u0000\u2028\u2029 é 漢字 🙂 " + "x" * 10_000,
    "javascript:window.hit=1",
    "\"'><b onmouseover=window.hit=1>",
    "y" * 10_000,
]


def hostile(text: str) -> Document:
    """A document with the text in every place that takes one."""
    fields: list[dict[str, Any]] = [{name: text} for name in ("suite", "case", "impl", "direction", "metric", "unit")]
    rows: list[Row] = [row(**({"value": 1.5, "reason": text} | one)) for one in fields]
    rows += [row(impl="flex", status="error", reason=text), row(impl="nested", status="skipped", reason=text)]
    rows += timed("torch", 3.0, 0.1, 2.0, case=text)
    doc = document(rows)
    doc.environment = {text: text, "cpu": text, "git_commit": text, "time": text}
    doc.request = {"argv": ["run", text, "--lengths", text], "lengths": text}
    doc.fixtures = {text: doc.fixtures["cpu_self"] | {"source": text}}
    return doc


@pytest.mark.parametrize("several", [False, True])
def test_hostile_texts_are_harmless(tmp_path: Path, several: bool) -> None:
    file = tmp_path / "r.html"
    # Together, and the longest alone: its name is the page's heading then.
    write_report([(text, hostile(text)) for text in HOSTILE] if several else hostile(HOSTILE[-1]), file)
    with browser.open_page(file, width=390) as page:
        for text in HOSTILE:
            page.locator("#filter").fill(text[:40])
        page.locator("#filter").fill("")
        page.locator("td.notes[data-t]").first.click()
        page.locator("#results-1 thead button").first.click()
        assert page.evaluate("window.hit") is None
        assert overflow(page) <= 0
        assert browser.errors(page) == [] and browser.requests(page) == [file.as_uri()]
        assert page.locator("script").count() == 2
        if several:
            assert HOSTILE[1] in page.locator("#problems").text_content()


# ---- looks


CONTRAST = """() => {
    const rgb = (text) => { const c = document.createElement("canvas").getContext("2d"); c.fillStyle = text;
        c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data]; };
    const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map((v) => v / 255)
        .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
    const found = new Map();
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        const box = element.getBoundingClientRect();
        if (!own || !box.width || element.closest("#toast, script, title, desc, .unseen, .skip, caption")) continue;
        const style = getComputedStyle(element);
        const ink = rgb(element.closest("svg") ? style.fill : style.color);
        let ground = element;
        while (ground && rgb(getComputedStyle(ground).backgroundColor)[3] < 255) ground = ground.parentElement;
        const under = rgb(ground ? getComputedStyle(ground).backgroundColor : "white");
        const [a, b] = [light(ink), light(under)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        const name = `${element.tagName}.${element.getAttribute("class") || ""}`;
        if (!found.has(name) || found.get(name) > ratio) found.set(name, ratio);
    }
    return Object.fromEntries(found);
}"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_stands_out_from_its_ground(file: Path, dark: bool) -> None:
    with browser.open_page(file, dark=dark) as page:
        page.locator("#tools").hover()
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        ratios = page.evaluate(CONTRAST)
        assert len(ratios) > 40
        assert {name: round(ratio, 2) for name, ratio in ratios.items() if ratio < 4.5} == {}
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") != dark


def test_the_theme_can_be_switched_and_is_forgotten(file: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with browser.open_page(file, dark=True) as page:
        dark = page.evaluate(ground)
        page.locator("#theme").click()
        assert page.evaluate(ground) == "rgb(255, 255, 255)" != dark
        assert page.locator("#theme").text_content() == "Dark"
        page.reload()
        assert page.evaluate(ground) == dark
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_the_page_is_as_wide_as_its_window(file: Path) -> None:
    with browser.open_page(file, width=390) as page:
        for width in (390, 768, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert overflow(page) <= 0
            page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
            assert overflow(page) <= 0
            # What is wider scrolls in its box.
            stray = page.evaluate("""() => [...document.querySelectorAll("table, svg")]
                .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".box")).length""")
            assert stray == 0


def test_focus_shows_and_motion_is_reduced(file: Path) -> None:
    with browser.open_page(file, reduced_motion="reduce") as page:
        for _ in range(12):
            page.keyboard.press("Tab")
            style = page.evaluate("""() => { const s = getComputedStyle(document.activeElement);
                return [s.outlineStyle, parseFloat(s.outlineWidth)]; }""")
            assert style[0] != "none" and style[1] >= 2
        assert page.evaluate("getComputedStyle(document.querySelector('#toast')).transitionDuration") == "0s"


def test_without_scripts_all_is_there(file: Path) -> None:
    with browser.open_page(file, java_script_enabled=False) as page:
        assert page.locator("#tools").is_hidden() and page.locator("#theme").is_hidden()
        assert page.locator("#results-1 tbody tr").count() == 6
        assert "max_error 0.5 > 0.01" in page.locator("#problems").inner_text()


def test_paper_shows_what_is_folded_on_the_screen(file: Path) -> None:
    with browser.open_page(file, dark=True) as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.locator("#tools").is_hidden()
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator("details:not([open])").count() == 0


# ---- the committed documents


def test_all_that_is_measured_fits_in_one_report(tmp_path: Path) -> None:
    assert len(MEASURED) > 4
    found = [read_document(path) for path in MEASURED]
    file = tmp_path / "all.html"
    file.write_text(render(list(zip(run_names(MEASURED), found, strict=True))), encoding="utf-8")
    assert file.stat().st_size < LIMIT_BYTES
    with browser.open_page(file, width=390) as page:
        assert overflow(page) <= 0
        assert browser.errors(page) == [] and browser.requests(page) == [file.as_uri()]
        said = page.evaluate("document.querySelector('#commands').textContent")
        assert len(json.loads(said)) > 100
        lines = {(k, one.suite, one.case, one.direction, one.impl) for k, doc in enumerate(found) for one in doc.rows}
        assert page.locator("[id^=results-] tbody tr").count() + page.locator(
            "[id^=throughput-] tbody tr"
        ).count() == len(lines)
