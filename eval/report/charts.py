"""Charts by matplotlib: bars with intervals, quality over latency, curves over steps; and figures as SVG for files and pages.

Figures use the colours of `PALETTE` and `INK`. In an HTML page these become CSS variables, so that a chart follows the page into dark mode.
"""

from __future__ import annotations

import importlib
import io
import math
import re
import unicodedata
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from quiver.encoder.errors import InputError
from quiver.encoder.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

PALETTE = ("#62676e", "#0a68a6", "#b04a00", "#00755a", "#9d3f7c", "#77610a", "#5a48a8", "#22748c", "#7d3b2a")
"""Colours of systems on a light page: dark enough for text, and distinct without telling red from green. The first is the grey of BM25."""

INK, MUTED, RULE, PAPER = "#20242a", "#5a6068", "#dcd8ce", "#fcfbf8"
"""Colours of text, small text, grid lines and background on a light page."""

VARIABLES: Mapping[str, str] = {
    **{colour: f"var(--c{position})" for position, colour in enumerate(PALETTE)},
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
}
"""Colour of a figure -> CSS variable of the page, which has another value in dark mode."""

WIDTH = 4.2
"""Width of a chart on a page, in inches."""

MAX_DOTS = 40
"""Curves with more points are drawn without dots."""

SMOOTH_FROM = 50
"""Number of points from which a noisy curve gets a running mean, over a twenty-fifth of the points on either side."""

Points: TypeAlias = Sequence[tuple[float, float]]
"""(step, value) with rising steps."""

_RC: Mapping[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be read, searched and copied
    "svg.hashsalt": "quiver",  # equal figures give equal bytes
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "figure.facecolor": "none",
}
_SPAN = 25
_POINTS_PER_INCH = 72.0


@dataclass(frozen=True)
class Key:
    """Short name of a system: a letter on a coloured badge, the same in tables and charts."""

    letter: str
    colour: int
    label: str


@dataclass(frozen=True)
class Bar:
    """A bar of a chart."""

    key: Key
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Dot:
    """A point of a chart of quality over latency."""

    key: Key
    milliseconds: float
    value: float
    hollow: bool = False


@dataclass(frozen=True)
class Curve:
    """A metric over the steps of a run."""

    title: str
    points: Points
    percent: bool = False
    smooth: bool = False


def check_matplotlib() -> None:
    """Check that charts can be drawn."""
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise InputError("charts need matplotlib: pip install 'quiver-retrieval[eval]'") from error


def new_figure(width: float, height: float, **options: Any) -> Drawing:
    """Make a figure of a size in inches; use it inside `style` only.

    pyplot is not used: it keeps figures in a global list and picks a window system.
    """
    check_matplotlib()
    figure: Drawing = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), **options)
    return figure


def style() -> Any:
    """Context manager with the settings of all charts."""
    check_matplotlib()
    return importlib.import_module("matplotlib").rc_context(_RC)


def _make_ticks(*, integer: bool = False) -> Any:
    return importlib.import_module("matplotlib.ticker").MaxNLocator(5, integer=integer)


def bar_chart(bars: Sequence[Bar], top: float) -> Drawing:
    """Draw horizontal bars with their names, values and intervals."""
    with style():
        height = 0.42 * len(bars) + 0.34
        figure = new_figure(WIDTH, height)
        axes = figure.add_axes((0.01, 0.28 / height, 0.80, 1 - 0.30 / height))
        for position, bar in enumerate(bars):
            _draw_bar(axes, bar, position, top)
        axes.set(xlim=(0, top), ylim=(len(bars) - 0.36, -0.56), yticks=[])
        ticks = [tick for tick in _make_ticks().tick_values(0, top) if tick <= top * 1.001]
        axes.set_xticks(ticks, [f"{100 * tick:g}" for tick in ticks])
        axes.get_xticklabels()[0].set_horizontalalignment("left")
        axes.grid(axis="y", visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)
        return figure


def _draw_bar(axes: Any, bar: Bar, position: int, top: float) -> None:
    colour = PALETTE[bar.key.colour]
    drawn = axes.barh(position + 0.08, bar.value, 0.42, color=colour, alpha=0.8)
    _set_tip(drawn[0], f"{bar.key.label}: {100 * bar.value:.2f}")
    lettered = f"{bar.key.letter}  " if bar.key.letter else ""
    name = lettered + fit(visible(bar.key.label), 34 if lettered else 38)
    axes.text(0.006 * top, position - 0.20, name, fontsize=9, va="bottom")
    axes.text(1.235 * top, position - 0.20, f"{100 * bar.value:.2f}", fontsize=9, fontweight="bold", ha="right", va="bottom")
    if bar.low is not None and bar.high is not None:
        low, high = max(0.0, bar.low), min(top, bar.high)
        axes.plot([low, high], [position + 0.08] * 2, color=PAPER, linewidth=3.6, alpha=0.75, solid_capstyle="butt")
        axes.plot([low, high], [position + 0.08] * 2, color=INK, linewidth=1.2, marker="|", markersize=6)
        axes.text(1.235 * top, position + 0.08, interval(bar.low, bar.high), fontsize=8, color=MUTED, ha="right", va="center")


def axis_top(highest: float) -> float:
    """Round end of an axis from 0 that holds a value.

    Example:
        >>> axis_top(0.657), axis_top(0.31), axis_top(0.0)
        (0.7, 0.35, 0.01)
    """
    step = next((step for step in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if highest <= 5 * step), 0.2)
    step = step / 2 if highest > 0 else step
    return round(step * max(math.ceil(highest / step - 1e-9), 1), 10) if highest > 0 else 0.01


def interval(low: float, high: float) -> str:
    """An interval of fractions in points, for small print."""
    return f"{100 * low:.1f}\N{EN DASH}{100 * high:.1f}"


def latency_limits(dots: Sequence[Dot], *, to_one: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """Limits of both axes that hold all points, for charts that are to be compared.

    Args:
        dots: All points of all charts, at least one.
        to_one: The axis of fractions ends at 1 and starts below the lowest one; otherwise it starts at 0.

    Returns:
        Milliseconds, powers of ten; and fractions.
    """
    fastest, slowest = (chosen(dot.milliseconds for dot in dots) for chosen in (min, max))
    first = math.floor(math.log10(fastest))
    last = max(math.ceil(math.log10(slowest)), first + 1)
    values = [dot.value for dot in dots]
    fractions = (1 - axis_top(max(0.01, 1 - min(values))), 1.0) if to_one else (0.0, axis_top(max(values)))
    return (10.0**first, 10.0**last), fractions


def latency_chart(
    dots: Sequence[Dot],
    limits: tuple[tuple[float, float], tuple[float, float]],
    measure: str,
    *,
    time: str = "search time per query without encoding, ms",
) -> Drawing:
    """Draw quality over latency, every point with the letter of its system."""
    (fastest, slowest), (low, high) = limits
    with style():
        figure = new_figure(WIDTH, 2.75)
        axes = figure.add_axes((0.09, 0.17, 0.89, 0.73))
        margin = 0.06
        spread = (slowest / fastest) ** margin
        axes.set_xscale("log")
        axes.set(xlim=(fastest / spread, slowest * spread), ylim=(low - margin * (high - low), high + margin * (high - low)))
        axes.minorticks_off()
        decades = [10.0**power for power in range(round(math.log10(fastest)), round(math.log10(slowest)) + 1)]
        axes.set_xticks(decades, [f"{decade:g}" for decade in decades])
        ticks = _make_ticks().tick_values(low, high)
        ticks = [tick for tick in ticks if low - 1e-9 <= tick <= high + 1e-9]
        axes.set_yticks(ticks, [f"{round(100 * tick, 8):g}" for tick in ticks])
        axes.tick_params(length=0)
        axes.set_xlabel(time, fontsize=8, loc="right")
        figure.text(0.01, 0.94, measure, fontsize=8, color=MUTED)
        places = [tuple(axes.transData.transform((dot.milliseconds, dot.value))) for dot in dots]
        box = axes.bbox
        for dot, (x, y), letter in zip(dots, places, _place_letters(places, (box.x0, box.y0, box.x1, box.y1)), strict=True):
            _draw_dot(axes, dot, (letter[0] - x, letter[1] - y), measure, figure.dpi)
        return figure


def _draw_dot(axes: Any, dot: Dot, offset: tuple[float, float], measure: str, dpi: float) -> None:
    colour = PALETTE[dot.key.colour]
    (drawn,) = axes.plot(
        [dot.milliseconds],
        [dot.value],
        marker="o",
        markersize=6.5,
        markeredgecolor=colour,
        markerfacecolor=PAPER if dot.hollow else colour,
        markeredgewidth=1.6,
        linestyle="none",
    )
    _set_tip(drawn, f"{dot.key.label}: {measure} {100 * dot.value:.2f} at {dot.milliseconds:.3g} ms per query")
    axes.annotate(
        dot.key.letter,
        (dot.milliseconds, dot.value),
        xytext=(offset[0] * _POINTS_PER_INCH / dpi, offset[1] * _POINTS_PER_INCH / dpi),
        textcoords="offset points",
        ha="center",
        va="center_baseline",
        fontsize=9,
        fontweight="bold",
        color=colour,
        arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 5, "shrinkB": 3},
    )


def _place_letters(places: Sequence[tuple[float, float]], box: tuple[float, float, float, float]) -> list[tuple[float, float]]:
    """A place near every point for its letter, in pixels: on no other point or letter as long as there is such a place."""
    taken = list(places)
    found = []
    for x, y in places:
        free = (position for position in _ring_places(x, y) if _is_free(position, taken, box))
        found.append(next(free, (x, y)))
        taken.append(found[-1])
    return found


def _ring_places(x: float, y: float) -> Iterator[tuple[float, float]]:
    for distance in range(18, 240, 8):
        for turn in range(16):
            angle = math.pi * ((turn + 1) // 2) * (-1) ** turn / 8
            yield x + distance * math.cos(angle), y + distance * math.sin(angle)


def _is_free(position: tuple[float, float], taken: Sequence[tuple[float, float]], box: tuple[float, float, float, float]) -> bool:
    inside = box[0] + 9 <= position[0] <= box[2] - 9 and box[1] + 9 <= position[1] <= box[3] - 9
    return inside and all(math.dist(position, other) >= 17 for other in taken)


def curve_chart(curve: Curve, last_step: float, resumed: Sequence[float] = ()) -> Drawing:
    """Draw a metric over the steps of a run.

    Args:
        curve: The metric; at least one value is finite.
        last_step: End of the axis of steps, at least the last step of the curve and > 0.
        resumed: Steps at which the run was resumed, drawn as dashed lines.
    """
    known = finite(curve.points)
    values = [value for _, value in known]
    factor, unit = (100.0, "points") if curve.percent else unit_of(max(map(abs, values)))
    with style():
        figure = new_figure(WIDTH, 2.6)
        axes = figure.add_axes((0.11, 0.17, 0.86, 0.73))
        smoothed = running_mean(known) if curve.smooth and len(known) >= SMOOTH_FROM else []
        thin: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.4} if smoothed else {"linewidth": 1.4}
        gaps = [(step, factor * value if math.isfinite(value) else math.nan) for step, value in curve.points]
        axes.plot(*zip(*gaps, strict=True), color=PALETTE[1], **thin)
        if smoothed:
            axes.plot([step for step, _ in smoothed], [factor * value for _, value in smoothed], color=PALETTE[1], linewidth=1.4)
        if len(known) <= MAX_DOTS:
            _draw_steps(axes, known, curve, factor)
        for step in resumed:
            if 0 < step < last_step:
                axes.axvline(step, color=MUTED, linewidth=0.9, linestyle=(0, (3, 3)), gid=f"resumed-{step:g}")
        axes.xaxis.set_major_locator(_make_ticks(integer=True))
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
        axes.yaxis.set_major_locator(_make_ticks())
        axes.yaxis.set_major_formatter(lambda value, _: f"{round(value, 10):g}")
        axes.set_xlim(0, 1.01 * last_step)
        if not curve.percent:
            axes.set_ylim(bottom=min(0.0, *(factor * value for value in values)))
        axes.grid(axis="x", visible=False)
        axes.tick_params(length=0)
        axes.set_xlabel("updates", fontsize=8, loc="right")
        figure.text(0.01, 0.94, unit, fontsize=8, color=MUTED)
        return figure


def _draw_steps(axes: Any, known: Points, curve: Curve, factor: float) -> None:
    best = max(value for _, value in known)
    for step, value in known:
        ring = curve.percent and value == best
        (drawn,) = axes.plot(
            [step],
            [factor * value],
            marker="o",
            markersize=5.5 if ring else 3.6,
            markeredgecolor=PALETTE[1],
            markerfacecolor=PAPER if ring else PALETTE[1],
            linestyle="none",
        )
        _set_tip(drawn, f"step {step:,.0f}: {_format_value(value, percent=curve.percent)}")


def curve_note(curve: Curve) -> str:
    """The first and the last value of a curve in words; for a fraction the best one."""
    known = finite(curve.points)
    if curve.percent:
        step, value = max(known, key=lambda point: point[1])
        return f"best {_format_value(value, percent=True)} at step {step:,.0f}"
    first, last = (_format_value(known[position][1], percent=False) for position in (0, -1))
    return f"{first} to {last}" if len(known) > 1 else last


def _format_value(value: float, *, percent: bool) -> str:
    if percent:
        return f"{100 * value:.2f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def finite(points: Points) -> Points:
    """The points whose values are finite."""
    return [(step, value) for step, value in points if math.isfinite(value)]


def running_mean(points: Points) -> list[tuple[float, float]]:
    """The mean over a point and its neighbours on either side; at an end, over those that exist.

    Example:
        >>> running_mean([(step, step % 2) for step in range(50)])[25]
        (25, 0.6)
    """
    span = len(points) // _SPAN
    means = []
    for position, (step, _) in enumerate(points):
        inside = points[max(0, position - span) : position + span + 1]
        means.append((step, math.fsum(value for _, value in inside) / len(inside)))
    return means


def unit_of(highest: float) -> tuple[float, str]:
    """Factor that makes the figures of an axis short, and the name of the unit that this gives.

    Example:
        >>> unit_of(13_079), unit_of(3.0)
        ((0.001, 'thousands'), (1.0, ''))
    """
    if highest >= 10_000:
        exponent = min(15, int(math.log10(highest / 10) / 3 + 1e-9) * 3)
        names = {3: "thousands", 6: "millions", 9: "billions", 12: "10¹²", 15: "10¹⁵"}
        return 10.0**-exponent, names[exponent]
    if 0 < highest < 0.01:
        exponent = math.floor(math.log10(highest))
        return 10.0**-exponent, f"\N{MULTIPLICATION SIGN} 10{str(exponent).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return 1.0, ""


def fit(text: str, length: int) -> str:
    """Shorten a text with an ellipsis to a number of average characters; wide characters count as two.

    Example:
        >>> fit("short", 18), fit("sentence-transformers/all-MiniLM-L6-v2", 18)
        ('short', 'sentence-transfor…')
    """
    flat = " ".join(text.split())
    widths = list(accumulate(2 if each in "MWmw@%" or unicodedata.east_asian_width(each) in "WF" else 1 for each in flat))
    return flat if not flat or widths[-1] <= length else flat[: bisect_right(widths, length - 1)].rstrip() + "…"


def visible(text: str) -> str:
    r"""Replace characters without a visible glyph: control characters, directional overrides, unpaired surrogates.

    Example:
        >>> visible("a\x00b\r\nc\u202ed")
        'a␀b\nc�d'
    """
    pictured = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda control: chr(0x2400 + ord(control[0])), text.replace("\r\n", "\n"))
    return re.sub("[\x7f-\x9f\u202d\u202e\ufffe\uffff\ud800-\udfff]", "\ufffd", pictured)


def _set_tip(artist: Any, text: str) -> None:
    """Give an element of a chart a text that a browser shows when the pointer rests on it."""
    artist.set_gid(f"tip:{visible(text)}")


def svg(drawing: Drawing, *, prefix: str, label: str = "", inline: bool = True) -> str:
    """A figure as an SVG element. Equal figures give equal bytes.

    Args:
        drawing: The figure.
        prefix: Start of all ids in the element, unique in its page.
        label: Description of the figure in words.
        inline: Whether the SVG is part of an HTML page and uses its CSS variables; otherwise it is a stand-alone file.
    """
    buffer = io.StringIO()
    with style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has the glyph
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="tip:([^"]*)">', r"<g><title>\1</title>", text)
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", text)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0]
    size = "" if inline else f' width="{float(width) * 1.5:g}" height="{float(height) * 1.5:g}" xmlns="http://www.w3.org/2000/svg"'
    links = "" if inline else ' xmlns:xlink="http://www.w3.org/1999/xlink"'
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(visible(label))}"{size}{links}>'
    body = re.sub(r"^<svg[^>]*>", "", text)
    if not inline:
        return head + body
    body = body.replace("xlink:href", "href").replace("'DejaVu Sans'", "var(--sans)")
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    return (head + body).rstrip("\n")


def save(drawing: Drawing, path: Path) -> None:
    """Write a figure into a file of the format that its suffix names."""
    with style(), replacing(path) as temporary:
        drawing.savefig(temporary, format=path.suffix[1:], dpi=160)
