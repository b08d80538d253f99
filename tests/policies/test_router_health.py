"""RouterPolicy and trouble: workers that fail, that may have died of a request, that say nothing, pairs that cannot
reach each other; and which of the requests that wait may pass which."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from cluster.router.accounts import Past, PeerTrouble, Report, RequestShape, WorkerView
from cluster.router.decisions import Assigned, GiveUp, Queued, Resend, Retry
from cluster.router.health.circuits import MAX_OPEN_S, Circuits
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from cluster.router.retry import FORGIVEN_AFTER_TOKENS, MAX_LOSSES
from tests.policies.test_router_policy import PAGE, assigned, assigned_id, cluster, shape

pytestmark = pytest.mark.unit


def fail_step(policy: RouterPolicy, request_id: str, now: float) -> Retry:
    """At the prefill worker that it was sent to."""
    worker = policy._requests[request_id].prefill
    return policy.on_failed(request_id, f"{worker}: CUDA error", now, worker=worker, cause="step")


def prefill_of(policy: RouterPolicy, request_id: str, now: float) -> str:
    """Where it is sent, and gone from at once."""
    name = assigned(policy.assign(shape(request_id), now)).prefill
    policy.on_finished(request_id)
    return name


# circuits


def test_a_circuit_opens_after_three_failed_steps_and_for_twice_as_long_each_time() -> None:
    circuits, now = Circuits(3), 10.0
    for _ in range(2):
        now += 0.1
        assert not circuits.on_failure("p0", "no", now)
        assert circuits.lets("p0", now)
    expected_s = 1.0
    for _ in range(8):
        now += 0.1
        assert circuits.on_failure("p0", "no", now)
        assert circuits.state("p0", now + expected_s - 0.01) == "open"
        assert not circuits.on_failure("p0", "sent before it opened", now + expected_s / 2)
        now += expected_s
        assert circuits.state("p0", now) == "half_open"
        circuits.check_invariants()
        expected_s = min(2 * expected_s, MAX_OPEN_S)
    circuits.on_success("p0")
    assert circuits.state("p0", now) == "closed"


def test_failures_of_one_moment_are_one_failure() -> None:
    circuits = Circuits(3)
    for _ in range(40):
        assert not circuits.on_failure("p0", "one step of forty requests", 1.0)


def test_one_request_tries_a_half_open_circuit_and_the_others_keep_away() -> None:
    policy = cluster("p0", "p1", "d0")
    for i in range(3):
        assigned(policy.assign(shape(f"r{i}", avoid=frozenset({"p1"})), float(i)))
        fail_step(policy, f"r{i}", float(i))
    assert prefill_of(policy, "shunned", 2.5) == "p1"
    trial = assigned(policy.assign(shape("trial"), 3.1))
    assert trial.prefill == "p0"
    assert prefill_of(policy, "other", 3.1) == "p1"
    policy.on_cancelled("trial")  # nothing is known by that: another may try it
    assert assigned(policy.assign(shape("again"), 3.2)).prefill == "p0"
    policy.on_stepped("p0")
    assert policy.health.circuit("p0", 3.3) == "closed"
    policy.check_invariants()


def test_where_all_circuits_are_open_the_one_that_opens_soonest_is_tried() -> None:
    policy = cluster("p0", "p1", "d0")
    for name, at_s in (("p0", 5.0), ("p1", 4.0)):
        for i in range(3):
            policy.health.on_failed(name, "no", at_s + i / 10)
    assert prefill_of(policy, "a", 5.3) == "p1"


def test_a_request_that_steps_fail_goes_past_each_worker_that_failed_it() -> None:
    policy = cluster("p0", "p1", "p2", "d0")
    past, seen = Past(), []
    for attempt in range(3):
        request = RequestShape(id=f"a#{attempt}", prompt_len=32, max_tokens=16, past=past)
        seen.append(assigned(policy.assign(request, float(attempt))).prefill)
        retry = fail_step(policy, request.id, float(attempt))
        assert isinstance(retry, Resend)
        past = retry.past
    assert seen == ["p0", "p1", "p2"]


def test_only_a_failure_of_the_requests_own_is_final() -> None:
    policy = cluster("p0", "d0")
    policy.assign(shape("a"), 0.0)
    ended = policy.on_failed("a", "p0: too long", 0.0, worker="p0", cause="request")
    assert ended == GiveUp(request_id="a", reason="p0: too long", code="INVALID_ARGUMENT")


def test_a_worker_without_room_is_no_failure_and_is_avoided() -> None:
    policy = cluster("p0", "d0", "d1", options=RouterOptions(max_attempts=1))
    policy.assign(shape("a"), 0.0)
    retry = policy.on_failed("a", "d0 is stopping", 0.0, worker="p0", cause="room", peer="d0")
    assert isinstance(retry, Resend)
    assert (sorted(retry.past.avoid), retry.past.failures) == (["d0"], 0)


# pairs


def test_a_pair_that_failed_is_avoided_and_tried_again_now_and_then() -> None:
    policy = cluster("p0", "p1", "d0", "d1")
    busy = Report(made_s=1.0, num_running=5, available_pages=90)
    policy.on_report("d1", busy, 1.0)
    assert assigned(policy.assign(shape("a"), 1.0)).decode == "d0"
    policy.on_failed("a", "p0: no route", 1.0, worker="p0", cause="peer", peer="d0")
    decision = assigned(policy.assign(shape("b"), 1.1))
    assert (decision.prefill, decision.decode) == ("p0", "d1")
    assert [pair.name for pair in policy.health.pairs("p0")] == ["d0"]
    policy.on_finished("b")
    assert assigned(policy.assign(shape("c"), 2.1)).decode == "d0"  # tries it
    assert assigned(policy.assign(shape("d", avoid=frozenset({"p1"})), 2.1)).decode == "d1"
    policy.on_handed_off("c", "d0", 2.2)
    assert policy.health.pairs("p0") == []
    policy.check_invariants()


def test_a_prefill_worker_that_reaches_no_decode_worker_is_avoided_while_another_does() -> None:
    policy = cluster("p0", "p1", "d0")
    policy.health.on_pair_failed("p0", "d0", "no route", 1.0)
    assert assigned(policy.assign(shape("a"), 1.1)).prefill == "p1"
    policy.on_worker_lost("p1", "it died", 1.2)
    assert assigned(policy.assign(shape("b"), 1.3)).prefill == "p0"  # no other pair exists


def test_what_one_router_learned_of_a_pair_others_hear_in_reports_once() -> None:
    policy = cluster("p0", "d0", "d1")
    told = PeerTrouble(name="d0", failures=1, reason="no route", failed_s=4.9)
    policy.on_report("p0", Report(made_s=5.0, available_pages=100, peers=(told,)), 5.0)
    assert assigned(policy.assign(shape("a"), 5.1)).decode == "d1"
    policy.on_report("p0", Report(made_s=7.0, available_pages=100, peers=(replace(told, failed_s=4.91),)), 7.0)
    assert assigned(policy.assign(shape("b"), 7.0)).decode == "d0"  # the report is of the same failure


# silence


def test_a_silent_worker_is_suspect_alone_and_lost_beside_another() -> None:
    policy = cluster("p0", "p1", "d0", options=RouterOptions(dead_after_s=2.0, lost_after_s=10.0))
    assert policy.on_silent("d0", 2.1) == ""
    assert policy.health.doubt("d0") == "it has said nothing for 2.1 s"
    assert assigned(policy.assign(shape("a"), 0.0)).decode == "d0"  # there is no other
    assert policy.on_silent("d0", 10.0) == "it said nothing for 10 s"
    assert policy.on_silent("p0", 2.1) == "it said nothing for 2 s"
    assert policy.on_silent("p1", 2.1) == ""  # the other one is silent, too
    policy.on_heard("p0")
    assert prefill_of(policy, "b", 0.0) == "p0"


def test_handoffs_to_a_suspect_worker_cost_no_attempt() -> None:
    """All of a kind stopped for some seconds: what cannot be handed over meanwhile is not given up before they are."""
    policy = cluster("p0", "d0", options=RouterOptions(max_attempts=4))
    policy.on_silent("d0", 2.1)
    request, waits_s = shape("a"), list[float]()
    for _ in range(MAX_LOSSES - 1):
        assigned(policy.assign(request, 0.0, is_resent=True))
        retry = policy.on_failed(request.id, "it did not answer", 0.0, worker="p0", cause="peer", peer="d0")
        assert isinstance(retry, Resend)
        assert retry.past.failures == 0
        waits_s.append(round(retry.after_s, 3))
        request = resent(retry)
    assert (waits_s[:3], max(waits_s)) == ([0.1, 0.2, 0.3], 1.0)
    assert sum(waits_s) > 2 * policy.options.lost_after_s
    assert not policy.health.pairs("p0")


def test_a_worker_whose_step_takes_long_gets_nothing_new_while_there_is_another() -> None:
    policy = cluster("p0", "p1", "d0", options=RouterOptions(slow_step_s=5.0))
    policy.on_report("p0", Report(made_s=1.0, available_pages=100, step_age_s=6.2), 1.0)
    assert policy.health.doubt("p0") == "its step has been running for 6.2 s"
    assert prefill_of(policy, "a", 1.0) == "p1"
    policy.on_report("p0", Report(made_s=2.0, available_pages=100), 2.0)
    assert prefill_of(policy, "b", 2.0) == "p0"


def late(policy: RouterPolicy, lags_s: dict[str, float], now: float) -> None:
    for name, lag_s in lags_s.items():
        policy.on_report(name, Report(made_s=now, available_pages=100, loop_lag_s=lag_s), now)


def test_a_worker_that_starves_beside_its_peers_gets_nothing_new_until_it_has_run_well_for_a_while() -> None:
    policy = cluster("p0", "p1", "d0", "d1")
    late(policy, {"p1": 0.02, "p0": 0.8}, 0.0)
    assert prefill_of(policy, "a stall", 0.0) == "p0"
    late(policy, {"p1": 0.02, "p0": 0.8}, 1.5)
    assert policy.health.doubt("p0") == (
        "it gets little processor time: its event loop is 0.8 s late, its peers' 0.02 s"
    )
    assert prefill_of(policy, "a", 1.5) == "p1"
    late(policy, {"p1": 0.02, "p0": 0.02}, 3.0)
    assert prefill_of(policy, "b", 3.0) == "p1"
    late(policy, {"p0": 0.02}, 6.5)
    assert prefill_of(policy, "c", 6.5) == "p0"


@pytest.mark.parametrize("lags_s", [{"d1": 0.1, "d0": 0.9}, {"d1": 0.0, "d0": 0.25}, {"d1": 0.8, "d0": 0.8}])
def test_a_worker_is_not_doubted_for_what_all_suffer_from_or_is_too_little(lags_s: dict[str, float]) -> None:
    policy = cluster("p0", "d0", "d1")
    late(policy, lags_s, 1.0)
    late(policy, lags_s, 9.0)
    assert not policy.health.doubt("d0")


def test_of_four_workers_the_one_that_runs_well_does_not_get_everything() -> None:
    policy = cluster("p0", "d0", "d1", "d2", "d3")
    for now in (1.0, 9.0):
        late(policy, {"d0": 0.01, "d1": 0.5, "d2": 0.5, "d3": 0.5}, now)
    assert not any(policy.health.doubt(f"d{i}") for i in range(4))


def test_one_that_starves_stands_in_for_one_that_is_silent() -> None:
    """Slow is better than to wait for `lost_after_s`."""
    policy = cluster("p0", "d0", "d1", options=RouterOptions(dead_after_s=2.0, lost_after_s=10.0))
    for now in (1.0, 9.0):
        late(policy, {"d0": 0.0, "d1": 0.9}, now)
    assert policy.health.doubt("d1")
    assert policy.on_silent("d0", 2.1) == "it said nothing for 2 s"


# deaths


def lose(policy: RouterPolicy, name: str, now: float = 0.0) -> list[Retry]:
    return policy.on_worker_lost(name, "it died", now)


def again(policy: RouterPolicy, retry: Retry, now: float = 0.0) -> Assigned | None:
    """Send it as its Resend says; None if it must wait."""
    assert isinstance(retry, Resend), retry
    decision = policy.assign(resent(retry), now, is_resent=True)
    return decision if isinstance(decision, Assigned) else None


def resent(retry: Resend) -> RequestShape:
    return replace(shape(f"{retry.request_id}#"), past=retry.past)


def test_who_was_computed_is_to_blame_and_who_was_elsewhere_is_not() -> None:
    policy = cluster("p0", "d0")
    for name in ("at prefill", "handed over"):
        assigned(policy.assign(shape(name), 0.0))
    policy.on_first_token("handed over", 0.0)
    policy.on_handed_off("handed over", "d0", 0.0)
    [retry] = lose(policy, "p0")
    assert isinstance(retry, Resend)
    assert (retry.request_id, retry.past.deaths, retry.past.died_in) == ("at prefill", ("p0/",), "prefill")
    policy = cluster("p0", "d0")
    for name in ("at prefill", "decoding"):
        assigned(policy.assign(shape(name), 0.0))
    policy.on_first_token("decoding", 0.0)
    died = {r.request_id: r.past.died_in for r in lose(policy, "d0") if isinstance(r, Resend)}
    assert died == {"at prefill": "", "decoding": "decode"}


def test_after_the_second_death_a_request_is_given_up_and_never_sent_to_a_third() -> None:
    policy = cluster("p0", "p1", "p2", "d0")
    assigned(policy.assign(shape("a"), 0.0))
    sent = again(policy, lose(policy, "p0")[0])
    assert sent is not None
    [given_up] = lose(policy, sent.prefill)
    assert isinstance(given_up, GiveUp)
    assert given_up.code == "FAILED_PRECONDITION"
    assert given_up.reason.startswith("2 workers died while they computed it (p0, p1); do not send it again")


def test_what_a_worker_may_have_died_of_is_not_sent_to_its_successor() -> None:
    """Which may be the one that is to blame: a second death there would convict the request."""
    policy = cluster("p0", "p1", "d0")
    assigned(policy.assign(shape("a"), 0.0))
    [retry] = lose(policy, "p0")
    policy.on_worker_up(WorkerView(name="p0", role="prefill", total_pages=100, page_size=PAGE, incarnation="2"), 0.0)
    sent = again(policy, retry)
    assert sent is not None
    assert sent.prefill == "p1"


def died_in(policy: RouterPolicy, phase: str, now: float) -> Retry:
    """A request of which p0, or d0, may have died."""
    assigned(policy.assign(shape("a"), now))
    if phase == "decode":
        policy.on_first_token("a", now)
        policy.on_handed_off("a", "d0", now)
    [retry] = lose(policy, "d0" if phase == "decode" else "p0", now)
    return retry


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_workers_that_die_in_one_moment_convict_nobody(phase: str) -> None:
    """A host without memory, or one that goes down: the second is heard of when the first request was sent again."""
    policy = cluster("p0", "p1", "d0", "d1")
    assert again(policy, died_in(policy, phase, 5.0), 5.0) is None
    assert lose(policy, "p1", 5.1) == []
    if phase == "decode":
        lose(policy, "p0", 5.1)
    policy.on_worker_up(WorkerView(name="p0", role="prefill", total_pages=100, page_size=PAGE, incarnation="2"), 7.0)
    assert assigned_id(policy.next_assignable(7.0)) == "a#"
    policy.check_invariants()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_a_worker_may_have_died_of_goes_to_one_that_is_heard_of_since(phase: str) -> None:
    policy = cluster("p0", "p1", "p2", "d0", "d1")
    assert again(policy, died_in(policy, phase, 5.0), 5.0) is None
    policy.on_report("p1", Report(made_s=4.9, available_pages=100), 5.1)
    assert policy.next_assignable(5.1) is None
    policy.on_report("p2", Report(made_s=5.1, available_pages=100), 5.2)
    sent = policy.next_assignable(5.2)
    assert sent is not None
    assert sent.prefill == "p2"


def test_a_worker_that_dies_again_and_again_is_tried_by_one_request_at_a_time() -> None:
    policy = cluster("p0", "p1", "d0")
    for life in range(3):
        lose(policy, "p0", float(life))
        policy.on_worker_up(WorkerView(name="p0", role="prefill", total_pages=100, page_size=PAGE), float(life))
    assert policy.health.circuit("p0", 2.5) == "open"
    assert prefill_of(policy, "meanwhile", 2.5) == "p1"
    assert assigned(policy.assign(shape("tries it"), 3.5)).prefill == "p0"
    assert prefill_of(policy, "beside it", 3.5) == "p1"
    policy.on_stepped("p0")
    assert policy.health.circuit("p0", 3.5) == "closed"
    policy.check_invariants()


def test_a_worker_that_stopped_in_order_comes_back_with_nothing_against_it() -> None:
    policy = cluster("p0", "p1", "d0")
    for life in range(4):
        policy.on_worker_lost("p0", "it is no member", float(life), is_death=False)
        policy.on_worker_up(WorkerView(name="p0", role="prefill", total_pages=100, page_size=PAGE), float(life))
    assert prefill_of(policy, "a", 4.0) == "p0"


@pytest.mark.parametrize("how", ["it drains", "it is sent away"])
def test_a_worker_that_ends_in_order_has_died_of_nothing(how: str) -> None:
    policy = cluster("p0", "d0")
    assigned(policy.assign(shape("a"), 0.0))
    if how == "it drains":
        policy.on_report("p0", Report(made_s=1.0, available_pages=9, draining=True), 1.0)
    [retry] = policy.on_worker_lost("p0", "it is no member", 1.0, is_death=how == "it drains")
    assert isinstance(retry, Resend)
    assert retry.past.deaths == ()


def test_a_handoff_that_a_stopping_worker_ends_is_no_failure_of_the_pair() -> None:
    policy = cluster("p0", "d0", "d1")
    assigned(policy.assign(shape("a"), 0.0))
    policy.on_report("d0", Report(made_s=1.0, available_pages=9, draining=True), 1.0)
    retry = policy.on_failed("a", "d0 is stopping", 1.0, worker="p0", cause="peer", peer="d0")
    assert isinstance(retry, Resend)
    assert retry.past == Past(avoid=frozenset(("d0",)), losses=1)
    assert not policy.health.pairs("p0")


def test_a_prefill_worker_has_not_died_of_a_prompt_whose_kv_a_decode_worker_has() -> None:
    """Though its first token was on the way, and is made again."""
    policy = cluster("p0", "p1", "d0", "d1")
    assigned(policy.assign(shape("a"), 0.0))
    policy.on_first_token("a", 0.0)
    sent = again(policy, lose(policy, "d0")[0])
    assert sent is not None
    policy.on_handed_off(sent.request_id, "d1", 0.0)
    [retry] = lose(policy, sent.prefill)
    assert isinstance(retry, Resend)
    assert (retry.past.deaths, retry.past.died_in) == (("d0/",), "decode")


def test_those_that_may_have_killed_a_worker_are_tried_one_at_a_time_and_others_pass_them() -> None:
    policy = cluster("p0", "p1", "d0")
    for i in range(6):
        assigned(policy.assign(shape(f"r{i}"), 0.0))
    retries = lose(policy, "p0")
    assert [retry.request_id for retry in retries] == ["r0", "r2", "r4"]
    for i in (1, 3, 5):
        policy.on_finished(f"r{i}")
    sent = [again(policy, retry) for retry in retries]
    assert [decision is not None for decision in sent] == [True, False, False]
    assert prefill_of(policy, "fresh", 0.0) == "p1"
    order = []
    for _ in range(3):
        [held] = [i for i, r in policy._requests.items() if r.prefill and not r.has_first_token]
        order.append(held)
        policy.on_first_token(held, 0.0)
        policy.check_invariants()
        while policy.next_assignable(0.0):
            pass
    assert order == ["r0#", "r2#", "r4#"]


def test_a_death_is_forgiven_after_many_tokens() -> None:
    policy = cluster("p0", "d0", "d1")
    assigned(policy.assign(shape("a"), 0.0))
    policy.on_first_token("a", 0.0)
    [retry] = lose(policy, "d0")
    again(policy, retry)
    policy.on_first_token("a#", 0.0)
    policy.on_handed_off("a#", "d1", 0.0)
    assert policy.next_turn() == "a#"
    assert policy.on_decoded("a#", FORGIVEN_AFTER_TOKENS)
    [retry] = lose(policy, "d1")
    assert isinstance(retry, Resend)
    assert retry.past.deaths == ("d1/",)


def test_a_worker_that_was_only_out_of_reach_is_nobodys_fault() -> None:
    policy = cluster("d0")
    lives = [WorkerView(name=f"p{i}", role="prefill", total_pages=100, page_size=PAGE, incarnation="x") for i in (0, 1)]
    policy.on_worker_up(lives[0], 0.0)
    for name in ("a", "b"):
        assigned(policy.assign(shape(name), 0.0))
    retries = lose(policy, "p0")
    policy.on_worker_up(lives[1], 0.0)
    assert [again(policy, retry) is not None for retry in retries] == [True, False]
    policy.on_worker_up(lives[0], 1.0)
    assert assigned_id(policy.next_assignable(1.0)) == "b#"
    assert all(request.past.deaths == () for request in policy._requests.values())
    policy.check_invariants()


@pytest.mark.parametrize("seed", range(10))
def test_a_poison_ends_two_workers_and_every_bystander_ends_whole(seed: int) -> None:
    """Each worker computes what it was sent in its order, and dies of the poison; some come back."""
    rng = random.Random(seed)
    policy = cluster("p0", "p1", "p2", "p3", "d0")
    at: dict[str, list[str]] = {f"p{i}": [] for i in range(4)}
    fresh = [*(f"r{i}" for i in range(20)), "poison"]
    rng.shuffle(fresh)
    ended, given_up, deaths = set[str](), list[str](), 0

    def send(decision: object) -> None:
        if isinstance(decision, Assigned):
            at[decision.prefill].append(decision.request_id)

    def take(retries: Iterable[Retry]) -> None:
        for retry in retries:
            if isinstance(retry, GiveUp):
                given_up.append(retry.request_id)
            else:
                send(policy.assign(resent(retry), 0.0, is_resent=True))

    for _ in range(2000):
        if fresh and rng.random() < 0.5:
            send(policy.assign(shape(fresh.pop()), 0.0))
        elif busy := sorted(name for name, ids in at.items() if ids):
            name = rng.choice(busy)
            if at[name][0].startswith("poison"):
                at[name].clear()
                deaths += 1
                take(lose(policy, name))
            else:
                request_id = at[name].pop(0)
                policy.on_first_token(request_id, 0.0)
                policy.on_finished(request_id)
                ended.add(request_id.rstrip("#"))
        while decision := policy.next_assignable(0.0):
            send(decision)
        policy.check_invariants()
    assert deaths == 2
    assert [each.rstrip("#") for each in given_up] == ["poison"]
    assert len(ended) == 20


@pytest.mark.parametrize(("lives_for", "most_deaths"), [(0, 2), (3, 3)])
@pytest.mark.parametrize("seed", range(10))
def test_a_poison_of_decode_workers_ends_and_costs_nobody_else_the_answer(
    seed: int, lives_for: int, most_deaths: int
) -> None:
    """All that a worker decodes get a token a step, and the poison kills it after `lives_for`. What has passed its
    trial goes on beside the next one that is tried."""
    rng = random.Random(seed)
    policy = cluster("p0", "d0", "d1", "d2")
    ids = [*(f"r{i}" for i in range(12)), "poison"]
    rng.shuffle(ids)
    decoded: dict[str, int] = {}
    given_up: list[str] = []
    deaths = 0
    for each in ids:
        assigned(policy.assign(shape(each), 0.0))
    for _ in range(800):
        name = rng.choice(("d0", "d1", "d2"))
        for each, request in policy._requests.items():
            if request.decode == name:
                policy.on_first_token(each, 0.0)
                policy.on_handed_off(each, name, 0.0)
        while policy.next_turn():
            pass
        there = [i for i, r in policy._requests.items() if r.decode == name and not r.is_held]
        is_deadly = any(each.startswith("poison") and decoded.get(each, 0) == lives_for for each in there)
        for each in there:
            if not is_deadly:
                decoded[each] = decoded.get(each, 0) + 1
                policy.on_decoded(each, decoded[each])
        for retry in lose(policy, name) if is_deadly else ():
            deaths += retry.request_id.startswith("poison")
            if isinstance(retry, GiveUp):
                given_up.append(retry.request_id)
            else:
                policy.assign(resent(retry), 0.0, is_resent=True)
        if is_deadly:
            view = WorkerView(name=name, role="decode", total_pages=100, page_size=PAGE, incarnation=f"{deaths}")
            policy.on_worker_up(view, 0.0)
        while policy.next_assignable(0.0):
            pass
        policy.check_invariants()
    assert 2 <= deaths <= most_deaths
    assert [each.rstrip("#") for each in given_up] == ["poison"]
    assert not policy.num_queued


# passing


def short_of_pages(**options: Any) -> RouterPolicy:
    """Ten pages free of a hundred, and a large request that waits for more."""
    policy = cluster("p0", "d0", options=RouterOptions(overcommit=0.0, **options))
    policy.on_report("d0", Report(made_s=1.0, num_running=3, available_pages=10), 1.0)
    assert policy.assign(shape("large", 800), 1.0) == Queued(reason="d0: 10 of 100 pages free")
    return policy


def test_a_smaller_request_passes_one_for_which_there_are_no_pages() -> None:
    policy = short_of_pages()
    for name, prompt_len in (("as large", 700), ("small", 60), ("another", 60)):
        assert isinstance(policy.assign(shape(name, prompt_len), 1.0), Queued)
    assert [assigned_id(policy.next_assignable(1.0)) for _ in range(3)] == ["small", "another", ""]
    policy.on_report("d0", Report(made_s=2.0, num_running=3, available_pages=60), 2.0)
    assert assigned_id(policy.next_assignable(2.0)) == "large"


def test_a_large_request_is_passed_so_many_times_and_then_holds_the_queue() -> None:
    policy = short_of_pages(max_passes=3)
    for i in range(6):
        assert isinstance(policy.assign(shape(f"r{i}", 15), 1.0), Queued)
    ids = []
    while decision := policy.next_assignable(1.0):
        ids.append(decision.request_id)
        policy.on_finished(decision.request_id)
    assert ids == ["r0", "r1", "r2"]


def test_nobody_passes_one_that_waits_for_a_prefill_worker_alone() -> None:
    policy = cluster("p0", "d0", options=RouterOptions(max_backlog_tokens=100))
    assigned(policy.assign(shape("a", 90), 0.0))
    assert isinstance(policy.assign(shape("large", 80), 0.0), Queued)
    assert isinstance(policy.assign(shape("small", 5), 0.0), Queued)
    assert policy.next_assignable(0.0) is None


@pytest.mark.parametrize("num_owners", [1, 1000])
def test_a_queue_of_thousands_costs_few_looks(num_owners: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = short_of_pages(max_queued_requests=10_000, max_queued_tokens=10**9)
    rng = random.Random(0)
    for i in range(5000):
        policy.assign(replace(shape(f"r{i}", rng.randrange(200, 1500)), owner=f"{i % num_owners}"), 1.0)
    looks = 0
    choose = policy.workers.placing.choose

    def counted(request: object, now: float) -> object:
        nonlocal looks
        looks += 1
        return choose(request, now)  # type: ignore[arg-type]

    monkeypatch.setattr(policy.workers.placing, "choose", counted)
    assert policy.next_assignable(1.0) is None
    assert looks <= 12
