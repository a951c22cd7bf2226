"""Exact order from float32 scores: ties are ties, wherever in the corpus the documents stand.

Matrix products round the same inner product differently at different places of the matrix: with FAISS and 300 queries of width
768, copies of one document got different scores for most of the queries. Scores that are too close for float32 to order are
therefore computed again in float64 and rounded once. Equal vectors then have equal scores, and a ranking depends neither on
how many queries were searched together nor on the number of threads.

Source of the error bound: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rescore = Callable[[NDArray[np.intp]], NDArray[np.float64]]
"""Rows of an index to their scores in float64."""

_UNIT_ROUNDOFF = 2.0**-24
_LARGEST = float(np.finfo(np.float32).max)


def float32_error(terms: int, magnitude: float) -> float:
    """Bound on the error of a float32 sum of products, whatever the order of summation.

    Args:
        terms: Number of roundings on the way to one score.
        magnitude: Bound on the sum of the products' absolute values, such as the product of two lengths.

    Returns:
        The bound, with room for rounding the exact score to float32 once more.

    Raises:
        ValueError: The scores may exceed float32, where infinities and NaN have no order.
    """
    if not magnitude < _LARGEST:
        raise ValueError(f"scores up to {magnitude:.3g} do not fit into float32; the vectors are too long")
    return (terms + 2) * _UNIT_ROUNDOFF * magnitude


def is_complete(scores: NDArray[np.float32], k: int, error: float) -> bool:
    """Whether documents that were not retrieved, none scoring above the last, cannot belong to the k best.

    Args:
        scores: Scores of the documents retrieved, best first, more than k.
        k: Number of hits wanted.
        error: Bound on the error of a score.
    """
    return bool(scores[k - 1] - scores[-1] > 2 * error)


def best(
    rows: NDArray[np.intp], scores: NDArray[np.float32], k: int, *, ids: NDArray[np.object_], error: float, rescore: Rescore
) -> tuple[Sequence[str], NDArray[np.float32]]:
    """The k best of some rows, by score and then by document id, both descending.

    Args:
        rows: Rows of the index; all that may belong to the k best must be among them.
        scores: Their scores, with an error of at most ``error``.
        k: Hits wanted, 1 <= k <= number of rows.
        ids: Document ids of all rows of the index.
        error: Bound on the error of a score.
        rescore: Gives a score in float64; called for the rows that are in doubt only.

    Returns:
        Document ids and float32 scores, best first.
    """
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k] - 2 * error
    kept = np.flatnonzero(scores >= threshold)
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    rows, scores = rows[kept], scores[kept]
    close = scores[:-1] - scores[1:] <= 2 * error
    doubtful = np.flatnonzero(np.append(close, False) | np.insert(close, 0, False))
    if len(doubtful):
        scores[doubtful] = rescore(rows[doubtful])
    order = np.argsort(-scores, kind="stable")
    scores, names = scores[order], ids[rows[order]]
    if (scores[:-1] == scores[1:]).any():
        pairs: list[tuple[Any, str]] = sorted(zip(scores.tolist(), names, strict=True), reverse=True)
        names = np.array([name for _, name in pairs], dtype=object)
    return names[:k].tolist(), scores[:k]


def check_k(k: int) -> None:
    """Refuse a number of hits below one.

    Raises:
        ValueError: k < 1.
    """
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}")
