"""Results as Markdown: the tables of README and docs are made from committed documents, never written by hand.

A page says where a table goes by a pair of comments, ``<!-- table: ci/measured/cpu/throughput.json -->`` and
``<!-- /table -->``; ``python -m gem.harness.markdown README.md`` fills what lies between them. An expression after the
path, as of `gem run -k`, takes some cases: ``<!-- table: ci/measured/h200/gdpa.json -k "self_long_d128 or pma" -->``.
"""

import re
import sys
from pathlib import Path

from gem.errors import RequestError, exit_code_of
from gem.harness.names import PEERS, RATIO_PREFIX
from gem.harness.results import Document, read_document, write_text
from gem.harness.select import compile_expression
from gem.harness.table import Line, flops_unit, lines_of, machine_text, number

_BLOCK = re.compile(
    r"(?P<open><!-- table: (?P<source>\S+)(?: -k \"(?P<k>[^\"]+)\")? -->\n).*?(?P<close><!-- /table -->)", re.DOTALL
)
_SHORT = {"forward": "fwd", "backward": "bwd"}


def render_markdown(document: Document) -> str:
    """The timed cases of a document, one line a case, implementation and direction; ratios > 1: faster than the peer.

    Measured cases, which have no direction, follow in a table a suite, one line a case and contestant. A ratio that
    does not exist has its reason below the table. So has every case and contestant that failed, errored or was skipped:
    nothing is left out. A ratio to a peer with too few runs for an interval is marked.
    """
    lines = lines_of(document.rows)
    parts = [machine_text(document), *filter(None, (_timed_table(lines), *_measured_tables(lines)))]
    return "\n\n".join(parts) + f"\n{_footnotes(lines)}"


def _timed_table(lines: list[Line]) -> str:
    few = {(line.suite, line.case, line.impl, line.direction) for line in lines if line.few and line.impl in PEERS}
    own = [line for line in lines if line.direction and line.impl not in PEERS and "ms" in line.values]
    if not own:
        return ""
    peers = list(dict.fromkeys(m for line in own for m in line.values if m.startswith(RATIO_PREFIX)))
    factor, unit = flops_unit(own)
    head = ["case", "", "ms", unit, "of roofline", *(f"× {peer.removeprefix(RATIO_PREFIX)}" for peer in peers), "check"]
    rows = [_cells(line, peers, factor, few) for line in own]
    table = [head, ["---", "---", *["---:"] * (len(head) - 3), "---"], *rows]
    marked = any(cell.endswith("*") for cells in rows for cell in cells)
    mark = "\n\n\\* the peer was timed fewer than 6 times: no 95 % interval." if marked else ""
    return _text(table) + mark


def _text(table: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _measured_tables(lines: list[Line]) -> list[str]:
    """One table a suite; a metric is a column."""
    suites: dict[str, list[Line]] = {}
    for line in lines:
        if not line.direction and line.impl and set(line.values) != {""}:
            suites.setdefault(line.suite, []).append(line)
    tables = []
    for suite, own in suites.items():
        metrics = list(dict.fromkeys(metric for line in own for metric in line.values if metric))
        heads = [m.replace(RATIO_PREFIX, "× ") for m in metrics]
        rows = [
            [f"{Path(suite).stem} {line.case}", line.impl, *(line.metric(m) for m in metrics), line.status]
            for line in own
        ]
        table = [["case", "", *heads, "check"], ["---", "---", *["---:"] * len(heads), "---"], *rows]
        tables.append(_text(table))
    return tables


def _cells(line: Line, peers: list[str], factor: float, few: set[tuple[str, str, str, str]]) -> list[str]:
    def ratio(peer: str) -> str:
        value = number(line.values.get(peer))
        if not value:
            return "–" if peer in line.values else ""
        return value + "*" * ((line.suite, line.case, peer.removeprefix(RATIO_PREFIX), line.direction) in few)

    share, flops = line.values.get("roofline"), line.values.get("tflops")
    subject = Path(line.suite).stem
    return [
        f"{subject} {line.case}",
        f"gem {line.impl} {_SHORT.get(line.direction, line.direction)}",
        line.timing("ms"),
        number(flops and flops * factor),
        "" if share is None else f"{share:.0%}",
        *(ratio(peer) for peer in peers),
        "right" if line.status == "pass" else line.status,
    ]


def _footnotes(lines: list[Line]) -> str:
    """What failed or was skipped, one line a reason."""
    told: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line.status != "pass":
            who = f"{line.impl} " if line.impl else ""
            where = f"{Path(line.suite).stem} {line.case} {_SHORT.get(line.direction, line.direction)}".strip()
            told.setdefault((f"{who}{line.status}", "; ".join(line.reasons)), []).append(where)
    notes = [f"- {what}: {reason or 'no reason given'} ({', '.join(where)})" for (what, reason), where in told.items()]
    return "\n" + "\n".join(notes) + "\n" if notes else ""


def fill(page: Path) -> str:
    """The text of a page with its tables made anew from their documents (paths from the page's directory)."""

    def table(match: re.Match[str]) -> str:
        document = read_document(page.parent / match["source"])
        if match["k"]:
            chosen = compile_expression(match["k"])
            rows = [row for row in document.rows if chosen(row.case_id)]
            if not rows:
                raise RequestError(f"{page}: -k {match['k']!r} has no row of {match['source']}; accepted: one at least")
            document = document.model_copy(update={"rows": rows})
        return f"{match['open']}{render_markdown(document)}{match['close']}"

    return _BLOCK.sub(table, page.read_text(encoding="utf-8"))


def main(pages: list[str]) -> None:
    """Fill the tables of the pages named."""
    if not pages:
        raise RequestError("no page; accepted: python -m gem.harness.markdown README.md ...")
    for page in map(Path, pages):
        write_text(page, fill(page))


if __name__ == "__main__":
    sys.exit(exit_code_of(main, sys.argv[1:]))
