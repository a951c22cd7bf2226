"""The report of a sweep: the candidates, best first, the command that trains the best one, and a chart of the scores."""

from __future__ import annotations

import importlib
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quiver.eval.report.blocks import Block, Code, Column, Figure, Key, Paragraph, Report, Section, Span, Table, table
from quiver.eval.report.charts import PALETTE, WIDTH, Bar, axis_top, bar_chart, fit, new_figure, style, visible
from quiver.eval.report.render import write
from quiver.eval.report.systems import points
from quiver.retrieval.training.sweep import LEARNING_RATE, SEED, Candidate, Sweep, Value, short_names, show_settings, show_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

REPORT, PLOT = "sweep.md", "sweep.svg"
"""Files of `write_sweep_report`, beside sweep.json."""


def write_sweep_report(sweep: Sweep, folder: str | Path) -> list[Path]:
    """Write ``sweep.md`` and, once a run is finished, ``sweep.svg``, replacing existing files.

    Args:
        sweep: Sweep so far, from `quiver.retrieval.training.sweep.run_sweep`.
        folder: Folder of the sweep.

    Returns:
        The files.

    Raises:
        InputError: They cannot be written, or matplotlib is not installed.
    """
    target = Path(folder)
    write(sweep_report(sweep, target), target / REPORT)
    scored = any(candidate.scores for candidate in sweep.candidates)
    return [target / name for name in ((REPORT, PLOT) if scored else (REPORT,))]


def train_command(sweep: Sweep, out: str | Path) -> str:
    """The command that trains the best candidate again.

    Raises:
        ValueError: No candidate has all its runs yet.
    """
    if sweep.best is None:
        raise ValueError("no candidate of this sweep has all its runs yet")
    return shlex.join(["quiver", "train", sweep.recipe, "--out", str(out), *sweep.best.overrides])


def sweep_report(sweep: Sweep, folder: Path) -> Report:
    """Make the report of a sweep; nDCG@10 in points, hundredths of a fraction.

    Args:
        sweep: Sweep so far.
        folder: Folder of the sweep; the command that trains the best candidate writes into a folder inside it.
    """
    counts = {status: sum(run.status == status for run in sweep.runs) for status in ("finished", "failed", "waiting")}
    statuses = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    development = f"{sweep.development['data']}, split {sweep.development['split']}"
    seeds = ", the mean over the seeds" if SEED in sweep.axes else ""
    blocks: list[Block] = [
        Paragraph(f"{len(sweep.runs)} runs: {statuses}. Selected by nDCG@10 on {development}{seeds}."),
        _candidates(sweep),
    ]
    if sweep.best is not None:
        blocks.append(
            Section(f"The best: {show_settings(sweep.best.settings) or 'the recipe'}", tuple(_best(sweep, sweep.best, folder)), "best")
        )
    if scored := [candidate for candidate in sweep.candidates if candidate.scores]:
        told = ", ".join(f"{show_settings(each.settings) or 'the recipe'} {points(each.mean)}" for each in scored)
        blocks.append(
            Figure("nDCG@10 of the candidates", partial(sweep_chart, sweep, scored), f"nDCG@10 of the candidates: {told}", file=PLOT)
        )
    if failed := [[run.folder, run.error or ""] for run in sweep.runs if run.error is not None]:
        errors = table((Column("Run", numeric=False), Column("Error", numeric=False)), failed, name="Failed runs")
        again = Paragraph("Run the command of the sweep again to retry them.")
        blocks.append(Section("Failed", (errors, again), "failed"))
    if sweep.command:
        blocks.append(Section("Command", (Code(sweep.command),), "command"))
    return Report(f"Sweep of {sweep.name}", tuple(blocks))


def _best(sweep: Sweep, best: Candidate, folder: Path) -> Iterator[Block]:
    models = [part for run in best.folders for part in (", ", Span(f"{run}/model", "code"))][1:]
    yield Paragraph(("Trained models: ", *models, ". To train it again:"))
    yield Code(train_command(sweep, folder / "best"))
    yield from map(Paragraph, cautions(sweep))


def cautions(sweep: Sweep) -> list[str]:
    """Reasons to doubt the best candidate: it is at the end of an axis, or the gap to others is within the noise of the seeds."""
    best = sweep.best
    if best is None:
        return []
    found = []
    for path, values in sweep.axes.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if path != SEED and len(numbers) == len(values) > 1 and best.settings[path] in (min(numbers), max(numbers)):
            end = "highest" if best.settings[path] == max(numbers) else "lowest"
            found.append(f"{path}={show_value(best.settings[path])} is the {end} value of the sweep; a value beyond it may be better.")
    close = [other for other in sweep.candidates[1:] if not other.missing and _within_noise(best, other)]
    if close:
        names = "; ".join(show_settings(other.settings) for other in close)
        found.append(f"Less than two standard errors behind: {names}. More seeds would separate them.")
    if best.deviation is None and len(sweep.candidates) > 1:
        found.append("One seed per candidate: the variation between seeds is unknown. Add training.seed=1,2,3 as an axis.")
    return found


def _within_noise(best: Candidate, other: Candidate) -> bool:
    if best.mean is None or other.mean is None or best.deviation is None or other.deviation is None:
        return False
    error = math.hypot(best.deviation / math.sqrt(len(best.scores)), other.deviation / math.sqrt(len(other.scores)))
    return best.mean - other.mean < 2 * error


def _candidates(sweep: Sweep) -> Table:
    axes = [path for path in sweep.axes if path != SEED]
    labels = short_names(axes)
    seeds = SEED in sweep.axes
    columns = [Column("Rank", numeric=False), *(Column(labels[path], numeric=False) for path in axes), Column("nDCG@10", ranked=True)]
    columns += [Column("Deviation"), Column("By seed", numeric=False)] if seeds else []
    rows = []
    for place, candidate in enumerate(sweep.candidates, start=1):
        cells = [points(candidate.mean)]
        if seeds:
            cells += [points(candidate.deviation), " ".join(map(points, candidate.scores))]
        rank = str(place) if not candidate.missing else "incomplete"
        rows.append([rank, *(show_value(candidate.settings[path]) for path in axes), *cells])
    return table(columns, rows, name="Candidates")


def sweep_chart(sweep: Sweep, scored: Sequence[Candidate]) -> Drawing:
    """Draw nDCG@10 over the learning rate, one line per combination of the other settings; small rings are single seeds.

    If the sweep has no axis of learning rates, the candidates are bars.

    Args:
        sweep: Sweep so far.
        scored: Candidates with a score; at least one.
    """
    if len(sweep.axes.get(LEARNING_RATE, ())) > 1:
        return _line_chart(sweep, scored)
    bars = [Bar(Key("", 1, show_settings(each.settings) or "the recipe"), each.mean or 0.0) for each in scored]
    return bar_chart(bars, axis_top(max(bar.value for bar in bars)))


def _line_chart(sweep: Sweep, scored: Sequence[Candidate]) -> Drawing:
    groups: dict[str, list[Candidate]] = {}
    for each in scored:
        others = {path: value for path, value in each.settings.items() if path != LEARNING_RATE}
        groups.setdefault(show_settings(others), []).append(each)
    with style():
        legend = 0.2 * len(groups) if any(groups) else 0.0
        figure = new_figure(WIDTH, 2.9 + legend, layout="constrained")
        axes = figure.add_subplot()
        for place, (label, members) in enumerate(groups.items()):
            colour = PALETTE[1 + place % (len(PALETTE) - 1)]
            ordered = sorted(members, key=lambda each: _rate(each.settings))
            means = [(_rate(each.settings), 100 * (each.mean or 0.0)) for each in ordered]
            shown = fit(visible(label), 280, 8) or None
            axes.plot(*zip(*means, strict=True), color=colour, marker="o", markersize=5, linewidth=1.4, label=shown)
            seeds = [(_rate(each.settings), 100 * score) for each in ordered if len(each.scores) > 1 for score in each.scores]
            axes.plot([x for x, _ in seeds], [y for _, y in seeds], color=colour, marker="o", mfc="none", markersize=3.5, linestyle="none")
        rates = sorted(float(rate) for rate in sweep.axes[LEARNING_RATE] if isinstance(rate, int | float))
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(rates, [show_value(rate) for rate in rates], rotation=30 if len(rates) > 6 else 0)
        axes.yaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(5))
        axes.tick_params(length=0)
        axes.set_xlabel("learning rate", loc="right")
        axes.set_title("nDCG@10", loc="left", fontsize=9)
        if any(groups):
            figure.legend(loc="outside lower left", fontsize=8, frameon=False)
        return figure


def _rate(settings: Mapping[str, Value]) -> float:
    rate = settings[LEARNING_RATE]
    return float(rate) if isinstance(rate, int | float) else math.nan
