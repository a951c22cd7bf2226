"""What a search needs of a shard that is somewhere else, and of whoever starts one; Ray's are one kind, threads of this process another.

Answers are futures of the standard library: the searching side waits for whichever is first, and knows nothing of how they come about.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from quiver.retrieval.cluster.messages import PackedRequest, ShardHits
from quiver.retrieval.cluster.shard import Shard, ShardSpec


class ShardLostError(Exception):
    """A shard's process or machine has ended, or cannot be reached; nothing is wrong with the query, and another replica may answer it."""


class ShardHandle(Protocol):
    """One replica of a shard. Its futures fail with `ShardLostError` where it is lost, and otherwise with what the shard raised."""

    def opened(self) -> Future[None]:
        """Done once the shard can be searched."""

    def alive(self) -> Future[None]:
        """Done once its process says that it is there, also while it searches."""

    def search(self, message: Any) -> Future[ShardHits]:
        """Search it.

        Args:
            message: What the launcher's ``message`` gave.
        """

    def close(self) -> None:
        """End it, whether or not it was opened; what was asked of it may fail."""


class ShardLauncher(Protocol):
    """Starts shards. Several threads may use it at once."""

    def message(self, request: PackedRequest) -> Any:
        """A request in the form in which it is sent, made once for all shards."""

    def launch(self, spec: ShardSpec) -> ShardHandle:
        """Start a shard, and do not wait until it is opened."""


class ThreadHandle:
    """A shard in a thread of this process.

    Args:
        spec: What to open.
        open_shard: Opens it.
    """

    def __init__(self, spec: ShardSpec, open_shard: Callable[[ShardSpec], Shard]) -> None:
        self._pool = ThreadPoolExecutor(1, "shard")
        self._shard = self._pool.submit(open_shard, spec)

    def opened(self) -> Future[None]:
        """See `ShardHandle`."""
        return self._pool.submit(self._wait)

    def alive(self) -> Future[None]:
        """See `ShardHandle`."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def search(self, message: PackedRequest) -> Future[ShardHits]:
        """See `ShardHandle`."""
        try:
            return self._pool.submit(lambda: self._shard.result().search(message))
        except RuntimeError as error:
            failed: Future[ShardHits] = Future()
            failed.set_exception(ShardLostError(f"the shard was closed ({error})"))
            return failed

    def close(self) -> None:
        """See `ShardHandle`."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self) -> None:
        self._shard.result()


class ThreadLauncher:
    """Starts shards in threads of this process: for trying out, and for tests.

    Args:
        open_shard: Opens a shard.
    """

    def __init__(self, open_shard: Callable[[ShardSpec], Shard] = Shard) -> None:
        self._open = open_shard

    def message(self, request: PackedRequest) -> PackedRequest:
        """See `ShardLauncher`."""
        return request

    def launch(self, spec: ShardSpec) -> ThreadHandle:
        """See `ShardLauncher`."""
        return ThreadHandle(spec, self._open)
