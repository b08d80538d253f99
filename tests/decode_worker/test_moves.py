"""What a worker sends of a request that it hands to another while it decodes it."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

from decode_worker.moves import Moves
from kvrelay.v1 import worker_pb2 as pb

PAGE_SIZE = 4


class FakeHandoff:
    """Of a peer that grants when it is told to, and takes all."""

    is_in_doubt = False

    def __init__(self) -> None:
        self.grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reserved = asyncio.Event()
        self.calls: list[str] = []

    def reserve(self, *_: object, **__: object) -> FakeHandoff:
        self.reserved.set()
        return self

    async def granted(self) -> None:
        await asyncio.shield(self.grant)

    def pages_ready(self, begin: int, pages: list[int]) -> None:
        self.calls.append(f"pages {begin} to {begin + len(pages)}")

    async def moved(self) -> None:
        pass

    async def commit(self, **_: object) -> None:
        self.calls.append("commit")

    async def abort(self, reason: str) -> None:
        self.calls.append(f"abort: {reason}")


async def test_nothing_more_is_sent_of_a_request_that_ends_as_pages_are_granted() -> None:
    handoff = FakeHandoff()

    async def pair(_: object) -> FakeHandoff:
        return handoff

    request = SimpleNamespace(id="a", tokens=[1] * 10, prompt_len=2, num_dropped=0, state=pb.RequestState())
    policy: Any = SimpleNamespace(
        may_move=lambda _: True,
        on_move=lambda *_: 8,
        computed_len_of=lambda _: 9,
        pages_of=lambda _: [0, 1, 2],
        on_move_stops=lambda _: None,
        stands_still=lambda _: True,
        on_move_failed=lambda _: None,
        on_move_closed=lambda *_, **__: None,
    )
    host: Any = SimpleNamespace(pool=SimpleNamespace(page_size=PAGE_SIZE), wake=lambda: None, counters=Counter())
    peers: Any = SimpleNamespace(pair=pair)
    requests: dict[str, Any] = {"a": request}
    moves = Moves(host, policy, requests, peers, on_left=lambda _: None, on_pages=lambda: None)
    moves.begin(pb.Move(request_id="a", decode=pb.WorkerAddress(name="decode-1"), number=1))
    await handoff.reserved.wait()
    handoff.grant.set_result(None)  # and before the loop turns, its last token is drawn
    request.tokens += [1] * PAGE_SIZE
    moves.drop("a")
    await moves.settle()
    assert handoff.calls == ["abort: the request is over"]
