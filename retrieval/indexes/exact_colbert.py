"""Exact search over one vector a token: MaxSim of the query with every document.

The store is one float32 matrix of all tokens, in memory or on the disk, and the places where documents begin: exact means exact, so
nothing is rounded or left out. A document without vectors (a model may drop every token of a text) keeps its place and its id and is
never found.

Shapes: Q queries, P documents, n documents of a block, T tokens of all documents, n_i tokens of text i, d vector width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.indexes.arrays import block_rows, check_new_ids, first_bad_row, largest_norm, read_array, read_ids, write_ids, write_rows
from retrieval.indexes.ranking import check_k, float32_error
from retrieval.indexes.walk import search_walk
from retrieval.maxsim import maxsim_packed
from retrieval.protocols import Rows
from retrieval.records import Hits, TokenVectors
from retrieval.rows import MatrixRows

_TOKENS = "tokens.npy"
_OFFSETS = "offsets.npy"
# Queries of one walk over the documents: their tokens and their candidates are held.
_QUERIES = 1024
# Scores of a block that are held at a time, queries x documents: 32 MiB.
_SCORES = 8 << 20
# Tokens gathered at a time to score doubtful documents again in float64.
_RESCORED_TOKENS = 65_536


class ExactColBERTIndex:
    """Every document is compared with every query; built by ``from_vectors``, ``from_packed``, ``from_rows`` or ``open``."""

    kind = "exact-colbert"

    def __init__(self, ids: Sequence[str], rows: Rows, offsets: NDArray[np.int64]) -> None:
        self._ids = tuple(ids)
        self._names = np.array(self._ids, dtype=object)
        self._rows = rows
        self._offsets = offsets
        self._findable = int(np.count_nonzero(np.diff(offsets)))

    @classmethod
    def from_vectors(cls, ids: Sequence[str], vectors: Sequence[TokenVectors]) -> ExactColBERTIndex:
        """Index token vectors that are in memory.

        Args:
            ids: P document ids.
            vectors: P arrays of (n_i, d), n_i >= 0; copied into one float32 matrix.

        Raises:
            InputError: No documents, none with a vector, an id twice, or a vector with a NaN or an infinity (names the document).
            ValueError: Widths differ, or not as many arrays as ids.
        """
        check_new_ids(ids, len(vectors))
        dim = vectors[0].shape[-1]
        for key, matrix in zip(ids, vectors, strict=True):
            if matrix.ndim != 2 or matrix.shape[1] != dim:
                raise ValueError(f"the vectors of document '{key}' must have the shape (n, {dim}), got {matrix.shape}")
        return cls.from_packed(ids, np.concatenate(vectors, dtype=np.float32), [len(matrix) for matrix in vectors])

    @classmethod
    def from_packed(cls, ids: Sequence[str], tokens: TokenVectors, lengths: Sequence[int]) -> ExactColBERTIndex:
        """Index token vectors that are one matrix already.

        Args:
            ids: P document ids.
            tokens: (T, d), document after document; kept as float32, not copied if they are so already.
            lengths: P numbers n_i of vectors, zero allowed; T in all.

        Raises:
            InputError: No documents, none with a vector, an id twice, or a vector with a NaN or an infinity (names the document).
            ValueError: Not a matrix, or the lengths do not fit the ids or the matrix.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens must have the shape (T, d), got {tokens.shape}")
        return cls.from_rows(ids, MatrixRows(np.ascontiguousarray(tokens, dtype=np.float32)), lengths)

    @classmethod
    def from_rows(cls, ids: Sequence[str], rows: Rows, lengths: Sequence[int] | NDArray[np.int64]) -> ExactColBERTIndex:
        """Index token vectors that may be larger than the memory; they stay where they are and are read in blocks.

        Args:
            ids: P document ids.
            rows: (T, d), document after document.
            lengths: P numbers n_i of vectors, zero allowed; T in all.

        Raises:
            InputError: No documents, none with a vector, an id twice, or a vector with a NaN or an infinity (names the document).
            ValueError: The lengths do not fit the ids or the rows.
        """
        check_new_ids(ids, len(lengths))
        offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
        if offsets[-1] != rows.shape[0] or np.min(lengths) < 0:
            raise ValueError(f"{offsets[-1]} vectors by the lengths of the documents, but the tokens have the shape {rows.shape}")
        if not rows.shape[0]:
            raise InputError("none of the documents has a vector; there is nothing to index")
        index = cls(ids, rows, offsets)
        if not np.isfinite(index._largest_norm):
            bad = first_bad_row(rows)
            if bad is not None:
                owner = ids[int(np.searchsorted(offsets, bad, side="right")) - 1]
                raise InputError(f"a token vector of document '{owner}' is not finite; the model cannot be used on it")
        return index

    @classmethod
    def open(cls, folder: Path) -> ExactColBERTIndex:
        """Open what ``save`` wrote; the vectors stay in the file.

        Raises:
            InputError: A file is missing, damaged, or does not fit the others.
        """
        ids = read_ids(folder)
        tokens = read_array(folder / _TOKENS, np.float32, 2)
        offsets = read_array(folder / _OFFSETS, np.int64, 1)
        fits = len(offsets) == len(ids) + 1 and offsets[0] == 0 and offsets[-1] == len(tokens) and bool((np.diff(offsets) >= 0).all())
        if not fits:
            raise InputError(f"{folder}: {_OFFSETS} does not fit {len(ids)} ids and {len(tokens)} tokens; build the index again")
        return cls(ids, MatrixRows(tokens), offsets)

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
        """Size of the vectors and of the places where documents begin."""
        return 4 * self._rows.shape[0] * self.dim + self._offsets.nbytes

    @property
    def parameters(self) -> Mapping[str, str]:
        """What a report says beside the kind."""
        return {"precision": "float32"}

    def __len__(self) -> int:
        return len(self._ids)

    def search(self, queries: Sequence[TokenVectors], k: int) -> Hits:
        """The k best documents of each query by MaxSim; ties go to the greater document id.

        Args:
            queries: Q arrays of (n_i, d), n_i >= 1.
            k: Hits a query; capped at the number of documents that have a vector.

        Raises:
            ValueError: k < 1, or a query that is empty, not finite, of another width than the index, or too long for float32 scores.
        """
        check_k(k)
        given = [np.ascontiguousarray(query, dtype=np.float32) for query in queries]
        for row, query in enumerate(given):
            if query.ndim != 2 or not len(query) or query.shape[1] != self.dim:
                raise ValueError(f"query {row} must have the shape (>= 1, {self.dim}), got {query.shape}")
            if not np.isfinite(query).all():
                raise ValueError(f"a vector of query {row} is not finite")
        ids: list[Sequence[str]] = []
        scores: list[NDArray[np.float32]] = []
        for start in range(0, len(given), _QUERIES):
            group = given[start : start + _QUERIES]
            errors, walk = np.array([self._error(query) for query in group]), _Walk(self._rows, self._offsets, group)
            for names, values in search_walk(walk, min(k, self._findable), findable=self._findable, errors=errors, ids=self._names):
                ids.append(names)
                scores.append(values)
        return Hits(ids, scores)

    def save(self, folder: Path) -> dict[str, str]:
        """Write the ids, the vectors and the offsets into an existing folder; file name -> what it holds."""
        write_ids(folder, self._ids)
        write_rows(folder / _TOKENS, self._rows)
        np.save(folder / _OFFSETS, self._offsets, allow_pickle=False)
        return {
            "ids.json": "document ids in the order of the vectors",
            _TOKENS: "token vectors of all documents, (T, d) float32",
            _OFFSETS: "first token of each document, and T, (P + 1,) int64",
        }

    @cached_property
    def _largest_norm(self) -> float:
        return largest_norm(self._rows)

    def _error(self, query: TokenVectors) -> float:
        with np.errstate(over="ignore"):  # infinite is what it is then, and float32_error refuses that
            magnitude = float(np.linalg.norm(query, axis=1).sum()) * self._largest_norm
        return float32_error(self.dim + len(query), magnitude)


class _Part:
    """Some documents and the queries, both in memory; see ``retrieval.indexes.walk.Part``."""

    def __init__(self, queries: Sequence[TokenVectors], tokens: TokenVectors, offsets: NDArray[np.int64]) -> None:
        self._queries = queries
        self._tokens = tokens
        self._offsets = offsets

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        count = len(self._offsets) - 1
        group = max(1, _SCORES // count)
        found = [self._nearest(self._queries[start : start + group], min(k, count)) for start in range(0, len(self._queries), group)]
        return np.concatenate([scores for scores, _ in found]), np.concatenate([places for _, places in found])

    def _nearest(self, queries: Sequence[TokenVectors], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        scores = maxsim_packed(queries, self._tokens, self._offsets)  # (Q', n)
        places = np.argpartition(scores, -k, axis=1)[:, -k:]
        return np.take_along_axis(scores, places, axis=1), places

    def scores(self, queries: Sequence[int]) -> NDArray[np.float32]:
        return maxsim_packed([self._queries[query] for query in queries], self._tokens, self._offsets)

    def exact(self, query: int, places: NDArray[np.intp]) -> NDArray[np.float64]:
        vectors = self._queries[query].astype(np.float64)
        scores = np.empty(len(places), dtype=np.float64)
        for first, last in token_pieces(self._offsets, places):
            piece = places[first:last]
            tokens = self._tokens[token_rows(self._offsets, piece)]
            lengths = self._offsets[piece + 1] - self._offsets[piece]
            similarities = vectors @ tokens.astype(np.float64).T  # (n_i, tokens)
            scores[first:last] = np.maximum.reduceat(similarities, np.cumsum(lengths) - lengths, axis=1).sum(axis=0)
        return scores


class _Walk:
    """The documents in blocks that end where a document ends; see ``retrieval.indexes.walk.Walk``."""

    def __init__(self, rows: Rows, offsets: NDArray[np.int64], queries: Sequence[TokenVectors]) -> None:
        self._rows = rows
        self._offsets = offsets
        self._queries = queries

    def parts(self) -> Iterator[tuple[int, _Part]]:
        size, begin = block_rows(self._rows.shape[1]), 0
        while begin < len(self._offsets) - 1:
            end = max(begin + 1, int(np.searchsorted(self._offsets, self._offsets[begin] + size, side="right")) - 1)
            first, last = int(self._offsets[begin]), int(self._offsets[end])
            yield begin, _Part(self._queries, self._rows.span(first, last), self._offsets[begin : end + 1] - first)
            begin = end

    def pick(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, _Part]]:
        for first, last in token_pieces(self._offsets, rows):
            picked = rows[first:last]
            offsets = np.append(0, np.cumsum(self._offsets[picked + 1] - self._offsets[picked]))
            yield len(picked), _Part(self._queries, self._rows.take(token_rows(self._offsets, picked)), offsets)


def token_pieces(offsets: NDArray[np.int64], documents: NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """Runs of documents with at most ``_RESCORED_TOKENS`` tokens together, one document at least."""
    ends = np.cumsum(offsets[documents + 1] - offsets[documents])
    begin = held = 0
    while begin < len(documents):
        end = max(begin + 1, int(np.searchsorted(ends, held + _RESCORED_TOKENS, side="right")))
        yield begin, end
        begin, held = end, int(ends[end - 1])


def token_rows(offsets: NDArray[np.int64], documents: NDArray[np.intp]) -> NDArray[np.int64]:
    """Rows of all tokens of some documents, document after document.

    Example:
        >>> token_rows(np.array([0, 2, 2, 5]), np.array([2, 0]))
        array([2, 3, 4, 0, 1])
    """
    lengths = offsets[documents + 1] - offsets[documents]
    ends = np.cumsum(lengths)
    rows: NDArray[np.int64] = np.repeat(offsets[documents] - (ends - lengths), lengths) + np.arange(ends[-1])
    return rows
