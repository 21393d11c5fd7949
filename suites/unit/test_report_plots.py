"""The report's drawings agree with their numbers: bars, slices of a step, roofline, curves, histograms."""

import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest

from gem.harness import plots, report_curve
from gem.harness.plots import Bar, Ceilings, Point
from gem.harness.report_curve import Curve
from gem.harness.report_lines import lines_of
from gem.harness.results import Row

PARTS = [
    ("input wait", 1.0, "input"),
    ("tower", 6.0, "model"),
    ("between", -2.0, "rest"),
    ("optimizer", 3.0, "optimizer"),
]


def drawn(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def share(element: ET.Element, name: str) -> float:
    text = element.get(name, "")
    assert text.endswith("%")
    return float(text[:-1])


def test_bar_lengths_and_whiskers_go_with_the_values() -> None:
    bars = [Bar("torch", 40.0, 36.0, 50.0, role="subject"), Bar("flex", 10.0), Bar("nested", None, note="oom: x")]
    limit = plots.bar_limit(bars)
    assert limit == 50.0  # the whisker is the longest
    first, second = (drawn(plots.bar(one, limit, "GFLOP/s")) for one in bars[:2])
    assert share(next(first.iter("rect")), "width") == pytest.approx(80.0)
    assert share(next(second.iter("rect")), "width") == pytest.approx(20.0)
    whisker = next(first.iter("line"))
    assert (share(whisker, "x1"), share(whisker, "x2")) == pytest.approx((72.0, 100.0))
    assert "torch: 40 GFLOP/s, median within 36 to 50" in "".join(first.itertext())
    assert list(second.iter("line")) == []
    assert plots.bar(bars[2], limit, "GFLOP/s") == ""


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_a_bar_without_length_stays_in_its_cell(value: float) -> None:
    box = next(drawn(plots.bar(Bar("a", value), 0.0, "ms")).iter("rect"))
    assert 0 < share(box, "width") < 1 and share(box, "x") == 0


def boxes(limit: float | None = None) -> list[tuple[str, float, float]]:
    """(class, start, width) of the slices, in shares of the axis."""
    found = [next(drawn(one).iter("rect")) for one in plots.slices(PARTS, limit)]
    return [(box.get("class", ""), share(box, "x"), share(box, "width")) for box in found]


def test_each_slice_begins_where_the_one_before_it_ended() -> None:
    found = boxes()
    assert [kind for kind, _, _ in found] == ["slice input", "slice model", "slice below", "slice optimizer"]
    scale = 100 / 8  # the step is 8 ms, and nothing reaches further
    assert [width / scale for _, _, width in found] == pytest.approx([1.0, 6.0, 2.0, 3.0], abs=0.01)
    assert [start / scale for _, start, _ in found] == pytest.approx([0.0, 1.0, 5.0, 5.0], abs=0.01)
    assert "tower (model): 6 ms, 75.0 % of the step" in plots.slices(PARTS)[1]


def test_contestants_of_a_case_have_one_scale() -> None:
    assert boxes(limit=16.0)[1][2] == pytest.approx(boxes()[1][2] / 2, rel=0.01)


def test_no_time_is_no_error() -> None:
    assert plots.slices([]) == []
    assert len(plots.slices([("a", 0.0, "model")])) == 1


def test_roofline_points_lie_at_intensity_and_rate() -> None:
    ceilings = Ceilings({"float32": 0.1}, 10.0)  # the ridge is at 1000 * 0.1 / 10 = 10 FLOP/byte
    points = [Point("on the slope", 1.0, 0.01), Point("on the roof", 100.0, 0.1, direction="backward")]
    svg = drawn(plots.roofline(points, ceilings, title="t"))
    roofs = [line for line in svg.iter("line") if line.get("class") == "roof"]
    slope, roof = roofs

    def at(line: ET.Element, name: str) -> float:
        return float(line.get(name, "nan"))

    circle = next(svg.iter("circle"))
    assert at(circle, "cx") == pytest.approx(at(slope, "x1"), abs=0.2)
    assert at(circle, "cy") == pytest.approx(at(slope, "y1"), abs=0.2)
    assert at(roof, "y1") == at(roof, "y2") == pytest.approx(at(slope, "y2"), abs=0.2)
    assert at(roof, "x1") == pytest.approx(at(slope, "x2"), abs=0.2)
    # Log scale: intensity 1 -> 10 is as wide as 10 -> 100, where the triangle of the second point stands.
    triangle = next(p for p in svg.iter("path") if "point" in (p.get("class") or ""))
    x = float(re.match(r"M([\d.]+)", triangle.get("d", ""))[1])  # type: ignore[index]
    assert x - at(roof, "x1") == pytest.approx(at(roof, "x1") - at(circle, "cx"), abs=0.3)


@pytest.mark.parametrize("gbps", [20.0, 200.0, 4000.0])
@pytest.mark.parametrize(
    "peaks", [{"float32": 0.2}, {"float32": 0.2, "bfloat16": 0.9}, {"float16": 0.9, "bfloat16": 0.88}]
)
def test_labels_of_a_roofline_lie_on_no_point_and_on_no_other(peaks: dict[str, float], gbps: float) -> None:
    # A point wherever one can be: below the roofs, and a little above the lower ones.
    ceilings, roof = Ceilings(peaks, gbps), max(peaks.values())
    spread = [0.1 * 1.3**k for k in range(30)]
    points = [Point("a", x, 0.9 * min(roof, x * gbps / 1000) / 1.7**k) for x in spread for k in range(6)]
    points = [point for point in points if point.tflops < 0.9 * min(peaks.values())]
    svg = drawn(plots.roofline(points, ceilings, title="t"))
    boxes = []
    for text in svg.iter("text"):
        if "roof-label" not in text.get("class", ""):
            continue
        x, y, size = float(text.get("x", "nan")), float(text.get("y", "nan")), 7.0 * len(text.text or "")
        boxes.append((x - size, x, y) if "end" in text.get("class", "").split() else (x, x + size, y))
    assert len(boxes) == len(peaks) + 1
    for left, right, y in boxes:
        assert left >= 0 and right <= 620 and y > 10
        for circle in svg.iter("circle"):
            cx, cy = float(circle.get("cx", "nan")), float(circle.get("cy", "nan"))
            assert not (left - 4 < cx < right + 4 and y - 13 < cy < y + 4)
    for a, b in itertools.combinations(boxes, 2):
        assert a[1] <= b[0] or b[1] <= a[0] or abs(a[2] - b[2]) >= 13


@pytest.mark.parametrize("points", [[], [Point("a", 1.0, 2.0)], [Point("a", math.inf, 1.0), Point("b", 0.0, 1.0)]])
def test_roofline_without_ceilings_or_points(points: list[Point]) -> None:
    finite = [p for p in points if math.isfinite(p.intensity)]
    svg = plots.roofline(finite, Ceilings({}), title="t")
    assert "not measured" in svg and "nan" not in svg


def test_histogram_bars_hold_the_counts() -> None:
    svg = drawn(plots.histogram([0, 1, 2, 4, 8, 16], [0, 0, 5, 10, 0], title="t"))
    heights = [float(r.get("height", "nan")) for r in svg.iter("rect")]
    assert len(heights) == 2 and heights[1] == pytest.approx(2 * heights[0], abs=0.2)  # empty ends left out
    labels = "".join(svg.itertext())
    assert "2 to below 4: 5 samples" in labels and "15 samples" in labels


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (0.12345, "0.123"),
        (1234.5, "1,234"),
        (18.0, "18"),
        (3.2e-7, "3.20e-07"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert plots.number(value) == text


# ---- work against length


def curve_rows(case: str, impl: str, tflops: float | None) -> Row:
    suite = "suites/throughput/gdpa.toml"
    return Row(
        suite=suite, case=case, impl=impl, direction="forward", metric="tflops", value=tflops, better="higher",
        status="pass",
    )  # fmt: skip


FIXTURES = {
    "self_long": {"pattern": "self", "q": {"mean": 2000.0}, "k": {"mean": 2000.0}},
    "dense_4k": {"pattern": "self", "q": {"mean": 4000.0}, "k": {"mean": 4000.0}},
    "self_window256": {"pattern": "self", "q": {"mean": 500.0}, "k": {"mean": 500.0}},
    "pma_q32": {"pattern": "pma", "q": {"mean": 32.0}, "k": {"mean": 900.0}},
    "self_short+mine": {"pattern": "self", "q": {"mean": 250.0}, "k": {"mean": 250.0}},
    "broken": {"pattern": "self", "q": {"mean": None}},
}


def test_families_are_cases_that_differ_in_length_alone() -> None:
    cases = {"self_long_d128": 5.0, "dense_4k_d128": 7.0, "self_short_d128": 2.0, "self_window256_d128": 9.0}
    cases |= {"pma_q32_d128": 1.0, "self_long_causal_d128": 3.0, "broken_d128": 1.0, "unknown_d128": 1.0}
    rows = [curve_rows(case, "triton", value) for case, value in cases.items()]
    rows += [curve_rows("self_long_d128", "fa4", 6.0), curve_rows("dense_4k_d128", "fa4", None)]
    found = report_curve.families(lines_of(rows), [FIXTURES])
    assert list(found) == [(0, "suites/throughput/gdpa.toml", "self d128", "forward")]
    (curves,) = found.values()
    assert curves == [
        Curve("triton", "subject", [(250.0, 2.0, "self_short"), (2000.0, 5.0, "self_long"), (4000.0, 7.0, "dense_4k")]),
        Curve("fa4", "peer", [(2000.0, 6.0, "self_long")]),
    ]


def sides(mean: float, most: float) -> dict[str, dict[str, float]]:
    return {side: {"mean": mean, "max": most} for side in ("q", "k")}


JAGGED = {"short": sides(80.0, 160.0), "long": sides(250.0, 1000.0), "dense": sides(512.0, 512.0)}


def test_fixtures_of_one_length_are_not_joined_with_jagged_ones() -> None:
    rows = [curve_rows("short", "sdpa_padded", 0.04), curve_rows("long", "sdpa_padded", 0.02)]
    rows += [curve_rows("dense", "sdpa_padded", 0.2), curve_rows("dense", "flex", 0.1)]
    (curves,) = report_curve.families(lines_of(rows), [JAGGED]).values()
    assert curves == [
        Curve("sdpa_padded", "peer", [(80.0, 0.04, "short"), (250.0, 0.02, "long")], [(512.0, 0.2, "dense")]),
        Curve("flex", "peer", [], [(512.0, 0.1, "dense")]),
    ]
    svg = drawn(report_curve.plot(curves, title="t"))
    lines = [p.get("d", "") for p in svg.iter("path") if "curve" in (p.get("class") or "")]
    assert [re.sub(r"[\d. ]+", "", one) for one in lines] == ["ML", ""]
    lone = [p for p in svg.iter("path") if "lone" in (p.get("class") or "")]
    assert len(lone) == 2 and "all samples are 512 long" in "".join(lone[0].itertext())
    # One jagged length is no curve, and of pooled cases the handful of queries alone is of one length.
    one = {name: JAGGED[name] for name in ("long", "dense")}
    assert report_curve.families(lines_of(rows[1:]), [one]) == {}
    pooled = {name: stats | {"q": {"mean": 32.0, "max": 32.0}} for name, stats in JAGGED.items()}
    (curves,) = report_curve.families(lines_of(rows[:2]), [pooled]).values()
    assert len(curves[0].points) == 2 and curves[0].lone == []


def test_points_of_a_curve_lie_at_length_and_rate() -> None:
    points = [(256.0, 1.0, "a"), (1024.0, 3.0, "b"), (4096.0, 2.0, "c")]
    svg = drawn(report_curve.plot([Curve("triton", "subject", points)], title="t"))
    places = [(float(c.get("cx", "nan")), float(c.get("cy", "nan"))) for c in svg.iter("circle")]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # both are a factor of four
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.3)
    words = "".join(svg.itertext())
    assert "triton, b: 3 TFLOP/s at a mean length of 1,024" in words and "triton: 1 at 256" in words


def test_two_fixtures_of_one_length_are_no_step_of_a_curve() -> None:
    points = [(256.0, 1.0, "a"), (256.0, 3.0, "b"), (4096.0, 2.0, "c")]
    svg = drawn(report_curve.plot([Curve("triton", "subject", points)], title="t"))
    path = next(p.get("d", "") for p in svg.iter("path"))
    assert re.sub(r"[\d. ]+", "", path) == "MML"
