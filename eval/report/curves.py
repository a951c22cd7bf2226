"""Curves over the steps of a training run: geometry only, in the units of `quiver.eval.report.svg`; the templates draw it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from quiver.eval.report.svg import BOTTOM, END, LEFT, RIGHT, TOP, Tick, text_width

Points: TypeAlias = Sequence[tuple[float, float]]
"""(step, value), steps rising."""

MOST_DOTS = 40
"""A curve of more points is drawn as a line alone."""

SMOOTHED_FROM = 50
"""A curve of as many points gets a running mean, over a twenty-fifth of them on either side."""

_MOST_STEPS = 5
_COLUMNS = 300
_SPAN = 25
_INSET = 5.0
_TICK_SIZE = 10.5
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Curve:
    """What a chart shows.

    Attributes:
        title: What it is about.
        points: (step, value); a value that is not finite leaves a gap.
        percent: Show a fraction in points, hundredths, around its values; otherwise the axis starts at 0.
        smooth: Noisy enough for a running mean, where there are `SMOOTHED_FROM` points.
    """

    title: str
    points: Points
    percent: bool = False
    smooth: bool = False


@dataclass(frozen=True)
class Dot:
    """A point that is drawn.

    Attributes:
        x: Where it is.
        y: Where it is.
        text: What it says.
        best: Whether it is the highest.
    """

    x: float
    y: float
    text: str
    best: bool


@dataclass(frozen=True)
class CurveChart:
    """A curve laid out.

    Attributes:
        title: What it is about.
        note: Its first and last value, in words.
        unit: What stands above the axis of values; empty for the values themselves.
        line: The path of the values.
        mean: The path of their running mean; empty where there is none.
        dots: The points, where they are few.
        x_ticks: Steps.
        y_ticks: Values.
        marks: Places of the steps at which the run was resumed.
    """

    title: str
    note: str
    unit: str
    line: str
    mean: str
    dots: tuple[Dot, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[float, ...]


def curve_chart(curve: Curve, last_step: float, resumed: Sequence[float] = ()) -> CurveChart | None:
    """Lay out a curve.

    Args:
        curve: What to show.
        last_step: Where the axis of steps ends, so that all charts of a run share it; >= every step of the curve and > 0.
        resumed: Steps at which the run went on after a stop.

    Returns:
        The chart; None where no value is finite.
    """
    known = [(step, value) for step, value in curve.points if math.isfinite(value)]
    if not known:
        return None
    values = [value for _, value in known]
    steps = axis(0.0, last_step)
    scale = axis(min(values), max(values)) if curve.percent else axis(min(0.0, *values), max(values))
    factor, unit = (100.0, "points") if curve.percent else _unit(max(abs(scale[0]), abs(scale[-1])))
    frame = _Frame(last_step, scale[0], scale[-1])
    best = max(values)
    dots = [
        Dot(*frame.place(step, value), f"step {step:,.0f}: {_figure(value, percent=curve.percent)}", curve.percent and value == best)
        for step, value in known
    ]
    smoothed = running_mean(known) if curve.smooth and len(known) >= SMOOTHED_FROM else []
    return CurveChart(
        title=curve.title,
        note=_note(known, percent=curve.percent),
        unit=unit,
        line=frame.path(curve.points),
        mean=frame.path(smoothed),
        dots=tuple(dots) if len(dots) <= MOST_DOTS else (),
        x_ticks=tuple(_step_tick(frame, step) for step in steps if step <= last_step and step % 1 == 0),
        y_ticks=tuple(Tick(frame.place(0, value)[1], f"{round(factor * value, 10):g}", "end") for value in scale),
        marks=tuple(frame.place(step, 0)[0] for step in resumed if 0 < step < last_step),
    )


def _step_tick(frame: _Frame, step: float) -> Tick:
    x, text = frame.place(step, frame.low)[0], f"{step:,.0f}"
    fits = x + text_width(text, _TICK_SIZE) / 2 <= END
    return Tick(x, text, "middle") if fits else Tick(END, text, "end")


def axis(low: float, high: float) -> tuple[float, ...]:
    """Round values from at or below the lowest to at or above the highest, in at most six steps of 1, 2 or 5 times a power of ten.

    Example:
        >>> axis(0, 0.73), axis(0.412, 0.448), axis(3, 3)
        ((0.0, 0.2, 0.4, 0.6, 0.8), (0.41, 0.42, 0.43, 0.44, 0.45), (2.8, 2.9, 3.0, 3.1, 3.2))
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 0.05 * abs(high) or 0.5
        low, high = low - margin, high + margin
    decade = 10.0 ** math.floor(math.log10((high - low) / _MOST_STEPS))
    step = next(decade * factor for factor in (1, 2, 5, 10) if high - low <= _MOST_STEPS * decade * factor * (1 + 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return tuple(round(place * step, digits) for place in range(first, last + 1))


def running_mean(points: Points) -> list[tuple[float, float]]:
    """The mean over a point and its neighbours on either side, `SMOOTHED_FROM` says how many; at an end those on one side remain.

    Example:
        >>> running_mean([(step, step % 2) for step in range(50)])[25]
        (25, 0.6)
    """
    span = len(points) // _SPAN
    means = []
    for place, (step, _) in enumerate(points):
        inside = points[max(0, place - span) : place + span + 1]
        means.append((step, math.fsum(value for _, value in inside) / len(inside)))
    return means


@dataclass(frozen=True)
class _Frame:
    """The axes of one chart: steps from 0, values from ``low`` to ``high``."""

    last_step: float
    low: float
    high: float

    def place(self, step: float, value: float) -> tuple[float, float]:
        """Where a value of a step is."""
        x = LEFT + _INSET + step / self.last_step * (RIGHT - LEFT - 2 * _INSET)
        return x, BOTTOM - (value - self.low) / (self.high - self.low) * (BOTTOM - TOP)

    def path(self, points: Points) -> str:
        """The line through points, broken where a value is not finite."""
        lines = []
        for finite, run in groupby(points, key=lambda point: math.isfinite(point[1])):
            if finite:
                places = [self.place(step, value) for step, value in run]
                lines.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in _thinned(places)))
        return "".join(lines)


def _thinned(places: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """No more points than can be seen: of those in one column of the chart the first, the lowest, the highest and the last."""
    for _, column in groupby(places, key=lambda place: int(place[0] * _COLUMNS / RIGHT)):
        inside = list(column)
        heights = [y for _, y in inside]
        kept = {0, heights.index(min(heights)), heights.index(max(heights)), len(inside) - 1}
        yield from (inside[place] for place in sorted(kept))


def _unit(highest: float) -> tuple[float, str]:
    """What values are multiplied by to be short, and how the axis says so."""
    if highest >= 10_000:
        exponent = min(15, int(math.log10(highest / 10) / 3 + 1e-9) * 3)
        names = {3: "thousands", 6: "millions", 9: "billions", 12: "10¹²", 15: "10¹⁵"}
        return 10.0**-exponent, names[exponent]
    if 0 < highest < 0.01:
        exponent = math.floor(math.log10(highest))
        return 10.0**-exponent, f"× 10{str(exponent).translate(_SUPERSCRIPT)}"  # noqa: RUF001 - how a factor is set
    return 1.0, ""


def _note(points: Points, *, percent: bool) -> str:
    if percent:
        step, value = max(points, key=lambda point: point[1])
        return f"best {_figure(value, percent=True)} at step {step:,.0f}"
    (_, first), (_, last) = points[0], points[-1]
    return f"{_figure(first, percent=False)} to {_figure(last, percent=False)}" if len(points) > 1 else _figure(last, percent=False)


def _figure(value: float, *, percent: bool) -> str:
    if percent:
        return f"{100 * value:.2f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
