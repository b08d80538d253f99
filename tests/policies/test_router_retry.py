"""RouterPolicy: what becomes of a request that a worker has failed: when it is sent again, past whom, or why not."""

from __future__ import annotations

import pytest

from cluster.router.decisions import Assigned, GiveUp, Queued, Resend, Unavailable
from cluster.router.policy import RouterOptions, RouterPolicy
from tests.policies.test_router_policy import assigned, cluster, shape

pytestmark = pytest.mark.unit


def sent(policy: RouterPolicy, failures: int = 0) -> Assigned:
    return assigned(policy.assign(shape("a", failures=failures), 0.0))


@pytest.mark.parametrize(("failed_before", "after_s"), [(0, 0.0), (1, 0.1), (2, 0.4), (3, 0.4), (8, 0.4)])
def test_each_failure_of_a_request_makes_it_wait_longer_up_to_a_bound(failed_before: int, after_s: float) -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_attempts=10))
    sent(policy, failed_before)
    retry = policy.on_failed("a", "p0: its handoff failed")
    assert isinstance(retry, Resend)
    assert (retry.request_id, retry.after_s, retry.failures) == ("a", after_s, failed_before + 1)
    assert retry.reason == "p0: its handoff failed"


@pytest.mark.parametrize("max_attempts", [1, 4])
def test_after_so_many_failed_attempts_it_is_given_up_with_the_last_reason(max_attempts: int) -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_attempts=max_attempts))
    sent(policy, max_attempts - 1)
    reason = f"given up after {max_attempts} failed attempts; the last: p0: out of order"
    assert policy.on_failed("a", "p0: out of order") == GiveUp(request_id="a", reason=reason)
    policy.check_invariants()


def test_before_the_first_token_both_workers_are_avoided_and_after_it_the_decode_worker_alone() -> None:
    policy = cluster("p0", "p1", "d0", "d1")
    sent(policy)
    retry = policy.on_failed("a", "")
    assert isinstance(retry, Resend)
    assert retry.avoid == {"p0", "d0"}
    sent(policy)
    policy.on_first_token("a", 0.0)
    retry = policy.on_failed("a", "")
    assert isinstance(retry, Resend)
    assert retry.avoid == {"d0"}


def test_a_preemption_is_no_failure_and_costs_no_wait() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_attempts=1))
    sent(policy)
    retry = policy.on_preempted("a")
    assert (retry.after_s, retry.avoid, retry.failures) == (0.0, frozenset(), 0)
    assert retry.reason == "d0 preempted it"


def test_a_lost_worker_fails_what_it_had_and_what_waited_for_it_alone() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=10, max_attempts=2))
    sent(policy, failures=1)
    assert isinstance(policy.assign(shape("b"), 0.0), Queued)
    first, second = policy.on_worker_lost("p0", "it said nothing for 2 s")
    assert first == GiveUp(
        request_id="a", reason="given up after 2 failed attempts; the last: p0 is lost: it said nothing for 2 s"
    )
    assert isinstance(second, Resend)
    assert (second.request_id, second.avoid, second.failures) == ("b", frozenset(), 1)


def test_kv_that_went_to_a_worker_lost_meanwhile_is_made_again() -> None:
    """It was moved to another worker, too late: the first had taken the KV, and is lost."""
    policy = cluster("p0", "d0", "d1")
    sent(policy)
    assert policy.reassign("a", "d0") == "d1"
    assert policy.on_worker_lost("d0", "it died") == []
    retry = policy.on_handed_off("a", "d0")
    assert isinstance(retry, Resend)
    assert retry.reason == "d0 was lost after it had taken the KV"
    policy.check_invariants()


def test_how_long_a_role_without_a_worker_is_waited_for_is_the_policys_answer() -> None:
    policy = cluster("p0", options=RouterOptions(unavailable_grace_s=15.0))
    assert policy.assign(shape("a"), 0.0) == Unavailable(reason="no decode worker is ready", wait_s=15.0)
