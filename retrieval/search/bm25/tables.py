"""The words of a segment's documents: counted once, from texts that never change, and kept for the next time.

Which words stand where is a fact of a segment's texts, and a segment is written once: its table of words is made from them, whenever
somebody first wants it, and never has to follow a change. It is not a part of the index: what searches an index holds no lock and writes
nothing into its folder, and who never asks for words pays nothing for them. What changes with every addition and deletion, the
frequencies, is summed over the living documents when a search begins.

    CACHE/<key>/words.json                     sizes and checksums of the other files
    CACHE/<key>/<block>.{words.utf8,words.offsets,starts,documents,counts,lengths}

The key is a hash of the texts' checksum and of how words are made of texts, so that nothing kept can be out of date. Folders appear whole
or not at all, may be deleted at any time, and one that is damaged is made again.

Shapes: D documents, P postings (a word in a document) and V words of a block.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.retrieval.cache import limit_of, mark_used, prune_cache
from quiver.retrieval.index.disk import REAL, write_array, write_file
from quiver.retrieval.index.documents.strings import StringColumn
from quiver.retrieval.index.mapped import Files, map_array
from quiver.retrieval.index.store.manifest import FileEntry
from quiver.retrieval.index.store.reading import verify_files
from quiver.retrieval.index.store.writing import seal
from quiver.retrieval.search.bm25.scoring import PARAMETERS, Postings, Words, count_words, in_blocks, split_words
from quiver.retrieval.versions import installed_version

logger = logging.getLogger(__name__)

_LIST = "words.json"
_NUMBERS = {"documents": np.uint32, "counts": np.uint32}
# A table of a large segment takes minutes to make: a temporary folder of this age belongs to a process that is gone.
_STALE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class WordTable:
    """All words of a block of documents, in memory or mapped.

    Attributes:
        words: The words in ascending order, V of them.
        postings: Where they stand.
    """

    words: StringColumn
    postings: Postings

    @classmethod
    def of(cls, words: Words) -> WordTable:
        """Count the words of some texts."""
        ordered = sorted(words.vocabulary)
        return cls(StringColumn.pack(ordered), count_words(words, {word: number for number, word in enumerate(ordered)}))

    def select(self, words: Iterable[str]) -> Postings:
        """The postings of some words alone, which get the numbers of their order."""
        own = self.postings
        spans = [self._span(word) for word in words]
        places = np.concatenate([np.zeros(0, np.int64), *(np.arange(begin, end) for begin, end in spans)])
        starts = np.append(0, np.cumsum([end - begin for begin, end in spans], dtype=np.int64))
        return Postings(own.lengths, own.documents[places], own.counts[places], starts)

    def _span(self, word: str) -> tuple[int, int]:
        wanted = word.encode("utf-8", "surrogatepass")
        number = bisect_left(range(len(self.words)), wanted, key=self.words.bytes_of)
        if number == len(self.words) or self.words.bytes_of(number) != wanted:
            return 0, 0
        return int(self.postings.starts[number]), int(self.postings.starts[number + 1])


def word_tables(texts: Iterable[str], *, texts_sha256: str, cache: Path | None, verify: bool) -> list[WordTable]:
    """The tables of some texts, a block each: those that are kept, or else counted now and kept.

    Args:
        texts: The texts; not gone through where their tables are kept.
        texts_sha256: A checksum that tells these texts from all others.
        cache: Folder that keeps tables; None counts them into memory.
        verify: Compare the checksums of what is kept, which reads it once; otherwise sizes alone.

    Raises:
        InputError: bm25s is not installed, or the folder cannot be written.
    """
    if cache is None:
        return [WordTable.of(words) for words in _split_blocks(texts)]
    rule = {
        "layout": 2,
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
        except (InputError, FileNotFoundError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s: cannot be used (%s); the words are counted again", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    _write(folder, texts)
    tables = _open(folder, verify=False)
    if limit is not None:
        prune_cache(limit)
    return tables


def _split_blocks(texts: Iterable[str]) -> Iterable[Words]:
    for block in in_blocks(texts, str):
        words = split_words(block)
        block.clear()
        yield words


def _write(folder: Path, texts: Iterable[str]) -> None:
    """Count the words of texts into a folder, a block at a time."""
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{folder.parent}: cannot be written ({error.strerror}); set QUIVER_CACHE, or name another folder") from error
    try:
        holds: dict[str, str] = {}
        sizes = []
        for number, words in enumerate(_split_blocks(texts)):
            table = WordTable.of(words)
            holds |= _save(temporary / f"{number:04d}", table)
            sizes.append((len(table.postings.lengths), len(table.words), len(table.postings.documents)))
        files = {name: asdict(entry) for name, entry in seal(temporary, holds, REAL).items()}
        write_file(temporary / _LIST, json.dumps({"blocks": sizes, "files": files}).encode(), REAL)
        try:
            temporary.replace(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _remove_stale(folder.parent)


def _save(stem: Path, table: WordTable) -> dict[str, str]:
    holds = table.words.save(stem.with_name(f"{stem.name}.words"), REAL, "words")
    arrays: dict[str, tuple[NDArray[Any], str]] = {
        "starts": (table.postings.starts, "where the postings of each word begin, (V + 1,) int64"),
        "documents": (table.postings.documents, "documents of each word, (P,) uint32"),
        "counts": (table.postings.counts, "how often it stands there, (P,) uint32"),
        "lengths": (table.postings.lengths, "words of each document, (D,) uint32"),
    }
    for name, (array, what) in arrays.items():
        write_array(stem.with_name(f"{stem.name}.{name}"), array, REAL)
        holds[f"{stem.name}.{name}"] = what
    return holds


def _open(folder: Path, *, verify: bool) -> list[WordTable]:
    listed: Mapping[str, Any] = read_json(folder / _LIST)
    verify_files(folder, {name: FileEntry(**entry) for name, entry in listed["files"].items()}, full=verify)
    return [_open_block(folder / f"{number:04d}", sizes) for number, sizes in enumerate(listed["blocks"])]


def _open_block(stem: Path, sizes: Sequence[int]) -> WordTable:
    documents, words, postings = sizes
    arrays = {name: map_array(stem.with_name(f"{stem.name}.{name}"), kind, (postings,)) for name, kind in _NUMBERS.items()}
    lengths = map_array(stem.with_name(f"{stem.name}.lengths"), np.uint32, (documents,))
    starts = map_array(stem.with_name(f"{stem.name}.starts"), np.int64, (words + 1,))
    return WordTable(
        StringColumn.open(Files(stem.parent), f"{stem.name}.words", words),
        Postings(lengths, arrays["documents"], arrays["counts"], starts),
    )


def _remove_stale(cache: Path) -> None:
    for path in cache.glob("*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue  # another process was faster
