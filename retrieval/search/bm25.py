"""BM25 over the documents of an index of any engine.

The words of a segment depend only on its texts, which never change: they are counted on first use and cached outside the index folder, so
that searching needs no lock and writes nothing into the index.

    CACHE/<key>/words.json                     seal: documents of each block, and sizes and checksums of the other files
    CACHE/<key>/<block>.*                      files of a `quiver.retrieval.index.words.WordTable`

The key is a hash of the texts' checksum and the tokenization rules, so a cached folder is never stale. Folders may be deleted at any time;
a damaged one is counted again.

Shapes: Q queries, D documents of a block, k hits.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from quiver.encoder.errors import InputError, system_error
from quiver.encoder.files import mark_used
from quiver.encoder.progress import progress_bar
from quiver.encoder.work_folder import SealedFolders
from quiver.retrieval.cache import limit_of, prune_cache, warn_of_no_cache
from quiver.retrieval.index.documents import TEXTS_FILE, OpenSegment
from quiver.retrieval.index.files import REAL, Files
from quiver.retrieval.index.index import IndexReader
from quiver.retrieval.index.store.reading import CodecEntry
from quiver.retrieval.index.words import WORD_CODEC, BlockLimits, WordSegment, WordTable, in_blocks
from quiver.retrieval.models.bm25 import BM25, PARAMETERS, WORD_RULES, query_words, split_words


def word_tables(
    read: Callable[[], Iterable[str]], *, texts_sha256: str, cache: Path | None, verify: bool, limits: BlockLimits | None = None
) -> list[WordTable]:
    """Open the cached word tables of the texts of a checksum, one per block, or count and cache them; ``verify`` reads cached files once.

    A cache that cannot be written, such as one on a read-only or full disk, costs time and memory, not the search: the tables are then kept
    in memory, and one line in the log says so.
    """
    if cache is not None:
        try:
            return _cached_tables(cache, read, texts_sha256, verify=verify, limits=limits)
        except (OSError, InputError) as error:
            cause = system_error(error)
            if cause is None:
                raise
            warn_of_no_cache(str(cache), cause.strerror or str(cause))
    return list(_count_blocks(read(), limits))


def _cached_tables(
    cache: Path, read: Callable[[], Iterable[str]], texts_sha256: str, *, verify: bool, limits: BlockLimits | None
) -> list[WordTable]:
    rule = {"texts": texts_sha256, "words": WORD_RULES, **{name: PARAMETERS[name] for name in ("stopwords", "stemmer")}}
    name = hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:32]
    sealed, limit = SealedFolders(cache, "quiver-words/5", "words.json"), limit_of(cache)
    found = sealed.finished(name, "counting the words again") if verify else sealed.read(name)
    if found is None:
        if sealed.path(name).exists():
            sealed.remove(name)
        with sealed.writing(name, worker=uuid.uuid4().hex) as found:  # several processes may count the same words
            sizes = []
            for number, table in enumerate(_count_blocks(read(), limits)):
                table.save(found.folder / f"{number:04d}", REAL)
                sizes.append(len(table))
            found.about = {"blocks": sizes}
        if limit is not None:
            prune_cache(limit)
    mark_used(found.folder)
    return [WordTable.open(Files(found.folder), f"{number:04d}") for number in range(len(found.about["blocks"]))]


def _count_blocks(texts: Iterable[str], limits: BlockLimits | None) -> Iterator[WordTable]:
    for block in in_blocks(texts, str, limits):
        words = split_words(block)
        block.clear()
        yield WordTable.of(words)


class WordScore(NamedTuple):
    """Contribution of a query word to a document's score; 0 if the document does not contain it."""

    word: str
    score: float


def word_index(
    index: IndexReader, *, cache: Path | None = None, verify: bool = True, progress: bool = False, limits: BlockLimits | None = None
) -> IndexReader:
    """Open the documents of an index with texts as an index of BM25; an index of BM25 is returned as it is.

    Args:
        index: The index.
        cache: Cache folder; None keeps the word tables in memory.
        verify: Compare the checksums of cached tables.
        progress: Show a bar over the documents whose words are counted.
        limits: Size of a block.
    """
    manifest, policy, codec = index.manifest, index.manifest.policy, WORD_CODEC
    if index.kind == codec.name:
        return index
    if not policy.store_text:
        raise InputError(f"{index.path}: built without texts, which BM25 needs; build the index with texts")
    segments = []
    for segment, entry in zip(index.segments, manifest.segments, strict=True):
        # The counts depend on the stored texts and on whether titles are included.
        file = entry.files.get(TEXTS_FILE)  # None of an index in memory, whose tables are not kept
        checksum = "" if file is None else f"{file.sha256} {policy.use_title} {policy.separator!r}"
        read = partial(_segment_texts, segment, use_title=policy.use_title, progress=progress)
        tables = word_tables(read, texts_sha256=checksum, cache=None if file is None else cache, verify=verify, limits=limits)
        segments.append(replace(segment, vectors=WordSegment(tables)))
    words = replace(manifest, model=BM25().card, codec=CodecEntry(codec.name, "", codec.parameters, {}), calibration=None)
    return IndexReader(index.path, words, codec, segments, verified=index.verified)


def word_scores(words: IndexReader, query: str, document: str) -> list[WordScore]:
    """The contribution of each query word to a document's score in an index of BM25, in the order of the query; they sum to the score.

    Raises:
        InputError: The document does not exist.
    """
    names = query_words(query)
    each = {word: float(words.scores([word], [document])[0]) for word in dict.fromkeys(names)}
    return [WordScore(word, each[word]) for word in names]


def _segment_texts(segment: OpenSegment, *, use_title: bool, progress: bool) -> Iterator[str]:
    """Texts of all documents of a segment, including deleted ones, as they were encoded."""
    texts = segment.documents.texts
    if texts is None:
        raise ValueError("this segment was opened without texts")
    with progress_bar("words", len(segment.documents), enabled=progress) as advance:
        for row in range(len(segment.documents)):
            yield texts.content(row, use_title=use_title)
            advance(1)
