"""Systems that hard negatives are mined with: an index of vectors, or BM25; both rank the corpus for a query and score given pairs.

Queries and documents are numbers here, places in their tables.

Shapes: Q queries, P documents, n documents found for a query, B pairs.
Source of BM25: Robertson and Zaragoza 2009, doi 10.1561/1500000019; k1 and b are Anserini's for BEIR, arXiv:2306.07471.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.indexes.exact_colbert import token_rows
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


class Found(NamedTuple):
    """What a searcher gives for one query, on one scale.

    Attributes:
        ranked: The k best documents, fewer where fewer are found.
        scores: Of the documents that were asked about, in their order.
    """

    ranked: Ranked
    scores: NDArray[np.float32]


class Searcher(Protocol):
    """Ranks the corpus, and scores given documents."""

    def search(self, queries: NDArray[np.int64], k: int, *, also: Sequence[NDArray[np.int64]]) -> list[Found]:
        """The k best documents of some queries, and the scores of others.

        Args:
            queries: (B,) numbers, ascending.
            k: Documents wanted for each.
            also: B times the documents that are asked about.
        """


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

    def search(self, queries: NDArray[np.int64], k: int, *, also: Sequence[NDArray[np.int64]]) -> list[Found]:
        """See `Searcher`; what is asked about must be among the documents with stored vectors."""
        hits = self._index.search(self._vectors(queries), k)
        counts = [len(documents) for documents in also]
        scores = self._pair_scores(np.repeat(queries, counts), np.searchsorted(self._scored, np.concatenate(also)))
        return [
            Found(Ranked(self._numbers.find(text_keys(ids)), best), asked)
            for ids, best, asked in zip(hits.ids, hits.scores, np.split(scores, np.cumsum(counts)[:-1]), strict=True)
        ]

    def _vectors(self, queries: NDArray[np.int64]) -> Any:
        """Vectors of some queries as the index takes them: a matrix, or one a query."""
        if self._ends is None:
            return self._queries.rows.take(queries)
        tokens = self._queries.rows.take(token_rows(self._ends, queries))
        return np.split(tokens, np.cumsum(self._ends[queries + 1] - self._ends[queries])[:-1])


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

    def __init__(self, queries: Iterable[str], documents: Iterable[str], ids: Iterable[str], *, searchable: int) -> None:
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
        self._ids = np.array(list(ids), object)
        self._searchable = searchable

    def search(self, queries: NDArray[np.int64], k: int, *, also: Sequence[NDArray[np.int64]]) -> list[Found]:
        """See `Searcher`; documents that share no word with the query are not found."""
        found = []
        for query, documents in zip(queries.tolist(), also, strict=True):
            scores = self._scores(query)  # of the whole corpus: the best and those that are asked about come from it
            found.append(Found(self._best(scores[: self._searchable], k), scores[documents]))
        return found

    def _best(self, scores: NDArray[np.float32], k: int) -> Ranked:
        rows = np.flatnonzero(scores)
        if len(rows) > k:
            cut = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
            rows = rows[scores[rows] >= cut]
        return Ranked(*in_order(rows, scores[rows], k, ids=self._ids)) if len(rows) else Ranked(rows, scores[rows])

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
