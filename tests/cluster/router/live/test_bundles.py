"""When the tokens of a stream wait for each other, and what never does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from cluster.router.live.bundles import BUSY, IDLE, LOOK_S, UNTARGETED_S, Bundles, thread_wanted_s
from cluster.router.live.requests import MAX_AT_ONCE, ChoiceUpdate, NewRequest, RequestFailed, Submission
from cluster.router.live.turns import Turns
from engine.types import FinishReason
from kvrelay.v1 import generate_pb2

pytestmark = pytest.mark.unit

NEW = NewRequest(id="c", prompt_ids=[1], sampling=[generate_pb2.SamplingParams(max_tokens=9)], arrived_s=0.0)
LONG_S = 60.0  # longer than a test waits
SOON_S = 10.0


class Thread:
    """A clock, and the time that is wanted of a core by a thread that is as busy as it is told to be."""

    def __init__(self) -> None:
        self.now = self.wanted = 0.0

    def run(self, seconds: float, *, busy: float) -> None:
        self.now += seconds
        self.wanted += seconds * busy


def _bundles(thread: Thread, share: float = 0.5, tpot_s: float = 0.0) -> Bundles:
    return Bundles(share, tpot_s, clock=lambda: thread.now, wanted_s=lambda: thread.wanted)


@pytest.mark.parametrize(
    ("busy", "fullness"), [(0.0, 0.0), (IDLE, 0.0), ((IDLE + BUSY) / 2, 0.5), (BUSY, 1.0), (1.0, 1.0)]
)
def test_tokens_are_kept_the_longer_the_busier_the_thread_is(busy: float, fullness: float) -> None:
    thread = Thread()
    bundles = _bundles(thread)
    assert bundles.keep_s(0.04) == 0.0  # nothing is known yet
    thread.run(LOOK_S, busy=busy)
    assert bundles.keep_s(0.04) == pytest.approx(fullness * 0.5 * 0.04)
    thread.run(LOOK_S, busy=0.0)
    assert bundles.keep_s(0.04) == 0.0


def test_a_thread_that_shares_its_core_has_wanted_all_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "schedstat"
    monkeypatch.setattr("cluster.router.live.bundles.SCHEDSTAT", told)
    told.write_text("1500000000 2500000000 7\n")
    assert thread_wanted_s() == 4.0
    told.unlink()
    assert 0 < thread_wanted_s() <= time.thread_time()


def test_the_share_is_of_the_requests_target_then_of_the_routers_then_of_a_usual_one() -> None:
    for given_s, target_s in ((0.0, UNTARGETED_S), (0.02, 0.02)):
        thread = Thread()
        bundles = _bundles(thread, tpot_s=given_s)
        bundles.keep_s(0.0)
        thread.run(LOOK_S, busy=1.0)
        assert bundles.keep_s(0.0) == pytest.approx(0.5 * target_s)
        assert bundles.keep_s(0.1) == pytest.approx(0.05)


def test_a_share_of_nothing_keeps_nothing() -> None:
    thread = Thread()
    bundles = _bundles(thread, share=0.0)
    thread.run(LOOK_S, busy=1.0)
    assert bundles.keep_s(0.04) == bundles.keep_s(0.04) == 0.0


class Keeping(Bundles):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def keep_s(self, tpot_s: float) -> float:
        return self.seconds


def _token() -> ChoiceUpdate:
    return ChoiceUpdate(0, [5])


def count(updates: list[ChoiceUpdate]) -> int:
    """Of their tokens."""
    return sum(len(update.ids) for update in updates)


async def _begun(bundles: Bundles) -> Submission:
    """A call whose first token was taken."""
    call = Submission.of(NEW, "router", 1, Turns(), bundles)
    call.put(_token())
    assert count(await call.updates()) == 1
    return call


async def _kept(call: Submission) -> asyncio.Future[list[ChoiceUpdate]]:
    """What its reader gets, who has begun to wait."""
    taken = asyncio.ensure_future(call.updates())
    await asyncio.sleep(0)
    return taken


async def test_the_first_goes_at_once_and_the_next_ones_together() -> None:
    call = Submission.of(NEW, "router", 1, Turns(), Keeping(0.05))
    async with asyncio.timeout(SOON_S):
        first = await _kept(call)
        call.put(_token())
        assert count(await first) == 1
        call.put(_token())
        second = await _kept(call)
        call.put(_token())
        call.put(_token())
        assert not second.done()
        assert count(await second) == 3


async def test_where_nothing_came_while_they_would_have_been_kept_the_next_one_goes_at_once() -> None:
    call = await _begun(Keeping(0.001))
    async with asyncio.timeout(SOON_S):
        taken = await _kept(call)
        await asyncio.sleep(0.05)
        assert not taken.done()
        call.put(_token())
        assert count(await taken) == 1


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_an_end_waits_for_nothing(is_waiting: bool) -> None:
    call = await _begun(Keeping(LONG_S))
    async with asyncio.timeout(SOON_S):
        call.put(_token())
        taken = asyncio.ensure_future(call.updates())
        if is_waiting:
            await asyncio.sleep(0)
        call.put(ChoiceUpdate(0, [5], finish=FinishReason.LENGTH))
        assert [(update.ids, update.finish) for update in await taken] == [([5, 5], FinishReason.LENGTH)]


async def test_many_wait_no_longer() -> None:
    call = await _begun(Keeping(LONG_S))
    async with asyncio.timeout(SOON_S):
        taken = await _kept(call)
        for _ in range(MAX_AT_ONCE // 2):
            call.put(_token())
        assert count(await taken) == MAX_AT_ONCE // 2


async def test_what_could_not_be_taken_in_one_go_waits_no_longer_either() -> None:
    """Of many choices with log-probabilities a step brings more than that: they would fall behind for ever."""
    sampling = [generate_pb2.SamplingParams(max_tokens=9, logprobs=20)] * 64
    call = Submission.of(NEW._replace(sampling=sampling), "router", 1, Turns(), Keeping(LONG_S))
    async with asyncio.timeout(SOON_S):
        for _ in range(3):
            for choice in range(64):
                call.put(ChoiceUpdate(choice, [5]))
            while call._num_tokens >= call._tokens_at_once // 2:
                assert await call.updates()


async def test_a_failure_waits_for_nothing_and_what_came_before_it_is_told_first() -> None:
    call = await _begun(Keeping(LONG_S))
    async with asyncio.timeout(SOON_S):
        taken = await _kept(call)
        call.put(_token())
        call.fail(RequestFailed(grpc.StatusCode.UNAVAILABLE, "gone"))
        assert count(await taken) == 1
        with pytest.raises(RequestFailed, match="gone"):
            await call.updates()


async def test_a_reader_that_goes_while_tokens_are_kept_leaves_no_timer() -> None:
    bundles = Keeping(0.01)
    call = await _begun(bundles)
    taken = await _kept(call)
    taken.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taken
    await asyncio.sleep(0.05)
    call.put(_token())
    bundles.seconds = 0.0
    assert count(await call.updates()) == 1
