"""What Quiver keeps in the user's cache folder between runs, and how much of it.

    vectors/      vectors of texts (`quiver.retrieval.data.embedding_store`); an entry is a shard
    words/        words of texts for BM25 (`quiver.retrieval.search.bm25_index`); an entry is the folder of a segment
    collections/  downloaded collections (`quiver.eval.datasets`)

Vectors and words can be computed again. Together they take no more than ``QUIVER_CACHE_LIMIT`` allows: a process that has added to them
removes the entries that were used least recently. The modification time of an entry is the time of its last use, and what was used within
a day stays whatever the limit says, since a running process may still read it. Downloads stay until the user deletes them.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.encoder.files import cache_folder
from quiver.retrieval.units import parse_size

logger = logging.getLogger(__name__)

LIMIT = "QUIVER_CACHE_LIMIT"
"""Environment variable: bytes that vectors and words may take, such as ``50GB``; ``none`` for no limit."""

DEFAULT_LIMIT = "20GB"
"""The limit where the environment variable is not set."""

IN_USE_SECONDS = 24 * 3600.0
"""Time for which an entry stays after it was last used."""

VECTORS, WORDS, COLLECTIONS = "vectors", "words", "collections"


@dataclass(frozen=True)
class CacheEntry:
    """A file or folder of the cache that is removed as a whole.

    Attributes:
        path: Where it is.
        bytes: Its size.
        used: When it was last used, in seconds since 1970.
    """

    path: Path
    bytes: int
    used: float


def cache_limit() -> int | None:
    """Bytes that vectors and words may take together; None for no limit.

    Raises:
        InputError: ``QUIVER_CACHE_LIMIT`` is no size.
    """
    text = os.environ.get(LIMIT) or DEFAULT_LIMIT
    return None if text.strip().lower() == "none" else parse_size(text, LIMIT)


def limit_of(folder: Path) -> int | None:
    """The limit that holds for a folder of vectors or words: None outside the user's cache, where nothing is ever removed.

    Raises:
        InputError: As `cache_limit`.
    """
    try:
        pruned = [cache_folder(name).absolute() for name in (VECTORS, WORDS)]
    except InputError:  # nobody knows the home folder, so that no folder is in the cache there
        return None
    return cache_limit() if folder.absolute() in pruned else None


def mark_used(path: Path) -> None:
    """Note that an entry is used now."""
    with suppress(OSError):  # a cache that can only be read is not pruned by this user either
        os.utime(path)


def cache_entries(name: str) -> list[CacheEntry]:
    """The entries of one part of the cache: shards, damaged ones too, and for all other parts the folders.

    Args:
        name: ``vectors``, ``words`` or ``collections``.
    """
    folder, entries = cache_folder(name), []
    for path in folder.glob("*/*.*" if name == VECTORS else "*"):
        if path.suffix == ".tmp" or path.name == "manifest.json":
            continue
        with suppress(FileNotFoundError):  # another process has removed it
            entries.append(CacheEntry(path, _size(path), path.stat().st_mtime))
    return entries


def prune_cache(limit: int) -> list[CacheEntry]:
    """Remove the vectors and words that were used least recently, until the others take no more than the limit.

    Args:
        limit: Bytes that may stay.

    Returns:
        What was removed.
    """
    entries = sorted([*cache_entries(VECTORS), *cache_entries(WORDS)], key=lambda entry: entry.used)
    excess, removed = sum(entry.bytes for entry in entries) - limit, []
    for entry in entries:
        if excess <= 0 or time.time() - entry.used <= IN_USE_SECONDS:
            break
        _remove(entry.path)
        removed.append(entry)
        excess -= entry.bytes
    if removed:
        logger.info("%s: %d entries removed, %.1f GB", cache_folder(""), len(removed), sum(entry.bytes for entry in removed) / 1e9)
    return removed


def _files(path: Path) -> Iterator[Path]:
    return (each for each in path.rglob("*") if each.is_file()) if path.is_dir() else iter([path])


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):  # another process was faster
        if not path.is_dir():
            path.unlink()
            return
        # Renamed first: a folder under a name that readers know is always whole.
        doomed = path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp"))
        shutil.rmtree(doomed, ignore_errors=True)
