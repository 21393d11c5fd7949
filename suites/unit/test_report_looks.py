"""The report's looks in a real browser: contrast, phone, paper, keys; no text of a document is taken for markup."""

import base64
import json
from pathlib import Path
from typing import Any

import browser
import pytest
from test_report import NASTY, document, row, timed
from test_report_browser import LIMIT_BYTES, mixed, overflow

from gem.harness.report import render, run_names, write_report
from gem.harness.results import Document, Row, read_document

ROOT = Path(__file__).parents[2]
MEASURED = sorted(
    path for path in (ROOT / "ci" / "measured").glob("*/*.json") if "schema_version" in path.read_text()[:200]
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(mixed(), tmp_path_factory.mktemp("report") / "report.html")


# ---- hostile texts


HOSTILE = [
    NASTY,
    "</script><script>window.hit = 1</script>",
    "</script /><!--<script ",
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


@pytest.mark.parametrize("several", [False, True])
def test_a_phone_shows_peers_and_numbers_without_scrolling(tmp_path: Path, several: bool) -> None:
    runs = [("old", mixed()), ("new", mixed())] if several else mixed()
    file = write_report(runs, tmp_path / "r.html")
    with browser.open_page(file, width=390) as page:
        places = page.evaluate(
            """(id) => [...document.querySelectorAll(`#${id} thead th`)].map((head, at) => {
            const cell = document.querySelector(`#${id} tbody tr`).cells[at].getBoundingClientRect();
            return [head.textContent, cell.left, cell.right]; })""",
            "record-table",
        )
        seen = [head for head, left, right in sorted(places, key=lambda one: one[1]) if 0 < right <= 390]
        assert seen[:3] == ["peer", "mean", "worst"]
        heads = page.locator("#results-1 thead th").all_text_contents()
        # Of two runs of one case the run tells the lines apart.
        assert heads[:5] == ["case", "contestant", "direction", *(["run", "ms"] if several else ["ms", "±"])]
        box = page.locator(".box", has=page.locator("#results-1"))
        number, case = (page.locator("#results-1 tbody tr").first.locator(f"> :nth-child({at})") for at in (4, 1))
        edge = number.bounding_box()
        assert edge["x"] + edge["width"] <= 390 or several
        before = case.bounding_box()["x"]
        box.evaluate("(one) => { one.scrollLeft = 80; }")
        assert number.bounding_box()["x"] == pytest.approx(edge["x"] - 80)
        assert case.bounding_box()["x"] == pytest.approx(before, abs=1.5)
        for svg in page.locator("#roofline svg, #length svg").all():
            assert svg.evaluate("""(one) => { const own = one.getBoundingClientRect();
                const box = one.parentElement.getBoundingClientRect();
                const words = [...one.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
                return own.right <= box.right + 1
                    && words.every((word) => word.height >= 9)
                    && words.every((word) => word.left >= own.left - 1 && word.right <= own.right + 1);
            }""")


EDGE = """async (data) => {
    const image = new Image(); image.src = `data:image/png;base64,${data}`; await image.decode();
    const canvas = document.createElement("canvas"); canvas.width = image.width; canvas.height = image.height;
    const context = canvas.getContext("2d"); context.drawImage(image, 0, 0);
    const pixels = context.getImageData(image.width - 3, image.height >> 1, 1, image.height >> 2).data;
    return Math.max(...pixels.filter((_, at) => at % 4 === 0));
}"""


def test_a_box_shows_that_it_scrolls_sideways(file: Path) -> None:
    with browser.open_page(file, width=390) as page:
        box = page.locator(".box", has=page.locator("#results-1"))
        # Cards that come into view take their height then, and what is below them another place.
        page.evaluate("for (const one of document.querySelectorAll('.card')) one.style.contentVisibility = 'visible'")

        def edge() -> int:  # the lightest of what stands at the right edge: no letter
            return page.evaluate(EDGE, base64.b64encode(box.screenshot()).decode())

        assert edge() < 225
        box.evaluate("(one) => { one.scrollLeft = one.scrollWidth; }")
        assert edge() > 240


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
        sections = ", ".join(f"[id^={kind}-] tbody tr" for kind in ("results", "throughput", "scaling", "ablation"))
        assert page.locator(sections).count() == len(lines)
