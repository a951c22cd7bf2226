"""ASGI middleware: allowed hosts, request bodies, and metrics of every request."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quiver.encoder.errors import InputError
from quiver.retrieval.serving.metrics import Metrics
from quiver.retrieval.serving.schemas import Limits, RequestError, problem_answer

ANY = "*"  # matches every host or origin

# Host header: a name, an IPv4 address or an IPv6 address in brackets, with an optional port.
_HEADER = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?::[0-9]*)?")
_NAME = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*\.?")
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[^\s:/?#@\[\]*]+)(?::(?P<port>[0-9]{1,5}))?")
_PORTS = {"http": "80", "https": "443"}  # browsers omit these ports
_LOCAL = ("localhost", "127.0.0.1", "::1")


class AllowedHosts:
    """Checks that the ``Host`` header of a request names this service; the port is ignored, since ports may be forwarded.

    This prevents DNS rebinding: a web page of evil.example can resolve its own name to 127.0.0.1 after it has loaded. For the browser its
    requests then have the same origin, so CORS does not apply, but the ``Host`` header still names evil.example. With ``addresses`` every
    IP address is allowed: one is never resolved, so it cannot be rebound. Source: RFC 9110, sections 7.4 and 15.5.20.
    """

    def __init__(self, names: Iterable[str], *, addresses: bool = False) -> None:
        self._names = frozenset(names)
        self._suffixes = tuple(name.removeprefix(ANY) for name in self._names if name.startswith("*."))
        self._addresses = addresses

    def check(self, header: str | None) -> None:
        """Refuse a request for another host. Browsers always send the header; requests without it are accepted."""
        if header is None or ANY in self._names:
            return
        match = _HEADER.fullmatch(header.strip().lower())
        if match is None:
            raise RequestError(421, "wrong_host", "the Host header of the request is malformed")
        name = (match["address"] or match["name"]).removesuffix(".")
        address = _plain_address(name)
        allowed = name.endswith(self._suffixes) if address is None else self._addresses
        if not (allowed or (address or name) in self._names):
            raise RequestError(421, "wrong_host", f"this service does not answer as {name!r}; start it with --allow-host {name}")


def own_hosts(host: str, bound: str, allowed: Iterable[str] = ()) -> AllowedHosts:
    """Hosts that a service accepts: on a loopback address (``bound``) its names, ``host``, and those that are allowed further.

    On other addresses also the name of this machine and every IP address, because load balancers and orchestrators use addresses that the
    service does not know, such as that of a pod.
    """
    names = {*_LOCAL, bound, host.lower().removesuffix("."), *allowed}
    if ip_address(bound.partition("%")[0]).is_loopback:
        return AllowedHosts(names)
    machine = socket.gethostname().lower()
    return AllowedHosts({*names, machine, machine.partition(".")[0]}, addresses=True)


def host_name(text: str) -> str:
    """Normalize a host name or address.

    Raises:
        InputError: The text is not a host.

    Example:
        >>> host_name("Search.Example.com"), host_name("*.example.com"), host_name("[::1]")
        ('search.example.com', '*.example.com', '::1')
    """
    if (lower := text.strip().lower()) == ANY:
        return lower
    address = _plain_address(lower[1:-1] if lower.startswith("[") and lower.endswith("]") else lower)
    if address is not None:
        return address
    if not _NAME.fullmatch(lower):
        raise InputError(f"--allow-host {text!r}: expected a host without scheme and port, such as search.example.com, *.example.com, or *")
    return lower.removesuffix(".")


def web_origin(text: str) -> str:
    """Normalize an origin to the form that browsers send.

    Raises:
        InputError: The text is not an origin.

    Example:
        >>> web_origin("https://Example.com:443"), web_origin("http://localhost:3000"), web_origin("*")
        ('https://example.com', 'http://localhost:3000', '*')
    """
    lower = text.strip().lower()
    if lower == ANY:
        return lower
    match = _ORIGIN.fullmatch(lower)
    if match is None:
        raise InputError(
            f"--allow-origin {text!r}: expected scheme://host or scheme://host:port without a path, such as https://example.com, or *"
        )
    return lower.removesuffix(f":{match['port']}") if match["port"] == _PORTS.get(match["scheme"]) else lower


def _plain_address(text: str) -> str | None:
    """Normalize an IP address; None if the text is not an IP address."""
    try:
        return str(ip_address(text))
    except ValueError:
        return None


# Limits, in bytes and seconds, for reading the rest of a body that is too large. A client that is still sending when the connection
# is closed would not see the response.
_DISCARDED = 16 << 20
_DISCARDING = 2.0
_CLOSE = {"Connection": "close"}
_AGAIN = {"Retry-After": "1", **_CLOSE}
_BODIES = 32  # times the largest body, which the bodies of all running requests may take
# Methods with a metric label of their own; clients could create any number of others.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ClientGone(Exception):  # noqa: N818 (not an error)
    """The client closed the connection before the response."""


class RequestMiddleware:
    """ASGI middleware: reads the whole body within limits of size and time, checks the host, and records metrics.

    The bodies of all running requests together are limited too. A request whose scope says that its connection is one too many
    (``scope["state"]["refused"]``, set by the server) is refused. Slow headers, and clients that do not read responses, are handled by
    `quiver.retrieval.serving.server`.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits, hosts: AllowedHosts | None, metrics: Metrics, draining: Callable[[], bool]) -> None:
        self._app, self._hosts, self._limits = app, hosts, limits
        self._metrics, self._draining = metrics, draining
        self._held = 0  # bytes of the bodies of running requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, closing, status = time.perf_counter(), self._draining(), list[int]()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
                if closing:
                    message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        with self._metrics.open.track_inprogress():
            try:
                await self._handle(scope, receive, answer)
            except ClientGone:
                status.append(499)  # as in nginx
            finally:
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._metrics.requests.labels(route, method, str(status[0] if status else 500)).inc()
                self._metrics.seconds.labels(route).observe(time.perf_counter() - begun)

    async def _handle(self, scope: Scope, receive: Receive, answer: Send) -> None:
        headers = dict(scope["headers"])
        parts: list[bytes] = []
        try:
            try:
                # The body is read first: a client that is still sending when it is refused would not see the response.
                await asyncio.wait_for(self._read(headers, receive, parts), self._limits.read_seconds)
                if scope.get("state", {}).get("refused"):
                    raise too_many_connections()
                if self._hosts is not None:
                    self._hosts.check(headers[b"host"].decode("latin-1") if b"host" in headers else None)
            except asyncio.TimeoutError:
                message = f"the body was not received within {self._limits.read_seconds:g} seconds"
                await problem_answer(RequestError(408, "too_slow", message, _CLOSE))(scope, receive, answer)
            except RequestError as error:
                await problem_answer(error)(scope, receive, answer)
            else:
                await self._pass_on(scope, b"".join(parts), receive, answer)
        finally:
            self._held -= sum(map(len, parts))

    async def _pass_on(self, scope: Scope, body: bytes, receive: Receive, answer: Send) -> None:
        """Pass a request with its whole body on, until it is answered; cancel it when its client disconnects."""
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            message = next(messages, None)
            return message or await asyncio.get_running_loop().create_future()  # `gone` notices a disconnect

        handling, gone = asyncio.ensure_future(self._app(scope, replay, answer)), asyncio.ensure_future(receive())
        try:
            first: set[asyncio.Future[Any]] = {handling, gone}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not handling.done():
                handling.cancel()
                await asyncio.wait({handling})
                raise ClientGone
            handling.result()
        finally:
            gone.cancel()
            handling.cancel()

    async def _read(self, headers: dict[bytes, bytes], receive: Receive, parts: list[bytes]) -> None:
        """Read the whole body into ``parts``, which are counted as held."""
        limit = self._limits.body_bytes
        too_large_error = RequestError(413, "too_large", f"the body has more than {limit:,} bytes", _CLOSE)
        declared = headers.get(b"content-length", b"0")
        too_large = declared.isdigit() and int(declared[:20]) > limit
        if too_large and b"expect" in headers:  # Expect: 100-continue: nothing has been sent yet
            raise too_large_error
        size, deadline, busy, more = 0, time.monotonic() + _DISCARDING, False, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            too_large, busy = too_large or size > limit, busy or self._held + len(part) > _BODIES * limit
            if too_large or busy:
                self._held -= sum(map(len, parts))
                parts.clear()
                more = more and size <= _DISCARDED and time.monotonic() <= deadline
            else:
                self._held += len(part)
                parts.append(part)
        if too_large:
            raise too_large_error
        if busy:
            raise RequestError(503, "too_busy", "many large requests are being sent; try again in a second", _AGAIN)


def too_many_connections() -> RequestError:
    """Refusal of a request whose connection is beyond the number that the service accepts."""
    return RequestError(503, "too_many_connections", "too many connections are open; try again in a second", _AGAIN)
