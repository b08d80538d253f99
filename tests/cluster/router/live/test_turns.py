"""Whom the event loop wakes, when much has come at once."""

from __future__ import annotations

import asyncio
import weakref

import grpc.aio
import pytest

from cluster.router.live.requests import MAX_AT_ONCE, ChoiceUpdate, NewRequest, Submission
from cluster.router.live.turns import AT_ONCE, Turns
from kvrelay.v1 import generate_pb2
from worker.wire.aborts import without_traces

pytestmark = pytest.mark.unit

NEW = NewRequest(id="c", prompt_ids=[1], sampling=[generate_pb2.SamplingParams(max_tokens=4)], arrived_s=0.0)


async def _order(turns: Turns, *owners: str) -> list[str]:
    """In which the owners' waits end; "-" stands for a look of the loop at its sockets."""
    woken: list[str] = []

    async def wait(owner: str) -> None:
        await turns.wait(owner)
        woken.append(owner)

    waits = [asyncio.ensure_future(wait(owner)) for owner in owners]
    while not all(one.done() for one in waits):
        await asyncio.sleep(0)
        woken.append("-")
    return woken


async def test_a_few_at_a_time_however_many_wait() -> None:
    batches = "".join(await _order(Turns(), *["a"] * (3 * AT_ONCE + 1))).split("-")
    assert max(map(len, batches)) == AT_ONCE
    assert sum(map(len, batches)) == 3 * AT_ONCE + 1


async def test_who_asks_for_little_is_next_though_others_asked_for_much() -> None:
    order = "".join(await _order(Turns(), *["a"] * (5 * AT_ONCE), "b", "c")).replace("-", "")
    assert order.index("b") <= AT_ONCE + 1
    assert order.index("c") <= AT_ONCE + 2


async def test_a_reader_takes_a_turn_for_what_has_waited_for_it_too() -> None:
    turns, read = Turns(), []
    calls = [Submission.of(NEW._replace(id=f"c{i}"), "router", i, turns) for i in range(3 * AT_ONCE)]

    async def read_one(call: Submission) -> None:
        read.append(await call.updates())

    for call in calls:
        call.put(ChoiceUpdate(0, [5]))
    readers = [asyncio.ensure_future(read_one(call)) for call in calls]
    await asyncio.sleep(0)
    assert len(read) == AT_ONCE
    await asyncio.gather(*readers)


@pytest.mark.parametrize(("logprobs", "at_once"), [(0, MAX_AT_ONCE), (20, MAX_AT_ONCE // 21), (10**6, 1)])
async def test_in_one_turn_a_reader_takes_less_of_what_is_larger(logprobs: int, at_once: int) -> None:
    sampling = generate_pb2.SamplingParams(max_tokens=4, logprobs=logprobs)
    call = Submission.of(NEW._replace(sampling=[sampling]), "router", 1, Turns())
    for _ in range(2 * MAX_AT_ONCE):
        call.put(ChoiceUpdate(0, [5]))
    assert sum(len(update.ids) for update in await call.updates()) == at_once


async def test_what_calls_had_that_end_together_is_let_go_of_a_few_at_a_time() -> None:
    """Of one with many choices, and all that its client did not read, that takes some ms."""
    turns, kept = Turns(), weakref.WeakSet[Submission]()

    async def refused() -> None:
        had = Submission.of(NEW, "router", 1, turns)
        kept.add(had)
        raise grpc.aio.AbortError(f"the client of {had.id} took nothing")

    calls = 3 * AT_ONCE
    ends = [asyncio.ensure_future(without_traces(refused(), before=lambda: turns.wait("c"))) for _ in range(calls)]
    await asyncio.sleep(0)
    assert len(kept) == calls - AT_ONCE
    await asyncio.gather(*ends)
    assert not kept


async def test_who_has_gone_takes_no_turn() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    gone = [loop.create_future() for _ in range(3 * AT_ONCE)]
    stays = loop.create_future()
    for waiter in [*gone, stays]:
        turns.wake("a", waiter)
    for waiter in gone:
        waiter.cancel()
    async with asyncio.timeout(10):
        await stays
    async with asyncio.timeout(10):
        await turns.wait("a")  # and it goes on afterwards
