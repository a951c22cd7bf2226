"""Workers on the machines of a Ray cluster, one actor each, with a GPU where the cluster has GPUs.

An item is never left to Ray to retry. An actor that Ray restarts (``max_restarts``) waits for room with its call: where a machine is
gone for good and the others are full, that call would wait for ever while other actors are idle. Here the item of a dead actor goes to
the next one that is free, and a new actor is asked for beside it, which takes part as soon as the cluster has room: on a machine that
was added, too.

Source: https://docs.ray.io/en/latest/ray-core/fault_tolerance/actors.html.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.assignments import Assignment, Assignments
from quiver.retrieval.cluster.protocol import Item, Result, Task
from quiver.retrieval.cluster.ray_connection import check_reachable, connected, import_ray
from quiver.retrieval.cluster.worker import Worker, WorkerError

logger = logging.getLogger(__name__)

# Seconds after which a wait for room in the cluster is mentioned.
_MENTION = 60.0
# Actors that die before they have done anything, one after the other, for each worker: a cluster without this package, for example.
_STILLBORN = 3


class RayCluster:
    """Actors on a Ray cluster.

    Args:
        workers: How many; None for as many as the cluster has GPUs, or has room for by its CPUs.
        address: Of the cluster (``HOST:PORT``, ``ray://HOST:PORT`` or ``auto``); None starts one on this machine for the time of a run.

    Raises:
        InputError: Ray is not installed, nothing answers at the address, or there are to be fewer workers than one.
    """

    name = "ray"
    remote = True

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers must be >= 1, got {workers}")
        self._ray = import_ray("the executor ray needs")
        self._workers = workers
        self._address = address
        check_reachable(address)

    def threads(self, here: int) -> int:
        """As many as this process has, which is what an actor asks the cluster for in CPUs."""
        return here

    def run(self, task: Task[Item, Result], items: Iterable[Item], *, threads: int = 1) -> Generator[tuple[Item, Result], None, None]:
        """See `quiver.retrieval.cluster.protocol.Executor`."""
        with connected(self._ray, self._address):
            pool = _Pool(self._ray, task, threads, self._workers)
            try:
                yield from pool.run(Assignments(items))
            finally:
                pool.stop()


class _Pool:
    """The actors of one run."""

    def __init__(self, ray: Any, task: Task[Any, Any], threads: int, workers: int | None) -> None:
        self._ray = ray
        self._task = ray.put(task)
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        # An actor that asks for more than any machine has would wait for ever.
        cpus = min(threads, max([1, *(int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"])]))
        self._wanted = workers or gpus or max(1, int(resources.get("CPU", 1)) // cpus)
        self._actor = ray.remote(Worker).options(num_cpus=cpus, num_gpus=1 if gpus else 0, max_restarts=0, scheduling_strategy="SPREAD")
        self._starting: dict[Any, Any] = {}
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, Assignment[Any]]] = {}
        self._stillborn = 0
        logger.info("ray: %d workers with %d CPUs%s each", self._wanted, cpus, " and a GPU" if gpus else "")

    def run(self, waiting: Assignments[Any]) -> Iterator[tuple[Any, Any]]:
        """Hand out items until all are done."""
        while True:
            while self._idle and (assignment := waiting.take()) is not None:
                actor = self._idle.pop()
                self._busy[actor.attempt.remote(assignment.item)] = (actor, assignment)
            if waiting.waiting:
                self._ask_for_actors()
            elif not self._busy:
                return
            reference = self._next()
            if reference in self._starting:
                self._started(reference)
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

    def _next(self) -> Any:
        """The next call that has ended."""
        while True:
            done, _ = self._ray.wait([*self._starting, *self._busy], num_returns=1, timeout=_MENTION)
            if done:
                return done[0]
            if not self._busy:
                logger.warning("ray: waiting for a node that has room for a worker")

    def _started(self, reference: Any) -> None:
        actor = self._starting.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._stillborn += 1
            if self._stillborn >= _STILLBORN * self._wanted:
                raise WorkerError(f"ray: no worker stays alive: {_first_line(error)}") from error
            return
        self._stillborn = 0
        self._idle.append(actor)

    def _ended(self, reference: Any, waiting: Assignments[Any]) -> Iterator[tuple[Any, Any]]:
        """A call that has ended: the item and its result, or nothing where it goes back."""
        actor, assignment = self._busy.pop(reference)
        try:
            outcome = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            self._ray.kill(actor)  # a defect, or a machine that is broken: a new worker, elsewhere perhaps, has another try
            waiting.put_back(assignment, _first_line(error.cause))
            return
        except self._ray.exceptions.RayError as error:
            waiting.put_back(assignment, _first_line(error))
            return
        self._idle.append(actor)
        if waiting.settle(assignment, outcome):
            yield assignment.item, outcome.result


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
