"""Stalls: a wait that takes too long ends, and none of those beside it or after it; one timer serves them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.front.bounds.stalls import Stalls

pytestmark = pytest.mark.unit


async def turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


class Clock:
    """The loop's, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.num_timers = 0
        self._call_at = asyncio.get_running_loop().call_at
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now_s)
        monkeypatch.setattr(asyncio.get_running_loop(), "call_at", self._counted)

    def _counted(self, when: float, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        self.num_timers += 1
        return self._call_at(when, callback, *args, **kwargs)

    async def move(self, seconds: float) -> None:
        self.now_s += seconds
        await turns(20)


class Client:
    """Is waited for again and again, until that has taken too long."""

    def __init__(self, stalls: Stalls) -> None:
        self.num_taken = 0
        self.is_given_up = False
        self._stalls = stalls
        self._taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(None) as limit:
                while True:
                    await self._stalls.bounded(limit, self._taken)
                    self._taken = asyncio.get_running_loop().create_future()
                    self.num_taken += 1
        except TimeoutError:
            self.is_given_up = True

    async def take(self) -> None:
        before = self.num_taken
        self._taken.set_result(None)
        while self.num_taken == before:
            await asyncio.sleep(0)


async def test_each_wait_has_the_whole_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stalls = Clock(monkeypatch), Stalls(10)
    early, late = Client(stalls), Client(stalls)
    for _ in range(5):
        await clock.move(6)
        await early.take()
        await clock.move(1)
        await late.take()
    await clock.move(9.5)
    assert (early.is_given_up, late.is_given_up) == (True, False)
    await late.take()
    await clock.move(9.5)
    assert (early.num_taken, late.num_taken) == (5, 6)
    await clock.move(1)
    assert late.is_given_up


async def test_all_that_began_together_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stalls = Clock(monkeypatch), Stalls(10)
    clients = [Client(stalls) for _ in range(50)]
    await clock.move(0)
    await clients[7].take()
    clock.now_s += 10
    await turns(5)
    assert sum(client.is_given_up for client in clients) < 50, "a few in a turn of the loop"
    await turns(15)
    assert [client.is_given_up for client in clients] == [True] * 50
    assert [client.num_taken for client in clients] == [0] * 7 + [1] + [0] * 42


async def test_who_waits_for_others_than_its_client_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stalls = Clock(monkeypatch), Stalls(10)
    async with asyncio.timeout(None) as limit:
        await stalls.bounded(limit, asyncio.sleep(0))
        await clock.move(60)
        await stalls.bounded(limit, asyncio.sleep(0))


async def test_who_has_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stalls = Clock(monkeypatch), Stalls(10)
    gone, there = Client(stalls), Client(stalls)
    await clock.move(0)
    gone.call.cancel()
    await clock.move(60)
    assert (gone.is_given_up, there.is_given_up) == (False, True)
    assert gone.call.cancelled()


async def test_a_thousand_waits_cost_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stalls = Clock(monkeypatch), Stalls(10)
    client = Client(stalls)
    await clock.move(0)
    for _ in range(1000):
        await client.take()
    assert (client.num_taken, clock.num_timers) == (1000, 1)
    client.call.cancel()
