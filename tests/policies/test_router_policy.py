"""RouterPolicy: who serves a request, who waits, who is refused, and what a lost worker takes with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cluster.router.accounts import Past, Report, RequestShape, WorkerView
from cluster.router.decisions import Assigned, Cause, Decision, Queued, Rejected, Unavailable
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from engine.pages.news import NO_NEWS, PageNews
from engine.pages.pool import PageHash, page_hashes
from worker.roles import ROLES

pytestmark = pytest.mark.unit

PAGE = 16
CAUSES: tuple[Cause, ...] = ("", "step", "step", "peer", "room", "worker")


def cluster(*names: str, pages: int = 100, options: RouterOptions | None = None) -> RouterPolicy:
    """Workers named p... prefill, d... decode, m... both."""
    policy = RouterPolicy(options)
    for name in names:
        policy.on_worker_up(view(name, pages), now=0.0)
    return policy


def view(name: str, pages: int = 100, chunk_tokens: int = 32) -> WorkerView:
    role = {"p": "prefill", "d": "decode", "m": "mixed"}[name[0]]
    chunks = chunk_tokens if role == "mixed" else 0
    return WorkerView(name=name, role=role, total_pages=pages, page_size=PAGE, chunk_tokens=chunks)


def shape(
    id: str, prompt_len: int = 32, max_tokens: int = 16, page_hashes: Sequence[PageHash] = (), **past: Any
) -> RequestShape:
    """`past`: fields of its Past."""
    return RequestShape(id=id, prompt_len=prompt_len, max_tokens=max_tokens, page_hashes=page_hashes, past=Past(**past))


def assigned(decision: Decision) -> Assigned:
    assert isinstance(decision, Assigned), decision
    return decision


def assigned_id(decision: Assigned | None) -> str:
    return "" if decision is None else decision.request_id


def lost(policy: RouterPolicy, name: str) -> list[str]:
    """The requests that a worker's loss fails."""
    return [retry.request_id for retry in policy.on_worker_lost(name, "it said nothing", 0.0)]


# choosing


def test_the_prefill_worker_with_fewest_queued_tokens_is_chosen_and_ties_go_by_name() -> None:
    policy = cluster("p1", "p0", "d0")
    assert assigned(policy.assign(shape("a", 100), 0.0)).prefill == "p0"
    assert assigned(policy.assign(shape("b", 50), 0.0)).prefill == "p1"
    assert assigned(policy.assign(shape("c", 10), 0.0)).prefill == "p1"
    assert assigned(policy.assign(shape("d", 10), 0.0)).prefill == "p1"


def test_a_worker_of_both_phases_writes_what_it_has_read_while_it_has_pages() -> None:
    policy = cluster("d0", "m0", pages=10)
    placed = [assigned(policy.assign(shape(f"r{i}", 50), 0.0)) for i in range(3)]
    assert [(each.prefill, each.decode) for each in placed] == [("m0", "m0"), ("m0", "m0"), ("m0", "d0")]


def test_a_worker_that_reads_nothing_while_it_decodes_is_given_no_prompt_that_another_can_read() -> None:
    policy = cluster("p0")
    policy.on_worker_up(view("m0", chunk_tokens=0), 0.0)
    policy.on_report("p0", Report(made_s=1.0, waiting_tokens=20_000, available_pages=100), 1.0)
    assert assigned(policy.assign(shape("a"), 1.0)).prefill == "p0"
    policy.on_chunk_tokens("m0", 32)
    assert assigned(policy.assign(shape("b"), 1.0)).prefill == "m0"
    policy.on_chunk_tokens("m0", 0)
    assert assigned(policy.assign(shape("c"), 1.0)).prefill == "p0"
    policy.on_report("p0", Report(made_s=2.0, available_pages=100, draining=True), 2.0)
    assert assigned(policy.assign(shape("d"), 2.0)).prefill == "m0"
    policy.check_invariants()


def test_workers_of_both_phases_share_what_they_write() -> None:
    policy = cluster("m0", "m1", pages=100)
    for name, wanted in (("a", "m0"), ("b", "m1"), ("c", "m0")):
        placed = assigned(policy.assign(shape(name, 50), 0.0))
        assert (placed.prefill, placed.decode) == (wanted, wanted)
        policy.on_first_token(name, 0.0)  # nothing is queued anywhere when the next one comes
    policy.on_finished("b")
    assert assigned(policy.assign(shape("d", 50), 0.0)).prefill == "m1"
    policy.check_invariants()


def test_what_was_read_for_another_worker_does_not_come_back_to_its_reader() -> None:
    policy = cluster("d0", "m0", pages=10)
    for name in ("a", "b", "c"):
        assigned(policy.assign(shape(name, 50), 0.0))
    policy.on_finished("a")
    assert policy.reassign("c", "d0", 0.1) is None
    policy.check_invariants()


def test_a_worker_of_both_phases_is_all_a_cluster_needs() -> None:
    policy = cluster("m0")
    assert not policy.missing_phase
    assert assigned(policy.assign(shape("a"), 0.0)).decode == "m0"
    policy.on_first_token("a", 0.1)
    assert lost(policy, "m0") == ["a"]
    policy.check_invariants()
    assert policy.missing_phase


def test_a_stale_report_does_not_hide_what_was_sent_since() -> None:
    """Both look idle in their reports; all the same, not everything may go to one."""
    policy = cluster("p0", "p1", "d0")
    for seq in range(1, 5):
        choice = assigned(policy.assign(shape(f"r{seq}"), 0.0))
        policy.on_submitted(choice.request_id, seq)
        for name in ("p0", "p1"):
            policy.on_report(name, Report(made_s=0.0, last_submit_seq=0, available_pages=100), 0.0)
    assert [policy._requests[f"r{i}"].prefill for i in range(1, 5)] == ["p0", "p1", "p0", "p1"]


def test_a_report_that_has_seen_a_submit_counts_it_instead_of_the_router() -> None:
    policy = cluster("p0", "p1", "d0")
    policy.on_submitted(assigned(policy.assign(shape("a", 400), 0.0)).request_id, 1)
    policy.on_report("p0", Report(made_s=1.0, last_submit_seq=1, waiting_tokens=8, available_pages=100), 1.0)
    policy.on_report("p1", Report(made_s=1.0, waiting_tokens=30, available_pages=100), 1.0)
    assert assigned(policy.assign(shape("b", 50), 1.0)).prefill == "p0"  # 8 left there of 400


def test_what_other_routers_sent_counts_until_a_report_says_it_is_done() -> None:
    policy = cluster("p0", "p1", "d0")
    policy.on_report("p0", Report(made_s=1.0, waiting_tokens=500, available_pages=100), 1.0)
    assert assigned(policy.assign(shape("a"), 1.0)).prefill == "p1"
    policy.on_report("p0", Report(made_s=2.0, waiting_tokens=0, available_pages=100), 2.0)
    assert assigned(policy.assign(shape("b"), 2.0)).prefill == "p0"


def test_of_several_routers_each_sends_prompts_to_its_own_workers_first() -> None:
    policy = cluster("p0", "p1", "d0", pages=1000)
    policy.on_report("p0", Report(made_s=1.0, available_pages=1000, is_others=True), 1.0)
    assert assigned(policy.assign(shape("a", 400), 1.0)).prefill == "p1"
    assert assigned(policy.assign(shape("b", 400), 1.0)).prefill == "p1", "twice the tokens of what it knows of p0"
    assert assigned(policy.assign(shape("c", 400), 1.0)).prefill == "p0"
    policy.check_invariants()


def test_a_report_older_than_the_last_is_dropped() -> None:
    policy = cluster("p0", "p1", "d0")
    policy.on_report("p0", Report(made_s=2.0, waiting_tokens=500, available_pages=100), 2.0)
    policy.on_report("p0", Report(made_s=1.0, waiting_tokens=0, available_pages=100), 2.1)
    assert assigned(policy.assign(shape("a"), 2.1)).prefill == "p1"


def test_a_first_token_takes_its_prompt_off_the_queue_before_the_next_report() -> None:
    policy = cluster("p0", "p1", "d0")
    policy.on_submitted(assigned(policy.assign(shape("a", 400), 0.0)).request_id, 1)
    policy.on_report("p0", Report(made_s=1.0, last_submit_seq=1, waiting_tokens=400, available_pages=100), 1.0)
    policy.on_first_token("a", 1.5)
    assert assigned(policy.assign(shape("b"), 1.5)).prefill == "p0"


def test_a_prompt_goes_where_its_prefix_was_sent_while_that_is_not_much_busier() -> None:
    policy = cluster("p0", "p1", "d0", pages=1000)
    long = list(range(320))
    first = shape("a", 320, page_hashes=page_hashes(long, PAGE))
    assert assigned(policy.assign(first, 0.0)).prefill == "p0"
    policy.on_first_token("a", 0.5)
    policy.assign(shape("b", 100), 0.5)  # p0 again: 100 queued there
    again = shape("c", 330, page_hashes=page_hashes([*long, *range(10)], PAGE))
    assert assigned(policy.assign(again, 0.6)).prefill == "p0"
    policy.assign(shape("d", 600), 0.6)  # p1
    other = shape("e", 330, page_hashes=page_hashes(list(range(1, 331)), PAGE))
    assert assigned(policy.assign(other, 0.7)).prefill == "p0"


def test_a_prompt_goes_where_its_prefix_is_said_to_be() -> None:
    policy = cluster("p0", "p1", "d0", pages=1000)
    long = page_hashes(list(range(320)), PAGE)

    def placed(id: str, made_s: float, pages: PageNews) -> str:
        policy.on_report("p1", Report(made_s=made_s, available_pages=1000, pages=pages), made_s)
        decision = assigned(policy.assign(shape(id, 320, page_hashes=long), made_s))
        policy.on_cancelled(id)
        policy.check_invariants()
        return decision.prefill

    assert placed("a", 1.0, PageNews(found=tuple(long[:3]))) == "p1"  # another router's, or an answer's
    assert placed("b", 2.0, PageNews(lost=tuple(long))) == "p0"
    assert placed("c", 3.0, PageNews(found=tuple(long[:2]), is_all=True)) == "p0"  # has had it since
    policy.on_report("p0", Report(made_s=4.0, available_pages=1000, pages=PageNews(lost=tuple(long[1:]))), 4.0)
    assert placed("d", 4.0, NO_NEWS) == "p1"


def test_a_report_that_is_too_old_still_tells_of_pages() -> None:
    policy = cluster("p0", "p1", "d0", pages=1000)
    long = page_hashes(list(range(320)), PAGE)
    policy.on_report("p1", Report(made_s=2.0, available_pages=1000), 2.0)
    policy.on_report("p1", Report(made_s=1.0, waiting_tokens=900, pages=PageNews(found=tuple(long))), 2.0)
    assert assigned(policy.assign(shape("a", 320, page_hashes=long), 2.0)).prefill == "p1"


def test_the_decode_worker_with_pages_wins_then_the_smallest_batch_then_the_name() -> None:
    policy = cluster("p0", "d0", "d1", "d2")
    policy.on_report("d0", Report(made_s=1.0, num_running=1, available_pages=1), 1.0)
    policy.on_report("d1", Report(made_s=1.0, num_running=9, available_pages=90), 1.0)
    policy.on_report("d2", Report(made_s=1.0, num_running=8, available_pages=90), 1.0)
    assert assigned(policy.assign(shape("a"), 1.0)).decode == "d2"
    assert assigned(policy.assign(shape("b"), 1.0)).decode == "d1"  # 9 each now
    assert assigned(policy.assign(shape("c"), 1.0)).decode == "d2"


def test_promised_pages_count_until_a_report_lists_the_request() -> None:
    policy = cluster("p0", "d0", "d1", pages=10)
    assert assigned(policy.assign(shape("a", 100), 0.0)).decode == "d0"  # 7 of 10 pages
    policy.on_report("d0", Report(made_s=1.0, available_pages=10), 1.0)  # has not heard of it
    assert assigned(policy.assign(shape("b", 100), 1.0)).decode == "d1"
    listed = Report(made_s=2.0, num_running=1, available_pages=3, request_ids=frozenset({"a"}))
    policy.on_report("d0", listed, 2.0)
    policy.on_finished("a")  # before a report says so
    assert assigned(policy.assign(shape("c", 100), 2.0)).decode == "d0"
    policy.check_invariants()


def test_workers_that_failed_a_request_are_taken_only_if_there_is_no_other() -> None:
    policy = cluster("p0", "d0", "d1")
    assert assigned(policy.assign(shape("a", avoid=frozenset({"p0", "d0"})), 0.0)).decode == "d1"
    lost(policy, "d1")
    assert assigned(policy.assign(shape("b", avoid=frozenset({"p0", "d0"})), 0.0)).decode == "d0"


def test_a_draining_worker_gets_nothing_new() -> None:
    policy = cluster("p0", "p1", "d0")
    policy.on_report("p0", Report(made_s=1.0, draining=True, available_pages=100), 1.0)
    assert assigned(policy.assign(shape("a"), 1.0)).prefill == "p1"
    policy.on_report("p1", Report(made_s=1.0, draining=True, available_pages=100), 1.0)
    assert policy.assign(shape("b"), 1.0) == Queued(reason="no prefill worker is ready")
    policy.on_report("p1", Report(made_s=2.0, available_pages=100), 2.0)
    assert assigned_id(policy.next_assignable(2.0)) == "b"


def test_the_reason_names_what_was_weighed() -> None:
    policy = cluster("p0", "d0")
    assert assigned(policy.assign(shape("a"), 0.0)).reason == (
        "p0: 0 prompt tokens queued, 0 of 32 cached; d0: 100 of 100 pages free, batch 0"
    )


def test_a_worker_that_computes_both_phases_may_be_given_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which phases a role computes is the registry's to say: another kind of worker needs no line here."""
    both = replace(ROLES["prefill"], name="both", phases=("prefill", "decode"))
    monkeypatch.setattr("worker.roles.ROLES", {**ROLES, "both": both})
    policy = cluster("p0")
    policy.on_worker_up(WorkerView(name="b0", role="both", total_pages=100, page_size=PAGE), 0.0)
    decision = assigned(policy.assign(shape("a", avoid=frozenset({"p0"})), 0.0))
    assert (decision.prefill, decision.decode) == ("b0", "b0")
    policy.on_report("b0", Report(made_s=1.0, last_submit_seq=1, available_pages=97), 1.0)
    policy.check_invariants()
    assert lost(policy, "b0") == ["a"]
    policy.check_invariants()


# waiting and refusing


def test_without_a_role_and_without_a_grace_a_request_is_unavailable_and_forgotten() -> None:
    policy = cluster("p0", options=RouterOptions(unavailable_grace_s=0.0))
    assert policy.assign(shape("a"), 0.0) == Unavailable(reason="no decode worker is ready")
    policy.on_worker_up(WorkerView(name="d0", role="decode", total_pages=9, page_size=PAGE), 0.0)
    assert assigned(policy.assign(shape("a"), 0.0))


def test_what_can_never_fit_is_rejected_for_good() -> None:
    policy = cluster("p0", "d0", pages=4)
    rejected = policy.assign(shape("a", 60, max_tokens=5), 0.0)
    assert isinstance(rejected, Rejected)
    assert rejected.retry_after_s is None
    assert "65 tokens; the largest decode worker holds 64" in rejected.reason
    assert assigned(policy.assign(shape("b", 60, max_tokens=4), 0.0))


def whose_only_holder_changes_its_role() -> RouterPolicy:
    """`a` waits, which d1 alone could hold; that is about to come back."""
    policy = cluster("p0", "d1")
    policy.on_worker_up(view("d0", pages=4), 0.0)
    policy.on_report("d1", Report(made_s=1.0, available_pages=100, draining=True), 1.0)
    assert isinstance(policy.assign(shape("a", 100, max_tokens=50), 1.0), Queued)
    assert policy.on_worker_lost("d1", "its role has changed", 2.0, is_death=False, comes_back=True) == []
    return policy


def test_what_only_a_worker_holds_that_changes_its_role_waits_for_it() -> None:
    policy = whose_only_holder_changes_its_role()
    assert policy.on_worker_up(replace(view("m1", pages=100), name="d1"), 2.0) == []
    taken = policy.next_assignable(2.0)
    assert taken is not None
    assert (taken.request_id, taken.decode) == ("a", "d1")


def test_one_that_is_not_of_that_phase_any_more_leaves_those_it_alone_could_hold() -> None:
    policy = whose_only_holder_changes_its_role()
    [given_up] = policy.on_worker_up(replace(view("p1", pages=100), name="d1"), 2.0)
    assert given_up.request_id == "a"


def test_a_report_that_was_made_with_the_hello_counts() -> None:
    policy = cluster("p0", "d0")
    policy.on_report("d0", Report(made_s=-0.3, available_pages=3), 0.1)
    assert policy.workers.decode.accounts["d0"].report.available_pages == 3


def test_beyond_the_backlog_requests_wait_and_go_first_come_first_served() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=100))
    assigned(policy.assign(shape("a", 90), 0.0))
    assert policy.assign(shape("b", 50), 0.0) == Queued(reason="p0: 90 prompt tokens queued")
    assert policy.assign(shape("c", 5), 0.0) == Queued(reason="1 requests wait before it")
    assert policy.next_assignable(0.0) is None
    policy.on_first_token("a", 1.0)
    ids = []
    while nxt := policy.next_assignable(1.0):
        ids.append(nxt.request_id)
    assert ids == ["b", "c"]


def test_a_prompt_longer_than_the_backlog_goes_to_an_idle_worker() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=100))
    assert assigned(policy.assign(shape("a", 500), 0.0))


def test_pages_may_be_promised_beyond_those_free_only_so_far() -> None:
    policy = cluster("p0", "d0", pages=10, options=RouterOptions(overcommit=0.5))
    policy.on_report("d0", Report(made_s=1.0, num_running=3, available_pages=2), 1.0)
    assert assigned(policy.assign(shape("a", 60), 1.0))  # 4 pages of 2 free and 5 beyond
    assert policy.assign(shape("b", 60), 1.0) == Queued(reason="d0: 0 of 10 pages free")


def test_a_full_queue_rejects_and_says_when_to_come_again() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=10, max_queued_requests=2))
    assigned(policy.assign(shape("a", 10), 0.0))
    for name in "bc":
        assert isinstance(policy.assign(shape(name, 50), 0.0), Queued)
    rejected = policy.assign(shape("d", 50), 0.0)
    assert rejected == Rejected(reason="the router's queue is full: 2 requests of 2", retry_after_s=1.0)
    policy.check_invariants()


def test_the_queue_is_bounded_in_tokens_too_but_takes_one_request_of_any_length() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=10, max_queued_tokens=100))
    assigned(policy.assign(shape("a", 10), 0.0))
    assert isinstance(policy.assign(shape("b", 500), 0.0), Queued)
    assert isinstance(policy.assign(shape("c", 1), 0.0), Rejected)


def test_retry_after_follows_the_rate_at_which_prompts_were_computed() -> None:
    policy = busy(RouterOptions(max_backlog_tokens=100))
    rejected = policy.assign(shape("c", 100), 5.0)
    assert isinstance(rejected, Rejected)
    assert rejected.retry_after_s == pytest.approx(5.25)  # 700 tokens at 400 in 3 s


def busy(options: RouterOptions) -> RouterPolicy:
    """Seven requests of 100 tokens wait, and four were computed lately, one each second; before that nobody came."""
    policy = cluster("p0", "d0", options=replace(options, max_queued_requests=7))
    policy.on_first_token(assigned(policy.assign(shape("old", 100), -900.0)).request_id, -900.0)
    running = assigned(policy.assign(shape("r0", 100), 1.0)).request_id
    for i in range(1, 8):
        assert isinstance(policy.assign(shape(f"r{i}", 100), 1.0), Queued)
    for second in range(1, 5):
        policy.on_first_token(running, float(second))
        running = assigned_id(policy.next_assignable(float(second)))
    for i in range(4):
        assert isinstance(policy.assign(shape(f"s{i}", 100), 5.0), Queued)
    return policy


def test_who_cannot_make_its_deadline_at_that_rate_is_late_where_that_is_asked_for() -> None:
    policy = busy(RouterOptions(max_backlog_tokens=100, refuse_late=True))
    assert policy.why_late("s3", 2.0).startswith("its deadline is in 2.0 s, and the prompts that wait at this router")
    assert policy.why_late("s3", 20.0) == ""
    assert policy.why_late("r0", 0.1) == "", "it does not wait"
    assert busy(RouterOptions(max_backlog_tokens=100)).why_late("s3", 2.0) == ""


def test_a_resent_request_passes_the_queue_and_its_bounds() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=100, max_queued_requests=1))
    assigned(policy.assign(shape("a", 90), 0.0))
    assert isinstance(policy.assign(shape("b", 50), 0.0), Queued)
    assert isinstance(policy.assign(shape("again", 50), 0.0, is_resent=True), Queued)
    policy.on_first_token("a", 1.0)
    nxt = policy.next_assignable(1.0)
    assert nxt is not None
    assert nxt.request_id == "again"


def test_those_that_are_sent_again_go_first_come_first_served() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=100))
    assigned(policy.assign(shape("a", 90), 0.0))
    for name in ("b", "c", "d"):
        assert isinstance(policy.assign(shape(name, 50), 0.0, is_resent=name != "b"), Queued)
    policy.on_first_token("a", 1.0)
    assert [assigned_id(policy.next_assignable(1.0)) for _ in range(2)] == ["c", "d"]
    policy.check_invariants()


def test_one_that_is_sent_again_and_has_no_pages_is_passed_only_so_often_by_others_that_are() -> None:
    policy = cluster("p0", "d0", pages=20, options=RouterOptions(max_passes=2, overcommit=0.0))
    assigned(policy.assign(shape("runs", 100), 0.0))
    assert isinstance(policy.assign(shape("large", 250), 0.0, is_resent=True), Queued)
    passed = []
    for number in range(5):
        policy.assign(shape(f"small-{number}", 10, 2), 0.0, is_resent=True)
        while name := assigned_id(policy.next_assignable(0.0)):
            passed.append(name)
        policy.check_invariants()
    assert passed == ["small-0", "small-1"]
    for name in ("runs", *passed):
        policy.on_finished(name)
    assert assigned_id(policy.next_assignable(1.0)) == "large"


# losing


def test_a_lost_prefill_worker_takes_what_it_had_not_handed_off() -> None:
    policy = cluster("p0", "p1", "d0")
    for name in ("new", "token", "handed", "both"):
        assigned(policy.assign(shape(name), 0.0))
        policy._requests[name].prefill = "p0"
    policy.on_first_token("token", 0.0)
    policy.on_handed_off("handed", "d0", 0.0)  # its first token died with the worker
    policy.on_first_token("both", 0.0)
    policy.on_handed_off("both", "d0", 0.0)
    assert lost(policy, "p0") == ["new", "token", "handed"]


def test_a_lost_decode_worker_takes_all_that_was_assigned_to_it() -> None:
    policy = cluster("p0", "d0", "d1")
    at = {name: assigned(policy.assign(shape(name), 0.0)).decode for name in "abcd"}
    assert at == {"a": "d0", "b": "d1", "c": "d0", "d": "d1"}
    assert lost(policy, "d0") == ["a", "c"]
    policy.check_invariants()
    assert assigned(policy.assign(shape("a#2"), 0.0, is_resent=True)).decode == "d1"


def test_without_a_grace_the_last_worker_of_a_role_takes_the_queue_along() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=10, unavailable_grace_s=0.0))
    assigned(policy.assign(shape("a"), 0.0))
    assert isinstance(policy.assign(shape("b"), 0.0), Queued)
    assert lost(policy, "p0") == ["a", "b"]
    assert policy.num_queued == 0
    assert policy.queued_tokens == 0


def test_the_largest_worker_takes_along_what_waits_for_it_alone() -> None:
    policy = cluster("p0", "d0")
    policy.on_worker_up(WorkerView(name="d1", role="decode", total_pages=10, page_size=PAGE), 0.0)
    assert assigned(policy.assign(shape("a", 1500, 32), 0.0)).decode == "d0"
    assert isinstance(policy.assign(shape("large", 1000, 32), 0.0), Queued)
    assert isinstance(policy.assign(shape("small"), 0.0), Queued)
    assert lost(policy, "d0") == ["a", "large"]
    assert assigned_id(policy.next_assignable(0.0)) == "small"


def test_a_worker_that_comes_back_is_empty() -> None:
    policy = cluster("p0", "d0", pages=10)
    assigned(policy.assign(shape("a", 100), 0.0))
    lost(policy, "d0")
    policy.on_worker_up(WorkerView(name="d0", role="decode", total_pages=10, page_size=PAGE), 1.0)
    assert "10 of 10 pages free, batch 0" in assigned(policy.assign(shape("b"), 1.0)).reason


def test_a_stalled_request_moves_to_a_worker_that_has_pages_now() -> None:
    policy = cluster("p0", "d0", "d1", pages=10)
    assert assigned(policy.assign(shape("a", 60), 0.0)).decode == "d0"
    assert policy.reassign("a", "d0", 0.0) == "d1"
    assert policy.reassign("a", "d0", 0.0) is None  # it is not there any more
    policy.on_report("d0", Report(made_s=1.0, available_pages=1), 1.0)
    assert policy.reassign("a", "d1", 0.0) is None
    policy.check_invariants()


def test_it_does_not_come_back_to_one_that_let_it_wait_for_a_while() -> None:
    """A worker keeps pages for what it has promised, which its report does not tell: it would go to and fro."""
    policy = cluster("p0", "d0", "d1", pages=10)
    assert assigned(policy.assign(shape("a", 60), 0.0)).decode == "d0"
    assert policy.reassign("a", "d0", 1.0) == "d1"
    for now, there in ((1.0, None), (5.0, None), (6.1, "d0")):
        policy.on_report("d0", Report(made_s=now, available_pages=10), now)
        assert policy.reassign("a", "d1", now) == there
    policy.on_worker_up(view("d2", 10), 7.0)
    assert policy.reassign("a", "d0", 7.0) == "d2"
    policy.check_invariants()


def test_what_is_read_where_it_is_decoded_waits_for_no_handoff() -> None:
    policy = cluster("m0", "d0", pages=10)
    placed = assigned(policy.assign(shape("a", 50), 0.0))
    assert (placed.prefill, placed.decode) == ("m0", "m0")
    assert policy.reassign("a", "m0", 0.0) is None


def test_what_waits_long_for_pages_elsewhere_is_decoded_where_it_was_read() -> None:
    policy = cluster("m0", "d0", pages=10)
    policy.on_report("m0", Report(made_s=0.0, available_pages=10, num_running=9, waiting_tokens=1), 0.0)
    policy.on_report("d0", Report(made_s=0.0, available_pages=0, num_waiting=1), 0.0)
    policy.assign(shape("a", 100), 0.0)
    request = policy._requests["a"]
    policy._workers.move(request, policy.workers.decode.accounts["d0"], 0.0)
    assert policy.reassign("a", "d0", 0.1) is None
    assert policy.reassign("a", "d0", 9.0) is None, "it is still read"
    policy.on_first_token("a", 9.0)
    request.stalled_s = 9.0
    assert policy.reassign("a", "d0", 9.4) is None, "there may be some in a moment"
    assert policy.reassign("a", "d0", 9.5) == "m0"
    policy.check_invariants()
    assert policy.on_handed_off("a", "m0", 9.6) is None
    policy.check_invariants()


def test_a_handoff_to_another_worker_than_named_last_is_believed() -> None:
    """The reassignment came too late: the first worker had granted pages meanwhile."""
    policy = cluster("p0", "d0", "d1")
    policy.assign(shape("a"), 0.0)
    assert policy.reassign("a", "d0", 0.0) == "d1"
    policy.on_handed_off("a", "d0", 0.0)
    assert lost(policy, "d1") == []
    assert lost(policy, "d0") == ["a"]


# moving


def running(policy: RouterPolicy, *ids: str, **free: int) -> None:
    """These run at d0, by its report. `free`: pages of the others."""
    for each in ids:
        policy.assign(shape(each, 64, 200), 0.0)
        policy.on_first_token(each, 0.0)
        if (at := policy._requests[each].decode) != "d0":
            policy.reassign(each, at, 0.0)
        policy.on_handed_off(each, "d0", 0.0)
    for name, pages in free.items():
        policy.on_report(name, Report(made_s=1.0, available_pages=pages), 1.0)


def told(policy: RouterPolicy, *ids: str, made_s: float, draining: bool = False, pages: int = 60) -> list[str]:
    report = Report(
        made_s=made_s, num_running=len(ids), available_pages=pages, request_ids=frozenset(ids), draining=draining
    )
    policy.on_report("d0", report, made_s)
    return policy.leaving("d0", made_s)


def test_all_leave_a_worker_that_stops_a_few_at_a_time() -> None:
    policy = cluster("p0", "d0", "d1", options=RouterOptions(placement="splitwise"))  # none moves for balance
    ids = [f"r{i}" for i in range(6)]
    running(policy, *ids, d1=100)
    assert told(policy, *ids, made_s=2.0) == []
    leaving = told(policy, *ids, made_s=3.0, draining=True)
    assert leaving == ids[::-1]
    moves = [policy.move(each, 80, 3.0) for each in leaving]
    assert {(move.to, move.pages, move.reason) for move in moves if move} == {("d1", 9, "d0 is stopping")}
    assert [move.request_id for move in moves if move] == ["r5", "r4", "r3", "r2"]
    assert policy.leaving("d0", 3.0) == ["r1", "r0"]
    policy.check_invariants()
    policy.on_moved("r5", "d1", 3.1)
    policy.on_move_failed("r4", 3.1, "room")
    assert policy.leaving("d0", 3.2) == ["r1", "r0"], "who was refused rests"
    assert policy.leaving("d0", 3.7) == ["r4", "r1", "r0"]
    assert lost(policy, "d0") == ["r0", "r1", "r2", "r3", "r4"]
    policy.on_finished("r5")
    policy.check_invariants()


def test_the_youngest_leaves_one_that_runs_out_of_pages_where_another_has_them() -> None:
    policy = cluster("p0", "d0", "d1")
    running(policy, "a", "b", "c", d1=100)
    assert told(policy, "a", "b", "c", made_s=2.0, pages=3) == []
    assert told(policy, "a", "b", "c", made_s=3.0, pages=2) == ["c", "b", "a"]
    policy.on_report("d1", Report(made_s=3.0, available_pages=9), 3.0)
    assert policy.move("c", 80, 3.0) is None, "it would have none left"
    policy.on_report("d1", Report(made_s=4.0, available_pages=30), 4.0)
    move = policy.move("c", 80, 4.0)
    assert move is not None
    assert (move.to, move.reason) == ("d1", "d0 has 2 pages left for 3 requests")
    assert policy.move("b", 80, 4.0) is None, "one at a time"


def test_a_worker_that_stops_is_left_whatever_runs_at_the_others() -> None:
    policy = cluster("p0", "d0", "d1")
    running(policy, "a", "b", d1=90)
    policy.on_report("d1", Report(made_s=1.0, num_running=10, available_pages=90), 1.0)
    leaving = told(policy, "a", "b", made_s=2.0, draining=True)
    assert [policy.move(each, 80, 2.0) is not None for each in leaving] == [True, True]


def test_one_for_which_nobody_has_pages_does_not_keep_others_from_leaving() -> None:
    policy = cluster("p0", "d0", "d1")
    running(policy, "a", "b", d1=10)
    leaving = told(policy, "a", "b", made_s=2.0, draining=True)
    assert policy.move("b", 900, 2.0) is None
    assert "a" in leaving
    assert policy.move("a", 80, 2.0) is not None


def test_tokens_that_the_worker_before_has_not_brought_are_lost_with_it() -> None:
    policy = cluster("p0", "d0", "d1")
    running(policy, "a", "b", d1=100)
    for each in told(policy, "a", "b", made_s=2.0, draining=True):
        assert policy.move(each, 80, 2.0) is not None
        policy.on_moved(each, "d1", 2.1, has_left=False)
    policy.on_left("b", "d0")
    assert lost(policy, "d0") == ["a"]
    policy.check_invariants()


def test_requests_leave_one_that_computes_far_more_of_them_and_do_not_swing() -> None:
    policy = cluster("p0", "d0", "d1")
    ids = [f"r{i}" for i in range(8)]
    running(policy, *ids, d1=100)
    now, left = 2.0, list(ids)
    while leaving := told(policy, *left, made_s=now):
        move = policy.move(leaving[0], 80, now)
        assert move is not None
        policy.on_moved(leaving[0], "d1", now)
        left.remove(leaving[0])
        now += 1.0
    assert left == ids[:5], "from eight and none to five and three"
    report = Report(made_s=now, num_running=3, available_pages=60, request_ids=frozenset(ids[5:]))
    policy.on_report("d1", report, now)
    assert policy.leaving("d1", now) == []


def test_what_has_moved_to_a_worker_that_is_lost_is_sent_again() -> None:
    policy = cluster("p0", "d0", "d1")
    running(policy, "a", d1=100)
    told(policy, "a", made_s=2.0, draining=True)
    assert policy.move("a", 80, 2.0) is not None
    assert lost(policy, "d1") == [], "it goes on where it is"
    policy.check_invariants()
    assert policy.on_moved("a", "d1", 3.0) is not None
    policy.check_invariants()


# prompts that are passed on


def read_by(policy: RouterPolicy, prefill: str, *ids: str) -> None:
    """Sent there, with no first token yet; and it stops."""
    for seq, each in enumerate(ids, 1):
        assert assigned(policy.assign(shape(each, 64, 20), 0.0)).prefill == prefill
        policy.on_submitted(each, seq)
    policy.on_report(prefill, Report(made_s=1.0, last_submit_seq=len(ids), available_pages=50, draining=True), 1.0)


def test_prompts_leave_a_worker_that_stops_for_one_that_reads_and_decodes() -> None:
    policy = cluster("p0", "d0", "m0")
    policy.on_report("m0", Report(made_s=0.0, available_pages=100, waiting_tokens=900), 0.0)
    read_by(policy, "p0", "a", "b")
    assert {policy._requests[each].decode for each in "ab"} == {"d0", "m0"}
    assert policy.unread("p0", 1.0) == ["a", "b"]
    moves = [policy.pass_on(each, 1.0) for each in "ab"]
    assert [(move.source, move.to, move.reason) for move in moves if move] == [("p0", "m0", "p0 is stopping")] * 2
    assert policy.unread("p0", 1.1) == [], "both are on their way"
    policy.check_invariants()
    assert policy.on_passed("a", "m0", 48, 1.2) is None
    assert (policy._requests["a"].prefill, policy._requests["a"].work) == ("m0", 16)
    assert policy.on_passing_failed("b", "m0", 1.2, "room") == "m0"
    assert (policy.unread("p0", 1.3), policy.unread("p0", 1.8)) == ([], ["b"])
    policy.check_invariants()
    assert lost(policy, "p0") == ["b"]
    policy.on_first_token("a", 2.0)
    assert policy.on_handed_off("a", "m0", 2.0) is None
    assert lost(policy, "m0") == ["a"]
    policy.check_invariants()


def test_a_prompt_that_is_not_passed_on_is_booked_where_its_kv_will_go() -> None:
    policy = cluster("p0", "d0", "m0")
    policy.on_report("m0", Report(made_s=0.0, available_pages=10, waiting_tokens=900), 0.0)
    read_by(policy, "p0", "a")
    assert policy._requests["a"].decode == "d0"
    assert policy.pass_on("a", 1.0) is not None
    assert policy._requests["a"].decode == "m0"
    assert policy.on_passing_failed("a", "d0", 1.2, "request") == "d0"
    assert (policy.unread("p0", 1e9), "a" in policy.workers.decode.accounts["d0"].promised) == ([], True)
    policy.check_invariants()


def test_one_that_could_not_be_passed_on_moves_once_it_is_read() -> None:
    policy = cluster("p0", "d0", "m0")
    policy.on_report("m0", Report(made_s=0.0, available_pages=10, waiting_tokens=900), 0.0)
    read_by(policy, "p0", "a")
    assert policy.pass_on("a", 1.0) is not None
    decode = policy.on_passing_failed("a", "d0", 1.2, "request")
    policy.on_first_token("a", 2.0)
    assert policy.on_handed_off("a", decode, 2.0) is None
    policy.on_report("d0", Report(made_s=3.0, available_pages=50, draining=True, request_ids=frozenset({"a"})), 3.0)
    assert policy.leaving("d0", 3.0) == ["a"]


def test_what_is_read_for_a_worker_that_stops_is_soon_anothers() -> None:
    policy = cluster("p0", "d0", "d1")
    for each in ("a", "b"):
        policy.assign(shape(each, 64, 20), 0.0)
        policy.on_submitted(each, 1)
    at = policy._requests["a"].decode
    assert policy.unsent(at) == [], "it does not stop"
    policy.on_report(at, Report(made_s=1.0, available_pages=50, draining=True), 1.0)
    assert policy.unsent(at) == ["a"]
    other = policy.rename("a", 1.0)
    assert {at, other} == {"d0", "d1"}
    assert (policy.unsent(at), policy.workers.has_left(at)) == ([], False), "its KV may come there all the same"
    policy.check_invariants()
    policy.on_renamed("a")
    assert policy.workers.has_left(at)
    policy.check_invariants()


def test_what_is_read_for_a_worker_that_stops_stays_where_it_is_read_if_nobody_else_decodes() -> None:
    policy = cluster("d0", "m0", pages=10)
    for each in ("x", "y", "a"):
        placed = assigned(policy.assign(shape(each, 50), 0.0))
        policy.on_submitted(each, 1)
    assert (placed.prefill, placed.decode) == ("m0", "d0")
    policy.on_report("d0", Report(made_s=1.0, available_pages=10, draining=True), 1.0)
    assert policy.unsent("d0") == ["a"]
    assert policy.rename("a", 1.0) == "m0"
    policy.on_renamed("a")
    assert policy.has_left("d0")
    policy.check_invariants()


def test_a_worker_has_not_left_while_its_loss_would_have_a_request_sent_again() -> None:
    policy = cluster("p0", "d0", "d1")
    source = assigned(policy.assign(shape("a", 64, 20), 0.0)).decode
    policy.on_submitted("a", 1)
    policy.on_first_token("a", 0.0)
    policy.on_report("p0", Report(made_s=1.0, available_pages=100, draining=True), 1.0)
    assert not policy.has_left("p0"), "it may not have handed it over"
    policy.on_handed_off("a", source, 1.0)
    assert policy.has_left("p0")
    policy.on_report(source, Report(made_s=2.0, draining=True, request_ids=frozenset({"a"})), 2.0)
    move = policy.move("a", 70, 2.0)
    assert move is not None
    assert policy.on_moved("a", move.to, 3.0, has_left=False) is None
    assert not policy.has_left(source), "its last tokens may not have come"
    policy.on_left("a", source)
    assert policy.has_left(source)


def test_what_was_renamed_too_late_keeps_the_worker_until_it_has_come() -> None:
    policy = cluster("p0", "d0", "d1")
    at = assigned(policy.assign(shape("a", 64, 20), 0.0)).decode
    policy.on_submitted("a", 1)
    policy.on_report(at, Report(made_s=1.0, available_pages=50, draining=True), 1.0)
    assert policy.rename("a", 1.0) is not None
    policy.on_first_token("a", 2.0)
    assert policy.on_handed_off("a", at, 2.0) is None
    assert policy.leaving(at, 2.0) == ["a"]
    policy.check_invariants()


def test_what_is_passed_on_comes_to_nobody_that_it_was_another_s_before() -> None:
    policy = cluster("p0", "d0", "m0")
    policy.on_report("m0", Report(made_s=0.0, available_pages=10, num_running=9), 0.0)
    at = assigned(policy.assign(shape("a", 64, 20), 0.0)).decode
    policy.on_submitted("a", 1)
    policy.on_report(at, Report(made_s=1.0, available_pages=50, draining=True), 1.0)
    assert policy.rename("a", 1.0) == "m0"
    policy.on_report("p0", Report(made_s=1.0, available_pages=100, draining=True), 1.0)
    assert policy.pass_on("a", 1.0) is not None
    assert policy.on_passed("a", "m0", 0, 2.0) is None
    assert policy.workers.has_left(at)
    policy.check_invariants()


def test_prompts_stay_where_nobody_else_could_read_them() -> None:
    policy = cluster("p0", "p1", "d0")
    policy.on_report("p1", Report(made_s=0.0, waiting_tokens=900), 0.0)
    read_by(policy, "p0", "a")
    assert policy.unread("p0", 1.0) == []
    policy.on_worker_up(view("m0", chunk_tokens=0), 1.0)
    policy.on_report("m0", Report(made_s=1.0, available_pages=100), 1.0)
    assert policy.pass_on("a", 1.0) is None, "it would wait there until nobody writes"


def test_one_that_may_have_killed_a_worker_is_not_passed_on() -> None:
    policy = cluster("p0", "m0")
    policy.on_report("m0", Report(made_s=0.0, available_pages=100, waiting_tokens=900), 0.0)
    policy.assign(shape("a", deaths=("p9/x",), died_in="prefill"), 0.0)
    policy.on_submitted("a", 1)
    policy.on_report("p0", Report(made_s=1.0, last_submit_seq=1, draining=True), 1.0)
    assert policy.unread("p0", 1.0) == []


def test_a_prompt_taken_by_a_worker_that_is_lost_is_sent_again() -> None:
    policy = cluster("p0", "m0", "m1")
    for name in ("m0", "m1"):
        policy.on_report(name, Report(made_s=0.0, available_pages=100, waiting_tokens=900), 0.0)
    read_by(policy, "p0", "a")
    move = policy.pass_on("a", 1.0)
    assert move is not None
    assert lost(policy, move.to) == ["a"]
    policy.check_invariants()
    assert policy.on_passed("a", move.to, 16, 1.2) is None


# everything at once


@pytest.mark.parametrize("names", [("p0", "p1", "d0", "d1"), ("p0", "m0", "d0", "m1")])
@pytest.mark.parametrize("seed", range(20))
def test_random_walk_keeps_every_request_in_one_place(seed: int, names: tuple[str, ...]) -> None:
    rng = random.Random(seed)
    options = RouterOptions(max_backlog_tokens=200, max_queued_requests=8, max_queued_tokens=600)
    policy = cluster(*names, pages=20, options=options)
    up = set(names)
    known: set[str] = set()
    prompts = [[rng.randrange(50) for _ in range(rng.randrange(1, 200))] for _ in range(6)]
    seqs = dict.fromkeys(names, 0)
    decode = [name for name in names if name[0] != "p"]

    def submit(choice: Assigned) -> None:
        assert {choice.prefill, choice.decode} <= up
        assert not {choice.prefill, choice.decode} & policy._requests[choice.request_id].past.unable
        seqs[choice.prefill] += 1
        policy.on_submitted(choice.request_id, seqs[choice.prefill])

    for step in range(600):
        now = step / 10
        sent = sorted(i for i in known if policy._requests[i].prefill)
        match rng.randrange(20):
            case 19:
                for each in policy.unsent(rng.choice(decode)):
                    policy.rename(each, now)
                for each in sorted(known):
                    if rng.random() < 0.5:
                        policy.on_renamed(each)
                known -= {given_up.request_id for given_up in policy.give_up_aside(now)}
            case 17:
                for each in policy.unread(rng.choice(names), now):
                    policy.pass_on(each, now)
            case 18 if passing := [i for i in sorted(known) if policy._requests[i].is_passing]:
                name = rng.choice(passing)
                if rng.random() < 0.5:
                    policy.on_passing_failed(name, rng.choice(decode), now, rng.choice(CAUSES))
                elif policy.on_passed(name, rng.choice(decode), rng.randrange(300), now) is not None:
                    known.discard(name)
            case 14 | 15:
                for each in known:
                    policy.on_left(each, rng.choice(decode))
                for each in policy.leaving(rng.choice(decode), now):
                    policy.move(each, rng.randrange(1, 300), now)
            case 16 if moving := [i for i in sorted(known) if policy._requests[i].moving_to]:
                name = rng.choice(moving)
                if rng.random() < 0.5:
                    policy.on_move_failed(name, now, rng.choice(CAUSES))
                elif policy.on_moved(name, rng.choice(decode), now, has_left=rng.random() < 0.5) is not None:
                    known.discard(name)
            case 12 if sent:
                policy.on_decoded(rng.choice(sent), rng.choice((1, 64)))
            case 13:
                name = rng.choice(names)
                rng.choice((policy.on_heard, policy.on_stepped, partial(policy.on_silent, silent_s=1.0)))(name)
            case 0 | 1 | 2 | 3:
                prompt = rng.choice(prompts)
                name = f"r{step}"
                asked = shape(
                    name,
                    len(prompt),
                    rng.randrange(1, 150),
                    page_hashes=page_hashes(prompt, PAGE),
                    died_in=rng.choice(("", "", "prefill", "decode")),
                    unable=frozenset(rng.sample(names, rng.choice((0, 0, 1, 2)))),
                )
                decision = policy.assign(
                    replace(asked, kind=rng.choice(("", "", "sql"))),
                    now,
                    is_resent=rng.random() < 0.2,
                )
                if isinstance(decision, Assigned):
                    submit(decision)
                if isinstance(decision, Assigned | Queued):
                    known.add(name)
            case 4 | 5 if sent:
                policy.on_first_token(rng.choice(sent), now)
            case 6 if sent:
                tokens, taken_s = rng.randrange(300), rng.random()
                retry = policy.on_handed_off(
                    rng.choice(sent), rng.choice(decode), now, num_tokens=tokens, taken_s=taken_s
                )
                if retry is not None:
                    known.discard(retry.request_id)
            case 7 if known:
                name = rng.choice(sorted(known))
                match rng.randrange(4):
                    case 0:
                        policy.on_finished(name)
                    case 1:
                        policy.on_cancelled(name)
                    case 2:
                        policy.on_preempted(name)
                    case _:
                        at = policy._requests[name]
                        worker, cause = rng.choice((at.prefill, at.decode)), rng.choice(CAUSES)
                        policy.on_failed(name, "it failed", now, worker=worker, cause=cause, peer=at.decode)
                known.discard(name)
            case 8 if known:
                policy.reassign(rng.choice(sorted(known)), rng.choice(decode), now)
            case 9:
                name = rng.choice(names)
                if name in up:
                    known -= set(lost(policy, name))
                    up.discard(name)
                else:
                    seqs[name] = 0
                    came = view(name, 20, chunk_tokens=rng.choice((0, 32)))
                    known -= {given_up.request_id for given_up in policy.on_worker_up(came, now)}
                    up.add(name)
            case _:
                name = rng.choice(names)
                report = Report(
                    made_s=now - rng.random(),
                    last_submit_seq=rng.randint(0, seqs.get(name, 0)),
                    num_running=rng.randrange(5),
                    waiting_tokens=rng.randrange(300),
                    available_pages=rng.randrange(21),
                    draining=rng.random() < 0.1,
                    request_ids=frozenset(i for i in known if rng.random() < 0.5),
                )
                policy.on_report(name, report, now)
        while nxt := policy.next_assignable(now):
            submit(nxt)
        while turn := policy.next_turn():
            assert policy._requests[turn].is_handed_off
        policy.check_invariants()
        assert set(policy._requests) == known
    for name in sorted(known):
        policy.on_finished(name)
    policy.check_invariants()
    assert policy.num_queued == policy.queued_tokens == 0
    assert all(
        not p.waiting and p.queued_tokens <= p.report.waiting_tokens for p in policy.workers.prefill.accounts.values()
    )
    assert all(not d.promised and not d.listed for d in policy.workers.decode.accounts.values())
