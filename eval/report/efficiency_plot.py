"""A run of ``quiver bench encoder`` as a picture: throughput with error bars, the ratio to Quiver, and the paper's Table 2."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from quiver.encoder.errors import InputError
from quiver.encoder.files import replacing
from quiver.eval.bench.encoder.results import OWN, EncoderBenchmark, Spread
from quiver.eval.published import EFFICIENCY_SETS, ENCODER_EFFICIENCY
from quiver.eval.report.efficiency import has_paper_sets

# Okabe and Ito's palette, which the colour-blind can tell apart; ours is the first.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
# A second channel for print and for more libraries than colours.
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo", "++")

# Characters of a model's name in a title.
_TITLE = 48

# Rows of Table 2 that the picture shows: the base models that read 8,192 tokens, and BERT.
SHOWN = ("ModernBERT", "GTE-en-MLM xformers", "NomicBERT", "BERT")


def write_efficiency_plot(benchmark: EncoderBenchmark, folder: Path, *, stem: str = "plot") -> list[Path]:
    """Draw a benchmark into ``<stem>.png`` and ``<stem>.svg``.

    Args:
        benchmark: What was measured.
        folder: Where the files go; it must exist.
        stem: Their name.

    Returns:
        The two files.

    Raises:
        InputError: matplotlib is not installed.
    """
    return save_figure(draw(benchmark), folder, stem)


def save_figure(figure: Any, folder: Path, stem: str) -> list[Path]:
    """Write a figure into ``<stem>.png`` and ``<stem>.svg`` of a folder that exists; the two files."""
    files = [folder / f"{stem}.{kind}" for kind in ("png", "svg")]
    for file in files:
        with replacing(file) as temporary:
            figure.savefig(temporary, format=file.suffix[1:], dpi=160)
    return files


def check_plotting() -> None:
    """Say early that a plot cannot be drawn.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise InputError("a plot needs matplotlib: pip install 'quiver-retrieval[eval]'") from error


def check_out(out: Path, results: str, *, overwrite: bool) -> None:
    """Refuse before an hour of work what cannot be written after it.

    Args:
        out: A folder for results, a report and a plot.
        results: The file in it that says that they are there.
        overwrite: They may be replaced.

    Raises:
        InputError: matplotlib is not installed, there is a result already, or the folder cannot be made.
    """
    check_plotting()
    if (out / results).exists() and not overwrite:
        raise InputError(f"{out / results}: there is a result already; give another --out, or --overwrite")
    # Made only when there is something to put into it: a run that fails leaves no folder.
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise InputError(f"{out}: {there} is a file, not a folder; give another --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{out}: cannot be made (no permission in the folder {there})")


def draw(benchmark: EncoderBenchmark) -> Any:
    """A benchmark as a matplotlib figure.

    Raises:
        InputError: matplotlib is not installed.
    """
    check_plotting()
    # No pyplot: it keeps figures in a global list and picks a window system.
    figure_class = importlib.import_module("matplotlib.figure").Figure
    sets = [times.name for times in benchmark.sets]
    libraries = list(dict.fromkeys(each.name for times in benchmark.sets for each in times.libraries))
    found = {(times.name, each.name): each for times in benchmark.sets for each in times.libraries}
    panels: list[Callable[[Any], None]] = [lambda axes: throughput(axes, sets, libraries, found)]
    if len(libraries) > 1:
        panels.append(lambda axes: ratios(axes, sets, libraries, found))
    if has_paper_sets(benchmark):
        panels.append(_published)
    figure = figure_class(figsize=(max(7.0, 2.2 + 1.3 * len(sets)), 3.4 * len(panels)), layout="constrained")
    figure.suptitle(_title(benchmark), fontsize=11)
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        panel(axes)
    return figure


def short_name(model: str) -> str:
    """A model's name as far as a title has room for it: the end of a long path.

    Example:
        >>> short_name("ettin-17m"), len(short_name("folder/" * 20 + "model"))
        ('ettin-17m', 48)
    """
    return model if len(model) <= _TITLE else "…" + model[1 - _TITLE :]


def _title(benchmark: EncoderBenchmark) -> str:
    settings = benchmark.settings
    work = "training step" if settings.train else "inference"
    threads = benchmark.provenance.threads
    where = f", {threads} thread{'s' * (threads != 1)}" if settings.device == "cpu" else ""
    return f"{short_name(benchmark.model)}: {work}, {settings.dtype}\n{benchmark.processor}{where}"


class Timed(Protocol):
    """What both benchmarks know of a library."""

    @property
    def tokens_per_second(self) -> Spread:
        """Over the rounds."""

    @property
    def ratio(self) -> Spread:
        """Its seconds divided by Quiver's."""


Find = Mapping[tuple[str, str], Timed]
"""Group and library -> what was timed."""


def _bars(axes: Any, groups: Sequence[str], series: Sequence[str], draw: Callable[[str, str, float, float], None]) -> None:
    """Call ``draw(group, series, x, width)`` for every bar and label the groups."""
    width = min(0.4, 0.8 / len(series))
    for place, group in enumerate(groups):
        for number, name in enumerate(series):
            draw(group, name, place + (number - (len(series) - 1) / 2) * width, width)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", linewidth=0.5, alpha=0.4)


def _style(place: int, name: str) -> dict[str, Any]:
    """Colour, hatch and label of a series by its place."""
    shape = place % len(COLOURS)
    return {"color": COLOURS[shape], "hatch": HATCHES[shape], "edgecolor": "white", "linewidth": 0.6, "label": name}


def _legend(axes: Any) -> None:
    """One entry a series, above the axes."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.0))


def throughput(axes: Any, sets: Sequence[str], libraries: Sequence[str], found: Find) -> None:
    """A panel of thousand tokens a second, a bar a library in each group."""

    def draw(group: str, name: str, x: float, width: float) -> None:
        if (group, name) in found:
            speed = found[group, name].tokens_per_second
            look = _style(libraries.index(name), name)
            axes.bar(x, speed.mean / 1000, width, yerr=speed.deviation / 1000, ecolor="#444444", capsize=2, **look)

    _bars(axes, sets, libraries, draw)
    axes.set_ylabel("thousand tokens / s\n(mean, sd)")
    _legend(axes)


def ratios(axes: Any, sets: Sequence[str], libraries: Sequence[str], found: Find) -> None:
    """A panel of the other libraries' times divided by Quiver's."""

    def draw(group: str, name: str, x: float, width: float) -> None:
        if (group, name) in found:
            ratio = found[group, name].ratio
            _ratio_bar(axes, x, width, ratio, _style(libraries.index(name), name))

    _bars(axes, sets, [name for name in libraries if name != OWN], draw)
    _own_line(axes)
    axes.set_ylabel("time / Quiver's\n(median, lowest to highest)")


def _ratio_bar(axes: Any, x: float, width: float, ratio: Spread, look: Mapping[str, Any]) -> None:
    """A median with its range, and the median in figures."""
    below, above = ratio.median - ratio.lowest, ratio.highest - ratio.median
    axes.bar(x, ratio.median, width, yerr=[[below], [above]], ecolor="#444444", capsize=2, **look)
    axes.annotate(f"{ratio.median:.2f}", (x, ratio.highest), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)


def _own_line(axes: Any) -> None:
    """Where Quiver stands among ratios to it."""
    axes.axhline(1, color=COLOURS[0], linewidth=1.5)
    axes.annotate(OWN, (1, 1), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=COLOURS[0], fontsize=8)
    axes.margins(y=0.15)


def _published(axes: Any) -> None:
    # Other colours than above: these are other models on another machine.
    rows = {each.model: each for each in ENCODER_EFFICIENCY if each.size == "base" and each.model in SHOWN}

    def draw(group: str, name: str, x: float, width: float) -> None:
        if group in rows[name].kilotokens:
            axes.bar(x, rows[name].kilotokens[group], width, **_style(len(COLOURS) // 2 + SHOWN.index(name), name))

    _bars(axes, EFFICIENCY_SETS, SHOWN, draw)
    axes.set_ylabel("thousand tokens / s\n(paper's Table 2, RTX 4090)")
    _legend(axes)
