"""The replicas of one shard: which is asked, and what becomes of one that is lost.

A lost replica is asked no more, and another is started in the background, again and again until one opens. One that is slow is doubted:
others are asked first, until it says that it is there, or is taken for lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.handles import ShardHandle, ShardLauncher, ShardLostError
from quiver.retrieval.cluster.messages import ShardHits
from quiver.retrieval.cluster.shard import ShardSpec

logger = logging.getLogger(__name__)

# Seconds between two tries to start a replica: the first, and the most; each is twice the one before.
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class Timeouts:
    """How long is waited for whom, in seconds.

    Attributes:
        attempt: For a replica's answer, before another one is asked as well.
        answer: For a shard's answer in all, before the search does without; infinity waits until its replicas answer or are lost.
        query: What each further query of a search adds to both.
        alive: For a slow replica to say that it is there, before it is taken for lost.
        start: For a shard to open.
    """

    attempt: float = 2.0
    answer: float = 30.0
    query: float = 0.1
    alive: float = 10.0
    start: float = 600.0


@dataclass(eq=False)
class Replica:
    """One replica.

    Attributes:
        handle: Asks it.
        waiting: Searches that it has not answered.
        doubted: Whether it was slow and has not said since that it is there.
        lost: Whether it is asked no more.
    """

    handle: ShardHandle
    waiting: int = field(default=0)
    doubted: bool = field(default=False)
    lost: bool = field(default=False)


class ReplicaSet:
    """The replicas of one shard. Several threads may use it at once.

    Args:
        spec: The shard.
        launcher: Starts them.
        count: How many there are to be.
        patience: How long is waited.
    """

    def __init__(self, spec: ShardSpec, launcher: ShardLauncher, count: int, patience: Timeouts) -> None:
        self.spec = spec
        self._launcher = launcher
        self._patience = patience
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._replicas = [Replica(launcher.launch(spec)) for _ in range(count)]

    @property
    def alive(self) -> int:
        """How many replicas are asked."""
        return len(self._replicas)

    def wait(self) -> None:
        """Wait until all are open.

        Raises:
            FileNotFoundError: A file of the index is missing.
            InputError: The index cannot be opened there, or the shard was not opened in time.
        """
        for replica in tuple(self._replicas):
            self._opened(replica.handle)

    def ask(self, message: Any, *, asked: Collection[Replica]) -> tuple[Replica, Future[ShardHits]] | None:
        """Ask one replica: of those that are not doubted the one with the least to do.

        Args:
            message: What is asked.
            asked: The replicas that have been asked already.

        Returns:
            The replica and its answer to come; None where there is no other.
        """
        with self._lock:
            others = [replica for replica in self._replicas if replica not in asked]
            if not others:
                return None
            chosen = min(others, key=lambda replica: (replica.doubted, replica.waiting))
            chosen.waiting += 1
            # Of those with as little to do the next search takes another one.
            self._replicas.remove(chosen)
            self._replicas.append(chosen)
        answer = chosen.handle.search(message)
        answer.add_done_callback(lambda _: self._answered(chosen))
        return chosen, answer

    def has_other(self, asked: Collection[Replica]) -> bool:
        """Whether there is a replica that has not been asked and is not doubted."""
        with self._lock:
            return any(replica not in asked and not replica.doubted for replica in self._replicas)

    def lost(self, replica: Replica, reason: BaseException) -> None:
        """Ask a replica no more, and start another in the background; what was told before is passed over."""
        with self._lock:
            if replica.lost or self._closed.is_set():
                return
            replica.lost = True
            self._replicas.remove(replica)
        logger.warning("%s: a replica is lost, %d are left; another is being started (%s)", self.spec, self.alive, reason)
        replica.handle.close()
        threading.Thread(target=self._replace, name="shard-restart", daemon=True).start()

    def doubt(self, replica: Replica) -> None:
        """Ask a slow replica after the others, until it says that it is there; if it does not, it is lost."""
        with self._lock:
            if replica.doubted or replica.lost or self._closed.is_set():
                return
            replica.doubted = True
        threading.Thread(target=self._check, args=(replica,), name="shard-check", daemon=True).start()

    def close(self) -> None:
        """Let all go; none is started any more."""
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
            replica.handle.alive().result(timeout=self._patience.alive)
        except (FutureTimeoutError, CancelledError, ShardLostError) as error:
            self.lost(replica, ShardLostError(f"it did not answer, nor say within {self._patience.alive:g} s that it is there: {error!r}"))
        else:
            with self._lock:
                replica.doubted = False

    def _replace(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            handle = None
            try:
                handle = self._launcher.launch(self.spec)
                self._opened(handle)
            except (OSError, ValueError, MemoryError, RuntimeError) as error:
                if handle is not None:
                    handle.close()
                logger.warning("%s: a replica could not be started, the next try is in %g s: %s", self.spec, pause, error)
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
                logger.warning("%s: a replica was started again, there are %d", self.spec, self.alive)
            return

    def _opened(self, handle: ShardHandle) -> None:
        try:
            handle.opened().result(timeout=self._patience.start)
        except FutureTimeoutError as error:
            raise InputError(
                f"{self.spec}: not opened within {self._patience.start:g} s; it takes {self.spec.bytes:,} bytes of memory, which must be "
                "free on a machine of the cluster (ray status tells)"
            ) from error
        except (ShardLostError, CancelledError) as error:
            raise InputError(f"{self.spec}: ended while it was opened ({error})") from error
