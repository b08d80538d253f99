"""GET /v1/requests and /v1/requests/{id}: the last slow requests, and where the time of one went, as over gRPC."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from cluster.front.models.catalog import Catalog
from cluster.front.operating.explain import explain, list_slow

Last = Annotated[int, Query(ge=0, le=100_000, description="So many at most; 0: all that are kept.")]


class SpanBody(TypedDict):
    name: str
    begin_s: float
    end_s: float
    worker: str
    attempt: int
    words: str
    details: list[SpanBody]


class ExplainedBody(TypedDict):
    request_id: str
    choice: int
    state: str
    reason: str
    age_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    moves: int
    slow: bool
    why: str
    spans: list[SpanBody]


class ChoicesBody(TypedDict):
    choices: list[ExplainedBody]


class SlowBody(TypedDict):
    requests: list[ExplainedBody]


def add_explaining(app: FastAPI, catalog: Catalog) -> None:
    @app.get("/v1/requests", responses={200: {"model": SlowBody}})
    async def slow(last: Last = 50) -> Response:
        """The last slow requests, and those that failed, the newest first."""
        return JSONResponse(_plain(list_slow(catalog, last)))

    @app.get("/v1/requests/{request_id:path}", responses={200: {"model": ChoicesBody}})
    async def one(request_id: str) -> Response:
        """Where the time of a request went, by its client's id."""
        return JSONResponse(_plain(explain(catalog, request_id)))


def _plain(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
