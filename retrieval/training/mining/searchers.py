"""Rank the corpus for queries and score given pairs, by vectors or by BM25. Queries and documents are numbers of texts.

Shapes: Q queries, P documents, n documents found for a query, B pairs, T rows of all texts, d vector width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance
from quiver.retrieval.data.embedding_store import KeyTable, StoredVectors, text_keys
from quiver.retrieval.index.engines import in_order
from quiver.retrieval.index.index import IndexReader
from quiver.retrieval.index.ranking import token_rows
from quiver.retrieval.index.words import ScoredPostings, count_words, in_blocks, score_postings, total_statistics
from quiver.retrieval.models.bm25 import split_words
from quiver.retrieval.models.encoding import maxsim_packed
from quiver.retrieval.records import DenseVectors, Rows

_PAIRS = 2048  # pairs of vectors multiplied at a time: two blocks of 16 MB for vectors of width 1,024 in float64


class PairScores:
    """Similarities of pairs of queries and documents from stored vectors of one model."""

    def __init__(self, queries: StoredVectors, documents: StoredVectors) -> None:
        self._queries, self._documents = queries.rows, documents.rows
        self._query_ends = _row_ends(queries)
        self._document_ends = _row_ends(documents)

    def __call__(self, queries: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.float32]:
        """Score B pairs, (B,), as an exact index does."""
        scores = np.empty(len(queries), np.float32)
        if not len(queries):
            return scores
        if self._query_ends is None or self._document_ends is None:
            for start in range(0, len(queries), _PAIRS):
                piece = slice(start, start + _PAIRS)
                left, right = _take_rows(self._queries, queries[piece]), _take_rows(self._documents, documents[piece])
                scores[piece] = np.einsum("bd,bd->b", left, right, dtype=np.float64)
            return scores
        heads = np.flatnonzero(np.append(True, queries[1:] != queries[:-1]))
        for start, stop in zip(heads.tolist(), [*heads[1:].tolist(), len(queries)], strict=True):
            query, pieces = int(queries[start]), documents[start:stop]
            vectors = self._queries.span(int(self._query_ends[query]), int(self._query_ends[query + 1]))
            lengths = self._document_ends[pieces + 1] - self._document_ends[pieces]
            if not len(vectors) or (lengths == 0).any():
                raise InputError("a text has no score, since the model drops all its tokens; remove the text")
            tokens = _take_rows(self._documents, token_rows(self._document_ends, pieces))
            scores[start:stop] = maxsim_packed([vectors], tokens, np.append(0, np.cumsum(lengths)))[0]
        return scores


def _row_ends(stored: StoredVectors) -> NDArray[np.int64] | None:
    """First row of each text, and T; None if every text has one row."""
    return None if stored.lengths is None else np.append(0, np.cumsum(stored.lengths, dtype=np.int64))


def _take_rows(rows: Rows, numbers: NDArray[np.int64]) -> DenseVectors:
    """Rows in the order given, each read once, since a document may be in many pairs."""
    distinct, positions = np.unique(numbers, return_inverse=True)
    taken: DenseVectors = rows.take(distinct)[positions]
    return taken


class Ranked(NamedTuple):
    """Documents of one query, best first."""

    rows: NDArray[np.int64]
    scores: NDArray[np.float32]

    def at(self, positions: NDArray[np.intp]) -> Ranked:
        """Select documents by position."""
        return Ranked(self.rows[positions], self.scores[positions])


class SearcherResult(NamedTuple):
    """Result of a searcher for one query."""

    ranked: Ranked
    scores: NDArray[np.float32]


class Searcher(Protocol):
    """Ranks the corpus and scores given documents."""

    def search(self, queries: NDArray[np.int64], k: int, *, also: Sequence[NDArray[np.int64]]) -> list[SearcherResult]:
        """Return the k best documents of queries, and the scores of given documents."""


class VectorSearcher:
    """Searcher over an index, with stored vectors of the queries and of the documents to score."""

    def __init__(self, index: IndexReader, queries: StoredVectors, scored: NDArray[np.int64], documents: StoredVectors) -> None:
        self._index = index
        self._queries = queries
        self._scored = scored
        self._pair_scores = PairScores(queries, documents)
        self._numbers = KeyTable()
        self._numbers.add(text_keys(index.ids), np.arange(len(index)))
        self._ends = _row_ends(queries)

    def search(self, queries: NDArray[np.int64], k: int, *, also: Sequence[NDArray[np.int64]]) -> list[SearcherResult]:
        """See `Searcher`; the documents to score must have stored vectors."""
        vectors: Any  # as the index takes them: one matrix, or one per query
        if self._ends is None:
            vectors = self._queries.rows.take(queries)
        else:
            tokens = self._queries.rows.take(token_rows(self._ends, queries))
            vectors = np.split(tokens, np.cumsum(self._ends[queries + 1] - self._ends[queries])[:-1])
        hits = self._index.search(vectors, k)
        counts = [len(documents) for documents in also]
        scores = self._pair_scores(np.repeat(queries, counts), np.searchsorted(self._scored, np.concatenate(also)))
        return [
            SearcherResult(Ranked(self._numbers.find(text_keys(ids)), best), requested)
            for ids, best, requested in zip(hits.ids, hits.scores, np.split(scores, np.cumsum(counts)[:-1]), strict=True)
        ]


class BM25Searcher:
    """BM25 searcher. The postings of the queries' words are in memory, 8 bytes each."""

    def __init__(
        self,
        queries: Iterable[str],
        documents: Iterable[str],
        ids: Iterable[str],
        *,
        searchable: int,
        advance: Advance = lambda documents: None,
    ) -> None:
        words = split_words(queries)
        self._queries = words.texts
        counted = [count_words(split_words(block, advance), words.vocabulary) for block in in_blocks(documents, str)]
        statistics = total_statistics(((postings, None) for postings in counted), len(words.vocabulary))
        if not statistics.length:
            raise InputError("BM25: no document contains a word of two or more letters; mine with a model instead")
        counted.reverse()  # each block's counts are freed once its scores are computed
        self._blocks: list[ScoredPostings] = []
        while counted:
            self._blocks.append(score_postings(counted.pop(), statistics))
        self._ids = np.array(list(ids), object)
        self._searchable = searchable

    def search(self, queries: NDArray[np.int64], k: int, *, also: Sequence[NDArray[np.int64]]) -> list[SearcherResult]:
        """See `Searcher`; documents that share no word with the query are not found."""
        found = []
        for query, documents in zip(queries.tolist(), also, strict=True):
            # Scores of the whole corpus: both the best documents and the requested ones are taken from them.
            scores = np.concatenate([block.totals(self._queries[query]) for block in self._blocks])
            rows = np.flatnonzero(scores[: self._searchable])
            if len(rows) > k:
                cut = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
                rows = rows[scores[rows] >= cut]
            best = Ranked(rows, scores[rows])
            found.append(SearcherResult(Ranked(*in_order(*best, k, ids=self._ids)) if len(rows) else best, scores[documents]))
        return found
