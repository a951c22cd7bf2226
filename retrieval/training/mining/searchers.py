"""Systems that hard negatives are mined with: an index of vectors, or BM25; both rank the corpus for a query and score given pairs.

Queries and documents are numbers here, places in their tables.

Shapes: Q queries, P documents, n documents found for a query, B pairs.
Source of BM25: Robertson and Zaragoza 2009, doi 10.1561/1500000019; k1 and b are Anserini's for BEIR, arXiv:2306.07471.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.indexes.ranking import in_order
from retrieval.protocols import VectorIndex
from retrieval.text_keys import KeyTable, text_keys
from retrieval.training.mining.margins import Ranked
from retrieval.training.mining.pair_scores import PairScores
from retrieval.vectors import StoredVectors

BM25_NAME = "bm25"
BM25_PARAMETERS: Mapping[str, str | float | None] = {
    "variant": "lucene",
    "k1": 0.9,
    "b": 0.4,
    "stopwords": "english",
    "stemmer": None,
}
"""Everything that decides a score: those of the BM25 that Quiver evaluates beside its models."""


class Searcher(Protocol):
    """Ranks and scores on one scale."""

    def search(self, first: int, last: int, k: int) -> list[Ranked]:
        """The k best documents of the queries ``first`` to ``last - 1``, fewer where fewer are found."""

    def score(self, queries: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores of B pairs, (B,); pairs of one query are neighbours."""


class VectorSearcher:
    """An index and the stored vectors of all queries and of the documents that are to be scored.

    Args:
        index: Its ids are numbers 0 to P - 1 of documents in this order.
        queries: Vectors of Q queries.
        scored: Numbers of the documents with stored vectors, ascending.
        documents: Their vectors.
    """

    def __init__(self, index: VectorIndex[Any], queries: StoredVectors, scored: NDArray[np.int64], documents: StoredVectors) -> None:
        self._index = index
        self._queries = queries
        self._scored = scored
        self._pair_scores = PairScores(queries, documents)
        self._numbers = KeyTable()
        self._numbers.add(text_keys(index.ids), np.arange(len(index)))
        lengths = queries.lengths
        self._ends = None if lengths is None else np.append(0, np.cumsum(lengths, dtype=np.int64))

    def search(self, first: int, last: int, k: int) -> list[Ranked]:
        """See `Searcher`."""
        hits = self._index.search(self._vectors(first, last), k)
        return [Ranked(self._numbers.find(text_keys(ids)), scores) for ids, scores in zip(hits.ids, hits.scores, strict=True)]

    def _vectors(self, first: int, last: int) -> Any:
        """Vectors of some queries as the index takes them: a matrix, or one a query."""
        if self._ends is None:
            return self._queries.rows.span(first, last)
        ends = self._ends[first : last + 1]
        tokens = self._queries.rows.span(int(ends[0]), int(ends[-1]))
        return np.split(tokens, ends[1:-1] - ends[0])

    def score(self, queries: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Searcher`; the documents must be among those with stored vectors."""
        return self._pair_scores(queries, np.searchsorted(self._scored, documents))


class BM25Searcher:
    """BM25 over words, by bm25s, with the whole index in memory.

    Each different word of a document takes 8 bytes, and about 45 while the index is built (measured on 300,000 documents of 50 words):
    9 million passages of 60 words need 4 GB, and 25 GB for a while.

    Args:
        queries: Q texts.
        documents: P texts, gone through once.
        ids: P ids; of documents with equal scores the one with the greater id comes first.
        searchable: Documents that are searched, from the first; those after them are only scored.

    Raises:
        InputError: bm25s is not installed, or no document has a word.
    """

    def __init__(self, queries: Iterable[str], documents: Iterable[str], ids: Sequence[str], *, searchable: int) -> None:
        bm25s = _bm25s()
        options = {"stopwords": BM25_PARAMETERS["stopwords"], "stemmer": BM25_PARAMETERS["stemmer"], "show_progress": False}
        words = bm25s.tokenize(documents, **options)
        if not words.vocab:
            raise InputError("BM25: no document holds a word of two letters or more; mine with a model")
        self._index = bm25s.BM25(k1=BM25_PARAMETERS["k1"], b=BM25_PARAMETERS["b"], method=BM25_PARAMETERS["variant"])
        self._index.index(words, show_progress=False)
        asked = bm25s.tokenize(queries, **options)
        known = np.fromiter((words.vocab.get(word, -1) for word in asked.vocab), np.int32, len(asked.vocab))
        self._queries = [found[found >= 0] for found in (known[numbers] for numbers in map(_numbers, asked.ids))]
        self._ids = np.array(ids, object)
        self._searchable = searchable

    def search(self, first: int, last: int, k: int) -> list[Ranked]:
        """See `Searcher`; documents that share no word with the query are not found."""
        return [self._best(query, k) for query in range(first, last)]

    def _best(self, query: int, k: int) -> Ranked:
        scores = self._scores(query)[: self._searchable]
        rows = np.flatnonzero(scores)
        if len(rows) > k:
            cut = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
            rows = rows[scores[rows] >= cut]
        return Ranked(*in_order(rows, scores[rows], k, ids=self._ids)) if len(rows) else Ranked(rows, scores[rows])

    def score(self, queries: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Searcher`."""
        scores = np.empty(len(queries), np.float32)
        for query in np.unique(queries).tolist():
            asked = queries == query
            scores[asked] = self._scores(query)[documents[asked]]
        return scores

    def _scores(self, query: int) -> NDArray[np.float32]:
        """(P,)."""
        scores: NDArray[np.float32] = self._index.get_scores_from_ids(self._queries[query])
        return scores


def _numbers(words: Sequence[int]) -> NDArray[np.intp]:
    return np.array(words, np.intp)  # of no words too an array of numbers, which a list is not


def _bm25s() -> Any:
    try:
        library = importlib.import_module("bm25s")
    except ModuleNotFoundError as error:
        raise InputError("BM25 needs bm25s: pip install 'quiver-retrieval[train]'") from error
    # Importing it sets its logger to DEBUG, and whoever has a handler at the root would read how an index is built.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return library
