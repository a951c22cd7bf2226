"""Shards as Ray actors, on one machine or on many.

Ray places the actors by the memory that each reserves and spreads them over the nodes; whether one is restarted is decided here and not
by Ray, for a shard has to open its files before it can be asked. Every node needs Quiver, and the index by the same path.

Ray gives an actor one BLAS thread: shards search side by side, and a query is not faster for more.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster import ray_connection
from quiver.retrieval.cluster.handles import ShardLostError
from quiver.retrieval.cluster.messages import PackedRequest, ShardHits
from quiver.retrieval.cluster.shard import Shard, ShardSpec

logger = logging.getLogger(__name__)

# What an actor's process takes beside the index: Python, torch, FAISS and compiled loops.
_PROCESS_BYTES = 450 << 20
# Larger requests are put into Ray's shared memory once; smaller ones travel with the call, which is faster.
_INLINE_BYTES = 64 << 10
_HEALTH = "health"


class ShardActor:
    """What runs in the actor's process. It is opened by a method, so that what is wrong with the index comes back as it was raised."""

    def __init__(self) -> None:
        self._shard: Shard | None = None

    def open(self, spec: ShardSpec) -> None:
        """Open the shard; see `Shard`."""
        self._shard = Shard(spec)

    def search(self, message: PackedRequest) -> ShardHits:
        """See `Shard.search`."""
        if self._shard is None:
            raise ValueError("the shard is searched before it was opened")
        return self._shard.search(message)

    def alive(self) -> None:
        """Say that the process is there; on a thread of its own, whatever the others do."""


class RayHandle:
    """A shard in an actor; see `quiver.retrieval.cluster.handles.ShardHandle`.

    Attributes:
        actor: The actor.
    """

    def __init__(self, actor: Any, spec: ShardSpec) -> None:
        self.actor = actor
        self._opened = actor.open.remote(spec)

    def opened(self) -> Future[None]:
        """See `quiver.retrieval.cluster.handles.ShardHandle`."""
        return _future(self._opened)

    def alive(self) -> Future[None]:
        """See `quiver.retrieval.cluster.handles.ShardHandle`."""
        return _future(self.actor.alive.options(concurrency_group=_HEALTH).remote())

    def search(self, message: Any) -> Future[ShardHits]:
        """See `quiver.retrieval.cluster.handles.ShardHandle`."""
        if not _ray().is_initialized():  # Ray would start a cluster of its own for the call
            gone: Future[ShardHits] = Future()
            gone.set_exception(ShardLostError("the connection to the cluster was closed"))
            return gone
        return _future(self.actor.search.remote(message))

    def close(self) -> None:
        """See `quiver.retrieval.cluster.handles.ShardHandle`."""
        ray = _ray()
        if ray.is_initialized():
            ray.kill(self.actor, no_restart=True)


class RayLauncher:
    """Starts shards in actors of the cluster that this process is connected to.

    Args:
        cpus: Processors that an actor reserves; with 0 only memory decides where it is placed.
        threads: Searches that an actor does at once.

    Raises:
        InputError: Ray is not installed, or this process is not connected.
    """

    def __init__(self, *, cpus: float = 0, threads: int = 4) -> None:
        ray = _connected_ray()
        self._put = ray.put
        # A restart by Ray would be an actor without its shard.
        never = {"max_restarts": 0, "max_task_retries": 0}
        groups = {"concurrency_groups": {_HEALTH: 1}, "max_concurrency": threads}
        self._actors = ray.remote(num_cpus=cpus, scheduling_strategy="SPREAD", **groups, **never)(ShardActor)

    def message(self, request: PackedRequest) -> Any:
        """See `quiver.retrieval.cluster.handles.ShardLauncher`."""
        return request if request.nbytes <= _INLINE_BYTES else self._put(request)

    def launch(self, spec: ShardSpec) -> RayHandle:
        """See `quiver.retrieval.cluster.handles.ShardLauncher`."""
        wanted = spec.bytes + _PROCESS_BYTES
        nodes = [node["Resources"].get("memory", 0) for node in _connected_ray().nodes() if node["Alive"]]
        if max(nodes, default=0) < wanted:
            logger.warning("%s: no machine of the cluster has %s bytes of memory; waiting for one that has", spec, f"{wanted:,}")
        return RayHandle(self._actors.options(memory=wanted).remote(), spec)


def connected(address: str | None = None) -> AbstractContextManager[None]:
    """Be connected to a cluster for a ``with`` block; see `quiver.retrieval.cluster.ray_connection.connected`.

    Raises:
        InputError: Ray is not installed, or there is no cluster at the address.
    """
    return ray_connection.connected(_ray(), address)


def _future(reference: Any) -> Future[Any]:
    """A future of what a reference stands for, with Ray's errors as `ShardLostError`, and others as the shard raised them."""
    answer: Future[Any] = Future()

    def done(finished: Future[Any]) -> None:
        error = finished.exception()
        if error is None:
            answer.set_result(finished.result())
        else:
            answer.set_exception(_translated(error))

    reference.future().add_done_callback(done)
    return answer


def _translated(error: BaseException) -> BaseException:
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, BaseException) else error
    if isinstance(error, RayError):
        lost = ShardLostError((str(error).strip().splitlines() or [type(error).__name__])[0])
        lost.__cause__ = error
        return lost
    return error


def _connected_ray() -> Any:
    ray = _ray()
    if not ray.is_initialized():
        raise InputError("not connected to a Ray cluster; call ray.init(), or use retrieval.sharding.ray_shards.connected")
    return ray


def _ray() -> Any:
    return ray_connection.import_ray("shards on several processes need")
