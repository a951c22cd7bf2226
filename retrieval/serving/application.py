"""The service as an ASGI application: its routes, what they answer, and the OpenAPI schema of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Query, Security
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from quiver.retrieval.records import Document
from quiver.retrieval.serving.changes import Changes
from quiver.retrieval.serving.contract import REFUSALS, bound, refusals
from quiver.retrieval.serving.gate import Gate
from quiver.retrieval.serving.generations import Generation
from quiver.retrieval.serving.hosts import AllowedHosts
from quiver.retrieval.serving.metrics import CONTENT_TYPE
from quiver.retrieval.serving.page import content_security_policy, page_html
from quiver.retrieval.serving.problems import RequestError, answer_problems
from quiver.retrieval.serving.schemas import (
    AddRequest,
    BatchAnswer,
    BatchRequest,
    ChangeAnswer,
    DeleteRequest,
    Info,
    SearchAnswer,
    SearchRequest,
    Status,
    StoredDocument,
)
from quiver.retrieval.serving.searching import search
from quiver.retrieval.serving.service import Service
from quiver.retrieval.versions import installed_version

_bearer = HTTPBearer(auto_error=False, description="The token that quiver serve was started with.")


def create_application(
    service: Service, *, origins: Sequence[str] = (), hosts: AllowedHosts | None = None, poll_seconds: float = 2.0
) -> FastAPI:
    """The application.

    Args:
        service: What it serves.
        origins: Web pages elsewhere that may ask it (CORS); none by default.
        hosts: Which hosts requests may name; None for all, where something in front of the application checks that.
        poll_seconds: From one look for newer generations to the next.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        watching = [asyncio.create_task(served.watch(poll_seconds)) for served in service.indexes]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()

    app = FastAPI(
        title="Quiver",
        version=_version(),
        summary="Search indexes by single vectors, by token vectors and by words.",
        lifespan=lifespan,
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
    )
    routes = Routes(service)
    routes.add_to(app)
    bound(app, service.limits, list(service.retrievers))
    answer_problems(app)
    app.add_middleware(Gate, limits=service.limits, hosts=hosts, metrics=service.metrics, draining=lambda: service.draining)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


class Routes:
    """The pages of the service.

    Args:
        service: What they work with.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._changes = Changes(service.threads, wait=service.limits.lock_seconds)

    def add_to(self, app: FastAPI) -> None:
        """Add them all to an application."""
        add = app.add_api_route
        add("/", self.page, include_in_schema=False)
        add("/api/info", self.info, response_model=Info, responses=REFUSALS, tags=["search"])
        answers = refusals(400, 404, 413, 422, 429, 504)
        add("/api/search", self.search, methods=["POST"], response_model=SearchAnswer, responses=answers, tags=["search"])
        add("/api/search/batch", self.search_batch, methods=["POST"], response_model=BatchAnswer, responses=answers, tags=["search"])
        add("/api/documents/{key:path}", self.document, response_model=StoredDocument, responses=refusals(404, 422), tags=["documents"])
        changing: dict[str, Any] = {
            "response_model": ChangeAnswer,
            "dependencies": [Depends(self.authorised)],
            "tags": ["documents"],
            "responses": refusals(400, 401, 403, 404, 409, 413, 422, 504),
        }
        add("/api/documents", self.add_documents, methods=["POST"], **changing)
        add("/api/documents", self.delete_documents, methods=["DELETE"], **changing)
        add("/healthz", self.healthy, response_model=Status, responses=REFUSALS, tags=["service"])
        add("/readyz", self.ready, response_model=Status, responses=refusals(503), tags=["service"])
        metrics: dict[int | str, dict[str, Any]] = {**REFUSALS, 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
        add("/metrics", self.metrics, response_class=Response, responses=metrics, tags=["service"])

    async def page(self) -> Response:
        """The search page."""
        headers = {"Content-Security-Policy": content_security_policy(), "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return Response(page_html(), headers=headers, media_type="text/html")

    async def info(self) -> Response:
        """What can be searched, how, and within which limits."""
        service = self._service
        retrievers = [retriever.info() for retriever in service.retrievers.values()]
        return _answer(Info(retrievers, service.limits, service.access.writable, _version()))

    async def search(self, request: SearchRequest) -> Response:
        """Search by one query."""
        (found,) = await search(self._service, request)
        return _answer(found)

    async def search_batch(self, request: BatchRequest) -> Response:
        """Search by several queries with the same options."""
        answer = BatchAnswer(await search(self._service, request))
        # It may be megabytes of text, during which others want to be heard.
        return await asyncio.get_running_loop().run_in_executor(self._service.threads, _answer, answer)

    async def document(
        self,
        key: Annotated[str, Path(description="The document's id.", min_length=1)],
        retriever: Annotated[str | None, Query(description="Whose index; by default the first retriever's.")] = None,
    ) -> Response:
        """A document by its id."""
        found = self._service.retriever(retriever)
        generation = found.served.current
        if generation.index.locate([key])[0] is None:
            raise RequestError(404, "unknown_document", f"document {key!r} is not in the index")
        if not generation.index.manifest.policy.store_text:
            return _answer(StoredDocument(key, None, None, None, found.name, generation.number))
        stored = generation.index.document(key)
        metadata = None if stored.metadata is None else dict(stored.metadata)
        return _answer(StoredDocument(key, stored.title, stored.text, metadata, found.name, generation.number))

    async def authorised(self, credentials: Annotated[Any, Security(_bearer)]) -> None:
        """Let those through who have the token."""
        self._service.access.check(None if credentials is None else credentials.credentials)

    async def add_documents(self, request: AddRequest) -> Response:
        """Add documents; searches see them when this is answered."""
        self._check_count(len(request.documents))
        documents = [Document(each.id, each.text, each.title, each.metadata) for each in request.documents]
        found = self._service.retriever(request.retriever)
        changed = await self._within(self._changes.add(found.served, documents, replace=request.replace))
        return _answer(ChangeAnswer(found.name, changed.number, len(changed.index)))

    async def delete_documents(self, request: DeleteRequest) -> Response:
        """Delete documents; searches do not see them any more when this is answered."""
        self._check_count(len(request.ids))
        found = self._service.retriever(request.retriever)
        changed = await self._within(self._changes.delete(found.served, request.ids))
        return _answer(ChangeAnswer(found.name, changed.number, len(changed.index)))

    async def healthy(self) -> Response:
        """Whether the service runs."""
        return _answer(Status("ok"))

    async def ready(self) -> Response:
        """Whether it wants requests; not when it is about to stop."""
        if self._service.draining:
            raise RequestError(503, "draining", "the service is about to stop")
        return _answer(Status("ready"))

    async def metrics(self) -> Response:
        """What is counted and timed, for Prometheus."""
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    def _check_count(self, count: int) -> None:
        if count > (most := self._service.limits.documents):
            raise RequestError(422, "beyond_limit", f"documents of a request: at most {most:,}, got {count:,}")

    async def _within(self, change: Awaitable[Generation]) -> Generation:
        seconds = self._service.limits.write_seconds
        try:
            return await asyncio.wait_for(change, seconds)
        except asyncio.TimeoutError:
            raise RequestError(504, "timeout", f"not done within {seconds:g} seconds; it goes on, look at the index's generation") from None


def _answer(content: Any) -> Response:
    """An answer as JSON; ASCII, so that whatever character a document has can be sent."""
    return Response(json.dumps(asdict(content), allow_nan=False).encode("ascii"), media_type="application/json")


def _version() -> str:
    return installed_version("quiver-retrieval") or "unknown"
