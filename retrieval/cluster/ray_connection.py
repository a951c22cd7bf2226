"""Ray, imported when it is asked for, and the connection to a cluster."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from quiver.encoder.errors import InputError

# Seconds that a head node is given to answer.
_CONNECT = 5.0


def import_ray(what: str) -> Any:
    """Ray.

    Args:
        what: What needs it, as a sentence begins.

    Raises:
        InputError: It is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise InputError(f"{what} Ray: pip install 'quiver-retrieval[ray]'") from error


def check_reachable(address: str | None) -> None:
    """Say at once that nothing answers at an address: Ray itself tries for a minute.

    Raises:
        InputError: Nothing does, or it is no address.
    """
    if address is None or address in ("auto", "local"):
        return
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise InputError(f"ray: {address!r} is no address; write HOST:PORT, ray://HOST:PORT or auto")
    try:
        socket.create_connection((host, port), timeout=_CONNECT).close()
    except OSError as error:
        raise InputError(f"ray: no cluster at {address} ({error.strerror or error}); start one with: ray start --head") from error


@contextmanager
def connected(ray: Any, address: str | None = None) -> Iterator[None]:
    """Be connected to a cluster for a ``with`` block; a connection that there is already is used and kept.

    Args:
        ray: Ray.
        address: Of the cluster (``HOST:PORT``, ``ray://HOST:PORT`` or ``auto``); None starts one on this machine, which ends with
            the block.

    Raises:
        InputError: There is no cluster at the address, or none starts here.
    """
    if ray.is_initialized():
        yield
        return
    check_reachable(address)
    # Ray would tell its makers of a cluster that it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = {"include_dashboard": False} if address in (None, "local") else {}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except Exception as error:  # of a head node that does not start, Ray raises a bare one
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"ray: no cluster at {address or 'this machine'} ({lines[0]})") from error
    try:
        yield
    finally:
        ray.shutdown()
