"""GLUE's measures: accuracy, F1 of label 1, and the correlations of Matthews, Pearson and Spearman.

An undefined correlation (one side is constant) counts as 0: a model that gives the same answer to everything distinguishes nothing.
scikit-learn does the same for Matthews' correlation and F1; scipy returns NaN for the other two.

Shapes: n examples.
Source: GLUE, arXiv:1804.07461, section 3; Matthews 1975, doi:10.1016/0005-2795(75)90109-9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quiver.eval.nlu.glue_tasks import GlueTask, Measure


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Share of the predictions that equal their labels.

    Example:
        >>> accuracy([0, 1, 1, 2], [0, 1, 0, 2])
        0.75
    """
    ours, theirs = _pair(predictions, labels)
    return float(np.mean(ours == theirs))


def f1(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Harmonic mean of precision and recall of label 1; 0 if label 1 occurs neither in the predictions nor in the labels.

    Example:
        >>> f1([0, 1, 1, 1], [0, 1, 0, 1])
        0.8
    """
    ours, theirs = _pair(predictions, labels)
    both, either = int(((ours == 1) & (theirs == 1)).sum()), int((ours == 1).sum() + (theirs == 1).sum())
    return 2 * both / either if either else 0.0


def matthews(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Matthews' correlation for the labels 0 and 1.

    Example:
        >>> matthews([0, 1, 1, 1], [0, 1, 0, 1])
        0.5773502691896258
    """
    ours, theirs = _pair(predictions, labels)
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
    ours, theirs = (side.astype(np.float64) for side in _pair(predictions, labels))
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
    ours, theirs = _pair(predictions, labels)
    return pearson(_ranks(ours), _ranks(theirs))


def _ranks(values: NDArray[np.generic]) -> NDArray[np.float64]:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = ends - (counts - 1) / 2
    return means[group]


def _pair(predictions: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
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
    """All measures of a task; the first is its score.

    Args:
        task: Task that names the measures.
        predictions: Label numbers or similarities, (n,).
        labels: Right labels or similarities, (n,).

    Raises:
        ValueError: The shapes differ or are empty.
    """
    return {name: MEASURES[name](predictions, labels) for name in task.measures}
