"""A sweep to read: the candidates, best first, with the command that trains the best, and a picture of the scores."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape as escape_xml
from pathlib import Path

from quiver.encoder.files import write_text
from quiver.eval.report import svg
from quiver.eval.report.tables import escape, table
from quiver.retrieval.training.grid import LEARNING_RATE, SEED, Value, short_names, show_settings, show_value
from quiver.retrieval.training.sweep import Candidate, Sweep

REPORT, PLOT = "sweep.md", "sweep.svg"
"""The files of `write_sweep_report`, beside sweep.json."""

COLOURS = (
    ("#0a68a6", "#6bb7ea"),
    ("#b04a00", "#f3984f"),
    ("#00755a", "#48c9a4"),
    ("#9d3f7c", "#e89ac9"),
    ("#77610a", "#dcc252"),
    ("#5a48a8", "#b6a6f2"),
    ("#22748c", "#8cd6e8"),
    ("#7d3b2a", "#d9a796"),
)
"""Of the lines on light and on dark, as the pages have them."""

_STYLE = (
    "text{{font:12px system-ui,sans-serif;fill:#20242a}}.tick{{font-size:10px;fill:#5a6068}}.grid{{stroke:#dcd8ce}}"
    ".axis{{stroke:#5a6068;fill:none}}.page{{fill:#fcfbf8}}.line{{fill:none;stroke:var(--key);stroke-width:1.5}}.dot{{fill:var(--key)}}"
    ".seed{{fill:none;stroke:var(--key);opacity:.7}}{light}"
    "@media(prefers-color-scheme:dark){{text{{fill:#e7e5e0}}.tick{{fill:#a3abb5}}.grid{{stroke:#363d48}}.axis{{stroke:#a3abb5}}"
    ".page{{fill:#15181d}}{dark}}}"
).format(
    light="".join(f".c{place}{{--key:{light}}}" for place, (light, _) in enumerate(COLOURS)),
    dark="".join(f".c{place}{{--key:{dark}}}" for place, (_, dark) in enumerate(COLOURS)),
)
_TICK_SIZE = 10.0
_LEGEND_LINE = 17.0
_MARGIN = 10.0


def write_sweep_report(sweep: Sweep, folder: str | Path) -> list[Path]:
    """Write ``sweep.md`` and, once a run is finished, ``sweep.svg``; files already there are replaced.

    Args:
        sweep: What `quiver.retrieval.training.sweep.run_sweep` has found so far.
        folder: Its folder.

    Returns:
        The files.

    Raises:
        InputError: They cannot be written.
    """
    target = Path(folder)
    scored = [candidate for candidate in sweep.candidates if candidate.scores]
    if scored:
        write_text(target / PLOT, render_plot(sweep, scored))
    write_text(target / REPORT, render_sweep(sweep, target, plot=bool(scored)))
    return [target / name for name in ((REPORT, PLOT) if scored else (REPORT,))]


def train_command(sweep: Sweep, out: str | Path) -> str:
    """The command that trains the best candidate again.

    Raises:
        ValueError: No candidate is whole yet.
    """
    if sweep.best is None:
        raise ValueError("no candidate of this sweep is whole yet")
    return shlex.join(["quiver", "train", sweep.recipe, "--out", str(out), *sweep.best.overrides])


def render_sweep(sweep: Sweep, folder: Path, *, plot: bool) -> str:
    """The sweep as Markdown; nDCG@10 in points, hundredths of a fraction.

    Args:
        sweep: What was found.
        folder: Where it was found: the command for the best names a folder inside of it.
        plot: Show the picture.
    """
    counts = {status: sum(run.status == status for run in sweep.runs) for status in ("finished", "failed", "waiting")}
    where = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    parts = [
        f"# Sweep of {escape(sweep.name)}",
        f"{len(sweep.runs)} runs: {where}. Selected by nDCG@10 on {escape(sweep.development['data'])}, split "
        f"{escape(sweep.development['split'])}{', the mean over the seeds' if SEED in sweep.axes else ''}.",
        _table(sweep),
    ]
    if sweep.best is not None:
        parts += [f"## The best: {escape(show_settings(sweep.best.settings) or 'the recipe')}"]
        parts += ["Trained already: " + ", ".join(f"`{run}/model`" for run in sweep.best.folders) + ". To train it again:"]
        parts += [f"```\n{train_command(sweep, folder / 'best')}\n```"]
        parts += cautions(sweep)
    if plot:
        parts.append(f"![nDCG@10 of the candidates]({PLOT})")
    if failed := [run for run in sweep.runs if run.error is not None]:
        parts += ["## Failed", table(["Run", "Why"], [[run.folder, run.error or ""] for run in failed])]
        parts += ["The command of the sweep, given again, tries them once more."]
    if sweep.command:
        parts += ["## Command", f"```\n{sweep.command}\n```"]
    return "\n\n".join(parts) + "\n"


def cautions(sweep: Sweep) -> list[str]:
    """What speaks against taking the best candidate for granted: it lies at an end of the axis, or within the noise of the seeds."""
    best = sweep.best
    if best is None:
        return []
    found = []
    for path, values in sweep.axes.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if path != SEED and len(numbers) == len(values) > 1 and best.settings[path] in (min(numbers), max(numbers)):
            end = "highest" if best.settings[path] == max(numbers) else "lowest"
            found.append(f"{path}={show_value(best.settings[path])} is the {end} value that was tried; one beyond it may be better.")
    close = [other for other in sweep.candidates[1:] if not other.missing and _within_noise(best, other)]
    if close:
        names = "; ".join(show_settings(other.settings) for other in close)
        found.append(f"Less than two standard errors of the seeds' means behind: {names}. More seeds would tell them apart.")
    if best.deviation is None and len(sweep.candidates) > 1:
        found.append("One seed a candidate: how far scores differ from seed to seed is not known. training.seed=1,2,3 makes seeds an axis.")
    return found


def _within_noise(best: Candidate, other: Candidate) -> bool:
    if best.mean is None or other.mean is None or best.deviation is None or other.deviation is None:
        return False
    error = math.hypot(best.deviation / math.sqrt(len(best.scores)), other.deviation / math.sqrt(len(other.scores)))
    return best.mean - other.mean < 2 * error


def _table(sweep: Sweep) -> str:
    axes = [path for path in sweep.axes if path != SEED]
    labels = short_names(axes)
    seeds = SEED in sweep.axes
    header = ["", *(labels[path] for path in axes), "nDCG@10", *(["Deviation", "By seed"] if seeds else [])]
    rows = []
    for place, candidate in enumerate(sweep.candidates, start=1):
        cells = [_points(candidate.mean)]
        if seeds:
            cells += [_points(candidate.deviation), " ".join(map(_points, candidate.scores))]
        rank = str(place) if not candidate.missing else "incomplete"
        rows.append([rank, *(show_value(candidate.settings[path]) for path in axes), *cells])
    return table(header, rows)


def _points(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.2f}"


def render_plot(sweep: Sweep, scored: Sequence[Candidate]) -> str:
    """A picture as SVG: nDCG@10 over the learning rate, one line for each combination of the other settings; rings are single seeds.

    Where the learning rate is no axis, the candidates stand below each other as bars.

    Args:
        sweep: What was found.
        scored: Candidates with a score; at least one.
    """
    return _lines(sweep, scored) if len(sweep.axes.get(LEARNING_RATE, ())) > 1 else _bars(scored)


def _bars(scored: Sequence[Candidate]) -> str:
    measured = [svg.Measured("", 0, show_settings(each.settings) or "the recipe", each.mean or 0.0) for each in scored]
    chart = svg.bar_chart(measured, svg.Scale.over(max(each.value for each in measured)))
    marks = []
    for bar in chart.bars:
        marks += [f'<text x="0" y="{y:.1f}">{escape_xml(line)}</text>' for line, y in bar.lines]
        marks.append(f'<text x="{svg.END}" y="{bar.lines[0][1]:.1f}" text-anchor="end">{_points(bar.measured.value)}</text>')
        marks.append(f'<rect class="dot" x="0" y="{bar.top:.1f}" width="{bar.length:.1f}" height="{svg.BAR}"/>')
    for tick in chart.ticks:
        marks.append(f'<text class="tick" x="{tick.place:.1f}" y="{chart.bottom + 13:.1f}" text-anchor="{tick.anchor}">{tick.text}</text>')
    return _picture(f'<g class="c0">{"".join(marks)}</g>', chart.height, "nDCG@10 of the candidates")


def _lines(sweep: Sweep, scored: Sequence[Candidate]) -> str:
    frame = _frame([score for each in scored for score in each.scores], sweep.axes[LEARNING_RATE])
    marks = ['<text class="tick" x="0" y="12">nDCG@10</text>', *_axes(frame, sweep.axes[LEARNING_RATE])]
    groups: dict[str, list[Candidate]] = {}
    for each in scored:
        others = {path: value for path, value in each.settings.items() if path != LEARNING_RATE}
        groups.setdefault(show_settings(others), []).append(each)
    bottom = svg.HEIGHT
    for place, (label, members) in enumerate(groups.items()):
        colour = f"c{place % len(COLOURS)}"
        marks.append(f'<g class="{colour}">{"".join(_line(members, frame))}</g>')
        for line in svg.wrap(label, svg.WIDTH - 2 * svg.LEFT, svg.LABEL_SIZE) if label else []:
            marks.append(f'<text x="{svg.LEFT}" y="{bottom + 12:.1f}">{escape_xml(line)}</text>')
            bottom += _LEGEND_LINE
        if label:
            marks.append(f'<circle class="dot {colour}" cx="{svg.LEFT - 12}" cy="{bottom - _LEGEND_LINE + 8:.1f}" r="4"/>')
    return _picture("".join(marks), bottom, "nDCG@10 by learning rate")


def _frame(scores: Sequence[float], rates: Sequence[Value]) -> svg.Frame:
    """Axes around the scores, not from zero: candidates of a sweep lie close to each other."""
    numbers = [float(rate) for rate in rates if isinstance(rate, int | float)]
    spread = max(max(scores) - min(scores), 0.005)
    step = next(step for step in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if spread <= 5 * step)
    low, high = math.floor(min(scores) / step), math.ceil(max(scores) / step)
    ticks = tuple(round(step * place, 10) for place in range(low, max(high, low + 1) + 1))
    return svg.Frame(min(numbers), max(numbers), ticks[0], ticks[-1], ticks)


def _axes(frame: svg.Frame, rates: Sequence[Value]) -> Iterator[str]:
    for value in frame.ticks:
        y = frame.y(value)
        yield f'<line class="grid" x1="{svg.LEFT}" x2="{svg.RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{svg.LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{100 * value:g}</text>'
    end = -math.inf
    for rate in sorted(float(rate) for rate in rates if isinstance(rate, int | float)):
        x, text = frame.x(rate), show_value(rate)
        half = svg.text_width(text, _TICK_SIZE) / 2
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{svg.TOP}" y2="{svg.BOTTOM}"/>'
        if x - half > end:  # one label on another could not be read
            yield f'<text class="tick" x="{x:.1f}" y="{svg.BOTTOM + 15:.1f}" text-anchor="middle">{text}</text>'
            end = x + half
    yield f'<text class="tick" x="{svg.RIGHT}" y="{svg.BOTTOM + 32:.1f}" text-anchor="end">learning rate</text>'
    yield f'<path class="axis" d="M{svg.LEFT} {svg.TOP}V{svg.BOTTOM}H{svg.RIGHT}"/>'


def _line(members: Sequence[Candidate], frame: svg.Frame) -> Iterator[str]:
    """The means joined in the order of their learning rates, and a ring for every seed."""
    ordered = sorted(members, key=lambda each: _rate(each.settings))
    points = [(frame.x(_rate(each.settings)), frame.y(each.mean or 0.0), each) for each in ordered]
    yield f'<path class="line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y, _ in points)}"/>'
    for x, y, each in points:
        title = escape_xml(f"{show_settings(each.settings)}: {_points(each.mean)}")
        yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{title}</title></circle>'
        for score in each.scores if len(each.scores) > 1 else ():
            yield f'<circle class="seed" cx="{x:.1f}" cy="{frame.y(score):.1f}" r="2.5"/>'


def _rate(settings: Mapping[str, Value]) -> float:
    rate = settings[LEARNING_RATE]
    return float(rate) if isinstance(rate, int | float) else math.nan


def _picture(marks: str, height: float, title: str) -> str:
    box = f"{-_MARGIN} {-_MARGIN} {svg.WIDTH + 2 * _MARGIN} {height + 2 * _MARGIN:.1f}"
    page = f'<rect class="page" x="{-_MARGIN}" y="{-_MARGIN}" width="100%" height="100%"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{2 * svg.WIDTH}" role="img">'
        f"<title>{title}</title><style>{_STYLE}</style>{page}{marks}</svg>\n"
    )
