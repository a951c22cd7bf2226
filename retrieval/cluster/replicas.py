"""Replicas of a shard, and the search over all shards.

A lost replica is no longer asked, and a new one is started in the background, again and again until one opens. A slow replica becomes
suspect: others are asked first, until it answers a health check or is declared lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.shard import ShardHandle, ShardHits, ShardLauncher, ShardLostError, ShardSpec

logger = logging.getLogger(__name__)


_LONGEST_PAUSE = 60.0  # longest pause between attempts to start a replica, in seconds


@dataclass(frozen=True)
class Timeouts:
    """Time limits of a search over shards, in seconds.

    Attributes:
        attempt: Time for a replica to answer before another one is asked too.
        answer: Time for a shard to answer before the search continues without it; infinity waits until all its replicas are lost.
        query: Time that each further query of a search adds to both.
        alive: Time for a slow replica to answer a health check before it is declared lost.
        start: Time for a shard to open.
        restart: Pause before the second attempt to start a replica; it doubles with every attempt, up to a minute.
    """

    attempt: float = 2.0
    answer: float = 30.0
    query: float = 0.1
    alive: float = 10.0
    start: float = 600.0
    restart: float = 1.0


@dataclass(eq=False)
class Replica:
    """One replica of a shard.

    Attributes:
        handle: Handle of the shard.
        waiting: Number of unanswered searches.
        suspect: Whether it was slow and has not answered a health check since.
        lost: Whether it is lost.
    """

    handle: ShardHandle
    waiting: int = field(default=0)
    suspect: bool = field(default=False)
    lost: bool = field(default=False)


class ReplicaSet:
    """The replicas of one shard. Several threads may use it at once.

    Args:
        spec: The shard.
        launcher: Starts replicas.
        count: Number of replicas.
        timeouts: Time limits.
    """

    def __init__(self, spec: ShardSpec, launcher: ShardLauncher, count: int, timeouts: Timeouts) -> None:
        self.spec = spec
        self._launcher = launcher
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._replicas = [Replica(launcher.launch(spec)) for _ in range(count)]

    @property
    def alive(self) -> int:
        """Number of replicas that are not lost."""
        return len(self._replicas)

    def wait(self) -> None:
        """Wait until all are open.

        Raises:
            FileNotFoundError: A file of the index is missing.
            InputError: The index cannot be opened on the machine of a replica, or not in time.
        """
        for replica in tuple(self._replicas):
            self._opened(replica.handle)

    def ask(self, message: Any, *, asked: Collection[Replica]) -> tuple[Replica, Future[ShardHits]] | None:
        """Send a search to the replica with the fewest unanswered searches, suspect ones last.

        Args:
            message: The search.
            asked: Replicas that have been asked already.

        Returns:
            The replica and the future of its answer; None if there is no other replica.
        """
        with self._lock:
            others = [replica for replica in self._replicas if replica not in asked]
            if not others:
                return None
            chosen = min(others, key=lambda replica: (replica.suspect, replica.waiting))
            chosen.waiting += 1
            # The next search takes another one of those with equally few searches.
            self._replicas.remove(chosen)
            self._replicas.append(chosen)
        answer = chosen.handle.search(message)
        answer.add_done_callback(lambda _: self._answered(chosen))
        return chosen, answer

    def has_other(self, asked: Collection[Replica]) -> bool:
        """Whether there is a replica that has not been asked yet and is not suspect."""
        with self._lock:
            return any(replica not in asked and not replica.suspect for replica in self._replicas)

    def lost(self, replica: Replica, reason: BaseException) -> None:
        """Declare a replica lost, and start another in the background. Repeated reports are ignored."""
        with self._lock:
            if replica.lost or self._closed.is_set():
                return
            replica.lost = True
            self._replicas.remove(replica)
        logger.warning("%s: lost a replica, %d left; starting another (%s)", self.spec, self.alive, reason)
        replica.handle.close()
        threading.Thread(target=self._replace, name="shard-restart", daemon=True).start()

    def suspect(self, replica: Replica) -> None:
        """Ask a slow replica after the others until it answers a health check; if it does not, it is lost."""
        with self._lock:
            if replica.suspect or replica.lost or self._closed.is_set():
                return
            replica.suspect = True
        threading.Thread(target=self._check, args=(replica,), name="shard-check", daemon=True).start()

    def close(self) -> None:
        """Close all replicas and start no more."""
        with self._lock:
            self._closed.set()
            replicas, self._replicas = self._replicas, []
        for replica in replicas:
            replica.handle.close()

    def _answered(self, replica: Replica) -> None:
        with self._lock:
            replica.waiting -= 1

    def _check(self, replica: Replica) -> None:
        try:
            replica.handle.alive().result(timeout=self._timeouts.alive)
        except (FutureTimeoutError, CancelledError, ShardLostError) as error:
            self.lost(
                replica, ShardLostError(f"neither the search nor a health check was answered within {self._timeouts.alive:g} s: {error!r}")
            )
        else:
            with self._lock:
                replica.suspect = False

    def _replace(self) -> None:
        pause = self._timeouts.restart
        while not self._closed.is_set():
            handle = None
            try:
                handle = self._launcher.launch(self.spec)
                self._opened(handle)
            except (OSError, ValueError, MemoryError, RuntimeError) as error:
                if handle is not None:
                    handle.close()
                logger.warning("%s: a replica could not be started, next attempt in %g s: %s", self.spec, pause, error)
                self._closed.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            with self._lock:
                closed = self._closed.is_set()
                if not closed:
                    self._replicas.append(Replica(handle))
            if closed:
                handle.close()
            else:
                logger.warning("%s: started a replica, %d running", self.spec, self.alive)
            return

    def _opened(self, handle: ShardHandle) -> None:
        try:
            handle.opened().result(timeout=self._timeouts.start)
        except FutureTimeoutError as error:
            raise InputError(
                f"{self.spec}: not opened within {self._timeouts.start:g} s; it needs {self.spec.bytes:,} bytes of free memory "
                "on a machine of the cluster (see ray status)"
            ) from error
        except (ShardLostError, CancelledError) as error:
            raise InputError(f"{self.spec}: the process ended while the shard was opened ({error})") from error


def scatter(shards: Sequence[ReplicaSet], message: Any, *, queries: int, timeouts: Timeouts) -> list[ShardHits | None]:
    """Search all shards: ask a replica of each, and another one where it does not answer in time.

    Args:
        shards: The shards.
        message: The search, as made by the launcher.
        queries: Number of queries in it.
        timeouts: Time limits.

    Returns:
        The answer of each shard, in order; None if no replica answered.

    Raises:
        Exception: An error that a shard raised: an invalid query, or a damaged file.
    """
    more = timeouts.query * max(0, queries - 1)
    begun = time.monotonic()
    asking = [_Asking(shard, message, attempt=timeouts.attempt + more, end=begun + timeouts.answer + more) for shard in shards]
    while waiting := [each for each in asking if not each.settled]:
        pending = [future for each in waiting for future in each.pending]
        until = min(each.wakes for each in waiting) - time.monotonic()
        wait(pending, None if until == float("inf") else max(0.0, until), FIRST_COMPLETED)
        for each in waiting:
            each.look(time.monotonic())
    return [each.answer for each in asking]


class _Asking:
    """Search of one shard.

    Attributes:
        answer: The answer.
        settled: Whether there is an answer, or there will be none.
        pending: Futures of answers -> replicas.
        wakes: Time of the next action without an answer.
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
        """Take an answer, or ask another replica."""
        for future in [future for future in self.pending if future.done()]:
            replica = self.pending.pop(future)
            error = ShardLostError("the replica was closed") if future.cancelled() else future.exception()
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
            self._shard.suspect(replica)
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
