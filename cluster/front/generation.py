"""Generation has requests checked, submits them and makes answers of what comes, whoever asks: over gRPC (grpc.py) or
HTTP (http/). That a client has left, and its deadline, reach the router from here.

One message is made for each wake-up and choice: what came while the last one was being written goes out together, so
a slow client gets fewer, larger messages and costs less.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Literal, Protocol

import grpc

from cluster.front.adapters import AdapterBook
from cluster.front.allowance.allowances import Allowances, Refused, Standing
from cluster.front.answers import ChoiceAnswer, conclude, merged, trailers
from cluster.front.bounds.limits import CallLimit
from cluster.front.bounds.stalls import Stalls
from cluster.front.endings import Ending, Endings
from cluster.front.options import FrontOptions
from cluster.front.requests import CheckedRequest, TimeLimits, check_request, encode
from cluster.front.tokenizer import TextCodec
from cluster.router.driver import Router
from cluster.router.live.requests import RequestFailed, Submission
from cluster.usage.meter import Counting, Meter, Uncounted
from kvrelay.v1 import generate_pb2
from worker.wire.door import CALLER

Limits = Mapping[Literal["requests", "tokens"], Standing | None]  # None: there is none


class Call(Protocol):
    """What is known of whoever asks, and told beside the answer. gRPC's context is one."""

    def time_remaining(self) -> float | None:
        """Seconds to its deadline, if it has one."""

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...], /) -> None:
        """The request's id, as soon as it has one; and its timeline, with the end of the answer."""


class Generation:
    def __init__(
        self,
        router: Router,
        *,
        codec: TextCodec | None,
        model_name: str,
        options: FrontOptions,
        calls: CallLimit,
        num_routers: int = 1,
        counting: Counting | None = None,
        adapters: AdapterBook | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_routers`: of the cluster, each of which gives a part of what an account allows."""
        self.codec = codec
        self.adapters = adapters or AdapterBook()
        self.stalls = Stalls(options.max_stall_s)
        self.endings = Endings(router.metrics, options.log_requests)
        self.allowances = Allowances(options.accounts, num_routers)
        self.is_draining = False
        self._router = router
        self._model_name = model_name
        self._options = options
        self._calls = calls
        self._counting = counting or Uncounted()
        self._clock = clock

    def take_options(self, options: FrontOptions) -> None:
        """Go by these from now on."""
        self._options = options
        self.endings.log_requests = options.log_requests
        self.allowances.accounts = options.accounts

    @property
    def model_name(self) -> str:
        """The name that requests give: as configured, or as the workers say."""
        if self._model_name or self._router.model is None:
            return self._model_name
        return self._router.model.name

    async def encode(self, text: str, model: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises InvalidRequest, RequestFailed."""
        return await encode(text, self.open_model(model), self.codec, special_tokens=special_tokens)

    def begin_call(self) -> None:
        """One more, of this task: it ends with it. Raises RequestFailed."""
        self._calls.begin()

    async def responses(
        self,
        request: generate_pb2.GenerateRequest,
        call: Call,
        ending: Ending,
        *,
        is_kept: bool = False,
        shown_special: frozenset[int] = frozenset(),
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Everything of one call, from check to trailers. The client's leaving cancels it, here and at the workers.

        `is_kept`: whoever asks keeps what it gets, so that all of it counts as unread to the end. The message goes as
        soon as it is read, here and in the callers: nothing counts the bytes in it that are no prompt. `shown_special`:
        special tokens whose text is part of the answer's.
        """
        checked = await self._check(request, call, ending)
        del request
        call.set_trailing_metadata((("kvrelay-request-id", checked.new.id),))
        submission = ending.submission = self._router.submit(checked.new)
        meter = Meter(submission, self._counting)
        numbers = [live.choice for live in submission.choices]
        answers = [ChoiceAnswer(submission.id, i, checked.params, self.codec, shown_special) for i in numbers]
        running = set(numbers)
        try:
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
                    meter.deliver(len(response.token_ids))
                    yield response
                if not is_kept:
                    self._router.unread.release(submission, updates)
            call.set_trailing_metadata(trailers(submission))
        finally:
            ending.num_tokens = sum(answer.num_tokens for answer in answers)
            self.allowances.take_answer(checked.new.owner, ending.num_tokens, self._clock())
            await self._leave(submission, checked.new.owner, meter)

    async def _leave(self, submission: Submission, owner: str, meter: Meter) -> None:
        """The call is over, whether its answer is or not."""
        try:
            if not submission.is_over:  # all clients may leave in one moment, each with many choices
                await self._router.turns.wait(owner)
        finally:
            self._router.cancel(submission, "the client went away")
            self._router.unread.forget(submission)
            meter.end()

    async def _check(self, request: generate_pb2.GenerateRequest, call: Call, ending: Ending) -> CheckedRequest:
        arrived_s = self._clock()
        model = self.open_model(request.model)
        limits = self._limits(arrived_s, call.time_remaining())
        checked = await check_request(
            request,
            model=model,
            served_name=self.model_name,
            adapters=self.adapters,
            codec=self.codec,
            admit=partial(self._admit, ending),
            limits=limits,
            account=self.allowances.of(CALLER.get()),
        )
        _raise_refused(self.allowances.take_prompt(checked.new.owner, len(checked.new.prompt_ids), self._clock()))
        return checked

    def _admit(self, ending: Ending, request_id: str, num_choices: int) -> None:
        caller = CALLER.get()
        self._router.admit(request_id, caller)
        if why := self._calls.count_choices(num_choices):
            raise RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, why, retry_after_s=1.0)
        _raise_refused(self.allowances.begin(caller, num_choices, self._clock()))
        ending.release = partial(self.allowances.end, caller, num_choices)

    def limits_now(self) -> Limits:
        """Of this task's caller."""
        caller, now = CALLER.get(), self._clock()
        return {"requests": self.allowances.requests(caller, now), "tokens": self.allowances.tokens(caller, now)}

    def _limits(self, arrived_s: float, left_s: float | None) -> TimeLimits:
        """The client's deadline, or the router's own where that is earlier."""
        longest_s = self._options.max_request_s
        reason = f"the request has lived {longest_s:g} s, the most that this router allows"
        if left_s is not None and left_s < longest_s:
            longest_s, reason = left_s, "the request's deadline is over"
        return TimeLimits(
            arrived_s=arrived_s,
            deadline_s=arrived_s + longest_s,
            deadline_reason=reason,
            queue_deadline_s=arrived_s + self._options.max_queue_s,
        )

    def open_model(self, name: str) -> generate_pb2.GetModelInfoResponse:
        """For what costs something: a router that is stopping refuses it. Raises RequestFailed."""
        if self.is_draining:
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "the router is stopping; try another")
        return self.checked_model(name)

    def checked_model(self, name: str) -> generate_pb2.GetModelInfoResponse:
        """What is served, if that is its name, or an adapter's. Raises RequestFailed."""
        if self._router.model is None:
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "no worker is ready yet; try again later")
        self.adapters.check_name(name, self.model_name)
        return self._router.model


def _raise_refused(refused: Refused | None) -> None:
    if refused is not None:
        raise RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, refused.reason, retry_after_s=refused.retry_after_s)
