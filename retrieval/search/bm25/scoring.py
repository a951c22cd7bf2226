"""BM25 itself: words of texts, where they stand, and what they add to a document's score.

Lucene's variant with k1 = 0.9 and b = 0.4, English stop words and no stemmer, whatever the language or the kind of text. Words and scores
are those of bm25s. Its own index is not used: the scores in it hold the word frequencies of the whole corpus, so that one document more
or less would change all of them, and it takes the corpus in one piece. Here documents come in blocks, a block's postings are facts of its
texts alone, and frequencies are summed over the blocks when somebody searches.

Shapes: D documents, P postings (a word in a document) of one block, V words of a vocabulary, k hits.
Source: Robertson and Zaragoza 2009, doi 10.1561/1500000019; bm25s, arXiv:2407.03618; k1 and b are Anserini's for BEIR,
arXiv:2306.07471.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.ranking import in_order

NAME = "bm25"
"""What tables, files and options call it."""

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
"""Everything that decides a score, as results and records have it."""

# Documents and characters of a block: about 200 MB with their words, and long enough that going through all queries for each block
# costs little beside reading it.
_BLOCK_DOCUMENTS = 100_000
_BLOCK_CHARACTERS = 1 << 24

Item = TypeVar("Item")


class Words(NamedTuple):
    """The words of some texts.

    Attributes:
        texts: For each text its words as numbers, stop words left out.
        vocabulary: Word -> number, from 0 in the order of their appearance.
    """

    texts: Sequence[Sequence[int]]
    vocabulary: Mapping[str, int]


@dataclass(frozen=True)
class Postings:
    """Where the words of a vocabulary stand in the documents of a block.

    Attributes:
        lengths: Words of each document, those that are not in the vocabulary included, (D,) uint32.
        documents: Numbers of documents, ascending for each word, (P,) uint32.
        counts: How often the word stands there, (P,) uint32.
        starts: The postings of word v are ``starts[v]:starts[v + 1]``, (V + 1,).
    """

    lengths: NDArray[np.uint32]
    documents: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    starts: NDArray[np.int64]


@dataclass(frozen=True)
class Statistics:
    """What a score needs to know of all documents together.

    Attributes:
        documents: How many there are.
        length: Words of all of them.
        frequencies: In how many of them each word stands, (V,).
    """

    documents: int
    length: int
    frequencies: NDArray[np.int64]

    @property
    def mean_length(self) -> float:
        """Words of a document, on average."""
        return self.length / max(self.documents, 1)

    @property
    def inverse_frequencies(self) -> NDArray[np.float32]:
        """How much each word tells, (V,); always positive."""
        rarity: NDArray[np.float64] = np.log(1 + (self.documents - self.frequencies + 0.5) / (self.frequencies + 0.5))
        return rarity.astype(np.float32)


@dataclass(frozen=True)
class Scored:
    """The postings of a block with what each adds to the score of its document.

    Attributes:
        size: Documents of the block, D.
        documents: Numbers of documents, (P,) uint32.
        scores: What each posting adds, (P,).
        starts: The postings of word v are ``starts[v]:starts[v + 1]``, (V + 1,).
    """

    size: int
    documents: NDArray[np.uint32]
    scores: NDArray[np.float32]
    starts: NDArray[np.int64]

    def totals(self, words: Iterable[int]) -> NDArray[np.float32]:
        """Scores of all documents for a query's words, (D,); a word that it has twice counts twice."""
        totals = np.zeros(self.size, np.float32)
        for word in words:
            postings = slice(self.starts[word], self.starts[word + 1])
            totals[self.documents[postings]] += self.scores[postings]  # a document is there once
        return totals


class Best:
    """The best documents of one query, as far as its blocks have been seen; of equals the greater ids come first.

    Only positive scores count: a document that shares no word with the query is not found.

    Args:
        k: Documents wanted.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._ids: list[str] = []
        self._scores = np.empty(0, np.float32)

    def add(self, scores: NDArray[np.float32], ids: Callable[[NDArray[np.intp]], Sequence[str]]) -> None:
        """Look at a block.

        Args:
            scores: Of its documents, (D,).
            ids: Gives the ids of some of them by number; it is asked for no more than may belong to the best.
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
        """The documents, best first."""
        return self._ids

    @property
    def scores(self) -> NDArray[np.float32]:
        """Their scores."""
        return self._scores


def split_words(texts: Iterable[str]) -> Words:
    """The words of texts as bm25s takes them apart: lower case, runs of two or more letters, digits and underscores.

    Raises:
        InputError: bm25s is not installed.
    """
    found = _bm25s().tokenize(texts, stopwords=STOP_WORDS, stemmer=None, show_progress=False)
    return Words(found.ids, found.vocab)


def in_blocks(items: Iterable[Item], text: Callable[[Item], str]) -> Iterator[list[Item]]:
    """Documents in blocks that can be counted at a time; whoever takes a block may empty it.

    Args:
        items: Documents of any kind.
        text: Gives the text of one.
    """
    block: list[Item] = []
    characters = 0
    for item in items:
        block.append(item)
        characters += len(text(item))
        if len(block) >= _BLOCK_DOCUMENTS or characters >= _BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def count_words(words: Words, vocabulary: Mapping[str, int]) -> Postings:
    """Count the words of a vocabulary in texts; other words matter for the lengths alone.

    Args:
        words: Of D texts.
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
    """What is to be known of all documents.

    Args:
        blocks: Postings, each with the documents that count, (D,); None for all.
        words: Size V of their vocabulary.
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


def score_postings(postings: Postings, statistics: Statistics) -> Scored:
    """What each posting adds to the score of its document; in float64, and rounded once, as bm25s does it."""
    scores = np.zeros(len(postings.documents), np.float32)
    if len(scores) and statistics.length:  # otherwise no document that counts has a word
        norms = K1 * ((1 - B) + B * postings.lengths[postings.documents] / statistics.mean_length)  # (P,)
        rarity = np.repeat(statistics.inverse_frequencies.astype(np.float64), np.diff(postings.starts))  # (P,)
        scores = (rarity * (postings.counts / (norms + postings.counts))).astype(np.float32)
    return Scored(len(postings.lengths), postings.documents, scores, postings.starts)


def _kth(scores: NDArray[np.float32], k: int) -> float:
    return float(np.partition(scores, len(scores) - k)[len(scores) - k])


def _bm25s() -> Any:
    try:
        library = importlib.import_module("bm25s")
    except ModuleNotFoundError as error:
        raise InputError("BM25 needs bm25s: pip install bm25s, or 'quiver-retrieval[eval]', which brings it") from error
    # Importing it sets its logger to DEBUG, and whoever has a handler at the root would read how an index is built.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return library
