"""PrefillPolicy: budget, order, the bound on waiting, prefix hits, and that every page comes back."""

from __future__ import annotations

import random

import pytest

from engine.pages.pool import PagePool, page_hashes
from prefill_worker.options import PrefillOptions
from prefill_worker.policy import PrefillBatch, PrefillPolicy

pytestmark = pytest.mark.unit

PAGE = 16


def make(num_pages: int = 256, **limits: float | None) -> PrefillPolicy:
    chosen = {"max_batch_tokens": 64, "short_prompt_tokens": 32, "pack_tokens": None, **limits}
    return PrefillPolicy(PagePool(num_pages, PAGE), PrefillOptions(**chosen))  # type: ignore[arg-type]


def run(policy: PrefillPolicy) -> PrefillBatch:
    batch = policy.next_batch()
    assert batch is not None
    policy.on_batch_done(batch)
    return batch


def shares(batch: PrefillBatch) -> dict[str, int]:
    return {chunk.request_id: chunk.length for chunk in batch.chunks}


def test_prompts_run_in_order_within_the_budget() -> None:
    policy = make()
    for name in "abc":
        policy.add(name, 30, [])
    assert shares(run(policy)) == {"a": 30, "b": 30, "c": 4}
    assert shares(run(policy)) == {"c": 26}
    assert policy.next_batch() is None


def test_a_long_prompt_is_cut_and_its_last_chunk_says_so() -> None:
    policy = make()
    policy.add("long", 150, [])
    chunks = [run(policy).chunks[0] for _ in range(3)]
    assert [(c.start, c.length, c.is_first, c.is_last) for c in chunks] == [
        (0, 64, True, False),
        (64, 64, False, False),
        (128, 22, False, True),
    ]


def test_a_prompt_that_is_passed_on_is_read_no_further_unless_that_fails() -> None:
    policy = make()
    policy.add("long", 150, [])
    policy.add("waits", 40, [])
    batch = policy.next_batch()
    assert batch is not None
    for name in ("long", "waits"):
        assert policy.may_pass(name)
        policy.on_passing(name)
        assert not policy.may_pass(name)
    assert policy.next_batch() is None
    assert (policy.stands_still("long"), policy.stands_still("waits")) == (False, True)
    policy.on_batch_done(batch)
    assert (policy.stands_still("long"), policy.computed_len_of("long")) == (True, 64)
    policy.on_passing_failed("waits")
    policy.on_passing_failed("long")
    policy.check_invariants()
    assert [shares(run(policy)) for _ in range(2)] == [{"long": 64}, {"long": 22, "waits": 40}]
    assert not policy.may_pass("long"), "nothing of it is left"


def test_what_is_being_computed_is_still_to_compute() -> None:
    """A router that took a worker for idle while it computes a prompt's last chunk would send it the next one."""
    policy = make()
    policy.add("a", 30, [])
    policy.add("b", 100, [])
    batch = policy.next_batch()
    assert batch is not None
    assert policy.waiting_tokens == 130
    policy.on_batch_done(batch)
    assert policy.waiting_tokens == 66
    policy.on_cancelled("b")
    assert policy.waiting_tokens == 0


def test_short_prompts_pass_a_long_one_but_leave_it_its_share() -> None:
    policy = make()
    policy.add("long", 1000, [])
    for i in range(4):
        policy.add(f"short-{i}", 20, [])
    assert shares(run(policy)) == {"short-0": 20, "short-1": 12, "long": 32}
    assert shares(run(policy)) == {"short-1": 8, "short-2": 20, "short-3": 4, "long": 32}


def test_a_short_prompt_begins_within_the_stated_bound() -> None:
    policy = make()
    for i in range(3):
        policy.add(f"long-{i}", 600, [])
    policy.add("short", 32, [])
    assert shares(run(policy))["short"] == 32


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    policy = make(num_pages=4096)
    policy.add("long", 320, [])
    for step in range(10):
        policy.add(f"short-{step}", 32, [])
        policy.add(f"more-{step}", 32, [])
        assert shares(run(policy))["long"] == 32
    assert not any("long" in shares(run(policy)) for _ in range(2))


def test_no_prompt_joins_a_step_that_is_packed() -> None:
    policy = make(pack_tokens=20)
    for name, length in (("a", 12), ("b", 12), ("c", 30), ("d", 5)):
        policy.add(name, length, [])
    assert shares(run(policy)) == {"a": 12, "b": 12}
    assert shares(run(policy)) == {"c": 30}
    assert shares(run(policy)) == {"d": 5}


def test_a_packed_step_still_has_its_part_for_the_oldest_prompt() -> None:
    policy = make(num_pages=4096, pack_tokens=10)
    policy.add("long", 192, [])
    for step in range(5):
        policy.add(f"short-{step}", 32, [])
        policy.add(f"more-{step}", 32, [])
        batch = shares(run(policy))
        assert batch.pop("long") == 32
        assert list(batch.values()) == [32]


def test_a_cached_prefix_is_not_computed_again_but_one_token_always_is() -> None:
    policy = make()
    tokens = list(range(48))
    hashes = page_hashes(tokens, PAGE)
    policy.add("first", 48, hashes)
    run(policy)
    policy.on_finished("first")
    policy.add("second", 48, hashes)
    [chunk] = run(policy).chunks
    assert (chunk.start, chunk.length, chunk.is_first, chunk.is_last) == (32, 16, True, True)
    assert policy.cached_len_of("second") == 32


def test_nobody_passes_a_prompt_that_waits_for_pages() -> None:
    policy = make(num_pages=4)
    policy.add("holder", 48, [])
    run(policy)
    policy.add("big", 64, [])
    policy.add("small", 10, [])
    assert policy.next_batch() is None
    policy.on_finished("holder")
    assert shares(run(policy)) == {"big": 64}


def test_next_batch_may_be_asked_for_while_one_is_in_flight() -> None:
    policy = make()
    policy.add("long", 100, [])
    first, second = policy.next_batch(), policy.next_batch()
    assert first is not None
    assert second is not None
    assert [c.start for b in (first, second) for c in b.chunks] == [0, 64]
    assert policy.next_batch() is None
    policy.on_batch_done(first)
    policy.on_batch_done(second)
    policy.check_invariants()


def test_pages_stay_until_neither_a_batch_nor_a_handoff_reads_them() -> None:
    policy = make()
    policy.add("r", 20, [])
    batch = policy.next_batch()
    assert batch is not None
    policy.on_handoff_opened("r")
    policy.on_cancelled("r")
    assert policy.pool.usage.held == 2
    policy.on_batch_done(batch)
    assert policy.pool.usage.held == 2
    policy.on_handoff_closed("r")
    assert policy.pool.usage.held == 0
    assert not policy.holds("r")


def test_a_failed_request_ends_alone_and_its_pages_are_never_found_again() -> None:
    policy = make()
    hashes = page_hashes(list(range(20)), PAGE)
    policy.add("bad", 20, hashes)
    policy.add("good", 20, [])
    batch = policy.next_batch()
    assert batch is not None
    policy.on_failed("bad")
    policy.on_batch_done(batch)
    assert policy.request_ids == ["good"]
    assert policy.pool.count_matching(hashes) == 0
    assert policy.pool.usage.held == 2


def test_what_a_failed_requests_earlier_chunks_left_is_not_found_again_either() -> None:
    """A chunk that draws no token shows no NaN; the last one does, and then none of its pages is to be trusted."""
    policy = make(max_batch_tokens=16)
    hashes = page_hashes(list(range(32)), PAGE)
    policy.add("bad", 32, hashes)
    first = policy.next_batch()
    assert first is not None
    policy.on_batch_done(first)
    assert policy.pool.count_matching(hashes) > 0
    second = policy.next_batch()
    assert second is not None
    policy.on_failed("bad")
    policy.on_batch_done(second)
    assert policy.pool.count_matching(hashes) == 0
    assert policy.pool.usage.cached == policy.pool.usage.held == 0
    policy.check_invariants()


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="short_share is 1; give a number from 0 to below 1"):
        PrefillOptions(max_batch_tokens=1, short_share=1)
    with pytest.raises(ValueError, match="max_batch_tokens is 0; give 1 or more"):
        PrefillOptions(max_batch_tokens=0)
    with pytest.raises(ValueError, match="pack_tokens is 0; give 1 or more"):
        PrefillOptions(max_batch_tokens=1, pack_tokens=0)


@pytest.mark.parametrize("pack_tokens", [None, 8])
@pytest.mark.parametrize("seed", range(5))
def test_a_random_walk_keeps_the_invariants_and_leaks_nothing(seed: int, pack_tokens: int | None) -> None:
    rng = random.Random(seed)
    policy = make(num_pages=40, max_batch_tokens=48, pack_tokens=pack_tokens)
    in_flight: list[PrefillBatch] = []
    handoffs: set[str] = set()
    done: dict[str, int] = {}
    for step in range(1500):
        match rng.randrange(6):
            case 0 if len(policy.request_ids) < 12:
                tokens = [rng.randrange(2)] * rng.randrange(1, 200)
                policy.add(f"r{step}", len(tokens), page_hashes(tokens, PAGE), rng.choice((0, 0, -1, 2)))
            case 1 | 2 if len(in_flight) < 2 and (batch := policy.next_batch()):
                assert 0 < batch.num_tokens <= 48
                in_flight.append(batch)
                for chunk in batch.chunks:
                    assert chunk.start == done.get(chunk.request_id, policy.cached_len_of(chunk.request_id))
                    done[chunk.request_id] = chunk.start + chunk.length
                    if chunk.is_first and rng.random() < 0.7:
                        policy.on_handoff_opened(chunk.request_id)
                        handoffs.add(chunk.request_id)
            case 3 if in_flight:
                batch = in_flight.pop(0)
                policy.on_batch_done(batch)
                for chunk in batch.chunks:
                    if chunk.is_last and policy.holds(chunk.request_id):
                        policy.on_finished(chunk.request_id)
            case 4 if handoffs:
                name = handoffs.pop()
                policy.on_handoff_closed(name)
            case 5 if policy.request_ids and rng.random() < 0.3:
                policy.on_cancelled(rng.choice(policy.request_ids))
        policy.check_invariants()
    for batch in in_flight:
        policy.on_batch_done(batch)
    for name in handoffs:
        policy.on_handoff_closed(name)
    for name in policy.request_ids:
        policy.on_cancelled(name)
    assert policy.pool.usage.held == 0
