"""``quiver glue``: a model fine-tuned and scored on GLUE's tasks; like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.output import (
    JsonOption,
    OverwriteOption,
    ProgressOption,
    command_line,
    print_json,
    print_table,
    say,
    say_error,
    show_progress,
)
from quiver.encoder.training.stopping import RunStoppedError
from quiver.eval.nlu.glue_recipe import load_glue_recipe
from quiver.eval.nlu.glue_results import RESULTS, GlueResults
from quiver.eval.nlu.glue_suite import train_glue
from quiver.eval.nlu.glue_tasks import TASKS
from quiver.eval.report.glue import write_glue_report


class Task(str, Enum):
    """A task of GLUE."""

    COLA = "cola"
    SST2 = "sst2"
    MRPC = "mrpc"
    STSB = "stsb"
    QQP = "qqp"
    MNLI = "mnli"
    QNLI = "qnli"
    RTE = "rte"


def glue(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe (glue_base, glue_large).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write: TASK/ for each task, results.json, report.md, report.html.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, as tasks.cola.epochs=1 or training.seed=2.")] = None,
    task: Annotated[list[Task] | None, typer.Option("--task", help="Train this one; may be given more than once. By default all.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave complete tasks, go on with unfinished ones, begin the others.")] = False,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Fine-tune a model on each task of GLUE and put its scores beside the ModernBERT paper's.

    SIGTERM and Ctrl-C finish the update and save; --resume goes on from the last checkpoint and ends with the same weights.

    Example: quiver glue glue_base --out runs/glue-base --task cola --task rte --task mnli data.source=data/glue
    """
    resolved, watched = load_glue_recipe(recipe, overrides or []), show_progress(progress)
    asked = {each.value for each in task or []}
    chosen = [name for name in TASKS if name in asked]
    try:
        results = train_glue(resolved, out, tasks=chosen, resume=resume, overwrite=overwrite, progress=watched, command=command_line())
    except RunStoppedError as stopped:
        say_error(f"{stopped}; the same command{'' if resume else ' with --resume'} goes on")
        raise typer.Exit(1) from stopped
    report = write_glue_report(results, out)
    if as_json:
        print_json(asdict(results))
        return
    _print(results, out)
    say(f"results: {out / RESULTS}")
    say(f"report: {report}")


def _print(results: GlueResults, out: Path) -> None:
    rows = []
    for name, run in results.runs.items():
        measures = ", ".join(f"{measure} {100 * value:.1f}" for measure, value in run.scores.measures.items())
        rows.append((TASKS[name].title, f"{100 * run.scores.score:.1f}", measures, f"{run.steps:,} of {run.planned_steps:,}"))
    mean = results.average
    value = "" if mean.value is None else f"{100 * mean.value:.1f}"
    rows.append(("average", value, f"{mean.known} of {mean.members} tasks", ""))
    print_table(str(out), ("task", "score", "measures", "updates"), rows)
