"""The public gRPC service of a router, Generate: gRPC's messages and statuses around Generation (generation.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from cluster.front.answers import WholeAnswer
from cluster.front.bounds.limits import refuse, retry_after
from cluster.front.generation import Generation
from cluster.router.live.requests import RequestFailed
from engine.types import InvalidRequest
from kvrelay.v1 import generate_pb2

GENERATE_SERVICE = "kvrelay.v1.Generate"


class GenerateService:
    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        requests = generate_pb2
        return {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, _lenient(requests.GenerateRequest), _serialize
            ),
            "GenerateOnce": unary(self.generate_once, requests.GenerateRequest),
            "Tokenize": unary(self.tokenize, requests.TokenizeRequest),
            "GetModelInfo": unary(self.get_model_info, requests.GetModelInfoRequest),
        }

    async def generate(self, request: generate_pb2.GenerateRequest | None, context: Any) -> None:
        try:
            with self._generation.endings.noted() as ending:
                parts = self._generation.responses(_read(request), context, ending)
                del request
                async with aclosing(parts) as responses:
                    await self._write(context, responses)
        except (RequestFailed, InvalidRequest) as error:
            await refuse_with(context, error)

    async def _write(self, context: Any, responses: AsyncIterator[generate_pb2.GenerateResponse]) -> None:
        stalls = self._generation.stalls
        try:
            async with asyncio.timeout(None) as limit:
                async for response in responses:
                    await stalls.bounded(limit, context.write(response))
        except TimeoutError:
            reason = f"its client took nothing for {stalls.bound_s:g} s"
            raise RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after_s=1.0) from None
        except grpc.aio.InternalError:  # of a write that waits gRPC may say so before it cancels the call
            raise asyncio.CancelledError("the client went away") from None

    async def generate_once(
        self, request: generate_pb2.GenerateRequest | None, context: Any
    ) -> generate_pb2.GenerateOnceResponse:
        answer = WholeAnswer()
        try:
            with self._generation.endings.noted() as ending:
                parts = self._generation.responses(_read(request), context, ending, is_kept=True)
                del request
                async with aclosing(parts) as responses:
                    async for part in responses:
                        answer.add(part)
        except (RequestFailed, InvalidRequest) as error:
            await refuse_with(context, error)
        return answer.message()

    async def tokenize(
        self, request: generate_pb2.TokenizeRequest | None, context: Any
    ) -> generate_pb2.TokenizeResponse:
        try:
            asked = _read(request)
            return generate_pb2.TokenizeResponse(ids=await self._generation.encode(asked.text, asked.model))
        except (RequestFailed, InvalidRequest) as error:
            await refuse_with(context, error)

    async def get_model_info(
        self, request: generate_pb2.GetModelInfoRequest | None, context: Any
    ) -> generate_pb2.GetModelInfoResponse:
        try:
            asked, model = _read(request).model, generate_pb2.GetModelInfoResponse()
            served = self._generation.checked_model(asked)
            model.CopyFrom(served.info)
        except (RequestFailed, InvalidRequest) as error:
            await refuse_with(context, error)
        model.name = asked or served.name
        return model


def _read(request: Any) -> Any:
    if request is None:
        raise InvalidRequest("the request cannot be read; send a message of this method, with strings in UTF-8")
    return request


async def refuse_with(context: Any, error: RequestFailed | InvalidRequest) -> NoReturn:
    """End the call with the error's status; raises grpc's own AbortError."""
    code = error.code if isinstance(error, RequestFailed) else grpc.StatusCode.INVALID_ARGUMENT
    trailers = tuple(context.trailing_metadata() or ())
    if isinstance(error, RequestFailed) and error.retry_after_s is not None:
        trailers += retry_after(error.retry_after_s)
    await refuse(context, code, str(error), trailers)


def unary(method: Callable[..., Any], kind: type[Message]) -> Any:
    return grpc.unary_unary_rpc_method_handler(method, _lenient(kind), _serialize)


def _lenient(kind: type[Message]) -> Callable[[bytes], Message | None]:
    """Reads a message; None for one that cannot be read, so that the method can say so with the right status."""

    def read(data: bytes) -> Message | None:
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    return read


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
