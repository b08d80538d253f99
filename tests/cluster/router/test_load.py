"""Load and GetLoad: how requests fared that ended lately, for how long that is whole, and the loop is not held up."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.router.live.timeline import Timeline
from cluster.router.monitoring.load import KEPT, Load
from cluster.router.monitoring.status import AT_ONCE, load_of


def note(load: Load, arrived_s: float, *, lasted_s: float = 2.0) -> None:
    timeline = Timeline(arrived_s)
    timeline.enter("prefill_queue", arrived_s + 0.125)
    timeline.first_token(arrived_s + 0.5)
    timeline.finish(arrived_s + lasted_s)
    live: Any = SimpleNamespace(
        timeline=timeline,
        output_ids=[1, 2, 3],
        prompt_ids=[1] * 7,
        cached_tokens=4,
        slo=(0.3, 0.0),
        prefill="prefill-0",
        decode="decode-1",
    )
    load.note(live)


def router_of(load: Load, now: float) -> Any:
    return SimpleNamespace(now=now, uptime_s=now, metrics=SimpleNamespace(load=load))


async def test_what_ended_is_told_with_its_age_and_all_that_a_plan_goes_by() -> None:
    load = Load()
    note(load, 90.0)
    answer = await load_of(router_of(load, 100.0), 0.0)
    (told,) = answer.requests
    assert (told.age_s, told.prompt_tokens, told.cached_tokens, told.output_tokens) == (10.0, 7, 4, 3)
    assert (told.ttft_s, told.tpot_s, told.failed) == (0.5, 0.75, False)
    assert (told.slo_ttft_s, told.slo_tpot_s) == (0.3, 0.0), "what it has asked for itself"
    assert answer.whole_s == 100.0  # since it was started
    assert list(told.before_first_s) == [0.125, 0.375, 0, 0, 0, 0], "route, and waiting for prefill"
    assert list(told.after_first_s) == [0, 1.5, 0, 0, 0, 0]
    assert (told.prefill_worker, told.decode_worker) == ("prefill-0", "decode-1")


async def test_a_window_holds_what_came_in_it() -> None:
    load = Load()
    for arrived_s in (10.0, 80.0, 95.0):
        note(load, arrived_s)
    answer = await load_of(router_of(load, 100.0), 30.0)
    assert [told.age_s for told in answer.requests] == [20.0, 5.0]
    assert answer.whole_s == 30.0


async def test_of_a_busy_router_it_says_for_how_long_none_is_missing() -> None:
    load = Load()
    note(load, 0.0, lasted_s=1.0)
    assert load.whole_since_s == -math.inf
    for number in range(KEPT):
        note(load, 10.0 + number)
    answer = await load_of(router_of(load, 10_000.0), 0.0)
    assert len(answer.requests) == KEPT
    assert answer.whole_s == 10_000.0 - 12.0  # the oldest that is kept ended then; what was dropped, before


async def test_others_have_the_loop_while_thousands_are_told() -> None:
    load, turns, told = Load(), 0, 0
    for number in range(KEPT):
        note(load, float(number))
    answering = asyncio.ensure_future(load_of(router_of(load, 10_000.0), 0.0))
    while not answering.done():
        await asyncio.sleep(0)
        turns += 1
        note(load, 9_000.0)  # ends meanwhile
    told = len((await answering).requests)
    assert turns >= KEPT // AT_ONCE
    assert told == KEPT
    assert max(each.age_s for each in answering.result().requests) == pytest.approx(10_000.0)
