"""Exact search over one vector a token: MaxSim of the query with every document.

The store is one float32 matrix of all tokens, in memory or on the disk, and the places where documents begin: exact means exact, so
nothing is rounded or left out. A document without vectors (a model may drop every token of a text) keeps its place and its id and is
never found.

Shapes: Q queries, P documents, n documents of a block, T tokens of all documents, n_i tokens of text i, d vector width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.exact.arrays import block_rows, check_new_ids, first_bad_row, largest_norm
from quiver.retrieval.index.exact.ranking import check_k, float32_error
from quiver.retrieval.index.exact.walk import Ranked, nearest_by_scores, search_walk
from quiver.retrieval.index.queries import token_queries
from quiver.retrieval.models.maxsim import maxsim_packed
from quiver.retrieval.protocols import MatrixRows, PickedRows, Rows
from quiver.retrieval.records import Hits, TokenVectors

# Queries of one walk over the documents: their tokens and their candidates are held.
_QUERIES = 1024
# Where a smaller part of the documents may be found than this, they are gathered; otherwise all are scored and the others hidden.
_FEW = 0.25
# Tokens gathered at a time to score doubtful documents again in float64.
_RESCORED_TOKENS = 65_536


class ExactColBERTIndex:
    """Every document is compared with every query; built by ``from_vectors``, ``from_packed`` or ``from_rows``."""

    kind = "exact-colbert"

    def __init__(self, ids: Sequence[str], rows: Rows, offsets: NDArray[np.int64]) -> None:
        self._ids = tuple(ids)
        self._names = np.array(self._ids, dtype=object)
        self._rows = rows
        self._offsets = offsets

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
        k = check_k(k)
        given = token_queries(queries, self.dim)
        found = search_tokens(self._rows, self._offsets, given, k, largest_norm=self._largest_norm, ids=self._names)
        return Hits([self._names[rows].tolist() for rows, _ in found], [scores for _, scores in found])

    @cached_property
    def _largest_norm(self) -> float:
        return largest_norm(self._rows)


def search_tokens(
    rows: Rows,
    offsets: NDArray[np.int64],
    queries: Sequence[TokenVectors],
    k: int,
    *,
    largest_norm: float,
    ids: NDArray[Any],
    allowed: NDArray[np.bool_] | None = None,
    all_exact: bool = False,
) -> list[Ranked]:
    """The k best documents of each query by MaxSim, as of exact scores; ties go to the greater id.

    Args:
        rows: Tokens of all documents, (T, d), finite.
        offsets: Where each document begins, and T, (P + 1,).
        queries: Q arrays of (n_i >= 1, d) float32, finite.
        k: Hits a query, at least 1.
        largest_norm: Length of the longest row.
        ids: Document ids, or numbers in the order of the ids, (P,).
        allowed: The documents that may be found, (P,); None for all. One without a vector never is.
        all_exact: See `quiver.retrieval.index.exact.walk.search_walk`.

    Raises:
        ValueError: A query makes scores that float32 cannot hold.
    """
    filled = np.diff(offsets) > 0
    findable = int(np.count_nonzero(filled if allowed is None else filled & allowed))
    if allowed is not None and findable < _FEW * len(allowed):
        picked = np.flatnonzero(allowed & filled)
        lengths = offsets[picked + 1] - offsets[picked]
        tokens = PickedRows(rows, token_rows(offsets, picked))
        begins = np.append(0, np.cumsum(lengths))
        found = search_tokens(tokens, begins, queries, k, largest_norm=largest_norm, ids=ids[picked], all_exact=all_exact)
        return [(picked[places], scores) for places, scores in found]
    errors = np.array([_error(query, largest_norm) for query in queries])
    ranked: list[Ranked] = []
    for start in range(0, len(queries), _QUERIES):
        group = slice(start, start + _QUERIES)
        ranked += search_walk(
            _Walk(rows, offsets, queries[group], allowed), k, findable=findable, errors=errors[group], ids=ids, all_exact=all_exact
        )
    return ranked


def _error(query: TokenVectors, largest_norm: float) -> float:
    with np.errstate(over="ignore"):  # infinite is what it is then, and float32_error refuses that
        magnitude = float(np.linalg.norm(query, axis=1).sum()) * largest_norm
    return float32_error(query.shape[1] + len(query), magnitude)


class _Part:
    """Some documents and the queries, both in memory; see ``quiver.retrieval.index.exact.walk.Part``."""

    def __init__(
        self, queries: Sequence[TokenVectors], tokens: TokenVectors, offsets: NDArray[np.int64], hidden: NDArray[np.bool_] | None
    ) -> None:
        self._queries = queries
        self._tokens = tokens
        self._offsets = offsets
        self._hidden = hidden  # (n,) which documents cannot be found

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        return nearest_by_scores(self, len(self._queries), len(self._offsets) - 1, k)

    def scores(self, queries: Sequence[int]) -> NDArray[np.float32]:
        scores = maxsim_packed([self._queries[query] for query in queries], self._tokens, self._offsets)  # (Q', n)
        if self._hidden is not None:
            scores[:, self._hidden] = -np.inf
        return scores

    def exact(self, query: int, places: NDArray[np.intp]) -> NDArray[np.float64]:
        return exact_maxsim(MatrixRows(self._tokens), self._offsets, self._queries[query], places)


def exact_maxsim(rows: Rows, offsets: NDArray[np.int64], query: TokenVectors, places: NDArray[np.intp]) -> NDArray[np.float64]:
    """MaxSim of a query with some documents in float64.

    Args:
        rows: Tokens of all documents, (T, d).
        offsets: Where each document begins, and T, (P + 1,).
        query: (n_i, d).
        places: Numbers of documents that have a token.

    Returns:
        (len(places),).
    """
    vectors = query.astype(np.float64)
    scores = np.empty(len(places), dtype=np.float64)
    for first, last in token_pieces(offsets, places):
        piece = places[first:last]
        tokens = rows.take(token_rows(offsets, piece))
        lengths = offsets[piece + 1] - offsets[piece]
        similarities = vectors @ tokens.astype(np.float64).T  # (n_i, tokens)
        scores[first:last] = np.maximum.reduceat(similarities, np.cumsum(lengths) - lengths, axis=1).sum(axis=0)
    return scores


class _Walk:
    """The documents in blocks that end where a document ends; see ``quiver.retrieval.index.exact.walk.Walk``."""

    def __init__(self, rows: Rows, offsets: NDArray[np.int64], queries: Sequence[TokenVectors], allowed: NDArray[np.bool_] | None) -> None:
        self._rows = rows
        self._offsets = offsets
        self._queries = queries
        self._allowed = allowed

    def parts(self) -> Iterator[tuple[int, _Part]]:
        for begin, end in document_blocks(self._offsets, block_rows(self._rows.shape[1])):
            first, last = int(self._offsets[begin]), int(self._offsets[end])
            hidden = None if self._allowed is None else ~self._allowed[begin:end]
            yield begin, _Part(self._queries, self._rows.span(first, last), self._offsets[begin : end + 1] - first, hidden)

    def pick(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, _Part]]:
        for first, last in token_pieces(self._offsets, rows):
            picked = rows[first:last]
            offsets = np.append(0, np.cumsum(self._offsets[picked + 1] - self._offsets[picked]))
            yield len(picked), _Part(self._queries, self._rows.take(token_rows(self._offsets, picked)), offsets, None)


def document_blocks(offsets: NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    """Runs of documents with at most ``size`` tokens together, one document at least: the first of each and the one behind its last.

    Example:
        >>> list(document_blocks(np.array([0, 2, 2, 5, 6]), 3))
        [(0, 2), (2, 3), (3, 4)]
    """
    begin = 0
    while begin < len(offsets) - 1:
        end = max(begin + 1, int(np.searchsorted(offsets, offsets[begin] + size, side="right")) - 1)
        yield begin, end
        begin = end


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
    rows: NDArray[np.int64] = np.repeat(offsets[documents] - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
    return rows
