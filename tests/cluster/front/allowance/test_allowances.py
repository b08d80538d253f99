"""What a name may take, by its account."""

from __future__ import annotations

import random

import pytest

from cluster.front.allowance.allowances import Allowances, Refused
from cluster.front.allowance.options import Account

pytestmark = pytest.mark.unit


def allowances(routers: int = 1, **account: float) -> Allowances:
    return Allowances({"chat": Account.model_validate(account)}, routers)


def begun(of: Allowances, count: int, now: float, name: str = "chat") -> int:
    return sum(of.begin(name, 1, now) is None for _ in range(count))


def test_a_minutes_requests_may_come_at_once_and_then_as_they_flow_in() -> None:
    of = allowances(requests_per_minute=6)
    assert begun(of, 10, 0.0) == 6
    assert of.begin("chat", 1, 5.0) == Refused(
        "requests_per_minute of 'chat' is 6 at this router, of which 0 are left", 5.0
    )
    assert begun(of, 10, 30.0) == 3
    assert begun(of, 10, 1e6) == 6


def test_prompts_are_charged_when_they_come_and_answers_are_owed() -> None:
    of = allowances(tokens_per_minute=60)
    assert of.take_prompt("chat", 40, 0.0) is None
    refused = of.take_prompt("chat", 30, 0.0)
    assert refused is not None
    assert refused.retry_after_s == 10.0
    of.take_answer("chat", 50, 0.0)
    late = of.begin("chat", 1, 0.0)
    assert late is not None
    assert late.retry_after_s == 31.0
    assert begun(of, 1, 31.0) == 1


def test_a_prompt_that_is_longer_than_the_limit_waits_for_all_of_it() -> None:
    of = allowances(tokens_per_minute=60)
    assert of.take_prompt("chat", 120, 0.0) is None
    refused = of.take_prompt("chat", 1, 0.0)
    assert refused is not None
    assert refused.retry_after_s == 61.0


def test_choices_are_calls_and_give_their_places_back() -> None:
    of = allowances(max_concurrent=4)
    assert of.begin("chat", 3, 0.0) is None
    refused = of.begin("chat", 2, 0.0)
    assert refused is not None
    assert refused.reason.startswith("max_concurrent of 'chat' is 4 at this router, 3 run")
    of.end("chat", 3)
    assert of.begin("chat", 4, 0.0) is None


def test_what_is_refused_takes_nothing() -> None:
    of = allowances(requests_per_minute=5, tokens_per_minute=10, max_concurrent=1)
    assert begun(of, 9, 0.0) == 1
    of.end("chat", 1)
    of.take_answer("chat", 10, 0.0)
    assert begun(of, 9, 0.0) == 0
    requests = of.requests("chat", 0.0)
    assert requests is not None
    assert requests.remaining == 4


def test_each_of_several_routers_gives_a_part() -> None:
    of = allowances(4, requests_per_minute=8, max_concurrent=6)
    assert begun(of, 9, 0.0) == 2
    assert begun(allowances(64, requests_per_minute=8), 9, 0.0) == 1
    assert begun(allowances(64, max_concurrent=8), 9, 0.0) == 1


def test_who_is_not_listed_has_the_default_and_a_bucket_of_its_own() -> None:
    of = Allowances({"default": Account(requests_per_minute=2), "chat": Account()})
    assert [begun(of, 9, 0.0, name) for name in ("one", "two", "chat", "")] == [2, 2, 9, 2]


def test_a_limit_that_changes_finds_what_was_spent() -> None:
    of = allowances(requests_per_minute=6)
    begun(of, 6, 0.0)
    of.accounts = {"chat": Account(requests_per_minute=8, max_concurrent=7)}
    assert begun(of, 9, 0.0) == 1
    of.end("chat", 7)
    of.accounts = {}
    assert begun(of, 9, 0.0) == 9


@pytest.mark.parametrize("seed", range(3))
def test_in_no_span_more_requests_begin_than_its_share_and_a_minutes(seed: int) -> None:
    rng, of, now, taken_s = random.Random(seed), allowances(requests_per_minute=30), 0.0, []
    for _ in range(2000):
        now += rng.expovariate(2.0)
        if of.begin("chat", 1, now) is None:
            taken_s.append(now)
    for first in range(0, len(taken_s), 7):
        for last in range(first, len(taken_s), 5):
            assert last - first <= 30 + (taken_s[last] - taken_s[first]) / 2 + 1e-6
    assert len(taken_s) > 400
