"""Queries as a search takes them: of the index's width, finite, float32 and contiguous, whatever kind of number they came as.

What reaches the compiled loops and FAISS has been here: they read as many numbers as they are told there are.

Shapes: Q queries, n_i token vectors of query i, d vector width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quiver.retrieval.index.documents.filters import Filter
from quiver.retrieval.records import DenseVectors, TokenVectors


@dataclass(frozen=True)
class SearchRequest:
    """What a search asks, once it has been checked; any segments of the index can answer it.

    Attributes:
        queries: As `dense_queries` or `token_queries` gives them.
        k: Hits a query, at least 1.
        effort: The knobs, as the codec has them.
        filter: Which documents may be found; None for all.
    """

    queries: Any
    k: int
    effort: Any
    filter: Filter | None


def dense_queries(queries: ArrayLike, dim: int) -> DenseVectors:
    """Queries of one vector each as a matrix, (Q, d).

    Args:
        queries: (Q, d).
        dim: Width d of the index.

    Raises:
        ValueError: They have another shape, or one is not finite, or not so in float32.
    """
    given: NDArray[Any] = np.asarray(queries)
    if given.ndim != 2 or given.shape[1] != dim:
        raise ValueError(f"queries must have the shape (Q, {dim}), got {given.shape}")
    matrix = _single(given)
    finite = np.isfinite(matrix)
    if not finite.all():
        raise ValueError(f"the vector of query {int(finite.all(axis=1).argmin())} is not finite")
    return matrix


def token_queries(queries: Sequence[ArrayLike], dim: int) -> list[TokenVectors]:
    """Queries of one vector a token as matrices, Q arrays of (n_i, d).

    Args:
        queries: Q arrays of (n_i, d), n_i >= 1.
        dim: Width d of the index.

    Raises:
        ValueError: One is empty, of another shape, or not finite, or not so in float32.
    """
    checked = []
    for row, query in enumerate(queries):
        given: NDArray[Any] = np.asarray(query)
        if given.ndim != 2 or not len(given) or given.shape[1] != dim:
            raise ValueError(f"query {row} must have the shape (>= 1, {dim}), got {given.shape}")
        matrix = _single(given)
        if not np.isfinite(matrix).all():
            raise ValueError(f"a vector of query {row} is not finite")
        checked.append(matrix)
    return checked


def _single(matrix: NDArray[Any]) -> NDArray[np.float32]:
    """The matrix itself where it is contiguous float32 already."""
    if matrix.dtype == np.float32:
        return np.ascontiguousarray(matrix)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as such
        return np.ascontiguousarray(matrix, np.float32)
