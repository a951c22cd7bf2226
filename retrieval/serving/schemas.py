"""Requests, responses, errors and limits of the HTTP service."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_type_hints

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, with_config
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quiver.retrieval.index.engines import did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Limits on requests."""

    k: int = 1000  # largest number of hits per query
    explained: int = 20  # largest number of explained hits per query
    facets: int = 20  # largest number of fields whose values are counted per request
    query_characters: int = 8 << 10  # longest query, in characters
    filter_characters: int = 16 << 10  # longest condition of a filter, in characters; its time grows linearly with them
    conditions: int = 8  # largest number of conditions in a filter
    batch: int = 64  # largest number of queries per request
    hits: int = 2000  # largest number of hits per request, over all its queries
    passages: int = 100_000  # largest number of passages that a search with ``group_by`` ranks; there may be more groups in the others
    documents: int = 100  # largest number of documents that a request adds or deletes
    texts: int = 2048  # largest number of texts that a request embeds or re-ranks; OpenAI's API takes 2,048
    body_bytes: int = 8 << 20  # largest request body, in bytes; those of all running requests take at most 32 times as much
    queue: int = 256  # largest number of queries that wait for a retriever; further requests are refused with status 429
    # Open connections; fewer where the process may not open as many files. Further ones are refused with status 503.
    connections: int = 1000
    seconds: float = 10.0  # time limit of a search, from the end of the request to the response
    write_seconds: float = 5 * 60.0  # time limit for adding or deleting documents, and for embedding or re-ranking texts
    lock_seconds: float = 30.0  # time to wait for another process that writes to the index; part of ``write_seconds``
    read_seconds: float = 10.0  # time limit for a client to send the header, to send the body, and to read a part of the response

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")


def encodable(text: str) -> str:
    """Refuse a lone surrogate, which JSON can write and tokenizers cannot read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a character that is half of a surrogate pair; text must be valid UTF-8") from None
    return text


def _given_fields(fields: Any) -> Any:
    """An object without its nulls, by which clients say that they leave the choice to the service."""
    if not isinstance(fields, dict):
        return fields
    if len(fields) > MOST_FIELDS:  # each can be an error of its own: very many would block the event loop
        raise ValueError(f"at most {MOST_FIELDS:,} fields, got {len(fields):,}")
    return {name: value for name, value in fields.items() if value is not None}


MOST_FIELDS = 1000  # largest number of fields of an object in a request, and of the metadata of a document

Text = Annotated[str, Field(strict=True), AfterValidator(encodable)]
# Text that is not blank.
NonBlankText = Annotated[str, Field(strict=True, min_length=1, pattern=r"\S"), AfterValidator(encodable)]
Item = TypeVar("Item")
# A list of which only the first invalid item is reported: with an error per item, a megabyte would block the event loop for seconds.
List: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
Filled: TypeAlias = Annotated[list[Item], Field(min_length=1, fail_fast=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
Offset = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
Effort = Literal["exact", "balanced", "fast"]
Span = tuple[int, int]

CLOSED = ConfigDict(extra="forbid")
Bounded = BeforeValidator(_given_fields)


@with_config(CLOSED)
@dataclass(frozen=True)
class SearchRequest:
    """A search with one query.

    Attributes:
        query: Text of the query.
        k: Number of hits.
        offset: Number of leading hits to skip: pages 1, 2, 3 of ten hits have the offsets 0, 10, 20. With an offset, also 0,
            every page within the first 100 hits comes from one ranking, and every deeper page from another one of the largest k; both are
            the same for engines that search exhaustively. Default: no paging.
        retriever: Name of the retriever. Default: the first.
        filter: SQL expression over the fields, or a list of several that must all be true, such as ``year >= 2015 AND lang = 'en'``,
            ``file LIKE 'guides/%'`` or ``array_contains(tags, 'api')``.
        effort: Search effort: exact, balanced or fast. Default: balanced.
        target_recall: Target recall: use the fastest search parameters measured to reach it, instead of ``effort``.
        explain: Explain every hit by the tokens or words that matched.
        facets: Fields whose values are counted over all documents that match the filter, whatever the query ranks first.
        group_by: Field, such as ``file`` or ``document``, whose values are ranked, each by its best passage; ``k`` and ``offset`` count
            values.
    """

    query: NonBlankText
    k: Count = 10
    offset: Offset | None = None
    retriever: Text | None = None
    filter: Text | List[Text] | None = None
    effort: Effort | None = None
    target_recall: Fraction | None = None
    explain: Flag = False
    facets: List[Text] | None = None
    group_by: Text | None = None


@with_config(CLOSED)
@dataclass(frozen=True)
class BatchRequest:
    """A search with several queries and the same options for all; see `SearchRequest`."""

    queries: Filled[NonBlankText]
    k: Count = 10
    offset: Offset | None = None
    retriever: Text | None = None
    filter: Text | List[Text] | None = None
    effort: Effort | None = None
    target_recall: Fraction | None = None
    explain: Flag = False


@with_config(CLOSED)
@dataclass(frozen=True)
class NewDocument:
    """A document to add; the title is prepended to the text if the index was built with titles.

    ``metadata`` has fields for filters -> value, list of values or object with fields of its own. A null is as if the field were not there;
    a field of an object is named as in files, ``object.field``.
    """

    id: NonBlankText
    text: Text
    title: Text = ""
    metadata: Annotated[dict[Text, Any], Bounded] | None = None


@with_config(CLOSED)
@dataclass(frozen=True)
class AddRequest:
    """Documents to add to the index of a retriever, by default the first index; ``replace`` allows ids that it has."""

    documents: Filled[Annotated[NewDocument, Bounded]]
    replace: Flag = False
    retriever: Text | None = None


@with_config(CLOSED)
@dataclass(frozen=True)
class DeleteRequest:
    """Documents to delete by their ids; see `AddRequest`."""

    ids: Filled[NonBlankText]
    retriever: Text | None = None


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token and its span in the text, as offsets of the first character and behind the last; null for tokens that are not in the text."""

    token: str
    span: Span | None


@dataclass(frozen=True, slots=True)
class Meeting:
    """A token of the query and the most similar one of the passage, by their positions in the lists; their part of the hit's score."""

    query: int
    passage: int
    score: float


@dataclass(frozen=True, slots=True)
class WordPart:
    """Contribution of a query word to a BM25 score; 0 if the passage does not contain the word."""

    word: str
    score: float


@dataclass(frozen=True, slots=True)
class PartRank:
    """Where a hit stands in a ranking that was fused, or among the candidates before re-ranking.

    Attributes:
        name: Name of the ranking; ``candidates`` for the candidates before re-ranking.
        rank: Rank from 1; null if the ranking does not contain the document.
        score: Score in that ranking.
    """

    name: str
    rank: int | None
    score: float | None


@dataclass(frozen=True, slots=True)
class HitExplanation:
    """Explanation of the score of a hit.

    Attributes:
        kind: ``tokens`` for a ColBERT model, also one that re-ranks; ``words`` for BM25; ``similarity`` for a model with one vector per
            text; ``ranks`` for a fusion, whose score is the sum of 1 / (60 + rank) over ``parts``.
        score: The explained score; null if the document has no vector.
        text: The passage as it was encoded, including the title; spans of the passage refer to it. Null if the index stores no texts.
        query: Tokens of the query, in order; spans refer to the query text.
        passage: Tokens of the passage, in order.
        matches: One match per query token; their scores sum to the score of the hit.
        words: For BM25: the words of the query, in order; their scores sum to the score of the hit.
        parts: For a fusion and a re-ranking: rank and score of the hit in each ranking.
    """

    kind: Literal["tokens", "words", "similarity", "ranks"]
    score: float | None
    text: str | None = None
    query: list[TokenSpan] = field(default_factory=list)
    passage: list[TokenSpan] = field(default_factory=list)
    matches: list[Meeting] = field(default_factory=list)
    words: list[WordPart] = field(default_factory=list)
    parts: list[PartRank] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found; with ``group_by``, the best passage of a group.

    Attributes:
        id: Id of the document.
        score: Its score; greater is better.
        title: Its title; null, as text and metadata are, if the index stores no texts.
        text: Its text.
        metadata: Its fields.
        explanation: Explanation of the score; null if none was asked for.
        group: Value of the field that hits are grouped by; null without ``group_by``.
        passages: Passages of the group that were found: id -> score, best first; null without ``group_by``.
    """

    id: str
    score: float
    title: str | None = None
    text: str | None = None
    metadata: dict[str, Any] | None = None
    explanation: HitExplanation | None = None
    group: str | None = None
    passages: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Milliseconds:
    """Duration of each step in milliseconds. Queries that were encoded in one batch all report the time of the batch."""

    encode: float
    search: float
    total: float


@dataclass(frozen=True, slots=True)
class FacetValue:
    """A value of a field, and how many documents have it."""

    value: bool | int | float | str
    count: int


@dataclass(frozen=True, slots=True)
class FieldFacet:
    """Counts of the values of a field.

    Attributes:
        values: The most frequent values, at most 20, most frequent first.
        distinct: Number of distinct values.
        range: Least and greatest value of numbers, dates and times; null for other fields.
    """

    values: list[FacetValue]
    distinct: int
    range: tuple[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """The hits of a query, best first.

    Attributes:
        retriever: Name of the retriever.
        hits: At most k hits.
        milliseconds: Duration of each step.
        generation: Generation of the index that was searched. Pages of different generations need not fit together.
        matching: Number of documents that match the filter; without a filter, of all documents.
        offset: Number of hits that were skipped.
        facets: Field -> counts over the matching documents; null if none were asked for.
        partial: Whether a part of the index was not searched: with ``group_by``, if the passages that may be searched have fewer than
            ``offset + k`` groups.
        warning: The retriever combines indexes that hold different documents, or a fused BM25 counts no word of the query; else null.
        nothing_found: Why there are no hits, with values of the fields of a filter that nothing passes, or that BM25 counts no word of the
            query; null if there are hits, or the page is behind them.
    """

    retriever: str
    hits: list[Hit]
    milliseconds: Milliseconds
    generation: int
    matching: int
    offset: int = 0
    facets: dict[str, FieldFacet] | None = None
    partial: bool = False
    warning: str | None = None
    nothing_found: str | None = None


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """One answer per query, in the order of the queries."""

    results: list[SearchAnswer]


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document of an index; title and text are null if the index stores no texts."""

    id: str
    title: str | None
    text: str | None
    metadata: dict[str, Any] | None
    retriever: str
    generation: int


@dataclass(frozen=True, slots=True)
class ChangeAnswer:
    """An index after a change: its new generation, which searches see from now on, and its number of documents."""

    retriever: str
    generation: int
    documents: int


@dataclass(frozen=True, slots=True)
class RetrieverInfo:
    """A retriever.

    Attributes:
        name: Name in requests.
        kind: dense (one vector per text), colbert (one vector per token), bm25, fused (several of these), or reranked.
        model: Name of the model; for bm25 its parameters; otherwise what is fused and re-ranked.
        documents: Number of documents in the index.
        generation: Generation of the index.
        fields: Fields to filter by -> types of their values.
        explains: Whether hits can be explained by tokens or words.
        stores_text: Whether hits include texts.
        efforts: Search efforts that a request can choose; empty for bm25.
        parts: Names of the rankings of a fusion, and of what re-ranks; empty for a single ranking.
        depth: Largest ``offset + k``: the candidates of a re-ranking; null if only the limit of k bounds it.
        warning: Why its rankings must not be compared with those of the first index: an index of it holds other documents. Null if they can
            be.
    """

    name: str
    kind: Literal["dense", "colbert", "bm25", "fused", "reranked"]
    model: str
    documents: int
    generation: int
    fields: dict[str, list[str]]
    explains: bool
    stores_text: bool
    efforts: list[str]
    parts: list[str]
    depth: int | None
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class Info:
    """Retrievers, of which the first is the default, and limits; whether a token allows changes, and whether reading needs one."""

    retrievers: list[RetrieverInfo]
    limits: Limits
    writable: bool
    private: bool
    version: str


@dataclass(frozen=True, slots=True)
class Status:
    """State of the service."""

    status: str


@dataclass(frozen=True, slots=True)
class Problem:
    """An error: a code for programs and a message for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Body of every response that is not a success."""

    error: Problem


_LONGEST = 500  # longest message, in characters: messages quote values of the request


class RequestError(Exception):
    """A request that is refused: HTTP status, a code for programs, and one line for people that says what is wrong and what to do."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = Problem(code, " ".join(message.split())[:_LONGEST])
        self.headers = headers or {}


def json_body(content: Any) -> bytes:
    """Body of a response: UTF-8, with half of a surrogate pair, which UTF-8 cannot hold, as a JSON escape."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def problem_body(problem: Problem) -> bytes:
    """Body of an error response."""
    return json_body({"error": asdict(problem)})


def problem_answer(error: RequestError) -> Response:
    """Response to a refused request."""
    return Response(problem_body(error.problem), error.status, error.headers, "application/json")


def answer_problems(app: FastAPI) -> None:
    """Register exception handlers, so that every error response has the same form."""
    app.add_exception_handler(RequestError, _answer_refusal)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_malformed)
    app.add_exception_handler(Exception, _answer_failure)


async def _answer_refusal(request: Any, error: RequestError) -> Response:
    del request
    return problem_answer(error)


async def _answer_http_error(request: Any, error: Any) -> Response:
    """Answer errors of FastAPI and Starlette: unknown path, method not allowed."""
    del request
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    message = {404: "no such path", 405: "this path does not support that method"}.get(error.status_code, str(error.detail))
    return problem_answer(RequestError(error.status_code, code, message, dict(error.headers or {})))


async def _answer_malformed(request: Any, error: Any) -> Response:
    """Answer a request that violates the schema, without repeating its values."""
    problems = error.errors()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if any(problem["loc"][:1] == ("body",) for problem in problems) and not (kind == "application/json" or kind.endswith("+json")):
        sent = f"it says {kind[:80]}" if kind else "there is none"
        header = "Content-Type: application/json"
        message = f"a JSON body needs the header {header}, but {sent}; with curl: -H '{header}'"
        return problem_answer(RequestError(415, "not_declared_as_json", message))
    if any(problem["type"] == "json_invalid" for problem in problems):
        return problem_answer(RequestError(400, "malformed_json", "the body is not JSON"))
    unknown = [problem["loc"][1:] for problem in problems if problem["type"] == "unexpected_keyword_argument"]
    others = [problem for problem in problems if problem["type"] != "unexpected_keyword_argument"]
    messages = wrong_values(others)[:5]
    if unknown:
        messages.insert(0, _describe_unknown_fields(unknown, get_type_hints(request.scope["endpoint"]).get("request")))
    return problem_answer(RequestError(422, "invalid_request", "; ".join(messages)))


_WANTED = {
    "string_type": "text",
    "list_type": "a list",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
}
_EXAMPLES = {"filter": '; write it as "year >= 2015", or as a list of such conditions'}


def wrong_values(problems: Sequence[Any]) -> list[str]:
    """Describe what is wrong at each place, once: pydantic has a problem for each type of a field, and names the type as a part."""
    places: dict[tuple[Any, ...], list[Any]] = {}
    for problem in problems:
        places.setdefault(tuple(part for part in problem["loc"] if not _is_type(part)), []).append(problem)
    messages = []
    for place, found in places.items():
        if any(other[: len(place)] == place for other in places if len(other) > len(place)):  # the problem is in a part of it
            continue
        wanted = list(dict.fromkeys(_WANTED[each["type"]] for each in found if each["type"] in _WANTED))
        said = next((each["msg"] for each in found if each["type"] not in _WANTED), None)
        example = _EXAMPLES.get(str(place[1]), "") if said is None and len(place) > 1 else ""
        said = said or f"must be {', '.join(wanted[:-1])}{' or ' if len(wanted) > 1 else ''}{wanted[-1]}"
        if place[0] == "query" and found[0]["type"] == "missing":  # of an address: another name, such as ?query=, is the usual reason
            said = f"missing; write it in the address, as ?{place[-1]}=..."
        messages.append(f"{'.'.join(map(str, place))}: {said}{example}")
    return messages


def _is_type(part: object) -> bool:
    """Whether a part of a place names one of the types of a union, such as ``list[int]``, and no field."""
    return isinstance(part, str) and (part in ("bool", "int", "float", "str") or "[" in part)


def _describe_unknown_fields(places: Sequence[Sequence[Any]], kind: Any) -> str:
    """Name unknown fields of a body or of a part of it, what is meant by them, and those that there are."""
    if not is_dataclass(kind):  # one of two forms of a body, which the first part of a place names by a field of it
        kind = next(each for each in get_args(kind) if places[0][0].strip("[]") in {known.name for known in fields(each)})
        places = [place[1:] for place in places]
    inside = places[0][:-1]
    names = [place[-1] for place in places if place[:-1] == inside][:5]
    known = [each.name for each in fields(NewDocument if inside[:1] == ("documents",) else kind)]
    return describe_unknown("field", names, known, inside=".".join(map(str, inside)))


# What other interfaces call a field or argument of this one.
_OTHER_NAMES: dict[str, str] = {
    "k": "top_k topk top top_n limit n size count num_results n_results max_results num_documents",
    "top_n": "top_k topk top k limit n size count num_results",
    "filter": "where conditions condition query_filter metadata_filter search_filter expr",
    "query": "q text question search query_text search_query prompt input",
    "q": "query text question search query_text search_query prompt input",
    "queries": "query q texts questions",
    "offset": "skip start from page",
    "start": "offset skip from",
    "retriever": "index collection engine system model name",
    "group_by": "group groups aggregate collapse",
    "facets": "aggs aggregations count",
    "facet": "aggs aggregations count",
    "effort": "ef ef_search nprobe quality",
    "id": "document_id doc_id key _id document ids",
    "ids": "id documents keys document_ids",
    "documents": "texts passages docs inputs items",
    "texts": "documents passages docs inputs items",
    "input": "inputs text texts documents",
    "inputs": "input text texts documents",
}


def describe_unknown(what: str, names: Sequence[str], known: Collection[str], *, inside: str = "") -> str:
    """Name unknown fields, parameters or arguments, with what is meant by each, and all that are known.

    Args:
        what: What they are, such as ``field``.
        names: The unknown names.
        known: The names that there are.
        inside: Place of the object whose fields they are, such as ``documents.0``.

    Example:
        >>> describe_unknown("argument", ["top_k", "filters"], ["query", "k", "filter"])
        "unknown arguments 'top_k' (did you mean 'k'?), 'filters' (did you mean 'filter'?); the arguments are query, k, filter"
    """
    given = [f"{'.'.join(filter(None, (inside, name)))!r}{_suggest(name, known)}" for name in names]
    there = f"the {what}s are {', '.join(known)}" if known else f"there are no {what}s"
    return f"unknown {what}{'s' if len(names) > 1 else ''} {', '.join(given)}; {there}"


def _suggest(name: str, known: Collection[str]) -> str:
    other = next((each for each in known if name.lower() in _OTHER_NAMES.get(each, "").split()), None)
    return did_you_mean(name, known) if other is None else f" (did you mean {other!r}?)"


async def _answer_failure(request: Any, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem_answer(RequestError(500, "internal", "internal error; see the log of the service"))
