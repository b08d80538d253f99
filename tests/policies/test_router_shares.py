"""What all clients share is taken whole by none of them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from cluster.router.accounts import RequestShape
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from cluster.router.shares import Shares
from cluster.router.waiting import WaitingQueue

pytestmark = pytest.mark.unit


def shape(owner: str, number: int, prompt_len: int = 10, weight: float = 1.0) -> RequestShape:
    return RequestShape(id=f"{owner}-{number}", prompt_len=prompt_len, max_tokens=5, owner=owner, weight=weight)


def filled(shares: Shares, owner: str) -> int:
    while shares.total < shares.limit and shares.has_share(owner):
        shares.take(owner)
    return shares.of(owner)


def test_one_alone_leaves_an_eighth_and_who_comes_later_finds_room() -> None:
    shares = Shares(1024)
    assert filled(shares, "flood") == 896
    assert filled(shares, "second") == 112
    assert filled(shares, "third") == 14
    shares.give("flood", 500)
    assert filled(shares, "second") == 538
    assert filled(shares, "third") == 79


def test_who_has_no_name_may_take_all_and_so_may_one_of_a_small_limit() -> None:
    assert filled(Shares(1024), "") == 1024
    assert filled(Shares(7), "flood") == 7


def in_line(queue: WaitingQueue) -> list[str]:
    order = []
    while first := queue.first:
        order.append(first)
        queue.take(first)
        queue.check_invariants()
    return order


def test_clients_take_turns_in_the_line() -> None:
    queue = WaitingQueue(1000, 100_000)
    for number in range(100):
        queue.add(shape("flood", number), is_resent=False)
    for number in range(2):
        queue.add(shape("other", number), is_resent=False)
    queue.add(shape("other", 9), is_resent=True)
    assert in_line(queue)[:6] == ["other-9", "flood-0", "other-0", "flood-1", "other-1", "flood-2"]


def test_who_comes_stands_behind_the_first_and_the_last_of_its_own() -> None:
    queue = WaitingQueue(1000, 100_000)
    found = {}
    for owner, number in [("flood", 0), ("other", 0), ("flood", 1), ("flood", 2), ("other", 1), ("flood", 3)]:
        queue.add(shape(owner, number), is_resent=False)
        found[f"{owner}-{number}"] = queue.before(f"{owner}-{number}", 3)
    assert found["flood-0"] == []
    assert found["other-1"] == ["flood-0", "other-0"]
    assert found["flood-3"] == ["flood-0", "flood-1", "flood-2"]
    queue.add(shape("other", 9), is_resent=True)
    assert queue.before("other-9", 3) == []


def test_a_line_of_a_thousand_clients_is_looked_through_only_when_it_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = WaitingQueue(10_000, 10**9)
    looks = Counter[str]()
    place_of = WaitingQueue._place_of

    def counted(self: WaitingQueue, request_id: str) -> tuple[int, float, int]:
        looks["all"] += 1
        return place_of(self, request_id)

    monkeypatch.setattr(WaitingQueue, "_place_of", counted)
    for number in range(2000):
        queue.add(shape(f"owner {number % 1000}", number, 1 + number), is_resent=False)
        assert queue.first == "owner 0-0"
    for _ in range(50):
        [first, *_] = queue.in_order()
        assert first == "owner 0-0"
    assert looks["all"] < 10_000
    queue.check_invariants()


def test_the_queue_of_a_router_keeps_room_for_other_clients() -> None:
    policy = RouterPolicy(RouterOptions(max_queued_requests=64))
    kinds = [type(policy.assign(shape("flood", number), 0.0)).__name__ for number in range(64)]
    assert kinds == ["Queued"] * 56 + ["Rejected"] * 8
    refused = policy.refusal("flood")
    assert refused is not None
    assert refused.reason == "56 of 56 requests that wait are this client's: its share"
    assert policy.refusal("other") is None
    assert type(policy.assign(shape("other", 0), 0.0)).__name__ == "Queued"
    policy.check_invariants()


def test_the_prompts_that_wait_keep_room_for_other_clients() -> None:
    queue = WaitingQueue(1000, 6400)
    for number in range(56):
        assert not queue.why_full("flood", 100)
        queue.add(shape("flood", number, 100), is_resent=False)
    full = "5600 of 5600 prompt tokens that wait are this client's: its share"
    assert queue.why_full("flood", 100) == full
    assert not queue.why_full("other", 100)


def test_clients_take_turns_by_the_tokens_of_their_prompts_and_not_by_requests() -> None:
    queue = WaitingQueue(10_000, 1_000_000)
    lengths = {"long": 1000, "short": 10, "middling": 130}
    for owner, length in lengths.items():
        for number in range(20_000 // length):
            queue.add(shape(owner, number, length), is_resent=False)
    served, waits = dict.fromkeys(lengths, 0), Counter({owner: 20_000 // n for owner, n in lengths.items()})
    while all(waits.values()):
        owner = queue.first.partition("-")[0]
        queue.take(queue.first)
        waits[owner] -= 1
        served[owner] += lengths[owner]
        for one, other in combinations(lengths, 2):
            assert abs(served[one] - served[other]) <= lengths[one] + lengths[other]
    queue.check_invariants()


def test_a_client_of_twice_the_weight_gets_twice_the_tokens() -> None:
    queue = WaitingQueue(10_000, 1_000_000)
    for number in range(400):
        queue.add(shape("one", number), is_resent=False)
        queue.add(shape("two", number, weight=2.0), is_resent=False)
    assert Counter(owner.partition("-")[0] for owner in in_line(queue)[:300]) == {"one": 100, "two": 200}


def test_who_is_given_long_answers_waits_for_those_who_are_given_short_ones() -> None:
    queue = WaitingQueue(10_000, 1_000_000)
    for number in range(3):
        queue.add(shape("long", number), is_resent=False)
        queue.add(shape("short", number), is_resent=False)
    queue.charge("long", 0, 15.0)
    queue.check_invariants()
    assert in_line(queue) == ["short-0", "short-1", "long-0", "short-2", "long-1", "long-2"]


def test_who_comes_back_has_saved_no_turns_up_and_owes_those_it_had() -> None:
    queue = WaitingQueue(10_000, 1_000_000)
    queue.add(shape("idle", 0), is_resent=False)
    queue.take("idle-0")
    for number in range(20):
        queue.add(shape("busy", number), is_resent=False)
    queue.add(shape("greedy", 0, 500), is_resent=False)
    for _ in range(12):
        queue.take(queue.first)  # greedy-0 among them
    for number in range(1, 4):
        queue.add(shape("idle", number), is_resent=False)
    queue.add(shape("greedy", 1), is_resent=False)
    order = in_line(queue)
    assert order[:5] == ["busy-11", "idle-1", "busy-12", "idle-2", "busy-13"]
    assert order[-1] == "greedy-1"


def test_who_takes_requests_back_pays_nothing_for_them_and_gains_nothing() -> None:
    queue = WaitingQueue(10_000, 1_000_000)
    for number in range(3):
        queue.add(shape("fickle", number, 1000), is_resent=False)
    queue.add(shape("other", 0), is_resent=False)
    queue.add(shape("fickle", 9), is_resent=False)
    for number in range(3):
        queue.drop(f"fickle-{number}")
        queue.check_invariants()
    assert in_line(queue) == ["other-0", "fickle-9"]


@pytest.mark.parametrize("seed", range(5))
def test_what_two_in_line_get_differs_by_one_prompt_and_the_answers_that_run(seed: int) -> None:
    """By weight; with others who come and go, send again and take back."""
    rng, queue = random.Random(seed), WaitingQueue(10_000, 10**9)
    weights, most = {"one": 1.0, "three": 3.0}, 500
    service, running = dict.fromkeys(weights, 0.0), {owner: list[int]() for owner in weights}
    ahead = dict.fromkeys(weights, 0.0)  # the most that an owner's answers came to that ran at once
    numbers = 0
    for number in range(1000):
        for owner, weight in weights.items():
            while len(queue._lines.get((owner, 0, False), ())) < 2 or rng.random() < 0.2:
                numbers += 1
                queue.add(shape(owner, numbers, rng.randint(1, most), weight), is_resent=False)
        if rng.random() < 0.3:
            queue.add(shape("guest", number, rng.randint(1, most)), is_resent=rng.random() < 0.2)
        if len(queue) > 50:
            queue.drop(rng.choice([i for i in queue if i.startswith("guest")] or [queue.first]))
            continue
        [*waiting] = queue.in_order()
        request_id, owner = waiting[0], waiting[0].partition("-")[0]
        prompt_len = queue._waiting[request_id].prompt_len
        queue.take(request_id)
        if owner in weights:
            service[owner] += prompt_len / weights[owner]
            running[owner].append(rng.randint(1, most))
            ahead[owner] = max(ahead[owner], sum(running[owner]) / weights[owner])
        for each, answers in running.items():
            while len(answers) > 4 or (answers and rng.random() < 0.2):
                ended = answers.pop(0)
                service[each] += ended / weights[each]
                queue.charge(each, 0, ended / weights[each])
        queue.check_invariants()
        leader = max(service, key=lambda each: service[each])
        assert abs(service["one"] - service["three"]) <= most / weights[leader] + ahead[leader] + 1e-6
    assert min(service.values()) > 10_000
