"""What every request passes before and after the routes: bodies are read whole, within a size and a time, and everything is counted.

Requests for other hosts are refused here, by `retrieval.serving.hosts`. Slow headers, and clients that do not read their answers, are
the business of `quiver.retrieval.serving.server`.

An ASGI middleware. It knows nothing of searches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from quiver.retrieval.serving.hosts import AllowedHosts
from quiver.retrieval.serving.limits import Limits
from quiver.retrieval.serving.metrics import Metrics
from quiver.retrieval.serving.problems import RequestError, problem_answer

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# What is read of a body that is too large, in bytes and seconds, before it is refused: a client that is still sending when the
# connection is closed loses the answer.
_DISCARDED = 16 << 20
_DISCARDING = 2.0
_CLOSE = {"Connection": "close"}
# What is counted by its name: others are made up by clients, and each would be a time series for ever.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ClientGone(Exception):  # noqa: N818 (no error of ours)
    """The client has closed the connection before it was answered."""


class Gate:
    """The middleware.

    Args:
        app: What is behind it.
        limits: Of a body's size, and of the time it takes to come.
        hosts: Which hosts requests may name; None for all.
        metrics: Told of every request.
        draining: Whether the service is about to stop: connections are closed behind their answers then.
    """

    def __init__(
        self, app: Application, *, limits: Limits, hosts: AllowedHosts | None, metrics: Metrics, draining: Callable[[], bool]
    ) -> None:
        self._app = app
        self._limits = limits
        self._hosts = hosts
        self._metrics = metrics
        self._draining = draining

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, close=self._draining())
        begun = time.perf_counter()
        with self._metrics.open.track_inprogress():
            try:
                await self._handle(scope, receive, answer)
            except ClientGone:
                answer.status = answer.status or 499  # what nginx calls it
            finally:
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._metrics.requests.labels(route, method, str(answer.status or 500)).inc()
                self._metrics.seconds.labels(route).observe(time.perf_counter() - begun)

    async def _handle(self, scope: MutableMapping[str, Any], receive: Receive, answer: _Answer) -> None:
        headers = dict(scope["headers"])
        try:
            # The body first: a client that is still sending when it is refused may lose the answer.
            body = await self._body(headers, receive)
            if self._hosts is not None:
                self._hosts.check(headers[b"host"].decode("latin-1") if b"host" in headers else None)
        except RequestError as error:
            await problem_answer(error)(scope, receive, answer.send)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                await asyncio.get_running_loop().create_future()  # that the client is gone is seen below
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await _while_connected(asyncio.ensure_future(self._app(scope, replay, answer.send)), receive)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body.

        Raises:
            RequestError: 413: it is too large; 408: it does not come.
            ClientGone: It never will.
        """
        try:
            return await asyncio.wait_for(self._read(headers, receive), self._limits.read_seconds)
        except asyncio.TimeoutError:
            message = f"the body was not there within {self._limits.read_seconds:g} seconds"
            raise RequestError(408, "too_slow", message, _CLOSE) from None

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._limits.body_bytes
        declared = headers.get(b"content-length", b"0")
        too_large = declared.isdigit() and int(declared[:20]) > limit
        if too_large and b"expect" in headers:  # it waits for our word before it sends anything
            raise _too_large(limit)
        parts: list[bytes] = []
        size, deadline = 0, time.monotonic() + _DISCARDING
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            too_large = too_large or size > limit
            if too_large:
                parts.clear()
            else:
                parts.append(part)
            if not message.get("more_body", False):
                break
            if too_large and (size > _DISCARDED or time.monotonic() > deadline):
                break
        if too_large:
            raise _too_large(limit)
        return b"".join(parts)


class _Answer:
    """The way back, which notes the status.

    Args:
        send: Sends a message.
        close: Close the connection behind it.
    """

    def __init__(self, send: Send, *, close: bool) -> None:
        self._send = send
        self._close = close
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._close:
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
        await self._send(message)


async def _while_connected(handling: asyncio.Future[None], receive: Receive) -> None:
    """Wait for the answer to be sent, and give up when the client is gone: nobody would read it."""
    gone = asyncio.ensure_future(receive())
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


def _too_large(limit: int) -> RequestError:
    return RequestError(413, "too_large", f"the body has more than {limit:,} bytes", _CLOSE)
