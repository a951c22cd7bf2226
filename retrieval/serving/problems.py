"""What goes wrong with a request, as the answer that says so."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quiver.retrieval.serving.schemas import ErrorAnswer, Problem

logger = logging.getLogger(__name__)

# Messages are others' words in part: no longer than this.
_LONGEST = 500


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: HTTP status.
        code: For programs.
        message: For people: one line, what to do about it.
        headers: Further headers of the answer.
    """

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = Problem(code, " ".join(message.split())[:_LONGEST])
        self.headers = headers or {}


def problem_body(problem: Problem) -> bytes:
    """The body of an answer that is not a success; ASCII, so that no character of a message can hinder it."""
    return json.dumps(asdict(ErrorAnswer(problem))).encode("ascii")


def problem_answer(error: RequestError) -> Response:
    """The answer to a request that is refused."""
    return Response(problem_body(error.problem), error.status, error.headers, "application/json")


def answer_problems(app: FastAPI) -> None:
    """Let every error, whoever raises it, be answered in the same form."""
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(Exception, _failed)


async def _refused(request: Any, error: RequestError) -> Response:
    del request
    return problem_answer(error)


async def _http(request: Any, error: Any) -> Response:
    """What FastAPI and Starlette raise themselves: no such page, a method that it does not have, a body that is no JSON."""
    del request
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    message = {404: "there is no such page", 405: "this page does not take that method"}.get(error.status_code, str(error.detail))
    return problem_answer(RequestError(error.status_code, code, message, dict(error.headers or {})))


async def _malformed(request: Any, error: Any) -> Response:
    """A body or parameter that the schema does not allow. What was sent is not repeated: it may be anything."""
    del request
    problems = error.errors()
    if any(problem["type"] == "json_invalid" for problem in problems):
        return problem_answer(RequestError(400, "malformed_json", "the body is not JSON"))
    said = [f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" for problem in problems[:5]]
    return problem_answer(RequestError(422, "invalid_request", "; ".join(said)))


async def _failed(request: Any, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem_answer(RequestError(500, "internal", "the service has failed; its log says why"))
