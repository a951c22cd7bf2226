"""Exact search over one vector a document: FAISS's flat inner product, block by block.

``faiss.knn`` is the search behind ``IndexFlatIP`` without its copy of the vectors, so that they can stay in a mapped file or in a
store on the disk: a block of them is in memory at a time. Whether the inner product is a cosine is the model's affair. The number of
threads is FAISS's own and is left alone.

Shapes: Q queries, P documents, n documents of a block, d vector width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.exact.arrays import ROWS, block_rows, check_new_ids, first_bad_row, largest_norm
from quiver.retrieval.index.exact.ranking import check_k, float32_error
from quiver.retrieval.index.exact.walk import Ranked, nearest_by_scores, search_walk
from quiver.retrieval.index.queries import dense_queries
from quiver.retrieval.protocols import Matrix, MatrixRows, PickedRows, Rows
from quiver.retrieval.records import DenseVectors, Hits

# Queries of one walk over the documents: their candidates are Q x (k + margin), 50 MB for k = 1000.
_QUERIES = 4096
# Where a smaller part of the rows may be found than this, they are gathered; otherwise all are scored and the others hidden.
_FEW = 0.25


class ExactDenseIndex:
    """Every document is compared with every query; built by ``from_vectors`` or ``from_rows``."""

    kind = "exact-dense"

    def __init__(self, ids: Sequence[str], rows: Rows) -> None:
        self._ids = tuple(ids)
        self._names = np.array(self._ids, dtype=object)
        self._rows = rows

    @classmethod
    def from_vectors(cls, ids: Sequence[str], vectors: DenseVectors) -> ExactDenseIndex:
        """Index vectors that are in memory.

        Args:
            ids: P document ids.
            vectors: (P, d), kept as float32; not copied if they are so already.

        Raises:
            InputError: No documents, an id twice, or a vector with a NaN or an infinity (names the document).
            ValueError: Not a matrix, or not as many rows as ids.
        """
        if vectors.ndim != 2:
            raise ValueError(f"vectors must have the shape (P, d), got {vectors.shape}")
        return cls.from_rows(ids, MatrixRows(np.ascontiguousarray(vectors, dtype=np.float32)))

    @classmethod
    def from_rows(cls, ids: Sequence[str], rows: Rows) -> ExactDenseIndex:
        """Index vectors that may be larger than the memory; they stay where they are and are read in blocks.

        Args:
            ids: P document ids.
            rows: (P, d).

        Raises:
            InputError: No documents, an id twice, or a vector with a NaN or an infinity (names the document).
            ValueError: Not as many rows as ids.
        """
        check_new_ids(ids, rows.shape[0])
        index = cls(ids, rows)
        if not np.isfinite(index._largest_norm):
            bad = first_bad_row(rows)
            if bad is not None:
                raise InputError(f"the vector of document '{ids[bad]}' is not finite; the model cannot be used on it")
        return index

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in the order they were added."""
        return self._ids

    @property
    def dim(self) -> int:
        """Vector width d."""
        return self._rows.shape[1]

    @property
    def nbytes(self) -> int:
        """Size of the vectors."""
        return 4 * len(self) * self.dim

    @property
    def parameters(self) -> Mapping[str, str]:
        """What a report says beside the kind."""
        return {"precision": "float32"}

    def __len__(self) -> int:
        return len(self._ids)

    def search(self, queries: DenseVectors, k: int) -> Hits:
        """The k best documents of each query by inner product; ties go to the greater document id.

        Args:
            queries: (Q, d).
            k: Hits a query; capped at the number of documents.

        Raises:
            ValueError: k < 1, another width than the index, or a query that is not finite or makes scores that float32 cannot hold.
        """
        k = check_k(k)
        matrix = dense_queries(queries, self.dim)
        found = search_dense(self._rows, matrix, k, largest_norm=self._largest_norm, ids=self._names)
        return Hits([self._names[rows].tolist() for rows, _ in found], [scores for _, scores in found])

    @cached_property
    def _largest_norm(self) -> float:
        return largest_norm(self._rows)


def search_dense(
    rows: Rows,
    queries: DenseVectors,
    k: int,
    *,
    largest_norm: float,
    ids: NDArray[Any],
    allowed: NDArray[np.bool_] | None = None,
    all_exact: bool = False,
) -> list[Ranked]:
    """The k best rows of each query by inner product, as of exact scores; ties go to the greater id.

    Args:
        rows: (P, d), finite.
        queries: (Q, d), finite.
        k: Hits a query, at least 1.
        largest_norm: Length of the longest row.
        ids: Document ids, or numbers in the order of the ids, (P,).
        allowed: The rows that may be found, (P,); None for all.
        all_exact: See `quiver.retrieval.index.exact.walk.search_walk`.

    Raises:
        ValueError: A query makes scores that float32 cannot hold.
    """
    if allowed is not None and np.count_nonzero(allowed) < _FEW * len(allowed):
        picked = np.flatnonzero(allowed)
        found = search_dense(PickedRows(rows, picked), queries, k, largest_norm=largest_norm, ids=ids[picked], all_exact=all_exact)
        return [(picked[places], scores) for places, scores in found]
    with np.errstate(over="ignore"):  # infinite is what it is then, and float32_error refuses that
        lengths = np.linalg.norm(queries, axis=1)
    errors = np.array([float32_error(rows.shape[1], float(length) * largest_norm) for length in lengths])
    findable = rows.shape[0] if allowed is None else int(np.count_nonzero(allowed))
    ranked: list[Ranked] = []
    for start in range(0, len(queries), _QUERIES):
        group = slice(start, start + _QUERIES)
        ranked += search_walk(
            _Walk(rows, queries[group], allowed), k, findable=findable, errors=errors[group], ids=ids, all_exact=all_exact
        )
    return ranked


class _Part:
    """A block of documents and the queries, both in memory; see ``quiver.retrieval.index.exact.walk.Part``."""

    def __init__(self, queries: DenseVectors, block: DenseVectors, hidden: NDArray[np.bool_] | None) -> None:
        self._queries = queries
        self._block = block
        self._hidden = hidden  # (n,) which documents cannot be found

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if self._hidden is not None:
            return nearest_by_scores(self, len(self._queries), len(self._block), k)
        scores, places = faiss.knn(self._queries, self._block, min(k, len(self._block)), metric=faiss.METRIC_INNER_PRODUCT)
        return scores, places

    def scores(self, queries: Sequence[int]) -> NDArray[np.float32]:
        scores: NDArray[np.float32] = self._queries[queries] @ self._block.T  # (Q', n)
        if self._hidden is not None:
            scores[:, self._hidden] = -np.inf
        return scores

    def exact(self, query: int, places: NDArray[np.intp]) -> NDArray[np.float64]:
        return exact_products(self._block, self._queries[query], places)


def exact_products(rows: DenseVectors | Matrix, query: NDArray[np.float32], places: NDArray[np.intp]) -> NDArray[np.float64]:
    """Inner products of a query with some rows in float64, (len(places),)."""
    vector = query.astype(np.float64)
    parts = (places[start : start + ROWS] for start in range(0, len(places), ROWS))
    return np.concatenate([np.zeros(0), *(rows[part].astype(np.float64) @ vector for part in parts)])


class _Walk:
    """The documents in blocks; see ``quiver.retrieval.index.exact.walk.Walk``."""

    def __init__(self, rows: Rows, queries: DenseVectors, allowed: NDArray[np.bool_] | None) -> None:
        self._rows = rows
        self._queries = queries
        self._allowed = allowed

    def parts(self) -> Iterator[tuple[int, _Part]]:
        for start, block in self._rows.blocks(block_rows(self._rows.shape[1])):
            hidden = None if self._allowed is None else ~self._allowed[start : start + len(block)]
            yield start, _Part(self._queries, block, hidden)

    def pick(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, _Part]]:
        for start in range(0, len(rows), ROWS):
            picked = rows[start : start + ROWS]
            yield len(picked), _Part(self._queries, self._rows.take(picked), None)
