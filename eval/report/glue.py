"""GLUE scores to read: the paper's Table 5 with our rows in it, and beside it how each task was trained and all its measures.

Every number is from the results of `eval.nlu.glue_results` or from `eval.published`. A task that was not trained is blank, and so is then
the average.
"""

from __future__ import annotations

from pathlib import Path

from quiver.eval.nlu.glue_results import GlueResults, TaskRun
from quiver.eval.nlu.glue_tasks import TASKS
from quiver.eval.published.glue import GLUE_COLUMNS, GLUE_SOURCE, TABLE_5
from quiver.eval.report.page_tables import Cell, Column, Table
from quiver.eval.report.paper import Layout, Line, layout_markdown
from quiver.eval.report.paper_html import Section, layout_section, render_sections
from quiver.eval.report.run_files import write_both
from quiver.eval.report.tables import escape, table

TITLE = "GLUE beside the ModernBERT paper"

NOTES = (
    "Points: Matthews' correlation for CoLA, Spearman's for STS-B, accuracy for the others; MNLI is the matched half. Published rows:"
    f" {GLUE_SOURCE}. The average is over the eight tasks, and blank where one is missing.",
    "The paper does not name its measures: by their size its QQP and MRPC are accuracies, but for GTE-en-MLM's, which are F1.",
    "All scores, the paper's and ours, are on the development sets by which the best checkpoint was chosen too.",
)
"""What a reader must know."""

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
"""How a task was trained."""


def write_glue_report(results: GlueResults, folder: Path) -> Path:
    """Write ``report.md`` and ``report.html``; those already there are replaced.

    Args:
        results: What was scored.
        folder: Where they go; it must exist.

    Returns:
        The page; without jinja2, which it needs, the Markdown alone, and a warning in the log.

    Raises:
        InputError: A file cannot be written.
    """
    return write_both(folder, render_glue(results), lambda: render_glue_page(results))


def glue_layout(results: GlueResults) -> Layout:
    """Table 5 with a row of ours."""
    lines = [Line(row.name, (*row.scores.values(), row.average), "", "paper") for row in TABLE_5]
    runs = [results.runs.get(task) for task in TASKS]
    scores = [None if run is None else 100 * run.scores.score for run in runs]
    mean = results.average
    average = None if mean.value is None else 100 * mean.value
    lines.append(Line(f"{results.model} ({results.name})", (*scores, average), f"{mean.known} of {mean.members}", "measured"))
    return Layout("table5", "GLUE, development sets (Table 5 of the paper)", (*GLUE_COLUMNS, "Average"), tuple(lines), NOTES)


def runs_table(results: GlueResults) -> Table:
    """How each task was trained, and all its measures."""
    return Table("How each task was trained", COLUMNS, tuple(_run_cells(run) for run in results.runs.values()))


def _run_cells(run: TaskRun) -> tuple[Cell, ...]:
    measures = ", ".join(f"{name} {100 * value:.2f}" for name, value in run.scores.measures.items())
    updates = f"{run.steps:,} of {run.planned_steps:,}"
    return (
        Cell(TASKS[run.scores.task].title),
        Cell(f"{100 * run.scores.score:.2f}", run.scores.score),
        Cell(measures),
        Cell(f"{run.scores.examples:,}", run.scores.examples),
        Cell(f"{run.trained_on:,}", run.trained_on),
        Cell("MNLI" if run.from_mnli else "model"),
        *(Cell(f"{value:g}", value) for value in (run.learning_rate, run.weight_decay, run.batch_size, run.epochs)),
        Cell(updates),
        Cell(f"{run.best_step:,}", run.best_step),
        Cell(str(run.seed), run.seed),
        Cell(f"{run.seconds:,.0f}", run.seconds),
    )


def render_glue(results: GlueResults) -> str:
    """The report as Markdown."""
    runs = runs_table(results)
    header = [f"{column.label} ({column.note})" if column.note else column.label for column in runs.columns]
    body = [[cell.text for cell in row] for row in runs.rows]
    parts = [f"# {TITLE}", *layout_markdown(glue_layout(results)), f"## {escape(runs.name)}", table(header, body)]
    return "\n\n".join(parts) + "\n"


def render_glue_page(results: GlueResults) -> str:
    """The report as one HTML page, under the rules of `quiver.eval.report.html`; equal results give equal bytes.

    Raises:
        InputError: jinja2 is not installed.
    """
    runs = runs_table(results)
    return render_sections([layout_section(glue_layout(results)), Section("runs", runs.name, runs, ())], title=TITLE)
