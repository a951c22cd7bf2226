"""Retrievers: what requests name. Each ranks the documents of one index, by its vectors or by its words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from quiver.encoder.errors import InputError
from quiver.retrieval.index import DamagedIndexError, Filter
from quiver.retrieval.index.engines import Preset
from quiver.retrieval.records import Hits
from quiver.retrieval.search import bm25
from quiver.retrieval.serving.batching import Batcher
from quiver.retrieval.serving.generations import Generation
from quiver.retrieval.serving.limits import Limits
from quiver.retrieval.serving.metrics import Metrics
from quiver.retrieval.serving.problems import RequestError
from quiver.retrieval.serving.reloading import ServedIndex
from quiver.retrieval.serving.schemas import RetrieverInfo

Kind: TypeAlias = Literal["dense", "colbert", "bm25"]


@dataclass(frozen=True)
class Choices:
    """How queries are searched; those with the same choices are searched in one call.

    Attributes:
        k: Hits a query.
        filter: Which documents may be found.
        effort: How much of the index is looked at.
        target_recall: Chooses that by what was measured; None for ``effort``.
    """

    k: int
    filter: Filter | None = None
    effort: Preset | None = None
    target_recall: float | None = None


@dataclass(frozen=True)
class Asked:
    """The queries of one request."""

    texts: tuple[str, ...]
    choices: Choices

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.texts)


@dataclass(frozen=True)
class Ranked:
    """What they found.

    Attributes:
        hits: A ranking a query.
        generation: Where.
        encode: Seconds that the encoding of the batch took.
        search: Seconds that the search took.
    """

    hits: Hits
    generation: Generation
    encode: float
    search: float


class Retriever:
    """One name that requests can search.

    Args:
        name: The name.
        served: The index.
        threads: Where searches run.
        limits: Of a batch and of the queue.
        workers: Batches at a time.
        metrics: Told of every batch.
        words: Rank by words instead of vectors.

    Attributes:
        name: The name.
        served: The index.
        words: Whether it ranks by words.
    """

    def __init__(
        self, name: str, served: ServedIndex, threads: Executor, limits: Limits, *, workers: int, metrics: Metrics, words: bool = False
    ) -> None:
        self.name = name
        self.served = served
        self.words = words
        self._metrics = metrics
        self._batcher: Batcher[Asked, Ranked] = Batcher(
            self._run, threads, workers=workers, largest=limits.batch, room=limits.queue, observe=self._observe_batch
        )

    @property
    def waiting(self) -> int:
        """Queries that wait for a worker."""
        return self._batcher.waiting

    async def search(self, asked: Asked) -> Ranked:
        """Rank documents.

        Raises:
            RequestError: The filter names a field that there is not, recall was not measured, or too much is waiting.
        """
        return await self._batcher.ask(asked)

    def info(self) -> RetrieverInfo:
        """What the page and other clients have to know."""
        generation = self.served.current
        index = generation.index
        policy = index.manifest.policy
        kind: Kind = "bm25" if self.words else index.manifest.model.kind
        return RetrieverInfo(
            name=self.name,
            kind=kind,
            model=_words_name() if self.words else _model_name(index.manifest.model.source),
            documents=len(index),
            generation=generation.number,
            fields={name: list(types) for name, types in index.fields.items()},
            explains=policy.store_text and kind != "dense",
            stores_text=policy.store_text,
            efforts=[] if self.words else list(get_args(Preset)),
        )

    def _observe_batch(self, queries: int) -> None:
        self._metrics.batches.labels(self.name).observe(queries)

    def _run(self, work: Sequence[Asked]) -> list[Ranked | Exception]:
        """Rank the queries of several requests: one call of the model for all, one of the index for each kind of choices."""
        generation = self.served.current
        texts = [text for asked in work for text in asked.texts]
        begun = time.perf_counter()
        queries = texts if self.words else generation.model.queries(texts)
        encode = time.perf_counter() - begun
        self._metrics.stages.labels(self.name, "encode").observe(encode)
        ends = list(accumulate(asked.size for asked in work))
        results: dict[int, Ranked | Exception] = {}
        for choices, members in _grouped(work).items():
            rows = [row for member in members for row in range(ends[member] - work[member].size, ends[member])]
            begun = time.perf_counter()
            try:
                hits = self._found(generation, [queries[row] for row in rows], choices)
            except DamagedIndexError:
                raise
            except InputError as error:
                # Where the index lies is nobody's business.
                said = str(error).removeprefix(f"{generation.index.path}: ")
                results |= dict.fromkeys(members, RequestError(422, "invalid_request", said))
                continue
            search = time.perf_counter() - begun
            self._metrics.stages.labels(self.name, "search").observe(search)
            first = 0
            for member in members:
                last = first + work[member].size
                results[member] = Ranked(Hits(hits.ids[first:last], hits.scores[first:last]), generation, encode, search)
                first = last
        return [results[member] for member in range(len(work))]

    def _found(self, generation: Generation, queries: Sequence[Any], choices: Choices) -> Hits:
        if not self.words:
            return generation.index.search(
                queries, choices.k, filter=choices.filter, effort=choices.effort, target_recall=choices.target_recall
            )
        if generation.words is None:
            raise ValueError(f"{self.name} ranks by words, and this generation was opened without them")
        if choices.effort is not None or choices.target_recall is not None:
            raise InputError(f"{self.name} looks at every document that has a word of the query; leave effort and target_recall out")
        return generation.words.search(queries, choices.k, filter=choices.filter)


def _grouped(work: Sequence[Asked]) -> dict[Choices, list[int]]:
    """The places of the requests that can be searched in one call."""
    groups: dict[Choices, list[int]] = {}
    for place, asked in enumerate(work):
        groups.setdefault(asked.choices, []).append(place)
    return groups


def _words_name() -> str:
    return ", ".join(f"{name} {value}" for name, value in bm25.PARAMETERS.items())


def _model_name(source: str) -> str:
    """A hub id as it is; of a folder the end of its path, which says what it is and not where."""
    path = Path(source)
    return "/".join(path.parts[-2:]) if path.is_absolute() else source
