"""BM25: words of texts, postings and scores, and two searches: over streamed documents, and over the documents of an index.

Lucene's variant with k1 = 0.9 and b = 0.4, English stop words and no stemmer, for any language. Words and scores are those of bm25s. Its
index is not used: its scores include the document frequencies of the whole corpus, so adding one document would change all of them, and it
needs the corpus in memory. Here documents come in blocks: postings depend on one block's texts only, and document frequencies are summed
over the blocks at search time.

`WordIndex` searches an open index: the same documents, deletions and filters as its vectors. The postings of a segment depend only on its
texts, which never change: they are counted on first use and cached outside the index folder, so that searching needs no lock and writes
nothing into the index.

    CACHE/<key>/words.json                     sizes and checksums of the other files
    CACHE/<key>/<block>.{words.utf8,words.offsets,starts,documents,counts,lengths}

The key is a hash of the texts' checksum and the tokenization rules, so a cached folder is never stale. Folders are written by one rename
and may be deleted at any time; a damaged one is counted again.

Shapes: Q queries, D documents, P postings (a word in a document) of one block, V words of a vocabulary, k hits.
Source: Robertson and Zaragoza 2009, doi 10.1561/1500000019; bm25s, arXiv:2407.03618; k1 and b are Anserini's for BEIR,
arXiv:2306.07471.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import shutil
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.encoder.schema import RECORD, Count, parse_record, with_config
from quiver.encoder.versions import installed_version
from quiver.retrieval.cache import limit_of, mark_used, prune_cache
from quiver.retrieval.index import Index
from quiver.retrieval.index.documents import FilterLike
from quiver.retrieval.index.engines import Bitmap, check_k, in_order
from quiver.retrieval.index.files import REAL, Files, LostTextError, map_array, write_array, write_file
from quiver.retrieval.index.index import OpenSegment
from quiver.retrieval.index.store.reading import FileEntry, FileName, verify_files
from quiver.retrieval.index.store.writing import seal
from quiver.retrieval.index.strings import StringColumn
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.records import Hits

logger = logging.getLogger(__name__)

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


_LIST = "words.json"
_NUMBERS = {"documents": np.uint32, "counts": np.uint32}
# Counting a large segment takes minutes: a temporary folder of this age belongs to a process that has ended.
_STALE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class BlockSizes:
    """Number of documents D, words V and postings P of a block."""

    documents: Count
    words: Count
    postings: Count


@with_config(RECORD)
@dataclass(frozen=True)
class _List:
    """Content of ``words.json``: sizes of the blocks, and the other files by name."""

    blocks: tuple[BlockSizes, ...]
    files: Mapping[FileName, FileEntry]


@dataclass(frozen=True)
class WordTable:
    """All words of a block of documents, in memory or memory-mapped.

    Attributes:
        words: The V words in ascending order.
        postings: Their postings.
    """

    words: StringColumn
    postings: Postings

    @classmethod
    def of(cls, words: Words) -> WordTable:
        """Count the words of texts."""
        ordered = sorted(words.vocabulary)
        return cls(StringColumn.pack(ordered), count_words(words, {word: number for number, word in enumerate(ordered)}))

    def select(self, words: Iterable[str]) -> Postings:
        """Return the postings of some words, numbered in the order given."""
        own = self.postings
        spans = [self._span(word) for word in words]
        positions = np.concatenate([np.zeros(0, np.int64), *(np.arange(begin, end) for begin, end in spans)])
        starts = np.append(0, np.cumsum([end - begin for begin, end in spans], dtype=np.int64))
        return Postings(own.lengths, own.documents[positions], own.counts[positions], starts)

    def _span(self, word: str) -> tuple[int, int]:
        wanted = word.encode("utf-8", "surrogatepass")
        number = bisect_left(range(len(self.words)), wanted, key=self.words.bytes_of)
        if number == len(self.words) or self.words.bytes_of(number) != wanted:
            return 0, 0
        return int(self.postings.starts[number]), int(self.postings.starts[number + 1])


def word_tables(
    texts: Iterable[str], *, texts_sha256: str, cache: Path | None, verify: bool, limits: BlockLimits | None = None
) -> list[WordTable]:
    """Open the cached word tables of texts, one per block, or count and cache them.

    Args:
        texts: The texts; not read if their tables are cached.
        texts_sha256: Checksum of the texts.
        cache: Cache folder; None keeps the tables in memory.
        verify: Compare the checksums of cached files, which reads them once; otherwise only sizes are compared.
        limits: Size of a block.

    Raises:
        InputError: bm25s is not installed, or the folder cannot be written.
    """
    if cache is None:
        return [WordTable.of(words) for words in _split_blocks(texts, limits)]
    rule = {
        "layout": 3,
        "texts": texts_sha256,
        "bm25s": installed_version("bm25s"),
        **{name: PARAMETERS[name] for name in ("stopwords", "stemmer")},
    }
    folder = cache / hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:32]
    limit = limit_of(cache)
    if folder.is_dir():
        mark_used(folder)
        try:
            return _open(folder, verify=verify)
        except (InputError, FileNotFoundError, ValueError) as error:
            logger.warning("%s: damaged (%s); counting the words again", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    _write(folder, texts, limits)
    tables = _open(folder, verify=False)
    if limit is not None:
        prune_cache(limit)
    return tables


def _split_blocks(texts: Iterable[str], limits: BlockLimits | None) -> Iterable[Words]:
    for block in in_blocks(texts, str, limits):
        words = split_words(block)
        block.clear()
        yield words


def _write(folder: Path, texts: Iterable[str], limits: BlockLimits | None) -> None:
    """Count the words of texts block by block and write them to a folder."""
    temporary = _make_temporary(folder)
    try:
        holds: dict[str, str] = {}
        sizes: list[BlockSizes] = []
        for number, words in enumerate(_split_blocks(texts, limits)):
            table = WordTable.of(words)
            holds |= _save(temporary / f"{number:04d}", table)
            sizes.append(BlockSizes(len(table.postings.lengths), len(table.words), len(table.postings.documents)))
        listed = _List(tuple(sizes), seal(temporary, holds, REAL))
        write_file(temporary / _LIST, json.dumps(asdict(listed)).encode(), REAL)
        try:
            temporary.replace(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has written the same tables
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _remove_stale(folder.parent)


def _make_temporary(folder: Path) -> Path:
    """Create a temporary folder that is renamed to ``folder`` when it is complete."""
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{folder.parent}: cannot be written ({error.strerror}); set QUIVER_CACHE to another folder") from error
    return temporary


def _save(stem: Path, table: WordTable) -> dict[str, str]:
    holds = table.words.save(stem.with_name(f"{stem.name}.words"), REAL, "words")
    arrays: dict[str, tuple[NDArray[Any], str]] = {
        "starts": (table.postings.starts, "start of each word's postings, (V + 1,) int64"),
        "documents": (table.postings.documents, "documents of each word, (P,) uint32"),
        "counts": (table.postings.counts, "occurrences in the document, (P,) uint32"),
        "lengths": (table.postings.lengths, "number of words of each document, (D,) uint32"),
    }
    for name, (array, what) in arrays.items():
        write_array(stem.with_name(f"{stem.name}.{name}"), array, REAL)
        holds[f"{stem.name}.{name}"] = what
    return holds


def _open(folder: Path, *, verify: bool) -> list[WordTable]:
    listed = parse_record(_List, read_json(folder / _LIST), source=str(folder / _LIST))
    verify_files(folder, listed.files, full=verify)
    return [_open_block(folder / f"{number:04d}", sizes) for number, sizes in enumerate(listed.blocks)]


def _open_block(stem: Path, sizes: BlockSizes) -> WordTable:
    arrays = {name: map_array(stem.with_name(f"{stem.name}.{name}"), kind, (sizes.postings,)) for name, kind in _NUMBERS.items()}
    lengths = map_array(stem.with_name(f"{stem.name}.lengths"), np.uint32, (sizes.documents,))
    starts = map_array(stem.with_name(f"{stem.name}.starts"), np.int64, (sizes.words + 1,))
    return WordTable(
        StringColumn.open(Files(stem.parent), f"{stem.name}.words", sizes.words),
        Postings(lengths, arrays["documents"], arrays["counts"], starts),
    )


def _remove_stale(cache: Path) -> None:
    for path in cache.glob("*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue  # removed by another process


# Name of the stored texts in a segment's manifest entry.
_TEXTS = "documents.jsonl"


class WordScore(NamedTuple):
    """Contribution of a query word to a document's score; 0 if the document does not contain it."""

    word: str
    score: float


@dataclass(frozen=True)
class _Block:
    """Successive documents of a segment.

    Attributes:
        segment: The segment.
        number: Number of the segment in the index.
        first: Row of the first document.
        table: Words of the documents.
    """

    segment: OpenSegment
    number: int
    first: int
    table: WordTable

    @property
    def rows(self) -> slice:
        """Rows of the segment."""
        return slice(self.first, self.first + len(self.table.postings.lengths))

    @property
    def alive(self) -> Bitmap | None:
        """Mask of the documents that are not deleted, (D,); None for all."""
        return None if self.segment.alive is None else self.segment.alive[self.rows]

    def named(self, documents: NDArray[np.intp]) -> list[str]:
        """Ids of documents by number."""
        return self.segment.documents.ids.strings.take(documents + self.first)


class WordIndex:
    """BM25 over an open index: its committed documents without deleted ones. Document frequencies do not depend on the filter.

    Args:
        index: Index with stored texts.
        cache: Cache folder for word tables; None keeps them in memory.
        verify: Compare the checksums of cached tables.
        progress: Show a progress bar over the documents whose words are counted.
        limits: Size of a block of documents.

    Raises:
        InputError: The index was built without texts, bm25s is not installed, or the folder cannot be written.
    """

    def __init__(
        self,
        index: Index,
        *,
        cache: Path | None = None,
        verify: bool = True,
        progress: bool = False,
        limits: BlockLimits | None = None,
    ) -> None:
        policy = index.manifest.policy
        if not policy.store_text:
            raise InputError(f"{index.path}: built without texts, which BM25 needs; build the index with texts")
        self.index = index
        self._blocks: list[_Block] = []
        for number, (segment, entry) in enumerate(zip(index.segments, index.manifest.segments, strict=True)):
            # The counts depend on the stored texts and on whether titles are included.
            checksum = f"{entry.files[_TEXTS].sha256} {policy.use_title} {policy.separator!r}"
            texts = _contents(segment, use_title=policy.use_title, progress=progress)
            first = 0
            for table in word_tables(texts, texts_sha256=checksum, cache=cache, verify=verify, limits=limits):
                self._blocks.append(_Block(segment, number, first, table))
                first += len(table.postings.lengths)

    def __len__(self) -> int:
        return len(self.index)

    def search(self, queries: Sequence[str], k: int, *, filter: FilterLike = None) -> Hits:
        """Find the k best documents of each query that share a word with it; ties are ordered by id, descending.

        Args:
            queries: Q texts.
            k: Maximum hits per query.
            filter: Condition on the documents; see `quiver.retrieval.index.index.Index.search`.

        Raises:
            InputError: The filter is malformed or names a field that no document has.
            ValueError: k < 1.
        """
        k = check_k(k)
        chosen = self.index.check_filter(filter)
        words = split_words(queries)
        scored = self._scored(words.vocabulary)
        bitmaps = [segment.alive for segment in self.index.segments] if chosen is None else self.index.matching(chosen)
        best = [TopDocuments(k) for _ in queries]
        for block, postings in zip(self._blocks, scored, strict=True):
            allowed = bitmaps[block.number]
            for found, query in zip(best, words.texts, strict=True):
                totals = postings.totals(query)
                found.add(totals if allowed is None else np.where(allowed[block.rows], totals, 0), block.named)
        return Hits([found.ids for found in best], [found.scores for found in best])

    def word_scores(self, query: str, document: str) -> list[WordScore]:
        """Return the contribution of each query word to a document's score, in the order of the query; they add up to the score.

        Raises:
            InputError: The document does not exist.
        """
        position = self.index.locate([document])[0]
        if position is None:
            raise InputError(f"{self.index.path}: no document '{document}' in this index")
        words = split_words([query])
        names = list(words.vocabulary)
        for block, postings in zip(self._blocks, self._scored(words.vocabulary), strict=True):
            if block.number == position.segment and block.rows.start <= position.row < block.rows.stop:
                row = position.row - block.first
                return [WordScore(names[word], float(postings.totals([word])[row])) for word in words.texts[0]]
        return []

    def _scored(self, vocabulary: Mapping[str, int]) -> list[ScoredPostings]:
        """Postings of words in all blocks, scored with the document frequencies among living documents."""
        found = [block.table.select(vocabulary) for block in self._blocks]
        alive = (block.alive for block in self._blocks)
        statistics = total_statistics(zip(found, alive, strict=True), len(vocabulary))
        return [score_postings(postings, statistics) for postings in found]


def _contents(segment: OpenSegment, *, use_title: bool, progress: bool) -> Iterator[str]:
    """Texts of all documents of a segment, including deleted ones, as they were encoded."""
    texts = segment.documents.texts
    if texts is None:
        raise ValueError("this segment was opened without texts")
    with progress_bar("words", len(segment.documents), enabled=progress) as advance:
        for row in range(len(segment.documents)):
            try:
                yield texts[row].content(use_title=use_title)
            except LostTextError as error:  # lost in a repair; the document has no words
                logger.warning("%s", error)
                yield ""
            advance(1)
