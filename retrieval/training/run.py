"""A recipe run from start to end: data, model, training, and the record of it beside the checkpoint.

``out/model`` is the checkpoint, ``out/run.json`` the record. Both appear when the run is complete; until then an earlier run
there stays as it is. A process that is killed outright leaves a hidden ``.unfinished-...`` folder behind; killed between the
two renames of the end, also the earlier run, whole, as ``.replaced-...``.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from encoder import InputError
from encoder.files import sync_folder, write_json
from retrieval.biencoder import BiEncoder
from retrieval.training.data import Row, load_rows
from retrieval.training.dense import TrainingResult, build_model, check_rows, require_extra, train_dense
from retrieval.training.recipe import Recipe, to_dict
from retrieval.versions import installed_version

PACKAGES = ("quiver-retrieval", "torch", "numpy", "tokenizers", "sentence-transformers", "transformers", "datasets", "accelerate")

MODEL, RECORD = "model", "run.json"
"""What a run leaves in its folder."""


def train_recipe(
    recipe: Recipe, out: Path, *, overwrite: bool = False, progress: bool = False, command: str | None = None
) -> dict[str, Any]:
    """Run a recipe.

    Args:
        recipe: What to train, on what, and how.
        out: Folder for ``model/`` and ``run.json``.
        overwrite: Replace an earlier run there, once the new one is complete.
        progress: Show a bar.
        command: The command line to record.

    Returns:
        What ``run.json`` holds.

    Raises:
        InputError: The data or the starting checkpoint cannot be used, an extra is missing, or ``out`` holds a run already.
    """
    refuse_existing(out, overwrite=overwrite)
    require_extra()
    rows = load_rows(recipe)
    check_rows(recipe, rows)
    model = build_model(recipe.model, texts_of(rows), seed=recipe.training.seed)
    return train_and_save(recipe, rows, model, out, progress=progress, command=command)


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Say so early if a run would overwrite another, or a model that came from elsewhere.

    Raises:
        InputError: ``out`` holds a model or a record, or is a file.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file; --out names a folder")
    held = [what for name, what in ((RECORD, "run"), (MODEL, "model")) if (out / name).exists()]
    if held and not overwrite:
        raise InputError(f"{out}: holds a {held[0]} already; choose another --out, or --overwrite")


def train_and_save(
    recipe: Recipe, rows: Sequence[Row], model: BiEncoder, out: Path, *, progress: bool = False, command: str | None = None
) -> dict[str, Any]:
    """Train a model on rows that are at hand, save it and its record; what ``out`` holds is replaced when both are written.

    Args:
        recipe: Loss and optimisation.
        rows: Training texts.
        model: Trained in place.
        out: Folder for ``model/`` and ``run.json``.
        progress: Show a bar.
        command: The command line to record.

    Returns:
        What ``run.json`` holds.

    Raises:
        InputError: The rows do not make a batch, training cannot go on, or ``out`` cannot be written.
    """
    check_rows(recipe, rows)
    with _stage(out) as stage:
        result = train_dense(recipe, rows, model, stage / "trainer", progress=progress)
        record = describe(recipe, rows, result, command=command)
        result.model.save(stage / MODEL)
        write_json(stage / RECORD, record)
        _swap(stage, out)
    return record


@contextmanager
def _stage(out: Path) -> Iterator[Path]:
    """A private folder inside ``out``; it goes when the block ends, and so does ``out`` if it was made for nothing."""
    created = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        stage = Path(mkdtemp(prefix=".unfinished-", dir=out))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)  # a leftover must not hide what went wrong
        if created and not any(out.iterdir()):
            out.rmdir()


def _swap(stage: Path, out: Path) -> None:
    """Put the model and the record of ``stage`` in the place of those in ``out``; if a rename fails, all are undone."""
    old = Path(mkdtemp(prefix=".replaced-", dir=out))  # not in the stage, which is removed whatever happens
    # The record leaves first and comes last: a record without its model would be worse than none.
    away = [(out / name, old / name) for name in (RECORD, MODEL) if (out / name).exists()]
    into = [(stage / name, out / name) for name in (MODEL, RECORD)]
    with ExitStack() as undo:
        undo.callback(old.rmdir)
        for source, target in (*away, *into):
            source.rename(target)
            undo.callback(target.rename, source)
        undo.pop_all()
    sync_folder(out)
    shutil.rmtree(old)


def describe(recipe: Recipe, rows: Sequence[Row], result: TrainingResult, *, command: str | None) -> dict[str, Any]:
    """What ``run.json`` holds: enough to run it again and to know whether that would be the same run."""
    negatives = recipe.training.batch_size - 1
    per_row = 2 if "negative" in rows[0] else 1
    return {
        "schema": "quiver-run/1",
        "recipe": to_dict(recipe),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}},
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "data": {"rows": len(rows), "sha256": rows_sha256(rows)},
        "batch": {"rows": recipe.training.batch_size, "negatives_per_query": negatives * per_row + per_row - 1},
        "model": {"parameters": result.model.encoder.num_parameters, **asdict(result.model.card)},
        "result": {
            "pairs": result.pairs,
            "texts_truncated": result.texts_truncated,
            "steps": result.steps,
            "steps_planned": result.steps_planned,
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
