"""The user's cache folder and its size limit.

    vectors/      vectors of texts (`quiver.retrieval.data.embedding_store`); an entry is a shard
    words/        words of texts for BM25 (`quiver.retrieval.search.bm25`); an entry is the folder of a segment
    collections/  downloaded collections (`quiver.eval.datasets`)

Vectors and words can be computed again. Their total size is limited by ``QUIVER_CACHE_LIMIT``: a process that has added entries deletes
the least recently used ones. The modification time of an entry is the time of its last use. Entries used within a day are kept regardless
of the limit, since a running process may read them. Downloads are kept until the user deletes them.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from quiver.encoder.errors import InputError
from quiver.encoder.files import cache_folder
from quiver.retrieval.options import parse_size

logger = logging.getLogger(__name__)

LIMIT = "QUIVER_CACHE_LIMIT"
"""Environment variable: maximum size of vectors and words, such as ``50GB``; ``none`` for no limit."""

DEFAULT_LIMIT = "20GB"
"""Limit if the environment variable is not set."""

IN_USE_SECONDS = 24 * 3600.0
"""Time after the last use for which an entry is kept, in seconds."""

VECTORS, WORDS, COLLECTIONS = "vectors", "words", "collections"


class CacheEntry(NamedTuple):
    """A file or folder of the cache that is deleted as a whole: its size in bytes, and the time of its last use, in seconds since 1970."""

    path: Path
    bytes: int
    used: float


def cache_limit() -> int | None:
    """Return the maximum size of vectors and words, in bytes; None for no limit, an InputError if the variable is not a size."""
    text = os.environ.get(LIMIT) or DEFAULT_LIMIT
    return None if text.strip().lower() == "none" else parse_size(text, LIMIT)


def folder_if_known(name: str) -> Path | None:
    """Return the folder of a part of the cache (``vectors``, ...); None, and a line in the log, if no home folder is known."""
    try:
        return cache_folder(name)
    except InputError as error:
        warn_of_no_cache(str(error), "")
        return None


def folder_if_writable(name: str) -> Path | None:
    """Return the folder of a part of the cache, created if it is missing; None, and a line in the log, if it cannot be written."""
    folder = folder_if_known(name)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            warn_of_no_cache(str(folder), error.strerror or str(error))
            return None
    return folder


@cache
def warn_of_no_cache(folder: str, reason: str) -> None:
    """Log, once for each folder and reason, that results are computed again by every process."""
    problem = f"{folder}: cannot be written ({reason})" if reason else folder
    logger.warning("%s; what would be cached there is kept for this run only. Set QUIVER_CACHE to a writable folder to keep it", problem)


def limit_of(folder: Path) -> int | None:
    """Return `cache_limit` for a folder of vectors or words; None outside the user's cache, where nothing is deleted."""
    try:
        pruned = [cache_folder(name).absolute() for name in (VECTORS, WORDS)]
    except InputError:  # the home folder is unknown, so no folder is in its cache
        return None
    return cache_limit() if folder.absolute() in pruned else None


def cache_entries(name: str) -> list[CacheEntry]:
    """List the entries of one part of the cache: a folder for each shard of vectors, or for each entry of another part."""
    folder, entries = cache_folder(name), []
    for path in folder.glob("*/[0-9]*" if name == VECTORS else "[!.]*"):
        if path.suffix == ".tmp":
            continue
        with suppress(FileNotFoundError):  # deleted by another process
            files = path.rglob("*") if path.is_dir() else [path]
            entries.append(CacheEntry(path, sum(file.stat().st_size for file in files if file.is_file()), path.stat().st_mtime))
    return entries


def prune_cache(limit: int) -> list[CacheEntry]:
    """Delete the least recently used vectors and words until they take at most a number of bytes, and return them."""
    entries = sorted([*cache_entries(VECTORS), *cache_entries(WORDS)], key=lambda entry: entry.used)
    excess, removed = sum(entry.bytes for entry in entries) - limit, []
    for entry in entries:
        if excess <= 0 or time.time() - entry.used <= IN_USE_SECONDS:
            break
        with suppress(FileNotFoundError):  # deleted by another process
            # Renamed first, so that readers never see an incomplete folder.
            doomed = entry.path.rename(entry.path.with_name(f".{entry.path.name}.{uuid.uuid4().hex}.tmp"))
            if doomed.is_dir():
                shutil.rmtree(doomed, ignore_errors=True)
            else:
                doomed.unlink()
        removed.append(entry)
        excess -= entry.bytes
    if removed:
        logger.info("%s: deleted %d entries, %.1f GB", cache_folder(""), len(removed), sum(entry.bytes for entry in removed) / 1e9)
    return removed
