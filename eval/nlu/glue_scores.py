"""GLUE's measures: accuracy, F1 of the second label, Matthews' and Pearson's and Spearman's correlation.

Where a correlation is not defined, since one side is the same throughout, it is taken for 0: a model that says the same of everything has
told nothing apart. scikit-learn does so with Matthews' and with F1; scipy has NaN for the other two.

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
    """Share of the labels that were met.

    Example:
        >>> accuracy([0, 1, 1, 2], [0, 1, 0, 2])
        0.75
    """
    ours, theirs = _pair(predictions, labels)
    return float(np.mean(ours == theirs))


def f1(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Harmonic mean of precision and recall of label 1; 0 where it is neither predicted nor there.

    Example:
        >>> f1([0, 1, 1, 1], [0, 1, 0, 1])
        0.8
    """
    ours, theirs = _pair(predictions, labels)
    both, either = int(((ours == 1) & (theirs == 1)).sum()), int((ours == 1).sum() + (theirs == 1).sum())
    return 2 * both / either if either else 0.0


def matthews(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Matthews' correlation of two labels, 0 and 1.

    Example:
        >>> matthews([0, 1, 1, 1], [0, 1, 0, 1])
        0.5773502691896258
    """
    ours, theirs = _pair(predictions, labels)
    counts = {(first, second): int(((ours == first) & (theirs == second)).sum()) for first in (0, 1) for second in (0, 1)}
    sides = [counts[1, 1] + counts[1, 0], counts[0, 0] + counts[0, 1], counts[1, 1] + counts[0, 1], counts[0, 0] + counts[1, 0]]
    # Python's integers do not overflow, as the product of four counts of 40,000 examples does in 32 bits.
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
    # Each is divided by its own length before they are multiplied: the product of two lengths may be too small, or too large, for a float.
    ours, theirs = (side - side.mean() for side in (ours, theirs))
    lengths = [float(np.linalg.norm(side)) for side in (ours, theirs)]
    if not all(lengths):  # differences too small to be squared
        return 0.0
    return float(np.clip((ours / lengths[0]) @ (theirs / lengths[1]), -1.0, 1.0))


def spearman(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Spearman's correlation: Pearson's of the ranks, equal values sharing the mean of theirs.

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
    """All measures of a task, the first of which is its score.

    Args:
        task: Says which.
        predictions: Numbers of labels, or what was said of a pair's similarity; (n,).
        labels: The right ones, (n,).

    Raises:
        ValueError: There is not one prediction a label, or none at all.
    """
    return {name: MEASURES[name](predictions, labels) for name in task.measures}
