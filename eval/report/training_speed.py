"""A run of ``quiver bench train`` as Markdown and as a picture; both add no number that is not in its results."""

from __future__ import annotations

import importlib
from pathlib import Path
from statistics import median

from quiver.encoder.files import write_text
from quiver.eval.bench.encoder.results import OWN
from quiver.eval.bench.training.results import SideTimes, TrainingBenchmark, WorkloadTimes
from quiver.eval.report.efficiency import MEBIBYTE, where
from quiver.eval.report.efficiency_plot import check_plotting, ratios, save_figure, short_name, throughput
from quiver.eval.report.tables import escape, table


def write_training_speed_report(benchmark: TrainingBenchmark, path: Path) -> None:
    """Write the report; one already there is replaced."""
    write_text(path, render_training_speed(benchmark))


def render_training_speed(benchmark: TrainingBenchmark) -> str:
    """The report as Markdown."""
    parts = [f"# Training benchmark: {escape(benchmark.model)}", _conditions(benchmark)]
    for times in benchmark.workloads:
        parts += [f"## {workload_title(times)}", table(*workload_table(times))]
    if benchmark.not_run:
        parts += ["## Not run", table(["", "Why"], [[each.what, each.reason] for each in benchmark.not_run])]
    return "\n\n".join([*parts, "## Where", *where(benchmark)]) + "\n"


def workload_title(times: WorkloadTimes) -> str:
    """A kind on a workload in one line."""
    documents = "a document" if times.documents == 1 else f"{times.documents} documents"
    padded = "" if times.padded is None else f", {median(times.padded):,.0f} places padded"
    return (
        f"{times.workload}, {times.kind} ({times.loss}): {times.rows} rows of a query and {documents},"
        f" {median(times.tokens):,.0f} tokens a step{padded}"
    )


def workload_table(times: WorkloadTimes) -> tuple[list[str], list[list[str]]]:
    """Header and rows: medians of the steps, with the range of the ratios behind them."""
    header = ["", "ms a step", "tokens/s", "time / Quiver's", "over the steps", "processor time / Quiver's", "max loss difference"]
    measured = any(each.memory is not None for each in times.sides)
    return header + ["peak MiB"] * measured, [_row(each, measured=measured) for each in times.sides]


def _row(side: SideTimes, *, measured: bool) -> list[str]:
    row = [
        side.name,
        f"{1000 * median(side.seconds):,.0f}",
        f"{side.tokens_per_second.median:,.0f}",
        f"{side.ratio.median:.2f}",
        f"{side.ratio.lowest:.2f} to {side.ratio.highest:.2f}",
        f"{side.processor_ratio.median:.2f}",
        "" if side.max_loss_difference is None else f"{side.max_loss_difference:.1e}",
    ]
    return row + ["" if side.memory is None else f"{side.memory.above / MEBIBYTE:,.0f}"] * measured


def _conditions(benchmark: TrainingBenchmark) -> str:
    settings = benchmark.settings
    dropout = "with the checkpoint's dropout, so that losses are not compared" if settings.dropout else "without dropout"
    return (
        f"{escape(benchmark.family)}, {benchmark.parameters / 1e6:,.1f} million parameters in the encoder, float32, {dropout}."
        f" {settings.rounds} steps of each side in one process, in turn, every other one in reverse order; a first step is not counted."
        " A step is tokenising, forward, backward, clipping and update. The other side is the library's own model on transformers' encoder"
        " (sdpa), with the same initial weights, the same batches, the same optimiser. Padding and query expansion are no tokens. Time /"
        " Quiver's is the median over the steps of a step's seconds divided by Quiver's. Peak memory is what the steps take beyond the"
        " loaded model and the optimiser's state, in a fresh process."
    )


def write_training_speed_plot(benchmark: TrainingBenchmark, folder: Path, *, stem: str = "plot") -> list[Path]:
    """Draw a benchmark into ``<stem>.png`` and ``<stem>.svg``: tokens per second, and the ratio to Quiver.

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
    found = {(f"{times.workload}\n{times.kind}", side.name): side for times in benchmark.workloads for side in times.sides}
    groups, names = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    panels = 1 if names == [OWN] else 2
    # No pyplot: it keeps figures in a global list and picks a window system.
    figure_class = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class(figsize=(max(7.0, 2.2 + 1.6 * len(groups)), 3.4 * panels), layout="constrained")
    figure.suptitle(
        f"{short_name(benchmark.model)}: training step, float32\n{benchmark.processor}, threads: {benchmark.provenance.threads}",
        fontsize=11,
    )
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    throughput(axes[0], groups, names, found)
    if panels > 1:
        ratios(axes[1], groups, names, found)
    return save_figure(figure, folder, stem)
