"""Retrievers of the service: micro-batches of queries, searched by the retrievers of `quiver.retrieval.search.retrievers`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from quiver.encoder.errors import InputError
from quiver.retrieval.index import DamagedIndexError, Filter, IndexReader
from quiver.retrieval.index.engines import Preset
from quiver.retrieval.models.bm25 import NAME, describe_parameters
from quiver.retrieval.records import Document, Hits, Query
from quiver.retrieval.search.groups import field_of, search_groups
from quiver.retrieval.search.retrievers import (
    CANDIDATES,
    EncodedQueries,
    FusedRetriever,
    IndexSearcher,
    RerankedRetriever,
    Retriever,
    Scorer,
    SharedModel,
    one_effort,
    search_with,
    storing,
    text_of,
)
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
    """A queue that batches work: a free worker takes everything that waits, up to the ``largest`` batch in queries.

    Work never waits for a batch to fill. Under light load a batch is one query, under heavy load many, which share the cost. A larger piece
    of work is a batch of its own; at most ``room`` queries wait. ``run`` runs a batch in a thread and returns one result or error per piece
    of work, in order; ``observe`` is called with the number of queries of every batch that starts.
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

    async def ask(self, work: Work, *, begun: bool = False) -> Result:
        """Queue a piece of work and return its result; ``begun``: other pieces of the same request are done, so that it is not refused.

        Raises:
            RequestError: 429: too many queries are waiting.
            Exception: The error of the work.
        """
        if not begun and self.waiting + len(work) > self._room and self.waiting:
            raise RequestError(429, "too_busy", f"{self.waiting} queries are waiting; try again in a second", {"Retry-After": "1"})
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(work, answer))
        self.waiting += len(work)
        if len(self._running) < self._workers:
            self._running.add(asyncio.create_task(self._work()))
        return await answer

    async def _work(self) -> None:
        try:
            while batch := self._take():
                self._observe(sum(len(waiting.work) for waiting in batch))
                found = await self._results([waiting.work for waiting in batch])
                for waiting, result in zip(batch, found, strict=True):
                    if waiting.answer.done():  # the client disconnected, or the time limit has passed
                        continue
                    if isinstance(result, BaseException):
                        waiting.answer.set_exception(result)
                    else:
                        waiting.answer.set_result(result)
        finally:
            # At once, not when the task is done: work that is queued in between would wait for a worker that has ended.
            self._running = {task for task in self._running if task is not asyncio.current_task()}

    async def _results(self, work: list[Work]) -> Sequence[Result | BaseException]:
        """Run a batch. If it fails, run each piece alone, so that only the piece that made it fail fails."""
        done = asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)
        # Not `await done`: its error belongs to those who wait for the result, not to this loop.
        await asyncio.wait([done])
        error = done.exception()
        if error is None:
            return done.result()
        if len(work) == 1 or isinstance(error, RequestError):
            return [error] * len(work)
        return [result for piece in work for result in await self._results([piece])]

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


Kind: TypeAlias = Literal["dense", "colbert", "bm25", "fused", "reranked"]


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search; queries with equal options are searched in one call."""

    k: int
    filter: Filter | None = None
    effort: Preset | None = None
    target_recall: float | None = None
    group_by: str | None = None


@dataclass(frozen=True)
class QueryBatch:
    """The queries of one request."""

    texts: tuple[str, ...]
    options: SearchOptions

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Part:
    """A ranking of the documents of one index: by its model, or by BM25 over its texts."""

    name: str
    served: ServedIndex
    words: bool = False


@dataclass(frozen=True)
class Reranker:
    """Re-ranks 100 candidates: by the vectors of an index of a ColBERT model, or by a ColBERT model that encodes their texts."""

    name: str
    by: ServedIndex | SharedModel


@dataclass(frozen=True)
class Snapshot:
    """The generations that a batch is searched in: of each part, and of the index that re-ranks; and the retriever over them."""

    generations: tuple[Generation, ...]
    retriever: Retriever

    @property
    def number(self) -> int:
        """Number of the generation of the first part."""
        return self.generations[0].number

    @property
    def indexes(self) -> list[IndexReader]:
        """The indexes of the generations."""
        return [generation.index for generation in self.generations]

    @property
    def model(self) -> SharedModel | None:
        """Model whose scores order the documents; None for BM25 and fusions."""
        by = self.retriever.scorer if isinstance(self.retriever, RerankedRetriever) else self.retriever
        found = getattr(by, "model", None)
        return found if isinstance(found, SharedModel) else None

    def document(self, key: str) -> Document | None:
        """A document of the first index that contains it and stores texts; None if there is no such index."""
        index = storing(self.indexes, key)
        return None if index is None else index.document(key)

    def client_message(self, error: InputError) -> str:
        """Message of an error for clients, who must not see the path of an index."""
        message = str(error)
        for index in self.indexes:
            message = message.removeprefix(f"{index.path}: ")
        return message


class RankedQueries(NamedTuple):
    """Hits of the queries of a request, what was searched, and the seconds of encoding its batch and of everything after that."""

    hits: Hits
    snapshot: Snapshot
    encode: float
    search: float


class ServedRetriever:
    """Ranks documents for the queries of concurrent requests, in batches.

    Its parts are fused by reciprocal ranks, if there are several, and re-ranked, if there is a re-ranker. ``workers`` batches run at the
    same time.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Part],
        threads: Executor,
        limits: Limits,
        *,
        workers: int,
        metrics: Metrics,
        reranker: Reranker | None = None,
    ) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.reranker = reranker
        self._metrics = metrics
        self._limits = limits
        self._batcher: Batcher[QueryBatch, RankedQueries] = Batcher(
            self._run, threads, workers=workers, largest=limits.batch, room=limits.queue, observe=metrics.batches.labels(name).observe
        )

    @property
    def waiting(self) -> int:
        """Number of waiting queries."""
        return self._batcher.waiting

    @property
    def indexes(self) -> list[ServedIndex]:
        """The indexes, each once; that of the first part is the first."""
        by = [] if self.reranker is None or isinstance(self.reranker.by, SharedModel) else [self.reranker.by]
        return list(dict.fromkeys([*(part.served for part in self.parts), *by]))

    @property
    def served(self) -> ServedIndex:
        """The index of the first part."""
        return self.parts[0].served

    @property
    def kind(self) -> Kind:
        """How it ranks."""
        if self.reranker is not None:
            return "reranked"
        if len(self.parts) > 1:
            return "fused"
        return "bm25" if self.parts[0].words else self.served.current.index.manifest.model.kind

    @property
    def by_words(self) -> bool:
        """Whether BM25 is one of its rankings."""
        return any(part.words or part.served.current.index.kind == NAME for part in self.parts)

    @property
    def model(self) -> SharedModel | None:
        """The one model that encodes its queries; None for BM25, a fusion and a re-ranking."""
        return self.served.current.model if self.kind in ("dense", "colbert") else None

    @property
    def depth(self) -> int | None:
        """Number of hits that it can rank, if that is bounded: by the candidates of a re-ranking."""
        return None if self.reranker is None else CANDIDATES

    async def search(self, batch: QueryBatch) -> RankedQueries:
        """Rank documents.

        Raises:
            RequestError: The filter names an unknown field, the index is not calibrated, or too many queries are waiting.
        """
        return await self._batcher.ask(batch)

    def info(self) -> RetrieverInfo:
        """Describe the retriever for the search page and other clients."""
        generations = [each.current for each in self.indexes]
        index, kind = generations[0].index, self.kind
        ranked = [part.served.current.index for part in self.parts]
        stores = any(each.index.manifest.policy.store_text for each in generations)
        names = [part.name for part in self.parts]
        if kind == "bm25":
            described = describe_parameters()
        elif kind in ("dense", "colbert"):  # the hub id of the model, or the last two parts of its path
            source = index.manifest.model.source
            described = "/".join(Path(source).parts[-2:]) if Path(source).is_absolute() else source
        else:
            described = ("reciprocal ranks of " if len(names) > 1 else "") + " + ".join(names)
        if self.reranker is not None:
            described += f", re-ranked by {self.reranker.name}"
            names.append(self.reranker.name)
        return RetrieverInfo(
            name=self.name,
            kind=kind,
            model=described,
            documents=len(index),
            generation=generations[0].number,
            fields={name: [kind] for name, kind in index.fields.items() if all(name in each.fields for each in ranked)},
            explains=kind == "fused" or (stores and kind != "dense"),
            stores_text=stores,
            efforts=[] if kind == "bm25" else list(get_args(Preset)),
            parts=names if kind in ("fused", "reranked") else [],
            depth=self.depth,
        )

    def _open_snapshot(self) -> Snapshot:
        """The library's retriever over the generations that are current."""
        current = {each: each.current for each in self.indexes}
        ranked: list[Retriever] = []
        for part in self.parts:
            generation = current[part.served]
            if not part.words:
                ranked.append(IndexSearcher(generation.index, generation.model, part.name))
            elif generation.words is None:
                raise ValueError(f"{self.name} ranks by BM25, but this generation was opened without a BM25 index")
            else:
                ranked.append(IndexSearcher(generation.words, name=part.name))
        found = Snapshot(tuple(current.values()), ranked[0] if len(ranked) == 1 else FusedRetriever(ranked))
        if self.reranker is None:
            return found
        by = self.reranker.by
        if isinstance(by, SharedModel):
            scorer = Scorer(self.reranker.name, by, lambda ids: partial(text_of, found.indexes))
        else:
            scorer = Scorer(self.reranker.name, current[by].model, current[by].index, leave_out=True)
        return replace(found, retriever=RerankedRetriever(found.retriever, scorer))

    def _run(self, work: Sequence[QueryBatch]) -> list[RankedQueries | Exception]:
        """Rank the queries of several requests: one call of each model for all, one call of the indexes per set of options."""
        snapshot = self._open_snapshot()
        begun = time.perf_counter()
        retriever = _encode_ahead(snapshot.retriever, [text for batch in work for text in batch.texts])
        encode = time.perf_counter() - begun
        self._metrics.stages.labels(self.name, "encode").observe(encode)
        results: dict[int, RankedQueries | Exception] = {}
        # A request that ranks groups is alone: its passages are searched as deep as its query needs.
        alike: dict[tuple[SearchOptions, int | None], list[int]] = {}
        for position, batch in enumerate(work):
            alike.setdefault((batch.options, None if batch.options.group_by is None else position), []).append(position)
        for (options, _), members in alike.items():
            begun = time.perf_counter()
            try:
                hits = self._rank(retriever, [text for member in members for text in work[member].texts], options, snapshot)
            except DamagedIndexError:
                raise
            except InputError as error:
                refusal = RequestError(422, "invalid_request", snapshot.client_message(error))
                results |= dict.fromkeys(members, refusal)
                continue
            taken = time.perf_counter() - begun
            self._metrics.stages.labels(self.name, "search").observe(taken)
            first = 0
            for member in members:
                own = hits.part(slice(first, first + len(work[member])))
                results[member] = RankedQueries(own, snapshot, encode, taken)
                first += len(work[member])
        return [results[member] for member in range(len(work))]

    def _rank(self, retriever: Retriever, texts: Sequence[str], options: SearchOptions, snapshot: Snapshot) -> Hits:
        """The documents of each query, or the best passages of its groups."""
        queries, effort = [Query("", text) for text in texts], one_effort(options.effort, options.target_recall)
        search = partial(search_with, retriever, queries, filter=options.filter, effort=effort)
        if options.group_by is None:
            return search(options.k)
        most, keys_of = self.depth or self._limits.passages, field_of(snapshot.generations[0].index, options.group_by)
        one_index = len({part.served for part in self.parts}) == 1
        return search_groups(lambda k: search(min(k, most)), min(options.k, keys_of.most) if one_index else options.k, keys_of)


def _encode_ahead(retriever: Any, texts: Sequence[str]) -> Any:
    """The same retriever, or scorer, for queries that every model of it has encoded."""
    if isinstance(retriever, RerankedRetriever):
        return replace(retriever, first=_encode_ahead(retriever.first, texts), scorer=_encode_ahead(retriever.scorer, texts))
    if isinstance(retriever, FusedRetriever):
        return replace(retriever, parts=[_encode_ahead(part, texts) for part in retriever.parts])
    model = retriever.model
    return retriever if model.card.kind == NAME else replace(retriever, model=EncodedQueries.of(model, texts))
