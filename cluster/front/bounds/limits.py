"""What keeps a router's memory and its calls within FrontOptions where gRPC can do it: options of its server, and
CallLimit, which refuses calls before their message is read, and those whose message does not come. It knows no request
and no token."""

from __future__ import annotations

import asyncio
import random
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from cluster.front.bounds.stalls import Stalls
from cluster.front.options import FrontOptions
from cluster.router.live.requests import RequestFailed
from cluster.router.live.turns import Turns
from cluster.router.shares import Shares
from worker.wire.aborts import without_traces
from worker.wire.door import CALLER, FIRST_MESSAGE_S
from worker.wire.reads import read_whole

PING_TIMEOUT_S = 5.0
MAX_UNHEARD = 10_240  # calls in one line at gRPC, of 15 KB each, before CallLimit can say no: it ends more as CANCELLED
REFUSE_S = 2.0  # for the client to take the status; then it hears nothing more
UNREADABLE = "the call's message cannot be read"
HEALTH = f"/{health.SERVICE_NAME}/"  # answers however many calls there are
JITTER = 0.5  # of a retry's wait is added at random, so that who was refused at once does not come back at once


def half_of_files() -> int:
    """Of those that this process may have open: as many are each door's connections at most, so that the other door,
    links to workers and files have theirs."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft // 2


def grpc_options(options: FrontOptions) -> list[tuple[str, int]]:
    """What gRPC itself holds clients to."""
    return [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_concurrent_streams", options.max_streams),
        ("grpc.max_allowed_incoming_connections", min(options.max_connections, half_of_files())),
        ("grpc.max_connection_idle_ms", round(options.max_idle_s * 1000)),
        ("grpc.keepalive_time_ms", round(options.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", round(PING_TIMEOUT_S * 1000)),
        ("grpc.server.max_pending_requests", MAX_UNHEARD),
        ("grpc.server.max_pending_requests_hard_limit", MAX_UNHEARD),
    ]


def retry_after(seconds: float) -> tuple[tuple[str, str], ...]:
    """The trailers that say when to come again: to who reads them, and to gRPC's own retries (its proposal A6)."""
    wait_ms = str(jittered_ms(seconds))
    return ("retry-after-ms", wait_ms), ("grpc-retry-pushback-ms", wait_ms)


def jittered_ms(seconds: float) -> int:
    return max(1, round(seconds * 1000 * random.uniform(1, 1 + JITTER)))


class CallLimit(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """A call counts from its headers on: gRPC itself would wait for its message without end. Health is open to
    everyone and not counted, so that its message must come sooner."""

    def __init__(
        self, max_calls: int, max_stall_s: float, turns: Turns, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        self._calls = Shares(max_calls)
        self._on_refused = on_refused
        self._messages = Stalls(max_stall_s)
        self._strangers = Stalls(min(FIRST_MESSAGE_S, max_stall_s))
        self._limited: dict[str, grpc.RpcMethodHandler] = {}  # by method: handlers as they are answered with here
        self._full = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._turns = turns

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        is_health = method.startswith(HEALTH)
        if not is_health and self._why_full(CALLER.get()):
            return self._full
        if method not in self._limited:
            self._limited[method] = self._limit(handler, is_health)
        return self._limited[method]

    def _limit(self, handler: grpc.RpcMethodHandler, is_health: bool) -> grpc.RpcMethodHandler:
        if handler.request_streaming:
            return handler._replace(stream_stream=self._counted(handler.stream_stream))
        return self._heard(handler, is_health)

    async def _refuse(self, _: AsyncIterator[object], context: Any) -> None:
        self._on_refused()
        reason = self._why_full(CALLER.get()) or "too many calls ran at this router"
        await without_traces(refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after(1.0)))

    def _why_full(self, caller: str) -> str:
        """Why the caller may begin no call; empty if it may."""
        calls = self._calls
        if calls.total >= calls.limit:
            return f"{calls.total} calls run at this router, of {calls.limit}"
        if not calls.has_share(caller):
            return f"{calls.of(caller)} of {calls.total} calls that run at this router are this client's: its share"
        return ""

    def set_limit(self, max_calls: int) -> None:
        self._calls.limit = max_calls

    @property
    def running(self) -> int:
        return self._calls.total

    def admit(self) -> None:
        """Begin a call that came by another way than gRPC. Raises RequestFailed."""
        try:
            self.begin()
        except RequestFailed:
            self._on_refused()
            raise

    def begin(self) -> None:
        """Count the call of this task, to its end. Raises RequestFailed."""
        if why := self._why_full(CALLER.get()):
            raise RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, why, retry_after_s=1.0)
        self._count()

    def count_choices(self, num: int) -> str:
        """The call of this task, counted once already, is for so many choices: each is a call. Why not; empty if so."""
        if num > 1:
            if why := self._why_full(CALLER.get()):
                return f"{why}, and {num} choices are as many calls"
            self._count(num - 1)
        return ""

    def _count(self, num: int = 1) -> None:
        """From now to the end of the call's task, in which gRPC sends the last byte, too."""
        task, caller = asyncio.current_task(), CALLER.get()
        assert task is not None, "a call has a task"
        self._calls.take(caller, num)
        task.add_done_callback(lambda _: self._calls.give(caller, num))

    def _counted(self, behaviour: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], Any]:
        """Of reflection, which gRPC brings."""

        async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
            self._count()
            try:
                async for response in behaviour(requests, context):
                    yield response
            except DecodeError:
                await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, UNREADABLE)

        return stream

    def _heard(self, handler: grpc.RpcMethodHandler, is_health: bool) -> grpc.RpcMethodHandler:
        """Reads the one message of a call itself: as a stream, which looks the same to the client."""
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        stalls = self._strangers if is_health else self._messages

        async def call(_: AsyncIterator[object], context: Any) -> Any:
            if not is_health:
                self._count()
                await self._turns.wait(CALLER.get())
            return await without_traces(_answer(context), before=lambda: self._turns.wait(CALLER.get()))

        async def _answer(context: Any) -> Any:
            return await behaviour(await _message_in_turn(context), context)

        async def _message_in_turn(context: Any) -> Any:
            message = await _message(context, stalls)
            if not is_health:
                await self._turns.wait(CALLER.get())
            return message

        streams = handler.response_streaming
        made = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        return made(call, handler.request_deserializer, handler.response_serializer)


async def _message(context: Any, stalls: Stalls) -> Any:
    """The one message of a call."""
    try:
        async with asyncio.timeout(None) as limit:
            message = await stalls.bounded(limit, read_whole(context.read()))
    except TimeoutError:
        reason = f"the call's message did not come within {stalls.bound_s:g} s"
        await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, reason)
    except DecodeError:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, UNREADABLE)
    if message is grpc.aio.EOF:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the call ended before its message")
    return message


async def refuse(
    context: Any, code: grpc.StatusCode, sentence: str, trailers: Sequence[tuple[str, str]] = ()
) -> NoReturn:
    """End the call; raises grpc's own AbortError, and CancelledError where it is over already."""
    with suppress(TimeoutError, grpc.aio.InternalError):  # who reads nothing, or has gone, does not read this
        async with asyncio.timeout(REFUSE_S):
            await context.abort(code, sentence, tuple(trailers))
    raise asyncio.CancelledError
