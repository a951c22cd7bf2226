"""The server: connections, signals, and a stop that loses no request.

On SIGTERM readiness says no, and requests go on being answered for a while, in which a load balancer notices; then no connection is
accepted any more, and what has begun is finished, within a time.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from quiver.encoder import InputError
from quiver.retrieval.serving.application import create_application
from quiver.retrieval.serving.hosts import own_hosts
from quiver.retrieval.serving.service import Service

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Address:
    """Where the service listens, and how it stops.

    Attributes:
        host: Name or number of the interface.
        port: 0 for any that is free.
        origins: Web pages elsewhere that may ask it.
        hosts: Hosts that requests may name beside those of `quiver.retrieval.serving.hosts.own_hosts`.
        poll_seconds: From one look for newer generations to the next.
        drain_delay: Seconds from the signal to stop until no connection is accepted any more.
        drain_seconds: Seconds from then on for requests to end.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    poll_seconds: float = 2.0
    drain_delay: float = 1.0
    drain_seconds: float = 30.0


class PatientProtocol(H11Protocol):  # type: ignore[misc]
    """HTTP/1.1 with an end to patience.

    A client has so many seconds from its first byte, or from the connection, to the end of a header, and as many to take what waits for it.
    Uvicorn itself times only connections that are idle between two requests. What is read of a request after its header is timed by
    `quiver.retrieval.serving.gate`.
    """

    patience_seconds = 10.0
    _patience: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for a header."""
        super().connection_made(transport)
        self._patience = self.loop.call_later(self.patience_seconds, self._lose_patience)

    def data_received(self, data: bytes) -> None:
        """Stop waiting when a header is there, begin when a piece of one is."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._be_patient()
        elif self._patience is None and not self.transport.is_closing():
            self._patience = self.loop.call_later(self.patience_seconds, self._lose_patience)

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        # Closing would wait for the client to read what is there; this does not.
        self._unread = self.loop.call_later(self.patience_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting for it."""
        super().resume_writing()
        self._stop_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._be_patient()
        self._stop_unread()
        super().connection_lost(exc)

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _lose_patience(self) -> None:
        self._patience = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def run_service(service: Service, address: Address, *, started: Callable[[str], None]) -> None:
    """Serve until a signal asks for the end.

    Args:
        service: What is served.
        address: Where, and how it stops.
        started: Told the service's URL when it listens.

    Raises:
        InputError: The address is taken, or is none of this machine.
    """
    listening = _listen(address)
    try:
        asyncio.run(_serve(service, address, listening, started))
    finally:
        listening.close()
        service.threads.shutdown(wait=False, cancel_futures=True)


async def _serve(service: Service, address: Address, listening: socket.socket, started: Callable[[str], None]) -> None:
    bound, port = listening.getsockname()[:2]
    hosts = own_hosts(address.host, bound, address.hosts)
    app = create_application(service, origins=address.origins, hosts=hosts, poll_seconds=address.poll_seconds)
    protocol = type("Protocol", (PatientProtocol,), {"patience_seconds": service.limits.read_seconds})
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=service.limits.connections,
            timeout_keep_alive=_whole(service.limits.read_seconds),
            timeout_graceful_shutdown=_whole(address.drain_seconds),
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        # Now, not before: Uvicorn has put handlers of its own there, which stop at once.
        _stop_on_signal(service, server, address.drain_delay)
        started(f"http://{f'[{bound}]' if ':' in bound else bound}:{port}")
    await serving


def _stop_on_signal(service: Service, server: Any, delay: float) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    def drain() -> None:
        if service.draining:  # asked twice
            logger.warning("stopping at once")
            server.force_exit = True
            stop()
            return
        logger.warning("no new connections in %g seconds; requests that have begun are finished", delay)
        service.draining = True
        loop.call_later(delay, stop)

    for each in _SIGNALS:
        loop.add_signal_handler(each, drain)


def _listen(address: Address) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"{address.host}:{address.port}: not an address ({error.strerror})") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
    except OSError as error:
        listening.close()
        raise InputError(f"{address.host}:{address.port}: cannot listen there ({error.strerror}); choose another --port") from error
    return listening


def _whole(seconds: float) -> int:
    """Uvicorn counts in whole seconds."""
    return max(1, round(seconds))
