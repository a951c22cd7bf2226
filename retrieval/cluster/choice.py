"""The executors by name, for a command line."""

from __future__ import annotations

from collections.abc import Callable

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.in_process import HERE
from quiver.retrieval.cluster.processes import LocalProcesses
from quiver.retrieval.cluster.protocol import Executor


def _local(workers: int | None, address: str | None) -> Executor:
    if address is not None:
        raise InputError("an address is of a Ray cluster: add --executor ray, or leave --address away")
    return HERE if workers in (None, 1) else LocalProcesses(workers or 0)


def _ray(workers: int | None, address: str | None) -> Executor:
    from quiver.retrieval.cluster.ray_cluster import RayCluster

    return RayCluster(workers, address)


EXECUTORS: dict[str, Callable[[int | None, str | None], Executor]] = {"local": _local, "ray": _ray}
"""Name -> made from a number of workers and an address."""


def open_executor(name: str = "local", *, workers: int | None = None, address: str | None = None) -> Executor:
    """An executor by name.

    Args:
        name: A key of `EXECUTORS`.
        workers: How many; None for what suits it: this process alone, which is what one local worker is too, or all of a cluster.
        address: Of a Ray cluster; None starts one on this machine.

    Raises:
        InputError: There is no such executor, what it needs is not installed, nothing answers at the address, or workers < 1.
    """
    if name not in EXECUTORS:
        raise InputError(f"executor {name!r}: there is none of that name; there are {', '.join(EXECUTORS)}")
    return EXECUTORS[name](workers, address)
