"""RouterPolicy: what becomes of a request that a worker has failed: when it is sent again, past whom, or why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.router.accounts import Report, WorkerView
from cluster.router.decisions import Assigned, GiveUp, Queued, Rejected, Resend, Unavailable
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from cluster.router.retry import MAX_LOSSES
from tests.policies.test_router_policy import PAGE, assigned, assigned_id, cluster, lost, shape

pytestmark = pytest.mark.unit


def sent(policy: RouterPolicy, failures: int = 0) -> Assigned:
    return assigned(policy.assign(shape("a", failures=failures), 0.0))


@pytest.mark.parametrize(("failed_before", "after_s"), [(0, 0.0), (1, 0.1), (2, 0.4), (3, 0.4), (8, 0.4)])
def test_each_failure_of_a_request_makes_it_wait_longer_up_to_a_bound(failed_before: int, after_s: float) -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_attempts=10))
    sent(policy, failed_before)
    retry = policy.on_failed("a", "p0: its handoff failed", 0.0)
    assert isinstance(retry, Resend)
    assert (retry.request_id, retry.after_s, retry.past.failures) == ("a", after_s, failed_before + 1)
    assert retry.reason == "p0: its handoff failed"


@pytest.mark.parametrize("max_attempts", [1, 4])
def test_after_so_many_failed_attempts_it_is_given_up_with_the_last_reason(max_attempts: int) -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_attempts=max_attempts))
    sent(policy, max_attempts - 1)
    reason = f"given up after {max_attempts} failed attempts; the last: p0: out of order"
    assert policy.on_failed("a", "p0: out of order", 0.0) == GiveUp(request_id="a", reason=reason)
    policy.check_invariants()


def test_before_the_first_token_both_workers_are_avoided_and_after_it_the_decode_worker_alone() -> None:
    policy = cluster("p0", "p1", "d0", "d1")
    sent(policy)
    retry = policy.on_failed("a", "", 0.0)
    assert isinstance(retry, Resend)
    assert retry.past.avoid == {"p0", "d0"}
    sent(policy)
    policy.on_first_token("a", 0.0)
    retry = policy.on_failed("a", "", 0.0)
    assert isinstance(retry, Resend)
    assert retry.past.avoid == {"d0"}


def test_a_preemption_is_no_failure_and_costs_no_wait() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_attempts=1))
    sent(policy)
    retry = policy.on_preempted("a")
    assert (retry.after_s, retry.past.avoid, retry.past.failures) == (0.0, frozenset(), 0)
    assert retry.reason == "d0 preempted it"


def test_a_lost_worker_costs_a_request_no_attempt() -> None:
    policy = cluster("p0", "p1", "d0", options=RouterOptions(max_attempts=2))
    sent(policy, failures=1)
    [retry] = policy.on_worker_lost("p0", "it said nothing for 2 s", 0.0)
    assert isinstance(retry, Resend)
    assert (retry.after_s, retry.past.failures, retry.past.losses) == (0.0, 1, 1)
    assert retry.reason == "p0 is lost: it said nothing for 2 s"


def test_a_request_does_not_follow_lost_workers_for_ever() -> None:
    policy = cluster("p0", "d0")
    assigned(policy.assign(shape("a", losses=MAX_LOSSES - 1), 0.0))
    [given_up] = policy.on_worker_lost("d0", "it died", 0.0)  # where it was not yet
    reason = "given up after 32 workers that were lost or had no room; the last: d0 is lost: it died"
    assert given_up == GiveUp(request_id="a", reason=reason)


def test_kv_that_went_to_a_worker_lost_meanwhile_is_made_again() -> None:
    """It was moved to another worker, too late: the first had taken the KV, and is lost."""
    policy = cluster("p0", "d0", "d1")
    sent(policy)
    assert policy.reassign("a", "d0", 0.0) == "d1"
    assert policy.on_worker_lost("d0", "it died", 0.0) == []
    retry = policy.on_handed_off("a", "d0", 0.0)
    assert isinstance(retry, Resend)
    assert retry.reason == "d0 was lost after it had taken the KV"
    policy.check_invariants()


def unable(policy: RouterPolicy, request_id: str, worker: str, peer: str = "") -> Resend | GiveUp:
    why = f"{peer or worker}: cannot"
    return policy.on_failed(request_id, why, 0.0, worker=worker, cause="worker", peer=peer)


def test_a_request_that_a_worker_cannot_serve_goes_to_others_at_once_and_loses_no_attempt_by_it() -> None:
    policy = cluster("p0", "p1", "d0", "d1", options=RouterOptions(max_attempts=1))
    assert (sent(policy).prefill, policy._requests["a"].decode) == ("p0", "d0")
    retry = unable(policy, "a", "p0")
    assert isinstance(retry, Resend)
    assert retry.past.unable == {"p0"}
    assert (retry.after_s, retry.past.failures, retry.past.losses) == (0.0, 0, 0)
    again = assigned(policy.assign(replace(shape("a#2"), past=retry.past), 0.0, is_resent=True))
    assert (again.prefill, again.decode) == ("p1", "d0")
    retry = unable(policy, "a#2", "p1", peer="d0")
    assert isinstance(retry, Resend)
    again = assigned(policy.assign(replace(shape("a#3"), past=retry.past), 0.0, is_resent=True))
    assert (again.prefill, again.decode) == ("p1", "d1")
    policy.check_invariants()


def test_who_cannot_serve_one_request_is_not_asked_about_another_of_its_kind_for_a_while() -> None:
    policy = cluster("p0", "p1", "d0")

    def read_at(request_id: str, kind: str, now: float) -> str:
        placed = assigned(policy.assign(replace(shape(request_id), kind=kind), now))
        policy.check_invariants()
        policy.on_finished(request_id)
        return placed.prefill

    assigned(policy.assign(replace(shape("a"), kind="sql"), 0.0))
    assert isinstance(unable(policy, "a", "p0"), Resend)
    assert [read_at(f"b{i}", kind, 59.0) for i, kind in enumerate(("sql", "legal", ""))] == ["p1", "p0", "p0"]
    assert read_at("c", "sql", 60.0) == "p0", "its files may be there by now"
    assigned(policy.assign(replace(shape("d"), kind="sql"), 60.0))
    assert isinstance(unable(policy, "d", "p0"), Resend)
    assert lost(policy, "p1") == []
    assert read_at("e", "sql", 100.0) == "p0", "there is no other, and it says itself why not"
    assert lost(policy, "p0") == []
    for name in ("p0", "p1"):
        policy.on_worker_up(WorkerView(name=name, role="prefill", total_pages=100, page_size=PAGE), 2.0)
    assert read_at("f", "sql", 2.0) == "p0", "it is another process"


@pytest.mark.parametrize(("worker", "peer"), [("p1", ""), ("p0", "d0")])
def test_a_request_that_nobody_can_serve_is_refused_as_the_last_one_says(worker: str, peer: str) -> None:
    policy = cluster("p0", "p1", "d0")
    assigned(policy.assign(shape("a", unable=frozenset({"p0"} if worker == "p1" else ())), 0.0))
    given_up = GiveUp(request_id="a", reason=f"{peer or worker}: cannot", code="INVALID_ARGUMENT")
    assert unable(policy, "a", worker, peer) == given_up
    policy.check_invariants()


def test_while_a_worker_is_away_nobody_says_that_a_request_can_never_be_served() -> None:
    policy = cluster("p0", "d0")
    policy.set_members(["p0", "p1"], ["d0"])
    assigned(policy.assign(shape("a"), 500.0))
    assert isinstance(policy.on_failed("a", "p0: cannot", 500.0, worker="p0", cause="worker"), Resend)
    assert isinstance(policy.assign(shape("a", unable=ONE), 500.0, is_resent=True), Queued)
    assert policy.give_up_aside(501.0) == policy.give_up_aside(540.0) == []
    [given_up] = policy.give_up_aside(600.0)
    assert given_up.code == "UNAVAILABLE"
    policy.on_worker_up(WorkerView(name="p1", role="prefill", total_pages=100, page_size=PAGE), 600.0)
    assigned(policy.assign(shape("b", unable=frozenset({"p1"})), 600.0))
    refused = policy.on_failed("b", "p0: cannot", 600.0, worker="p0", cause="worker")
    assert isinstance(refused, GiveUp)
    assert refused.code == "INVALID_ARGUMENT"


def test_a_worker_that_says_twice_that_it_cannot_serve_a_request_costs_an_attempt() -> None:
    policy = cluster("p0", "p1", "d0", options=RouterOptions(max_attempts=1))
    assigned(policy.assign(shape("a", unable=frozenset({"p0"})), 0.0))
    given_up = unable(policy, "a", "p0")
    assert isinstance(given_up, GiveUp)
    assert given_up.code == "UNAVAILABLE"


ONE = frozenset({"p0"})


def test_what_only_some_can_serve_keeps_nobody_else_waiting() -> None:
    policy = cluster("p0", "p1", "d0", options=RouterOptions(max_backlog_tokens=40))
    assert assigned(policy.assign(shape("a", unable=ONE), 0.0)).prefill == "p1"
    for each in ("b", "c"):
        assert isinstance(policy.assign(shape(each, unable=ONE), 0.0), Queued)
    assert assigned(policy.assign(shape("d"), 0.0)).prefill == "p0"
    assert (policy.next_assignable(0.0), policy.num_queued, policy.num_aside) == (None, 2, 2)
    policy.check_invariants()
    policy.on_finished("a")
    assert [assigned_id(policy.next_assignable(0.0)), policy.next_assignable(0.0)] == ["b", None]
    policy.on_cancelled("c")
    assert policy.num_queued == 0
    policy.check_invariants()


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_nobody_can_serve_for_a_while_waits_for_who_comes_back(*, is_lost: bool) -> None:
    policy = cluster("p0", "p1", "d0")
    if is_lost:
        assert lost(policy, "p1") == []
    else:
        policy.on_report("p1", Report(made_s=0.0, draining=True), 0.0)
    assert isinstance(policy.assign(shape("a", unable=ONE), 1.0, is_resent=True), Queued)
    assert isinstance(unable_at_first(policy, 1.0), Resend), "another may be back in a moment"
    assert isinstance(policy.assign(shape("b", unable=ONE), 1.0, is_resent=True), Queued)
    assert policy.next_assignable(1.0) is None
    assert policy.give_up_aside(1.0) == policy.give_up_aside(60.0) == []
    reason = "p0 cannot serve it, and no other prefill worker is ready; try again later"
    given_up = policy.give_up_aside(61.0)
    assert {each.request_id for each in given_up} == {"a", "b"}
    assert given_up[0] == GiveUp(request_id=given_up[0].request_id, reason=reason)
    policy.on_worker_up(WorkerView(name="p2", role="prefill", total_pages=100, page_size=PAGE), 61.0)
    assert policy.num_queued == 0
    policy.check_invariants()


def unable_at_first(policy: RouterPolicy, now: float) -> Resend | GiveUp:
    """Of one that p0 alone was asked for."""
    assert assigned(policy.assign(shape("u"), now)).prefill == "p0"
    return policy.on_failed("u", "p0: cannot", now, worker="p0", cause="worker")


def test_once_all_that_were_lost_are_back_nobody_is_waited_for() -> None:
    policy = cluster("p0", "p1", "p2", "d0")
    assert lost(policy, "p1") == lost(policy, "p2") == []
    for name, is_last in (("p1", False), ("p2", True)):
        policy.on_worker_up(WorkerView(name=name, role="prefill", total_pages=100, page_size=PAGE), 1.0)
        assigned(policy.assign(shape(name, unable=frozenset({"p0", "p1", "p2"} - {name})), 1.0, is_resent=True))
        assert isinstance(unable(policy, name, name), GiveUp if is_last else Resend)
    policy.check_invariants()


def test_who_comes_back_serves_what_waits_for_it() -> None:
    policy = cluster("p0", "p1", "d0")
    assert lost(policy, "p1") == []
    assert isinstance(policy.assign(shape("a", unable=ONE), 1.0, is_resent=True), Queued)
    assert (policy.next_assignable(1.0), policy.give_up_aside(1.0)) == (None, [])
    policy.on_worker_up(WorkerView(name="p1", role="prefill", total_pages=100, page_size=PAGE), 30.0)
    assert policy.give_up_aside(90.0) == [], "somebody can"
    assert assigned_id(policy.next_assignable(90.0)) == "a"
    policy.check_invariants()


def test_who_waits_for_some_workers_is_passed_so_often_and_no_more() -> None:
    policy = cluster("p0", "p1", "d0", "d1", pages=10, options=RouterOptions(max_passes=3))
    unable_to = frozenset({"d1"})
    for each in ("x", "y"):
        assigned(policy.assign(shape(each, 110), 0.0))
    assert isinstance(policy.assign(shape("big", 140, unable=unable_to), 0.0), Queued)
    for each in ("a", "b", "c"):
        assigned(policy.assign(shape(each, 4), 0.0))
    due = policy.assign(shape("d", 4), 1.0)
    assert due == Queued(reason="one that many have gone before waits for pages")
    assert policy.next_assignable(0.0) is None
    policy.check_invariants()
    for each in ("x", "y", "a", "b", "c"):
        policy.on_finished(each)
    assert [assigned_id(policy.next_assignable(0.0)) for _ in range(3)] == ["big", "d", ""]
    policy.check_invariants()


def test_who_waits_for_some_workers_goes_by_priority_and_then_by_who_came_first() -> None:
    policy = cluster("p0", "p1", "d0", pages=10)
    assigned(policy.assign(shape("x", 140), 0.0))
    last, first = (replace(shape(each, 50, unable=ONE), priority=n, kind="k") for each, n in (("last", 2), ("1st", 0)))
    for when, each in enumerate((last, shape("2nd", 50), first, replace(shape("3rd", 50), priority=1))):
        assert isinstance(policy.assign(each, float(when)), Queued)
    policy.on_finished("x")
    order = []
    while (gone := policy.next_assignable(9.0)) is not None:
        order.append(gone.request_id)
        policy.on_finished(gone.request_id)
        policy.check_invariants()
    assert order == ["2nd", "1st", "3rd", "last"]


def test_those_who_wait_for_other_workers_do_not_wait_for_each_other() -> None:
    policy = cluster("p0", "p1", "d0", "d1")
    policy.on_report("d0", Report(made_s=0.0, draining=True), 0.0)
    stands = replace(shape("stands", unable=frozenset({"d1"})), kind="one")
    assert policy.assign(stands, 0.0) == Queued(reason="d1 cannot serve it, and no other decode worker is ready")
    assert assigned(policy.assign(replace(shape("goes", unable=ONE), kind="two"), 0.0)).prefill == "p1"
    policy.check_invariants()


def test_a_worker_that_is_started_again_may_serve_what_it_could_not() -> None:
    policy = cluster("p0", "p1", "d0")
    policy.on_report("p1", Report(made_s=0.0, draining=True), 0.0)
    assert isinstance(policy.assign(shape("a", unable=ONE), 0.0, is_resent=True), Queued)
    lost(policy, "p0")
    policy.on_worker_up(WorkerView(name="p0", role="prefill", total_pages=100, page_size=PAGE), 1.0)
    assert assigned(policy.next_assignable(1.0) or Queued(reason="")).prefill == "p0"
    policy.check_invariants()


def test_who_was_another_decode_workers_by_then_is_not_blamed_on_that_when_the_first_one_dies() -> None:
    policy = cluster("p0", "d0", "d1", options=RouterOptions(max_attempts=1))
    at = sent(policy).decode
    policy.on_submitted("a", 1)
    policy.on_report(at, Report(made_s=1.0, available_pages=50, draining=True), 1.0)
    assert policy.rename("a", 1.0) is not None
    assert lost(policy, at) == []
    retry = policy.on_failed("a", f"{at} is gone", 2.0, worker="p0", cause="peer", peer=at)
    assert isinstance(retry, Resend)
    assert (retry.past.avoid, retry.past.failures, retry.past.losses) == (frozenset(), 0, 1)
    policy.check_invariants()


def test_what_only_a_worker_could_hold_that_cannot_serve_it_does_not_wait() -> None:
    policy = cluster("p0", "d0", pages=4)
    policy.on_worker_up(WorkerView(name="d1", role="decode", total_pages=100, page_size=PAGE), 0.0)
    refused = policy.assign(shape("a", 60, 40, unable=frozenset({"d1"})), 0.0, is_resent=True)
    assert isinstance(refused, Unavailable)
    assert "the largest decode worker holds 64" in refused.reason


def test_a_running_request_does_not_move_again_to_a_worker_that_cannot_serve_it() -> None:
    policy = cluster("p0", "d0", "d1", "d2")
    assert sent(policy).decode == "d0"
    policy.on_first_token("a", 0.0)
    policy.on_handed_off("a", "d0", 0.0)
    policy.on_report("d0", Report(made_s=1.0, draining=True, request_ids=frozenset({"a"})), 1.0)
    for now, target in ((1.0, "d1"), (60.0, "d2")):
        move = policy.move("a", 40, now)
        assert move is not None
        assert move.to == target
        policy.on_move_failed("a", now, "worker")
    assert policy.move("a", 40, 120.0) is None
    policy.check_invariants()


def test_a_request_waits_in_the_queue_while_a_phase_has_no_worker_and_no_longer_than_the_grace() -> None:
    policy = cluster("p0", options=RouterOptions(unavailable_grace_s=15.0, max_queued_requests=1))
    assert policy.assign(shape("a"), 3.0) == Queued(reason="no decode worker is ready")
    assert isinstance(policy.assign(shape("b"), 3.0), Rejected)  # the queue's bounds hold
    assert policy.next_assignable(4.0) is None
    assert policy.give_up_waiting("a", 17.9) is None
    reason = "no decode worker is ready; try again later"
    assert policy.give_up_waiting("a", 18.0) == GiveUp(request_id="a", reason=reason)
    assert policy.num_queued == 0


def test_what_waits_stays_where_it_is_when_the_last_worker_goes_and_goes_on_when_one_is_back() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=10))
    sent(policy)
    assert isinstance(policy.assign(shape("b"), 0.0), Queued)
    [lost] = policy.on_worker_lost("p0", "it died", 5.0)
    assert isinstance(lost, Resend)
    assert isinstance(policy.assign(shape("a#2"), 5.0, is_resent=True), Queued)
    assert policy.give_up_waiting("b", 60.0) is None
    policy.on_worker_up(WorkerView(name="p0", role="prefill", total_pages=100, page_size=PAGE), 8.0)
    assert [assigned_id(policy.next_assignable(8.0)) for _ in range(2)] == ["a#2", ""]
    assert policy.give_up_waiting("b", 1000.0) is None  # it waits for its turn, as ever


def test_a_worker_that_comes_back_too_small_for_what_waited_says_so() -> None:
    policy = cluster("p0")
    assert isinstance(policy.assign(shape("a", 500), 0.0), Queued)
    small = WorkerView(name="d0", role="decode", total_pages=4, page_size=PAGE)
    [given_up] = policy.on_worker_up(small, 1.0)
    assert (given_up.request_id, given_up.code) == ("a", "UNAVAILABLE")
    assert "the largest decode worker holds 64" in given_up.reason
    policy.check_invariants()
