"""The public gRPC services of a router: Generate and Cluster. They check, submit, and turn tokens into text.

One message goes out for each wake-up and choice: what came while the last one was being written goes out together, so
a slow client gets fewer, larger messages and costs less.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from cluster.front.detokenizer import Detokenizer
from cluster.front.requests import Checked, check, check_model, encode
from cluster.front.tokenizer import TextCodec
from cluster.router.driver import Router
from cluster.router.live_requests import ChoiceUpdate, LiveRequest, RequestFailed, Submission
from cluster.router.status import status_of
from engine.types import FinishReason, InvalidRequest, SamplingParams
from kvrelay.v1 import cluster_pb2, generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import FINISH_REASON_TO_PROTO

GENERATE_SERVICE = "kvrelay.v1.Generate"
CLUSTER_SERVICE = "kvrelay.v1.Cluster"
NO_DEADLINE_S = 1e8  # more than this is none


class _Choice:
    """Turns the tokens of one choice into messages."""

    def __init__(self, request_id: str, index: int, params: SamplingParams, codec: TextCodec | None) -> None:
        self._request_id = request_id
        self._index = index
        self._text = Detokenizer(
            codec.backend if codec is not None else None, stop=params.stop, min_tokens=params.min_tokens
        )
        self.num_tokens = 0

    def response(self, tokens: Sequence[pb.TokenOutput], finish: FinishReason | None) -> generate_pb2.GenerateResponse:
        """The message for these tokens. If they complete a stop string it ends the choice, whatever `finish` says."""
        ids = [token.token_id for token in tokens]
        # A token that ended the request by its id (EOS, stop_token_ids) is part of the tokens, not of the text.
        shown = ids[:-1] if finish is FinishReason.STOP else ids
        text = self._text.push(shown)
        if self._text.stopped:
            finish = FinishReason.STOP
            ids = ids[: self._text.num_tokens - self.num_tokens]
        elif finish is not None:
            text += self._text.finish()
            if self._text.stopped:
                finish = FinishReason.STOP
        self.num_tokens += len(ids)
        response = generate_pb2.GenerateResponse(
            request_id=self._request_id, index=self._index, text=text, token_ids=ids
        )
        if tokens and tokens[0].HasField("logprobs"):
            response.logprobs.extend(token.logprobs for token in tokens[: len(ids)])
        if finish is not None:
            response.finish_reason = FINISH_REASON_TO_PROTO[finish]
            response.stop_string = self._text.stop_string or ""
        return response


class GenerateService:
    def __init__(
        self, router: Router, *, codec: TextCodec | None, model_name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._router = router
        self._codec = codec
        self._model_name = model_name
        self._clock = clock
        self.is_draining = False

    @property
    def model_name(self) -> str:
        """The name that requests give: as configured, or as the workers say."""
        if self._model_name or self._router.model is None:
            return self._model_name
        return self._router.model.name

    def handler(self) -> grpc.GenericRpcHandler:
        requests = generate_pb2
        return grpc.method_handlers_generic_handler(
            GENERATE_SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.generate, _lenient(requests.GenerateRequest), _serialize
                ),
                "GenerateOnce": _unary(self.generate_once, requests.GenerateRequest),
                "Tokenize": _unary(self.tokenize, requests.TokenizeRequest),
                "GetModelInfo": _unary(self.get_model_info, requests.GetModelInfoRequest),
            },
        )

    async def generate(self, request: generate_pb2.GenerateRequest | None, context: Any) -> None:
        try:
            async with aclosing(self._responses(request, context)) as responses:
                async for response in responses:
                    await context.write(response)
        except (RequestFailed, InvalidRequest) as error:
            await _refuse(context, error)

    async def generate_once(
        self, request: generate_pb2.GenerateRequest | None, context: Any
    ) -> generate_pb2.GenerateOnceResponse:
        choices: dict[int, generate_pb2.Choice] = {}
        answer = generate_pb2.GenerateOnceResponse()
        try:
            async with aclosing(self._responses(request, context)) as responses:
                async for part in responses:
                    _append(choices.setdefault(part.index, generate_pb2.Choice(index=part.index)), part)
                    if part.HasField("usage"):
                        _copy_end(answer, part)
        except (RequestFailed, InvalidRequest) as error:
            await _refuse(context, error)
        answer.choices.extend(choices[index] for index in sorted(choices))
        return answer

    async def tokenize(
        self, request: generate_pb2.TokenizeRequest | None, context: Any
    ) -> generate_pb2.TokenizeResponse:
        try:
            model = self._checked_model(request)
            assert request is not None, "an unreadable request was refused"
            return generate_pb2.TokenizeResponse(ids=await encode(request.text, model, self._codec))
        except (RequestFailed, InvalidRequest) as error:
            await _refuse(context, error)

    async def get_model_info(
        self, request: generate_pb2.GetModelInfoRequest | None, context: Any
    ) -> generate_pb2.GetModelInfoResponse:
        try:
            model = generate_pb2.GetModelInfoResponse()
            model.CopyFrom(self._checked_model(request))
        except (RequestFailed, InvalidRequest) as error:
            await _refuse(context, error)
        model.name = self.model_name
        return model

    async def _responses(
        self, request: generate_pb2.GenerateRequest | None, context: Any
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Everything of one call, from check to trailers. The client's leaving cancels it, here and at the workers."""
        checked = await self._check(request, context)
        context.set_trailing_metadata((("kvrelay-request-id", checked.new.id),))
        submission = self._router.submit(checked.new)
        try:
            choices = [_Choice(submission.id, live.choice, checked.params, self._codec) for live in submission.choices]
            async for response in self._choice_responses(submission, choices):
                yield response
            context.set_trailing_metadata(_trailers(submission))
        finally:
            self._router.cancel(submission, "the client went away")

    async def _choice_responses(
        self, submission: Submission, choices: Sequence[_Choice]
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        running = {live.choice for live in submission.choices}
        while running:
            for index, tokens, finish in _merged(await submission.updates()):
                if index not in running:
                    continue  # came before the workers heard of the stop string
                response = choices[index].response(tokens, finish)
                if response.finish_reason:
                    running.discard(index)
                    self._router.stop_choice(submission, index)
                    if not running:
                        _conclude(response, submission, sum(choice.num_tokens for choice in choices))
                yield response

    async def _check(self, request: generate_pb2.GenerateRequest | None, context: Any) -> Checked:
        arrived_s = self._clock()
        if self.is_draining:
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "the router is stopping; try another")
        model = self._checked_model(request)
        assert request is not None, "an unreadable request was refused"
        left_s = context.time_remaining()
        return await check(
            request,
            model=model,
            served_name=self.model_name,
            codec=self._codec,
            arrived_s=arrived_s,
            deadline_s=arrived_s + left_s if left_s is not None and left_s < NO_DEADLINE_S else None,
        )

    def _checked_model(self, request: Any) -> generate_pb2.GetModelInfoResponse:
        if request is None:
            raise InvalidRequest("the request cannot be read; send a message of this method, with strings in UTF-8")
        if self._router.model is None:
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "no worker is ready yet; try again later")
        check_model(request.model, self.model_name)
        return self._router.model


class ClusterService:
    def __init__(self, router: Router) -> None:
        self._router = router

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            CLUSTER_SERVICE, {"GetStatus": _unary(self.get_status, cluster_pb2.GetStatusRequest)}
        )

    async def get_status(self, _: Any, context: Any) -> cluster_pb2.GetStatusResponse:
        return status_of(self._router)


def _merged(updates: Sequence[ChoiceUpdate]) -> list[tuple[int, list[pb.TokenOutput], FinishReason | None]]:
    """One entry for each choice, in the order in which they came first."""
    if len(updates) == 1:
        return [(updates[0].choice, updates[0].tokens, updates[0].finish)]
    merged: dict[int, ChoiceUpdate] = {}
    for update in updates:
        if known := merged.get(update.choice):
            known.tokens = [*known.tokens, *update.tokens]
            known.finish = update.finish or known.finish
        else:
            merged[update.choice] = ChoiceUpdate(update.choice, update.tokens, update.finish)
    return [(update.choice, update.tokens, update.finish) for update in merged.values()]


def _conclude(response: generate_pb2.GenerateResponse, submission: Submission, num_tokens: int) -> None:
    """Put usage, timeline and receipt into the last message of the call."""
    first: LiveRequest = submission.choices[0]
    response.usage.prompt_tokens = len(first.prompt_ids)
    response.usage.completion_tokens = num_tokens
    response.usage.cached_tokens = first.cached_tokens
    response.timeline.CopyFrom(first.timeline_to_proto())
    if (receipt := first.receipt_to_proto()) is not None:
        response.receipt.CopyFrom(receipt)


def _trailers(submission: Submission) -> tuple[tuple[str, str], ...]:
    phases = submission.choices[0].timeline.phases()
    text = ";".join(f"{name}={seconds:.6f}" for name, seconds in phases.items())
    return ("kvrelay-request-id", submission.id), ("kvrelay-timeline", text)


def _append(choice: generate_pb2.Choice, part: generate_pb2.GenerateResponse) -> None:
    choice.text += part.text
    choice.token_ids.extend(part.token_ids)
    choice.logprobs.extend(part.logprobs)
    if part.finish_reason:
        choice.finish_reason = part.finish_reason
        choice.stop_string = part.stop_string


def _copy_end(answer: generate_pb2.GenerateOnceResponse, part: generate_pb2.GenerateResponse) -> None:
    answer.request_id = part.request_id
    answer.usage.CopyFrom(part.usage)
    answer.timeline.CopyFrom(part.timeline)
    if part.HasField("receipt"):
        answer.receipt.CopyFrom(part.receipt)


async def _refuse(context: Any, error: RequestFailed | InvalidRequest) -> NoReturn:
    """End the call with the error's status; raises grpc's own AbortError."""
    code = error.code if isinstance(error, RequestFailed) else grpc.StatusCode.INVALID_ARGUMENT
    trailers = tuple(context.trailing_metadata() or ())
    if isinstance(error, RequestFailed) and error.retry_after_s is not None:
        trailers += (("retry-after-ms", str(max(1, round(error.retry_after_s * 1000)))),)
    await context.abort(code, str(error), trailers)
    raise AssertionError("abort returned")


def _unary(method: Callable[..., Any], kind: type[Message]) -> Any:
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
