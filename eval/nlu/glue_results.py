"""Scores of a model on GLUE, collected from the run folders of its tasks.

results.json holds them as fractions. The average is over all eight tasks, and null while one is missing.
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
    """Summary of a task's run.

    Attributes:
        scores: Scores of the model.
        trained_on: Number of training examples.
        from_mnli: Whether it started from the model trained on MNLI.
        learning_rate: Peak learning rate.
        weight_decay: Weight decay in the recipe.
        epochs: Epochs in the recipe.
        batch_size: Examples per update.
        steps: Number of updates.
        planned_steps: Number of updates without early stopping.
        best_step: Update with the best score; the model after it was scored.
        seconds: Time of all sessions.
        seed: Random seed.
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
    """Scores of a model on GLUE.

    Attributes:
        name: Name of the recipe.
        model: Initial model of all tasks that do not start from MNLI.
        average: Average of the scores.
        runs: Runs by task, in the order of Table 5.
    """

    name: str
    model: str
    average: Average
    runs: dict[TaskName, TaskRun]


def gather_results(folder: Path) -> GlueResults:
    """Collect the results of a model from the records of its runs.

    Args:
        folder: Folder with one subfolder per task; incomplete runs are left out.

    Raises:
        InputError: No run is complete, a record is damaged, or the runs are of different models or recipes.
    """
    records = {task: read_json(folder / task / RECORD) for task in TASKS if (folder / task / RECORD).is_file()}
    if not records:
        raise InputError(f"{folder}: contains no finished run of quiver glue")
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
        InputError: The file cannot be written.
    """
    write_json(folder / RESULTS, {"schema": SCHEMA, **asdict(results)})
