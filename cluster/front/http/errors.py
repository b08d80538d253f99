"""How a request that fails is told over HTTP: gRPC's status as HTTP's, and the sentence in the shape of OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import grpc
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from cluster.front.bounds.limits import jittered_ms
from cluster.front.generation import Limits
from cluster.front.tokenizer import PromptTooLong
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
ASKED_FOR = {"WWW-Authenticate": "Bearer"}  # with each 401, or clients such as Java's read none


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
        sentence = str(error).replace("kv_policy.", "kv_")  # a message of gRPC's, whose fields are keys here
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None  # OpenAI's
        return 400, body_of(sentence, "invalid_request_error", param=_param(sentence), code=code), {}
    status, kind = STATUS.get(error.code, OTHER)
    code, param = error.code.name.lower(), _param(str(error))
    code = "model_not_found" if (error.code, param) == (Code.NOT_FOUND, "model") else code
    headers = ASKED_FOR if error.code is Code.UNAUTHENTICATED else _retry_headers(error)
    return status, body_of(str(error), kind, param=param, code=code), headers


def _retry_headers(error: RequestFailed) -> dict[str, str]:
    """When to come again, jittered: in whole seconds as HTTP says it, and in ms as OpenAI's clients read it first."""
    wait_s = error.retry_after_s
    if wait_s is None and error.code is Code.UNAVAILABLE:
        wait_s = UNAVAILABLE_RETRY_S
    if wait_s is None:
        return {"X-Should-Retry": "false"} if error.code is Code.FAILED_PRECONDITION else {}  # as OpenAI's clients ask
    wait_ms = jittered_ms(wait_s)
    return {"Retry-After": str(-(-wait_ms // 1000)), "Retry-After-Ms": str(wait_ms)}


def limit_headers(limits: Limits) -> dict[str, str]:
    """As OpenAI tells them; nothing of what has no limit."""
    headers = {}
    for what, standing in limits.items():
        if standing is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(int(standing.limit))
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, int(standing.remaining)))
            headers[f"x-ratelimit-reset-{what}"] = _duration(standing.reset_s)
    return headers


def _duration(seconds: float) -> str:
    """6m0s, 17ms; rounded up."""
    if seconds < 1:
        return f"{ceil(seconds * 1000)}ms"
    minutes, left_s = divmod(ceil(seconds), 60)
    return f"{minutes}m{left_s}s" if minutes else f"{left_s}s"


def _param(sentence: str) -> str | None:
    """Our sentences about a value begin with its key."""
    key, _, rest = sentence.partition(" ")
    return key if rest.startswith(("is ", "has ")) and key.replace("_", "").isalnum() and key.islower() else None


def refused(error: RequestFailed | InvalidRequest) -> JSONResponse:
    return answer(*told(error))


def _place(problem: Any) -> list[str | int]:
    return [part for part in problem["loc"][1:] if _is_of_the_body(part)]


def _is_of_the_body(part: str | int) -> bool:
    """And no name of one of the types that it may have."""
    return isinstance(part, int) or (part not in ("str", "bool") and not part.endswith("]") and part[:1].islower())


def _no_json(problem: Any) -> str:
    """A sentence where the body could not be read, or was not read as JSON; else nothing."""
    if problem["type"] == "json_invalid":
        why = problem["ctx"]["error"].lower().removesuffix(" at")  # some of json's words end so
        return f"the body is no JSON: {why} at character {problem['loc'][-1]}"
    if problem["loc"] == ("body",) and isinstance(problem.get("input"), bytes):
        return "the body was not read as JSON: send the header Content-Type: application/json"
    return ""


def unreadable(problems: Any) -> JSONResponse:
    """Of what pydantic found: the first, named by its place. Of a value that may have one of several types, what is
    wrong with it as the one that it is most like: there the problem lies deepest."""
    problem = min(problems, key=lambda each: (each["type"] == "missing", -len(_place(each))))
    if why := _no_json(problem):
        return answer(400, body_of(why, "invalid_request_error"))
    place = ".".join(map(str, _place(problem))) or "the body"
    value = problem.get("input")
    shown = "" if problem["type"] == "missing" or place == "the body" else f" is {repr(value)[:80]}"
    sentence = f"{place}{shown}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
    return answer(400, body_of(sentence, "invalid_request_error", param=None if place == "the body" else place))
