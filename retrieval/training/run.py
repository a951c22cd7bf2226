"""A recipe run from start to end: data, model, training, and the record of it beside the checkpoint.

``out/model`` is the checkpoint, ``out/run.json`` the record. Both appear when the run is complete.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from encoder import InputError
from encoder.files import write_json
from retrieval.biencoder import BiEncoder
from retrieval.training.data import Row, load_rows
from retrieval.training.dense import TrainingResult, build_model, train_dense
from retrieval.training.recipe import Recipe, to_dict

PACKAGES = ("quiver-retrieval", "torch", "numpy", "tokenizers", "sentence-transformers", "transformers", "datasets", "accelerate")


def train_recipe(
    recipe: Recipe, out: Path, *, overwrite: bool = False, progress: bool = False, command: str | None = None
) -> dict[str, Any]:
    """Run a recipe.

    Args:
        recipe: What to train, on what, and how.
        out: Folder for ``model/`` and ``run.json``.
        overwrite: Replace an earlier run there.
        progress: Show a bar.
        command: The command line to record.

    Returns:
        What ``run.json`` holds.

    Raises:
        InputError: The data or the starting checkpoint cannot be used, or ``out`` holds a run already.
    """
    refuse_existing(out, overwrite=overwrite)
    rows = load_rows(recipe)
    model = build_model(recipe.model, texts_of(rows), seed=recipe.training.seed)
    return train_and_save(recipe, rows, model, out, progress=progress, command=command)


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Say so early if a run would overwrite another.

    Raises:
        InputError: ``out`` holds a run, or is a file.
    """
    if out.is_file():
        raise InputError(f"{out}: a file; --out names a folder")
    if (out / "run.json").exists() and not overwrite:
        raise InputError(f"{out}: holds a run already; choose another --out, or --overwrite")


def train_and_save(
    recipe: Recipe, rows: Sequence[Row], model: BiEncoder, out: Path, *, progress: bool = False, command: str | None = None
) -> dict[str, Any]:
    """Train a model on rows that are at hand, save it and its record.

    Args:
        recipe: Loss and optimisation.
        rows: Training texts.
        model: Trained in place.
        out: Folder for ``model/`` and ``run.json``.
        progress: Show a bar.
        command: The command line to record.

    Returns:
        What ``run.json`` holds.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").unlink(missing_ok=True)  # a record without its model would be worse than none
    work, staged = out / ".trainer", out / ".model"
    try:
        result = train_dense(recipe, rows, model, work, progress=progress)
        result.model.save(staged)
        shutil.rmtree(out / "model", ignore_errors=True)
        staged.rename(out / "model")
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(staged, ignore_errors=True)
    record = describe(recipe, rows, result, command=command)
    write_json(out / "run.json", record)
    return record


def describe(recipe: Recipe, rows: Sequence[Row], result: TrainingResult, *, command: str | None) -> dict[str, Any]:
    """What ``run.json`` holds: enough to run it again and to know whether that would be the same run."""
    negatives = recipe.training.batch_size - 1
    per_row = 2 if "negative" in rows[0] else 1
    return {
        "schema": "quiver-run/1",
        "recipe": to_dict(recipe),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "data": {"rows": len(rows), "sha256": rows_sha256(rows)},
        "batch": {"rows": recipe.training.batch_size, "negatives_per_query": negatives * per_row + per_row - 1},
        "model": {"parameters": result.model.encoder.num_parameters, **asdict(result.model.card)},
        "result": {
            "pairs": result.pairs,
            "texts_truncated": result.texts_truncated,
            "steps": result.steps,
            "seconds": result.seconds,
            "losses": result.losses,
        },
    }


def texts_of(rows: Iterable[Row]) -> list[str]:
    """All texts of the rows, in order."""
    return [text for row in rows for text in row.values()]


def rows_sha256(rows: Sequence[Row]) -> str:
    """sha256 of the rows as JSON lines: equal sums mean equal training data in equal order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
