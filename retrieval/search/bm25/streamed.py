"""BM25 over documents that are gone through, not kept: for one set of queries, a corpus of any size in the memory of one block.

The documents are read twice where they do not fit into one block, once for the statistics and once for the scores. Only the words that
the queries ask for are counted.

Shapes: Q queries, D documents of a block, k hits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.ranking import check_k
from quiver.retrieval.records import Hits
from quiver.retrieval.search.bm25.scoring import Best, Postings, count_words, in_blocks, score_postings, split_words, total_statistics


@dataclass(frozen=True)
class _Block:
    """Some documents: their ids, (D,), and where the queries' words stand in them."""

    ids: NDArray[np.object_]
    postings: Postings

    def named(self, rows: NDArray[np.intp]) -> list[str]:
        """The ids of some documents by number."""
        return list(self.ids[rows])


def rank_streamed(read: Callable[[], Iterable[tuple[str, str]]], queries: Sequence[str], k: int) -> Hits:
    """The best documents of each query.

    Args:
        read: Starts a reading: id and text of each document.
        queries: Q texts.
        k: Documents a query, at most. Only documents that share a word with the query are found: the top k of bm25s is padded with
            documents of score 0, whose order would be that of the file.

    Raises:
        InputError: bm25s is not installed.
        ValueError: k < 1.
    """
    k = check_k(k)
    words = split_words(queries)
    reading = _blocks(read(), words.vocabulary)
    first = list(islice(reading, 2))
    statistics = total_statistics(((block.postings, None) for block in chain(first, reading)), len(words.vocabulary))
    best = [Best(k) for _ in queries]
    for block in first if len(first) < 2 else _blocks(read(), words.vocabulary):
        scored = score_postings(block.postings, statistics)
        for found, query in zip(best, words.texts, strict=True):
            found.add(scored.totals(query), block.named)
    return Hits([found.ids for found in best], [found.scores for found in best])


def _blocks(documents: Iterable[tuple[str, str]], vocabulary: Mapping[str, int]) -> Iterator[_Block]:
    for block in in_blocks(documents, lambda document: document[1]):
        ids = np.array([key for key, _ in block], np.object_)
        words = split_words(text for _, text in block)
        block.clear()  # the texts are gone before the postings are used
        yield _Block(ids, count_words(words, vocabulary))
