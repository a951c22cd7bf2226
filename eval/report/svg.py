"""Where the marks and labels of a chart stand: geometry only, in units of an SVG's view box; the templates draw it.

A label's width is estimated from its characters, a little above what common sans-serif fonts take, so that a page needs no font of
its own and no label is cut or stands on another.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH = 340.0
"""Width of every chart."""

LABEL_SIZE = 12.0
"""Font size of a label."""

_NARROW = frozenset("ijlftrI.,:;'|!()[]{}/\\ -`")
_WIDE = frozenset("mwMW@%&")
_BREAKS = frozenset(" /-_.,;:")
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)
_MOST_STEPS = 5


def text_width(text: str, size: float) -> float:
    """How much room a text takes in a sans-serif font, estimated high.

    Example:
        >>> text_width("il", 10) < text_width("ab", 10) < text_width("mW", 10)
        True
    """
    return size * sum(map(_ems, text))


def _ems(character: str) -> float:
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 1.05
    if character in _NARROW:
        return 0.42
    if character in _WIDE:
        return 1.02
    return 0.78 if character.isupper() or not character.isascii() else 0.66


def wrap(text: str, width: float, size: float) -> list[str]:
    """Break a text into lines that fit, after a space or a separator where there is one, else anywhere.

    Args:
        text: One line of text.
        width: Room of a line.
        size: Font size.

    Returns:
        Lines that give the text when joined, except for the spaces at their ends.

    Example:
        >>> wrap("one/two", 30, 10)
        ['one/', 'two']
    """
    lines = []
    rest = text
    while rest:
        end = _fitting(rest, width, size)
        if end < len(rest):
            end = next((place for place in range(end, end // 2, -1) if rest[place - 1] in _BREAKS), end)
        lines.append(rest[:end].strip())
        rest = rest[end:].lstrip()
    return lines or [""]


def _fitting(text: str, width: float, size: float) -> int:
    """Characters that fit, one at least."""
    used = 0.0
    for place, character in enumerate(text):
        used += size * _ems(character)
        if used > width and place > 0:
            return place
    return len(text)


@dataclass(frozen=True)
class Scale:
    """A linear axis from 0.

    Attributes:
        top: Its last value, a fraction.
        ticks: Values marked, 0 and ``top`` among them.
    """

    top: float
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, highest: float) -> Scale:
        """The axis with at most five steps that ends at or above a fraction.

        Example:
            >>> Scale.over(0.657)
            Scale(top=0.8, ticks=(0.0, 0.2, 0.4, 0.6, 0.8))
        """
        step = next((step for step in _STEPS if highest <= step * _MOST_STEPS + 1e-9), _STEPS[-1])
        steps = max(1, math.ceil(highest / step - 1e-9))
        ticks = tuple(round(step * place, 10) for place in range(steps + 1))
        return cls(ticks[-1], ticks)


@dataclass(frozen=True)
class Measured:
    """What one bar shows.

    Attributes:
        letter: Key of the system.
        colour: Number of its colour.
        label: Its name.
        value: A fraction.
        low: Lower end of its interval; None where there is none.
        high: Upper end.
    """

    letter: str
    colour: int
    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Bar:
    """One bar with its label above it.

    Attributes:
        measured: What it shows.
        lines: Its label, broken, each line with the height it stands at.
        top: Upper edge of the bar.
        length: Of the bar.
        whisker: The path of its interval; empty where there is none.
    """

    measured: Measured
    lines: tuple[tuple[str, float], ...]
    top: float
    length: float
    whisker: str


@dataclass(frozen=True)
class Tick:
    """A mark on an axis.

    Attributes:
        place: Where, along the axis.
        text: What it says.
        anchor: ``start``, ``middle`` or ``end``: the side of the text that stands at the place.
    """

    place: float
    text: str
    anchor: str


@dataclass(frozen=True)
class BarChart:
    """Bars below each other on one axis.

    Attributes:
        height: Of the chart; its width is `WIDTH`.
        bars: From top to bottom.
        ticks: Of the horizontal axis.
        bottom: Where the axis is.
    """

    height: float
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    bottom: float


BAR = 12.0
"""Thickness of a bar."""

BADGE = 17.0
"""Width of the key before a label."""

INDENT = 23.0
"""Where labels start."""

TRACK = 268.0
"""Where the axis of the bars ends; the intervals in figures stand behind it."""

END = WIDTH - 1.0
"""Where figures end: a glyph may reach a little over its advance."""

_VALUE = 48.0
_LINE = 15.0
_GAP = 12.0


def bar_chart(measured: Sequence[Measured], scale: Scale) -> BarChart:
    """Lay out a chart.

    Args:
        measured: At least one.
        scale: One that reaches to every value and interval; what lies beyond would be cut.
    """
    bars = []
    y = 2.0
    for each in measured:
        broken = wrap(each.label, WIDTH - INDENT - _VALUE, LABEL_SIZE)
        lines = tuple((line, y + LABEL_SIZE + _LINE * place) for place, line in enumerate(broken))
        top = y + _LINE * len(lines) + 4.0
        bars.append(Bar(each, lines, top, TRACK * _clip(each.value / scale.top), _whisker(each, scale, top + BAR / 2)))
        y = top + BAR + _GAP
    ticks = tuple(Tick(TRACK * value / scale.top, f"{100 * value:g}", "start" if value == 0 else "middle") for value in scale.ticks)
    return BarChart(y + 18.0, tuple(bars), ticks, y)


def _whisker(measured: Measured, scale: Scale, y: float) -> str:
    if measured.low is None or measured.high is None:
        return ""
    # The caps stay inside the axis at both ends.
    low, high = (min(max(TRACK * end / scale.top, 1.0), TRACK) for end in (measured.low, measured.high))
    return f"M{low:.1f} {y - 3:.1f}v6M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 3:.1f}v6"


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))


@dataclass(frozen=True)
class Timed:
    """What one point shows.

    Attributes:
        letter: Key of the system.
        colour: Number of its colour.
        label: Its name.
        milliseconds: A query.
        value: A fraction.
        exact: Whether the index was exact.
    """

    letter: str
    colour: int
    label: str
    milliseconds: float
    value: float
    exact: bool


@dataclass(frozen=True)
class Point:
    """One point: its key, and where that has to stand beside it, a dot and a line to it.

    Attributes:
        timed: What it shows.
        x: Where it is.
        y: Where it is.
        key_x: Centre of its key.
        key_y: Centre of its key.
    """

    timed: Timed
    x: float
    y: float
    key_x: float
    key_y: float

    @property
    def beside(self) -> bool:
        """Whether the key is not on the point."""
        return (self.x, self.y) != (self.key_x, self.key_y)


@dataclass(frozen=True)
class PointChart:
    """Points over a logarithmic axis.

    Attributes:
        points: In the order of the systems.
        x_ticks: Milliseconds.
        y_ticks: Points, hundredths of a fraction.
    """

    points: tuple[Point, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


HEIGHT = 196.0
"""Height of a chart of points."""

LEFT, RIGHT, TOP, BOTTOM = 34.0, 336.0, 20.0, 160.0
"""Where its axes end."""

RADIUS = 8.0
"""Of a key that is a point."""

DOT = 3.0
"""Radius of a point whose key stands beside it."""

_INSET = 12.0


@dataclass(frozen=True)
class Frame:
    """The axes that the charts of a page share, so that they can be compared.

    Attributes:
        fastest: Lower end in milliseconds, a power of ten.
        slowest: Upper end, a greater one.
        low: Lower end of the fractions.
        high: Upper end.
        ticks: Fractions marked.
    """

    fastest: float
    slowest: float
    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def around(cls, milliseconds: Sequence[float], values: Sequence[float], *, to_one: bool) -> Frame:
        """Axes that hold all points.

        Args:
            milliseconds: All > 0.
            values: Fractions.
            to_one: The fractions' axis ends at 1 and starts just below the lowest value; otherwise it starts at 0.
        """
        fastest = 10.0 ** math.floor(math.log10(min(milliseconds)))
        slowest = 10.0 ** max(math.ceil(math.log10(max(milliseconds))), math.floor(math.log10(min(milliseconds))) + 1)
        scale = Scale.over(max(0.01, 1 - min(values)) if to_one else max(values))
        ticks = tuple(round(1 - tick, 10) for tick in reversed(scale.ticks)) if to_one else scale.ticks
        return cls(fastest, slowest, ticks[0], ticks[-1], ticks)

    def x(self, milliseconds: float) -> float:
        """The place of a time."""
        share = math.log(milliseconds / self.fastest) / math.log(self.slowest / self.fastest)
        return LEFT + _INSET + share * (RIGHT - LEFT - 2 * _INSET)

    def y(self, value: float) -> float:
        """The place of a fraction."""
        return BOTTOM - _INSET - (value - self.low) / (self.high - self.low) * (BOTTOM - TOP - 2 * _INSET)


def point_chart(timed: Sequence[Timed], frame: Frame) -> PointChart:
    """Lay out a chart; keys stand where they hide neither a point nor another key, as long as there is such a place.

    Args:
        timed: What to show; there is room for 30 and more.
        frame: Axes that hold it.
    """
    places = [(frame.x(each.milliseconds), frame.y(each.value)) for each in timed]
    keys: list[tuple[float, float]] = []
    for own, (x, y) in enumerate(places):
        others = [*places[:own], *places[own + 1 :]]
        on_point = all(math.dist((x, y), place) > 2 * RADIUS + 1 for place in [*others, *keys])
        keys.append((x, y) if on_point else next((place for place in _around(x, y) if _free(place, places, keys)), (x, y)))
    points = [Point(each, *place, *key) for each, place, key in zip(timed, places, keys, strict=True)]
    decades = range(round(math.log10(frame.fastest)), round(math.log10(frame.slowest)) + 1)
    return PointChart(
        tuple(points),
        tuple(Tick(frame.x(10.0**decade), f"{10.0**decade:g}", "middle") for decade in decades),
        tuple(Tick(frame.y(value), f"{100 * value:g}", "end") for value in frame.ticks),
    )


def _around(x: float, y: float) -> Iterator[tuple[float, float]]:
    """Places for a key, the nearest first: rings around the point, from its right side on."""
    distance = RADIUS + DOT + 3.0
    while distance < WIDTH:
        for turn in range(16):
            angle = math.pi * (turn // 2 + 1 if turn % 2 else -(turn // 2)) / 8
            yield x + distance * math.cos(angle), y + distance * math.sin(angle)
        distance += 6.0


def _free(place: tuple[float, float], points: Sequence[tuple[float, float]], keys: Sequence[tuple[float, float]]) -> bool:
    x, y = place
    inside = LEFT + RADIUS <= x <= RIGHT - RADIUS and TOP + RADIUS <= y <= BOTTOM - RADIUS
    clear = all(math.dist(place, point) > RADIUS + DOT + 1 for point in points)
    return inside and clear and all(math.dist(place, key) > 2 * RADIUS + 1 for key in keys)
