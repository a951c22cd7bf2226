"""A run of ``quiver bench index`` as Markdown, as a page and as a picture; none adds a number that is not in its results.

Bytes a vector and a document are the bytes on the disk divided by what was indexed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quiver.encoder.files import write_text
from quiver.eval.bench.encoder.results import OWN
from quiver.eval.bench.index.results import IndexBenchmark, PointResult, SystemResult
from quiver.eval.report.efficiency import MEBIBYTE, where
from quiver.eval.report.efficiency_plot import COLOURS, check_plotting, save_figure, short_name
from quiver.eval.report.html import render_page
from quiver.eval.report.page_tables import Cell, Column, Key, Table
from quiver.eval.report.svg import Frame, PointChart, Timed, point_chart
from quiver.eval.report.tables import escape, table
from quiver.retrieval.index.engines import format_settings

_MARKERS = "osD^vPX*"


def write_index_quality_report(benchmark: IndexBenchmark, path: Path) -> None:
    """Write the report as Markdown; one already there is replaced."""
    write_text(path, render_index_quality(benchmark))


def write_index_quality_page(benchmark: IndexBenchmark, path: Path) -> None:
    """Write the report as a page; one already there is replaced.

    Raises:
        InputError: jinja2 is not installed.
    """
    write_text(path, render_index_quality_page(benchmark))


def render_index_quality(benchmark: IndexBenchmark) -> str:
    """The report as Markdown."""
    parts = [f"# Index benchmark: {escape(benchmark.data)}", escape(conditions(benchmark))]
    parts += ["## Search", table(*search_table(benchmark)), escape(search_note(benchmark))]
    if (answered := throughput_table(benchmark)) is not None:
        parts += ["## Queries a second", table(*answered), escape(THROUGHPUT_NOTE)]
    parts += ["## Build, disk and memory", table(*size_table(benchmark)), escape(SIZE_NOTE)]
    parts += ["## Systems", table(*system_table(benchmark))]
    if benchmark.not_run:
        parts += ["## Not run", table(["", "Why"], [[each.what, each.reason] for each in benchmark.not_run])]
    return "\n\n".join([*parts, "## Where", *where(benchmark)]) + "\n"


def render_index_quality_page(benchmark: IndexBenchmark) -> str:
    """The report as one HTML page that needs nothing but itself.

    Raises:
        InputError: jinja2 is not installed.
    """
    keys = _keys(benchmark)
    answered = throughput_table(benchmark)
    facts = {
        "Processor": benchmark.processor,
        "Platform": benchmark.provenance.platform,
        "Load before": ", ".join(f"{each:.2f}" for each in benchmark.load_average),
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(benchmark.provenance.versions.items())),
        "Date": benchmark.provenance.date,
    }
    content: dict[str, object] = {
        "conditions": conditions(benchmark),
        "search": _table("Search", *search_table(benchmark), keys=keys),
        "search_note": search_note(benchmark),
        "throughput": None if answered is None else _table("Queries a second", *answered, keys=keys),
        "throughput_note": THROUGHPUT_NOTE,
        "sizes": _table("Build, disk and memory", *size_table(benchmark), texts=1),
        "size_note": SIZE_NOTE,
        "systems": _table("Systems", *system_table(benchmark), texts=4),
        "chart": _chart(benchmark, keys),
        "measure": f"Recall@{benchmark.settings.k}",
        "keys": list(keys.values()),
        "not_run": benchmark.not_run,
        "facts": {name: fact for name, fact in facts.items() if fact},
        "command": benchmark.provenance.command,
    }
    return render_page("index_quality.html.j2", content, title=f"Index benchmark: {benchmark.data}")


def conditions(benchmark: IndexBenchmark) -> str:
    """What was measured and how, in some sentences."""
    settings, token = benchmark.settings, benchmark.kind == "colbert"
    asked = f"{benchmark.queries:,} queries" + (f" of {benchmark.query_vectors / benchmark.queries:.1f} vectors" if token else "")
    parts = [
        f"{benchmark.documents:,} documents, {benchmark.vectors:,} vectors of {benchmark.dim} dimensions,"
        f" one a {'token' if token else 'document'}; {asked}."
    ]
    if benchmark.model is not None:
        parts.append(f"Model: {benchmark.model}.")
    if benchmark.synthetic:
        parts.append(
            "Documents beyond those of the collection are noisy copies of them: latency and size mean something, quality does not."
        )
    parts += [
        "Every system has the same float32 vectors and a process of its own, which may use as many CPUs as it has threads:"
        f" {settings.build_threads} to build.",
        f"Single queries: {settings.rounds} rounds over all queries in turns, every other one backwards, after one that is not counted;"
        f" {settings.k} hits, one thread.",
        "Where the machine has other work, processor time says more than wall clock.",
    ]
    return " ".join(parts)


def search_note(benchmark: IndexBenchmark) -> str:
    """How to read the columns of `search_table`."""
    percentiles = (
        "p50, p95 and p99 are milliseconds of a single query: percentiles over the queries, median over the rounds; behind p50 its range."
        " CPU is processor time a query."
    )
    if benchmark.synthetic:
        return percentiles
    deep, k = benchmark.settings.deep, benchmark.settings.k
    parts = [
        f"Recall is the share of the documents of exact search over the float32 vectors that is found; recall@{deep} is of a search for"
        f" {deep} hits, whose p50 is that of one pass, the others of one for {k}.",
        percentiles,
    ]
    if any(point.allowed is not None for _, point in _all_points(benchmark)):
        parts.append("Where a filter allows a share of the documents, drawn at random, exact search is among these.")
    if benchmark.exact_ndcg is not None:
        parts.append(f"nDCG@10 of exact search: {benchmark.exact_ndcg:.4f} over {benchmark.judged:,} judged queries.")
    return " ".join(parts)


THROUGHPUT_NOTE = "All queries are given at once, in a process that may use so many CPUs; the median over the rounds."
"""How to read `throughput_table`."""


SIZE_NOTE = (
    "Disk is all files of the index. A build is timed until the index is on the disk, without encoding or reading the vectors. Peaks are"
    " the resident set beyond that of the process with its libraries; of a build that takes all vectors at once they are part of it."
    " Private and mapped are what the open index has taken after all queries: memory of its own, and parts of its files."
)
"""How to read `size_table`."""


def search_table(benchmark: IndexBenchmark) -> tuple[list[str], list[list[str]]]:
    """Header and rows, one for every point of every system."""
    depths = list(dict.fromkeys(depth for _, point in _all_points(benchmark) for depth in point.recall))
    judged = any(point.ndcg is not None for _, point in _all_points(benchmark))
    header = ["System", "search", *(f"recall@{depth}" for depth in depths), *(["nDCG@10", "- exact"] if judged else [])]
    header += ["p50 ms", "range", "p95", "p99", "CPU ms"] + ([f"p50 @{benchmark.settings.deep}"] if depths else [])
    return header, [_search_row(benchmark, system, point, depths, judged=judged) for system, point in _all_points(benchmark)]


def _search_row(benchmark: IndexBenchmark, system: SystemResult, point: PointResult, depths: Sequence[str], *, judged: bool) -> list[str]:
    row = [system.name, point.name, *(f"{point.recall[depth]:.4f}" for depth in depths)]
    if judged:
        if point.ndcg is None or benchmark.exact_ndcg is None:
            row += ["-", "-"]
        else:
            row += [f"{point.ndcg:.4f}", f"{point.ndcg - benchmark.exact_ndcg:+.4f}"]
    row += [milliseconds(point.p50.median), f"{milliseconds(point.p50.lowest)} to {milliseconds(point.p50.highest)}"]
    row += [milliseconds(each.median) for each in (point.p95, point.p99, point.processor)]
    return row + ([milliseconds(point.deep_p50)] if depths else [])


def throughput_table(benchmark: IndexBenchmark) -> tuple[list[str], list[list[str]]] | None:
    """Header and rows of queries a second; None where none were measured."""
    threads = list(benchmark.settings.threads)
    rows = []
    for system, point in _all_points(benchmark):
        found = {each.threads: each.queries_per_second.median for each in point.throughput}
        rows.append([system.name, point.name, *(f"{found[count]:,.1f}" if count in found else "-" for count in threads)])
    header = ["System", "search", *(f"{count} thread{'s' * (count != 1)}" for count in threads)]
    return (header, rows) if any(point.throughput for _, point in _all_points(benchmark)) else None


def size_table(benchmark: IndexBenchmark) -> tuple[list[str], list[list[str]]]:
    """Header and rows, one a system."""
    unit = ["bytes a token", "bytes a document"] if benchmark.kind == "colbert" else ["bytes a document"]
    header = ["System", "disk MiB", *unit, "build s", "build CPU s", "build peak MiB"]
    header += ["open s", "private MiB", "mapped MiB", "search peak MiB"]
    return header, [_size_row(system, benchmark) for system in benchmark.systems]


def _size_row(system: SystemResult, benchmark: IndexBenchmark) -> list[str]:
    build, memory = system.build, system.memory
    row = [system.name, _mebibytes(build.disk)]
    if benchmark.kind == "colbert":
        row.append(f"{build.disk / benchmark.vectors:,.1f}")
    row += [f"{build.disk / benchmark.documents:,.0f}", f"{build.seconds:,.2f}", f"{build.processor_seconds:,.2f}"]
    row += [_mebibytes(max(0, build.peak - build.before)), f"{memory.open_seconds:.2f}"]
    return row + [_mebibytes(each) for each in (memory.private, memory.mapped, max(0, memory.peak - memory.before))]


def system_table(benchmark: IndexBenchmark) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what each system is."""
    rows = []
    for system in benchmark.systems:
        versions = ", ".join(f"{name} {version}" for name, version in sorted(system.versions.items()))
        rows.append([system.name, format_settings(system.parameters), versions, system.date])
    return ["System", "settings", "versions", "measured"], rows


def milliseconds(value: float) -> str:
    """A time with three figures.

    Example:
        >>> milliseconds(0.01234), milliseconds(4.567), milliseconds(437.2)
        ('0.0123', '4.57', '437')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _mebibytes(count: int) -> str:
    return f"{count / MEBIBYTE:,.1f}"


def _all_points(benchmark: IndexBenchmark) -> Iterator[tuple[SystemResult, PointResult]]:
    for system in benchmark.systems:
        for point in system.points:
            yield system, point


def _keys(benchmark: IndexBenchmark) -> dict[tuple[str, str], Key]:
    """System and point -> what stands for it: a letter a system, a number a point of one with several."""
    keys = {}
    for place, system in enumerate(benchmark.systems):
        for number, point in enumerate(system.points, start=1):
            letter = chr(ord("A") + place % 26) + (str(number) if len(system.points) > 1 else "")
            keys[system.name, point.name] = Key(letter, place % 8 + 1, f"{system.name} {point.name}")
    return keys


def _table(
    name: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, keys: Mapping[tuple[str, str], Key] | None = None, texts: int = 2
) -> Table:
    """A table of the page; its first columns are texts, and so is a range."""
    numeric = [place >= texts and label != "range" for place, label in enumerate(header)]
    columns = [Column(label, numeric=number, wide=not place) for place, (label, number) in enumerate(zip(header, numeric, strict=True))]
    cells = [
        tuple(
            Cell(text, _number(text) if number else None, key=keys[row[0], row[1]] if keys is not None and not place else None)
            for place, (text, number) in enumerate(zip(row, numeric, strict=True))
        )
        for row in rows
    ]
    return Table(name, tuple(columns), tuple(cells))


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _chart(benchmark: IndexBenchmark, keys: Mapping[tuple[str, str], Key]) -> Mapping[str, object] | None:
    """Recall over latency; None for made-up documents."""
    depth = str(benchmark.settings.k)
    timed = []
    for system, point in _all_points(benchmark):
        key = keys[system.name, point.name]
        if depth in point.recall:
            timed.append(Timed(key.letter, key.colour, key.label, point.p50.median, point.recall[depth], point.recall[depth] == 1.0))
    if not timed:
        return None
    frame = Frame.around([each.milliseconds for each in timed], [each.value for each in timed], to_one=True)
    drawing: PointChart = point_chart(timed, frame)
    return {"title": benchmark.data, "note": f"{benchmark.documents:,} documents, p50 of a query on one thread", "drawing": drawing}


def write_index_quality_plot(benchmark: IndexBenchmark, folder: Path, *, stem: str = "plot") -> list[Path]:
    """Draw a benchmark into ``<stem>.png`` and ``<stem>.svg``: recall over latency, and bytes.

    Args:
        benchmark: What was measured.
        folder: Where the files go; it must exist.
        stem: Their name.

    Returns:
        The two files.

    Raises:
        InputError: matplotlib is not installed.
    """
    check_plotting()
    # No pyplot: it keeps figures in a global list and picks a window system.
    figure_class = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class(figsize=(8.0, 6.4 + 0.25 * len(benchmark.systems)), layout="constrained")
    title = f"{short_name(benchmark.data)}: {benchmark.documents:,} documents, {benchmark.vectors:,} vectors"
    figure.suptitle(f"{title}\n{benchmark.processor}, one thread", fontsize=11)
    speed, size = figure.subplots(2, 1, height_ratios=[3, 0.6 + 0.3 * len(benchmark.systems)])
    _draw_speed(speed, benchmark)
    _draw_size(size, benchmark)
    return save_figure(figure, folder, stem)


def _draw_speed(axes: Any, benchmark: IndexBenchmark) -> None:
    """A line a system over its points; for made-up documents nothing but latency."""
    depth = str(benchmark.settings.k)
    for place, system in enumerate(benchmark.systems):
        points = sorted(system.points, key=lambda point: point.p50.median)
        values = [place if benchmark.synthetic else point.recall[depth] for point in points]
        look = {"color": COLOURS[place % len(COLOURS)], "marker": _MARKERS[place % len(_MARKERS)]}
        axes.plot(
            [point.p50.median for point in points], values, label=system.name, linewidth=2.2 if system.library == OWN else 1.2, **look
        )
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds a query, p50")
    if benchmark.synthetic:
        axes.set_yticks(range(len(benchmark.systems)), [system.name for system in benchmark.systems])
    else:
        axes.set_ylabel(f"recall@{depth} against exact search")
        axes.legend(fontsize=8, frameon=False)
    _bare(axes)


def _draw_size(axes: Any, benchmark: IndexBenchmark) -> None:
    token = benchmark.kind == "colbert"
    per = benchmark.vectors if token else benchmark.documents
    for place, system in enumerate(benchmark.systems):
        value = system.build.disk / per
        axes.barh(place, value, color=COLOURS[place % len(COLOURS)])
        axes.annotate(f"{value:,.0f}", (value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(benchmark.systems)), [system.name for system in benchmark.systems], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"bytes on the disk a {'token' if token else 'document'}")
    _bare(axes)


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(linewidth=0.5, alpha=0.4)
