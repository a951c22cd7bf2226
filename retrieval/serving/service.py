"""The service: its retrievers, the access token, and how they are opened."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from quiver.encoder import InputError
from quiver.retrieval.index import open_index
from quiver.retrieval.models import bm25
from quiver.retrieval.models.loading import load_index_model
from quiver.retrieval.search.retrievers import SharedModel
from quiver.retrieval.search.search import differing_documents
from quiver.retrieval.serving.indexes import Generation, ServedIndex, open_generation
from quiver.retrieval.serving.metrics import Metrics
from quiver.retrieval.serving.retrievers import Retriever
from quiver.retrieval.serving.schemas import Limits, RequestError, StoredDocument

logger = logging.getLogger(__name__)


VARIABLE = "QUIVER_TOKEN"
"""Environment variable with the token that allows changes, and reading."""

READING_VARIABLE = "QUIVER_READ_TOKEN"
"""Environment variable with the token that reading needs."""

_SHORTEST = 16  # least length of a token, in characters


class Access:
    """Allows changes of documents, and reading, to clients that send a token.

    Args:
        token: Token that allows changes and reading; None to allow no changes.
        read_token: Token that allows reading; None to let everybody read.

    Attributes:
        writable: Whether there is a token for changes.
        private: Whether reading needs a token.
    """

    def __init__(self, token: str | None, read_token: str | None = None) -> None:
        self._digest = None if token is None else _digest(token)
        self._reading = None if read_token is None else _digest(read_token)
        self.writable = token is not None
        self.private = read_token is not None

    def check(self, given: str | None) -> None:
        """Check the token of a request that changes documents.

        Args:
            given: The token; None if the request has none.

        Raises:
            RequestError: 403: the service is read-only; 401: the token is missing or wrong.
        """
        if self._digest is None:
            raise RequestError(403, "read_only", "this service is read-only; start it with --token-file to allow changes")
        _compare(given, self._digest)

    def check_reading(self, given: str | None) -> None:
        """Check the token of a request that reads; the token for changes allows reading too.

        Args:
            given: The token; None if the request has none.

        Raises:
            RequestError: 401: the token is missing or wrong.
        """
        if self._reading is not None:
            _compare(given, self._reading, *(() if self._digest is None else (self._digest,)))


def _compare(given: str | None, *allowed: bytes) -> None:
    # Digests have equal lengths and are compared in constant time, all of them.
    if given is None or not sum(hmac.compare_digest(_digest(given), each) for each in allowed):
        problem = "send the header Authorization: Bearer TOKEN" if given is None else "wrong token"
        raise RequestError(401, "unauthorized", problem, {"WWW-Authenticate": "Bearer"})


def read_token(file: Path | None, variable: str = VARIABLE) -> str | None:
    """Read a token from a file, or from an environment variable; None if there is neither.

    Raises:
        InputError: The file cannot be read, or the token is too short.
    """
    if file is None:
        token, origin = os.environ.get(variable, ""), variable
        if not token:
            return None
    else:
        origin = str(file)
        try:
            token = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise InputError(f"{file}: the token cannot be read ({reason})") from error
    token = token.strip()
    if len(token) < _SHORTEST:
        raise InputError(f"{origin}: the token must have at least {_SHORTEST} characters; make one with: openssl rand -hex 32")
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


@dataclass
class Service:
    """State of the service.

    Attributes:
        retrievers: Retrievers by name; the first is the default.
        limits: Limits on requests.
        access: Access control for changes and reading.
        metrics: Metrics.
        threads: Executor for searches and other slow work.
        draining: Whether the service is stopping.
    """

    retrievers: Mapping[str, Retriever]
    limits: Limits
    access: Access
    metrics: Metrics
    threads: ThreadPoolExecutor
    draining: bool = field(init=False, default=False)
    indexes: list[ServedIndex] = field(init=False)
    _warnings: dict[str, tuple[object, str | None]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """List the indexes, each once, and connect the metrics."""
        self.indexes = list({id(each.served): each.served for each in self.retrievers.values()}.values())
        for name, each in self.retrievers.items():
            self._follow(name, each)
            each.served.observers.append(partial(self._count_reload, name))

    def _follow(self, name: str, retriever: Retriever) -> None:
        self.metrics.follow(
            name,
            queue=lambda: retriever.waiting,
            generation=lambda: retriever.served.current.number,
            documents=lambda: len(retriever.served.current.index),
        )

    def _count_reload(self, name: str, worked: bool) -> None:
        self.metrics.reloads.labels(name, "done" if worked else "failed").inc()

    def warning_for(self, retriever: Retriever) -> str | None:
        """Why the rankings of a retriever must not be compared with those of the first; None if both rank the same documents."""
        first, *_ = self.retrievers.values()
        if retriever.served is first.served:
            return None
        indexes = [each.served.current.index for each in (first, retriever)]
        states = [(index.manifest.generation, index.manifest.created) for index in indexes]
        known, warning = self._warnings.get(retriever.name, (None, None))
        if known != states:
            difference = differing_documents(*indexes)
            if difference is not None:
                warning = f"{first.name!r} and {retriever.name!r} rank different documents; do not compare their rankings: {difference}"
            else:
                warning = None
            self._warnings[retriever.name] = states, warning
        return warning

    def retriever(self, name: str | None) -> Retriever:
        """Return a retriever by its name, or the first one for None.

        Raises:
            RequestError: 404: there is no retriever of that name.
        """
        found = next(iter(self.retrievers.values())) if name is None else self.retrievers.get(name)
        if found is None:
            raise RequestError(404, "unknown_retriever", f"no such retriever; the retrievers are {', '.join(self.retrievers)}")
        return found

    def document(self, key: str, retriever: str | None = None) -> StoredDocument:
        """Return a document by its id, from the index of a retriever, or of the first one for None.

        Raises:
            RequestError: 404: there is no such retriever or document.
        """
        found = self.retriever(retriever)
        generation = found.served.current
        index = generation.index
        if index.locate([key])[0] is None:
            raise RequestError(404, "unknown_document", f"document {key!r} is not in the index")
        if not index.manifest.policy.store_text:
            return StoredDocument(key, None, None, None, found.name, generation.number)
        stored = index.document(key)
        metadata = None if stored.metadata is None else dict(stored.metadata)
        return StoredDocument(key, stored.title, stored.text, metadata, found.name, generation.number)


def open_service(
    folders: Mapping[str, Path],
    *,
    words: bool = False,
    model: str | None = None,
    device: str | None = None,
    access: Access | None = None,
    limits: Limits | None = None,
    workers: int = 2,
    verify: bool = True,
) -> Service:
    """Open indexes and their models.

    Args:
        folders: Name -> folder of an index; one or more.
        words: Add a BM25 retriever over the texts of the first index.
        model: Model of the first index; None for the one that built it.
        device: Device of the models; None for a GPU if available.
        access: Access control; None for a read-only service that everybody may read.
        limits: Limits on requests; None for the defaults.
        workers: Number of batches that each retriever searches at the same time.
        verify: Verify the checksum of each block when it is first read.

    Raises:
        InputError: An index or its model cannot be opened.
    """
    limits, metrics = limits or Limits(), Metrics()
    if words and bm25.NAME in folders:
        raise InputError(f"the name '{bm25.NAME}' is reserved for BM25; name the index with NAME=FOLDER")
    threads = ThreadPoolExecutor(max_workers=workers * (len(folders) + words) + 2, thread_name_prefix="quiver-serve")
    models: dict[str, SharedModel] = {}
    retrievers: dict[str, Retriever] = {}
    for position, (name, folder) in enumerate(folders.items()):
        first = position == 0
        card = open_index(folder).manifest.model
        if card.fingerprint not in models:
            models[card.fingerprint] = SharedModel(load_index_model(card, model if first else None, device=device))
        served = _served(folder, models[card.fingerprint], threads, words=words and first, verify=verify)
        retrievers[name] = Retriever(name, served, threads, limits, workers=workers, metrics=metrics)
    if words:
        served = next(iter(retrievers.values())).served
        retrievers[bm25.NAME] = Retriever(bm25.NAME, served, threads, limits, workers=workers, metrics=metrics, words=True)
    service = Service(retrievers, limits, access or Access(None), metrics, threads)
    for retriever in retrievers.values():
        if (warning := service.warning_for(retriever)) is not None:
            logger.warning("%s", warning)
    return service


def _served(folder: Path, shared: SharedModel, threads: ThreadPoolExecutor, *, words: bool, verify: bool) -> ServedIndex:
    def newest() -> Generation:
        return open_generation(folder, shared, words=words, verify=verify)

    return ServedIndex(folder, newest, open_generation(folder, shared, words=words, verify=verify), threads)
