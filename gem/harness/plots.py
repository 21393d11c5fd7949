"""Plots of the report as SVG text: length histogram, bars against peers, slices of a step, roofline.

They draw with the CSS classes and colours of the page (templates/report.css), so that light and dark are one drawing.
Every plot has a title and a description for screen readers; svg.py escapes every text. Units are said on the axes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from gem.harness import svg
from gem.harness.svg import Role, number, shorten


@dataclass(frozen=True)
class Bar:
    """One bar: `value` (None: not measured, then `note` says why), with the interval `low` to `high` as a whisker."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    role: Role = "peer"
    note: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Point:
    """One contestant in the roofline: intensity in FLOP/byte against achieved TFLOP/s."""

    label: str
    intensity: float
    tflops: float
    role: Role = "peer"
    direction: str = "forward"
    failed: bool = False


@dataclass(frozen=True)
class Ceilings:
    """What the machine reached in this run: TFLOP/s of a large GEMM per dtype, GB/s of a copy (None: not measured)."""

    tflops: dict[str, float]
    gbps: float | None = None


@dataclass(frozen=True)
class Label:
    """Words, and where they may stand, the best first: (x, y, whether they end there)."""

    words: str
    spots: list[tuple[float, float, bool]]


LETTER = 10.0  # width of a letter in the roofline's labels, as large as a phone shows them
MARK = 5.0  # half the size of a point's mark


def histogram(edges: Sequence[float], counts: Sequence[int], *, title: str, axis: str = "rows per sample") -> Markup:
    """Samples per length bin: counts[i] samples have edges[i] <= length < edges[i + 1].

    Bins are drawn equally wide whatever they span (they double, as lengths are spread over decades); empty bins at both
    ends are left out. Raises ValueError when there is not one edge more than counts.
    """
    if len(edges) != len(counts) + 1:
        raise ValueError(f"histogram {title!r}: {len(edges)} edges for {len(counts)} counts; accepted: one edge more")
    filled = [i for i, count in enumerate(counts) if count]
    first, last = (filled[0], filled[-1]) if filled else (0, 0)
    bins = list(range(first, last + 1)) if counts else []
    width, height, left, top, bottom = 340, 170, 38, 16, 34
    plot_w, plot_h = width - left - 8, height - top - bottom
    peak = max((counts[i] for i in bins), default=0)
    parts = [svg.axis_line(left, top + plot_h, left + plot_w, top + plot_h)]
    for count in (peak // 2, peak) if peak > 1 else (peak,):
        y = top + plot_h * (1 - count / peak if peak else 0)
        parts += [svg.line(left, y, left + plot_w, y, "grid"), svg.text(left - 5, y + 4, number(count), "tick end")]
    step = plot_w / max(len(bins), 4)  # one bin alone is no wall
    every = max(1, math.ceil(len(bins) / 8))  # more than eight labels would touch each other
    for place, i in enumerate(bins):
        x = left + place * step
        bar_h = plot_h * counts[i] / peak if peak else 0
        tip = f"{_edge(edges[i])} to below {_edge(edges[i + 1])}: {counts[i]} samples"
        parts.append(svg.rect(x + 1, top + plot_h - bar_h, max(step - 2, 1), bar_h, "bar subject", tip))
        if place % every == 0:
            parts.append(svg.text(x + 1, top + plot_h + 14, _edge(edges[i]), "tick"))
    parts.append(svg.text(left + plot_w, height - 4, f"{axis}, bins from", "tick end"))
    total = sum(counts)
    spread = f"between {_edge(edges[first])} and {_edge(edges[last + 1])} rows" if filled else "all bins empty"
    return svg.drawing(width, height, title, f"Histogram of {total} samples, {spread}.", parts)


def bar_limit(bars: Sequence[Bar]) -> float:
    """What the longest of the bars, whiskers included, reaches: the axis of all that stand together."""
    return max((max(bar.value, bar.high or 0.0) for bar in bars if bar.value is not None), default=0.0)


def bar(one: Bar, limit: float, unit: str) -> Markup:
    """A horizontal bar from 0 in its cell of a table: as wide as its share of `limit`, with its interval as a whisker.

    Places are shares of the cell's width, so that the bar fits any screen. Nothing is drawn of a bar without a value.
    """
    if one.value is None:
        return Markup("")
    scale = 100 / limit if limit > 0 else 0.0
    failed = " failed" if one.failed else ""
    tip = f"{one.label}: {number(one.value)} {unit}"
    parts = [svg.share_rect(0, max(one.value, 0.0) * scale, f"bar {one.role}{failed}")]
    if one.low is not None and one.high is not None:
        tip += f", median within {number(one.low)} to {number(one.high)}"
        parts += svg.whisker(one.low * scale, one.high * scale)
    return svg.strip(f"{tip}; {one.note}" if one.failed and one.note else tip, parts)


def slices(parts: Sequence[tuple[str, float, str]], limit: float | None = None) -> list[Markup]:
    """Slices (part, ms, of) of one training step, a drawing each: a bar begins where the one before it ended.

    `limit`: ms that the axis reaches at least, so that the steps of several contestants have one scale. A slice below 0
    runs back from where it begins, dashed: parts that were timed alone took longer than together.
    """
    ends = [0.0]
    for _, ms, _ in parts:
        ends.append(ends[-1] + ms)
    low = min(ends)  # below 0 only where the first slices are
    reach = max(*ends, limit or 0.0) - low
    scale = 100 / reach if reach > 0 else 0.0
    drawn = []
    for (part, ms, of), start, end in zip(parts, ends, ends[1:], strict=False):
        share = f", {100 * ms / ends[-1]:.1f} % of the step" if ends[-1] > 0 else ""
        kind = f"slice {of}" if ms >= 0 else "slice below"
        box = svg.share_rect((min(start, end) - low) * scale, abs(end - start) * scale, kind)
        drawn.append(svg.strip(f"{part} ({of}): {number(ms)} ms{share}", [box]))
    return drawn


def roofline(
    points: Sequence[Point], ceilings: Ceilings, *, title: str, flops: tuple[float, str] = (1.0, "TFLOP/s")
) -> Markup:
    """Log-log: intensity (FLOP per byte) against achieved TFLOP/s, under min(GEMM ceiling, copy bandwidth × intensity).

    `points` may be empty; then only the ceilings are drawn. `flops`: factor from TFLOP/s to the unit shown, and it.
    """
    points = [p for p in points if p.intensity > 0 and p.tflops > 0]
    width, height, left, top, right, bottom = 620, 414, 66, 48, 34, 52
    ridges = [1000 * peak / ceilings.gbps for peak in ceilings.tflops.values()] if ceilings.gbps else []
    xs = [p.intensity for p in points] + ridges
    ys = [p.tflops for p in points] + list(ceilings.tflops.values())
    x0, x1 = _decades(xs)
    y0, y1 = _decades(ys)

    def px(x: float) -> float:
        return left + (width - left - right) * (math.log10(x) - x0) / (x1 - x0)

    def py(y: float) -> float:
        return top + (height - top - bottom) * (1 - (math.log10(y) - y0) / (y1 - y0))

    factor, unit = flops
    parts = []
    for e in range(x0, x1 + 1):
        parts += [
            svg.line(px(10.0**e), top, px(10.0**e), height - bottom, "grid"),
            svg.text(px(10.0**e), height - bottom + 18, _power(10.0**e), "tick middle"),
        ]
    for e in range(y0, y1 + 1):
        parts += [
            svg.line(left, py(10.0**e), width - right, py(10.0**e), "grid"),
            svg.text(left - 7, py(10.0**e) + 4, _power(10.0**e * factor), "tick end"),
        ]
    roofs, wanted = _roofs(ceilings, (x0, x1), (y0, y1), px, py, flops)
    parts += roofs
    for p in sorted(points, key=lambda p: p.role == "subject"):  # the subject on top of its peers
        parts.append(_marker(px(p.intensity), py(p.tflops), p, factor, unit))
    parts += _labels(wanted, [(px(p.intensity), py(p.tflops)) for p in points], (left, 0, width - 2, height - bottom))
    parts.append(svg.text((left + width - right) / 2, height - 6, "intensity, useful FLOP per byte", "axis middle"))
    parts.append(svg.text(4, 14, f"achieved {unit}", "axis"))
    told = (
        ", ".join(f"{name} {number(peak * factor)} {unit}" for name, peak in ceilings.tflops.items()) or "not measured"
    )
    copy = f"{number(ceilings.gbps)} GB/s" if ceilings.gbps else "not measured"
    said = f"{len(points)} contestants. Ceilings measured in this run: GEMM {told}; copy {copy}."
    return svg.drawing(width, height, title, said, parts)


def _roofs(
    ceilings: Ceilings,
    x_range: tuple[int, int],
    y_range: tuple[int, int],
    px: Callable[[float], float],
    py: Callable[[float], float],
    flops: tuple[float, str],
) -> tuple[list[str], list[Label]]:
    """The slope of the copy bandwidth up to the highest ceiling, and a flat roof per dtype from its ridge on.

    Their labels' places are above them: no contestant is faster than its roof, but for noise.
    """
    parts: list[str] = []
    labels: list[Label] = []
    low_x, high_x, low_y = 10.0 ** x_range[0], 10.0 ** x_range[1], 10.0 ** y_range[0]
    bandwidth = ceilings.gbps / 1000 if ceilings.gbps else None  # TFLOP/s per FLOP/byte
    if bandwidth:
        start = max(low_x, low_y / bandwidth)
        top = max(ceilings.tflops.values(), default=10.0 ** y_range[1])
        end = min(high_x, top / bandwidth)
        if end > start:
            parts.append(svg.line(px(start), py(start * bandwidth), px(end), py(end * bandwidth), "roof"))
            xs = [start * (end / start) ** share for share in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)]
            spots = [(px(x) - 8, py(x * bandwidth) - 2, True) for x in xs]
            # Where the slope is too near to the axis: right of it, as low as there is room.
            spots += [(px(end) + 8, py(low_y) - 8 - 20 * step, False) for step in range(8)]
            labels.append(Label(f"copy {number(ceilings.gbps)} GB/s", spots))
    for name, peak in sorted(ceilings.tflops.items(), key=lambda item: item[1]):
        start = min(max(low_x, peak / bandwidth), high_x) if bandwidth else low_x
        parts.append(svg.line(px(start), py(peak), px(high_x), py(peak), "roof"))
        spots = [(x, py(peak) - 6, x > px(start)) for x in (px(high_x), px(start) + 8)]
        # Roofs a few per cent apart: further up, or under both.
        spots += [(px(high_x), py(peak) + shift, True) for shift in (-26, -46, 20, 40)]
        labels.append(Label(shorten(f"{name} {number(peak * flops[0])} {flops[1]}", 26), spots))
    return parts, labels


def _labels(
    wanted: Sequence[Label], points: Sequence[tuple[float, float]], frame: tuple[float, float, float, float]
) -> list[str]:
    """Each label at the first of its spots where it lies on no point, on no other label and within the frame
    (x, y, x, y), else where it lies on the fewest."""
    placed = [(0.0, 0.0, 190.0, 19.0)]  # the unit of the axis
    parts = []
    for label in wanted:

        def box(spot: tuple[float, float, bool], words: str = label.words) -> tuple[float, float, float, float]:
            x, y, ends = spot
            size = LETTER * len(words)
            return (x - size if ends else x, y - 15, x if ends else x + size, y + 2)

        def hits(spot: tuple[float, float, bool]) -> float:
            x0, y0, x1, y1 = box(spot)
            outside = x0 < frame[0] or y0 < frame[1] or x1 > frame[2] or y1 > frame[3]
            over = any(x0 < b[2] and b[0] < x1 and y0 < b[3] and b[1] < y1 for b in placed)
            covered = sum(x0 - MARK < x < x1 + MARK and y0 - MARK < y < y1 + MARK for x, y in points)
            return covered + 1000 * (outside + over)

        x, y, ends = spot = min(label.spots, key=hits)
        placed.append(box(spot))
        parts.append(svg.text(x, y, label.words, "roof-label end" if ends else "roof-label"))
    return parts


def _marker(x: float, y: float, p: Point, factor: float, unit: str) -> str:
    """Circle = forward, triangle = anything else; a cross over a contestant that failed."""
    tip = f"{p.label}: {number(p.tflops * factor)} {unit} at {number(p.intensity)} FLOP/byte" + ("; failed" * p.failed)
    kind = f"point {p.role}{' failed' if p.failed else ''}"
    if p.failed:
        shape = f'<path class="{kind}" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10">'
        return f"{shape}<title>{escape(tip)}</title></path>"
    if p.direction == "forward":
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{escape(tip)}</title></circle>'
    shape = f'<path class="{kind}" d="M{x:.1f} {y - 5.5:.1f}l5.2 9.5h-10.4z">'
    return f"{shape}<title>{escape(tip)}</title></path>"


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The whole decades that hold all values, at least one; a value on a border gets a decade of air above it."""
    if not values:
        return 0, 1
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 0.05)
    return low, max(high, low + 1)


def _power(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e6 else f"1e{round(math.log10(value))}"


def _edge(value: float) -> str:
    """A bin edge: 4096 as 4k, 96 as 96 – powers of two stay short."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value:g}"
