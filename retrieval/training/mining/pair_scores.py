"""Scores of chosen pairs of a query and a document from vectors that a store holds: no search, no matrix of all with all.

Shapes: B pairs, T rows of all texts, d vector width.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import StoredVectors
from quiver.retrieval.index.exact import token_rows
from quiver.retrieval.models.maxsim import maxsim_packed
from quiver.retrieval.protocols import Rows
from quiver.retrieval.records import DenseVectors, TokenVectors

# Pairs of vectors that are multiplied at a time: two blocks of 16 MB for vectors of width 1,024 in float64.
_PAIRS = 2048


class PairScores:
    """The similarity of query and document by their numbers; both sides come from one model.

    Args:
        queries: Their stored vectors.
        documents: Theirs.
    """

    def __init__(self, queries: StoredVectors, documents: StoredVectors) -> None:
        self._queries, self._documents = queries.rows, documents.rows
        self._query_ends = _ends(queries)
        self._document_ends = _ends(documents)

    def __call__(self, queries: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores of B pairs, (B,), as an exact index gives them.

        Args:
            queries: (B,) numbers of queries; those of one query should be neighbours.
            documents: (B,) numbers of documents.

        Raises:
            InputError: A text has no vector: its model drops all its tokens.
        """
        if not len(queries):
            return np.empty(0, np.float32)
        if self._query_ends is None or self._document_ends is None:
            return self._dense(queries, documents)
        return self._maxsim(queries, documents, self._query_ends, self._document_ends)

    def _dense(self, queries: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.float32]:
        scores = np.empty(len(queries), np.float32)
        for start in range(0, len(queries), _PAIRS):
            piece = slice(start, start + _PAIRS)
            left, right = _take(self._queries, queries[piece]), _take(self._documents, documents[piece])
            scores[piece] = np.einsum("bd,bd->b", left, right, dtype=np.float64)
        return scores

    def _maxsim(
        self, queries: NDArray[np.int64], documents: NDArray[np.int64], query_ends: NDArray[np.int64], document_ends: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        scores = np.empty(len(queries), np.float32)
        heads = np.flatnonzero(np.append(True, queries[1:] != queries[:-1]))
        for start, stop in zip(heads.tolist(), [*heads[1:].tolist(), len(queries)], strict=True):
            query = int(queries[start])
            vectors = self._queries.span(int(query_ends[query]), int(query_ends[query + 1]))
            tokens, offsets = self._tokens(documents[start:stop], document_ends)
            if not len(vectors) or (np.diff(offsets) == 0).any():
                raise InputError("a text has not one vector: the model drops all its tokens, and so it has no score; leave the text out")
            scores[start:stop] = maxsim_packed([vectors], tokens, offsets)[0]
        return scores

    def _tokens(self, documents: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[TokenVectors, NDArray[np.int64]]:
        lengths = ends[documents + 1] - ends[documents]
        return _take(self._documents, token_rows(ends, documents)), np.append(0, np.cumsum(lengths))


def _ends(stored: StoredVectors) -> NDArray[np.int64] | None:
    """Where the rows of each text begin, and T; None where every text has one."""
    return None if stored.lengths is None else np.append(0, np.cumsum(stored.lengths, dtype=np.int64))


def _take(rows: Rows, numbers: NDArray[np.int64]) -> DenseVectors:
    """Rows in the order given, each read once: a document may be in many pairs."""
    distinct, places = np.unique(numbers, return_inverse=True)
    taken: DenseVectors = rows.take(distinct)[places]
    return taken
