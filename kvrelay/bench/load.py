"""play() sends requests at their times and notes when each token came. It judges nothing: see kvrelay.bench.metrics.

An open loop: a request is sent when it is due, however slow the answers are. It is due at its arrival time, or, under
`max_concurrency`, when a place came free after that. Latencies count from then, so that a client that falls behind
shows as latency and not as fewer requests. The client shares its cores with the server, so for each message it takes
a time and a count, and leaves the rest for afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.bench.metrics import Outcome
from kvrelay.client.types import Completion, KvrelayError
from kvrelay.v1 import generate_pb2


class Message(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...


class Answer(Protocol):
    async def read(self) -> Message | None:
        """What comes next; None at the end. Raises KvrelayError."""

    def completion(self) -> Completion:
        """All of it."""


class Server(Protocol):
    """An AsyncClient, or what asks another server the same (kvrelay/bench/openai.py)."""

    def send(self, request: generate_pb2.GenerateRequest, *, timeout_s: float | None = None) -> Answer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request that is built, and when it comes, in seconds after the start."""

    request: generate_pb2.GenerateRequest
    at_s: float
    input_len: int


async def play(
    client: Server,
    plan: Sequence[Planned],
    *,
    max_concurrency: int | None = None,
    timeout_s: float | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Send all of `plan`, which is in order of time; returns what became of each, and seconds from start to last end.

    Cancelling it cancels every request that is out.
    """
    places: asyncio.Queue[float] | None = None  # since when each has been free
    if max_concurrency:
        places = asyncio.Queue()
        for _ in range(max_concurrency):
            places.put_nowait(0.0)
    outcomes: list[Outcome] = []
    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index, planned in enumerate(plan):
            due_s = planned.at_s
            if (early_s := due_s - (time.perf_counter() - start_s)) > 0:
                await asyncio.sleep(early_s)
            if places is not None:
                due_s = max(due_s, await places.get())
            outcome = Outcome(index=index, due_s=due_s, input_len=planned.input_len)
            outcomes.append(outcome)
            tasks.create_task(_send(client, planned, outcome, start_s, timeout_s, places, on_end))
    return outcomes, max((outcome.ended_s for outcome in outcomes), default=0.0)


async def _send(
    client: Server,
    planned: Planned,
    outcome: Outcome,
    start_s: float,
    timeout_s: float | None,
    places: asyncio.Queue[float] | None,
    on_end: Callable[[Outcome], None],
) -> None:
    try:
        await _follow(client, planned.request, outcome, start_s, timeout_s)
    except KvrelayError as error:
        outcome.code, outcome.message = error.code, error.message
    finally:
        outcome.ended_s = time.perf_counter() - start_s
        if places is not None:
            places.put_nowait(outcome.ended_s)
    on_end(outcome)


async def _follow(
    client: Server,
    request: generate_pb2.GenerateRequest,
    outcome: Outcome,
    start_s: float,
    timeout_s: float | None,
) -> None:
    stream = client.send(request, timeout_s=timeout_s)
    clock, times = time.perf_counter, outcome.token_times_s
    while (message := await stream.read()) is not None:
        if message.token_ids:
            times.append(clock() - start_s)
            outcome.output_len += len(message.token_ids)
    if not times:
        raise KvrelayError("INTERNAL", "the answer ended without a token")
    answer = stream.completion()
    outcome.request_id = answer.request_id
    outcome.usage, outcome.timeline, outcome.receipt = answer.usage, answer.timeline, answer.receipt
    if answer.usage is not None and answer.usage.completion_tokens:
        outcome.output_len = answer.usage.completion_tokens  # where no ids are told, a message's tokens are a guess
