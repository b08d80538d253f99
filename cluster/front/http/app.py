"""The HTTP API of a router: OpenAI's, with what vLLM adds to it, over the same Generation as gRPC.

    request --schemas--> GenerateRequest --Generation--> GenerateResponse --shapes--> answer, or events

It decides nothing about a request that gRPC would decide otherwise. The document of all this is at /openapi.json.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from cluster.front.generation import Generation
from cluster.front.http import errors
from cluster.front.http.answers import Answer
from cluster.front.http.chat import ChatTemplates
from cluster.front.http.chats import ChatAnswer, chat_ids
from cluster.front.http.completions import CompletionAnswer
from cluster.front.http.explaining import add_explaining
from cluster.front.http.guard import HttpCall
from cluster.front.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeChatRequest,
    TokenizeRequest,
)
from cluster.front.http.shapes import ChatBody, CompletionBody, ModelBody, ModelsBody, PromptBody, TokensBody
from cluster.front.http.streams import EventStream, WholeBody
from cluster.front.http.watching import add_page
from cluster.front.requests import checked_id
from cluster.router.live.requests import RequestFailed
from engine.types import InvalidRequest

VERSION = version("kvrelay")
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": errors.ErrorBody} for status in (400, 401, 403, 404, 409, 413, 429, 500, 503, 504, "default")
}
TOLD = {  # by status
    404: "there is nothing at {path}; see /openapi.json",
    405: "{path} is not for {method}; see /openapi.json",
}
UNREAD: Mapping[type[Exception], str] = {  # by what json, of which FastAPI tells nothing, stumbles at; in this order
    UnicodeDecodeError: "the body is no UTF-8; send JSON in that",
    RecursionError: "the body is nested too deep; send JSON with fewer levels",
    ValueError: "the body has a number that is too long; send JSON with at most 4300 digits in each",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What is asked of the server besides answers."""

    is_ready: Callable[[], bool]
    metrics: Callable[[], Awaitable[bytes]]  # in Prometheus' text format


def make_app(generation: Generation, probes: Probes) -> FastAPI:
    app = FastAPI(title="kvrelay", version=VERSION, docs_url=None, redoc_url=None, responses=FAILURES)
    templates = ChatTemplates()
    _tell_failures(app)
    _add_answers(app, generation, templates)
    _add_tokens(app, generation, templates)
    _add_models(app, generation)
    _add_probes(app, probes)
    add_explaining(app, generation.catalog)
    _answer_heads(app)
    add_page(app, generation.catalog, generation.stalls)
    return app


def _answers(model: Any) -> dict[int | str, dict[str, Any]]:
    """What there is besides failures: whole, or as events."""
    return {200: {"model": model, "content": {"text/event-stream": {"schema": {"type": "string"}}}}}


def _add_answers(app: FastAPI, generation: Generation, templates: ChatTemplates) -> None:
    @app.post("/v1/completions", responses=_answers(CompletionBody))
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        answer = CompletionAnswer(generation, _named(asked, request), asked)
        return await _written(answer, generation)

    @app.post("/v1/chat/completions", responses=_answers(ChatBody))
    async def chat(asked: ChatRequest, request: Request) -> Response:
        call = _named(asked, request)
        asked.check_served()
        more = {"reasoning_effort": asked.reasoning_effort} if asked.reasoning_effort is not None else {}
        template, prompt, ids = await chat_ids(generation, templates, asked, asked.model or "", **more)
        answer = ChatAnswer(generation, call, asked, template, prompt, ids)
        return await _written(answer, generation)


async def _written(answer: Answer, generation: Generation) -> Response:
    if answer.asked.stream:
        return EventStream(answer.events(), generation.stalls)
    return WholeBody(await answer.whole(), generation.stalls)


def _add_tokens(app: FastAPI, generation: Generation, templates: ChatTemplates) -> None:
    @app.post("/tokenize", responses={200: {"model": TokensBody}})
    async def tokenize(asked: TokenizeRequest | TokenizeChatRequest) -> Response:
        model = asked.model or ""
        if isinstance(asked, TokenizeChatRequest):
            _, _, ids = await chat_ids(generation, templates, asked, model)
        else:
            ids = await generation.encode(asked.prompt, model, special_tokens=asked.add_special_tokens)
        served, strings = generation.checked_model(model), None
        if asked.return_token_strs and served.codec is not None:
            strings = [served.codec.token_text(each) for each in ids]
        longest = served.info.max_model_len
        body: TokensBody = {"tokens": ids, "count": len(ids), "max_model_len": longest, "token_strs": strings}
        return JSONResponse(body)

    @app.post("/detokenize", responses={200: {"model": PromptBody}})
    async def detokenize(asked: DetokenizeRequest) -> Response:
        served = generation.open_model(asked.model or "")
        model, codec = served.info, served.codec
        vocab_size = model.vocab_size
        if len(asked.tokens) > model.max_model_len:
            raise InvalidRequest(f"tokens has {len(asked.tokens)} ids; the model takes {model.max_model_len}")
        if codec is None:
            raise InvalidRequest("tokens is a list of ids, and no tokenizer is loaded")
        if asked.tokens and (largest := max(asked.tokens)) >= vocab_size:
            raise InvalidRequest(f"tokens has {largest}; the model's ids go from 0 to {vocab_size - 1}")
        body: PromptBody = {"prompt": codec.text_of(asked.tokens)}
        return JSONResponse(body)


def _add_models(app: FastAPI, generation: Generation) -> None:
    began = int(time.time())

    def described(name: str) -> ModelBody:
        """`name`: of the model or of an adapter, which vLLM tells by its parent."""
        served = generation.checked_model(name)
        base = served.name
        body: ModelBody = {
            "id": name or base,
            "object": "model",
            "created": began,
            "owned_by": "kvrelay",
            "root": name or base,
            "max_model_len": served.info.max_model_len,
        }
        return body if name in ("", base) else {**body, "parent": base}

    @app.get("/v1/models", responses={200: {"model": ModelsBody}})
    async def models() -> Response:
        generation.check_known()
        names = [
            name
            for served in generation.catalog
            if served.router.model is not None
            for name in (served.key, *served.adapters.served)
        ]
        body: ModelsBody = {"object": "list", "data": [described(name) for name in names]}
        return JSONResponse(body)

    @app.get("/v1/models/{name:path}", responses={200: {"model": ModelBody}})
    async def model(name: str) -> Response:
        return JSONResponse(described(name))


def _add_probes(app: FastAPI, probes: Probes) -> None:
    @app.get("/health", response_class=Response, responses={200: {"description": "The router answers."}})
    async def health() -> Response:
        return Response()

    @app.get("/ready", response_class=Response, responses={200: {"description": "A worker of each phase is ready."}})
    async def ready() -> Response:
        if not probes.is_ready():
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "no worker of each phase is ready; try again later")
        return Response()

    @app.get("/version")
    async def told_version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await probes.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _answer_heads(app: FastAPI) -> None:
    """HEAD wherever there is a GET, as HTTP has it; what has none of its own is a stream that does not end."""
    for route in [each for each in app.routes if isinstance(each, APIRoute) and "GET" in (each.methods or ())]:
        app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def _named(asked: Sampled, request: Request) -> HttpCall:
    """By the name in the body, else the header's, else our own. Raises InvalidRequest."""
    call: HttpCall = request.state.call
    if asked.request_id:
        call.request_id = checked_id(asked.request_id)
    return call


def _tell_failures(app: FastAPI) -> None:
    @app.exception_handler(RequestFailed)
    @app.exception_handler(InvalidRequest)
    async def refused(_: Request, error: Any) -> Response:
        return errors.refused(error)

    @app.exception_handler(UnicodeEncodeError)
    async def no_text(_: Request, error: Any) -> Response:
        return errors.refused(InvalidRequest(f"the body has text that is no UTF-8: {error.reason}"))

    @app.exception_handler(RequestValidationError)
    async def unreadable(_: Request, error: Any) -> Response:
        return errors.unreadable(error.errors())

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: Any) -> Response:
        unread = next((why for kind, why in UNREAD.items() if isinstance(error.__cause__, kind)), "{detail}")
        told = TOLD.get(error.status_code, unread)
        message = told.format(path=request.url.path, method=request.method, detail=error.detail)
        body = errors.body_of(message, "invalid_request_error", code=str(error.status_code))
        return errors.answer(error.status_code, body, error.headers)

    @app.exception_handler(Exception)
    async def ours(_: Request, error: Any) -> Response:
        body = errors.body_of("the router has failed; its log says how", "server_error")
        return errors.answer(500, body, {"Connection": "close"})  # uvicorn closes it: the error is raised once more
