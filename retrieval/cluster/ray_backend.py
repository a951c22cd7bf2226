"""Ray: the connection to a cluster, an executor whose workers are actors, and shards in actors.

Workers and shards are replaced here and not by Ray's ``max_restarts``. A restarted actor waits for room together with its call: if a
machine is gone for good and the others are full, the call would wait for ever while other actors are idle. And a restarted shard would
have to open its files before it can be searched. Here the item of a dead worker goes to the next free one, and a search to another replica.

Every node needs Quiver, and models and indexes under the same paths.

Source: https://docs.ray.io/en/latest/ray-core/fault_tolerance/actors.html.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from quiver.encoder.errors import InputError, first_line
from quiver.encoder.progress import Advance
from quiver.retrieval.cluster.executors import Assignment, Assignments, Worker, WorkerError
from quiver.retrieval.cluster.shard import PackedRequest, Shard, ShardHits, ShardLostError, ShardSpec
from quiver.retrieval.records import Item, Result, WorkerTask

logger = logging.getLogger(__name__)


_CONNECT = 5.0  # time limit for a head node to answer, in seconds


def import_ray() -> Any:
    """Import Ray.

    Raises:
        InputError: It is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise InputError("Ray is not installed; run: pip install 'quiver-retrieval[ray]'") from error


def check_reachable(address: str | None) -> None:
    """Check that a cluster answers at an address; Ray itself would try for a minute.

    Raises:
        InputError: Nothing answers, or the address is malformed.
    """
    if address is None or address in ("auto", "local"):
        return
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise InputError(f"ray: {address!r} is not an address; write HOST:PORT, ray://HOST:PORT or auto")
    try:
        socket.create_connection((host, port), timeout=_CONNECT).close()
    except OSError as error:
        raise InputError(f"ray: no cluster at {address} ({error.strerror or error}); start one with: ray start --head") from error


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Connect to a cluster for a ``with`` block. An existing connection is used and kept.

    Args:
        address: Address of the cluster: ``HOST:PORT``, ``ray://HOST:PORT`` or ``auto``; None starts one on this machine for the block.

    Raises:
        InputError: Ray is not installed, or there is no cluster at the address, or none can be started.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    check_reachable(address)
    # No usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = {"include_dashboard": False} if address in (None, "local") else {}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except Exception as error:  # Ray raises a bare Exception if a head node does not start
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"ray: no cluster at {address or 'this machine'} ({lines[0]})") from error
    try:
        yield
    finally:
        ray.shutdown()


_LOG_WAITING = 60.0  # seconds of waiting for room in the cluster before it is logged
_STEPS, _STEPS_SECONDS = "steps", 1.0  # group of the calls that ask a busy actor for its steps, and their interval
_STILLBORN = 3  # consecutive actors per worker that may die before their first item, such as on a cluster without Quiver


class RayCluster:
    """Executor on a Ray cluster: one actor per worker, with a GPU each if the cluster has GPUs.

    Args:
        workers: Number of workers; None for one per GPU, or without GPUs as many as the CPUs allow.
        address: Address of the cluster; None starts one on this machine for the time of a run.

    Raises:
        InputError: Ray is not installed, nothing answers at the address, or workers < 1.
    """

    name = "ray"
    remote = True

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers must be >= 1, got {workers}")
        self._ray = import_ray()
        self._workers = workers
        self._address = address
        check_reachable(address)

    def threads(self, here: int) -> int:
        """Return the threads of this process; an actor reserves as many CPUs."""
        return here

    def run(
        self,
        task: WorkerTask[Item, Result],
        items: Iterable[Item],
        *,
        threads: int = 1,
        advance: Advance = lambda steps: None,
    ) -> Generator[tuple[Item, Result], None, None]:
        """See `quiver.retrieval.records.Executor`."""
        with connected(self._address):
            pool = _Pool(self._ray, task, threads, self._workers)
            try:
                yield from pool.run(Assignments(items, advance))
            finally:
                pool.stop()


class _Pool:
    """Actors of one run."""

    def __init__(self, ray: Any, task: WorkerTask[Any, Any], threads: int, workers: int | None) -> None:
        self._ray = ray
        self._task = ray.put(task)
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        # An actor that reserves more CPUs than any machine has would wait for ever.
        cpus = min(threads, max([1, *(int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"])]))
        self._wanted = workers or gpus or max(1, int(resources.get("CPU", 1)) // cpus)
        reserved = {"num_cpus": cpus, "num_gpus": 1 if gpus else 0, "scheduling_strategy": "SPREAD"}
        self._actor = ray.remote(max_restarts=0, concurrency_groups={_STEPS: 1}, **reserved)(Worker)
        self._starting: dict[Any, Any] = {}
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, Assignment[Any]]] = {}
        self._counting: dict[Any, Any] = {}  # call for the steps of an attempt -> the attempt, a key of _busy
        self._stillborn = 0
        logger.info("ray: %d workers with %d CPUs%s each", self._wanted, cpus, " and a GPU" if gpus else "")

    def run(self, waiting: Assignments[Any]) -> Iterator[tuple[Any, Any]]:
        """Assign items until all are done."""
        while True:
            while self._idle and (assignment := waiting.take()) is not None:
                actor = self._idle.pop()
                self._busy[attempt := actor.attempt.remote(assignment.item)] = (actor, assignment)
                self._ask_for_steps(attempt)
            if waiting.waiting:
                self._ask_for_actors()
            elif not self._busy:
                return
            reference = self._next()
            if reference in self._starting:
                self._started(reference)
            elif reference in self._counting:
                self._counted(reference, waiting)
            else:
                yield from self._ended(reference, waiting)

    def stop(self) -> None:
        """End all actors."""
        for actor in [*self._idle, *self._starting.values(), *(actor for actor, _ in self._busy.values())]:
            self._ray.kill(actor)

    def _ask_for_actors(self) -> None:
        while len(self._busy) + len(self._starting) + len(self._idle) < self._wanted:
            actor = self._actor.remote(self._task)
            self._starting[actor.ready.remote()] = actor

    def _ask_for_steps(self, attempt: Any) -> None:
        actor, _ = self._busy[attempt]
        self._counting[actor.steps.options(concurrency_group=_STEPS).remote(_STEPS_SECONDS)] = attempt

    def _counted(self, reference: Any, waiting: Assignments[Any]) -> None:
        """Count the steps of an attempt that is still running, and ask again."""
        attempt = self._counting.pop(reference)
        if attempt not in self._busy:
            return
        _, assignment = self._busy[attempt]
        try:
            steps = self._ray.get(reference)
        except self._ray.exceptions.RayError:  # as the attempt itself will report
            return
        waiting.count(assignment, max(steps, assignment.steps))  # an attempt that has just ended has 0
        self._ask_for_steps(attempt)

    def _next(self) -> Any:
        """Wait for the next call to end."""
        while True:
            done, _ = self._ray.wait([*self._starting, *self._busy, *self._counting], num_returns=1, timeout=_LOG_WAITING)
            if done:
                return done[0]
            if not self._busy:
                logger.warning("ray: waiting for a node with enough free CPUs and GPUs for a worker")

    def _started(self, reference: Any) -> None:
        actor = self._starting.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._stillborn += 1
            if self._stillborn >= _STILLBORN * self._wanted:
                raise WorkerError(f"ray: no worker stays alive: {type(error).__name__}: {first_line(error)}") from error
            return
        self._stillborn = 0
        self._idle.append(actor)

    def _ended(self, reference: Any, waiting: Assignments[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the item and result of a finished call, or assign its item again."""
        actor, assignment = self._busy.pop(reference)
        try:
            outcome = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            self._ray.kill(actor)  # a bug or a broken machine: try again with a new worker, perhaps on another machine
            waiting.put_back(assignment, f"{type(error.cause).__name__}: {first_line(error.cause)}")
            return
        except self._ray.exceptions.RayError as error:
            waiting.put_back(assignment, f"{type(error).__name__}: {first_line(error)}")
            return
        self._idle.append(actor)
        if waiting.settle(assignment, outcome):
            yield assignment.item, outcome.result


_PROCESS_BYTES = 450 << 20  # memory of an actor without the index: Python, torch, FAISS and compiled kernels
_INLINE_BYTES = 64 << 10  # larger requests go through Ray's shared memory; for smaller ones passing them with the call is faster
_HEALTH = "health"


class ShardActor:
    """Actor that holds a shard. A method opens the shard, so that errors of the index reach the caller unchanged."""

    def __init__(self) -> None:
        self._shard: Shard | None = None

    def open(self, spec: ShardSpec) -> None:
        """Open the shard; see `Shard`."""
        self._shard = Shard(spec)

    def search(self, message: PackedRequest) -> ShardHits:
        """See `Shard.search`."""
        if self._shard is None:
            raise ValueError("the shard was searched before it was opened")
        return self._shard.search(message)

    def alive(self) -> None:
        """Answer a health check, on a thread of its own."""


class RayHandle:
    """Handle of a shard in an actor.

    Attributes:
        actor: The actor.
    """

    def __init__(self, actor: Any, spec: ShardSpec) -> None:
        self.actor = actor
        self._opened = actor.open.remote(spec)

    def opened(self) -> Future[None]:
        """See `ShardHandle`."""
        return _future(self._opened)

    def alive(self) -> Future[None]:
        """See `ShardHandle`."""
        return _future(self.actor.alive.options(concurrency_group=_HEALTH).remote())

    def search(self, message: Any) -> Future[ShardHits]:
        """See `ShardHandle`."""
        if not import_ray().is_initialized():  # otherwise Ray would start a cluster for the call
            gone: Future[ShardHits] = Future()
            gone.set_exception(ShardLostError("the connection to the cluster was closed"))
            return gone
        return _future(self.actor.search.remote(message))

    def close(self) -> None:
        """See `ShardHandle`."""
        ray = import_ray()
        if ray.is_initialized():
            ray.kill(self.actor, no_restart=True)


class RayLauncher:
    """Starts shards in actors of the connected cluster.

    Ray places actors by the memory that each reserves, spread over the nodes. It gives an actor one BLAS thread: shards search in
    parallel, and a single query is not faster with more.

    Args:
        cpus: CPUs that an actor reserves; with 0 only memory decides the placement.
        threads: Number of searches that an actor runs at the same time.

    Raises:
        InputError: Ray is not installed, or this process is not connected.
    """

    def __init__(self, *, cpus: float = 0, threads: int = 4) -> None:
        ray = _connected_ray()
        self._put = ray.put
        never = {"max_restarts": 0, "max_task_retries": 0}
        groups = {"concurrency_groups": {_HEALTH: 1}, "max_concurrency": threads}
        self._actors = ray.remote(num_cpus=cpus, scheduling_strategy="SPREAD", **groups, **never)(ShardActor)

    def message(self, request: PackedRequest) -> Any:
        """See `ShardLauncher`."""
        return request if request.nbytes <= _INLINE_BYTES else self._put(request)

    def launch(self, spec: ShardSpec) -> RayHandle:
        """See `ShardLauncher`."""
        wanted = spec.bytes + _PROCESS_BYTES
        nodes = [node["Resources"].get("memory", 0) for node in _connected_ray().nodes() if node["Alive"]]
        if max(nodes, default=0) < wanted:
            logger.warning("%s: no machine of the cluster has %s bytes of memory; waiting for one", spec, f"{wanted:,}")
        return RayHandle(self._actors.options(memory=wanted).remote(), spec)


def _future(reference: Any) -> Future[Any]:
    """Convert an object reference to a future. Errors of Ray become `ShardLostError`; errors of the shard stay unchanged."""
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
    ray = import_ray()
    if not ray.is_initialized():
        raise InputError("not connected to a Ray cluster; call ray.init(), or use quiver.retrieval.cluster.ray_backend.connected")
    return ray
