"""Requests of a lower number go first wherever they wait: in the router's queue, for prefill, for pages."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest

from cluster.router.accounts import Past, RequestShape
from cluster.router.waiting import WaitingQueue
from decode_worker.options import DecodeOptions
from decode_worker.policy import DecodePolicy
from engine.pages.pool import PagePool
from kv_transfer.lease import Granted, Queued
from mixed_worker.options import MixedOptions
from mixed_worker.policy import MixedPolicy
from prefill_worker.options import PrefillOptions
from prefill_worker.policy import PrefillPolicy
from tests.policies.test_router_shares import in_line

pytestmark = pytest.mark.unit

PAGE = 4


def waiting(name: str, priority: int, owner: str = "", prompt_len: int = 10) -> RequestShape:
    return RequestShape(id=name, prompt_len=prompt_len, max_tokens=5, owner=owner, priority=priority)


def prefill(num_pages: int = 64) -> PrefillPolicy:
    options = PrefillOptions(max_batch_tokens=64, short_prompt_tokens=16, short_share=0.5, pack_tokens=None)
    return PrefillPolicy(PagePool(num_pages, 16), options)


def decode(num_pages: int) -> DecodePolicy:
    return DecodePolicy(PagePool(num_pages, PAGE), DecodeOptions(max_batch_size=4, watermark=0.0), name="decode-0")


def steps(policy: PrefillPolicy, count: int) -> list[dict[str, int]]:
    done = []
    for _ in range(count):
        batch = policy.next_batch()
        assert batch is not None
        policy.on_batch_done(batch)
        policy.check_invariants()
        done.append({chunk.request_id: chunk.length for chunk in batch.chunks})
    return done


def test_the_lowest_goes_first_in_the_routers_line_and_clients_take_turns_within_one() -> None:
    queue = WaitingQueue(1000, 100_000)
    for name, priority, owner in (
        ("batch-0", 5, "a"),
        ("a-0", 0, "a"),
        ("a-1", 0, "a"),
        ("b-0", 0, "b"),
        ("urgent", -1, "b"),
        ("batch-1", 5, "b"),
    ):
        queue.add(waiting(name, priority, owner), is_resent=False)
        queue.check_invariants()
    queue.add(waiting("again", 5, "a"), is_resent=True)
    assert queue.is_behind(-2, is_resent=False)
    assert not queue.is_behind(-1, is_resent=False)
    assert queue.is_behind(-1, is_resent=True)
    assert in_line(queue) == ["urgent", "a-0", "b-0", "a-1", "again", "batch-0", "batch-1"]


def test_one_that_is_sent_again_leaves_the_turns_of_others_as_they_are() -> None:
    queue = WaitingQueue(1000, 100_000)
    for number in range(30):
        queue.add(waiting(f"x-{number}", 0, "x"), is_resent=False)
        if number < 29:
            queue.drop(f"x-{number}")
    for number in range(3):
        queue.add(waiting(f"a-{number}", 5, "a"), is_resent=False)
    queue.add(waiting("again", 5, "a"), is_resent=True)
    for number in range(2):
        queue.add(waiting(f"b-{number}", 5, "b"), is_resent=False)
    queue.check_invariants()
    assert in_line(queue) == ["x-29", "again", "a-0", "b-0", "a-1", "b-1", "a-2"]


def test_who_comes_late_counts_the_prompts_that_go_before_it() -> None:
    queue = WaitingQueue(1000, 100_000)
    for number in range(10):
        queue.add(waiting(f"{number}", 0, prompt_len=100), is_resent=False)
    queue.add(waiting("urgent", -1, prompt_len=100), is_resent=False)
    queue.on_computed(0.0, 100)
    queue.on_computed(2.0, 100)
    assert queue.empty_s("urgent") == 1.0
    assert queue.empty_s("9") == queue.empty_s() == 11.0


@pytest.mark.parametrize("seed", range(5))
def test_a_line_of_many_priorities_stays_in_order(seed: int) -> None:
    rng = random.Random(seed)
    queue, here = WaitingQueue(1000, 10**6), dict[str, int]()
    for number in range(400):
        if here and rng.random() < 0.45:
            name = rng.choice([queue.first, *here])
            del here[name]
            assert queue.drop(name)
        else:
            name, here[f"{number}"] = f"{number}", rng.randrange(-1, 3)
            shape = waiting(name, here[name], rng.choice("abc"), rng.randrange(1, 2000))
            queue.add(shape, is_resent=rng.random() < 0.1)
        queue.check_invariants()
        list(queue.in_order())
    assert sorted(in_line(queue)) == sorted(here)


def test_who_has_begun_goes_on_and_then_the_lowest_number_is_next() -> None:
    policy = prefill()
    policy.add("batch", 100, [], priority=1)
    assert steps(policy, 1) == [{"batch": 64}]
    policy.add("long batch", 60, [], priority=1)
    policy.add("usual", 100, [])
    policy.add("urgent", 30, [], priority=-1)
    policy.add("short batch", 10, [], priority=1)
    assert steps(policy, 4) == [
        {"batch": 36, "urgent": 28},
        {"urgent": 2, "usual": 62},
        {"usual": 38, "long batch": 26},
        {"short batch": 10, "long batch": 34},
    ]


def test_pages_go_to_the_prompt_of_the_lowest_number_first() -> None:
    policy = prefill(num_pages=5)
    policy.add("holder", 48, [])
    steps(policy, 1)
    policy.add("usual", 30, [])
    policy.add("urgent", 40, [], priority=-1)
    assert policy.next_batch() is None, "the two pages that are left are the urgent one's, which needs three"
    policy.on_finished("holder")
    assert steps(policy, 2) == [{"urgent": 40}, {"usual": 30}]


def test_reservations_are_granted_by_priority() -> None:
    policy = decode(num_pages=4)
    assert isinstance(policy.reserve("a", num_tokens=12, max_new_tokens=2, hashes=[]), Granted)
    for name, priority in (("batch", 1), ("usual", 0), ("urgent", -1)):
        answer = policy.reserve(name, num_tokens=12, max_new_tokens=2, hashes=[], priority=priority)
        assert isinstance(answer, Queued)
    order: list[str] = []
    for _ in range(3):
        policy.on_cancelled(policy.request_ids[0] if not order else order[-1])
        order += [name for name, _ in policy.next_grants()]
        policy.check_invariants()
    assert order == ["urgent", "usual", "batch"]


def test_one_of_a_lower_number_takes_pages_at_once_that_others_wait_for_in_vain() -> None:
    policy = decode(num_pages=4)
    policy.reserve("a", num_tokens=8, max_new_tokens=2, hashes=[])
    assert isinstance(policy.reserve("large", num_tokens=12, max_new_tokens=2, hashes=[]), Queued)
    assert isinstance(policy.reserve("small", num_tokens=4, max_new_tokens=2, hashes=[]), Queued)
    assert isinstance(policy.reserve("urgent", num_tokens=4, max_new_tokens=2, hashes=[], priority=-1), Granted)


def test_who_has_the_highest_number_leaves_when_pages_run_out_however_old_it_is() -> None:
    policy = decode(num_pages=4)
    for name, priority in (("batch", 1), ("usual", 0)):
        policy.reserve(name, num_tokens=4, max_new_tokens=12, hashes=[], priority=priority)
        policy.on_committed(name)
    preempted: list[str] = []
    for _ in range(6):
        batch = policy.next_batch()
        preempted += batch.preempted
        policy.on_batch_done(batch)
        policy.check_invariants()
    assert preempted == ["batch"]
    assert policy.holds("usual")


def test_nobody_makes_way_for_one_that_goes_after_it_while_its_step_is_computed() -> None:
    policy = decode(num_pages=6)
    policy.options = DecodeOptions(max_batch_size=1, watermark=0.0)
    policy.reserve("batch", num_tokens=4, max_new_tokens=20, hashes=[], priority=5)
    policy.on_committed("batch")
    in_flight = [policy.next_batch()]
    policy.reserve("urgent", num_tokens=8, max_new_tokens=4, hashes=[], priority=-1)
    policy.on_committed("urgent")
    preempted: list[str] = []
    for _ in range(30):  # two batches at a time
        in_flight.append(policy.next_batch())
        preempted += in_flight[-1].preempted
        policy.on_batch_done(in_flight.pop(0))
        policy.check_invariants()
    assert preempted == ["batch"]
    assert policy.holds("urgent")


def test_a_prompt_that_waits_for_a_step_keeps_no_pages_from_others() -> None:
    options = MixedOptions(max_batch_tokens=16, max_batch_size=4, watermark=0.0, pack_tokens=None)
    policy = MixedPolicy(PagePool(10, PAGE), options)

    def prompt(name: str, length: int, priority: int = 0) -> None:
        assert policy.decode.expect(name, num_tokens=length, max_len=length, priority=priority) is None
        policy.prefill.add(name, length, [], priority)

    assert isinstance(policy.decode.reserve("holder", num_tokens=36, max_new_tokens=2, hashes=[]), Granted)
    prompt("refused", 12)
    assert policy.prefill.next_batch() is None
    policy.decode.on_cancelled("holder")
    prompt("urgent", 16, priority=-1)
    batch = policy.prefill.next_batch()
    assert batch is not None
    assert [chunk.request_id for chunk in batch.chunks] == ["urgent"]
    answer = policy.decode.reserve("late", num_tokens=4, max_new_tokens=2, hashes=[])
    assert isinstance(answer, Granted), "it waits for a prompt that asks for nothing"


def test_a_shape_that_has_grown_is_otherwise_the_same() -> None:
    others: dict[str, Any] = {
        "owner": "a",
        "weight": 2.0,
        "slo_ttft_s": 1.0,
        "slo_tpot_s": 0.1,
        "priority": 3,
        "pair": ("p", "d"),
        "num_beams": 4,
        "most_held": 99,
        "kind": "adapter 1",
    }
    shape = RequestShape(id="r", prompt_len=5, max_tokens=9, page_hashes=[b"x"], past=Past(losses=1), **others)
    unset = [f.name for f in fields(RequestShape) if getattr(shape, f.name) == f.default]
    assert not unset, "give it another value than its default here"
    assert shape.grown(8, 6) == replace(shape, prompt_len=8, max_tokens=6)
