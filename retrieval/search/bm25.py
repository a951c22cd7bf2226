"""BM25 searches: over streamed documents, and over the documents of an index of any engine.

`word_index` gives an index of the engine ``bm25`` (`quiver.retrieval.index.words`) over the documents of another index: the same
documents, deletions and filters. The words of a segment depend only on its texts, which never change: they are counted on first use and
cached outside the index folder, so that searching needs no lock and writes nothing into the index.

    CACHE/<key>/words.json                     documents of each block, and sizes and checksums of the other files
    CACHE/<key>/<block>.*                      files of a `quiver.retrieval.index.words.WordTable`

The key is a hash of the texts' checksum and the tokenization rules, so a cached folder is never stale. Folders are written by one rename
and may be deleted at any time; a damaged one is counted again.

Shapes: Q queries, D documents of a block, k hits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError, system_error
from quiver.encoder.files import read_json
from quiver.encoder.progress import Advance, progress_bar
from quiver.encoder.schema import RECORD, Count, parse_record, with_config
from quiver.retrieval.cache import limit_of, mark_used, prune_cache, warn_of_no_cache
from quiver.retrieval.index.documents import TEXTS_FILE
from quiver.retrieval.index.engines import check_k, in_order
from quiver.retrieval.index.files import REAL, FileEntry, Files, write_file
from quiver.retrieval.index.index import IndexReader
from quiver.retrieval.index.segments import OpenSegment
from quiver.retrieval.index.store.reading import CodecEntry, FileName, verify_files
from quiver.retrieval.index.store.writing import seal
from quiver.retrieval.index.words import Postings, WordCodec, WordSegment, WordTable, count_words, score_postings, total_statistics
from quiver.retrieval.models.bm25 import BM25, PARAMETERS, WORD_RULES, Words, query_words, split_words
from quiver.retrieval.records import Hits

logger = logging.getLogger(__name__)

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


def _kth(scores: NDArray[np.float32], k: int) -> float:
    return float(np.partition(scores, len(scores) - k)[len(scores) - k])


@dataclass(frozen=True)
class _StreamedBlock:
    """Ids of a block's documents, (D,), and the postings of the queries' words."""

    ids: NDArray[np.object_]
    postings: Postings

    def named(self, rows: NDArray[np.intp]) -> list[str]:
        """Ids of documents by number."""
        return list(self.ids[rows])


def rank_streamed(
    read: Callable[[], Iterable[tuple[str, str]]],
    queries: Sequence[str],
    k: int,
    *,
    limits: BlockLimits | None = None,
    advance: Advance = lambda documents: None,
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
        advance: Called with the number of further documents; every document is counted twice.

    Raises:
        ValueError: k < 1.
    """
    k = check_k(k)
    words = split_words(queries)
    reading = _streamed_blocks(read(), words.vocabulary, limits, advance)
    first = list(islice(reading, 2))
    statistics = total_statistics(((block.postings, None) for block in chain(first, reading)), len(words.vocabulary))
    best = [TopDocuments(k) for _ in queries]
    for block in first if len(first) < 2 else _streamed_blocks(read(), words.vocabulary, limits, advance):
        scored = score_postings(block.postings, statistics)
        for found, query in zip(best, words.texts, strict=True):
            found.add(scored.totals(query), block.named)
        if len(first) < 2:
            advance(len(block.ids))
    return Hits([found.ids for found in best], [found.scores for found in best])


def _streamed_blocks(
    documents: Iterable[tuple[str, str]], vocabulary: Mapping[str, int], limits: BlockLimits | None, advance: Advance
) -> Iterator[_StreamedBlock]:
    for block in in_blocks(documents, lambda document: document[1], limits):
        ids = np.array([key for key, _ in block], np.object_)
        words = split_words((text for _, text in block), advance)
        block.clear()  # frees the texts before the postings are used
        yield _StreamedBlock(ids, count_words(words, vocabulary))


_LIST = "words.json"
# Counting a large segment takes minutes: a temporary folder of this age belongs to a process that has ended.
_STALE_SECONDS = 24 * 3600.0


@with_config(RECORD)
@dataclass(frozen=True)
class _List:
    """Content of ``words.json``: number of documents of each block, and the other files by name."""

    blocks: tuple[Count, ...]
    files: Mapping[FileName, FileEntry]


def word_tables(
    read: Callable[[], Iterable[str]], *, texts_sha256: str, cache: Path | None, verify: bool, limits: BlockLimits | None = None
) -> list[WordTable]:
    """Open the cached word tables of texts, one per block, or count and cache them.

    A cache that cannot be written, such as one on a read-only or full disk, costs time and memory, not the search: the tables are then kept
    in memory, and one line in the log says so.

    Args:
        read: Function that starts a pass over the texts; not called if their tables are cached.
        texts_sha256: Checksum of the texts.
        cache: Cache folder; None keeps the tables in memory.
        verify: Compare the checksums of cached files, which reads them once; otherwise only sizes are compared.
        limits: Size of a block.
    """
    if cache is not None:
        try:
            return _cached_tables(cache, read, texts_sha256, verify=verify, limits=limits)
        except (OSError, InputError) as error:
            cause = system_error(error)
            if cause is None:
                raise
            warn_of_no_cache(str(cache), cause.strerror or str(cause))
    return [WordTable.of(words) for words in _split_blocks(read(), limits)]


def _cached_tables(
    cache: Path, read: Callable[[], Iterable[str]], texts_sha256: str, *, verify: bool, limits: BlockLimits | None
) -> list[WordTable]:
    """Arguments and result of `word_tables`.

    Raises:
        OSError: The cache cannot be read or written.
    """
    rule = {
        "layout": 4,
        "texts": texts_sha256,
        "words": WORD_RULES,
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
    _write(folder, read(), limits)
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
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")  # renamed to `folder` when it is complete
    temporary.mkdir(parents=True)
    try:
        holds: dict[str, str] = {}
        sizes: list[int] = []
        for number, words in enumerate(_split_blocks(texts, limits)):
            table = WordTable.of(words)
            holds |= table.save(temporary / f"{number:04d}", REAL)
            sizes.append(len(table))
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


def _open(folder: Path, *, verify: bool) -> list[WordTable]:
    listed = parse_record(_List, read_json(folder / _LIST), source=str(folder / _LIST))
    verify_files(folder, listed.files, full=verify)
    return [WordTable.open(Files(folder), f"{number:04d}") for number in range(len(listed.blocks))]


def _remove_stale(cache: Path) -> None:
    for path in cache.glob("*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue  # removed by another process


# Name of the stored texts in a segment's manifest entry.
_TEXTS = TEXTS_FILE


class WordScore(NamedTuple):
    """Contribution of a query word to a document's score; 0 if the document does not contain it."""

    word: str
    score: float


def word_index(
    index: IndexReader, *, cache: Path | None = None, verify: bool = True, progress: bool = False, limits: BlockLimits | None = None
) -> IndexReader:
    """Open the documents of an index as an index of BM25; an index of BM25 is returned as it is.

    Args:
        index: Index with stored texts.
        cache: Cache folder for word tables; None keeps them in memory.
        verify: Compare the checksums of cached tables.
        progress: Show a progress bar over the documents whose words are counted.
        limits: Size of a block of documents.

    Raises:
        InputError: The index was built without texts.
    """
    manifest, policy, codec = index.manifest, index.manifest.policy, WordCodec()
    if index.kind == codec.name:
        return index
    if not policy.store_text:
        raise InputError(f"{index.path}: built without texts, which BM25 needs; build the index with texts")
    segments = []
    for segment, entry in zip(index.segments, manifest.segments, strict=True):
        # The counts depend on the stored texts and on whether titles are included.
        file = entry.files.get(_TEXTS)  # None of an index in memory, whose tables are not kept
        checksum = "" if file is None else f"{file.sha256} {policy.use_title} {policy.separator!r}"
        read = partial(_contents, segment, use_title=policy.use_title, progress=progress)
        tables = word_tables(read, texts_sha256=checksum, cache=None if file is None else cache, verify=verify, limits=limits)
        segments.append(replace(segment, vectors=WordSegment(tables)))
    words = replace(manifest, model=BM25().card, codec=CodecEntry(codec.name, "", codec.parameters, {}), calibration=None)
    return IndexReader(index.path, words, codec, segments, verified=index.verified)


def word_scores(words: IndexReader, query: str, document: str) -> list[WordScore]:
    """Return the contribution of each query word to a document's score, in the order of the query; they add up to the score.

    Args:
        words: An index of BM25.
        query: The query.
        document: Id of the document.

    Raises:
        InputError: The document does not exist.
    """
    names = query_words(query)
    each = {word: float(words.scores([word], [document])[0]) for word in dict.fromkeys(names)}
    return [WordScore(word, each[word]) for word in names]


def _contents(segment: OpenSegment, *, use_title: bool, progress: bool) -> Iterator[str]:
    """Texts of all documents of a segment, including deleted ones, as they were encoded."""
    texts = segment.documents.texts
    if texts is None:
        raise ValueError("this segment was opened without texts")
    with progress_bar("words", len(segment.documents), enabled=progress) as advance:
        for row in range(len(segment.documents)):
            yield texts.content(row, use_title=use_title)
            advance(1)
