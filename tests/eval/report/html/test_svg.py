"""Charts: nothing leaves the view box, nothing stands on anything else."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from quiver.eval.report import svg
from quiver.eval.report.svg import Frame, Measured, Scale, Timed, bar_chart, point_chart, text_width, wrap


@pytest.mark.parametrize(
    "text",
    ["sentence-transformers/all-MiniLM-L6-v2 (aaaaaaaaaaaa, precision float)", "W" * 300, "模型" * 60, "a b " * 50, "é" * 99],
)
def test_every_line_of_a_wrapped_text_fits_and_nothing_is_lost(text: str) -> None:
    lines = wrap(text, 120, 12)
    assert len(lines) > 1
    assert all(text_width(line, 12) <= 120 for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_a_text_breaks_after_a_separator_rather_than_inside_a_word() -> None:
    assert wrap("organisation/retriever", text_width("organisation/retr", 12), 12) == ["organisation/", "retriever"]


def test_a_character_wider_than_the_line_still_ends() -> None:
    assert wrap("WW", 1, 12) == ["W", "W"]
    assert wrap("", 100, 12) == [""]


@pytest.mark.parametrize("highest", [0.0, 0.004, 0.05, 0.0501, 0.31, 0.5, 0.657, 0.8, 0.99, 1.0])
def test_a_scale_reaches_over_the_highest_value_in_at_most_five_steps(highest: float) -> None:
    scale = Scale.over(highest)
    assert scale.top >= highest
    assert scale.ticks[0] == 0.0
    assert scale.ticks[-1] == scale.top
    assert 2 <= len(scale.ticks) <= 6
    assert scale.top <= max(0.01, 2 * highest)


def test_bars_are_as_long_as_their_values_and_stand_below_each_other() -> None:
    chart = bar_chart([Measured("A", 0, "bm25", 0.4, 0.3, 0.5), Measured("B", 1, "long name " * 9, 0.8, None, None)], Scale.over(0.8))
    first, second = chart.bars
    assert (first.length, second.length) == (svg.TRACK / 2, svg.TRACK)
    assert first.whisker.startswith(f"M{svg.TRACK * 3 / 8:.1f} ")
    assert f"H{svg.TRACK * 5 / 8:.1f}" in first.whisker
    assert second.whisker == ""
    assert len(second.lines) > 1
    heights = [first.lines[0][1], first.top, first.top + svg.BAR, *(y for _, y in second.lines), second.top, chart.bottom, chart.height]
    assert heights == sorted(heights)


def test_an_interval_at_the_ends_of_the_axis_keeps_its_caps() -> None:
    chart = bar_chart([Measured("A", 1, "a", 0.0, 0.0, 1.0)], Scale.over(1.0))
    assert chart.bars[0].whisker.startswith("M1.0 ")
    assert chart.bars[0].length == 0


def _timed(*points: tuple[float, float]) -> list[Timed]:
    return [Timed(chr(65 + place), 1, f"system {place}", *point, exact=False) for place, point in enumerate(points)]


def test_keys_of_equal_points_stand_apart_inside_the_axes() -> None:
    points = [(1.0, 1.0)] * 12 + [(0.1, 0.5), (0.1001, 0.5), (10.0, 0.9)]
    frame = Frame.around([point[0] for point in points], [point[1] for point in points], to_one=True)
    chart = point_chart(_timed(*points), frame)
    keys = [(point.key_x, point.key_y) for point in chart.points]
    assert min(math.dist(one, other) for one, other in combinations(keys, 2)) > 2 * svg.RADIUS
    assert all(svg.LEFT + svg.RADIUS <= x <= svg.RIGHT - svg.RADIUS for x, _ in keys)
    assert all(svg.TOP + svg.RADIUS <= y <= svg.BOTTOM - svg.RADIUS for _, y in keys)
    for point in chart.points:
        assert all(math.dist((point.key_x, point.key_y), (other.x, other.y)) > svg.RADIUS for other in chart.points if point.beside)
    assert [point.beside for point in chart.points] == [True] * 14 + [False]


def test_points_stand_where_the_axes_say() -> None:
    frame = Frame.around([0.2, 30.0], [0.87, 1.0], to_one=True)
    assert (frame.fastest, frame.slowest) == (0.1, 100.0)
    assert (frame.low, frame.high) == (0.85, 1.0)
    assert frame.x(0.1) < frame.x(1.0) < frame.x(10.0)
    assert frame.x(1.0) - frame.x(0.1) == pytest.approx(frame.x(10.0) - frame.x(1.0))
    assert frame.y(1.0) < frame.y(0.85)
    chart = point_chart(_timed((1.0, 0.9)), frame)
    assert [tick.text for tick in chart.x_ticks] == ["0.1", "1", "10", "100"]
    assert [tick.text for tick in chart.y_ticks] == ["85", "90", "95", "100"]
    assert (chart.points[0].x, chart.points[0].y) == (frame.x(1.0), frame.y(0.9))


@pytest.mark.parametrize("milliseconds", [1.0, 0.003, 12_345.0])
def test_one_point_has_axes_too(milliseconds: float) -> None:
    for to_one in (True, False):
        frame = Frame.around([milliseconds], [1.0], to_one=to_one)
        assert frame.fastest <= milliseconds <= frame.slowest
        assert frame.slowest > frame.fastest
        assert frame.high > frame.low
