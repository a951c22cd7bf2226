"""Served indexes: opened generations, the switch to a newer one, and changes of documents."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from quiver.encoder.errors import InputError, describe_failure, full_disk
from quiver.retrieval.cache import WORDS, folder_if_known
from quiver.retrieval.data.entries import checked_document
from quiver.retrieval.index import IndexReader, add_documents, delete_documents, open_index
from quiver.retrieval.index.store.reading import Layout
from quiver.retrieval.records import Document, Query
from quiver.retrieval.search.bm25 import word_index
from quiver.retrieval.search.retrievers import IndexSearcher, SharedModel
from quiver.retrieval.serving.schemas import MOST_FIELDS, RequestError, encodable

logger = logging.getLogger(__name__)

_WARM_UP = "warm up"  # query that compiles kernels and builds tables before a generation is served


@dataclass(frozen=True)
class Generation:
    """An opened generation of an index, the model that encodes queries, and the documents as an index of BM25; None without BM25."""

    index: IndexReader
    model: SharedModel
    words: IndexReader | None

    @property
    def number(self) -> int:
        """Number of the generation."""
        return self.index.manifest.generation


def open_generation(folder: Path, model: SharedModel, *, words: bool, verify: bool) -> Generation:
    """Open the newest generation of an index, with BM25 over its texts if ``words``, and warm it up with one search.

    Raises:
        InputError: The index cannot be opened, another model built it, or it stores no texts for BM25.
    """
    index = open_index(folder, verify=verify)
    index.check_model(model.card)
    generation = Generation(index, model, word_index(index, cache=folder_if_known(WORDS), verify=verify) if words else None)
    for searcher in [IndexSearcher(index, model), *([] if generation.words is None else [IndexSearcher(generation.words)])]:
        searcher.search([Query("", _WARM_UP)], 1)
    return generation


class ServedIndex:
    """A served index, which switches to newer generations while requests run.

    A request holds a reference to the generation it started with, so an old generation is closed after its last request. Documents are
    added and deleted one change at a time. After every switch the ``observers`` are called with whether it succeeded.
    """

    def __init__(self, folder: Path, open_newest: Callable[[], Generation], threads: Executor) -> None:
        self.folder = folder
        self.current = open_newest()
        self.observers: list[Callable[[bool], None]] = []
        self._open_newest = open_newest
        self._threads = threads
        self._layout = Layout(folder.resolve())
        self._switching, self._changing = asyncio.Lock(), asyncio.Lock()

    async def refresh(self) -> Generation:
        """Switch to the newest generation, and return it; the current one stays in use if the newest cannot be opened or read."""
        async with self._switching:
            loop = asyncio.get_running_loop()
            newest = await loop.run_in_executor(self._threads, self._find_newest)
            if newest is not None and newest != self.current.number:
                opened = await loop.run_in_executor(self._threads, self._open_newest)
                change = (self.folder, opened.number, self.current.number, len(opened.index))
                logger.info("%s: switched to generation %d from %d, %d documents", *change)
                self.current = opened
                for observer in self.observers:
                    observer(True)
            return self.current

    async def watch(self, seconds: float) -> None:
        """Keep switching to newer generations at an interval. A generation that cannot be opened is logged once."""
        refused: int | None = None
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.refresh()
                refused = None
            except (InputError, OSError) as error:
                newest = self._find_newest()
                if newest != refused:
                    refused = newest
                    for observer in self.observers:
                        observer(False)
                    logger.error("generation %d stays in use, because the newest cannot be opened: %s", self.current.number, error)

    def _find_newest(self) -> int | None:
        try:
            return max(self._layout.generations(), default=None)
        except OSError:
            return None

    async def add(self, documents: Sequence[Document], *, replace: bool, wait: float) -> Generation:
        """Add documents; searches find them when this returns. Waits so many seconds for another process that writes to the index."""
        key, times = Counter(document.id for document in documents).most_common(1)[0]
        if times > 1:
            raise RequestError(422, "invalid_request", f"document id {key!r} occurs {times} times; ids must be unique")
        if not all(document.id.strip() for document in documents):
            raise RequestError(422, "invalid_request", "a document id is blank")

        def change() -> IndexReader:
            known = self.current.index.locate([document.id for document in documents])
            if not replace and any(known):
                key = next(document.id for document, place in zip(documents, known, strict=True) if place is not None)
                raise RequestError(409, "exists", f"document {key!r} is in the index already; send replace: true, or use another id")
            flat = list(map(_flatten_metadata, documents))
            return add_documents(self.folder, flat, self.current.model, replace_existing=replace, wait=wait)

        return await self._apply_change(change)

    async def delete(self, ids: Sequence[str], *, wait: float) -> Generation:
        """Delete documents; searches no longer find them when this returns. Waits as `add` does."""

        def change() -> IndexReader:
            missing = [key for key, place in zip(ids, self.current.index.locate(ids), strict=True) if place is None]
            if missing:
                raise RequestError(404, "unknown_document", f"document {missing[0]!r} is not in the index; nothing was deleted")
            return delete_documents(self.folder, ids, wait=wait)

        return await self._apply_change(change)

    async def _apply_change(self, change: Callable[[], IndexReader]) -> Generation:
        async def run() -> Generation:
            async with self._changing:
                try:
                    await asyncio.get_running_loop().run_in_executor(self._threads, change)
                except (InputError, OSError) as error:
                    raise _make_refusal(error) from error
                return await self.refresh()

        # Shielded: if the client disconnects, the change is still completed and served.
        return await asyncio.shield(run())


_LOCKED = (errno.EROFS, errno.EACCES, errno.EPERM)


def _make_refusal(error: InputError | OSError) -> Exception:
    """What clients are told of a change that failed; a fault of the disk stays what it is. The writers leave the index as it was."""
    full = full_disk(error)
    if full is not None:
        logger.error("documents cannot be changed: %s", describe_failure(error))
        return RequestError(507, "no_space", f"the index was not changed: {full.strerror}; free space on the disk of the service")
    if isinstance(error, InputError):
        return RequestError(409, "not_changed", str(error))
    if error.errno in _LOCKED:
        return RequestError(409, "not_changed", f"the index cannot be written ({error.strerror}); the service needs the right to write it")
    return error


def _flatten_metadata(document: Document) -> Document:
    """A document of a request by the rules for files."""
    try:
        flat = checked_document(document)
        for field, value in (flat.metadata or {}).items():
            for text in (field, *(value if isinstance(value, Sequence) and not isinstance(value, str) else [value])):
                encodable(text if isinstance(text, str) else "")
    except ValueError as error:
        raise RequestError(422, "invalid_request", str(error)) from error
    if (count := len(flat.metadata or {})) > MOST_FIELDS:
        raise RequestError(422, "beyond_limit", f"fields of document {document.id!r}: at most {MOST_FIELDS:,}, got {count:,}")
    return flat
