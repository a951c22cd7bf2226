"""Exact search over one vector a document: FAISS's flat inner product on the stored matrix itself.

``faiss.knn`` is the search behind ``IndexFlatIP`` without its copy of the vectors, so that the matrix can stay in a mapped file:
opening costs nothing and memory is shared between processes. Whether the inner product is a cosine is the model's affair. The number
of threads is FAISS's own and is left alone.

Shapes: Q queries, P documents, d vector width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.indexes.arrays import ROWS, check_new_ids, first_bad_row, largest_norm, read_array, read_ids, write_ids
from retrieval.indexes.ranking import best, check_k, float32_error, is_complete
from retrieval.records import DenseVectors, Hits

_VECTORS = "vectors.npy"
# Queries searched together: FAISS's result is Q x (k + margin), never Q x P.
_QUERIES = 1024
# Documents fetched beyond k, so that a tie at the cut is usually seen whole; where it is not, all documents are looked at.
_MARGIN = 32


class ExactDenseIndex:
    """Every document is compared with every query; built by ``from_vectors`` or ``open``."""

    kind = "exact-dense"

    def __init__(self, ids: Sequence[str], vectors: DenseVectors) -> None:
        self._ids = tuple(ids)
        self._names = np.array(self._ids, dtype=object)
        self._vectors = vectors

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
        check_new_ids(ids, len(vectors))
        matrix = np.ascontiguousarray(vectors, dtype=np.float32)
        bad = first_bad_row(matrix)
        if bad is not None:
            raise InputError(f"the vector of document '{ids[bad]}' is not finite; the model cannot be used on it")
        return cls(ids, matrix)

    @classmethod
    def open(cls, folder: Path) -> ExactDenseIndex:
        """Open what ``save`` wrote; the vectors stay in the file.

        Raises:
            InputError: A file is missing, damaged, or does not fit the others.
        """
        ids = read_ids(folder)
        vectors = read_array(folder / _VECTORS, np.float32, 2)
        if len(ids) != len(vectors):
            raise InputError(f"{folder}: {len(ids)} ids for {len(vectors)} vectors; build the index again")
        return cls(ids, vectors)

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in the order they were added."""
        return self._ids

    @property
    def dim(self) -> int:
        """Vector width d."""
        return int(self._vectors.shape[1])

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
        check_k(k)
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ValueError(f"queries must have the shape (Q, {self.dim}), got {queries.shape}")
        matrix = np.ascontiguousarray(queries, dtype=np.float32)
        bad = first_bad_row(matrix)
        if bad is not None:
            raise ValueError(f"the vector of query {bad} is not finite")
        ids: list[Sequence[str]] = []
        scores: list[NDArray[np.float32]] = []
        for start in range(0, len(matrix), _QUERIES):
            for names, values in self._search_block(matrix[start : start + _QUERIES], min(k, len(self))):
                ids.append(names)
                scores.append(values)
        return Hits(ids, scores)

    def save(self, folder: Path) -> dict[str, str]:
        """Write the ids and the vectors into an existing folder; file name -> what it holds."""
        write_ids(folder, self._ids)
        np.save(folder / _VECTORS, self._vectors, allow_pickle=False)
        return {"ids.json": "document ids in the order of the vectors", _VECTORS: "document vectors, (P, d) float32"}

    @cached_property
    def _largest_norm(self) -> float:
        return largest_norm(self._vectors)

    def _search_block(self, queries: DenseVectors, k: int) -> list[tuple[Sequence[str], NDArray[np.float32]]]:
        fetched = min(len(self), k + _MARGIN)
        scores, rows = faiss.knn(queries, self._vectors, fetched, metric=faiss.METRIC_INNER_PRODUCT)
        return [self._rank(query, rows[row], scores[row], k) for row, query in enumerate(queries)]

    def _rank(
        self, query: NDArray[np.float32], rows: NDArray[np.intp], scores: NDArray[np.float32], k: int
    ) -> tuple[Sequence[str], NDArray[np.float32]]:
        error = float32_error(self.dim, float(np.linalg.norm(query)) * self._largest_norm)
        if len(rows) < len(self) and not is_complete(scores, k, error):
            rows, scores = np.arange(len(self)), self._vectors @ query

        def rescore(doubtful: NDArray[np.intp]) -> NDArray[Any]:
            parts = (doubtful[start : start + ROWS] for start in range(0, len(doubtful), ROWS))
            return np.concatenate([self._vectors[part].astype(np.float64) @ query.astype(np.float64) for part in parts])

        return best(rows, scores, k, ids=self._names, error=error, rescore=rescore)
