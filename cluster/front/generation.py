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

from cluster.front.allowance.allowances import Allowances, Refused, Standing
from cluster.front.answers import ChoiceAnswer, conclude, merged, trailers
from cluster.front.bounds.limits import CallLimit
from cluster.front.bounds.stalls import Stalls
from cluster.front.endings import Ending, Endings
from cluster.front.hypotheses import unfolded
from cluster.front.models.catalog import Catalog, Served
from cluster.front.options import FrontOptions
from cluster.front.requests import CheckedRequest, TimeLimits, check_request, encode
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
        catalog: Catalog,
        *,
        options: FrontOptions,
        calls: CallLimit,
        num_routers: int = 1,
        counting: Counting | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_routers`: of the cluster, each of which gives a part of what an account allows."""
        self.catalog = catalog
        self.stalls = Stalls(options.max_stall_s)
        self.endings = Endings(catalog.first.router.metrics, options.log_requests)
        self.allowances = Allowances(options.accounts, num_routers)
        self.is_draining = False
        self._options = options
        self._calls = calls
        self._counting = counting or Uncounted()
        self._clock = clock

    def take_options(self, options: FrontOptions) -> None:
        """Go by these from now on."""
        self._options = options
        self.endings.log_requests = options.log_requests
        self.allowances.accounts = options.accounts

    async def encode(self, text: str, model: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises InvalidRequest, RequestFailed."""
        served = self.open_model(model)
        return await encode(text, served.info, served.codec, special_tokens=special_tokens)

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
        is_counted: bool = True,
        shown_special: frozenset[int] = frozenset(),
        shows_stop_token: bool = False,
    ) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        """Everything of one call, from check to trailers. The client's leaving cancels it, here and at the workers.

        `is_kept`: whoever asks keeps what it gets, so that all of it counts as unread to the end. The message goes as
        soon as it is read, here and in the callers: nothing counts the bytes in it that are no prompt. `is_counted`: it
        hands the answer's tokens on; else they are not charged. `shown_special`: special tokens whose text is part of
        the answer's; `shows_stop_token`: so is that of one of `stop_token_ids`.
        """
        served = self.open_model(request.model)
        router = served.router
        ending.ask(served, request.model)
        checked = await self._check(request, served, call, ending)
        del request
        call.set_trailing_metadata((("kvrelay-request-id", checked.new.id),))
        self._check_id(checked.new.id)  # another one may have come while the prompt was tokenised
        submission = ending.submission = router.submit(checked.new)
        meter = Meter(submission, self._counting)
        numbers, prompt_ids = range(checked.params.n), checked.new.prompt_ids
        answers = [
            ChoiceAnswer(
                submission.id,
                i,
                checked.params,
                served.codec,
                shown_special,
                prompt_ids=prompt_ids,
                shows_stop_token=shows_stop_token,
            )
            for i in numbers
        ]
        running = set(numbers)

        def num_given() -> int:
            return sum(answer.num_tokens for answer in answers) if is_counted else 0

        try:
            while running:
                updates = await submission.updates()
                for update in merged(unfolded(updates)):
                    if update.choice not in running:
                        continue  # came before the workers heard of the stop string
                    response = answers[update.choice].response(update)
                    if response.finish_reason:
                        running.discard(update.choice)
                        router.stop_choice(submission, update.choice)
                        if not running:
                            conclude(response, submission, num_given())
                    meter.deliver(len(response.token_ids) if is_counted else 0)
                    yield response
                if not is_kept:
                    router.unread.release(submission, updates)
            call.set_trailing_metadata(trailers(submission))
        finally:
            ending.num_tokens = num_given()
            self.allowances.take_answer(checked.new.owner, ending.num_tokens, self._clock())
            await self._leave(router, submission, checked.new.owner, meter)

    async def _leave(self, router: Router, submission: Submission, owner: str, meter: Meter) -> None:
        """The call is over, whether its answer is or not."""
        try:
            if not submission.is_over:  # all clients may leave in one moment, each with many choices
                await router.turns.wait(owner)
        finally:
            router.cancel(submission, "the client went away")
            router.unread.forget(submission)
            meter.end()

    async def _check(
        self, request: generate_pb2.GenerateRequest, served: Served, call: Call, ending: Ending
    ) -> CheckedRequest:
        arrived_s = self._clock()
        limits = self._limits(arrived_s, call.time_remaining())
        checked = await check_request(
            request,
            model=served.info,
            adapters=served.adapters,
            codec=served.codec,
            admit=partial(self._admit, served, ending),
            limits=limits,
            account=self.allowances.of(CALLER.get()),
            usual_kept=served.router.policy.options.kept_tokens,
            most_tokens=served.router.policy.workers.decode.most_tokens,
            page_size=served.router.policy.workers.decode.page_size,
        )
        _raise_refused(self.allowances.take_prompt(checked.new.owner, len(checked.new.prompt_ids), self._clock()))
        return checked

    def _admit(self, served: Served, ending: Ending, request_id: str, num_choices: int) -> None:
        caller = CALLER.get()
        self._check_id(request_id)
        served.router.admit(caller)
        if why := self._calls.count_choices(num_choices):
            raise RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, why, retry_after_s=1.0)
        _raise_refused(self.allowances.begin(caller, num_choices, self._clock()))
        ending.release = partial(self.allowances.end, caller, num_choices)

    def _check_id(self, request_id: str) -> None:
        """Whatever model another one of the name asks for. Raises RequestFailed."""
        if self.catalog.has(request_id):
            why = f"request_id {request_id!r} is in use; give another, or none"
            raise RequestFailed(grpc.StatusCode.ALREADY_EXISTS, why)

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

    def open_model(self, name: str) -> Served:
        """For what costs something: a router that is stopping refuses it. Raises RequestFailed."""
        if self.is_draining:
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "the router is stopping; try another")
        return self.checked_model(name)

    def checked_model(self, name: str) -> Served:
        """The model of that name, or the base of an adapter's, of which some worker has been ready. Raises
        RequestFailed."""
        self.check_known()
        return self.catalog.of(name).ready()

    def check_known(self) -> None:
        """Raises RequestFailed before a worker of any model came up."""
        if all(each.router.model is None for each in self.catalog):
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "no worker is ready yet; try again later")


def _raise_refused(refused: Refused | None) -> None:
    if refused is not None:
        raise RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, refused.reason, retry_after_s=refused.retry_after_s)
