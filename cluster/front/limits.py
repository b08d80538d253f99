"""What keeps a router's memory and its calls within FrontOptions where gRPC can do it: options of its server, and
CallLimit, which refuses calls before their message is read. It knows no request and no token."""

from __future__ import annotations

import ctypes
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from cluster.front.options import FrontOptions

PING_TIMEOUT_S = 5.0
HEALTH = "/grpc.health.v1.Health/"  # answers however many calls there are
JITTER = 0.5  # of a retry's wait is added at random, so that who was refused at once does not come back at once


def server_options(options: FrontOptions) -> list[tuple[str, int]]:
    """What gRPC itself holds clients to."""
    return [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_concurrent_streams", options.max_streams),
        ("grpc.max_allowed_incoming_connections", options.max_connections),
        ("grpc.max_connection_idle_ms", round(options.max_idle_s * 1000)),
        ("grpc.keepalive_time_ms", round(options.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        # Above its default of 1000 new calls gRPC drops some of them as CANCELLED; CallLimit says why.
        ("grpc.server.max_pending_requests", 2**20),
        ("grpc.server.max_pending_requests_hard_limit", 2**20),
    ]


def retry_after(seconds: float) -> tuple[str, str]:
    """The trailer that says when to come again, jittered."""
    return "retry-after-ms", str(max(1, round(seconds * 1000 * random.uniform(1, 1 + JITTER))))


class CallLimit(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, max_calls: int) -> None:
        self.running = 0
        self._max_calls = max_calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH):
            return handler
        if self.running >= self._max_calls:
            return grpc.stream_stream_rpc_method_handler(self._refuse)
        kind = next(kind for kind in KINDS if getattr(handler, kind) is not None)
        return handler._replace(**{kind: self._counted(getattr(handler, kind))})

    async def _refuse(self, _: AsyncIterator[object], context: Any) -> None:
        reason = f"{self.running} calls run at this router, of {self._max_calls}"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, (retry_after(1.0),))

    def _counted(self, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def call(request: Any, context: Any) -> Any:
            with self._count():
                return await behaviour(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._count():
                async for response in behaviour(request, context):
                    yield response

        return stream if inspect.isasyncgenfunction(behaviour) else call

    @contextmanager
    def _count(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def give_memory_back() -> None:
    """To the system, what a flood of calls has left free in glibc's heap: it gives back only its end by itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
