"""How a request that fails is told over HTTP: gRPC's status as HTTP's, and the sentence in the shape of OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import grpc
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from cluster.front.limits import jittered_ms
from cluster.router.live.requests import RequestFailed
from engine.types import InvalidRequest

Code = grpc.StatusCode
STATUS: Mapping[grpc.StatusCode, tuple[int, str]] = {
    Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    Code.UNAUTHENTICATED: (401, "authentication_error"),
    Code.PERMISSION_DENIED: (403, "permission_error"),
    Code.NOT_FOUND: (404, "not_found_error"),
    Code.ALREADY_EXISTS: (409, "invalid_request_error"),
    Code.OUT_OF_RANGE: (413, "invalid_request_error"),  # a body that is too large
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    Code.UNAVAILABLE: (503, "service_unavailable_error"),
    Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
OTHER = (500, "server_error")
UNAVAILABLE_RETRY_S = 1.0


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


def body_of(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def answer(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body, status, headers=dict(headers or {}))


def told(error: RequestFailed | InvalidRequest) -> tuple[int, ErrorBody, dict[str, str]]:
    """Status, body and headers."""
    if isinstance(error, InvalidRequest):
        return 400, body_of(str(error), "invalid_request_error", param=_param(str(error))), {}
    status, kind = STATUS.get(error.code, OTHER)
    code = "model_not_found" if error.code is Code.NOT_FOUND else error.code.name.lower()
    return status, body_of(str(error), kind, param=_param(str(error)), code=code), _retry_headers(error)


def _retry_headers(error: RequestFailed) -> dict[str, str]:
    """When to come again, jittered: in whole seconds as HTTP says it, and in ms as OpenAI's clients read it first."""
    wait_s = error.retry_after_s
    if wait_s is None and error.code is Code.UNAVAILABLE:
        wait_s = UNAVAILABLE_RETRY_S
    if wait_s is None:
        return {"X-Should-Retry": "false"} if error.code is Code.FAILED_PRECONDITION else {}  # as OpenAI's clients ask
    wait_ms = jittered_ms(wait_s)
    return {"Retry-After": str(-(-wait_ms // 1000)), "Retry-After-Ms": str(wait_ms)}


def _param(sentence: str) -> str | None:
    """Our sentences about a value begin with its key."""
    key, _, rest = sentence.partition(" ")
    return key if rest.startswith(("is ", "has ")) and key.replace("_", "").isalnum() and key.islower() else None


def refused(error: RequestFailed | InvalidRequest) -> JSONResponse:
    return answer(*told(error))


def _is_of_the_body(part: str | int) -> bool:
    """And no name of one of the types that it may have."""
    return isinstance(part, int) or (part not in ("str", "bool") and not part.endswith("]") and part[:1].islower())


def unreadable(problems: Any) -> JSONResponse:
    """Of what pydantic found: the first, named by its place."""
    problem = problems[0]
    place = ".".join(map(str, takewhile(_is_of_the_body, problem["loc"][1:]))) or "the body"
    value = problem.get("input")
    shown = "" if problem["type"] == "missing" or place == "the body" else f" is {repr(value)[:80]}"
    sentence = f"{place}{shown}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
    return answer(400, body_of(sentence, "invalid_request_error", param=None if place == "the body" else place))
