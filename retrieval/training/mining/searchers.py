"""Systems that hard negatives are mined with: an index of vectors, or BM25; both rank the corpus for a query and score given pairs.

Queries and documents are numbers here, places in their tables.

Shapes: Q queries, P documents, n documents found for a query, B pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import KeyTable, StoredVectors, text_keys
from quiver.retrieval.index.exact import token_rows
from quiver.retrieval.index.index import Index
from quiver.retrieval.index.ranking import in_order
from quiver.retrieval.search.bm25 import ScoredPostings, count_words, in_blocks, score_postings, split_words, total_statistics
from quiver.retrieval.training.mining.margins import Ranked
from quiver.retrieval.training.mining.pair_scores import PairScores


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

    def __init__(self, index: Index, queries: StoredVectors, scored: NDArray[np.int64], documents: StoredVectors) -> None:
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
    """BM25 over words; where the queries' words stand is in memory, 8 bytes for each of them that a document has.

    Args:
        queries: Q texts.
        documents: P texts, gone through once, a block at a time.
        ids: P ids; of documents with equal scores the one with the greater id comes first.
        searchable: Documents that are searched, from the first; those after them are only scored.

    Raises:
        InputError: bm25s is not installed, or no document has a word.
    """

    def __init__(self, queries: Iterable[str], documents: Iterable[str], ids: Iterable[str], *, searchable: int) -> None:
        words = split_words(queries)
        self._queries = words.texts
        counted = [count_words(split_words(block), words.vocabulary) for block in in_blocks(documents, str)]
        statistics = total_statistics(((postings, None) for postings in counted), len(words.vocabulary))
        if not statistics.length:
            raise InputError("BM25: no document holds a word of two letters or more; mine with a model")
        counted.reverse()  # used up from the first one on: the counts are gone when the scores are there
        self._blocks: list[ScoredPostings] = []
        while counted:
            self._blocks.append(score_postings(counted.pop(), statistics))
        self._ids = np.array(list(ids), object)
        self._searchable = searchable

    def search(self, queries: NDArray[np.int64], k: int, *, also: Sequence[NDArray[np.int64]]) -> list[Found]:
        """See `Searcher`; documents that share no word with the query are not found."""
        found = []
        for query, documents in zip(queries.tolist(), also, strict=True):
            # Of the whole corpus: the best and those that are asked about come from it.
            scores = np.concatenate([block.totals(self._queries[query]) for block in self._blocks])
            found.append(Found(self._best(scores[: self._searchable], k), scores[documents]))
        return found

    def _best(self, scores: NDArray[np.float32], k: int) -> Ranked:
        rows = np.flatnonzero(scores)
        if len(rows) > k:
            cut = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
            rows = rows[scores[rows] >= cut]
        return Ranked(*in_order(rows, scores[rows], k, ids=self._ids)) if len(rows) else Ranked(rows, scores[rows])
