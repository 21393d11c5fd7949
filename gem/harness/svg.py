"""What the report's plots are drawn of: SVG text in the page's CSS classes; every text is escaped here."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Literal

from markupsafe import Markup

Role = Literal["subject", "peer"]  # the project's own, or a public contestant


def number(value: float | None, digits: int = 3) -> str:
    """A number for a person: `digits` significant ones, thousands grouped, no exponent between 1e-4 and 1e7."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if value == round(value) and abs(value) < 1e7:
        return f"{round(value):,}"
    size = abs(value)
    if size < 1e-4 or size >= 1e7:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


def shorten(text: str, limit: int) -> str:
    """The text on one line, cut to `limit` characters with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def ticks(peak: float) -> list[float]:
    """Round steps from 0 to ``peak`` or above, four to eight of them; 0 and 1 where there is nothing to show."""
    if peak <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(peak / 4))
    step = next(power * one for one in (1, 2, 2.5, 5, 10) if peak / (power * one) <= 6)
    return [step * k for k in range(math.ceil(peak / step - 1e-9) + 1)]


def height_axis(marks: Sequence[float], y_of: Callable[[float], float], left: float, right: float) -> list[str]:
    """A line across and a number for each of ``marks``, which ``y_of`` places."""
    parts = []
    for mark in marks:
        y = y_of(mark)
        parts += [line(left, y, right, y, "grid"), text(left - 6, y + 4, number(mark), "tick end")]
    return parts


def text(x: float, y: float, words: str, kind: str, tip: str = "") -> str:
    """Words whose first letter stands at x, on the line y, with CSS class `kind`; `tip` shows under the pointer."""
    hover = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}{hover}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, tip: str) -> str:
    """A rectangle from its upper left corner, with what shows under the pointer."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {size}><title>{escape(tip)}</title></rect>'


def line(x0: float, y0: float, x1: float, y1: float, kind: str) -> str:
    """A line."""
    return f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'


def axis_line(x0: float, y0: float, x1: float, y1: float) -> str:
    """A line that bars stand on."""
    return line(x0, y0, x1, y1, "axis-line")


def drawing(width: int, height: int, title: str, description: str, parts: Sequence[str]) -> Markup:
    """The finished drawing: scales with its box, named and described for screen readers."""
    name = escape(title)
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}">'
        f"<title>{name}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def strip(tip: str, parts: Sequence[str]) -> Markup:
    """A drawing as wide as its cell and one line high, without a scale of its own: its parts stand at shares of it."""
    return Markup(f'<svg class="strip" role="img"><title>{escape(tip)}</title>{"".join(parts)}</svg>')


def share_rect(start: float, width: float, kind: str) -> str:
    """A bar from `start` per cent of a strip's width on, `width` per cent wide, at least a hair."""
    return f'<rect class="{kind}" x="{start:.2f}%" y="2" width="{max(width, 0.3):.2f}%" height="12"/>'


def whisker(low: float, high: float) -> list[str]:
    """An interval between `low` and `high` per cent of a strip's width."""
    ends = ((low, high, 8, 8), (low, low, 4, 12), (high, high, 4, 12))
    return [f'<line class="whisker" x1="{a:.2f}%" x2="{b:.2f}%" y1="{y}" y2="{z}"/>' for a, b, y, z in ends]
