"""The BM25 baseline: the floor under every table.

Lucene's variant with k1 = 0.9 and b = 0.4, English stop words and no stemmer, whatever the language or the kind of text:
one rule for all collections, so that the floors can be compared. Title and text are scored as one field. Words and scores are
those of bm25s; its index would hold the whole corpus, so the corpus is gone through twice instead, shard by shard: once for the
statistics, once for the scores. Only the words that the queries ask for are counted.

Shapes: D documents, P postings (a word in a document) and V words of the queries, of one shard.
Source: Robertson and Zaragoza 2009, doi 10.1561/1500000019; bm25s, arXiv:2407.03618; k1 and b are Anserini's for BEIR,
arXiv:2306.07471.
"""

from __future__ import annotations

import heapq
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from eval.benchmark import Policy, cut, depth
from retrieval.corpus import Collection

K1 = 0.9
B = 0.4
PARAMETERS: Mapping[str, str | float | None] = {
    "variant": "lucene",
    "k1": K1,
    "b": B,
    "stopwords": "english",
    "stemmer": None,
}
"""Everything that decides a score, as ``results.json`` records it."""

# Documents and characters held at a time: about 200 MB with their words, and long enough that going through all queries for each
# shard costs little beside reading it.
_SHARD_DOCUMENTS = 100_000
_SHARD_CHARACTERS = 1 << 24


@dataclass(frozen=True)
class _Shard:
    """Some documents and their postings, sorted by word.

    Attributes:
        ids: (D,) of strings.
        lengths: (D,) words of each document, stop words left out.
        documents: (P,) places in ``ids``.
        counts: (P,) how often the word stands there.
        starts: (V + 1,) the postings of word v are ``starts[v]:starts[v + 1]``.
    """

    ids: NDArray[np.object_]
    lengths: NDArray[np.int64]
    documents: NDArray[np.int64]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]


@dataclass(frozen=True)
class _Statistics:
    """What a score needs to know of the whole corpus: (V,) inverse document frequencies, and the mean length in words."""

    idf: NDArray[np.float32]
    mean_length: float


@dataclass(frozen=True)
class _Best:
    """The best documents of one query so far, in no order: (n,) ids and (n,) scores."""

    ids: NDArray[np.object_]
    scores: NDArray[np.float32]


def bm25_run(collection: Collection, *, k: int = 1000, use_title: bool = True, exclude_self: bool = False) -> dict[str, dict[str, float]]:
    """Rank the collection's documents for its queries.

    The documents are read twice where they do not fit into one shard; what stays in memory is one shard of them and k documents a query.

    Args:
        collection: Documents and queries.
        k: Documents a query, at most; a k beyond the collection is no error.
        use_title: Titles are part of the text.
        exclude_self: A document with the query's own id is dropped before the cut.

    Returns:
        A run with every query in it. Only documents that share a word with the query are in it: the top k of bm25s is
        padded with documents of score 0, whose order would be that of the file.

    Raises:
        InputError: bm25s is not installed.
        ValueError: k < 1.
    """
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}")
    bm25s = _bm25s()
    policy = Policy(exclude_self=exclude_self, use_title=use_title)
    queries = _tokenize(bm25s, [query.text for query in collection.queries])
    statistics, shards = _statistics(partial(_shards, bm25s, collection, queries.vocab, policy), len(queries.vocab))
    best = [_Best(np.empty(0, np.object_), np.empty(0, np.float32)) for _ in collection.queries]
    for shard in shards:
        scores = _posting_scores(shard, statistics)
        best = [
            _better(found, shard, _document_scores(shard, scores, words), depth(k, policy))
            for found, words in zip(best, queries.ids, strict=True)
        ]
    run = {
        query.id: dict(zip(found.ids.tolist(), found.scores.tolist(), strict=True))
        for query, found in zip(collection.queries, best, strict=True)
    }
    return cut(run, k, policy)


def _tokenize(bm25s: ModuleType, texts: Sequence[str]) -> Any:
    """The words of each text as numbers, ``ids``, and the number of each word, ``vocab``."""
    return bm25s.tokenize(texts, stopwords=PARAMETERS["stopwords"], stemmer=PARAMETERS["stemmer"], show_progress=False)


def _shards(bm25s: ModuleType, collection: Collection, vocabulary: Mapping[str, int], policy: Policy) -> Iterator[_Shard]:
    ids: list[str] = []
    texts: list[str] = []
    characters = 0
    for document in collection.documents:
        ids.append(document.id)
        texts.append(document.content(use_title=policy.use_title))
        characters += len(texts[-1])
        if len(ids) >= _SHARD_DOCUMENTS or characters >= _SHARD_CHARACTERS:
            shard = _shard(ids, _tokenize(bm25s, texts), vocabulary)
            ids, texts, characters = [], [], 0
            yield shard
    if ids:
        yield _shard(ids, _tokenize(bm25s, texts), vocabulary)


def _shard(ids: Sequence[str], words: Any, vocabulary: Mapping[str, int]) -> _Shard:
    """Count the words of the vocabulary in some documents; the others matter for the lengths alone."""
    lengths = np.fromiter(map(len, words.ids), np.int64, len(ids))
    numbers = np.full(len(words.vocab), -1, np.int64)
    for word in vocabulary.keys() & words.vocab.keys():
        numbers[words.vocab[word]] = vocabulary[word]
    found = numbers[np.fromiter(chain.from_iterable(words.ids), np.int64, int(lengths.sum()))]
    asked = np.flatnonzero(found >= 0)
    owners = np.repeat(np.arange(len(ids)), lengths)
    postings, counts = np.unique(found[asked] * len(ids) + owners[asked], return_counts=True)  # (P,)
    starts = np.searchsorted(postings, np.arange(len(vocabulary) + 1) * len(ids))
    return _Shard(np.array(ids, np.object_), lengths, postings % len(ids), counts, starts)


def _statistics(read: Callable[[], Iterator[_Shard]], words: int) -> tuple[_Statistics, Iterable[_Shard]]:
    """The statistics, and the shards to go through once more: a corpus that fits into one is not read again."""
    reading = read()
    first = list(islice(reading, 2))
    documents = length = 0
    frequencies = np.zeros(words, np.int64)
    for shard in chain(first, reading):
        documents += len(shard.ids)
        length += int(shard.lengths.sum())
        frequencies += np.diff(shard.starts)
    idf = np.log(1 + (documents - frequencies + 0.5) / (frequencies + 0.5))
    statistics = _Statistics(idf.astype(np.float32), length / max(documents, 1))
    return statistics, first if len(first) < 2 else read()


def _posting_scores(shard: _Shard, statistics: _Statistics) -> NDArray[np.float32]:
    """(P,) what each posting adds to the score of its document; in float64, and rounded once, as bm25s does it."""
    if not len(shard.documents):  # the corpus may not hold one word, and its mean length be 0
        return np.empty(0, np.float32)
    norms = K1 * ((1 - B) + B * shard.lengths / statistics.mean_length)  # (D,)
    idf = np.repeat(statistics.idf.astype(np.float64), np.diff(shard.starts))  # (P,)
    scores: NDArray[np.float64] = idf * (shard.counts / (norms[shard.documents] + shard.counts))
    return scores.astype(np.float32)


def _document_scores(shard: _Shard, scores: NDArray[np.float32], words: Iterable[int]) -> NDArray[np.float32]:
    """(D,) scores of a query's words; a word that it has twice counts twice."""
    total = np.zeros(len(shard.ids), np.float32)
    for word in words:
        postings = slice(shard.starts[word], shard.starts[word + 1])
        total[shard.documents[postings]] += scores[postings]  # a document is there once
    return total


def _better(best: _Best, shard: _Shard, scores: NDArray[np.float32], k: int) -> _Best:
    """The best k with a shard's documents among them, in TREC's order: what it would cut later is let go here.

    Only positive scores count, and once k are kept, none below the least of them.
    """
    full = len(best.scores) == k
    places = np.flatnonzero(scores >= best.scores.min()) if full else np.flatnonzero(scores)
    if not len(places):
        return best
    ids, found = np.concatenate([best.ids, shard.ids[places]]), np.concatenate([best.scores, scores[places]])
    if len(found) <= k:
        return _Best(ids, found)
    threshold = np.partition(found, len(found) - k)[len(found) - k]
    above = np.flatnonzero(found > threshold)
    # Among equals the greatest ids stay; ``BM25.retrieve`` would choose by chance.
    equal = heapq.nlargest(k - len(above), np.flatnonzero(found == threshold).tolist(), key=ids.__getitem__)
    kept = np.concatenate([above, np.array(equal, np.int64)])
    return _Best(ids[kept], found[kept])


def _bm25s() -> ModuleType:
    try:
        library = importlib.import_module("bm25s")
    except ModuleNotFoundError as error:
        raise InputError("BM25 needs bm25s: pip install 'quiver-retrieval[eval]'") from error
    # Importing it sets its logger to DEBUG, and whoever has a handler at the root would read how an index is built.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return library
