"""With mixed workers and targets, requests go where they are predicted to keep them, at the least cost to others."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from cluster.router.accounts import Past, Report, RequestShape, WorkerView
from cluster.router.decisions import Assigned, Move
from cluster.router.moving.moving import Moving
from cluster.router.options import RouterOptions
from cluster.router.placing.predicting import is_slow, tightest_s, token_s
from cluster.router.policy import RouterPolicy
from engine.pages.news import PageNews
from engine.pages.pool import page_hashes
from worker.steps.costs import StepCosts

pytestmark = pytest.mark.unit

PAGE = 16
COSTS = StepCosts(fixed_s=5e-3, prompt_token_s=2e-5, request_s=1e-5, context_token_s=4e-8)
TARGETS = RouterOptions(slo_ttft_ms=300.0, slo_tpot_ms=15.0)
PAGES = 10_000


def policy_with(
    *names: str, options: RouterOptions = TARGETS, chunk_tokens: int = 512, num_stages: int = 1, **reports: Any
) -> RouterPolicy:
    """Workers named p... prefill, d... decode, m... both; `reports`: fields of what one of them tells, by its name."""
    policy = RouterPolicy(options)
    for name in names:
        role = {"p": "prefill", "d": "decode", "m": "mixed"}[name[0]]
        view = WorkerView(
            name=name, role=role, total_pages=PAGES, page_size=PAGE, step_tokens=2048, num_stages=num_stages
        )
        policy.on_worker_up(replace(view, chunk_tokens=chunk_tokens if role == "mixed" else 0), 0.0)
        told = {"available_pages": PAGES, "costs": COSTS, **dict(reports.get(name, {}))}
        policy.on_report(name, Report(made_s=1.0, **told), 1.0)
    return policy


def shape(id: str = "a", prompt_len: int = 1000, **more: Any) -> RequestShape:
    return RequestShape(id=id, prompt_len=prompt_len, max_tokens=100, **more)


def placed(policy: RouterPolicy, request: RequestShape) -> tuple[str, str]:
    decision = policy.assign(request, 1.0)
    assert isinstance(decision, Assigned), decision
    policy.check_invariants()
    return decision.prefill, decision.decode


BUSY = {"num_running": 60, "available_pages": PAGES - 60 * 64}


def test_a_prompt_is_read_where_nobody_decodes_while_its_first_token_is_in_time_there() -> None:
    assert placed(policy_with("p0", "m0", m0=BUSY), shape()) == ("p0", "m0")
    late = {"waiting_tokens": 16_000}  # 320 ms
    assert placed(policy_with("p0", "m0", m0=BUSY, p0=late), shape()) == ("m0", "m0")


def test_of_several_routers_each_takes_its_own_workers_first() -> None:
    """What others have sent to theirs it does not know."""
    others = {"is_others": True}
    assert placed(policy_with("m0", "m1", m0=others), shape()) == ("m1", "m1")
    some = {"waiting_tokens": 1000}
    assert placed(policy_with("p0", "p1", "m0", p0=others, p1=some, m0=BUSY), shape()) == ("p1", "m0")


def test_another_routers_worker_is_taken_where_its_own_would_be_late_or_cost_far_more() -> None:
    others, late = {"is_others": True}, {"waiting_tokens": 16_000}
    assert placed(policy_with("p0", "p1", "m0", p0=others, p1=late, m0=BUSY), shape())[0] == "p0"
    assert placed(policy_with("m0", "m1", m0=others, m1=BUSY), shape()) == ("m0", "m0")
    assert placed(policy_with("m0", "m1", m0=others, m1=others), shape()) == ("m0", "m0")
    both = policy_with("p0", "p1", "m0", p0=others | late, p1=late, m0=BUSY | late)
    assert placed(both, shape())[0] == "p1", "late with both"


def test_who_is_late_anyway_makes_nobody_else_late() -> None:
    late = {"waiting_tokens": 16_000}
    assert placed(policy_with("p0", "m0", m0=BUSY | late, p0=late), shape()) == ("p0", "m0")


def test_a_prompt_that_is_cached_is_read_where_it_is_cached() -> None:
    policy = policy_with("p0", "p1", "m0", m0=BUSY)
    hashes = page_hashes(list(range(1000)), PAGE)
    assert placed(policy, shape("a", page_hashes=hashes)) == ("p0", "m0")
    assert placed(policy, shape("b", page_hashes=hashes)) == ("p0", "m0")
    policy.on_report("p0", Report(made_s=2.0, waiting_tokens=20_000, available_pages=PAGES, costs=COSTS), 2.0)
    assert placed(policy, shape("c", page_hashes=hashes)) == ("p1", "m0")


def test_an_answer_goes_where_its_steps_are_short_enough() -> None:
    slow = policy_with("m0", "d0", m0=READING, d0=BUSY)
    assert placed(slow, shape()) == ("m0", "d0")
    assert placed(slow, shape("b", slo_tpot_s=0.1)) == ("m0", "m0")  # this one minds less


def test_of_many_workers_those_that_read_little_are_looked_at_too() -> None:
    """They have larger batches than all that read: an answer would make each of those late."""
    readers, writers = [f"m{i}" for i in range(36)], [f"m{i}" for i in range(36, 40)]
    reports: dict[str, Any] = dict.fromkeys(readers, tuple(READING.items()))
    reports |= dict.fromkeys(writers, (("num_running", 20), ("available_pages", 9000)))
    policy = policy_with(*readers, *writers, **reports)
    assert placed(policy, shape())[1] in writers
    for name in writers:
        policy.on_worker_lost(name, "it went", 1.0)
    assert placed(policy, shape("next"))[1] in readers


def test_who_wants_short_steps_is_not_joined_by_who_would_make_them_longer() -> None:
    policy = policy_with("m0", "m1", m1=BUSY)
    assert placed(policy, shape("hurried", slo_tpot_s=0.009)) == ("m0", "m0")
    patient = shape("patient", 90_000, slo_ttft_s=60.0, slo_tpot_s=0.1)
    assert placed(policy, patient) == ("m1", "m1")
    policy.on_finished("hurried")
    assert placed(policy, replace(patient, id="next")) == ("m0", "m0")


def test_who_wants_what_nobody_could_have_keeps_no_worker_for_itself() -> None:
    policy = policy_with("m0", "m1", m1=BUSY)
    assert placed(policy, shape("absurd", slo_tpot_s=1e-6)) == ("m0", "m0")
    policy.on_first_token("absurd", 1.0)
    assert placed(policy, shape("usual", 90_000, slo_ttft_s=60.0, slo_tpot_s=0.1)) == ("m0", "m0")
    account = policy.workers.decode.accounts["m0"]
    assert (account.tightest_s, tightest_s(account)) == (1e-6, 0.1)
    assert not is_slow(account)
    assert "m0" not in policy.unsettled()
    policy.on_finished("usual")
    assert tightest_s(account) == math.inf
    assert placed(policy, shape("next")) == ("m0", "m0")


def test_a_worker_that_reads_no_prompts_beside_answers_is_given_none() -> None:
    policy = policy_with("m0", "m1", chunk_tokens=0, m0=BUSY)
    assert placed(policy, shape())[0] == "m1"
    policy = policy_with("p0", "m0", chunk_tokens=0, p0={"waiting_tokens": 16_000})
    assert placed(policy, shape()) == ("p0", "m0"), "it would wait for all that p0 has"


def test_who_waits_without_end_keeps_no_target() -> None:
    only = RouterOptions(slo_tpot_ms=15.0)
    hashes = page_hashes(list(range(1000)), PAGE)
    cached = {**BUSY, "pages": PageNews(found=tuple(hashes))}
    policy = policy_with("m0", "m1", options=only, chunk_tokens=0, m0=cached)
    assert placed(policy, shape(page_hashes=hashes))[0] == "m1"


def handed_over(policy: RouterPolicy, pair: tuple[str, str], token_s: float, tokens: int = 1000) -> None:
    """One whose receipt says that each token took so long; it ends."""
    assert placed(policy, shape("earlier", tokens, pair=pair)) == pair
    policy.on_first_token("earlier", 1.0)
    policy.on_handed_off("earlier", pair[1], 1.0, num_tokens=tokens, taken_s=token_s * tokens)
    policy.check_invariants()
    policy.on_finished("earlier")


READING = {"prompt_share": 500.0, "num_running": 2, "available_pages": PAGES - 128}  # each step 10 ms longer
SLOW_LINK_S = 2e-3  # for a token: 2 s for a prompt of 1000, 16 ms for each of 128 tokens after it


def test_an_answer_stays_where_the_handoff_would_make_it_later_than_the_steps_there() -> None:
    policy = policy_with("m0", "d0", m0=READING, d0=BUSY)
    handed_over(policy, ("m0", "d0"), 1e-6)
    assert placed(policy, shape("a")) == ("m0", "d0")
    policy = policy_with("m0", "d0", m0=READING, d0=BUSY)
    handed_over(policy, ("m0", "d0"), SLOW_LINK_S)
    assert placed(policy, shape("a")) == ("m0", "m0")


def test_a_link_that_is_full_is_avoided_until_it_is_empty() -> None:
    policy = policy_with("m0", "d0", m0=READING, d0=BUSY)
    handed_over(policy, ("m0", "d0"), 1e-5)
    assert placed(policy, shape("a", 90_000, pair=("m0", "d0"))) == ("m0", "d0")
    policy.on_first_token("a", 1.0)
    assert placed(policy, shape("b")) == ("m0", "m0"), "it would wait for the 0.9 s of the other"
    policy.on_handed_off("a", "d0", 1.0)
    assert placed(policy, shape("c")) == ("m0", "d0")


def test_what_others_have_yet_to_read_is_on_no_link() -> None:
    """It leaves no faster than it is read: an idle worker is not left for a queue in which the wait is hidden."""
    readers = [f"p{i}" for i in range(4)]
    policy = policy_with(*readers, "m0", m0=BUSY)
    for reader in readers:
        handed_over(policy, (reader, "m0"), 1e-5)
    for reader in readers[:-1]:
        assert placed(policy, shape(f"at {reader}", 6000, pair=(reader, "m0"))) == (reader, "m0")
    assert placed(policy, shape("a", 500)) == ("p3", "m0")


def test_of_workers_that_write_alike_the_one_behind_the_faster_link_is_taken() -> None:
    for slow, fast in (("d0", "d1"), ("d1", "d0")):
        policy = policy_with("m0", "d0", "d1", m0=READING, d0=BUSY, d1=BUSY)
        handed_over(policy, ("m0", slow), SLOW_LINK_S)
        handed_over(policy, ("m0", fast), 1e-6)
        assert placed(policy, shape("a")) == ("m0", fast)


def test_what_is_known_of_a_link_follows_its_receipts_and_goes_with_the_worker() -> None:
    policy = policy_with("m0", "d0", m0=READING, d0=BUSY)
    handed_over(policy, ("m0", "d0"), 1e-6)
    handed_over(policy, ("m0", "d0"), 100.0)  # it was held up once
    handed_over(policy, ("m0", "d0"), 1.0, tokens=16)  # too few to tell
    times = policy.workers.handoff_times
    assert times.token_s("m0", "d0", 1.0) == pytest.approx(2e-6)
    for _ in range(12):
        handed_over(policy, ("m0", "d0"), SLOW_LINK_S)
    assert times.token_s("m0", "d0", 1.0) == pytest.approx(SLOW_LINK_S)
    assert times.token_s("m0", "another", 1.0) == pytest.approx(SLOW_LINK_S), "as all from m0"
    policy.on_worker_lost("m0", "gone", 2.0)
    assert not times.token_s("m0", "d0", 2.0)


def test_a_link_that_was_slow_once_is_tried_again() -> None:
    policy = policy_with("m0", "d0", m0=READING, d0=BUSY)
    handed_over(policy, ("m0", "d0"), SLOW_LINK_S)
    assert placed(policy, shape("a")) == ("m0", "m0")
    decision = policy.assign(shape("b"), 301.0)
    assert isinstance(decision, Assigned)
    assert (decision.prefill, decision.decode) == ("m0", "d0")


def running(policy: RouterPolicy, *ids: str, at: str = "d0", **more: Any) -> None:
    """These run at a decode worker, with 100 tokens each."""
    for each in ids:
        policy.assign(shape(each, 100, **more), 1.0)
        policy.on_first_token(each, 1.0)
        policy.on_handed_off(each, at, 1.0)


def leaving(policy: RouterPolicy, *ids: str, costs: StepCosts | None = COSTS) -> list[str]:
    """After d0 has told that it has them, and d1 that it has nothing."""
    there: dict[str, Any] = {
        "num_running": len(ids),
        "available_pages": PAGES - 10 * len(ids),
        "request_ids": frozenset(ids),
    }
    policy.on_report("d1", Report(made_s=2.0, available_pages=PAGES, costs=costs), 2.0)
    policy.on_report("d0", Report(made_s=2.0, costs=costs, **there), 2.0)
    return [each for each in policy.leaving("d0", 2.0) if policy.move(each, 110, 2.0) is not None]


def test_far_more_requests_than_another_has_are_shed_where_that_makes_nobody_late() -> None:
    ids = [f"r{i}" for i in range(8)]
    for tpot_ms, costs, num in ((15.0, COSTS, 1), (5.0, COSTS, 0), (15.0, None, 0)):
        told: dict[str, Any] = {"d0": {"costs": costs}, "d1": {"costs": costs}}
        policy = policy_with("p0", "d0", "d1", options=RouterOptions(slo_tpot_ms=tpot_ms), **told)
        running(policy, *ids)
        assert len(leaving(policy, *ids, costs=costs)) == num, (tpot_ms, costs)
        policy.check_invariants()


def test_a_worker_whose_tokens_take_longer_than_is_wanted_sheds_some() -> None:
    """Of two requests, whose context is long."""
    slow = replace(COSTS, context_token_s=5e-5)  # 12 ms for one, 21 for both
    for tpot_s, num in ((0.016, 1), (0.03, 0), (0.011, 0)):
        policy = policy_with("p0", "d0", "d1", options=RouterOptions())
        running(policy, "a", "b", slo_tpot_s=tpot_s)
        assert len(leaving(policy, "a", "b", costs=slow)) == num, tpot_s


def moves_at_random(seed: int) -> tuple[int, list[Move]]:
    """How many of d0's requests are asked, and who moves: workers of any load, some of whose costs nobody knows."""
    rng = random.Random(seed)
    policy = policy_with("p0", "d0", "d2", "d3", options=RouterOptions(slo_tpot_ms=rng.choice((0.0, 8.0, 15.0))))
    page_size = rng.choice((PAGE, PAGE // 2))
    policy.on_worker_up(WorkerView(name="d1", role="decode", total_pages=PAGES, page_size=page_size), 0.0)
    ids = [f"r{i}" for i in range(rng.randrange(2, 12))]
    for each in ids:
        running(policy, each, slo_tpot_s=rng.choice((0.0, 0.001, 0.006, 0.012)))
    for name in ("d1", "d2", "d3", "d0"):
        costs = rng.choice((COSTS, COSTS, replace(COSTS, fixed_s=9e-3), replace(COSTS, context_token_s=1e-5), None))
        batch, pages = rng.choice((1, 6, 12)), rng.choice((0, 9, 30, PAGES))
        if name == "d0":
            batch, pages = len(ids), rng.choice((PAGES // 2, PAGES))
        there = frozenset(ids) if name == "d0" else frozenset()
        report = Report(made_s=2.0, num_running=batch, available_pages=pages, request_ids=there, costs=costs)
        policy.on_report(name, report, 2.0)
    asked = policy.leaving("d0", 2.0)
    moves = [policy.move(each, rng.choice((110, 190)), 2.0) for each in asked]
    return len(asked), [move for move in moves if move is not None]


def test_who_is_not_asked_would_not_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [moves_at_random(seed) for seed in range(400)]
    monkeypatch.setattr(Moving, "_gains_nobody", lambda *_: False)
    all_asked = [moves_at_random(seed) for seed in range(400)]
    assert [moves for _, moves in found] == [moves for _, moves in all_asked]
    assert sum(len(moves) for _, moves in found) > 10
    assert sum(asked for asked, _ in found) < sum(asked for asked, _ in all_asked)


def test_the_reason_tells_what_was_predicted() -> None:
    decision = policy_with("p0", "m0", m0=BUSY).assign(shape(), 1.0)
    assert isinstance(decision, Assigned)
    assert "first token predicted in 27 of 300 ms, each after it in 8.1 of 15.0" in decision.reason


@pytest.mark.parametrize(
    ("names", "options", "request_shape", "reports"),
    [
        (("p0", "m0"), RouterOptions(), shape(), {}),
        (("p0", "d0"), TARGETS, shape(), {}),
        (("p0", "m0"), TARGETS, shape(past=Past(avoid=frozenset({"p0"}))), {}),
        (("p0", "m0"), TARGETS, shape(), {"m0": {"costs": None}}),
    ],
    ids=["no target", "no mixed worker", "it has failed before", "too little is known"],
)
def test_else_the_least_loaded_are_chosen(
    names: tuple[str, ...], options: RouterOptions, request_shape: RequestShape, reports: dict[str, Any]
) -> None:
    decision = policy_with(*names, options=options, **reports).assign(request_shape, 1.0)
    assert isinstance(decision, Assigned)
    assert "predicted" not in decision.reason


def test_who_is_not_known_yet_is_tried() -> None:
    policy = policy_with("m0", "d0", d0={"costs": None})
    assert placed(policy, shape("a")) == ("m0", "d0")
    assert placed(policy, shape("b")) == ("m0", "m0"), "it is known when that one has had some tokens"


def test_a_worker_without_steps_of_its_own_yet_is_taken_for_another_of_its_role() -> None:
    """One that is new, or never had work, keeps nobody else from being predicted."""
    late = {"waiting_tokens": 16_000, "costs": COSTS}
    nothing: dict[str, Any] = {"costs": None}
    for names in (("p1", "p0", "m0"), ("p0", "p1", "m0")):  # before it is known what such a worker costs, and after
        decision = policy_with(*names, p0=late, p1=nothing, m0=BUSY).assign(shape(), 1.0)
        assert isinstance(decision, Assigned)
        assert (decision.prefill, decision.decode) == ("p1", "m0")
        assert "predicted" in decision.reason, names


def test_a_prompt_that_few_could_hold_does_not_keep_others_from_going() -> None:
    policy = policy_with("m0", "d0", options=RouterOptions(), m0={"waiting_tokens": 40_000})
    small = WorkerView(name="p0", role="prefill", total_pages=100, page_size=PAGE, step_tokens=2048)
    policy.on_worker_up(small, 1.0)
    assert not isinstance(policy.assign(shape("long", 2000), 1.0), Assigned)
    assert not isinstance(policy.assign(shape("short", 1000), 1.0), Assigned), "it stands behind"
    next_one = policy.next_assignable(1.0)
    assert next_one is not None
    assert (next_one.request_id, next_one.prefill) == ("short", "p0")
    policy.check_invariants()


def test_a_pair_that_cannot_hand_over_is_not_chosen() -> None:
    policy = policy_with("p0", "m0", "m1", m0=BUSY, m1=BUSY)
    assert placed(policy, shape("f")) == ("p0", "m0")
    policy.on_failed("f", "no route", 1.0, worker="p0", cause="peer", peer="m0")
    assert placed(policy, shape()) == ("p0", "m1")


def test_prompts_wait_in_the_router_when_every_worker_has_its_backlog() -> None:
    full = {"waiting_tokens": 40_000}
    policy = policy_with("p0", "m0", p0=full, m0=full)
    assert not isinstance(policy.assign(shape(), 1.0), Assigned)


def test_in_pipeline_stages_what_waits_goes_faster_and_passes_hold_fewer() -> None:
    """The costs told are of a pass through all stages, and one is in each."""
    late = {"waiting_tokens": 16_000}  # 320 ms in one stage, 80 in four
    request = shape()
    for stages, read_at in ((1, "m0"), (4, "p0")):
        policy = policy_with("p0", "m0", m0=BUSY, p0=late, num_stages=stages)
        assert placed(policy, request) == (read_at, "m0")
    full = {"num_running": 1200, "available_pages": 0}  # steps of 23 ms with all of them in one
    for stages, is_longer in ((1, True), (4, False)):
        policy = policy_with("p0", "d0", d0=full, num_stages=stages)
        assert (token_s(policy.workers.decode.accounts["d0"]) > 0.015) == is_longer
