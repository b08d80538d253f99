"""Answer is what one request over HTTP gets: whole, or as events while it is made. What a completion's looks like is in
completions.py, a chat's in chats.py."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.front.generation import Generation
from cluster.front.http.guard import HttpCall
from cluster.front.http.schemas import Sampled
from cluster.front.http.shapes import TokenNames, UsageBody, usage_body
from cluster.front.http.streams import event, gather
from cluster.router.live.requests import Submission
from kvrelay.v1 import generate_pb2


@dataclass(frozen=True, slots=True)
class Made:
    """A part of the answer to one prompt."""

    prompt: int  # its number
    submission: Submission
    part: generate_pb2.GenerateResponse


class Answer(ABC):
    prefix: str
    whole_object: str
    part_object: str

    def __init__(
        self,
        generation: Generation,
        call: HttpCall,
        asked: Sampled,
        requests: Sequence[generate_pb2.GenerateRequest],
        *,
        shows_tokens: bool = True,
        shown_special: frozenset[int] = frozenset(),
    ) -> None:
        """`requests`: one for each prompt. `shows_tokens`: those of the answer; else `shown` leaves none.
        `shown_special`: special tokens whose text is wanted."""
        self.asked = asked
        self.served = generation.catalog.probably(asked.model or "")
        self.names = TokenNames(self.served.codec, by_id=bool(asked.return_tokens_as_token_ids))
        self.stop_token_ids: Sequence[int] = asked.stop_token_ids or ()
        self._generation = generation
        self._call = call
        self._requests = requests
        self._shows_tokens = shows_tokens
        self._shown_special = shown_special
        self._head = {
            "id": f"{self.prefix}-{call.request_id}",
            "created": int(time.time()),
            "model": asked.model or self.served.name,
        }
        self._usages: dict[int, generate_pb2.Usage] = {}  # by prompt
        self._told: dict[int, list[Any]] = {}  # by choice; of a whole answer

    @abstractmethod
    def told(self, made: Made) -> Iterator[Any]:
        """Choices of events for this part, in order."""

    @abstractmethod
    def whole_choice(self, told: list[Any]) -> Any:
        """Of all that one choice was told."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._made(is_kept=False)) as parts:
            async for made in parts:
                for choice in self.told(made):
                    yield event(self._event_body([choice], self._usage() if self.asked.always_shows_usage else None))
        if self.asked.shows_usage:
            yield event(self._event_body([], self._usage()))

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._made(is_kept=True)) as parts:
            async for made in parts:
                for choice in self.told(made):
                    self._told.setdefault(choice["index"], []).append(choice)
        choices = [self.whole_choice(told) for _, told in sorted(self._told.items())]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage()}

    def _event_body(self, choices: list[Any], usage: UsageBody | None) -> dict[str, Any]:
        body = {**self._head, "object": self.part_object, "choices": choices}
        return {**body, "usage": usage} if self.asked.shows_usage else body

    def _usage(self) -> UsageBody:
        return usage_body(list(self._usages.values()))

    async def _made(self, *, is_kept: bool) -> AsyncGenerator[Made, None]:
        streams = [partial(self._responses, number, request, is_kept) for number, request in enumerate(self._requests)]
        async with aclosing(gather(streams)) as all_made:
            async for made in all_made:
                self._count(made)
                yield made

    async def _responses(
        self, number: int, request: generate_pb2.GenerateRequest, is_kept: bool
    ) -> AsyncGenerator[Made, None]:
        generation = self._generation
        with generation.endings.noted() as ending:
            if number:  # the first is counted as the call itself
                generation.begin_call()
            parts = generation.responses(
                request,
                self._call,
                ending,
                is_kept=is_kept,
                is_counted=self._shows_tokens,
                shown_special=self._shown_special,
                shows_stop_token=self.asked.include_stop_str_in_output,
            )
            async with aclosing(parts) as responses:
                async for response in responses:
                    assert ending.submission is not None, "there are parts of it"
                    yield Made(number, ending.submission, self.shown(response))

    def shown(self, response: generate_pb2.GenerateResponse) -> generate_pb2.GenerateResponse:
        """What of it is told."""
        return response

    def _count(self, made: Made) -> None:
        usage = self._usages.setdefault(made.prompt, generate_pb2.Usage())
        if made.part.HasField("usage"):
            usage.CopyFrom(made.part.usage)
            return
        first = made.submission.choices[0]
        usage.prompt_tokens, usage.cached_tokens = len(first.prompt_ids), first.cached_tokens
        usage.completion_tokens += len(made.part.token_ids)
