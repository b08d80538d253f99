"""The public gRPC service of a router, Generate: it has requests checked, submits them and streams what comes. A
client that leaves, and its deadline, reach the router from here.

One message goes out for each wake-up and choice: what came while the last one was being written goes out together, so
a slow client gets fewer, larger messages and costs less.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from cluster.front.answers import ChoiceAnswer, WholeAnswer, conclude, merged, trailers
from cluster.front.endings import Ending, Endings
from cluster.front.limits import CallLimit, refuse, retry_after
from cluster.front.options import FrontOptions
from cluster.front.requests import CheckedRequest, TimeLimits, check_model, check_request, encode
from cluster.front.stalls import Stalls
from cluster.front.tokenizer import TextCodec
from cluster.router.driver import Router
from cluster.router.live.requests import RequestFailed, Submission
from engine.types import InvalidRequest
from kvrelay.v1 import generate_pb2
from worker.wire.door import CALLER

GENERATE_SERVICE = "kvrelay.v1.Generate"


class GenerateService:
    def __init__(
        self,
        router: Router,
        *,
        codec: TextCodec | None,
        model_name: str,
        options: FrontOptions,
        calls: CallLimit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._codec = codec
        self._model_name = model_name
        self._options = options
        self._calls = calls
        self._stalls = Stalls(options.max_stall_s)
        self._endings = Endings(router.metrics, options.log_requests)
        self._clock = clock
        self._too_old = f"the request has lived {options.max_request_s:g} s, the most that this router allows"
        self.is_draining = False

    @property
    def model_name(self) -> str:
        """The name that requests give: as configured, or as the workers say."""
        if self._model_name or self._router.model is None:
            return self._model_name
        return self._router.model.name

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
            with self._endings.noted() as ending:
                parts = self._responses(request, context, ending)
                del request
                async with aclosing(parts) as responses:
                    await self._write(context, responses)
        except (RequestFailed, InvalidRequest) as error:
            await refuse_with(context, error)

    async def _write(self, context: Any, responses: AsyncIterator[generate_pb2.GenerateResponse]) -> None:
        try:
            async with asyncio.timeout(None) as limit:
                async for response in responses:
                    await self._stalls.bounded(limit, context.write(response))
        except TimeoutError:
            reason = f"its client took nothing for {self._stalls.bound_s:g} s"
            raise RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after_s=1.0) from None

    async def generate_once(
        self, request: generate_pb2.GenerateRequest | None, context: Any
    ) -> generate_pb2.GenerateOnceResponse:
        answer = WholeAnswer()
        try:
            with self._endings.noted() as ending:
                parts = self._responses(request, context, ending, is_kept=True)
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
            model = self._open_model(request)
            assert request is not None, "an unreadable request was refused"
            return generate_pb2.TokenizeResponse(ids=await encode(request.text, model, self._codec))
        except (RequestFailed, InvalidRequest) as error:
            await refuse_with(context, error)

    async def get_model_info(
        self, request: generate_pb2.GetModelInfoRequest | None, context: Any
    ) -> generate_pb2.GetModelInfoResponse:
        try:
            model = generate_pb2.GetModelInfoResponse()
            model.CopyFrom(self._checked_model(request))
        except (RequestFailed, InvalidRequest) as error:
            await refuse_with(context, error)
        model.name = self.model_name
        return model

    async def _responses(
        self, request: generate_pb2.GenerateRequest | None, context: Any, ending: Ending, *, is_kept: bool = False
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Everything of one call, from check to trailers. The client's leaving cancels it, here and at the workers.

        `is_kept`: whoever asks keeps what it gets, so that all of it counts as unread to the end. The message goes as
        soon as it is read, here and in the callers: nothing counts the bytes in it that are no prompt.
        """
        checked = await self._check(request, context)
        del request
        context.set_trailing_metadata((("kvrelay-request-id", checked.new.id),))
        submission = ending.submission = self._router.submit(checked.new)
        numbers = [live.choice for live in submission.choices]
        answers = [ChoiceAnswer(submission.id, number, checked.params, self._codec) for number in numbers]
        try:
            async for response in self._choice_responses(submission, answers, is_kept=is_kept):
                yield response
            context.set_trailing_metadata(trailers(submission))
        finally:
            ending.num_tokens = sum(answer.num_tokens for answer in answers)
            try:
                if not submission.is_over:  # all clients may leave in one moment, each with many choices
                    await self._router.turns.wait(checked.new.owner)
            finally:
                self._router.cancel(submission, "the client went away")
                self._router.unread.forget(submission)

    async def _choice_responses(
        self, submission: Submission, answers: Sequence[ChoiceAnswer], *, is_kept: bool
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        running = {live.choice for live in submission.choices}
        while running:
            updates = await submission.updates()
            for index, tokens, finish in merged(updates):
                if index not in running:
                    continue  # came before the workers heard of the stop string
                response = answers[index].response(tokens, finish)
                if response.finish_reason:
                    running.discard(index)
                    self._router.stop_choice(submission, index)
                    if not running:
                        conclude(response, submission, sum(answer.num_tokens for answer in answers))
                yield response
            if not is_kept:
                self._router.unread.release(submission, updates)

    async def _check(self, request: generate_pb2.GenerateRequest | None, context: Any) -> CheckedRequest:
        arrived_s = self._clock()
        model = self._open_model(request)
        assert request is not None, "an unreadable request was refused"
        limits = self._limits(arrived_s, context.time_remaining())
        return await check_request(
            request,
            model=model,
            served_name=self.model_name,
            codec=self._codec,
            admit=self._admit,
            limits=limits,
        )

    def _admit(self, request_id: str, num_choices: int) -> None:
        self._router.admit(request_id, CALLER.get())
        if why := self._calls.count_choices(num_choices):
            raise RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, why, retry_after_s=1.0)

    def _limits(self, arrived_s: float, left_s: float | None) -> TimeLimits:
        """The client's deadline, or the router's own where that is earlier."""
        longest_s, reason = self._options.max_request_s, self._too_old
        if left_s is not None and left_s < longest_s:
            longest_s, reason = left_s, "the request's deadline is over"
        return TimeLimits(
            arrived_s=arrived_s,
            deadline_s=arrived_s + longest_s,
            deadline_reason=reason,
            queue_deadline_s=arrived_s + self._options.max_queue_s,
        )

    def _open_model(self, request: Any) -> generate_pb2.GetModelInfoResponse:
        """For what costs something: a router that is stopping refuses it."""
        if self.is_draining:
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "the router is stopping; try another")
        return self._checked_model(request)

    def _checked_model(self, request: Any) -> generate_pb2.GetModelInfoResponse:
        if request is None:
            raise InvalidRequest("the request cannot be read; send a message of this method, with strings in UTF-8")
        if self._router.model is None:
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "no worker is ready yet; try again later")
        check_model(request.model, self.model_name)
        return self._router.model


async def refuse_with(context: Any, error: RequestFailed | InvalidRequest) -> NoReturn:
    """End the call with the error's status; raises grpc's own AbortError."""
    code = error.code if isinstance(error, RequestFailed) else grpc.StatusCode.INVALID_ARGUMENT
    trailers = tuple(context.trailing_metadata() or ())
    if isinstance(error, RequestFailed) and error.retry_after_s is not None:
        trailers += (retry_after(error.retry_after_s),)
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
