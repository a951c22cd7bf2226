"""BM25 of documents that are read as a stream, word tables, and the engine ``bm25``: which documents contain a word how often.

A segment of the engine is one word table. Its postings depend on the segment's texts only, so that they are written once; document
frequencies and the mean length are summed over the documents of all segments that are not deleted when a search begins.

    words.arrow        the V words in ascending order, see `quiver.retrieval.index.columns`
    words.starts       the postings of word v are starts[v]:starts[v + 1], (V + 1,) int64
    words.documents    row of each posting, ascending for each word, (P,) uint32
    words.counts       occurrences of the word in the document, (P,) uint32
    words.lengths      number of words of each document, (D,) uint32

Shapes: Q queries, D documents of a segment, P postings (a word in a document), V words of a vocabulary, n words of some texts.
Source: as `quiver.retrieval.models.bm25`.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.encoder.progress import Advance
from quiver.retrieval.index.columns import StringColumn, open_columns, write_columns
from quiver.retrieval.index.engines import (
    WORDS,
    Bitmap,
    Engine,
    Found,
    NoParams,
    Preset,
    Sample,
    Setting,
    Size,
    check_k,
    check_names,
    in_order,
)
from quiver.retrieval.index.files import CheckedArray, DamagedIndexError, Disk, Files, write_array, write_file
from quiver.retrieval.models.bm25 import K1, PARAMETERS, WORD_RULES, B, Words, split_words
from quiver.retrieval.records import Hits, ModelCard

Item = TypeVar("Item")

STEM = "words"
"""Start of the names of the files of a word table in a segment."""

_CODEC = "codec.json"
_CONTENT = json.dumps({**PARAMETERS, "words": WORD_RULES}).encode()
# Memory in bytes: of a writer for the buffers of its files; of counting or merging for each word of the texts, which are sorted as 64-bit
# numbers with their documents; and for each document.
_BUFFERS, _WORD_BYTES, _DOCUMENT_BYTES = 4 << 20, 64, 24


@dataclass(frozen=True)
class Postings:
    """Occurrences of a vocabulary's words in the documents of a block."""

    lengths: NDArray[np.uint32]  # number of words of each document, including words that are not in the vocabulary, (D,) uint32
    documents: NDArray[np.uint32]  # document numbers, ascending for each word, (P,) uint32
    counts: NDArray[np.uint32]  # occurrences of the word in the document, (P,) uint32
    starts: NDArray[np.int64]  # the postings of word v are starts[v]:starts[v + 1], (V + 1,)


@dataclass(frozen=True)
class Statistics:
    """Collection statistics."""

    documents: int  # number of documents
    length: int  # number of words of all documents
    frequencies: NDArray[np.int64]  # document frequency of each word, (V,)

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
    """Postings of a block with their scores."""

    size: int  # number of documents D of the block
    documents: NDArray[np.uint32]  # document numbers, (P,) uint32
    scores: NDArray[np.float32]  # contribution of each posting to its document's score, (P,)
    starts: NDArray[np.int64]  # the postings of word v are starts[v]:starts[v + 1], (V + 1,)

    def totals(self, words: Iterable[int]) -> NDArray[np.float32]:
        """Compute the scores of all documents for a query's words, (D,); a repeated word counts each time."""
        totals = np.zeros(self.size, np.float32)
        for word in words:
            postings = slice(self.starts[word], self.starts[word + 1])
            totals[self.documents[postings]] += self.scores[postings]  # each document occurs once per word
        return totals


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
    lengths = np.fromiter(map(len, words.texts), np.int64, len(words.texts))
    numbers = np.full(len(words.vocabulary), -1, np.int64)
    for word in vocabulary.keys() & words.vocabulary.keys():
        numbers[words.vocabulary[word]] = vocabulary[word]
    return _count(numbers[np.fromiter(chain.from_iterable(words.texts), np.int64, int(lengths.sum()))], lengths, len(vocabulary))


def _count(words: NDArray[np.int64], lengths: NDArray[np.int64], vocabulary: int) -> Postings:
    """Count words by number, (n,), -1 for words that are not in the vocabulary, in documents of given lengths, (D,)."""
    size, known = len(lengths), np.flatnonzero(words >= 0)
    owners = np.repeat(np.arange(size), lengths)
    postings, counts = np.unique(words[known] * size + owners[known], return_counts=True)  # (P,)
    starts = np.searchsorted(postings, np.arange(vocabulary + 1) * size)
    documents = (postings % max(size, 1)).astype(np.uint32)
    return Postings(lengths.astype(np.uint32), documents, counts.astype(np.uint32), starts)


def total_statistics(blocks: Iterable[tuple[Postings, NDArray[np.bool_] | None]], words: int) -> Statistics:
    """Sum the statistics of blocks."""
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


@dataclass(frozen=True)
class BlockLimits:
    """Size of a block: it ends at either number. About 200 MB with its words, so that a pass over the queries costs little per block."""

    documents: int = 100_000
    characters: int = 1 << 24


def in_blocks(items: Iterable[Item], text: Callable[[Item], str], limits: BlockLimits | None = None) -> Iterator[list[Item]]:
    """Group documents, which have a text each, into blocks. The caller may clear a block's list to free its texts."""
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


def rank_streamed(
    read: Callable[[], Iterable[tuple[str, str]]],
    queries: Sequence[str],
    k: int,
    *,
    limits: BlockLimits | None = None,
    advance: Advance = lambda documents: None,
) -> Hits:
    """Rank documents for Q queries, with one block of documents in memory. Ties are ordered by id, descending.

    The documents are read twice if they do not fit into one block: for the statistics, then for the scores. Only the queries' words are
    counted. Documents that share no word with a query are not found, where bm25s would fill up the top k with them.

    Args:
        read: Function that starts a pass over the documents: id and text of each.
        queries: Q texts.
        k: Maximum documents per query.
        limits: Size of a block.
        advance: Called with the number of further documents; every document is counted twice.
    """
    k = check_k(k)
    words = split_words(queries)
    reading = _streamed_blocks(read(), words.vocabulary, limits, advance)
    first = list(islice(reading, 2))
    statistics = total_statistics(((postings, None) for _, postings in chain(first, reading)), len(words.vocabulary))
    best_ids = [np.empty(0, np.object_) for _ in queries]
    best_scores = [np.empty(0, np.float32) for _ in queries]
    for ids, postings in first if len(first) < 2 else _streamed_blocks(read(), words.vocabulary, limits, advance):
        scored = score_postings(postings, statistics)
        for number, query in enumerate(words.texts):
            scores, known = scored.totals(query), best_scores[number]
            rows = np.flatnonzero(scores >= known[-1]) if len(known) == k else np.flatnonzero(scores)
            if len(rows) > k:
                rows = rows[scores[rows] >= np.partition(scores[rows], len(rows) - k)[len(rows) - k]]
            if len(rows):
                named, found = np.concatenate([best_ids[number], ids[rows]]), np.concatenate([known, scores[rows]])
                order, best_scores[number] = in_order(np.arange(len(found)), found, k, ids=named)
                best_ids[number] = named[order]
        if len(first) < 2:
            advance(len(ids))
    return Hits([ids.tolist() for ids in best_ids], best_scores)


def _streamed_blocks(
    documents: Iterable[tuple[str, str]], vocabulary: Mapping[str, int], limits: BlockLimits | None, advance: Advance
) -> Iterator[tuple[NDArray[np.object_], Postings]]:
    """Ids of each block's documents, (D,), and the postings of the queries' words."""
    for block in in_blocks(documents, lambda document: document[1], limits):
        ids = np.array([key for key, _ in block], np.object_)
        words = split_words((text for _, text in block), advance)
        block.clear()  # frees the texts before the postings are used
        yield ids, count_words(words, vocabulary)


@dataclass(frozen=True)
class WordTable:
    """All words of some documents, in memory or memory-mapped."""

    words: StringColumn  # the V words in ascending order
    starts: CheckedArray  # the postings of word v are starts[v]:starts[v + 1], (V + 1,) int64
    documents: CheckedArray  # document numbers, ascending for each word, (P,) uint32
    counts: CheckedArray  # occurrences of the word in the document, (P,) uint32
    lengths: CheckedArray  # number of words of each document, (D,) uint32

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def _in_memory(cls, words: Iterable[str], postings: Postings) -> WordTable:
        arrays: tuple[NDArray[Any], ...] = (postings.starts, postings.documents, postings.counts, postings.lengths)
        return cls(StringColumn.pack(words), *map(CheckedArray, arrays))

    @classmethod
    def of(cls, words: Words) -> WordTable:
        """Count the words of texts."""
        lengths = np.fromiter(map(len, words.texts), np.int64, len(words.texts))
        return cls.count(np.fromiter(chain.from_iterable(words.texts), np.int64, int(lengths.sum())), lengths, words.vocabulary)

    @classmethod
    def count(cls, words: NDArray[np.integer[Any]], lengths: NDArray[np.integer[Any]], vocabulary: Mapping[str, int]) -> WordTable:
        """Count the words of documents."""
        ordered = sorted(vocabulary)
        return cls._in_memory(ordered, _count(_ranks(ordered, vocabulary)[words], lengths.astype(np.int64), len(ordered)))

    @classmethod
    def merge(cls, parts: Sequence[tuple[WordTable, Bitmap]]) -> WordTable:
        """Merge tables, keeping chosen documents in order. The result is that of counting the words of these documents."""
        number: dict[str, int] = {}
        found: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]] = []
        size = 0
        for table, keep in parts:
            words, documents, counts = table._whole_postings()
            kept = keep[documents]
            used, positions = np.unique(words[kept], return_inverse=True)
            numbers = [number.setdefault(word, len(number)) for word in table.words.take(used)]
            moved = size + np.cumsum(keep) - 1
            size += int(np.count_nonzero(keep))
            found.append((np.array(numbers, np.int64)[positions], moved[documents[kept]], counts[kept]))
        ordered = sorted(number)
        words, documents, counts = (np.concatenate([each[part] for each in found]) for part in range(3))
        words, lengths = _ranks(ordered, number)[words], np.concatenate([table.lengths.whole()[keep] for table, keep in parts])
        order = np.argsort(words * size + documents)
        starts = np.searchsorted(words[order], np.arange(len(ordered) + 1))
        return cls._in_memory(ordered, Postings(lengths, documents[order].astype(np.uint32), counts[order], starts))

    @classmethod
    def open(cls, files: Files, stem: str = STEM) -> WordTable:
        """Map the files that ``save`` wrote."""
        starts = files.map(f"{stem}.starts", np.int64, (-1,))
        arrays = (files.map(f"{stem}.{name}", np.uint32, (-1,)) for name in ("documents", "counts", "lengths"))
        table = cls(open_columns(files, stem)[0]["word"].strings, starts, *arrays)
        if len(table.documents) != len(table.counts) or (starts.is_whole and int(starts.item(len(starts) - 1)) != len(table.counts)):
            raise DamagedIndexError(f"{files.folder / stem}.starts: does not fit the postings; run quiver index repair")
        return table

    def save(self, stem: Path, disk: Disk) -> dict[str, str]:
        """Write the table to files whose names begin with a stem; return what each holds, by name."""
        holds = write_columns(stem.parent, stem.name, {"word": self.words.array}, disk, "words")
        arrays = {
            "starts": (self.starts, "start of each word's postings, (V + 1,) int64"),
            "documents": (self.documents, "documents of each word, (P,) uint32"),
            "counts": (self.counts, "occurrences in the document, (P,) uint32"),
            "lengths": (self.lengths, "number of words of each document, (D,) uint32"),
        }
        for name, (numbers, what) in arrays.items():
            write_array(stem.with_name(f"{stem.name}.{name}"), numbers.whole(), disk)
            holds[f"{stem.name}.{name}"] = what
        return holds

    @property
    def nbytes(self) -> int:
        """Size of the postings in bytes, without the words."""
        return sum(array.nbytes for array in (self.starts, self.documents, self.counts, self.lengths))

    def select(self, words: Iterable[str]) -> Postings:
        """Return the postings of some words, numbered in the order given."""
        begins, ends = self._spans(words)
        sizes = ends - begins
        starts = np.append(0, np.cumsum(sizes))
        positions = np.repeat(begins - starts[:-1], sizes) + np.arange(int(starts[-1]))
        documents, counts = (array.spans(begins, ends)[positions] for array in (self.documents, self.counts))
        return Postings(self.lengths.whole(), documents, counts, starts)

    def frequencies(self, words: Sequence[str], alive: Bitmap | None) -> NDArray[np.int64]:
        """Number of documents that contain each word, (V,), among those that are not deleted."""
        if alive is None:
            begins, ends = self._spans(words)
            return ends - begins
        found = self.select(words)
        owners = np.repeat(np.arange(len(words)), np.diff(found.starts))
        return np.bincount(owners[alive[found.documents]], minlength=len(words))

    def _spans(self, words: Iterable[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First posting of each word, and one past the last; twice 0 for an unknown word."""
        spans = np.array([self._span(word) for word in words], np.int64).reshape(-1, 2)
        return np.ascontiguousarray(spans[:, 0]), np.ascontiguousarray(spans[:, 1])

    def _span(self, word: str) -> tuple[int, int]:
        wanted = word.encode("utf-8", "surrogatepass")
        number = bisect_left(range(len(self.words)), wanted, key=self.words.bytes_of)
        if number == len(self.words) or self.words.bytes_of(number) != wanted:
            return 0, 0
        return self.starts.item(number), self.starts.item(number + 1)

    def damaged(self) -> Bitmap:
        """Documents that lost a word with a damaged file, (D,)."""
        _, documents, counts = self._whole_postings()
        there = np.bincount(documents, counts, minlength=len(self))
        damaged: Bitmap = self.lengths.damaged() | (there != self.lengths.whole())
        return damaged

    def _whole_postings(self) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32]]:
        """Word number, document and count of all postings that no damaged file has lost."""
        starts, lost = self.starts.whole(), self.starts.damaged()
        known = ~(self.words.lost() | lost[:-1] | lost[1:])
        begins, sizes = starts[:-1][known], np.diff(starts)[known]
        positions = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
        words = np.repeat(np.flatnonzero(known), sizes)
        sound = ~(self.documents.damaged() | self.counts.damaged())[positions]
        positions, words = positions[sound], words[sound]
        return words, self.documents.whole()[positions], self.counts.whole()[positions]


def _ranks(ordered: Sequence[str], number: Mapping[str, int]) -> NDArray[np.int64]:
    """Position in ``ordered`` of each word by its number, (V,)."""
    ranks = np.empty(len(ordered), np.int64)
    ranks[np.fromiter((number[word] for word in ordered), np.int64, len(ordered))] = np.arange(len(ordered))
    return ranks


@dataclass(frozen=True)
class WordQueries:
    """Q queries of words, with the statistics of the collection that they search."""

    words: Sequence[Sequence[int]]  # word numbers of each query; a repeated word counts each time
    vocabulary: Sequence[str]  # the V words by number
    statistics: Statistics  # number and length of all documents, and the document frequency of each word

    @classmethod
    def of(cls, queries: Iterable[Sequence[str]], segments: Iterable[tuple[WordSegment, Bitmap | None]]) -> WordQueries:
        """Number the words of queries and sum their statistics over segments."""
        number: dict[str, int] = {}
        words = [[number.setdefault(str(word), len(number)) for word in query] for query in queries]
        documents = length = 0
        frequencies = np.zeros(len(number), np.int64)
        for segment, alive in segments:
            for rows, table in segment.tables():
                kept = None if alive is None else alive[rows]
                lengths = table.lengths.whole() if kept is None else table.lengths.whole()[kept]
                documents, length = documents + len(lengths), length + int(lengths.sum(dtype=np.int64))
                frequencies += table.frequencies([*number], kept)
        return cls(words, [*number], Statistics(documents, length, frequencies))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, query: int) -> WordQueries:
        """One query alone."""
        return WordQueries([self.words[query]], self.vocabulary, self.statistics)

    @property
    def nbytes(self) -> int:
        """Approximate serialized size in bytes."""
        return sum(map(len, self.vocabulary)) + 8 * (len(self.vocabulary) + sum(map(len, self.words)))


class WordSegment:
    """The words of some documents; see `quiver.retrieval.index.engines.Segment`.

    Args:
        parts: Word tables of successive documents. A segment of the engine has one; large texts of other engines are counted in several.
    """

    def __init__(self, parts: Sequence[WordTable]) -> None:
        self._parts = tuple(parts)
        self._ends = [*accumulate(map(len, self._parts))]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def tables(self) -> Iterable[tuple[slice, WordTable]]:
        """The word tables, each with its rows."""
        return ((slice(end - len(table), end), table) for end, table in zip(self._ends, self._parts, strict=True))

    @property
    def size(self) -> Size:
        """See `quiver.retrieval.index.engines.Segment`."""
        return Size(0, sum(table.nbytes for table in self._parts))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of words of each row, (D,)."""
        return np.concatenate([np.zeros(0, np.int64), *(table.lengths.whole() for table in self._parts)])

    def search(
        self, queries: WordQueries, k: int, *, params: NoParams, ranks: NDArray[np.uint32], allowed: Bitmap | None = None
    ) -> list[Found]:
        """See `quiver.retrieval.index.engines.Segment`; a row that shares no word with a query is not found."""
        del params
        found = []
        for totals in self._totals(queries):
            scores = totals if allowed is None else np.where(allowed, totals, np.float32(0))
            rows = np.flatnonzero(scores)
            found.append(in_order(rows, scores[rows], k, ids=ranks))
        return found

    def exact_scores(self, query: WordQueries, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores of given rows for one query, (len(rows),); 0 for a row that shares no word with it."""
        return next(iter(self._totals(query)))[rows]

    def _totals(self, queries: WordQueries) -> Iterable[NDArray[np.float32]]:
        """Scores of all rows for each query, Q arrays (D,)."""
        scored = [score_postings(table.select(queries.vocabulary), queries.statistics) for table in self._parts]
        none = np.zeros(0, np.float32)
        return (np.concatenate([none, *(each.totals(words) for each in scored)]) for words in queries.words)

    def vectors(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """One vector [1] for each word, as `quiver.retrieval.models.bm25.BM25` encodes a text."""
        lengths = self.lengths[rows]
        return np.ones((int(lengths.sum()), 1), np.float32), lengths

    def damaged(self) -> Bitmap:
        """See `quiver.retrieval.index.engines.Segment`."""
        return np.concatenate([np.zeros(0, bool), *(table.damaged() for table in self._parts)])


class _WordWriter:
    """Writes the word table of a segment; the words are numbered as they come and sorted at the end."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder, self._disk = folder, disk
        self._number: dict[str, int] = {}
        self._words, self._lengths = array("I"), array("I")

    def add(self, vectors: NDArray[np.float32], lengths: NDArray[np.int64] | None = None, token_ids: NDArray[Any] | None = None) -> None:
        del vectors
        if lengths is None or token_ids is None:
            raise ValueError("the engine bm25 needs the words of the documents")
        number = self._number
        self._lengths.extend(lengths.tolist())
        self._words.extend([number.setdefault(word, len(number)) for word in token_ids.tolist()])

    def close(self) -> dict[str, str]:
        words, lengths = np.frombuffer(self._words, np.uint32), np.frombuffer(self._lengths, np.uint32)
        return WordTable.count(words, lengths, self._number).save(self._folder / STEM, self._disk)


@dataclass(frozen=True)
class _WordCodec:
    """Codec of the engine: nothing but the parameters, which are the same for all indexes; see `quiver.retrieval.index.engines.Codec`."""

    name: str = WORDS
    dim: int = 1

    @property
    def parameters(self) -> Mapping[str, Setting]:
        return PARAMETERS

    def save(self, folder: Path, disk: Disk) -> Mapping[str, str]:
        write_file(folder / _CODEC, _CONTENT, disk)
        return {_CODEC: "the parameters of BM25"}

    def memory(self, rows: int, vectors: int) -> int:
        return _BUFFERS + _DOCUMENT_BYTES * rows + _WORD_BYTES * vectors

    def writer(self, folder: Path, disk: Disk) -> _WordWriter:
        return _WordWriter(folder, disk)

    def open(self, files: Files, rows: int) -> WordSegment:
        table = WordTable.open(files)
        if len(table) != rows:
            raise DamagedIndexError(f"{files.folder / STEM}.lengths: {len(table)} rows where {rows} were written; run quiver index repair")
        return WordSegment([table])

    def merge(self, parts: Sequence[tuple[WordSegment, Bitmap]], folder: Path, disk: Disk) -> Mapping[str, str]:
        tables = [(table, keep[rows]) for segment, keep in parts for rows, table in segment.tables()]
        return WordTable.merge(tables).save(folder / STEM, disk)

    def preset_params(self, preset: Preset, *, k: int) -> NoParams:
        del preset, k
        return NoParams()

    def param_grid(self, k: int, *, documents: int) -> Sequence[NoParams]:
        del k, documents
        return [NoParams()]


WORD_CODEC = _WordCodec()
"""The codec of the engine."""


def _train_words(
    sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
) -> _WordCodec:
    del sample, card, documents, vectors, seed
    check_names(WORDS, "setting", settings, ())
    return WORD_CODEC


def _open_words(folder: Path) -> _WordCodec:
    if read_json(folder / _CODEC) != json.loads(_CONTENT):
        raise InputError(f"{folder.parent.parent}: another version of Quiver split the words of this BM25 index; build the index again")
    return WORD_CODEC


ENGINES = {WORDS: Engine("bm25", _train_words, _open_words)}
"""The engine; see `quiver.retrieval.index.engines.ENGINE_MODULES`."""
