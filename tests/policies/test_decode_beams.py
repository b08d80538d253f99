"""DecodePolicy with beam searches: rows, pages and copies of beams, and that every page comes back."""

from __future__ import annotations

import random

import pytest

from decode_worker.batches import DecodeBatch
from decode_worker.policy import DecodePolicy
from engine.pages.pool import page_hashes
from kv_transfer.lease import Denied, Granted
from tests.policies.decoding import PAGE, policy_of, step

pytestmark = pytest.mark.unit


def make(num_pages: int = 40, **limits: object) -> DecodePolicy:
    return policy_of(num_pages, **{"max_batch_size": 6, **limits})


def admit(policy: DecodePolicy, name: str, num_tokens: int, max_new_tokens: int, num_beams: int = 0) -> None:
    hashes = page_hashes(range(num_tokens), PAGE)
    answer = policy.reserve(
        name, num_tokens=num_tokens, max_new_tokens=max_new_tokens, hashes=hashes, num_beams=num_beams
    )
    assert isinstance(answer, Granted)
    policy.on_committed(name)


def test_beams_share_the_prompt_and_copy_an_open_page_once_for_each_more() -> None:
    policy = make()
    admit(policy, "a", num_tokens=6, max_new_tokens=9, num_beams=3)
    [entry] = step(policy).entries
    assert (entry.position, entry.beam) == (6, 0)
    policy.on_fork("a", [0, 0, 0])
    assert policy.pool.usage.held == 2
    batch = step(policy)
    assert [(each.position, each.beam) for each in batch.entries] == [(7, 0), (7, 1), (7, 2)]
    assert [source for source, _ in batch.copies] == [entry.pages[1]] * 2
    assert {each.pages[0] for each in batch.entries} == {entry.pages[0]}
    assert len({each.pages[1] for each in batch.entries}) == 3
    policy.on_fork("a", [2, 2, 0])
    assert policy.pool.usage.held == 3, "the page of the second, from which nobody goes on, is free"
    batch = step(policy)
    assert batch.copies == (), "a page that is full is shared on"
    assert policy.pool.usage.held == 6
    policy.on_finished("a")
    assert policy.pool.usage.held == 0


def test_a_search_is_refused_where_its_beams_could_never_be_together() -> None:
    policy = make(num_pages=10)
    answers = [
        policy.reserve("a", num_tokens=8, max_new_tokens=13, hashes=[], num_beams=num_beams) for num_beams in (3, 2, 7)
    ]
    assert answers[0] == Denied(reason="decode-0: 11 pages needed, 10 exist", retryable=False)
    assert isinstance(answers[1], Granted)
    wide = make().reserve("a", num_tokens=8, max_new_tokens=4, hashes=[], num_beams=7)
    assert wide == Denied(reason="decode-0: num_beams is 7; its batch holds 6", retryable=False)


def test_a_search_joins_when_the_batch_has_a_row_for_each_of_its_beams() -> None:
    policy = make()
    for name in ("a", "b", "c"):
        admit(policy, name, num_tokens=2, max_new_tokens=20)
    admit(policy, "search", num_tokens=2, max_new_tokens=20, num_beams=4)
    admit(policy, "late", num_tokens=2, max_new_tokens=20)
    assert len(step(policy).entries) == 3, "who comes later does not pass it"
    policy.on_finished("b")
    assert [entry.request_id for entry in step(policy).entries] == ["a", "c", "search"]


def test_the_only_token_of_a_prompt_is_computed_again() -> None:
    policy = make()
    assert isinstance(policy.reserve("a", num_tokens=1, max_new_tokens=4, hashes=[], num_beams=2), Granted)
    policy.on_committed("a", -1)
    policy.check_invariants()
    [entry] = step(policy).entries
    assert entry.position == 0


@pytest.mark.parametrize("admission", ["watermark", "worst_case"])
@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_keeps_the_invariants_and_leaks_nothing(seed: int, admission: str) -> None:
    rng = random.Random(seed)
    policy = make(num_pages=30, admission=admission, watermark=0.05)
    in_flight: list[DecodeBatch] = []
    reserved: set[str] = set()
    num_copies = 0

    def finish(batch: DecodeBatch) -> None:
        policy.on_batch_done(batch)
        beams: dict[str, int] = {}
        for entry in batch.entries:
            beams[entry.request_id] = entry.beam + 1
        for name, count in beams.items():
            request = policy._requests.get(name)
            if request is None or request.is_over:
                continue
            if request.computed_len == request.max_len:
                policy.on_finished(name)
            elif request.num_beams:
                policy.on_fork(name, [rng.randrange(count) for _ in range(rng.randint(1, request.num_beams))])

    for turn in range(1500):
        match rng.randrange(7):
            case 0:
                name, length = f"r{turn}", rng.randrange(1, 16)
                answer = policy.reserve(
                    name,
                    num_tokens=length,
                    max_new_tokens=rng.randrange(2, 20),
                    hashes=page_hashes([rng.randrange(2)] * length, PAGE),
                    priority=rng.choice((0, 0, -1, 2)),
                    num_beams=rng.choice((0, 0, 1, 2, 4)),
                )
                if isinstance(answer, Granted):
                    reserved.add(name)
            case 1 if reserved:
                policy.on_committed(reserved.pop())
            case 2 | 3 | 4 if len(in_flight) < 2:
                batch = policy.next_batch()
                assert len(batch.entries) <= 6
                written = [entry.pages[entry.position // PAGE] for entry in batch.entries]
                assert len(set(written)) == len(written), "two write in one page"
                num_copies += len(batch.copies)
                in_flight.append(batch)
            case 5 if in_flight:
                finish(in_flight.pop(0))
            case 6 if policy.request_ids and rng.random() < 0.2:
                name = rng.choice(policy.request_ids)
                reserved.discard(name)
                policy.on_cancelled(name)
        reserved.update(name for name, _ in policy.next_grants())
        policy.check_invariants()
    for batch in in_flight:
        finish(batch)
    for name in policy.request_ids:
        policy.on_cancelled(name)
    assert num_copies > 20
    assert (policy.preemptions == 0) == (admission == "worst_case")
    assert policy.pool.usage.held == 0
