"""A request for a search, checked against the limits, and its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from quiver.encoder.errors import InputError
from quiver.retrieval.index import Filter
from quiver.retrieval.serving.explanations import explanations
from quiver.retrieval.serving.limits import Limits
from quiver.retrieval.serving.problems import RequestError
from quiver.retrieval.serving.retrievers import Asked, Choices, Ranked, Retriever
from quiver.retrieval.serving.schemas import BatchRequest, Hit, HitExplanation, Milliseconds, SearchAnswer, SearchRequest
from quiver.retrieval.serving.service import Service


async def search(service: Service, request: SearchRequest | BatchRequest) -> list[SearchAnswer]:
    """Answer a request, an answer a query.

    Raises:
        RequestError: 404: no such retriever; 422: it is beyond a limit, or cannot be done; 429: too much is waiting; 504: it takes too
            long.
    """
    begun = time.perf_counter()
    queries = (request.query,) if isinstance(request, SearchRequest) else tuple(request.queries)
    check_limits(request, queries, service.limits)
    retriever = service.retriever(request.retriever)
    try:
        return await asyncio.wait_for(_answers(service, retriever, request, queries, begun), service.limits.seconds)
    except asyncio.TimeoutError:
        raise RequestError(504, "timeout", f"there was no answer within {service.limits.seconds:g} seconds") from None


def check_limits(request: SearchRequest | BatchRequest, queries: Sequence[str], limits: Limits) -> None:
    """Refuse what is beyond the limits.

    Raises:
        RequestError: 422: which limit it is.
    """
    given = request.filter
    conditions = [] if given is None else [given] if isinstance(given, str) else given
    for name, value, most in (
        ("queries of a request", len(queries), limits.batch),
        ("characters of a query", max(map(len, queries)), limits.query_characters),
        ("k", request.k, limits.k),
        ("hits of a request, k for each query,", request.k * len(queries), limits.hits),
        ("k with explain", request.k if request.explain else 0, limits.explained),
        ("conditions of a filter", len(conditions), limits.conditions),
        ("characters of a condition", max(map(len, conditions), default=0), limits.filter_characters),
    ):
        if value > most:
            raise RequestError(422, "beyond_limit", f"{name}: at most {most:,}, got {value if value < 1 << 53 else 'more'}")
    if request.effort is not None and request.target_recall is not None:
        raise RequestError(422, "invalid_request", "target_recall chooses the effort; leave effort out")


def _filter(given: str | list[str]) -> Filter | None:
    try:
        return Filter.parse(given) if given != [] else None
    except InputError as error:
        raise RequestError(422, "bad_filter", str(error)) from error


async def _answers(
    service: Service, retriever: Retriever, request: SearchRequest | BatchRequest, queries: tuple[str, ...], begun: float
) -> list[SearchAnswer]:
    loop = asyncio.get_running_loop()
    # A filter may take milliseconds to read, during which others want to be heard.
    filter = None if request.filter is None else await loop.run_in_executor(service.threads, _filter, request.filter)
    asked = Asked(queries, Choices(request.k, filter, request.effort, request.target_recall))
    ranked = await retriever.search(asked)

    def shown() -> tuple[list[list[Hit]], str | None]:
        return _hits(retriever, asked, ranked, request.explain), service.warning_for(retriever)

    hits, warning = await loop.run_in_executor(service.threads, shown)
    times = Milliseconds(_milliseconds(ranked.encode), _milliseconds(ranked.search), _milliseconds(time.perf_counter() - begun))
    return [SearchAnswer(retriever.name, found, times, ranked.generation.number, warning=warning) for found in hits]


def _hits(retriever: Retriever, asked: Asked, ranked: Ranked, explain: bool) -> list[list[Hit]]:
    """What is shown of the hits, from the generation in which they were found."""
    index = ranked.generation.index
    stored = index.manifest.policy.store_text
    answers = []
    for query, ids, scores in zip(asked.texts, ranked.hits.ids, ranked.hits.scores, strict=True):
        why: Sequence[HitExplanation | None] = [None] * len(ids)
        if explain:
            try:
                why = explanations(ranked.generation, query, ids, words=retriever.words)
            except InputError as error:
                raise RequestError(422, "invalid_request", str(error)) from error
        hits = []
        for key, score, reason in zip(ids, scores.tolist(), why, strict=True):
            if stored:
                document = index.document(key)
                metadata = None if document.metadata is None else dict(document.metadata)
                hits.append(Hit(key, score, document.title, document.text, metadata, reason))
            else:
                hits.append(Hit(key, score, explanation=reason))
        answers.append(hits)
    return answers


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
