"""Curves: every value is inside the frame, and nothing that can be seen is lost when points are left out."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest

from quiver.eval.report import svg
from quiver.eval.report.curves import Curve, axis, curve_chart, running_mean


def _places(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0, 0.73), (0.412, 0.448), (0, 8e-5), (0, 5_210.4), (3, 3), (0, 0), (-2.5, 4), (1e-12, 2e-12), (0, 1e9), (0.4999, 0.5001)],
)
def test_an_axis_is_round_and_holds_its_values(low: float, high: float) -> None:
    ticks = axis(low, high)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low + 1e-15
    assert ticks[-1] >= high - 1e-9 * abs(high)
    steps = [second - first for first, second in pairwise(ticks)]
    assert max(steps) - min(steps) < 1e-6 * max(steps)
    digits = steps[0] / 10 ** math.floor(math.log10(steps[0] * (1 + 1e-9)))
    assert min(abs(digits - nice) for nice in (1, 2, 5)) < 1e-6


@pytest.mark.parametrize("percent", [False, True])
def test_every_point_is_where_its_value_says(percent: bool) -> None:
    points = [(10, 0.2), (20, 0.5), (40, 0.3)]
    chart = curve_chart(Curve("c", points, percent=percent), last_step=50)
    assert chart is not None
    places = _places(chart.line)
    assert [(round(dot.x, 1), round(dot.y, 1)) for dot in chart.dots] == places
    by_value = {float(tick.text) / (100 if percent else 1): tick.place for tick in chart.y_ticks}
    assert places[1][1] == pytest.approx(by_value[0.5], abs=0.06)
    by_step = {tick.text: tick.place for tick in chart.x_ticks}
    assert places[0][0] == pytest.approx(by_step["10"], abs=0.06)
    assert all(svg.LEFT <= x <= svg.RIGHT and svg.TOP <= y <= svg.BOTTOM for x, y in places)
    assert [dot.best for dot in chart.dots] == ([False, True, False] if percent else [False] * 3)


def test_ten_thousand_points_are_thinned_and_no_spike_is_lost() -> None:
    points = [(step, 1.0 + (8.0 if step == 4_321 else 0.0) - (0.5 if step == 7_777 else 0.0)) for step in range(1, 10_001)]
    chart = curve_chart(Curve("loss", points, smooth=True), last_step=10_000)
    assert chart is not None
    places = _places(chart.line)
    assert len(places) < 1_300
    heights = [y for _, y in places]
    frame = {float(tick.text): tick.place for tick in chart.y_ticks}
    per_unit = frame[0] - frame[1] if 1 in frame else (frame[0] - frame[2]) / 2
    assert frame[0] - min(heights) == pytest.approx(9.0 * per_unit, abs=0.1)
    assert frame[0] - max(heights) == pytest.approx(0.5 * per_unit, abs=0.1)
    assert chart.mean
    assert chart.dots == ()
    assert min(y for _, y in _places(chart.mean)) > min(heights)


def test_a_value_that_is_no_number_leaves_a_gap() -> None:
    chart = curve_chart(Curve("norm", [(1, 1.0), (2, 2.0), (3, math.nan), (4, math.inf), (5, 1.5)]), last_step=5)
    assert chart is not None
    assert chart.line.count("M") == 2
    assert len(_places(chart.line)) == 3
    assert "nan" not in chart.line
    assert curve_chart(Curve("norm", [(1, math.nan)]), last_step=1) is None
    assert curve_chart(Curve("norm", []), last_step=1) is None


@pytest.mark.parametrize(
    ("top", "unit", "highest"),
    [
        (8e-5, "× 10⁻⁵", "8"),  # noqa: RUF001 - as it is set
        (13_079, "thousands", "15"),
        (2.5e7, "millions", "25"),
        (5e10, "billions", "50"),
        (2e13, "10¹²", "20"),
        (3.0, "", "3"),
    ],
)
def test_long_numbers_get_a_unit(top: float, unit: str, highest: str) -> None:
    chart = curve_chart(Curve("c", [(1, top / 3), (2, top)]), last_step=2)
    assert chart is not None
    assert (chart.unit, chart.y_ticks[-1].text) == (unit, highest)
    widest = max(svg.text_width(tick.text, 10.5) for tick in chart.y_ticks)
    assert widest <= svg.LEFT - 6


@pytest.mark.parametrize("last", [1, 7, 305, 2_441, 50_000, 1_250_000])
def test_steps_are_whole_and_their_labels_stand_apart(last: int) -> None:
    chart = curve_chart(Curve("c", [(last, 1.0)]), last_step=last)
    assert chart is not None
    ends = []
    for tick in chart.x_ticks:
        assert "." not in tick.text
        width = svg.text_width(tick.text, 10.5)
        start = {"middle": tick.place - width / 2, "end": tick.place - width}[tick.anchor]
        ends.append((start, start + width))
    assert ends[-1][1] <= svg.WIDTH
    assert all(before[1] < after[0] for before, after in pairwise(ends))


def test_a_resumed_run_has_a_mark_where_it_went_on() -> None:
    chart = curve_chart(Curve("c", [(0, 1.0), (50, 1.0), (100, 1.0)]), last_step=100, resumed=[50, 100])
    assert chart is not None
    assert chart.marks == (chart.dots[1].x,)


def test_the_running_mean_keeps_a_line_and_flattens_noise() -> None:
    line = [(step, 3.0 * step) for step in range(100)]
    assert [value for _, value in running_mean(line)[4:-4]] == pytest.approx([value for _, value in line[4:-4]])
    noise = [(step, float(step % 2)) for step in range(1_000)]
    assert all(abs(value - 0.5) < 0.02 for _, value in running_mean(noise))


def test_the_running_mean_does_not_end_at_the_last_value() -> None:
    """A last value that is far off moves the mean of the last 1 + 5 values by a sixth, and that of 5 + 1 + 5 by an eleventh."""
    outlier = [*((step, 1.0) for step in range(124)), (124, 7.0)]
    found = [value for _, value in running_mean(outlier)]
    assert found[-1] == pytest.approx(2.0)
    assert found[-6] == pytest.approx(1 + 6 / 11)
    assert found[-7] == 1.0
    mirrored = [(124 - step, value) for step, value in reversed(outlier)]
    assert [value for _, value in running_mean(mirrored)] == pytest.approx(found[::-1])
