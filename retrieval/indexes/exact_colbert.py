"""Exact search over one vector a token: MaxSim of the query with every document.

The store is one float32 matrix of all tokens and the places where documents begin: exact means exact, so nothing is rounded or
left out. A document without vectors (a model may drop every token of a text) keeps its place and its id and is never found.

Shapes: Q queries, P documents, T tokens of all documents, n_i tokens of text i, d vector width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.indexes.arrays import check_new_ids, first_bad_row, largest_norm, read_array, read_ids, write_ids
from retrieval.indexes.ranking import best, check_k, float32_error
from retrieval.maxsim import maxsim_packed
from retrieval.records import Hits, TokenVectors

_TOKENS = "tokens.npy"
_OFFSETS = "offsets.npy"
# Queries scored together; their scores, Q x P float32, are the largest thing held: 8 queries over a million documents are 32 MB.
_QUERIES = 8
# Tokens gathered at a time to score doubtful documents again in float64.
_RESCORED_TOKENS = 65_536


class ExactColBERTIndex:
    """Every document is compared with every query; built by ``from_vectors`` or ``open``."""

    kind = "exact-colbert"

    def __init__(self, ids: Sequence[str], tokens: TokenVectors, offsets: NDArray[np.int64]) -> None:
        self._ids = tuple(ids)
        self._names = np.array(self._ids, dtype=object)
        self._tokens = tokens
        self._offsets = offsets
        self._findable = np.flatnonzero(np.diff(offsets))

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
        check_new_ids(ids, len(lengths))
        offsets = np.cumsum([0, *lengths], dtype=np.int64)
        if tokens.ndim != 2 or offsets[-1] != len(tokens) or min(lengths) < 0:
            raise ValueError(f"{offsets[-1]} vectors by the lengths of the documents, but the tokens have the shape {tokens.shape}")
        if not len(tokens):
            raise InputError("none of the documents has a vector; there is nothing to index")
        tokens = np.ascontiguousarray(tokens, dtype=np.float32)
        bad = first_bad_row(tokens)
        if bad is not None:
            owner = ids[int(np.searchsorted(offsets, bad, side="right")) - 1]
            raise InputError(f"a token vector of document '{owner}' is not finite; the model cannot be used on it")
        return cls(ids, tokens, offsets)

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
        return cls(ids, tokens, offsets)

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in the order they were added."""
        return self._ids

    @property
    def dim(self) -> int:
        """Vector width d."""
        return int(self._tokens.shape[1])

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
        k = min(k, len(self._findable))
        ids: list[Sequence[str]] = []
        scores: list[NDArray[np.float32]] = []
        for start in range(0, len(queries), _QUERIES):
            block = [np.ascontiguousarray(query, dtype=np.float32) for query in queries[start : start + _QUERIES]]
            for row, query in enumerate(block, start=start):
                if not np.isfinite(query).all():
                    raise ValueError(f"a vector of query {row} is not finite")
            found = maxsim_packed(block, self._tokens, self._offsets)
            for query, values in zip(block, found, strict=True):
                names, values = self._rank(query, values[self._findable], k)
                ids.append(names)
                scores.append(values)
        return Hits(ids, scores)

    def save(self, folder: Path) -> dict[str, str]:
        """Write the ids, the vectors and the offsets into an existing folder; file name -> what it holds."""
        write_ids(folder, self._ids)
        np.save(folder / _TOKENS, self._tokens, allow_pickle=False)
        np.save(folder / _OFFSETS, self._offsets, allow_pickle=False)
        return {
            "ids.json": "document ids in the order of the vectors",
            _TOKENS: "token vectors of all documents, (T, d) float32",
            _OFFSETS: "first token of each document, and T, (P + 1,) int64",
        }

    @cached_property
    def _largest_norm(self) -> float:
        return largest_norm(self._tokens)

    def _rank(self, query: TokenVectors, scores: NDArray[np.float32], k: int) -> tuple[Sequence[str], NDArray[np.float32]]:
        magnitude = float(np.linalg.norm(query, axis=1).sum()) * self._largest_norm
        error = float32_error(self.dim + len(query), magnitude)

        def rescore(doubtful: NDArray[np.intp]) -> NDArray[np.float64]:
            return self._score_in_float64(query.astype(np.float64), doubtful)

        return best(self._findable, scores, k, ids=self._names, error=error, rescore=rescore)

    def _score_in_float64(self, query: NDArray[np.float64], rows: NDArray[np.intp]) -> NDArray[np.float64]:
        lengths = self._offsets[rows + 1] - self._offsets[rows]
        scores = np.empty(len(rows), dtype=np.float64)
        ends = np.cumsum(lengths)
        begin = 0
        while begin < len(rows):
            before = ends[begin] - lengths[begin]
            end = max(begin + 1, int(np.searchsorted(ends, before + _RESCORED_TOKENS, side="right")))
            tokens = np.concatenate([self._tokens[self._offsets[row] : self._offsets[row + 1]] for row in rows[begin:end]])
            similarities = query @ tokens.astype(np.float64).T  # (n_i, tokens)
            heads = ends[begin:end] - lengths[begin:end] - before
            scores[begin:end] = np.maximum.reduceat(similarities, heads, axis=1).sum(axis=0)
            begin = end
        return scores
