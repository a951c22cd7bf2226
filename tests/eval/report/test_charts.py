"""Charts by matplotlib: positions of marks, complete labels, and equal bytes for equal data."""

from __future__ import annotations

import math
from itertools import combinations

from quiver.eval.report.charts import Bar, Dot, Key, bar_chart, latency_chart, latency_limits, svg


def key(place: int, label: str = "") -> Key:
    return Key(chr(65 + place), place % 8 + 1, label or f"system {place}")


def test_bar_lengths_are_proportional_to_the_values() -> None:
    chart = bar_chart([Bar(key(0), 0.4, 0.3, 0.5), Bar(key(1, "long name " * 9), 0.8)], 0.8)
    (axes,) = chart.axes
    assert [bar.get_width() for bar in axes.patches] == [0.4, 0.8]
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [[0.3, 0.5]] * 2
    assert {"40.00", "80.00", "30.0\N{EN DASH}50.0"} <= {text.get_text() for text in axes.texts}


def test_letters_of_equal_points_do_not_overlap_and_stay_inside_the_axes() -> None:
    points = [(1.0, 1.0)] * 12 + [(0.1, 0.5), (0.1001, 0.5), (10.0, 0.9)]
    dots = [Dot(key(place), *point) for place, point in enumerate(points)]
    chart = latency_chart(dots, latency_limits(dots, to_one=True), "nDCG@10")
    (axes,) = chart.axes
    chart.draw_without_rendering()
    places = [text.get_window_extent().get_points().mean(axis=0) for text in axes.texts]
    assert len(places) == len(dots)
    assert min(math.dist(one, other) for one, other in combinations(places, 2)) > 9
    assert all(axes.bbox.x0 <= x <= axes.bbox.x1 and axes.bbox.y0 <= y <= axes.bbox.y1 for x, y in places)
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.get_lines()] == points


def test_texts_of_a_chart_stay_text_and_its_bytes_are_reproducible() -> None:
    hostile = "<script>$x$</script>\x00"
    one, other = (svg(bar_chart([Bar(key(0, hostile), 0.5)], 1.0), prefix="a", label=hostile) for _ in range(2))
    assert one == other
    assert "<script>" not in one
    assert "&lt;script&gt;$x$&lt;/script&gt;␀" in one
    assert "var(--ink)" in one
    alone = svg(bar_chart([Bar(key(0), 0.5)], 1.0), prefix="a", inline=False)
    assert "var(" not in alone
    assert 'xmlns="http://www.w3.org/2000/svg"' in alone
