"""What the OpenAPI schema says beyond the types: which refusals a page has, and the bounds that options have set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI

from quiver.retrieval.serving.limits import Limits
from quiver.retrieval.serving.schemas import ErrorAnswer

_MEANINGS = {
    400: "The request cannot be read.",
    401: "No token, or another one.",
    403: "The service takes no changes.",
    404: "There is no such retriever or document.",
    408: "The request did not come in time.",
    409: "The index cannot be changed so, or somebody else is writing.",
    413: "The body is too large.",
    421: "The request names a host that the service does not answer as.",
    422: "The request is against the schema or beyond a limit, or cannot be done.",
    429: "Too much is waiting.",
    500: "The service has failed.",
    503: "The service is about to stop.",
    504: "It takes too long.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers of a page that are no successes, as FastAPI wants them; what any page may answer is among them."""
    headers: dict[int, dict[str, Any]] = {
        401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
        429: {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}},
    }
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted({408, 413, 421, 500, *statuses}):
        found[status] = {"model": ErrorAnswer, "description": _MEANINGS[status]}
        if status in headers:
            found[status]["headers"] = headers[status]
    return found


REFUSALS = refusals()
"""What any page may answer."""


def bound(app: FastAPI, limits: Limits, retrievers: Sequence[str]) -> None:
    """Put the limits and the retrievers' names into the schema that the application describes itself by; the types know of neither."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        schema: dict[str, Any] = plain()
        schemas = schema["components"]["schemas"]
        query = {"maxLength": limits.query_characters}
        for name in ("SearchRequest", "BatchRequest"):
            schemas[name]["properties"]["k"]["maximum"] = limits.k
        for name in ("SearchRequest", "BatchRequest", "AddRequest", "DeleteRequest"):
            schemas[name]["properties"]["retriever"]["anyOf"][0]["enum"] = list(retrievers)
        schemas["SearchRequest"]["properties"]["query"] |= query
        schemas["BatchRequest"]["properties"]["queries"]["maxItems"] = limits.batch
        schemas["BatchRequest"]["properties"]["queries"]["items"] |= query
        schemas["AddRequest"]["properties"]["documents"]["maxItems"] = limits.documents
        schemas["DeleteRequest"]["properties"]["ids"]["maxItems"] = limits.documents
        return schema

    app.openapi = described
