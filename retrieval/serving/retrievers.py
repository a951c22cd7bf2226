"""Retrievers: micro-batches of queries, ranked by the vectors or the words of an index."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

from quiver.encoder.errors import InputError
from quiver.retrieval.index import DamagedIndexError, Filter, Index
from quiver.retrieval.index.engines import WORDS, Preset
from quiver.retrieval.models.bm25 import describe_parameters
from quiver.retrieval.records import Hits
from quiver.retrieval.search.retrievers import SharedModel
from quiver.retrieval.serving.indexes import Generation, ServedIndex
from quiver.retrieval.serving.metrics import Metrics
from quiver.retrieval.serving.schemas import Limits, RequestError, RetrieverInfo

Work = TypeVar("Work", bound=Sized)  # len() is the number of queries
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Waiting(Generic[Work, Result]):
    work: Work
    answer: asyncio.Future[Result]


class Batcher(Generic[Work, Result]):
    """A queue that batches work: a free worker takes everything that waits, up to the size of a batch.

    Work never waits for a batch to fill. Under light load a batch is one query, under heavy load many, which share the cost.

    Args:
        run: Runs a batch in a thread; returns one result or error per piece of work, in order.
        threads: Executor for batches.
        workers: Number of batches that run at the same time.
        largest: Largest batch, in queries; a larger piece of work is a batch of its own.
        room: Largest number of waiting queries.
        observe: Called with the number of queries of every batch that starts.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Work]], Sequence[Result | Exception]],
        threads: Executor,
        *,
        workers: int,
        largest: int,
        room: int,
        observe: Callable[[int], None],
    ) -> None:
        self._run, self._observe = run, observe
        self._threads, self._workers = threads, workers
        self._largest, self._room = largest, room
        self._queue: deque[_Waiting[Work, Result]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self.waiting = 0

    async def ask(self, work: Work) -> Result:
        """Queue a piece of work and return its result.

        Raises:
            RequestError: 429: too many queries are waiting.
            Exception: The error of the work.
        """
        if self.waiting + len(work) > self._room and self.waiting:
            raise RequestError(429, "too_busy", f"{self.waiting} queries are waiting; try again in a second", {"Retry-After": "1"})
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(work, answer))
        self.waiting += len(work)
        if len(self._running) < self._workers:
            task = asyncio.create_task(self._work())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return await answer

    async def _work(self) -> None:
        while batch := self._take():
            self._observe(sum(len(waiting.work) for waiting in batch))
            work = [waiting.work for waiting in batch]
            done = asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)
            # Not `await done`: its error belongs to those who wait for the result, not to this loop.
            await asyncio.wait([done])
            error = done.exception()
            found: Sequence[Result | BaseException] = done.result() if error is None else [error] * len(batch)
            for waiting, result in zip(batch, found, strict=True):
                if waiting.answer.done():  # the client disconnected, or the time limit has passed
                    continue
                if isinstance(result, BaseException):
                    waiting.answer.set_exception(result)
                else:
                    waiting.answer.set_result(result)

    def _take(self) -> list[_Waiting[Work, Result]]:
        """Take the next batch from the queue, without work that nobody waits for any more."""
        batch: list[_Waiting[Work, Result]] = []
        size = 0
        while self._queue and (not batch or size + len(self._queue[0].work) <= self._largest):
            waiting = self._queue.popleft()
            self.waiting -= len(waiting.work)
            if not waiting.answer.done():
                batch.append(waiting)
                size += len(waiting.work)
        return batch


Kind: TypeAlias = Literal["dense", "colbert", "bm25"]


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search; queries with equal options are searched in one call.

    Attributes:
        k: Number of hits per query.
        filter: Condition on the documents.
        effort: Preset of search parameters.
        target_recall: Target recall; None to use ``effort``.
    """

    k: int
    filter: Filter | None = None
    effort: Preset | None = None
    target_recall: float | None = None


@dataclass(frozen=True)
class QueryBatch:
    """The queries of one request."""

    texts: tuple[str, ...]
    options: SearchOptions

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class RankedQueries:
    """Result of a request.

    Attributes:
        hits: One ranking per query.
        generation: Generation that was searched.
        encode: Duration of encoding the batch, in seconds.
        search: Duration of the search, in seconds.
    """

    hits: Hits
    generation: Generation
    encode: float
    search: float


class Retriever:
    """Ranks the documents of one index, by vectors or by BM25.

    Args:
        name: Name in requests.
        served: The index.
        threads: Executor for searches.
        limits: Limits of a batch and of the queue.
        workers: Number of batches that run at the same time.
        metrics: Records every batch.
        words: Rank by BM25 instead of vectors.

    Attributes:
        name: Name in requests.
        served: The index.
        words: Whether it ranks by BM25.
    """

    def __init__(
        self, name: str, served: ServedIndex, threads: Executor, limits: Limits, *, workers: int, metrics: Metrics, words: bool = False
    ) -> None:
        self.name = name
        self.served = served
        self.words = words
        self._metrics = metrics
        self._batcher: Batcher[QueryBatch, RankedQueries] = Batcher(
            self._run, threads, workers=workers, largest=limits.batch, room=limits.queue, observe=self._observe_batch
        )

    @property
    def waiting(self) -> int:
        """Number of waiting queries."""
        return self._batcher.waiting

    @property
    def model(self) -> SharedModel | None:
        """Model that encodes its queries; None for BM25."""
        return None if self.words or self.served.current.index.kind == WORDS else self.served.current.model

    async def search(self, batch: QueryBatch) -> RankedQueries:
        """Rank documents.

        Raises:
            RequestError: The filter names an unknown field, the index is not calibrated, or too many queries are waiting.
        """
        return await self._batcher.ask(batch)

    def info(self) -> RetrieverInfo:
        """Describe the retriever for the search page and other clients."""
        generation = self.served.current
        index = generation.index
        policy = index.manifest.policy
        kind: Kind = "bm25" if self.words else index.manifest.model.kind
        return RetrieverInfo(
            name=self.name,
            kind=kind,
            model=describe_parameters() if kind == "bm25" else _model_name(index.manifest.model.source),
            documents=len(index),
            generation=generation.number,
            fields={name: list(types) for name, types in index.fields.items()},
            explains=policy.store_text and kind != "dense",
            stores_text=policy.store_text,
            efforts=[] if kind == "bm25" else list(get_args(Preset)),
        )

    def _observe_batch(self, queries: int) -> None:
        self._metrics.batches.labels(self.name).observe(queries)

    def _run(self, work: Sequence[QueryBatch]) -> list[RankedQueries | Exception]:
        """Rank the queries of several requests: one call of the model for all, one call of the index per set of options."""
        generation = self.served.current
        texts = [text for batch in work for text in batch.texts]
        begun = time.perf_counter()
        queries = texts if self.words else generation.model.queries(texts)
        encode = time.perf_counter() - begun
        self._metrics.stages.labels(self.name, "encode").observe(encode)
        ends = list(accumulate(len(batch) for batch in work))
        results: dict[int, RankedQueries | Exception] = {}
        for options, members in _grouped(work).items():
            rows = [row for member in members for row in range(ends[member] - len(work[member]), ends[member])]
            begun = time.perf_counter()
            try:
                hits = self._found(generation, [queries[row] for row in rows], options)
            except DamagedIndexError:
                raise
            except InputError as error:
                results |= dict.fromkeys(members, RequestError(422, "invalid_request", client_message(error, generation.index)))
                continue
            search = time.perf_counter() - begun
            self._metrics.stages.labels(self.name, "search").observe(search)
            first = 0
            for member in members:
                last = first + len(work[member])
                results[member] = RankedQueries(Hits(hits.ids[first:last], hits.scores[first:last]), generation, encode, search)
                first = last
        return [results[member] for member in range(len(work))]

    def _found(self, generation: Generation, queries: Sequence[Any], options: SearchOptions) -> Hits:
        if not self.words:
            return generation.index.search(
                queries, options.k, filter=options.filter, effort=options.effort, target_recall=options.target_recall
            )
        if generation.words is None:
            raise ValueError(f"{self.name} is a BM25 retriever, but this generation was opened without a BM25 index")
        if options.effort is not None or options.target_recall is not None:
            raise InputError(f"{self.name} always searches exhaustively; remove effort and target_recall")
        return generation.words.search(queries, options.k, filter=options.filter)


def client_message(error: InputError, index: Index) -> str:
    """Message of an error for clients, who must not see the path of the index."""
    return str(error).removeprefix(f"{index.path}: ")


def _grouped(work: Sequence[QueryBatch]) -> dict[SearchOptions, list[int]]:
    """Positions of the requests, grouped by options."""
    groups: dict[SearchOptions, list[int]] = {}
    for position, batch in enumerate(work):
        groups.setdefault(batch.options, []).append(position)
    return groups


def _model_name(source: str) -> str:
    """Name of a model: its hub id, or the last two parts of its path."""
    path = Path(source)
    return "/".join(path.parts[-2:]) if path.is_absolute() else source
