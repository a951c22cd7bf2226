"""Exact order from float32 scores: ties are ties, wherever in the corpus the documents stand.

Matrix products round the same inner product differently at different places of the matrix: with FAISS and 300 queries of width
768, copies of one document got different scores for most of the queries. Scores that are too close for float32 to order are
therefore computed again in float64 and rounded once. Equal vectors then have equal scores, and a ranking depends neither on
how many queries were searched together nor on the number of threads.

Source of the error bound: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

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


def candidates(
    rows: NDArray[np.int64], scores: NDArray[np.float32], k: int, error: float
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.intp]]:
    """Those of some rows that may belong to the k best.

    Args:
        rows: Rows of the index; all that may belong to the k best must be among them.
        scores: Their scores, with an error of at most ``error``.
        k: Hits wanted, 1 <= k <= number of rows.
        error: Bound on the error of a score.

    Returns:
        Rows and scores, best first, and the places of those whose scores are too close to another to tell the order.
    """
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k] - 2 * error
    kept = np.flatnonzero(scores >= threshold)
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    scores = scores[kept]
    close = scores[:-1] - scores[1:] <= 2 * error
    doubtful = np.zeros(len(scores), bool)
    doubtful[:-1] = close
    doubtful[1:] |= close
    return rows[kept], scores, np.flatnonzero(doubtful)


def in_order(
    rows: NDArray[np.int64], scores: NDArray[np.float32], k: int, *, ids: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The first k rows by score and then by document id, both descending, with their scores.

    Args:
        rows: Rows of the index.
        scores: Their scores: what is equal is a tie.
        k: Hits wanted; fewer are given where there are fewer rows.
        ids: Document ids of all rows of the index, or numbers in the order of the ids.
    """
    order = np.argsort(-scores, kind="stable")
    if len(order) > k:  # a tie at the cut is sorted whole, what is below it is not
        order = order[: np.searchsorted(-scores[order], -scores[order[k - 1]], side="right")]
    rows, scores = rows[order], scores[order]
    if (scores[:-1] == scores[1:]).any():
        named: list[tuple[float, Any, int]] = sorted(zip(scores.tolist(), ids[rows].tolist(), rows.tolist(), strict=True), reverse=True)
        rows = np.array([row for _, _, row in named], np.int64)
    return rows[:k], scores[:k]


def check_k(k: SupportsIndex) -> int:
    """The number of hits as an ``int``, whichever integer it was, such as NumPy's: FAISS takes no other.

    Raises:
        TypeError: It is no integer.
        ValueError: k < 1.
    """
    hits = operator.index(k)
    if hits < 1:
        raise ValueError(f"k must be >= 1, got {k}")
    return hits
