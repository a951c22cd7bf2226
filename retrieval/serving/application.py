"""The ASGI application: routes, searches, explanations, and the OpenAPI schema."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Query, Security
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.retrieval.index import DamagedIndexError, Filter
from quiver.retrieval.models.bm25 import describe_wordless
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.records import Document, Group
from quiver.retrieval.search.explain import Explanation, Token, text_tokens
from quiver.retrieval.search.retrievers import Explained, SharedModel
from quiver.retrieval.search.search import describe_nothing_found
from quiver.retrieval.serving.indexes import Generation
from quiver.retrieval.serving.inference import (
    AnyRerankBody,
    AnyTextsBody,
    EmbedBody,
    EmbeddingsAnswer,
    EmbeddingsBody,
    ModelList,
    RerankAnswer,
    RerankBody,
    RerankRequest,
    ServedModel,
    TextModels,
    TextRank,
    TextsRequest,
)
from quiver.retrieval.serving.metrics import CONTENT_TYPE
from quiver.retrieval.serving.middleware import AllowedHosts, RequestMiddleware
from quiver.retrieval.serving.page import content_security_policy, page_html
from quiver.retrieval.serving.retrievers import QueryBatch, RankedQueries, SearchOptions, ServedRetriever, Snapshot
from quiver.retrieval.serving.schemas import (
    AddRequest,
    BatchAnswer,
    BatchRequest,
    Bounded,
    ChangeAnswer,
    DeleteRequest,
    Effort,
    ErrorAnswer,
    FacetValue,
    FieldFacet,
    Hit,
    HitExplanation,
    Info,
    Limits,
    List,
    Meeting,
    Milliseconds,
    NonBlankText,
    PartRank,
    RequestError,
    SearchAnswer,
    SearchRequest,
    Status,
    StoredDocument,
    Text,
    TokenSpan,
    WordPart,
    answer_problems,
    describe_unknown,
    json_body,
)
from quiver.retrieval.serving.service import Service

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": meaning}
    for status, meaning in {
        400: "The body is not JSON.",
        401: "The token is missing or wrong.",
        403: "The service is read-only.",
        404: "No such retriever, model or document.",
        408: "The request was not received in time.",
        409: "The index cannot be changed this way, or another process is writing.",
        413: "The body is too large.",
        415: "The body has no header Content-Type: application/json.",
        421: "The Host header names another host.",
        422: "The request violates the schema or a limit, or cannot be executed.",
        429: "Too many queries are waiting; the header Retry-After says for how many seconds.",
        500: "Internal error.",
        503: "The service is shutting down, or too many connections are open.",
        504: "The time limit has passed.",
        507: "The disk of the index is full; the index is as before.",
    }.items()
}
"""Error responses of the routes, for the OpenAPI schema."""


def explanations(
    retriever: ServedRetriever, ranked: RankedQueries, number: int, query: str, documents: Sequence[str]
) -> list[HitExplanation]:
    """Explain the scores of documents that a retriever found for the query of a number; one explanation per document, in order."""
    run, lists, candidates = ranked.hits.ranking(number), ranked.hits.lists, ranked.hits.candidates
    places = {part: _places(lists[part].ranking(number)) for part in lists}
    if candidates is not None:
        places["candidates"] = _places(candidates.ranking(number))
    parts = {key: [PartRank(part, *there.get(key, (None, None))) for part, there in places.items()] for key in documents}
    if retriever.kind == "fused":
        return [HitExplanation("ranks", run[key], parts=parts[key]) for key in documents]
    snapshot = ranked.snapshot
    explained = snapshot.retriever.explain(query, documents)
    return [_explanation(next(iter(explained[key].values())), snapshot.model, parts[key]) for key in documents]


def _places(ranking: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """Rank and score of each document."""
    return {key: (rank, ranking[key]) for rank, key in enumerate(ranking, start=1)}


def _explanation(why: Explained, model: SharedModel | None, parts: list[PartRank]) -> HitExplanation:
    if not isinstance(why, Explanation):
        words = [WordPart(word.word, word.score) for word in why]
        return HitExplanation("words", math.fsum(word.score for word in why), words=words, parts=parts)
    score = why.score if math.isfinite(why.score) else None  # -inf, the score of a text without vectors, is not valid JSON
    if model is None or not isinstance(model.model, ColBERT):
        return HitExplanation("similarity", score, why.text, parts=parts)
    passage = text_tokens(model, why.text or "", "document")
    positions: dict[Token, int] = {}
    for position, token in enumerate(passage):
        positions.setdefault(token, position)
    return HitExplanation(
        "tokens",
        score,
        why.text,
        query=[TokenSpan(*match.query) for match in why.matches],
        passage=[TokenSpan(*token) for token in passage],
        matches=[Meeting(row, positions[match.document], match.similarity) for row, match in enumerate(why.matches)],
        parts=parts,
    )


async def search(service: Service, request: SearchRequest | BatchRequest) -> list[SearchAnswer]:
    """Search, and return one answer per query."""
    begun = time.perf_counter()
    queries = (request.query,) if isinstance(request, SearchRequest) else tuple(request.queries)
    check_limits(request, queries, service.limits)
    retriever = service.retriever(request.retriever)
    most, depth = retriever.depth, (request.offset or 0) + request.k
    if most is not None and depth > most:
        raise RequestError(422, "beyond_limit", f"offset + k: {retriever.name} re-ranks {most:,} candidates, got {depth:,}")
    try:
        return await asyncio.wait_for(_answers(service, retriever, request, queries, begun), service.limits.seconds)
    except asyncio.TimeoutError:
        raise RequestError(504, "timeout", f"the search took longer than {service.limits.seconds:g} seconds") from None


def check_limits(request: SearchRequest | BatchRequest, queries: Sequence[str], limits: Limits) -> None:
    """Check a request against the limits."""
    given = request.filter
    conditions = [] if given is None else [given] if isinstance(given, str) else given
    facets = request.facets or () if isinstance(request, SearchRequest) else ()
    for name, value, most in (
        ("queries per request", len(queries), limits.batch),
        ("characters per query", max(map(len, queries)), limits.query_characters),
        ("k", request.k, limits.k),
        ("offset + k", (request.offset or 0) + request.k, limits.k),
        ("fields in facets", len(facets), limits.facets),
        ("hits per request, k for each query,", request.k * len(queries), limits.hits),
        ("k with explain", request.k if request.explain else 0, limits.explained),
        ("conditions per filter", len(conditions), limits.conditions),
        ("characters per condition", max(map(len, conditions), default=0), limits.filter_characters),
    ):
        if value > most:
            raise RequestError(422, "beyond_limit", f"{name}: at most {most:,}, got {value if value < 1 << 53 else 'more'}")
    if request.effort is not None and request.target_recall is not None:
        raise RequestError(422, "invalid_request", "target_recall and effort exclude each other")
    if len(set(facets)) < len(facets):
        raise RequestError(422, "invalid_request", "facets: a field occurs twice")


def _parse_filter(given: str | list[str]) -> Filter | None:
    try:
        return Filter.parse(given) if given != [] else None
    except InputError as error:
        raise RequestError(422, "bad_filter", str(error)) from error


async def _answers(
    service: Service, retriever: ServedRetriever, request: SearchRequest | BatchRequest, queries: tuple[str, ...], begun: float
) -> list[SearchAnswer]:
    loop, limits = asyncio.get_running_loop(), service.limits
    # Parsing a filter can take milliseconds: not in the event loop.
    filter = None if request.filter is None else await loop.run_in_executor(service.threads, _parse_filter, request.filter)
    offset, depth = request.offset or 0, request.k
    wanted = offset + request.k
    if request.offset is not None:  # an approximate search for 20 hits need not begin with the hits of one for 10: pages share a depth
        most = retriever.depth or limits.k
        depth = min(_PAGED, most) if wanted <= _PAGED else most
    group_by, fields = (request.group_by, request.facets) if isinstance(request, SearchRequest) else (None, None)
    if (request.effort, request.target_recall) != (None, None) and retriever.kind == "bm25":
        raise RequestError(422, "invalid_request", f"{retriever.name} always searches exhaustively; remove effort and target_recall")
    ranked = await retriever.search(QueryBatch(queries, SearchOptions(depth, filter, request.effort, request.target_recall, group_by)))
    index = ranked.snapshot.generations[0].index

    def describe() -> list[SearchAnswer]:
        matching, groups = index.count(filter), (ranked.hits.groups or [[]])[0]
        # As many passages as are allowed were searched, and had too few groups.
        cut = group_by is not None and retriever.depth is None and matching > limits.passages and len(groups) < wanted
        cut = cut and sum(len(group.passages) for group in groups) >= limits.passages
        hits = [
            _describe_page(retriever, ranked, number, query, slice(offset, wanted), request.explain) for number, query in enumerate(queries)
        ]
        facets = None if fields is None else _count_facets(ranked.snapshot, fields, filter)
        combined = service.combined_warning(retriever)
        wordless = [describe_wordless([query]) if retriever.by_words else None for query in queries]
        lacking = set() if offset and matching else {each for found, each in zip(hits, wordless, strict=True) if not found}
        nothing = {each: describe_nothing_found(index, filter, wordless=each) for each in lacking}
        seconds = (ranked.encode, ranked.search, time.perf_counter() - begun)
        times, number = Milliseconds(*(round(1000 * each, 3) for each in seconds)), ranked.snapshot.number
        answers = []
        for found, each in zip(hits, wordless, strict=True):
            warning = "; ".join(said for said in (combined, each if found else None) if said) or None
            reason = None if found else nothing.get(each)
            answers.append(SearchAnswer(retriever.name, found, times, number, matching, offset, facets, cut, warning, reason))
        return answers

    return await loop.run_in_executor(service.threads, describe)


_PAGED = 100  # hits that pages share one ranking of


def _count_facets(snapshot: Snapshot, fields: Sequence[str], filter: Filter | None) -> dict[str, FieldFacet]:
    try:
        counted = snapshot.generations[0].index.facets(fields, filter=filter)
    except DamagedIndexError:
        raise
    except InputError as error:
        raise RequestError(422, "invalid_request", snapshot.client_message(error)) from error
    found = {}
    for name, facet in counted.items():
        limits = facet.range and (_as_json_value(facet.range[0]), _as_json_value(facet.range[1]))
        found[name] = FieldFacet([FacetValue(_as_json_value(value), count) for value, count in facet.values], facet.distinct, limits)
    return found


def _as_json_value(value: bool | int | float | str) -> bool | int | float | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity


def _describe_page(retriever: ServedRetriever, ranked: RankedQueries, number: int, query: str, page: slice, explain: bool) -> list[Hit]:
    """The hits of a page, with the documents of the generations in which they were found."""
    run, snapshot = ranked.hits.ranking(number), ranked.snapshot
    ids = list(run)[page]
    groups: Sequence[Group | None] = [None] * len(ids) if ranked.hits.groups is None else ranked.hits.groups[number][page]
    why: Sequence[HitExplanation | None] = [None] * len(ids)
    if explain:
        try:
            why = explanations(retriever, ranked, number, query, ids)
        except InputError as error:
            raise RequestError(422, "invalid_request", snapshot.client_message(error)) from error
    hits = []
    for key, reason, group in zip(ids, why, groups, strict=True):
        document = snapshot.document(key)
        title, text, metadata = (None, None, None) if document is None else (document.title, document.text, document.metadata)
        of = (None, None) if group is None else (group.key, dict(group.passages))
        hits.append(Hit(key, run[key], title, text, None if metadata is None else dict(metadata), reason, *of))
    return hits


_bearer = HTTPBearer(
    auto_error=False,
    description="A token of the service: for changes that of --token-file or QUIVER_TOKEN; for reading also that of --read-token-file or"
    " QUIVER_READ_TOKEN, if there is one.",
)


def create_application(
    service: Service, *, origins: Sequence[str] = (), hosts: AllowedHosts | None = None, poll_seconds: float = 2.0
) -> FastAPI:
    """Create the application.

    Args:
        service: The service.
        origins: Origins of web pages that may send requests (CORS).
        hosts: Allowed hosts; None for all, if a proxy in front of the application checks them.
        poll_seconds: Interval between checks for newer generations, in seconds.
    """
    app: FastAPI = FastAPIOffline(  # its page /docs loads nothing from other hosts
        redoc_url=None,
        title="Quiver",
        version=_version(),
        summary="Search indexes by single vectors, by token vectors and by words.",
        lifespan=lambda app: service.watched(poll_seconds),
    )
    Routes(service).add_to(app)
    answer_problems(app)
    app.add_middleware(RequestMiddleware, limits=service.limits, hosts=hosts, metrics=service.metrics, draining=lambda: service.draining)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


async def check_parameters(request: Request) -> None:
    """Refuse parameters of an address that its route does not have."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    if unknown := [name for name in request.query_params if name not in known][:5]:
        message = describe_unknown("parameter", unknown, known)
        hint = "" if known else " in the address" + ("" if request.method == "GET" else "; write fields of the JSON body instead")
        raise RequestError(422, "invalid_request", message + hint)


class Routes:
    """Routes of the service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._models = TextModels(service.retrievers, service.threads, service.limits)

    def add_to(self, app: FastAPI) -> None:
        """Add all routes to an application."""
        # Without a token: it holds no documents, and people can give a token to the search page only once it is loaded.
        app.add_api_route("/", self.page, include_in_schema=False)
        known = Depends(check_parameters)
        reading, changing = [Depends(self.may_read), known], [Depends(self.may_change), known]
        routes: list[tuple[str, str, str, Any, Any, list[Any]]] = [
            ("search", "GET", "/v1/info", self.info, Info, reading),
            ("search", "GET", "/v1/search", self.search_by_address, SearchAnswer, reading),
            ("search", "POST", "/v1/search", self.search, SearchAnswer, reading),
            ("search", "POST", "/v1/search/batch", self.search_batch, BatchAnswer, reading),
            ("documents", "GET", "/v1/documents/{key:path}", self.document, StoredDocument, reading),
            ("documents", "POST", "/v1/documents", self.add_documents, ChangeAnswer, changing),
            ("documents", "DELETE", "/v1/documents", self.delete_documents, ChangeAnswer, changing),
            ("models", "GET", "/v1/models", self.models, ModelList, reading),
            ("models", "GET", "/v1/models/{name:path}", self.model, ServedModel, reading),
            ("models", "POST", "/v1/embeddings", self.embeddings, EmbeddingsAnswer, reading),
            ("models", "POST", "/v1/rerank", self.rerank, RerankAnswer, reading),
            ("models", "POST", "/v2/rerank", self.rerank, RerankAnswer, reading),
            ("models", "POST", "/embed", self.embed, list[list[float]], reading),
            ("models", "POST", "/rerank", self.rerank_any, list[TextRank] | RerankAnswer, reading),
            ("models", "POST", "/", self.embed_or_rank, list[TextRank] | list[list[float]], reading),
            ("service", "GET", "/healthz", self.healthy, Status, []),
            ("service", "GET", "/readyz", self.ready, Status, []),
        ]
        for tag, method, path, endpoint, model, checks in routes:
            app.add_api_route(path, endpoint, methods=[method], response_model=model, responses=REFUSALS, tags=[tag], dependencies=checks)
        text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
        app.add_api_route(
            "/metrics", self.metrics, response_class=Response, responses=REFUSALS | text, tags=["service"], dependencies=reading[:1]
        )

    async def page(self) -> Response:
        """The search page."""
        headers = {"Content-Security-Policy": content_security_policy(), "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return Response(page_html(), headers=headers, media_type="text/html")

    async def info(self) -> Response:
        """List the retrievers and the limits."""
        service = self._service

        def describe() -> Response:
            found = [replace(each.info(), warning=service.compared_warning(each)) for each in service.retrievers.values()]
            return _write_json(Info(found, service.limits, service.access.writable, service.access.private, _version()))

        return await asyncio.get_running_loop().run_in_executor(service.threads, describe)

    async def search_by_address(  # noqa: PLR0913 - the parameters of the address
        self,
        q: Annotated[NonBlankText, Query(description="Text of the query.")],
        k: Annotated[int, Query(ge=1, description="Number of hits.")] = 10,
        offset: Annotated[int | None, Query(ge=0, description="Number of leading hits to skip, for paging.")] = None,
        retriever: Annotated[Text | None, Query(description="Name of the retriever. Default: the first.")] = None,
        filter: Annotated[
            List[Text] | None, Query(description="SQL expression such as year >= 2015 AND lang = 'en'. Repeatable: all must hold.")
        ] = None,
        effort: Annotated[Effort | None, Query(description="Search effort. Default: balanced.")] = None,
        target_recall: Annotated[float | None, Query(gt=0, le=1, description="Target recall, instead of an effort.")] = None,
        explain: Annotated[bool, Query(description="Explain every hit by the tokens or words that matched.")] = False,
        facet: Annotated[List[Text] | None, Query(description="Field whose values are counted. Repeatable.")] = None,
        group_by: Annotated[
            Text | None, Query(description="Field such as file whose values are ranked, each by its best passage; k counts values.")
        ] = None,
    ) -> Response:
        """Search with one query that is written in the address."""
        request = SearchRequest(q, k, offset, retriever, filter, effort, target_recall, explain, facet, group_by)
        (found,) = await search(self._service, request)
        return await self._write_in_thread(found)

    async def search(self, request: Annotated[SearchRequest, Bounded]) -> Response:
        """Search with one query."""
        (found,) = await search(self._service, request)
        return await self._write_in_thread(found)

    async def search_batch(self, request: Annotated[BatchRequest, Bounded]) -> Response:
        """Search with several queries and the same options."""
        answer = BatchAnswer(await search(self._service, request))
        return await self._write_in_thread(answer)

    async def document(
        self,
        key: Annotated[str, Path(description="Id of the document.", min_length=1)],
        retriever: Annotated[Text | None, Query(description="Name of the retriever. Default: the first.")] = None,
    ) -> Response:
        """Get a document by its id."""
        return await self._write_in_thread(self._service.document(key, retriever))

    async def may_change(self, credentials: Annotated[Any, Security(_bearer)]) -> None:
        """Check the token of a change."""
        self._service.access.check(credentials and credentials.credentials, change=True)

    async def may_read(self, credentials: Annotated[Any, Security(_bearer)]) -> None:
        """Check the token of a request that reads."""
        self._service.access.check(credentials and credentials.credentials, change=False)

    async def models(self) -> Response:
        """List the models, as OpenAI's API does."""
        return _write_json(self._models.listed())

    async def model(self, name: Annotated[str, Path(description="Name of the model or its retriever.", min_length=1)]) -> Response:
        """Describe a model, as OpenAI's API does."""
        return _write_json(self._models.describe(self._models.find(name, dense=False)))

    async def embeddings(self, request: EmbeddingsBody) -> Response:
        """Embed texts, as OpenAI's API does."""
        return await self._encoded(self._models.embeddings(request))

    async def embed(self, request: EmbedBody) -> Response:
        """Embed texts, as text-embeddings-inference does."""
        return await self._encoded(self._models.embed(request))

    async def rerank(self, request: RerankBody) -> Response:
        """Re-rank documents, as the APIs of Jina, Cohere and vLLM do."""
        return await self._encoded(self._models.rerank(request))

    async def rerank_any(self, request: AnyRerankBody) -> Response:
        """Re-rank texts: `texts` as text-embeddings-inference does, `documents` as vLLM does."""
        if isinstance(request, RerankRequest):
            return await self._encoded(self._models.rerank(request))
        return await self._encoded(self._models.rank_texts(request))

    async def embed_or_rank(self, request: AnyTextsBody) -> Response:
        """Embed `inputs` or re-rank `texts`, as text-embeddings-inference does at its own address."""
        if isinstance(request, TextsRequest):
            return await self._encoded(self._models.rank_texts(request))
        return await self._encoded(self._models.embed(request))

    async def _encoded(self, work: Awaitable[Any]) -> Response:
        content = await self._within(work, "the texts were not encoded within {} seconds; send fewer or shorter ones")
        return await self._write_in_thread(content)

    async def _write_in_thread(self, content: Any) -> Response:
        """The response with an answer that may be megabytes: not made in the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._service.threads, _write_json, content)

    async def add_documents(self, request: Annotated[AddRequest, Bounded]) -> Response:
        """Add documents; searches find them when the response is sent."""
        found, limits = self._find_changed(request, len(request.documents)), self._service.limits
        documents = [Document(each.id, each.text, each.title, each.metadata) for each in request.documents]
        return await self._answer_change(found, found.served.add(documents, replace=request.replace, wait=limits.lock_seconds))

    async def delete_documents(self, request: Annotated[DeleteRequest, Bounded]) -> Response:
        """Delete documents; searches no longer find them when the response is sent."""
        found, limits = self._find_changed(request, len(request.ids)), self._service.limits
        return await self._answer_change(found, found.served.delete(request.ids, wait=limits.lock_seconds))

    def _find_changed(self, request: AddRequest | DeleteRequest, count: int) -> ServedRetriever:
        """The retriever whose index a request changes, by default that of the first index."""
        service = self._service
        if count > (most := service.limits.documents):
            raise RequestError(422, "beyond_limit", f"documents per request: at most {most:,}, got {count:,}")
        found = service.first_index if request.retriever is None else service.retriever(request.retriever)
        if len(found.indexes) > 1:
            parts = ", ".join(part.name for part in found.parts)
            raise RequestError(422, "invalid_request", f"{found.name} ranks by several indexes; name the one to change: {parts}")
        return found

    async def _answer_change(self, found: ServedRetriever, change: Awaitable[Generation]) -> Response:
        unfinished = "not finished within {} seconds; the change continues, watch the generation in /v1/info"
        changed = await self._within(change, unfinished)
        return _write_json(ChangeAnswer(found.name, changed.number, len(changed.index)))

    async def healthy(self) -> Response:
        """Report that the service is running."""
        return _write_json(Status("ok"))

    async def ready(self) -> Response:
        """Report whether the service accepts requests; not while it shuts down."""
        if self._service.draining:
            raise RequestError(503, "draining", "the service is shutting down")
        return _write_json(Status("ready"))

    async def metrics(self) -> Response:
        """Return the metrics for Prometheus."""
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def _within(self, work: Awaitable[Any], problem: str) -> Any:
        seconds = self._service.limits.write_seconds
        try:
            return await asyncio.wait_for(work, seconds)
        except asyncio.TimeoutError:
            raise RequestError(504, "timeout", problem.format(f"{seconds:g}")) from None


def _write_json(content: Any) -> Response:
    """The JSON response of a dataclass or of a list."""
    several = isinstance(content, list)
    plain = [asdict(each) if is_dataclass(each) and not isinstance(each, type) else each for each in (content if several else [content])]
    return Response(json_body(plain if several else plain[0]), media_type="application/json")


def _version() -> str:
    return installed_version("quiver-retrieval") or "unknown"
