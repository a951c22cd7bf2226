"""BM25: words of texts, postings and scores, and searching documents that are streamed rather than indexed.

Lucene's variant with k1 = 0.9 and b = 0.4, English stop words and no stemmer, for any language. Words and scores are those of bm25s. Its
index is not used: its scores include the document frequencies of the whole corpus, so adding one document would change all of them, and it
needs the corpus in memory. Here documents come in blocks: postings depend on one block's texts only, and document frequencies are summed
over the blocks at search time.

Shapes: Q queries, D documents, P postings (a word in a document) of one block, V words of a vocabulary, k hits.
Source: Robertson and Zaragoza 2009, doi 10.1561/1500000019; bm25s, arXiv:2407.03618; k1 and b are Anserini's for BEIR,
arXiv:2306.07471.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.engines import check_k, in_order
from quiver.retrieval.records import Hits

NAME = "bm25"
"""Name of BM25 in tables, files and options."""

K1 = 0.9
B = 0.4
STOP_WORDS = "english"
PARAMETERS: Mapping[str, str | float | None] = {
    "variant": "lucene",
    "k1": K1,
    "b": B,
    "stopwords": STOP_WORDS,
    "stemmer": None,
}
"""All parameters that affect scores, as written to results and records."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class BlockLimits:
    """Size of a block of documents: about 200 MB with its words by default, so that a pass over the queries costs little per block.

    Attributes:
        documents: Maximum number of documents.
        characters: Number of characters after which a block ends.
    """

    documents: int = 100_000
    characters: int = 1 << 24


class Words(NamedTuple):
    """The words of texts.

    Attributes:
        texts: Word numbers of each text, without stop words.
        vocabulary: Word -> number, from 0 in order of appearance.
    """

    texts: Sequence[Sequence[int]]
    vocabulary: Mapping[str, int]


@dataclass(frozen=True)
class Postings:
    """Occurrences of a vocabulary's words in the documents of a block.

    Attributes:
        lengths: Number of words of each document, including words that are not in the vocabulary, (D,) uint32.
        documents: Document numbers, ascending for each word, (P,) uint32.
        counts: Occurrences of the word in the document, (P,) uint32.
        starts: The postings of word v are ``starts[v]:starts[v + 1]``, (V + 1,).
    """

    lengths: NDArray[np.uint32]
    documents: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    starts: NDArray[np.int64]


@dataclass(frozen=True)
class Statistics:
    """Collection statistics.

    Attributes:
        documents: Number of documents.
        length: Number of words of all documents.
        frequencies: Document frequency of each word, (V,).
    """

    documents: int
    length: int
    frequencies: NDArray[np.int64]

    @property
    def mean_length(self) -> float:
        """Mean number of words per document."""
        return self.length / max(self.documents, 1)

    @property
    def inverse_frequencies(self) -> NDArray[np.float32]:
        """Inverse document frequency of each word, (V,); always positive."""
        rarity: NDArray[np.float64] = np.log(1 + (self.documents - self.frequencies + 0.5) / (self.frequencies + 0.5))
        return rarity.astype(np.float32)


@dataclass(frozen=True)
class ScoredPostings:
    """Postings of a block with their scores.

    Attributes:
        size: Number of documents D of the block.
        documents: Document numbers, (P,) uint32.
        scores: Contribution of each posting to its document's score, (P,).
        starts: The postings of word v are ``starts[v]:starts[v + 1]``, (V + 1,).
    """

    size: int
    documents: NDArray[np.uint32]
    scores: NDArray[np.float32]
    starts: NDArray[np.int64]

    def totals(self, words: Iterable[int]) -> NDArray[np.float32]:
        """Compute the scores of all documents for a query's words, (D,); a repeated word counts each time."""
        totals = np.zeros(self.size, np.float32)
        for word in words:
            postings = slice(self.starts[word], self.starts[word + 1])
            totals[self.documents[postings]] += self.scores[postings]  # each document occurs once per word
        return totals


class TopDocuments:
    """The best documents of a query over the blocks seen so far; ties are ordered by id, descending.

    Only positive scores count: a document that shares no word with the query is not found.

    Args:
        k: Maximum number of documents.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._ids: list[str] = []
        self._scores = np.empty(0, np.float32)

    def add(self, scores: NDArray[np.float32], ids: Callable[[NDArray[np.intp]], Sequence[str]]) -> None:
        """Add a block.

        Args:
            scores: Scores of its documents, (D,).
            ids: Function from document numbers to ids; called only for documents that may be among the best.
        """
        full = len(self._scores) == self._k
        rows = np.flatnonzero(scores >= self._scores[-1]) if full else np.flatnonzero(scores)
        if len(rows) > self._k:
            rows = rows[scores[rows] >= _kth(scores[rows], self._k)]
        if not len(rows):
            return
        named = np.array([*self._ids, *ids(rows)], object)
        found = np.concatenate([self._scores, scores[rows]])
        order, self._scores = in_order(np.arange(len(found)), found, self._k, ids=named)
        self._ids = named[order].tolist()

    @property
    def ids(self) -> list[str]:
        """Ids of the documents, best first."""
        return self._ids

    @property
    def scores(self) -> NDArray[np.float32]:
        """Scores of the documents."""
        return self._scores


def split_words(texts: Iterable[str]) -> Words:
    """Split texts into words as bm25s does: lower case, runs of two or more letters, digits and underscores.

    Raises:
        InputError: bm25s is not installed.
    """
    found = _bm25s().tokenize(texts, stopwords=STOP_WORDS, stemmer=None, show_progress=False)
    return Words(found.ids, found.vocab)


def in_blocks(items: Iterable[Item], text: Callable[[Item], str], limits: BlockLimits | None = None) -> Iterator[list[Item]]:
    """Group documents into blocks. The caller may clear a block's list to free its texts.

    Args:
        items: Documents of any type.
        text: Function that returns the text of a document.
        limits: Size of a block.
    """
    limits = limits or BlockLimits()
    block: list[Item] = []
    characters = 0
    for item in items:
        block.append(item)
        characters += len(text(item))
        if len(block) >= limits.documents or characters >= limits.characters:
            yield block
            block, characters = [], 0
    if block:
        yield block


def count_words(words: Words, vocabulary: Mapping[str, int]) -> Postings:
    """Count the words of a vocabulary in texts; other words only count for the lengths.

    Args:
        words: Words of D texts.
        vocabulary: Word -> number, 0 to V - 1.

    Example:
        >>> postings = count_words(Words([[0, 1, 0], [1]], {"cat": 0, "dog": 1}), {"dog": 0, "cat": 1})
        >>> postings.documents.tolist(), postings.counts.tolist(), postings.starts.tolist()
        ([0, 1, 0], [1, 1, 2], [0, 2, 3])
    """
    size = len(words.texts)
    lengths = np.fromiter(map(len, words.texts), np.int64, size)
    numbers = np.full(len(words.vocabulary), -1, np.int64)
    for word in vocabulary.keys() & words.vocabulary.keys():
        numbers[words.vocabulary[word]] = vocabulary[word]
    found = numbers[np.fromiter(chain.from_iterable(words.texts), np.int64, int(lengths.sum()))]
    known = np.flatnonzero(found >= 0)
    owners = np.repeat(np.arange(size), lengths)
    postings, counts = np.unique(found[known] * size + owners[known], return_counts=True)  # (P,)
    starts = np.searchsorted(postings, np.arange(len(vocabulary) + 1) * size)
    documents = (postings % max(size, 1)).astype(np.uint32)
    return Postings(lengths.astype(np.uint32), documents, counts.astype(np.uint32), starts)


def total_statistics(blocks: Iterable[tuple[Postings, NDArray[np.bool_] | None]], words: int) -> Statistics:
    """Sum the statistics of blocks.

    Args:
        blocks: Postings, each with a mask of the documents that count, (D,), or None for all.
        words: Size V of the vocabulary.
    """
    documents = length = 0
    frequencies = np.zeros(words, np.int64)
    for postings, alive in blocks:
        each = np.diff(postings.starts)
        if alive is None:
            documents += len(postings.lengths)
            length += int(postings.lengths.sum(dtype=np.int64))
            frequencies += each
        else:
            documents += int(np.count_nonzero(alive))
            length += int(postings.lengths[alive].sum(dtype=np.int64))
            frequencies += np.bincount(np.repeat(np.arange(words), each)[alive[postings.documents]], minlength=words)
    return Statistics(documents, length, frequencies)


def score_postings(postings: Postings, statistics: Statistics) -> ScoredPostings:
    """Score postings in float64, rounded once to float32, as bm25s does."""
    scores = np.zeros(len(postings.documents), np.float32)
    if len(scores) and statistics.length:  # otherwise no document that counts has words
        norms = K1 * ((1 - B) + B * postings.lengths[postings.documents] / statistics.mean_length)  # (P,)
        rarity = np.repeat(statistics.inverse_frequencies.astype(np.float64), np.diff(postings.starts))  # (P,)
        scores = (rarity * (postings.counts / (norms + postings.counts))).astype(np.float32)
    return ScoredPostings(len(postings.lengths), postings.documents, scores, postings.starts)


def _kth(scores: NDArray[np.float32], k: int) -> float:
    return float(np.partition(scores, len(scores) - k)[len(scores) - k])


def _bm25s() -> Any:
    try:
        library = importlib.import_module("bm25s")
    except ModuleNotFoundError as error:
        raise InputError("BM25 needs bm25s: pip install bm25s, or pip install 'quiver-retrieval[eval]'") from error
    # On import, bm25s sets its logger to DEBUG.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return library


@dataclass(frozen=True)
class _StreamedBlock:
    """Ids of a block's documents, (D,), and the postings of the queries' words."""

    ids: NDArray[np.object_]
    postings: Postings

    def named(self, rows: NDArray[np.intp]) -> list[str]:
        """Ids of documents by number."""
        return list(self.ids[rows])


def rank_streamed(
    read: Callable[[], Iterable[tuple[str, str]]], queries: Sequence[str], k: int, *, limits: BlockLimits | None = None
) -> Hits:
    """Rank documents for a set of queries, with one block of documents in memory.

    The documents are read twice if they do not fit into one block: for the statistics, then for the scores. Only the queries' words are
    counted.

    Args:
        read: Function that starts a pass over the documents: id and text of each.
        queries: Q texts.
        k: Maximum documents per query. Only documents that share a word with the query are found; bm25s would pad the top k with documents
            of score 0 in the order of the file.
        limits: Size of a block.

    Raises:
        InputError: bm25s is not installed.
        ValueError: k < 1.
    """
    k = check_k(k)
    words = split_words(queries)
    reading = _streamed_blocks(read(), words.vocabulary, limits)
    first = list(islice(reading, 2))
    statistics = total_statistics(((block.postings, None) for block in chain(first, reading)), len(words.vocabulary))
    best = [TopDocuments(k) for _ in queries]
    for block in first if len(first) < 2 else _streamed_blocks(read(), words.vocabulary, limits):
        scored = score_postings(block.postings, statistics)
        for found, query in zip(best, words.texts, strict=True):
            found.add(scored.totals(query), block.named)
    return Hits([found.ids for found in best], [found.scores for found in best])


def _streamed_blocks(
    documents: Iterable[tuple[str, str]], vocabulary: Mapping[str, int], limits: BlockLimits | None
) -> Iterator[_StreamedBlock]:
    for block in in_blocks(documents, lambda document: document[1], limits):
        ids = np.array([key for key, _ in block], np.object_)
        words = split_words(text for _, text in block)
        block.clear()  # frees the texts before the postings are used
        yield _StreamedBlock(ids, count_words(words, vocabulary))
