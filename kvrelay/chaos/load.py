"""Streams are the requests of a round: each is played to its end, or as far as its client goes, and notes when every
token came. What it should have brought is the oracle's to say.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Literal

from kvrelay.chaos.templates import Template
from kvrelay.client.client import AsyncClient
from kvrelay.client.messages import build_request
from kvrelay.client.types import KvrelayError

Fate = Literal["end", "cancel", "never_read", "deadline"]
GRACE_S = 3.0  # beyond its deadline, until a stream counts as one that hangs
UNREAD_S = 1.5  # that a client which never reads stays


class Ended(StrEnum):
    RUNS = "runs"
    DONE = "done"
    FAILED = "failed"
    LEFT = "left"  # the client wanted no more


@dataclass(slots=True, kw_only=True)
class Stream:
    template: Template
    client: AsyncClient
    timeout_s: float
    fate: Fate = "end"
    allowed: frozenset[str] = frozenset()  # codes that it may end with, besides its cell's
    cache_salt: str = ""  # so that its prompt is computed and handed over, though another has been like it
    after_tokens: int = 0  # cancel: when so many have come
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # of each message with tokens, on the monotonic clock
    began_s: float = 0.0
    ended_s: float = 0.0
    ended: Ended = Ended.RUNS
    code: str = ""
    reason: str = ""

    @property
    def num_due(self) -> int:
        """Tokens that it has not brought yet."""
        return len(self.template.tokens) - len(self.tokens)

    def silence_after(self, fault_s: float) -> float:
        """The longest that it said nothing, of what came after the fault; 0 where it had ended, or was left."""
        if self.ended is Ended.LEFT or not self.ended_s or self.ended_s < fault_s:
            return 0.0
        end_s = () if self.ended is Ended.DONE else (self.ended_s,)
        times = pairwise((self.began_s, *self.times_s, *end_s))
        gaps = [end - max(begin, fault_s) for begin, end in times if end > fault_s]
        return max(gaps, default=0.0)


async def play(stream: Stream) -> None:
    """Until it ends; a stream that hangs beyond its deadline is given up, and still `runs`."""
    stream.began_s = time.monotonic()
    try:
        async with asyncio.timeout(stream.timeout_s + GRACE_S):
            await _play(stream)
    except TimeoutError:
        stream.code = "HANGS"
    except KvrelayError as error:
        stream.ended, stream.code, stream.reason = Ended.FAILED, error.code, error.message
    stream.ended_s = time.monotonic()


async def _play(stream: Stream) -> None:
    request = build_request(stream.template.prompt, stream.template.options)
    request.cache_salt = stream.cache_salt
    answer = stream.client.send(request, timeout_s=stream.timeout_s)
    if stream.fate == "never_read":
        await asyncio.sleep(UNREAD_S)
        await answer.aclose()
        stream.ended = Ended.LEFT
        return
    while True:
        if stream.fate == "cancel" and len(stream.tokens) >= stream.after_tokens:
            await answer.aclose()
            stream.ended = Ended.LEFT
            return
        message = await answer.read()
        if message is None:
            stream.ended = Ended.DONE
            return
        if message.token_ids:
            stream.times_s.append(time.monotonic())
            stream.tokens.extend(message.token_ids)
