"""The HTTP server: connections, timeouts, and a graceful shutdown.

After SIGTERM ``/readyz`` fails while requests are still accepted, so that a load balancer can react. Then the server stops accepting
connections and finishes running requests within a grace period.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from quiver.encoder import InputError
from quiver.retrieval.serving.application import create_application
from quiver.retrieval.serving.middleware import own_hosts, too_many_connections
from quiver.retrieval.serving.schemas import RequestError, problem_body
from quiver.retrieval.serving.service import Service

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Address and shutdown of the service."""

    host: str = "127.0.0.1"  # name or IP address of the interface
    port: int = 8080  # port; 0 for a free one
    origins: Sequence[str] = ()  # origins of web pages that may send requests (CORS)
    hosts: Sequence[str] = ()  # hosts to accept in addition to those of `quiver.retrieval.serving.middleware.own_hosts`
    poll_seconds: float = 2.0  # interval between checks for a newer generation
    drain_delay: float = 1.0  # time from SIGTERM until connections are refused, in seconds
    drain_seconds: float = 30.0  # grace period for running requests after that, in seconds


_MALFORMED = RequestError(
    400,
    "malformed_http",
    "this is not HTTP/1.1; an address holds ASCII without spaces: curl -G --data-urlencode 'q=größe' ADDRESS encodes the other characters",
)

_BACKLOG = 32  # connections that are accepted in one turn of the event loop
_QUEUE = 1024  # connections that wait in the system until they are accepted
_SPARE_FILES = 64  # for the files of a newer generation, beside as many as are open
_MINUTE = 60.0  # seconds between two lines in the log about connections
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connections:
    """How many connections may be open: as many as wanted, but fewer than the files that this process may still open.

    A connection beyond ``most`` is refused when it has sent its request, so that its client sees the answer; one beyond ``limit`` at once.

    Raises:
        InputError: There are not enough files.
    """

    def __init__(self, wanted: int, files: int) -> None:
        # Four turns of the event loop pass from accepting connections until those that are one too many are closed.
        room = files - 4 * _BACKLOG
        if room < _BACKLOG:
            needed = 5 * _BACKLOG - files
            raise InputError(f"this process may open too few files to serve connections; allow {needed} more, such as with ulimit -n 1024")
        self.most = min(wanted, room - room // 8)
        self.limit = min(room, self.most + max(_BACKLOG, self.most // 4))
        self._reported = -_MINUTE

    def report(self, problem: str) -> None:
        """Log that connections are refused, once a minute."""
        if time.monotonic() >= self._reported + _MINUTE:
            self._reported = time.monotonic()
            logger.warning(
                "%s; requests beyond %d connections are answered with status 503. --max-connections and the limit on open files (ulimit -n)"
                " allow more",
                problem,
                self.most,
            )

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error of an event loop: no file is left for a connection, for which asyncio logs a traceback each time."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _EXHAUSTED and "socket" in context:
            self.report("no file descriptor is left for another connection")
        else:
            loop.default_exception_handler(context)


def free_files() -> int:
    """Number of files that this process may still open, without those that it will need for a newer generation."""
    if sys.platform == "win32":
        return 1 << 20
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        opened = len(list(Path("/dev/fd").iterdir()))
    except OSError:
        opened = 128
    return allowed - 2 * opened - _SPARE_FILES


class TimeoutProtocol(H11Protocol):  # type: ignore[misc]
    """HTTP/1.1 with limits for clients: on the time to send a header and to read a part of a response, and on their number.

    Uvicorn itself limits only the time between two requests of a connection. `quiver.retrieval.serving.middleware` limits the time to
    send a body.
    """

    timeout_seconds = 10.0
    allowed: Connections
    app_state: dict[str, Any]
    _timers: dict[str, asyncio.TimerHandle]

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the header timer, or refuse a connection that is one too many."""
        self._timers = {}
        super().connection_made(transport)
        opened, seconds = len(self.connections), self.timeout_seconds
        if opened > self.allowed.most:
            self.allowed.report(f"{opened:,} connections are open")
            if opened > self.allowed.limit:
                self._refuse(too_many_connections())
                return
            self.app_state = {**self.app_state, "refused": True}
            seconds = min(seconds, 1.0)
        self._timers["header"] = self.loop.call_later(seconds, self._time_out)

    def data_received(self, data: bytes) -> None:
        """Stop the header timer at the end of a header; start it at the beginning of one."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("header")
        elif "header" not in self._timers and not self.transport.is_closing():
            self._timers["header"] = self.loop.call_later(self.timeout_seconds, self._time_out)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP as other requests are refused; Uvicorn's own answer is plain text."""
        del msg
        self._refuse(_MALFORMED)

    def _refuse(self, error: RequestError) -> None:
        """Answer without a request, and close the connection."""
        body, reason = problem_body(error.problem), HTTPStatus(error.status).phrase.encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers, "Connection": "close"}
        response = h11.Response(status_code=error.status, headers=list(headers.items()), reason=reason)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        """Start the write timer: the client is not reading."""
        super().pause_writing()
        # close() would wait for the client to read buffered data; abort() does not.
        self._timers["write"] = self.loop.call_later(self.timeout_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the write timer."""
        super().resume_writing()
        self._stop("write")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop both timers."""
        self._stop("header")
        self._stop("write")
        super().connection_lost(exc)

    def _stop(self, timer: str) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()

    def _time_out(self) -> None:
        del self._timers["header"]
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class Server(uvicorn.Server):  # type: ignore[misc]
    """A Uvicorn server without signal handlers: Uvicorn's own stop at once, and end the process by the signal."""

    def capture_signals(self) -> AbstractContextManager[None]:
        """Leave signals to `handle_signals`."""
        return nullcontext()


def run_service(service: Service, address: Address, *, started: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; ``started`` is called with the URL when the service listens.

    Raises:
        InputError: The address is in use, or not an address of this machine.
    """
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
    try:
        asyncio.run(_serve(service, address, listening, started))
    finally:
        listening.close()
        service.threads.shutdown(wait=False, cancel_futures=True)


async def _serve(service: Service, address: Address, listening: socket.socket, started: Callable[[str], None]) -> None:
    bound, port = listening.getsockname()[:2]
    hosts = own_hosts(address.host, bound, address.hosts)
    app = create_application(service, origins=address.origins, hosts=hosts, poll_seconds=address.poll_seconds)
    allowed = Connections(service.limits.connections, free_files())
    protocol = type("Protocol", (TimeoutProtocol,), {"timeout_seconds": service.limits.read_seconds, "allowed": allowed})
    server = Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            backlog=_BACKLOG,
            timeout_keep_alive=max(1, round(service.limits.read_seconds)),
            timeout_graceful_shutdown=max(1, round(address.drain_seconds)),
            log_config=None,
            log_level="error",  # its warnings are a line for every request that is not HTTP
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
    )
    loop = asyncio.get_running_loop()

    def drain() -> None:
        if service.draining:  # second signal
            logger.warning("stopping at once")
            server.force_exit = server.should_exit = True
            return
        logger.warning("shutting down: new connections are refused after %g s, running requests are completed", address.drain_delay)
        service.draining = True
        loop.call_later(address.drain_delay, setattr, server, "should_exit", True)

    handle_signals(loop, drain)
    loop.set_exception_handler(allowed.handle)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        listening.listen(_QUEUE)  # asyncio has one number for this and for the connections of a turn
        started(f"http://{f'[{bound}]' if ':' in bound else bound}:{port}")
    await serving


def handle_signals(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call a function in a loop at SIGTERM and SIGINT."""
    for each in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(each, call)
        except NotImplementedError:  # event loops of Windows have no signal handlers
            signal.signal(each, lambda number, frame: loop.call_soon_threadsafe(call))
