"""Reports of benchmarks: tables, charts, and the machine. Reports contain only measured results and published figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from quiver.eval.bench.results import OWN, Benchmark, Row, Series
from quiver.eval.report.charts import PALETTE, new_figure, save, style
from quiver.eval.report.formats import Block, Code, Figure, Paragraph, Properties, Report, Section, Table, table, write
from quiver.eval.report.formats import Column as TableColumn

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

MEBIBYTE = 2**20

REPORT, PAGE, PLOT = "report.md", "report.html", "plot.png"
"""Files of a report; the plot is written as .svg as well."""

# Hatches and markers distinguish series without colour: in print, and if there are more series than colours.
_HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo", "++")
_MARKERS = "osD^vPX*"
_TITLE_WIDTH = 48

CellText: TypeAlias = Callable[[Row], str | None]


@dataclass(frozen=True)
class Column:
    """A column of a table of rows.

    Attributes:
        label: Heading.
        text: Returns the cell of a row; None if the quantity was not measured. Columns without any cell are left out.
        numeric: Whether the cells hold numbers.
    """

    label: str
    text: CellText
    numeric: bool = True


def over_rounds(quantity: str, spec: str = ",.0f", *, statistic: str = "median", scale: float = 1.0) -> CellText:
    """Cells with a statistic of a series.

    Args:
        quantity: Name of the series.
        spec: Format of the number.
        statistic: An attribute of `Series`.
        scale: Factor that the number is multiplied by.
    """
    return lambda row: format(scale * getattr(row.series[quantity], statistic), spec) if quantity in row.series else None


def value_range(quantity: str, spec: str = ".2f") -> CellText:
    """Cells with the lowest and highest value of a series."""

    def text(row: Row) -> str | None:
        found = row.series.get(quantity)
        return None if found is None else f"{found.lowest:{spec}} to {found.highest:{spec}}"

    return text


def single(quantity: str, spec: str = "", *, scale: float = 1.0) -> CellText:
    """Cells with a single value; numbers are multiplied by ``scale``."""

    def text(row: Row) -> str | None:
        found = row.values.get(quantity)
        if found is None or isinstance(found, str):
            return found
        return format(found * scale, spec)

    return text


def variant(row: Row) -> str | None:
    """Cells with the variant of a row."""
    return row.variant or None


def backend(row: Row) -> str:
    """Cells with the backend of a row."""
    return row.backend


PEAK = Column("peak MiB", single("memory_above", ",.0f", scale=1 / MEBIBYTE))
"""Peak memory beyond the loaded model."""


def rows_table(name: str, columns: Sequence[Column], rows: Sequence[Row], *, caption: str = "") -> Table:
    """Make a table of rows; columns without any cell are left out."""
    cells = [[column.text(row) for row in rows] for column in columns]
    shown = [position for position, column in enumerate(cells) if any(cell is not None for cell in column)]
    header = [TableColumn(columns[position].label, numeric=columns[position].numeric, wide=not position) for position in shown]
    return table(header, [[cells[position][number] or "" for position in shown] for number in range(len(rows))], name=name, caption=caption)


def text_table(name: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table of texts."""
    return table([TableColumn(label, numeric=False) for label in header], rows, name=name)


def make_report(
    benchmark: Benchmark, *, conditions: str, sections: Iterable[Block], draw: Callable[[], Drawing] | None, alt: str
) -> Report:
    """Assemble a report.

    Args:
        benchmark: The results.
        conditions: Conditions of the measurement, in a few sentences.
        sections: Sections with tables.
        draw: Draws the chart; None for no chart.
        alt: Description of the chart.
    """
    blocks: list[Block] = [Paragraph(conditions), *sections]
    if draw is not None:
        blocks.append(Section("Chart", (Figure(title=alt, draw=draw, alt=alt, file="plot.svg"),)))
    if benchmark.not_run:
        rows = [[each.what, each.reason] for each in benchmark.not_run]
        blocks.append(Section("Not run", (text_table("Not run", ["", "reason"], rows),)))
    blocks.append(Section("Machine", tuple(_machine(benchmark))))
    return Report(f"{benchmark.subject.capitalize()} benchmark: {benchmark.name}", tuple(blocks))


def _machine(benchmark: Benchmark) -> Iterator[Block]:
    provenance = benchmark.provenance
    properties = {
        "Processor": benchmark.processor,
        "Platform": provenance.platform,
        "Threads": str(provenance.threads),
        "Load average before": ", ".join(f"{each:.2f}" for each in benchmark.load_average),
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(provenance.versions.items())),
        "Date": provenance.date,
    }
    yield Properties({name: value for name, value in properties.items() if value})
    if provenance.command is not None:
        yield Code(provenance.command)


def write_report(report: Report, folder: Path, *, draw: Callable[[], Drawing]) -> None:
    """Write a report as Markdown and HTML, and its chart as PNG and SVG, into a folder that exists.

    Raises:
        InputError: matplotlib or jinja2 is not installed.
    """
    write(report, folder / REPORT)
    write(report, folder / PAGE)
    drawing = draw()
    for suffix in (".png", ".svg"):
        save(drawing, (folder / PLOT).with_suffix(suffix))


def tables(report: Report) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield all tables of a report as title, header and rows, for printing in a terminal."""
    sections = [block for block in report.blocks if isinstance(block, Section)]
    while sections:
        section = sections.pop(0)
        sections[:0] = [inner for inner in section.blocks if isinstance(inner, Section)]
        for inner in section.blocks:
            if isinstance(inner, Table):
                rows = [[cell.text for cell in row.cells] for row in inner.rows]
                yield inner.name or section.title, [column.label for column in inner.columns], rows


def short_name(model: str) -> str:
    """The end of a name that is too long for a title.

    Example:
        >>> short_name("ettin-17m"), len(short_name("folder/" * 20 + "model"))
        ('ettin-17m', 48)
    """
    return model if len(model) <= _TITLE_WIDTH else "…" + model[1 - _TITLE_WIDTH :]


Groups: TypeAlias = Mapping[str, Sequence[Row]]
"""Label of a group of bars -> rows of the group."""


def draw_speed(title: str, groups: Groups, extra: Callable[[Any], None] | None = None) -> Drawing:
    """Draw tokens per second, and the time ratio of the other backends.

    Args:
        title: Title of the figure.
        groups: Cases with their rows.
        extra: Draws one more panel on the given axes; None for no such panel.
    """
    names = list(dict.fromkeys(row.backend for rows in groups.values() for row in rows))
    panels: list[Callable[[Any], None]] = [lambda axes: _draw_throughput(axes, groups, names)]
    if len(names) > 1:
        panels.append(lambda axes: _draw_ratios(axes, groups, names))
    if extra is not None:
        panels.append(extra)
    with style():
        figure = new_figure(max(7.0, 2.2 + 1.5 * len(groups)), 3.4 * len(panels), layout="constrained")
        figure.suptitle(title, fontsize=11)
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            panel(axes)
        return figure


def grouped_bars(axes: Any, groups: Sequence[str], series: Sequence[str], draw: Callable[[str, str, float, float], None]) -> None:
    """Call ``draw(group, series, x, width)`` for every bar, and label the groups."""
    width = min(0.4, 0.8 / len(series))
    for position, group in enumerate(groups):
        for number, name in enumerate(series):
            draw(group, name, position + (number - (len(series) - 1) / 2) * width, width)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.grid(axis="x", visible=False)


def bar_style(position: int, name: str) -> dict[str, Any]:
    """Colour, hatch and label of a series, by its position."""
    look = position % (len(PALETTE) - 1)
    return {"color": PALETTE[look + 1], "hatch": _HATCHES[look % len(_HATCHES)], "edgecolor": "white", "linewidth": 0.6, "label": name}


def legend(axes: Any) -> None:
    """Draw a legend above the axes, with one entry per series."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1.0))


def _find(groups: Groups, group: str, name: str) -> Mapping[str, Series]:
    return next((row.series for row in groups[group] if row.backend == name), {})


def _draw_throughput(axes: Any, groups: Groups, names: Sequence[str]) -> None:
    def draw(group: str, name: str, x: float, width: float) -> None:
        speed = _find(groups, group, name).get("tokens_per_second")
        if speed is not None:
            look = bar_style(names.index(name), name)
            axes.bar(x, speed.mean / 1000, width, yerr=speed.deviation / 1000, ecolor="#444444", capsize=2, **look)

    grouped_bars(axes, list(groups), names, draw)
    axes.set_ylabel("thousand tokens/s\n(mean, sd)")
    legend(axes)


def _draw_ratios(axes: Any, groups: Groups, names: Sequence[str]) -> None:
    def draw(group: str, name: str, x: float, width: float) -> None:
        ratio = _find(groups, group, name).get("time_ratio")
        if ratio is not None:
            error = [[ratio.median - ratio.lowest], [ratio.highest - ratio.median]]
            axes.bar(x, ratio.median, width, yerr=error, ecolor="#444444", capsize=2, **bar_style(names.index(name), name))
            axes.annotate(f"{ratio.median:.2f}", (x, ratio.highest), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)

    grouped_bars(axes, list(groups), [name for name in names if name != OWN], draw)
    axes.axhline(1, color=PALETTE[1], linewidth=1.5)
    axes.annotate(OWN, (1, 1), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=PALETTE[1], fontsize=8)
    axes.margins(y=0.15)
    axes.set_ylabel("time / quiver's\n(median, range)")


def draw_search(title: str, searches: Groups, sizes: Mapping[str, float], *, quality: tuple[str, str] | None, unit: str) -> Drawing:
    """Draw quality over latency with one line per index, and the size of each index.

    Args:
        title: Title of the figure.
        searches: Index -> rows with the series ``p50``.
        sizes: Index -> bytes per ``unit``.
        quality: Key and label of the value to draw over latency; None to draw latency only.
        unit: Unit of the sizes, document or token.
    """
    names = list(sizes)
    with style():
        figure = new_figure(8.0, 6.4 + 0.25 * len(names), layout="constrained")
        figure.suptitle(title, fontsize=11)
        speed, size = figure.subplots(2, 1, height_ratios=[3, 0.6 + 0.3 * len(names)])
        for position, (name, rows) in enumerate(searches.items()):
            ordered = sorted(rows, key=lambda row: row.series["p50"].median)
            heights = [position if quality is None else row.values[quality[0]] for row in ordered]
            look = {"color": PALETTE[1 + position % (len(PALETTE) - 1)], "marker": _MARKERS[position % len(_MARKERS)]}
            speed.plot([row.series["p50"].median for row in ordered], heights, label=name, linewidth=1.6, **look)
        speed.set_xscale("log")
        speed.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        speed.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        speed.set_xlabel("milliseconds per query, p50")
        if quality is None:
            speed.set_yticks(range(len(names)), names)
        else:
            speed.set_ylabel(quality[1])
            speed.legend(fontsize=8, frameon=False)
        for position, (_, value) in enumerate(sizes.items()):
            size.barh(position, value, color=PALETTE[1 + position % (len(PALETTE) - 1)])
            size.annotate(f"{value:,.0f}", (value, position), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
        size.set_yticks(range(len(names)), names, fontsize=8)
        size.invert_yaxis()
        size.margins(x=0.12)
        size.set_xlabel(f"bytes on disk per {unit}")
        return figure
