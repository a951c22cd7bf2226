"""The parts of one service, and its state: what it serves, within which limits, and whether it is about to stop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from quiver.encoder import InputError
from quiver.retrieval.index import open_index
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.search import bm25
from quiver.retrieval.search.hybrid import differing_documents
from quiver.retrieval.serving.access import Access
from quiver.retrieval.serving.generations import Generation, SharedModel, open_generation
from quiver.retrieval.serving.limits import Limits
from quiver.retrieval.serving.metrics import Metrics
from quiver.retrieval.serving.problems import RequestError
from quiver.retrieval.serving.reloading import ServedIndex
from quiver.retrieval.serving.retrievers import Retriever

logger = logging.getLogger(__name__)


@dataclass
class Service:
    """What routes work with.

    Attributes:
        retrievers: By name; the first is the default.
        limits: What is refused.
        access: Who may change documents.
        metrics: What is counted.
        threads: Where searches and everything else that takes time run.
        draining: Whether it is about to stop.
    """

    retrievers: Mapping[str, Retriever]
    limits: Limits
    access: Access
    metrics: Metrics
    threads: ThreadPoolExecutor
    draining: bool = False
    indexes: list[ServedIndex] = field(init=False)
    _warnings: dict[str, tuple[object, str | None]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """List the indexes, each once, and let the metrics follow them."""
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
        """Why a retriever's rankings cannot be compared with those of the first one; None where both rank the same documents."""
        first, *_ = self.retrievers.values()
        if retriever.served is first.served:
            return None
        indexes = [each.served.current.index for each in (first, retriever)]
        states = [(index.manifest.generation, index.manifest.created) for index in indexes]
        known, warning = self._warnings.get(retriever.name, (None, None))
        if known != states:
            difference = differing_documents(*indexes)
            if difference is not None:
                warning = f"{first.name!r} and {retriever.name!r} rank different documents, so do not compare their rankings: {difference}"
            else:
                warning = None
            self._warnings[retriever.name] = states, warning
        return warning

    def retriever(self, name: str | None) -> Retriever:
        """A retriever by its name, the first one for None.

        Raises:
            RequestError: 404: there is none of that name.
        """
        found = next(iter(self.retrievers.values())) if name is None else self.retrievers.get(name)
        if found is None:
            raise RequestError(404, "unknown_retriever", f"there is no such retriever; there are {', '.join(self.retrievers)}")
        return found


def open_service(
    folders: Mapping[str, Path],
    *,
    words: bool = False,
    model: str | None = None,
    token: str | None = None,
    limits: Limits | None = None,
    workers: int = 2,
    verify: bool = True,
) -> Service:
    """Open indexes and their models.

    Args:
        folders: Name -> index, one at least.
        words: Serve BM25 of the first one's texts beside them.
        model: The first one's model; None for the one that built it.
        token: Allows changes; None allows none.
        limits: What is refused.
        workers: Batches that a retriever searches at a time.
        verify: Compare each block of a file with its checksum when it is first read.

    Raises:
        InputError: One cannot be opened, or its model cannot.
    """
    limits, metrics = limits or Limits(), Metrics()
    if words and bm25.NAME in folders:
        raise InputError(f"'{bm25.NAME}' is the name of the words; give the index another one")
    threads = ThreadPoolExecutor(max_workers=workers * (len(folders) + words) + 2, thread_name_prefix="quiver-serve")
    models: dict[str, SharedModel] = {}
    retrievers: dict[str, Retriever] = {}
    for place, (name, folder) in enumerate(folders.items()):
        served = _served(folder, models, model if place == 0 else None, threads, words=words and place == 0, verify=verify)
        retrievers[name] = Retriever(name, served, threads, limits, workers=workers, metrics=metrics)
    if words:
        served = next(iter(retrievers.values())).served
        retrievers[bm25.NAME] = Retriever(bm25.NAME, served, threads, limits, workers=workers, metrics=metrics, words=True)
    service = Service(retrievers, limits, Access(token), metrics, threads)
    for retriever in retrievers.values():
        if (warning := service.warning_for(retriever)) is not None:
            logger.warning("%s", warning)
    return service


def _served(
    folder: Path, models: dict[str, SharedModel], model: str | None, threads: ThreadPoolExecutor, *, words: bool, verify: bool
) -> ServedIndex:
    card = open_index(folder).manifest.model
    if card.fingerprint not in models:
        try:
            models[card.fingerprint] = SharedModel(load_model(model or card.source, precision=card.precision))
        except InputError as error:
            raise InputError(f"{error}; {folder} was built with {card.source}: give --model if it has moved") from error
    shared = models[card.fingerprint]

    def newest() -> Generation:
        # What is newer was hashed when it was written; what was there has been compared at the start.
        return open_generation(folder, shared, words=words, verify=verify)

    return ServedIndex(folder, newest, open_generation(folder, shared, words=words, verify=verify), threads)
