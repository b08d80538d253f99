"""Which trace a request belongs to, as its client says: W3C's traceparent and tracestate, of gRPC's metadata and HTTP's
headers. They are kept as they came, and read by who sends traces; where nobody does, nobody looks at them either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar

import grpc
import grpc.aio
from starlette.types import ASGIApp, Receive, Scope, Send

KEYS = ("traceparent", "tracestate")
MOST_CHARS = 512  # of each: what W3C has everyone take
TraceContext = Mapping[str, list[str]]
TRACE: ContextVar[TraceContext | None] = ContextVar("TRACE", default=None)  # of this call


def read_context(headers: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    found: dict[str, list[str]] = {}
    for key, value in headers:
        if key in KEYS and len(value) <= MOST_CHARS:
            found.setdefault(key, []).append(value.decode("latin-1") if isinstance(value, bytes) else value)
    return found if len(found.get("traceparent", ())) == 1 else None


class TracedCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        TRACE.set(read_context(handler_call_details.invocation_metadata or ()))
        return await continuation(handler_call_details)


class TracedHttp:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        TRACE.set(read_context((key.decode("latin-1"), value) for key, value in scope.get("headers", ())))
        await self._app(scope, receive, send)
