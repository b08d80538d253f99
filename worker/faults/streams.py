"""FaultyStreams stands between a worker's streams and their handlers, and asks a FaultBox of each message what is to go
wrong (worker/faults/box.py). Only there when faults were asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isasyncgenfunction
from typing import Any

import grpc
import grpc.aio

from worker.faults.box import FaultBox


class FaultyStreams(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, box: FaultBox) -> None:
        self._box = box

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.stream_stream is None:
            return handler
        return grpc.stream_stream_rpc_method_handler(
            self._generating(handler.stream_stream)
            if isasyncgenfunction(handler.stream_stream)
            else self._writing(handler.stream_stream),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _generating(self, method: Any) -> Any:
        async def call(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for response in method(self._seen(requests), context):
                yield response

        return call

    def _writing(self, method: Any) -> Any:
        async def call(requests: AsyncIterator[Any], context: Any) -> None:
            await method(self._seen(requests), _FaultyContext(context, self._box))

        return call

    async def _seen(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in messages:
            for _ in range(await copies_of(message, self._box)):
                yield message


class _FaultyContext:
    def __init__(self, context: Any, box: FaultBox) -> None:
        self._context = context
        self._box = box

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        for _ in range(await copies_of(message, self._box)):
            await self._context.write(message)


async def copies_of(message: Any, box: FaultBox) -> int:
    """How often a message gets through: once, but where a rule says otherwise."""
    copies = 1
    for rule in box.reach(message.WhichOneof("kind") or ""):
        if rule.do == "delay":
            await asyncio.sleep(rule.for_s)
        copies = {"drop": 0, "double": 2}.get(rule.do, copies)
    return copies
