"""The HTTP server: connections, timeouts, and a graceful shutdown.

After SIGTERM ``/readyz`` fails while requests are still accepted, so that a load balancer can react. Then the server stops accepting
connections and finishes running requests within a grace period.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from quiver.encoder import InputError
from quiver.retrieval.serving.application import create_application
from quiver.retrieval.serving.middleware import own_hosts
from quiver.retrieval.serving.schemas import Problem, problem_body
from quiver.retrieval.serving.service import Service

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Address:
    """Address and shutdown of the service.

    Attributes:
        host: Name or IP address of the interface.
        port: Port; 0 for a free one.
        origins: Origins of web pages that may send requests (CORS).
        hosts: Hosts to accept in addition to those of `quiver.retrieval.serving.middleware.own_hosts`.
        poll_seconds: Interval between checks for a newer generation.
        drain_delay: Time from SIGTERM until connections are refused, in seconds.
        drain_seconds: Grace period for running requests after that, in seconds.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    poll_seconds: float = 2.0
    drain_delay: float = 1.0
    drain_seconds: float = 30.0


_MALFORMED = Problem(
    "malformed_http",
    "this is not HTTP/1.1; an address holds ASCII without spaces: curl -G --data-urlencode 'q=größe' ADDRESS encodes the other characters",
)


class TimeoutProtocol(H11Protocol):  # type: ignore[misc]
    """HTTP/1.1 with time limits for clients: to send a header, and to read a part of a response.

    Uvicorn itself limits only the time between two requests of a connection. `quiver.retrieval.serving.middleware` limits the time to
    send a body.
    """

    timeout_seconds = 10.0
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the header timer."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.timeout_seconds, self._time_out)

    def data_received(self, data: bytes) -> None:
        """Stop the header timer at the end of a header; start it at the beginning of one."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.timeout_seconds, self._time_out)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP as other requests are refused; Uvicorn's own answer is plain text."""
        del msg
        body = problem_body(_MALFORMED)
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        """Start the write timer: the client is not reading."""
        super().pause_writing()
        # close() would wait for the client to read buffered data; abort() does not.
        self._write_timer = self.loop.call_later(self.timeout_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the write timer."""
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop both timers."""
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _time_out(self) -> None:
        self._header_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class Server(uvicorn.Server):  # type: ignore[misc]
    """A Uvicorn server without signal handlers: Uvicorn's own stop at once, and end the process by the signal."""

    def capture_signals(self) -> AbstractContextManager[None]:
        """Leave signals to `handle_signals`."""
        return nullcontext()


def run_service(service: Service, address: Address, *, started: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        service: The service.
        address: Address and shutdown.
        started: Called with the URL when the service listens.

    Raises:
        InputError: The address is in use, or not an address of this machine.
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
    protocol = type("Protocol", (TimeoutProtocol,), {"timeout_seconds": service.limits.read_seconds})
    server = Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            limit_concurrency=service.limits.connections,
            timeout_keep_alive=_whole(service.limits.read_seconds),
            timeout_graceful_shutdown=_whole(address.drain_seconds),
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
    )
    _stop_on_signal(service, server, address.drain_delay)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        started(f"http://{f'[{bound}]' if ':' in bound else bound}:{port}")
    await serving


def _stop_on_signal(service: Service, server: Any, delay: float) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    def drain() -> None:
        if service.draining:  # second signal
            logger.warning("stopping at once")
            server.force_exit = True
            stop()
            return
        logger.warning("shutting down: new connections are refused after %g s, running requests are completed", delay)
        service.draining = True
        loop.call_later(delay, stop)

    handle_signals(loop, drain)


def handle_signals(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call a function in a loop at SIGTERM and SIGINT."""
    for each in _SIGNALS:
        try:
            loop.add_signal_handler(each, call)
        except NotImplementedError:  # event loops of Windows have no signal handlers
            signal.signal(each, lambda number, frame: loop.call_soon_threadsafe(call))


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
        raise InputError(f"{address.host}:{address.port}: cannot listen ({error.strerror}); choose another --port") from error
    return listening


def _whole(seconds: float) -> int:
    """Round up to the whole seconds that Uvicorn takes."""
    return max(1, round(seconds))
