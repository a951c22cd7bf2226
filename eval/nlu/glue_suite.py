"""Fine-tuning of a model on the tasks of GLUE, one after the other; MNLI comes before the tasks that start from its model.

DIR/TASK/       run folder of a task, see `quiver.eval.nlu.glue_training`
DIR/results.json    scores of all complete runs, rewritten after each run

Several sessions may share a folder if they train different tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.eval.nlu.fine_tuning.run import Request, finished
from quiver.eval.nlu.glue_recipe import MNLI, GlueRecipe
from quiver.eval.nlu.glue_results import GlueResults, gather_results, write_results
from quiver.eval.nlu.glue_tasks import TaskName
from quiver.eval.nlu.glue_training import PREDICTIONS, RESULTS, Start, run_recipe, train_glue_task
from quiver.retrieval.training.run_folder import BEGUN, MODEL, RECORD, WITHOUT_WEIGHT, recipe_changes, refuse_existing

logger = logging.getLogger(__name__)


def train_glue(
    recipe: GlueRecipe,
    out: Path,
    *,
    tasks: Collection[TaskName] = (),
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
) -> GlueResults:
    """Train and score a model on each task of a recipe.

    Args:
        recipe: The recipe.
        out: Folder of the runs; created if missing.
        tasks: Tasks to train; by default all tasks of the recipe.
        resume: Skip complete runs, resume unfinished ones and start the others.
        overwrite: Replace existing runs.
        progress: Show progress bars on standard error.
        command: Command line to record.

    Returns:
        The scores of all runs in the folder.

    Raises:
        InputError: ``resume`` and ``overwrite`` are both given; the recipe does not train a task; a task that starts from MNLI has no model
            to start from; ``out`` already holds a run, or one of another recipe; or see `train_glue_task`.
        RunStoppedError: See `train_glue_task`.
    """
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other; pass only one of them")
    chosen = _chosen(recipe, out, tasks)
    for task in chosen:
        if not resume:
            refuse_existing(out / task, overwrite=overwrite)
        elif finished(out / task):
            _refuse_other_recipe(recipe, out, task)
    for number, task in enumerate(chosen, start=1):
        if resume and finished(out / task):
            continue
        logger.info("%s, %d of %d", task, number, len(chosen))
        begun = (out / task / BEGUN).is_file()
        request = Request(
            run_recipe(recipe, task), out / task, (RESULTS, PREDICTIONS), resume and begun, overwrite, progress=progress, command=command
        )
        train_glue_task(recipe, task, _start(recipe, out, task), request)
        write_results(out, gather_results(out))
    results = gather_results(out)
    write_results(out, results)  # again, because a concurrent session may have written results without this session's runs
    return results


def _chosen(recipe: GlueRecipe, out: Path, tasks: Collection[TaskName]) -> list[TaskName]:
    if unknown := [task for task in tasks if task not in recipe.trained]:
        raise InputError(f"--task {unknown[0]}: the recipe trains {', '.join(recipe.trained)}")
    chosen = [task for task in recipe.trained if not tasks or task in tasks]
    waiting = [task for task in chosen if task in recipe.model.from_mnli]
    if waiting and MNLI not in chosen and not finished(out / MNLI):
        raise InputError(
            f"{out / MNLI}: {', '.join(waiting)} start from the model of MNLI, which is not there; train it too, or set model.from_mnli=[]"
        )
    return chosen


def _start(recipe: GlueRecipe, out: Path, task: TaskName) -> Start:
    return Start(str(out / MNLI / MODEL), MNLI) if task in recipe.model.from_mnli else Start(recipe.model.init)


def _refuse_other_recipe(recipe: GlueRecipe, out: Path, task: TaskName) -> None:
    """Raise an error if a complete run used other recipe settings, so that its score must not be averaged with the others."""
    changes = recipe_changes(read_json(out / task / RECORD)["recipe"], run_recipe(recipe, task))
    told = [f"{path} was {was!r}, is {value!r}" for path, was, value in changes if path not in WITHOUT_WEIGHT]
    if told:
        raise InputError(f"{out / task}: complete, but by another recipe; {'; '.join(told)}; choose another --out, or --overwrite")
