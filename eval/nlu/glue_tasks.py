"""The eight GLUE tasks on which encoders are compared: their columns, labels, data and measures. WNLI is left out, as in all such tables.

Column names and label numbers are those of the data set ``nyu-mll/glue`` on the Hugging Face Hub. A folder with the same layout is read
too: ``TASK/SPLIT-00000-of-00001.parquet``, where a row has one or two texts, ``label`` and ``idx``. The labels of GLUE's test splits are
hidden and stored as -1, so these splits can be used neither for training nor for scoring.

A task's score is the number in Table 5 of the ModernBERT paper. The table does not name its measures. Judging by their values, its QQP
scores are accuracies (except that of GTE-en-MLM, about three points lower, which is the F1 of its own paper); MRPC is interpreted in the
same way. For STS-B the release computes Spearman's correlation.

An undefined correlation (one side is constant) counts as 0: a model that gives the same answer to everything distinguishes nothing.
scikit-learn does the same for Matthews' correlation and F1; scipy returns NaN for the other two.

Shapes: n examples.
Source: GLUE, arXiv:1804.07461, Table 1 and section 3; the card of ``nyu-mll/glue``; Matthews 1975, doi:10.1016/0005-2795(75)90109-9;
ModernBERT, arXiv:2412.13663, Table 5 (appendix E.1), and the fine-tuning jobs of its release.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.retrieval.data.hub import HUB
from quiver.retrieval.training.data.sources import iter_source

TaskName = Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
"""Names of the tasks: their configurations in ``nyu-mll/glue``."""

Measure = Literal["matthews", "accuracy", "f1", "spearman", "pearson"]


@dataclass(frozen=True)
class GlueTask:
    """One task."""

    name: TaskName
    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    measures: tuple[Measure, ...]  # the first is the score
    held_out: str = "validation"  # labelled split that is scored

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number instead of a class."""
        return not self.labels


_ENTAILS = ("entailment", "not_entailment")

TASKS: Mapping[TaskName, GlueTask] = {
    task.name: task
    for task in (
        GlueTask("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable"), ("matthews",)),
        GlueTask("sst2", "SST-2", ("sentence",), ("negative", "positive"), ("accuracy",)),
        GlueTask("mrpc", "MRPC", ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("accuracy", "f1")),
        GlueTask("stsb", "STS-B", ("sentence1", "sentence2"), (), ("spearman", "pearson")),
        GlueTask("qqp", "QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
        GlueTask(
            "mnli", "MNLI", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), ("accuracy",), "validation_matched"
        ),
        GlueTask("qnli", "QNLI", ("question", "sentence"), _ENTAILS, ("accuracy",)),
        GlueTask("rte", "RTE", ("sentence1", "sentence2"), _ENTAILS, ("accuracy",)),
    )
}
"""Name -> task, in the order of Table 5."""

SIMILARITY = (0.0, 5.0)
"""Range of STS-B's similarities."""


HIDDEN = -1
"""Value of a label that GLUE does not publish."""


@dataclass(frozen=True)
class GlueExample:
    """One example of a task."""

    index: int
    texts: tuple[str, ...]
    label: float


@dataclass(frozen=True)
class GlueSplit:
    """The examples of a split."""

    examples: list[GlueExample]
    sha256: str  # of texts and labels, independent of the files


def read_split(source: str, task: GlueTask, split: str, *, limit: int | None = None) -> GlueSplit:
    """Read a split of a task."""
    digest, examples = hashlib.sha256(), []
    for where, row in islice(_read_task_rows(source, task, split), limit):
        example = _read_example(where, row, task)
        examples.append(example)
        digest.update(json.dumps([example.texts, example.label]).encode() + b"\n")
    return GlueSplit(examples, digest.hexdigest())


def _read_task_rows(source: str, task: GlueTask, split: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    fields = (*task.columns, "label", "idx")
    if source.startswith(HUB):
        yield from iter_source(f"{source.rstrip('/')}/{task.name}/{split}", fields)
        return
    for file in _find_split_files(expand_home(source), task, split):
        yield from iter_source(str(file), fields)


def _find_split_files(folder: Path, task: GlueTask, split: str) -> list[Path]:
    """The files of a split, which may have several numbered parts."""
    inside = folder / task.name
    if not inside.is_dir():
        found = [name for name in TASKS if (folder / name).is_dir()]
        raise InputError(f"{folder}: no folder {task.name!r}; expected the layout of nyu-mll/glue, found {', '.join(found) or 'none'}")
    files = sorted(inside.glob(f"{split}-*-of-*.parquet"))
    if not files:
        splits = sorted({path.name.partition("-")[0] for path in inside.glob("*-*-of-*.parquet")})
        raise InputError(f"{inside}: no {split}-00000-of-00001.parquet; its splits are {', '.join(splits) or 'none'}")
    parts = int(files[0].stem.rpartition("-of-")[2])
    if len(files) != parts:
        raise InputError(f"{inside}: found {len(files)} of the {parts} files of {split}; download the others")
    return files


def _read_example(where: str, row: Mapping[str, object], task: GlueTask) -> GlueExample:
    texts = [row.get(column) for column in task.columns]
    for column, text in zip(task.columns, texts, strict=True):
        if not isinstance(text, str):
            raise InputError(
                f"{where}: column {column!r} of {task.title} must be a string, got {_show_value(text)}; is this the file of another task?"
            )
    index = row.get("idx")
    if not isinstance(index, int):
        raise InputError(f"{where}: 'idx' must be a whole number, got {_show_value(index)}")
    return GlueExample(index, tuple(str(text) for text in texts), _read_label(where, row.get("label"), task))


def _read_label(where: str, label: object, task: GlueTask) -> float:
    if label == HIDDEN:
        raise InputError(f"{where}: the label is {HIDDEN}, so it is hidden, as in GLUE's test splits; score on {task.held_out!r}")
    if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
        raise InputError(f"{where}: 'label' must be a number, got {_show_value(label)}")
    low, high = SIMILARITY if task.is_regression else (0, len(task.labels) - 1)
    if not low <= label <= high or not (task.is_regression or float(label).is_integer()):
        kind = "number" if task.is_regression else "whole number"
        raise InputError(f"{where}: a label of {task.title} is a {kind} from {low:g} to {high:g}, got {label:g}")
    return float(label)


def _show_value(value: object) -> str:
    return "missing" if value is None else f"{value!r:.60}"


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Share of the predictions that equal their labels.

    Example:
        >>> accuracy([0, 1, 1, 2], [0, 1, 0, 2])
        0.75
    """
    ours, theirs = _check_pair(predictions, labels)
    return float(np.mean(ours == theirs))


def f1(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Harmonic mean of precision and recall of label 1; 0 if label 1 occurs neither in the predictions nor in the labels.

    Example:
        >>> f1([0, 1, 1, 1], [0, 1, 0, 1])
        0.8
    """
    ours, theirs = _check_pair(predictions, labels)
    both, either = int(((ours == 1) & (theirs == 1)).sum()), int((ours == 1).sum() + (theirs == 1).sum())
    return 2 * both / either if either else 0.0


def matthews(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Matthews' correlation for the labels 0 and 1.

    Example:
        >>> matthews([0, 1, 1, 1], [0, 1, 0, 1])
        0.5773502691896258
    """
    ours, theirs = _check_pair(predictions, labels)
    counts = {(first, second): int(((ours == first) & (theirs == second)).sum()) for first in (0, 1) for second in (0, 1)}
    sides = [counts[1, 1] + counts[1, 0], counts[0, 0] + counts[0, 1], counts[1, 1] + counts[0, 1], counts[0, 0] + counts[1, 0]]
    # Python's integers do not overflow; in 32 bits, the product of four counts of 40,000 examples does.
    product = math.prod(sides)
    return (counts[1, 1] * counts[0, 0] - counts[1, 0] * counts[0, 1]) / math.sqrt(product) if product else 0.0


def pearson(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Pearson's correlation.

    Example:
        >>> round(pearson([1.0, 2.0, 3.0], [1.0, 2.0, 4.0]), 12)
        0.981980506062
    """
    ours, theirs = (side.astype(np.float64) for side in _check_pair(predictions, labels))
    if np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        return 0.0
    # Divide each side by its norm before multiplying: the product of the norms may underflow or overflow.
    ours, theirs = (side - side.mean() for side in (ours, theirs))
    lengths = [float(np.linalg.norm(side)) for side in (ours, theirs)]
    if not all(lengths):  # the squares of the differences underflow
        return 0.0
    return float(np.clip((ours / lengths[0]) @ (theirs / lengths[1]), -1.0, 1.0))


def spearman(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Spearman's correlation: Pearson's correlation of the ranks, where equal values share their mean rank.

    Example:
        >>> round(spearman([0.1, 0.9, 5.0], [1, 2, 2]), 12)
        0.866025403784
    """
    ours, theirs = _check_pair(predictions, labels)
    return pearson(_ranks(ours), _ranks(theirs))


def _ranks(values: NDArray[np.generic]) -> NDArray[np.float64]:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = ends - (counts - 1) / 2
    return means[group]


def _check_pair(predictions: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    ours, theirs = np.asarray(predictions), np.asarray(labels)
    if ours.ndim != 1 or ours.shape != theirs.shape or not len(ours):
        raise ValueError(f"predictions and labels must be (n,) alike with n >= 1, got {ours.shape} and {theirs.shape}")
    return ours, theirs


MEASURES: Mapping[Measure, Callable[[ArrayLike, ArrayLike], float]] = {
    "matthews": matthews,
    "accuracy": accuracy,
    "f1": f1,
    "spearman": spearman,
    "pearson": pearson,
}
"""Name -> measure of predictions (n,) against labels (n,), as a fraction of 1."""


def measure(task: GlueTask, predictions: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """All measures of a task; the first is its score."""
    return {name: MEASURES[name](predictions, labels) for name in task.measures}
