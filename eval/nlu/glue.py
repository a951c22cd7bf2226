"""Fine-tuning of a model on the tasks of GLUE, one after the other; the collected scores; and their report beside the ModernBERT paper.

MNLI comes before the tasks that start from its model. The folder holds:
  TASK/                 run folder of a task, see `quiver.eval.nlu.glue_training`
  results.json          scores of all complete runs as fractions, rewritten after each run; the average is over all eight tasks, and null
                        while one is missing
  report.md, .html      the paper's Table 5 with a measured row, how each task was trained, and all measures of each task

The folder of a sweep (`sweep_glue`) has a sweep per task, ``TASK/sweep.json`` and ``TASK/runs/``, and results and report of the best runs.

Several sessions may share a folder if they train different tasks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quiver.encoder.checkpoints.checkpoint import pin_source
from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, read_json, write_json
from quiver.encoder.training.optimization import with_training_dtype
from quiver.encoder.training.recipe_file import WITHOUT_WEIGHT
from quiver.encoder.training.run_folder import BEGUN, MODEL, RECORD, recipe_changes, recipe_of, refuse_existing, with_commit
from quiver.eval.metrics import Average, average
from quiver.eval.nlu.fine_tuning import RUN_SCHEMA, Request, finished
from quiver.eval.nlu.glue_tasks import TASKS, TaskName
from quiver.eval.nlu.glue_training import PREDICTIONS, RESULTS, Start, TaskScores, run_recipe, train_glue_task
from quiver.eval.nlu.recipes import MNLI, GlueRecipe, load_glue_recipe
from quiver.eval.report.formats import Column, Report, Section, table, write_folder
from quiver.eval.report.paper import GLUE_SCHEMA, glue_layout, layout_section
from quiver.eval.sweep import SEED, Grid, Sweep, make_grid, path_of, run_sweep, split_values
from quiver.retrieval.models.pretrained import check_device, default_device

logger = logging.getLogger(__name__)


def train_glue(
    recipe: GlueRecipe,
    out: Path,
    *,
    tasks: Collection[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
    device: str | None = None,
) -> GlueResults:
    """Train and score a model on each task of a recipe."""
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other; pass only one of them")
    chosen = choose_tasks(recipe, out, tasks)
    for task in chosen:
        if not resume:
            refuse_existing(out / task, overwrite=overwrite)
        elif finished(out / task):
            _refuse_other_recipe(recipe, out, task)
    for number, task in enumerate(chosen, start=1):
        if resume and finished(out / task):
            continue
        logger.info("%s, %d of %d", task, number, len(chosen))
        goes_on = resume and (out / task / BEGUN).is_file()
        settled = with_training_dtype(recipe, check_device(device or default_device()), resumed=out / task if goes_on else None)
        settled = with_commit(settled, resumed=next((out / each for each in TASKS if recipe_of(out / each)), None))  # one for all tasks
        request = Request(run_recipe(settled, task), out / task, (RESULTS, PREDICTIONS), goes_on, overwrite, progress, command, device)
        train_glue_task(settled, task, _start_of(settled, out, task), request)
        write_results(out, gather_results(out))
    results = gather_results(out)
    write_results(out, results)  # again, because a concurrent session may have written results without this session's runs
    return results


def choose_tasks(recipe: GlueRecipe, out: Path, tasks: Collection[str]) -> list[TaskName]:
    """The tasks of a recipe to train, all or the given ones, in their order; those that start from MNLI need it, too or in ``out``."""
    if unknown := [task for task in tasks if task not in recipe.trained]:
        raise InputError(f"--task {unknown[0]}: not in the recipe, which trains {', '.join(recipe.trained)}")
    chosen = [task for task in recipe.trained if not tasks or task in tasks]
    waiting = [task for task in chosen if task in recipe.model.from_mnli]
    beside = recipe.model.mnli is None and MNLI in chosen
    if waiting and not beside and not finished(folder := _mnli_folder(recipe, out)):
        raise InputError(
            f"{folder}: missing. {', '.join(waiting)} start from the model trained on MNLI; train MNLI too, or set model.from_mnli=[]"
        )
    return chosen


def _mnli_folder(recipe: GlueRecipe, out: Path) -> Path:
    return out / MNLI if recipe.model.mnli is None else expand_home(recipe.model.mnli)


def _start_of(recipe: GlueRecipe, out: Path, task: TaskName) -> Start:
    start = recipe.model
    if task in start.from_mnli:
        return Start(str(_mnli_folder(recipe, out) / MODEL), MNLI)
    return Start(pin_source(start.init, start.revision))


def _refuse_other_recipe(recipe: GlueRecipe, out: Path, task: TaskName) -> None:
    """Raise an error if a complete run used other recipe settings, so that its score must not be averaged with the others."""
    changes = recipe_changes(read_json(out / task / RECORD)["recipe"], run_recipe(recipe, task))
    differences = [f"{path} was {was!r}, is {value!r}" for path, was, value in changes if path not in WITHOUT_WEIGHT]
    if differences:
        raise InputError(
            f"{out / task}: holds a complete run of another recipe ({'; '.join(differences)}); choose another --out, or add --overwrite"
        )


RATES, DECAYS = ("1e-5", "3e-5", "5e-5", "8e-5"), ("1e-6", "5e-6", "8e-6", "1e-5")
"""Learning rates and weight decays that the ModernBERT paper tries for each task (arXiv:2412.13663, appendix E.1)."""

EPOCHS: Mapping[TaskName, tuple[str, ...]] = dict.fromkeys(TASKS, ("2", "5", "10")) | dict.fromkeys(
    ("sst2", "mnli", "rte"), ("1", "2", "3")
)
"""Numbers of epochs that it tries."""


def has_own_grid(settings: Sequence[str]) -> bool:
    """Whether settings of a sweep ask for several values that concern more than one task, so that all tasks of a run belong together."""
    several = [path_of(each) for each in settings if len(split_values(each.partition("=")[2])) > 1]
    return any(not path.startswith("tasks.") and path != SEED for path in several)


def task_grid(source: str | Path, task: TaskName, settings: Sequence[str] = (), *, mnli: Path | None = None) -> Grid:
    """Make the grid of one task of a GLUE recipe: the paper's 48 combinations, but for settings of the task that are given."""
    named = {path_of(each) for each in settings}
    values = {"learning_rate": RATES, "weight_decay": DECAYS, "epochs": EPOCHS[task]}
    grid = {f"tasks.{task}.{name}": ",".join(tried) for name, tried in values.items()}
    kept = [each for each in settings if not path_of(each).startswith("tasks.") or path_of(each).startswith(f"tasks.{task}.")]
    alone = [f"tasks.{other}=" for other in TASKS if other != task]
    start = [] if mnli is None else [f"model.mnli={json.dumps(str(mnli))}"]
    return make_grid(source, [*kept, *alone, *start, *(f"{path}={text}" for path, text in grid.items() if path not in named)])


def sweep_glue(
    source: str | Path,
    out: Path,
    settings: Sequence[str] = (),
    *,
    train: Callable[..., object],
    overwrite: bool = False,
    command: str | None = None,
    report: Callable[[str], None] = lambda line: None,
    changed: Callable[..., object] = lambda sweep, folder: None,
) -> tuple[dict[TaskName, Sweep], GlueResults]:
    """Sweep each task of a recipe in a folder of its own, and collect the best runs; RTE, MRPC and STS-B start from the best of MNLI.

    ``train`` and the other arguments are those of `quiver.eval.sweep.run_sweep`; ``changed`` also gets the task's folder, as ``folder``.
    The results of the best runs are written too.
    """
    single = [each for each in settings if len(split_values(each.partition("=")[2])) == 1]
    recipe = load_glue_recipe(source, single)
    for task in recipe.trained:
        task_grid(source, task, settings)  # mistakes in settings are reported before the first run
    sweeps: dict[TaskName, Sweep] = {}
    chosen: dict[TaskName, Path] = {}
    for task in recipe.trained:
        folder, start = out / task, chosen.get(MNLI) if task in recipe.model.from_mnli else None
        report(f"{TASKS[task].title}: the grid of {folder}")
        sweeps[task] = run_sweep(
            task_grid(source, task, settings, mnli=start),
            folder,
            train=train,
            overwrite=overwrite,
            command=command,
            report=report,
            changed=partial(changed, folder=folder),
        )
        if best := sweeps[task].best:
            chosen[task] = folder / best.folders[0] / task
    results = gather_results(out, chosen)
    write_results(out, results)
    return sweeps, results


@dataclass(frozen=True)
class TaskRun:
    """Summary of a task's run."""

    scores: TaskScores
    trained_on: int
    from_mnli: bool
    learning_rate: float
    weight_decay: float
    epochs: float
    batch_size: int
    steps: int
    planned_steps: int
    best_step: int
    seconds: float
    seed: int


@dataclass(frozen=True)
class GlueResults:
    """Scores of a model on GLUE."""

    name: str
    model: str
    average: Average
    runs: dict[TaskName, TaskRun]


def gather_results(folder: Path, chosen: Mapping[TaskName, Path] = MappingProxyType({})) -> GlueResults:
    """Collect the results of a model from the records of its runs: those in ``folder``, and ``chosen`` ones elsewhere."""
    files = {task: chosen.get(task, folder / task) / RECORD for task in TASKS}
    records = {task: read_json(file) for task, file in files.items() if file.is_file()}
    if not records:
        raise InputError(f"{folder}: contains no complete run of quiver glue")
    try:
        names = {(record["recipe"]["name"], record["recipe"]["model"]["init"]) for record in records.values()}
        runs = {task: _read_task_run(record, task, str(files[task])) for task, record in records.items()}
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder}: one of its {RECORD} files is damaged (the field {error} is missing or has a wrong type)") from error
    if len(names) > 1:
        sources = ", ".join(f"{model} ({name})" for name, model in sorted(names))
        raise InputError(f"{folder}: contains runs of several models: {sources}; use one folder per model")
    [(name, model)] = names
    scores: dict[str, float | None] = {task: run.scores.score for task, run in runs.items()}
    return GlueResults(name, model, average(scores, list(TASKS)), runs)


def _read_task_run(record: dict[str, Any], task: TaskName, where: str) -> TaskRun:
    if record["schema"] != RUN_SCHEMA:
        raise InputError(f"{where}: its schema is {record['schema']}, this version reads {RUN_SCHEMA}")
    recipe, result = record["recipe"], record["result"]
    short: dict[str, Any] = {
        **{key: recipe["tasks"][task][key] for key in ("learning_rate", "weight_decay", "epochs", "batch_size")},
        **{key: result[key] for key in ("steps", "planned_steps", "best_step", "seconds")},
    }
    scores = TaskScores(**record["scores"])
    return TaskRun(scores, trained_on=record["counts"]["examples"], from_mnli="start" in record, seed=recipe["training"]["seed"], **short)


def write_results(folder: Path, results: GlueResults) -> None:
    """Write results.json."""
    write_json(folder / RESULTS, {"schema": GLUE_SCHEMA, **asdict(results)})


REPORT_TITLE = "GLUE: comparison with the ModernBERT paper"

RUN_COLUMNS = (
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
    """Write ``report.md`` and ``report.html``, replacing existing ones."""
    return write_folder(glue_report(results), folder)


def glue_report(results: GlueResults) -> Report:
    """Make the report of a GLUE run: the paper's table with a measured row, and how each task was trained."""
    rows = [_run_cells(run) for run in results.runs.values()]
    runs = table(RUN_COLUMNS, rows, name="How each task was trained")
    return Report(REPORT_TITLE, (layout_section(glue_layout([asdict(results)])), Section(runs.name, (runs,), "runs")))


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
