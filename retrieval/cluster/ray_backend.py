"""Ray: the connection to a cluster, and an executor whose items are Ray tasks.

A task runs in any free process of the cluster, which keeps what the first item has loaded for the next one. The item of a lost process or
machine is given out again. Every node needs Quiver, and models and indexes under the same paths.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from quiver.encoder.errors import InputError, first_line
from quiver.encoder.progress import Advance
from quiver.retrieval.cluster.executors import Assignment, Assignments, Outcome, Worker
from quiver.retrieval.records import Item, Result, WorkerTask

logger = logging.getLogger(__name__)

_CONNECT = 5.0  # time limit for a head node to answer, in seconds


def import_ray() -> Any:
    """Import Ray; an InputError if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise InputError("Ray is not installed; run: pip install 'quiver-retrieval[ray]'") from error


def check_reachable(address: str | None) -> None:
    """Check that a cluster answers at an address, for which Ray itself would try for a minute; an InputError if not."""
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
    # No usage statistics, and no log of Ray Serve in this process.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
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


def connected_ray() -> Any:
    """Return Ray, which is connected to a cluster; an InputError if it is not, or not installed."""
    ray = import_ray()
    if not ray.is_initialized():
        raise InputError("not connected to a Ray cluster; call ray.init(), or use quiver.retrieval.cluster.ray_backend.connected")
    return ray


_LOG_WAITING = 60.0  # seconds without a result after which it is logged


class RayCluster:
    """Executor on a Ray cluster: items are tasks, each with CPUs of its own, and a GPU if the cluster has GPUs.

    Args:
        workers: Number of items at the same time; None for one per GPU, or without GPUs as many as the CPUs allow.
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
        """Return the threads of this process; a task reserves as many CPUs."""
        return here

    def run(
        self, task: WorkerTask[Item, Result], items: Iterable[Item], *, threads: int = 1, advance: Advance = lambda steps: None
    ) -> Generator[tuple[Item, Result], None, None]:
        """See `quiver.retrieval.records.Executor`."""
        with connected(self._address):
            ray, waiting = self._ray, Assignments(items, advance)
            resources, machines = ray.cluster_resources(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
            # A task that reserves more CPUs than any machine has would wait for ever.
            cpus, gpus = min(threads, max([1, *(int(each.get("CPU", 1)) for each in machines)])), int(resources.get("GPU", 0))
            wanted = self._workers or gpus or max(1, int(resources.get("CPU", 1)) // cpus)
            logger.info("ray: %d tasks with %d CPUs%s each", wanted, cpus, " and a GPU" if gpus else "")
            reserved = {"num_cpus": cpus, "num_gpus": 1 if gpus else 0, "scheduling_strategy": "SPREAD"}
            # Retries are those of all executors. Processes are kept for the next item, those with a GPU too.
            remote = ray.remote(max_retries=0, max_calls=0, **reserved)(run_item)
            shared, run, busy = ray.put(task), uuid.uuid4().hex, dict[Any, Assignment[Item]]()
            try:
                while True:
                    while len(busy) < wanted and (assignment := waiting.take()) is not None:
                        busy[remote.remote(shared, run, assignment.item)] = assignment
                    if not busy:
                        return
                    done, _ = ray.wait(list(busy), timeout=_LOG_WAITING)
                    if not done:
                        logger.warning("ray: waiting for results, or for a node with enough free CPUs and GPUs for a task")
                    for reference in done:
                        assignment = busy.pop(reference)
                        outcome = self._get_outcome(reference)
                        if waiting.settle(assignment, outcome):
                            yield assignment.item, outcome.result
            finally:
                for reference in busy:
                    ray.cancel(reference, force=True)

    def _get_outcome(self, reference: Any) -> Outcome:
        """The outcome of a task; that of a bug, or of a lost process or machine, is to be tried again, perhaps on another machine."""
        try:
            outcome: Outcome = self._ray.get(reference)
            return outcome
        except self._ray.exceptions.RayTaskError as error:
            return Outcome(None, f"{type(error.cause).__name__}: {first_line(error.cause)}", again=True)
        except self._ray.exceptions.RayError as error:
            return Outcome(None, f"{type(error).__name__}: {first_line(error)}", again=True)


_opened: dict[str, Worker] = {}  # in a process of the cluster: the run that it has worked for, with what is loaded


def run_item(task: WorkerTask[Any, Any], run: str, item: Any) -> Outcome:
    """Run an item in a process of the cluster; the items of a run share what the first one has loaded."""
    worker = _opened.pop(run, None) or Worker(task)
    _opened.clear()
    outcome = worker.attempt(item)
    _opened[run] = worker  # not after an unexpected exception: the next item loads everything again
    return outcome
