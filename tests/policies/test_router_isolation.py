"""Requests that a decode worker may have died of: handed over at once, and computed one at a time on each worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.router.accounts import WorkerView
from cluster.router.decisions import GiveUp, Resend, Retry
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from cluster.router.retry import FORGIVEN_AFTER_TOKENS
from tests.policies.test_router_health import again, lose
from tests.policies.test_router_policy import PAGE, assigned, cluster, shape

pytestmark = pytest.mark.unit


def hand_over(policy: RouterPolicy, retry: Retry) -> str:
    """Send it as its Resend says, up to its decode worker, which holds it. Returns its id."""
    sent = again(policy, retry)
    assert sent is not None
    assert sent.is_held
    policy.on_first_token(sent.request_id, 0.0)
    policy.on_handed_off(sent.request_id, sent.decode, 0.0)
    policy.check_invariants()
    return sent.request_id


def after_a_decode_worker(num: int, *left: str) -> tuple[RouterPolicy, list[str]]:
    """Of so many requests that decoded on d0 when it died, all handed over to those that are left."""
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=10**6), pages=1000)
    for i in range(num):
        assigned(policy.assign(shape(f"r{i}"), 0.0))
        policy.on_first_token(f"r{i}", 0.0)
    for name in left:
        bring_up(policy, name)
    return policy, [hand_over(policy, retry) for retry in lose(policy, "d0")]


def bring_up(policy: RouterPolicy, name: str) -> None:
    policy.on_worker_up(WorkerView(name=name, role="decode", total_pages=1000, page_size=PAGE), 0.0)


def test_a_decode_worker_tries_one_until_its_next_token() -> None:
    policy = cluster("p0", "d0", "d1")
    for i in range(4):
        assigned(policy.assign(shape(f"r{i}"), 0.0))
        policy.on_first_token(f"r{i}", 0.0)
    first, second = (hand_over(policy, retry) for retry in lose(policy, "d0"))
    assert (policy.next_turn(), policy.next_turn()) == (first, None)
    assert not policy.on_decoded(first, 1)
    assert (policy.next_turn(), policy.next_turn()) == (second, None)
    policy.check_invariants()


def test_many_that_a_decode_worker_may_have_died_of_are_handed_over_at_once_and_begin_one_by_one() -> None:
    policy, held = after_a_decode_worker(64, "d1")
    assert len(held) == 64
    begun = []
    while (turn := policy.next_turn()) is not None:
        assert policy.next_turn() is None
        begun.append(turn)
        policy.on_decoded(turn, 1)
        policy.check_invariants()
    assert begun == held


def test_a_death_in_a_trial_convicts_the_one_that_had_begun_and_costs_those_held_nothing() -> None:
    policy, held = after_a_decode_worker(8, "d1")
    passed, tried = policy.next_turn(), None
    assert passed is not None
    policy.on_decoded(passed, 1)
    tried = policy.next_turn()
    bring_up(policy, "d2")
    retries = {retry.request_id: retry for retry in lose(policy, "d1")}
    guilty = retries.pop(str(tried))
    assert isinstance(guilty, GiveUp)
    assert guilty.code == "FAILED_PRECONDITION"
    assert sorted(retries) == sorted(set(held) - {tried})
    for retry in retries.values():
        assert isinstance(retry, Resend)
        assert (retry.past.deaths, retry.past.failures) == (("d0/",), 0)
        assert retry.past.died_in == ("" if retry.request_id == passed else "decode")
    policy.check_invariants()


def test_a_worker_that_dies_while_all_its_suspects_are_held_is_nobodys_fault() -> None:
    policy, _ = after_a_decode_worker(4, "d1")
    bring_up(policy, "d2")
    for retry in lose(policy, "d1"):
        assert isinstance(retry, Resend)
        assert (retry.past.deaths, retry.past.is_retried) == (("d0/",), False)


@pytest.mark.parametrize("end", ["on_finished", "on_cancelled", "on_preempted"])
def test_the_next_begins_when_the_one_that_is_tried_has_gone_and_none_that_went_while_held(end: str) -> None:
    policy, held = after_a_decode_worker(3, "d1")
    assert policy.next_turn() == held[0]
    policy.on_cancelled(held[1])
    getattr(policy, end)(held[0])
    assert policy.next_turn() == held[2]
    policy.check_invariants()


def test_two_decode_workers_try_one_each() -> None:
    policy, held = after_a_decode_worker(4, "d1", "d2")
    turns = [policy.next_turn() for _ in range(3)]
    assert turns[2] is None
    assert {policy._requests[str(turn)].decode for turn in turns[:2]} == {"d1", "d2"}
    assert {*turns[:2]} <= {*held}


def test_all_begin_at_once_when_the_worker_turns_out_to_live() -> None:
    policy, held = after_a_decode_worker(4, "d1")
    tried = policy.next_turn()
    view = WorkerView(name="d0", role="decode", total_pages=100, page_size=PAGE, incarnation="x")
    for request in policy._requests.values():
        request.past = replace(request.past, deaths=(view.life,))
    policy.on_worker_up(view, 0.0)
    assert [tried, *iter(policy.next_turn, None)] == held
    policy.check_invariants()


def test_a_handoff_that_ends_at_another_worker_than_named_waits_for_its_turn_there() -> None:
    policy = cluster("p0", "d0", "d1")
    for i in range(4):
        assigned(policy.assign(shape(f"r{i}"), 0.0))
        policy.on_first_token(f"r{i}", 0.0)
    retries = lose(policy, "d1")
    bring_up(policy, "d2")
    for retry in retries:
        sent = again(policy, retry)
        assert sent is not None
        policy.on_handed_off(sent.request_id, "d0", 0.0)
    assert (policy.next_turn(), policy.next_turn()) == ("r1#", None)
    policy.check_invariants()


def test_who_killed_a_worker_that_computed_several_doubtful_ones_is_found_out_by_another_trial() -> None:
    policy = cluster("p0", "d0", "d1", "d2")
    for name in ("a", "b"):
        assigned(policy.assign(shape(name), 0.0))
        policy.on_first_token(name, 0.0)
    for retry in [*lose(policy, "d0"), *lose(policy, "d1")]:
        hand_over(policy, retry)
    for _ in range(2):
        tried = policy.next_turn()
        assert tried is not None
        policy.on_decoded(tried, 1)
    bring_up(policy, "d3")
    retries = lose(policy, "d2")  # of one of them, or of nothing
    first, second = (hand_over(policy, retry) for retry in retries)
    assert policy.next_turn() == first
    assert not policy.on_decoded(first, 63)
    assert policy.next_turn() is None
    assert policy.on_decoded(first, FORGIVEN_AFTER_TOKENS)
    assert policy.next_turn() == second


def test_no_trial_begins_at_a_worker_that_says_nothing_so_that_a_cut_network_convicts_nobody() -> None:
    policy = cluster("p0", "d0", "d1")
    assigned(policy.assign(shape("r"), 0.0))
    policy.on_first_token("r", 0.0)
    policy.on_silent("d0", 1.0)
    policy.on_silent("d1", 1.0)
    (retry,) = lose(policy, "d0")
    hand_over(policy, retry)
    assert policy.next_turn() is None
    (retry,) = lose(policy, "d1")
    assert isinstance(retry, Resend)
    assert len(retry.past.deaths) == 1
    bring_up(policy, "d2")
    held = hand_over(policy, retry)
    policy.on_silent("d2", 1.0)
    assert policy.next_turn() is None
    policy.on_heard("d2")
    assert policy.next_turn() == held


def test_what_a_prefill_worker_may_have_died_of_waits_while_the_others_say_nothing() -> None:
    policy = cluster("p0", "p1", "d0")
    sent = assigned(policy.assign(shape("r"), 0.0))
    assert sent.prefill == "p0"
    policy.on_silent("p0", 1.0)
    policy.on_silent("p1", 1.0)
    (retry,) = lose(policy, "p0")
    assert again(policy, retry) is None
    assert policy.next_assignable(0.0) is None
    policy.on_heard("p1")
    tried = policy.next_assignable(0.0)
    assert tried is not None
    assert tried.prefill == "p1"
