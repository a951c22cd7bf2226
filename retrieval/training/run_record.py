"""The record of a run, ``run.json``: enough to run it again, to know whether that would be the same run, and how it went.

What stands in it:

    schema      quiver-run/2
    recipe, command, date, versions, platform, device, threads, processes
    data        rows, documents_per_row, sha256, skipped (rows), copies (documents left out of their rows), revision
    batch       rows (of one process), accumulation, processes, effective (rows of an update), negatives_per_query
    model       parameters; base_model (the hub's id of the checkpoint it started from, or null); and the card: fingerprint, prompts, ...
    result      steps, epochs; losses, learning_rates, grad_norms and tokens_per_second as [[step, value], ...]; development as
                [{step, ndcg@10, seconds}, ...]; kept_steps (whose weights the model has, their mean if there are several);
                texts, texts_truncated, tokens; seconds (of all sessions), resumed_at, peak_memory_bytes (this session, process 0)
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from quiver.encoder.files import expand_home
from quiver.encoder.training.log import Line, curve
from quiver.encoder.training.machine import peak_memory
from quiver.encoder.training.trainer import Progress
from quiver.retrieval.training.data import TrainingRows
from quiver.retrieval.training.loop.task import SCORE
from quiver.retrieval.training.rules import IN_BATCH
from quiver.retrieval.training.sections import Recipe
from quiver.retrieval.utils import installed_version

SCHEMA = "quiver-run/2"

PACKAGES = (
    "quiver-retrieval",
    "torch",
    "numpy",
    "tokenizers",
    "sentence-transformers",
    "pylate",
    "transformers",
    "datasets",
    "schedulefree",
)


def versions() -> dict[str, str | None]:
    """Of Python and of what a run depends on; None for what is not installed."""
    return {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}}


def describe_data(recipe: Recipe, rows: TrainingRows) -> dict[str, Any]:
    """What tells one set of rows from another."""
    return {
        "rows": len(rows),
        "documents_per_row": rows.documents_per_row,
        "sha256": rows.sha256,
        "skipped": rows.skipped,
        "copies": rows.copies,
        "revision": recipe.data.revision,
    }


def base_model(recipe: Recipe) -> str | None:
    """The hub's id of the checkpoint that a recipe starts from; None where that is a folder of this machine, or random weights."""
    init = recipe.model.init
    return None if init == "random" or expand_home(init).is_dir() else init


def negatives_per_query(recipe: Recipe, documents_per_row: int, processes: int) -> int:
    """Documents that a query is told from: its row's own, and with in-batch negatives those of the other rows too."""
    if recipe.loss.name not in IN_BATCH:
        return documents_per_row - 1
    rows = recipe.training.batch_size * (processes if recipe.loss.gather_across_devices else 1)
    return rows * documents_per_row - 1


def describe_batch(recipe: Recipe, rows: TrainingRows, processes: int) -> dict[str, int]:
    """How many rows an update sees, and how many negatives a query."""
    training = recipe.training
    return {
        "rows": training.batch_size,
        "accumulation": training.accumulation,
        "processes": processes,
        "effective": training.batch_size * training.accumulation * processes,
        "negatives_per_query": negatives_per_query(recipe, rows.documents_per_row, processes),
    }


def describe_result(log: Sequence[Line], progress: Progress, *, epochs: float, kept_steps: Sequence[int]) -> dict[str, Any]:
    """How a run went, from its log and its last progress."""
    return {
        "steps": progress.step,
        "epochs": epochs,
        "losses": curve(log, "loss"),
        "learning_rates": curve(log, "learning_rate"),
        "grad_norms": curve(log, "grad_norm"),
        "tokens_per_second": curve(log, "tokens_per_second"),
        "development": [{key: line[key] for key in ("step", SCORE, "seconds")} for line in log if SCORE in line],
        "kept_steps": list(kept_steps),
        "texts": progress.texts,
        "texts_truncated": progress.truncated,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "resumed_at": list(progress.resumed_at),
        "peak_memory_bytes": peak_memory(),
    }
