"""What a model scored on GLUE, gathered from the runs of its tasks: a folder with a folder for each task that was trained.

results.json holds it, as fractions of 1. The average is over all eight tasks, and blank while one is missing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.eval.averages import Average, average
from quiver.eval.nlu.fine_tuning.run import SCHEMA as RUN_SCHEMA
from quiver.eval.nlu.glue_tasks import TASKS, TaskName
from quiver.eval.nlu.glue_training import TaskScores
from quiver.retrieval.training.run_folder import RECORD

SCHEMA = "quiver-glue/1"
RESULTS = "results.json"


@dataclass(frozen=True)
class TaskRun:
    """A task's run in short.

    Attributes:
        scores: What its model scored.
        trained_on: Examples.
        from_mnli: It started from the model that was trained on MNLI.
        learning_rate: Peak.
        weight_decay: As the recipe has it.
        epochs: As the recipe has it.
        batch_size: Examples of an update.
        steps: Updates that were done.
        planned_steps: Updates that would have been done without early stopping.
        best_step: The update behind which the model was best, which is the model that was scored.
        seconds: Time of all sessions.
        seed: Of the run.
    """

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
    """What a model scored.

    Attributes:
        name: Of the recipe.
        model: That all tasks but those from MNLI started from.
        average: Of the scores.
        runs: By task, in the order of Table 5.
    """

    name: str
    model: str
    average: Average
    runs: dict[TaskName, TaskRun]


def gather_results(folder: Path) -> GlueResults:
    """Read the records of a model's runs.

    Args:
        folder: Holds a folder for each task; those whose run is not complete are left out.

    Raises:
        InputError: No run is complete, a record is damaged, or they are of several models.
    """
    records = {task: read_json(folder / task / RECORD) for task in TASKS if (folder / task / RECORD).is_file()}
    if not records:
        raise InputError(f"{folder}: holds no run of quiver glue that is complete")
    try:
        names = {(record["recipe"]["name"], record["recipe"]["model"]["init"]) for record in records.values()}
        runs = {task: _run(record, task, str(folder / task / RECORD)) for task, record in records.items()}
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder}: a {RECORD} in it is damaged ({error} is missing or of another kind)") from error
    if len(names) > 1:
        told = ", ".join(f"{model} ({name})" for name, model in sorted(names))
        raise InputError(f"{folder}: its tasks were trained from several models, {told}; give each a folder of its own")
    [(name, model)] = names
    scores: dict[str, float | None] = {task: run.scores.score for task, run in runs.items()}
    return GlueResults(name, model, average(scores, list(TASKS)), runs)


def _run(record: dict[str, Any], task: TaskName, where: str) -> TaskRun:
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
    """Write results.json.

    Raises:
        InputError: It cannot be written.
    """
    write_json(folder / RESULTS, {"schema": SCHEMA, **asdict(results)})
