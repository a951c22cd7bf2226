"""Micro-batches: queries that wait at the same moment are encoded in one call.

Nobody waits for a batch to fill: a worker that is free takes whatever has queued up by then. Under light load that is one query, under
heavy load many, whose cost a batch shares.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from quiver.retrieval.serving.problems import RequestError


class Sized(Protocol):
    """Work of a known size."""

    @property
    def size(self) -> int:
        """How many queries it is."""


Work = TypeVar("Work", bound=Sized)
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Waiting(Generic[Work, Result]):
    work: Work
    answer: asyncio.Future[Result]


class Batcher(Generic[Work, Result]):
    """A queue in front of something that does several pieces of work at once.

    Args:
        run: Does work, in a thread; gives a result or an error a piece, in order.
        threads: Where it runs.
        workers: Batches that run at a time.
        largest: Queries of a batch; a piece that is larger is a batch of its own.
        room: Queries that may wait.
        observe: Told the queries of every batch that begins.
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
        self._run = run
        self._threads = threads
        self._workers = workers
        self._largest = largest
        self._room = room
        self._observe = observe
        self._queue: deque[_Waiting[Work, Result]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self.waiting = 0

    async def ask(self, work: Work) -> Result:
        """The result of a piece of work.

        Raises:
            RequestError: 429: too much is waiting already.
            Exception: What the work has raised.
        """
        if self.waiting + work.size > self._room and self.waiting:
            raise RequestError(429, "too_busy", f"{self.waiting} queries are waiting already; try again in a second", {"Retry-After": "1"})
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(work, answer))
        self.waiting += work.size
        if len(self._running) < self._workers:
            task = asyncio.create_task(self._work())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return await answer

    async def _work(self) -> None:
        while batch := self._take():
            self._observe(sum(waiting.work.size for waiting in batch))
            work = [waiting.work for waiting in batch]
            done = asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)
            # Not `await done`: whatever it raises is for those who wait for it, and never for this loop.
            await asyncio.wait([done])
            error = done.exception()
            found: Sequence[Result | BaseException] = done.result() if error is None else [error] * len(batch)
            for waiting, result in zip(batch, found, strict=True):
                if waiting.answer.done():  # its client has gone, or its time was up
                    continue
                if isinstance(result, BaseException):
                    waiting.answer.set_exception(result)
                else:
                    waiting.answer.set_result(result)

    def _take(self) -> list[_Waiting[Work, Result]]:
        """The next batch; work that nobody waits for any more is dropped."""
        batch: list[_Waiting[Work, Result]] = []
        size = 0
        while self._queue and (not batch or size + self._queue[0].work.size <= self._largest):
            waiting = self._queue.popleft()
            self.waiting -= waiting.work.size
            if not waiting.answer.done():
                batch.append(waiting)
                size += waiting.work.size
        return batch
