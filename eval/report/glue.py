"""The report of GLUE scores: the paper's Table 5 with a measured row, how each task was trained, and all measures of each task.

Every number is from `quiver.eval.nlu.glue_results` or from `quiver.eval.published`. A task that was not trained is blank, and so is
then the average.
"""

from __future__ import annotations

from pathlib import Path

from quiver.eval.nlu.glue_results import GlueResults, TaskRun
from quiver.eval.nlu.glue_tasks import TASKS
from quiver.eval.published.glue import GLUE_COLUMNS, GLUE_SOURCE, TABLE_5
from quiver.eval.report.blocks import Column, Report, Section, table
from quiver.eval.report.paper import Layout, Line, layout_section
from quiver.eval.report.render import write_folder

TITLE = "GLUE beside the ModernBERT paper"

NOTES = (
    "Points: Matthews' correlation for CoLA, Spearman's for STS-B, accuracy for the others; MNLI is the matched half. Published rows:"
    f" {GLUE_SOURCE}. The average is over the eight tasks, and blank if one is missing.",
    "The paper does not name its measures: judging by size, QQP and MRPC scores are accuracies, except those of GTE-en-MLM, which are F1.",
    "All scores, published and measured, are on the development sets that the best checkpoint was chosen on.",
)
"""Notes below the table."""

COLUMNS = (
    Column("Task", numeric=False),
    Column("Score"),
    Column("Measures", numeric=False, wide=True),
    Column("Scored", "examples"),
    Column("Trained on", "examples"),
    Column("Start", numeric=False),
    Column("Learning rate"),
    Column("Decay"),
    Column("Batch"),
    Column("Epochs"),
    Column("Updates", "of those planned", numeric=False),
    Column("Best after", "updates"),
    Column("Seed"),
    Column("Seconds"),
)
"""Columns of the table of training runs."""


def write_glue_report(results: GlueResults, folder: Path) -> Path:
    """Write ``report.md`` and ``report.html``, replacing existing ones.

    Args:
        results: Scores of the tasks.
        folder: Existing output folder.

    Returns:
        The HTML file; without jinja2 and matplotlib the Markdown file.

    Raises:
        InputError: A file cannot be written.
    """
    return write_folder(glue_report(results), folder)


def glue_layout(results: GlueResults) -> Layout:
    """Table 5 of the paper with a measured row."""
    lines = [Line(row.name, (*row.scores.values(), row.average), "", "paper") for row in TABLE_5]
    runs = [results.runs.get(task) for task in TASKS]
    scores = [None if run is None else 100 * run.scores.score for run in runs]
    mean = results.average
    average = None if mean.value is None else 100 * mean.value
    lines.append(Line(f"{results.model} ({results.name})", (*scores, average), f"{mean.known} of {mean.members}", "measured"))
    return Layout("table5", "GLUE, development sets (Table 5 of the paper)", (*GLUE_COLUMNS, "Average"), tuple(lines), NOTES)


def glue_report(results: GlueResults) -> Report:
    """Make the report of a GLUE run: the paper's table with a measured row, and how each task was trained."""
    rows = [_run_cells(run) for run in results.runs.values()]
    runs = table(COLUMNS, rows, name="How each task was trained")
    return Report(TITLE, (layout_section(glue_layout(results)), Section(runs.name, (runs,), "runs")))


def _run_cells(run: TaskRun) -> tuple[str, ...]:
    measures = ", ".join(f"{name} {100 * value:.2f}" for name, value in run.scores.measures.items())
    return (
        TASKS[run.scores.task].title,
        f"{100 * run.scores.score:.2f}",
        measures,
        f"{run.scores.examples:,}",
        f"{run.trained_on:,}",
        "MNLI" if run.from_mnli else "model",
        *(f"{value:g}" for value in (run.learning_rate, run.weight_decay, run.batch_size, run.epochs)),
        f"{run.steps:,} of {run.planned_steps:,}",
        f"{run.best_step:,}",
        str(run.seed),
        f"{run.seconds:,.0f}",
    )
