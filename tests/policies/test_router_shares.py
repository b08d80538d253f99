"""What all clients share is taken whole by none of them."""

from __future__ import annotations

from collections import Counter

import pytest

from cluster.router.accounts import RequestShape
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from cluster.router.shares import Shares
from cluster.router.waiting import WaitingQueue

pytestmark = pytest.mark.unit


def shape(owner: str, number: int, prompt_len: int = 10) -> RequestShape:
    return RequestShape(id=f"{owner}-{number}", prompt_len=prompt_len, max_tokens=5, owner=owner)


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
        queue.drop(first)
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


def test_a_line_of_a_thousand_clients_is_looked_through_only_when_it_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = WaitingQueue(10_000, 10**9)
    looks = Counter[str]()
    place_of = WaitingQueue._place_of

    def counted(self: WaitingQueue, request_id: str) -> tuple[int, int, int]:
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
