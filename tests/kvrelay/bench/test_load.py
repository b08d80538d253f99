"""play() counts a request's times from when it was due, which under `max_concurrency` is when a place came free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvrelay.bench.load import Planned, play
from kvrelay.client.types import Completion
from kvrelay.v1 import generate_pb2

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Token:
    token_ids: Sequence[int] = (7,)


class Together:
    """Answers of one token; those that were asked for together end together."""

    def __init__(self) -> None:
        self.is_read = False

    def send(self, request: generate_pb2.GenerateRequest, *, timeout_s: float | None = None) -> Together:
        return Together()

    async def read(self) -> Token | None:
        if self.is_read:
            return None
        self.is_read = True
        await asyncio.sleep(0.01)
        return Token()

    def completion(self) -> Completion:
        return Completion(request_id="", choices=())


def test_who_waits_for_a_place_is_due_when_it_came_free() -> None:
    wanted = [Planned(request=generate_pb2.GenerateRequest(), at_s=0.0, input_len=1)] * 12
    outcomes, _ = asyncio.run(play(Together(), wanted, max_concurrency=4))
    assert [outcome.due_s for outcome in outcomes[:4]] == [0.0] * 4
    assert [outcome.due_s for outcome in outcomes[4:]] == sorted(outcome.ended_s for outcome in outcomes)[:8]
