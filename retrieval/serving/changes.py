"""Adding and deleting documents through the service, one change at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from quiver.encoder.errors import InputError
from quiver.retrieval.index import add_documents, delete_documents
from quiver.retrieval.index.index import Index
from quiver.retrieval.records import Document
from quiver.retrieval.serving.generations import Generation
from quiver.retrieval.serving.problems import RequestError
from quiver.retrieval.serving.reloading import ServedIndex


class Changes:
    """Changes indexes.

    Args:
        threads: Where that is done.
        wait: Seconds to wait for another process that writes to the index to finish.
    """

    def __init__(self, threads: Executor, *, wait: float) -> None:
        self._threads = threads
        self._wait = wait
        self._one = asyncio.Lock()

    async def add(self, served: ServedIndex, documents: Sequence[Document], *, replace: bool) -> Generation:
        """Add documents; searches see them when this returns.

        Raises:
            RequestError: 422: an id is there twice or blank; 409: it is in the index, or another process goes on writing.
        """
        key, times = Counter(document.id for document in documents).most_common(1)[0]
        if times > 1:
            raise RequestError(422, "invalid_request", f"document {key!r} is there {times} times; ids must be unique")
        if not all(document.id.strip() for document in documents):
            raise RequestError(422, "invalid_request", "the id of a document is blank")
        return await self._change(served, partial(self._added, served, documents, replace=replace))

    async def delete(self, served: ServedIndex, ids: Sequence[str]) -> Generation:
        """Delete documents; searches do not see them any more when this returns.

        Raises:
            RequestError: 404: there is no such document, and none was deleted; 409: another process goes on writing.
        """
        return await self._change(served, partial(self._deleted, served, ids))

    async def _change(self, served: ServedIndex, change: Callable[[], Index]) -> Generation:
        # Shielded: a client that goes away does not leave a change whose result nobody serves.
        return await asyncio.shield(self._changed(served, change))

    async def _changed(self, served: ServedIndex, change: Callable[[], Index]) -> Generation:
        async with self._one:
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, change)
            except InputError as error:
                raise RequestError(409, "not_changed", str(error)) from error
            return await served.refresh()

    def _added(self, served: ServedIndex, documents: Sequence[Document], *, replace: bool) -> Index:
        known = served.current.index.locate([document.id for document in documents])
        if not replace and any(known):
            key = next(document.id for document, place in zip(documents, known, strict=True) if place is not None)
            raise RequestError(409, "exists", f"document {key!r} is in the index already; send replace: true, or give it another id")
        return add_documents(served.folder, documents, served.current.model, replace_existing=replace, wait=self._wait)

    def _deleted(self, served: ServedIndex, ids: Sequence[str]) -> Index:
        missing = [key for key, place in zip(ids, served.current.index.locate(ids), strict=True) if place is None]
        if missing:
            raise RequestError(404, "unknown_document", f"document {missing[0]!r} is not in the index; nothing was deleted")
        return delete_documents(served.folder, ids, wait=self._wait)
