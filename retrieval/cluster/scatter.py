"""One search over all shards: a replica of each is asked at once, and whoever does not answer is asked again elsewhere.

Nothing here is about vectors: what is sent and what comes back are passed on as they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from quiver.retrieval.cluster.handles import ShardLostError
from quiver.retrieval.cluster.messages import ShardHits
from quiver.retrieval.cluster.replicas import Replica, ReplicaSet, Timeouts


def scatter(shards: Sequence[ReplicaSet], message: Any, *, queries: int, patience: Timeouts) -> list[ShardHits | None]:
    """Ask every shard.

    Args:
        shards: The shards.
        message: What is asked, as their launcher has made it.
        queries: How many queries are in it.
        patience: How long is waited.

    Returns:
        What each shard answered, in their order; None where none of its replicas did.

    Raises:
        Exception: A shard raised it: of a query that cannot be answered, or a file that is damaged.
    """
    more = patience.query * max(0, queries - 1)
    begun = time.monotonic()
    asking = [_Asking(shard, message, attempt=patience.attempt + more, end=begun + patience.answer + more) for shard in shards]
    while waiting := [each for each in asking if not each.settled]:
        pending = [future for each in waiting for future in each.pending]
        until = min(each.wakes for each in waiting) - time.monotonic()
        wait(pending, None if until == float("inf") else max(0.0, until), FIRST_COMPLETED)
        for each in waiting:
            each.look(time.monotonic())
    return [each.answer for each in asking]


class _Asking:
    """One shard, being asked.

    Attributes:
        answer: What it answered.
        settled: Whether it has, or will not.
        pending: Answers to come -> who is to give them.
        wakes: When there is something to do even if nobody answers.
    """

    def __init__(self, shard: ReplicaSet, message: Any, *, attempt: float, end: float) -> None:
        self.answer: ShardHits | None = None
        self.settled = False
        self.pending: dict[Future[ShardHits], Replica] = {}
        self.wakes = end
        self._shard, self._message = shard, message
        self._attempt, self._end = attempt, end
        self._asked: set[Replica] = set()
        self._ask()

    def look(self, now: float) -> None:
        """Take what has been answered, and see to what has not."""
        for future in [future for future in self.pending if future.done()]:
            replica = self.pending.pop(future)
            error = ShardLostError("it was closed") if future.cancelled() else future.exception()
            if error is None:
                self.answer, self.settled = future.result(), True
                return
            if not isinstance(error, ShardLostError):
                raise error
            self._shard.lost(replica, error)
            if not self.pending:
                self._ask()
        if self.settled or now < self.wakes:
            return
        for replica in self.pending.values():
            self._shard.doubt(replica)
        if now >= self._end:
            self.settled = True
        elif self._shard.has_other(self._asked):
            self._ask()
        else:
            self.wakes = self._end

    def _ask(self) -> None:
        chosen = self._shard.ask(self._message, asked=self._asked)
        if chosen is None:
            self.settled = not self.pending
            return
        replica, future = chosen
        self._asked.add(replica)
        self.pending[future] = replica
        self.wakes = min(self._end, time.monotonic() + self._attempt)
