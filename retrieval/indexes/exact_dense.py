"""Exact search over one vector a document: FAISS's flat inner product, block by block.

``faiss.knn`` is the search behind ``IndexFlatIP`` without its copy of the vectors, so that they can stay in a mapped file or in a
store on the disk: a block of them is in memory at a time. Whether the inner product is a cosine is the model's affair. The number of
threads is FAISS's own and is left alone.

Shapes: Q queries, P documents, n documents of a block, d vector width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.indexes.arrays import (
    ROWS,
    block_rows,
    check_new_ids,
    first_bad_row,
    largest_norm,
    read_array,
    read_ids,
    write_ids,
    write_rows,
)
from retrieval.indexes.ranking import check_k, float32_error
from retrieval.indexes.walk import search_walk
from retrieval.protocols import Rows
from retrieval.records import DenseVectors, Hits
from retrieval.rows import MatrixRows

_VECTORS = "vectors.npy"
# Queries of one walk over the documents: their candidates are Q x (k + margin), 50 MB for k = 1000.
_QUERIES = 4096


class ExactDenseIndex:
    """Every document is compared with every query; built by ``from_vectors``, ``from_rows`` or ``open``."""

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
        return cls(ids, MatrixRows(vectors))

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
        check_k(k)
        matrix = check_queries(queries, self.dim)
        with np.errstate(over="ignore"):  # infinite is what it is then, and float32_error refuses that
            lengths = np.linalg.norm(matrix, axis=1)
        errors = np.array([float32_error(self.dim, float(length) * self._largest_norm) for length in lengths])
        ids: list[Sequence[str]] = []
        scores: list[NDArray[np.float32]] = []
        for start in range(0, len(matrix), _QUERIES):
            group = slice(start, start + _QUERIES)
            walk = _Walk(self._rows, matrix[group])
            for names, values in search_walk(walk, min(k, len(self)), findable=len(self), errors=errors[group], ids=self._names):
                ids.append(names)
                scores.append(values)
        return Hits(ids, scores)

    def save(self, folder: Path) -> dict[str, str]:
        """Write the ids and the vectors into an existing folder; file name -> what it holds."""
        write_ids(folder, self._ids)
        write_rows(folder / _VECTORS, self._rows)
        return {"ids.json": "document ids in the order of the vectors", _VECTORS: "document vectors, (P, d) float32"}

    @cached_property
    def _largest_norm(self) -> float:
        return largest_norm(self._rows)


def check_queries(queries: DenseVectors, dim: int) -> DenseVectors:
    """Queries as a contiguous float32 matrix, (Q, d).

    Raises:
        ValueError: They have another shape, or one is not finite.
    """
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise ValueError(f"queries must have the shape (Q, {dim}), got {queries.shape}")
    matrix = np.ascontiguousarray(queries, dtype=np.float32)
    bad = first_bad_row(MatrixRows(matrix))
    if bad is not None:
        raise ValueError(f"the vector of query {bad} is not finite")
    return matrix


class _Part:
    """A block of documents and the queries, both in memory; see ``retrieval.indexes.walk.Part``."""

    def __init__(self, queries: DenseVectors, block: DenseVectors) -> None:
        self._queries = queries
        self._block = block

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        scores, places = faiss.knn(self._queries, self._block, min(k, len(self._block)), metric=faiss.METRIC_INNER_PRODUCT)
        return scores, places

    def scores(self, queries: Sequence[int]) -> NDArray[np.float32]:
        scores: NDArray[np.float32] = self._queries[queries] @ self._block.T  # (Q', n)
        return scores

    def exact(self, query: int, places: NDArray[np.intp]) -> NDArray[np.float64]:
        vector = self._queries[query].astype(np.float64)
        parts = (places[start : start + ROWS] for start in range(0, len(places), ROWS))
        return np.concatenate([self._block[part].astype(np.float64) @ vector for part in parts])


class _Walk:
    """The documents in blocks; see ``retrieval.indexes.walk.Walk``."""

    def __init__(self, rows: Rows, queries: DenseVectors) -> None:
        self._rows = rows
        self._queries = queries

    def parts(self) -> Iterator[tuple[int, _Part]]:
        for start, block in self._rows.blocks(block_rows(self._rows.shape[1])):
            yield start, _Part(self._queries, block)

    def pick(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, _Part]]:
        for start in range(0, len(rows), ROWS):
            picked = rows[start : start + ROWS]
            yield len(picked), _Part(self._queries, self._rows.take(picked))
