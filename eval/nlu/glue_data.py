"""GLUE examples from the Hugging Face Hub, or from a folder with the same layout: ``TASK/SPLIT-00000-of-00001.parquet``.

The files are those of ``nyu-mll/glue``: a row has one or two texts, ``label`` and ``idx``. The labels of GLUE's test splits are hidden and
stored as -1, so these splits can be used neither for training nor for scoring.

Source: GLUE, arXiv:1804.07461; the card of ``nyu-mll/glue``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.eval.nlu.glue_tasks import SIMILARITY, TASKS, GlueTask
from quiver.retrieval.training.data.sources import HUB, iter_source

HIDDEN = -1
"""Value of a label that GLUE does not publish."""


@dataclass(frozen=True)
class GlueExample:
    """One example of a task.

    Attributes:
        index: GLUE's number of the example within its split.
        texts: One text, or a pair of texts.
        label: Number of the label, or the similarity.
    """

    index: int
    texts: tuple[str, ...]
    label: float


@dataclass(frozen=True)
class GlueSplit:
    """The examples of a split.

    Attributes:
        examples: Examples in the order of the files; at least one.
        sha256: Checksum of texts and labels, independent of the files they came from.
    """

    examples: list[GlueExample]
    sha256: str


def read_split(source: str, task: GlueTask, split: str, *, limit: int | None = None) -> GlueSplit:
    """Read a split of a task.

    Args:
        source: ``hub://OWNER/NAME[@REVISION]``, or a folder with one subfolder per task.
        task: The task.
        split: ``train``, the held-out split, or any other split with labels.
        limit: Maximum number of rows to read, from the first; None for all.

    Raises:
        InputError: The folder, file, data set or split does not exist or is damaged, or a row lacks a text or has a missing, hidden or
            invalid label (names file and row).
    """
    digest, examples = hashlib.sha256(), []
    for place, row in islice(_rows(source, task, split), limit):
        example = _example(place, row, task)
        examples.append(example)
        digest.update(json.dumps([example.texts, example.label]).encode() + b"\n")
    return GlueSplit(examples, digest.hexdigest())


def _rows(source: str, task: GlueTask, split: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    fields = (*task.columns, "label", "idx")
    if source.startswith(HUB):
        yield from iter_source(f"{source.rstrip('/')}/{task.name}/{split}", fields)
        return
    for file in _files(expand_home(source), task, split):
        yield from iter_source(str(file), fields)


def _files(folder: Path, task: GlueTask, split: str) -> list[Path]:
    """The files of a split, which may have several numbered parts."""
    inside = folder / task.name
    if not inside.is_dir():
        found = [name for name in TASKS if (folder / name).is_dir()]
        raise InputError(f"{folder}: no folder {task.name!r} in it; its tasks are {', '.join(found) or 'none'}, its layout nyu-mll/glue's")
    files = sorted(inside.glob(f"{split}-*-of-*.parquet"))
    if not files:
        splits = sorted({path.name.partition("-")[0] for path in inside.glob("*-*-of-*.parquet")})
        raise InputError(f"{inside}: no {split}-00000-of-00001.parquet; its splits are {', '.join(splits) or 'none'}")
    parts = int(files[0].stem.rpartition("-of-")[2])
    if len(files) != parts:
        raise InputError(f"{inside}: {len(files)} of the {parts} files of {split} exist; download the others")
    return files


def _example(place: str, row: Mapping[str, object], task: GlueTask) -> GlueExample:
    texts = [row.get(column) for column in task.columns]
    for column, text in zip(task.columns, texts, strict=True):
        if not isinstance(text, str):
            raise InputError(f"{place}: {task.title} needs the text {column!r}, which is {_shown(text)}; is this another task's file?")
    index = row.get("idx")
    if not isinstance(index, int):
        raise InputError(f"{place}: 'idx' must be a whole number, got {_shown(index)}")
    return GlueExample(index, tuple(str(text) for text in texts), _label(place, row.get("label"), task))


def _label(place: str, label: object, task: GlueTask) -> float:
    if label == HIDDEN:
        raise InputError(f"{place}: the label is {HIDDEN}, so it is hidden, as in GLUE's test splits; score on {task.held_out!r}")
    if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
        raise InputError(f"{place}: 'label' must be a number, got {_shown(label)}")
    low, high = SIMILARITY if task.is_regression else (0, len(task.labels) - 1)
    if not low <= label <= high or not (task.is_regression or float(label).is_integer()):
        kind = "number" if task.is_regression else "whole number"
        raise InputError(f"{place}: a label of {task.title} is a {kind} from {low:g} to {high:g}, got {label:g}")
    return float(label)


def _shown(value: object) -> str:
    return "missing" if value is None else f"{value!r:.60}"
