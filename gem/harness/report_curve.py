"""Work per second against length: the contestants of one family of cases, a point a fixture."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from markupsafe import Markup

from gem.harness import svg
from gem.harness.report_lines import BAD, TERA, Line
from gem.harness.svg import Role, number, shorten

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 308, 52, 34, 118, 42
SPREAD = 1.25  # longest over shortest length of a family, from which on there is something to see
LABEL_GAP = 17  # between the labels at the ends of two curves


@dataclass(frozen=True)
class Curve:
    """One contestant: (mean length, TFLOP/s, fixture) in the order of the lengths; `lone` points no line joins."""

    label: str
    role: Role
    points: list[tuple[float, float, str]]
    lone: list[tuple[float, float, str]] = field(default_factory=list)


def families(lines: Iterable[Line], fixtures: Sequence[dict[str, Any]]) -> dict[tuple[int, str, str, str], list[Curve]]:
    """(run, suite, family, direction) → curves, for families with lengths to join. `fixtures`: those of each run.

    A case is named after its fixture; the rest of its name and who attends to whom are the family: `dense_4k_d128` and
    `self_long_d128` are of `self d128`, a window is a family of its own. The length is the mean of the longer side,
    since of a pooled case one side is a handful of queries. Fixtures whose samples have one length stand apart from the
    jagged: a contestant that pads is as much faster there as it has nothing to pad, whatever the length.
    """
    found: dict[tuple[int, str, str, str], dict[tuple[str, Role], list[tuple[float, float, str]]]] = {}
    even = [{name.partition("+")[0] for name, stats in own.items() if _even(stats)} for own in fixtures]
    for line in lines:
        value = line.value("tflops")
        place = _fixture_of(line.case, fixtures[line.run])
        if value is None or not value > 0 or place is None or line.status in BAD:
            continue
        fixture, family, length = place
        curves = found.setdefault((line.run, line.suite, family, line.direction), {})
        curves.setdefault((line.impl, line.role), []).append((length, value, fixture))
    made = {
        key: [_curve(impl, role, points, even[key[0]]) for (impl, role), points in curves.items()]
        for key, curves in found.items()
    }
    return {key: curves for key, curves in made.items() if _spread(curves) >= SPREAD}


def _even(stats: Any) -> bool:
    """Whether each side's samples have one length: no mask and no padding makes a difference."""
    sides = [side for key in ("q", "k") if isinstance(side := (stats or {}).get(key), dict)]
    return bool(sides) and all(side.get("max") is not None and side["max"] == side.get("mean") for side in sides)


def _curve(impl: str, role: Role, points: list[tuple[float, float, str]], even: set[str]) -> Curve:
    joined, lone = ([point for point in sorted(points) if (point[2] in even) == apart] for apart in (False, True))
    return Curve(impl, role, joined, lone)


def _spread(curves: Iterable[Curve]) -> float:
    """Longest over shortest of the lengths that a line may join."""
    lengths = [length for curve in curves for length, _, _ in curve.points]
    return max(lengths) / min(lengths) if lengths else 1.0


def _fixture_of(case: str, fixtures: dict[str, Any]) -> tuple[str, str, float] | None:
    """(fixture, the rest of the case's name, mean length), None where the name holds no fixture of the document."""
    for fixture in sorted(fixtures, key=lambda name: -len(name)):
        base = fixture.partition("+")[0]  # with lengths of one's own: <profile>+<file>
        stats = fixtures[fixture]
        if base not in case or not isinstance(stats, dict):
            continue
        means = [side["mean"] for key in ("q", "k") if isinstance(side := stats.get(key), dict) and "mean" in side]
        real = [float(mean) for mean in means if isinstance(mean, int | float) and math.isfinite(mean) and mean > 0]
        if real:
            # The same lengths under a window are other work than without.
            kind = (str(stats.get("pattern") or ""), "window" if "window" in base else "")
            rest = case.replace(base, "", 1).strip("-_")
            return base, " ".join(filter(None, (*kind, rest))) or "default", max(real)
    return None


def plot(curves: Sequence[Curve], *, title: str, flops: tuple[float, str] = TERA) -> Markup:
    """Lengths on a log axis, work per second from 0; a label at the end of each curve. `flops`: factor and unit."""
    lengths = sorted({length for curve in curves for length, _, _ in (*curve.points, *curve.lone)})
    peak = max(value for curve in curves for _, value, _ in (*curve.points, *curve.lone))
    factor, unit = flops
    air = 0.06 * math.log2(lengths[-1] / lengths[0])
    low, high = math.log2(lengths[0]) - air, math.log2(lengths[-1]) + air

    def px(length: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(length) - low) / (high - low)

    ticks = svg.ticks(peak * factor)

    def py(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value * factor / ticks[-1])

    parts = svg.height_axis(ticks, lambda tick: py(tick / factor), LEFT, WIDTH - RIGHT)
    parts += _length_axis(lengths, px)
    parts.append(
        svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, "mean length of the longer side, rows", "axis middle")
    )
    parts.append(svg.text(4, TOP - 17, unit, "axis"))

    def last(curve: Curve) -> tuple[float, float, str]:
        return (curve.points or curve.lone)[-1]

    ends: list[tuple[float, Curve]] = []
    for curve in sorted(curves, key=lambda one: one.role == "subject"):  # the subject on top of its peers
        before = 0.0
        path = ""
        for length, value, _ in curve.points:
            # Two fixtures of one length are two points, and no step of a curve.
            path += f"{'L' if length > before > 0 else 'M'}{px(length):.1f} {py(value):.1f}"
            before = length
        parts.append(f'<path class="curve {curve.role}" d="{path}"/>')
        for length, value, fixture in (*curve.points, *curve.lone):
            lone = (length, value, fixture) in curve.lone
            place = f"where all samples are {number(length)} long" if lone else f"at a mean length of {number(length)}"
            tip = f"{curve.label}, {fixture}: {number(value * factor)} {unit} {place}"
            x, y = px(length), py(value)
            hover = f"<title>{escape(tip)}</title>"
            if lone:
                shape = f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"
                parts.append(f'<path class="point lone {curve.role}" d="{shape}">{hover}</path>')
            else:
                parts.append(f'<circle class="point {curve.role}" cx="{x:.1f}" cy="{y:.1f}" r="4">{hover}</circle>')
        ends.append((py(last(curve)[1]), curve))
    previous = -math.inf
    for y, curve in sorted(ends, key=lambda end: end[0]):
        y = max(y + 4, previous + LABEL_GAP)
        previous = y
        x = px(last(curve)[0])
        near = WIDTH - RIGHT + 8
        if near - x > 30:  # a curve that ends early: a thin line leads to its label
            parts.append(svg.line(x + 6, py(last(curve)[1]), near - 3, y - 4, "leader"))
        parts.append(svg.text(near, y, shorten(curve.label, 16), f"label {curve.role}", curve.label))
    said = "; ".join(
        f"{curve.label}: "
        + ", ".join(f"{number(value * factor)} at {number(length)}" for length, value, _ in curve.points + curve.lone)
        for curve in curves
    )
    return svg.drawing(WIDTH, max(HEIGHT, math.ceil(previous + 6)), title, f"{unit} at mean lengths. {said}.", parts)


def _length_axis(lengths: Sequence[float], px: Any) -> list[str]:
    """The powers of two between the lengths, or the lengths themselves where there is none."""
    powers = [2.0**e for e in range(math.ceil(math.log2(lengths[0])), math.floor(math.log2(lengths[-1])) + 1)]
    shown = powers if len(powers) > 1 else [lengths[0], lengths[-1]]
    every = max(1, math.ceil(len(shown) / 8))
    return [svg.text(px(one), HEIGHT - BOTTOM + 16, number(round(one)), "tick middle") for one in shown[::every]]
