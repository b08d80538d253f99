"""DecodePolicy: who gets pages, who runs, who leaves, and that every page comes back."""

from __future__ import annotations

import random

import pytest

from decode_worker.batches import DecodeBatch
from decode_worker.policy import DecodePolicy
from engine.pages.pool import page_hashes
from kv_transfer.lease import Denied, Granted, Queued
from tests.policies.decoding import PAGE, policy_of, step

pytestmark = pytest.mark.unit


def make(num_pages: int = 16, num_stages: int = 1, **limits: object) -> DecodePolicy:
    return policy_of(num_pages, num_stages, **{"max_batch_size": 4, **limits})


def admit(policy: DecodePolicy, name: str, num_tokens: int = 4, max_new_tokens: int = 8) -> None:
    answer = policy.reserve(name, num_tokens=num_tokens, max_new_tokens=max_new_tokens, hashes=[])
    assert isinstance(answer, Granted)
    policy.on_committed(name)


def ran(batch: DecodeBatch) -> list[str]:
    return [entry.request_id for entry in batch.entries]


def test_a_reservation_takes_pages_for_the_tokens_handed_over() -> None:
    policy = make()
    answer = policy.reserve("r", num_tokens=9, max_new_tokens=4, hashes=[])
    assert isinstance(answer, Granted)
    assert len(answer.pages) == 3
    assert answer.cached_pages == 0


def test_nothing_decodes_before_its_commit() -> None:
    policy = make()
    policy.reserve("r", num_tokens=4, max_new_tokens=4, hashes=[])
    assert policy.next_batch().entries == ()
    policy.on_committed("r")
    batch = step(policy)
    assert ran(batch) == ["r"]
    assert batch.joined == ("r",)
    assert batch.entries[0].position == 4


def test_a_page_that_is_dropped_comes_back_and_what_is_behind_moves_up() -> None:
    policy = make(num_pages=3)
    assert isinstance(policy.reserve("r", num_tokens=9, max_new_tokens=40, hashes=[], most_pages=3), Granted)
    policy.on_committed("r")
    kept = list(policy.pages_of("r"))
    positions = []
    for i in range(30):
        batch = step(policy)
        positions.append(batch.entries[0].position + 4 * ((i + 1) // 4))
        assert batch.joined == (("r",) if i == 0 else ())
        if i % 4 == 2:  # the last page of the three is full
            assert policy.drop_page("r", 1)
            policy.check_invariants()
    assert positions == list(range(9, 39))
    assert policy.pages_of("r")[0] == kept[0]
    policy.on_finished("r")
    assert policy.pool.available == 3


def test_no_page_is_dropped_that_a_batch_reads() -> None:
    policy = make()
    admit(policy, "r", num_tokens=9)
    batch = policy.next_batch()
    assert not policy.drop_page("r", 0)
    policy.on_batch_done(batch)
    assert policy.drop_page("r", 0)


def test_one_that_keeps_few_pages_is_promised_no_more() -> None:
    policy = make(num_pages=6, admission="worst_case")
    assert isinstance(policy.reserve("a", num_tokens=8, max_new_tokens=100, hashes=[]), Denied)
    for name in ("a", "b"):
        answer = policy.reserve(name, num_tokens=8, max_new_tokens=100, hashes=[], most_pages=3)
        assert isinstance(answer, Granted)


def test_a_held_request_is_computed_when_it_is_told_to_begin_and_not_before() -> None:
    policy = make()
    for name in ("held", "also"):
        policy.reserve(name, num_tokens=4, max_new_tokens=4, hashes=[], is_held=True)
        policy.on_committed(name)
    admit(policy, "bystander", max_new_tokens=9)
    assert ran(step(policy)) == ["bystander"]
    policy.on_begin("held")
    batch = step(policy)
    assert (ran(batch), batch.joined) == (["held", "bystander"], ("held",))
    policy.on_begin("held")
    policy.on_begin("gone")
    assert ran(step(policy)) == ["held", "bystander"]
    policy.on_cancelled("also")
    policy.on_begin("also")
    assert policy.request_ids == ["held", "bystander"]
    policy.check_invariants()


def test_a_held_request_that_is_the_youngest_makes_way_for_those_that_run() -> None:
    policy = make(num_pages=4, watermark=0.0)
    admit(policy, "old", num_tokens=8, max_new_tokens=8)
    policy.reserve("held", num_tokens=4, max_new_tokens=8, hashes=[], is_held=True)
    policy.on_committed("held")
    batches = [step(policy) for _ in range(5)]
    assert [batch.preempted for batch in batches] == [(), (), (), (), ("held",)]


def test_the_first_step_takes_one_page_more_when_the_prompt_fills_its_last() -> None:
    policy = make()
    admit(policy, "r", num_tokens=4)
    assert len(step(policy).entries[0].pages) == 2


def test_each_step_computes_the_next_position_and_none_is_beyond_what_is_needed() -> None:
    policy = make()
    admit(policy, "r", num_tokens=3, max_new_tokens=3)
    assert [step(policy).entries[0].position for _ in range(2)] == [3, 4]
    assert step(policy).entries == ()


def test_admission_leaves_the_watermark_free_and_grants_later_in_order() -> None:
    policy = make(num_pages=10, watermark=0.2)
    admit(policy, "a", num_tokens=24)
    assert policy.reserve("b", num_tokens=16, max_new_tokens=2, hashes=[]) == Queued(
        reason="decode-0: 4 of 10 pages free"
    )
    assert isinstance(policy.reserve("c", num_tokens=4, max_new_tokens=2, hashes=[]), Queued)
    assert policy.next_grants() == []
    policy.on_finished("a")
    assert [name for name, _ in policy.next_grants()] == ["b", "c"]


def test_an_empty_worker_admits_what_fits_whatever_the_watermark() -> None:
    policy = make(num_pages=4, watermark=0.5)
    admit(policy, "r", num_tokens=15, max_new_tokens=2)


def test_what_can_never_fit_is_denied_for_good() -> None:
    policy = make(num_pages=4)
    answer = policy.reserve("r", num_tokens=10, max_new_tokens=10, hashes=[])
    assert answer == Denied(reason="decode-0: 5 pages needed, 4 exist", retryable=False)


def test_worst_case_admission_never_preempts() -> None:
    policy = make(num_pages=8, admission="worst_case")
    admit(policy, "a", num_tokens=4, max_new_tokens=13)
    admit(policy, "b", num_tokens=4, max_new_tokens=13)
    assert isinstance(policy.reserve("c", num_tokens=1, max_new_tokens=2, hashes=[]), Queued)
    batches = [step(policy) for _ in range(12)]
    assert not any(batch.preempted for batch in batches)
    assert ran(batches[-1]) == ["a", "b"]


def test_the_youngest_leaves_when_pages_run_out() -> None:
    policy = make(num_pages=4, watermark=0.0)
    admit(policy, "old", num_tokens=4, max_new_tokens=12)
    admit(policy, "young", num_tokens=4, max_new_tokens=12)
    batches = [step(policy) for _ in range(6)]
    assert [batch.preempted for batch in batches].count(("young",)) == 1
    assert ran(batches[-1]) == ["old"]
    assert not policy.holds("young")
    assert policy.preemptions == 1


def test_who_is_ready_runs_at_once_when_all_that_ran_must_leave() -> None:
    policy = make(num_pages=4, max_batch_size=1, watermark=0.0)
    for name in ("older", "younger"):
        policy.reserve(name, num_tokens=4, max_new_tokens=12, hashes=[])
    policy.on_committed("younger")
    while step(policy).entries[0].position < 11:
        pass
    policy.on_committed("older")
    batch = step(policy)
    assert (ran(batch), batch.joined, batch.preempted) == (["older"], ("older",), ("younger",))


def test_a_full_batch_keeps_the_others_ready_in_order_of_commit() -> None:
    policy = make(num_pages=64, max_batch_size=2)
    for name in "abc":
        admit(policy, name)
    assert ran(step(policy)) == ["a", "b"]
    policy.on_finished("a")
    assert sorted(ran(step(policy))) == ["b", "c"]


def test_what_the_worker_has_cached_need_not_move() -> None:
    policy = make()
    hashes = page_hashes(list(range(10)), PAGE)
    assert isinstance(policy.reserve("a", num_tokens=10, max_new_tokens=4, hashes=hashes), Granted)
    policy.on_committed("a")
    policy.on_finished("a")
    answer = policy.reserve("b", num_tokens=10, max_new_tokens=4, hashes=hashes)
    assert isinstance(answer, Granted)
    assert answer.cached_pages == 2


def test_pages_filled_while_decoding_are_found_again() -> None:
    policy = make()
    tokens = list(range(9))
    hashes = page_hashes(tokens, PAGE)
    policy.reserve("a", num_tokens=6, max_new_tokens=4, hashes=hashes[:1])
    policy.on_committed("a")
    step(policy)
    step(policy)
    policy.on_page_filled("a", hashes[1])
    policy.on_finished("a")
    assert policy.pool.count_matching(hashes) == 2


def test_what_a_failed_request_left_in_its_pages_is_not_found_again() -> None:
    policy = make()
    hashes = page_hashes(list(range(8)), PAGE)
    policy.reserve("bad", num_tokens=8, max_new_tokens=8, hashes=hashes)
    policy.on_committed("bad")
    assert policy.pool.count_matching(hashes) == 2
    batch = policy.next_batch()
    policy.on_batch_done(batch)
    policy.on_failed("bad")
    assert policy.pool.count_matching(hashes) == 0
    assert policy.pool.usage.cached == policy.pool.usage.held == 0
    policy.check_invariants()


def test_batches_may_be_asked_for_while_others_are_in_flight() -> None:
    policy = make()
    admit(policy, "r")
    first, second = policy.next_batch(), policy.next_batch()
    assert [b.entries[0].position for b in (first, second)] == [4, 5]
    policy.on_finished("r")
    policy.on_batch_done(first)
    assert policy.pool.usage.held > 0
    policy.on_batch_done(second)
    assert policy.pool.usage.held == 0


def test_each_stage_has_an_even_share_of_those_that_run_and_nobody_is_in_two() -> None:
    policy = make(num_stages=3, num_pages=32, max_batch_size=8)
    for i in range(7):
        admit(policy, f"r{i}")
    first, second, third = (policy.next_batch() for _ in range(3))
    assert [ran(batch) for batch in (first, second, third)] == [["r0", "r1", "r2"], ["r3", "r4", "r5"], ["r6"]]
    assert ran(policy.next_batch()) == []
    policy.on_batch_done(first)
    again = policy.next_batch()
    assert [(entry.request_id, entry.position) for entry in again.entries] == [("r0", 5), ("r1", 5), ("r2", 5)]
    policy.on_batch_done(second)
    policy.on_finished("r3")
    admit(policy, "r7")
    assert ran(policy.next_batch()) == ["r4", "r5", "r7"]
    policy.check_invariants()


def test_who_needs_the_page_of_one_that_a_stage_computes_waits_for_it() -> None:
    policy = make(num_stages=2, num_pages=3, watermark=0.0)
    admit(policy, "older", num_tokens=3)
    admit(policy, "younger", num_tokens=3, max_new_tokens=2)
    first, second = policy.next_batch(), policy.next_batch()
    assert (ran(first), ran(second)) == (["older"], ["younger"])
    policy.on_batch_done(first)
    while policy.computed_len_of("older") < 2 * PAGE:
        assert ran(step(policy)) == ["older"]
    waiting = policy.next_batch()
    assert (waiting.entries, waiting.preempted) == ((), ())
    policy.on_batch_done(second)
    batch = policy.next_batch()
    assert (ran(batch), batch.preempted) == (["older"], ("younger",))
    policy.check_invariants()


@pytest.mark.parametrize("admission", ["watermark", "worst_case"])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_keeps_the_invariants_and_leaks_nothing(seed: int, num_stages: int, admission: str) -> None:
    rng = random.Random(seed)
    policy = make(num_pages=24, num_stages=num_stages, admission=admission, watermark=0.05)
    in_flight: list[DecodeBatch] = []
    reserved: set[str] = set()
    moving: dict[str, bool] = {}

    def finish(batch: DecodeBatch) -> None:
        guessed = [entry for entry in batch.entries if entry.drafted]
        policy.on_batch_done(batch, [(entry.request_id, rng.randint(1, 1 + entry.drafted)) for entry in guessed])

    for turn in range(1000):
        match rng.randrange(8):
            case 0:
                name, length = f"r{turn}", rng.randrange(1, 24)
                hashes = page_hashes([rng.randrange(2)] * length, PAGE)
                room = rng.choice((0, 0, 9))
                answer = policy.reserve(
                    name,
                    num_tokens=length,
                    max_new_tokens=rng.randrange(2, 30),
                    hashes=hashes,
                    room=room,
                    priority=rng.choice((0, 0, -1, 2)),
                )
                assert not (room and isinstance(answer, Queued)), "who moves waits for nothing"
                if isinstance(answer, Granted):
                    reserved.add(name)
            case 1 if reserved:
                name = reserved.pop()
                policy.on_committed(name, rng.randint(0, policy._requests[name].room))
            case 2 | 3 if len(in_flight) < max(2, num_stages):
                guessed = policy.running if num_stages == 1 else []
                drafts = [(r.request_id, rng.randrange(6)) for r in guessed if rng.random() < 0.5]
                batch = policy.next_batch(drafts)
                computed_now = {name for other in in_flight for name in ran(other)}
                assert num_stages == 1 or computed_now.isdisjoint(ran(batch)), "one is in two batches"
                assert sum(1 + entry.drafted for entry in batch.entries) <= 4
                in_flight.append(batch)
            case 4 if in_flight:
                finish(in_flight.pop(0))
            case 5 if policy.request_ids and rng.random() < 0.4:
                name = rng.choice(policy.request_ids)
                reserved.discard(name)
                policy.on_cancelled(name)
            case 6 if policy.request_ids and policy.may_move(name := rng.choice(policy.request_ids)):
                computed, moving[name] = policy.on_move(name, rng.randrange(12)), True
                assert computed == policy.computed_len_of(name)
            case 7 if moving:
                name = rng.choice(list(moving))
                policy.on_move_stops(name)
                if policy._requests[name].is_over or policy.stands_still(name):
                    del moving[name]
                    policy.on_move_closed(name, has_left=rng.random() < 0.5)
        reserved.update(name for name, _ in policy.next_grants())
        policy.check_invariants()
    for batch in in_flight:
        finish(batch)
    for name in policy.request_ids:
        policy.on_cancelled(name)
    for name in moving:
        policy.on_move_closed(name, has_left=False)
    assert policy.pool.usage.held == 0


def test_guesses_stand_as_far_as_they_are_kept_and_their_places_are_written_again() -> None:
    policy = make()
    admit(policy, "a", num_tokens=4, max_new_tokens=20)
    step(policy)
    batch = policy.next_batch([("a", 3)])
    assert [(entry.position, entry.drafted) for entry in batch.entries] == [(5, 3)]
    policy.check_invariants()
    assert policy.next_batch().entries == (), "what follows a guess is not known"
    policy.on_batch_done(batch, [("a", 2)])
    assert policy.computed_len_of("a") == 7
    assert step(policy).entries[0].position == 7
    policy.check_invariants()


def test_pages_of_guesses_that_were_wrong_come_back() -> None:
    policy = make()
    admit(policy, "a", num_tokens=7, max_new_tokens=20)
    batch = policy.next_batch([("a", 3)])
    assert policy.pool.usage.held == 3
    policy.on_batch_done(batch, [("a", 1)])
    assert policy.pool.usage.held == 2
    assert step(policy).entries[0].position == 8
    policy.check_invariants()


def test_guesses_take_pages_and_rows_that_nobody_needs() -> None:
    policy = make(num_pages=16)
    for name in ("a", "b", "c"):
        admit(policy, name, num_tokens=4, max_new_tokens=20)
    step(policy)
    batch = policy.next_batch([(name, 3) for name in ("c", "b", "a")])
    assert [(entry.request_id, entry.drafted) for entry in batch.entries] == [("a", 1), ("b", 0), ("c", 0)]
    policy.on_batch_done(batch, [("a", 1)])
    short = make(num_pages=3)
    admit(short, "a", num_tokens=7, max_new_tokens=6)
    assert short.next_batch([("a", 5)]).entries[0].drafted == 0, "it ends with its page, and the last page is spare"


def test_nothing_is_guessed_beyond_the_last_token_or_of_one_that_moves() -> None:
    policy = make()
    admit(policy, "a", num_tokens=2, max_new_tokens=3)
    assert policy.next_batch([("a", 9)]).entries[0].drafted == 1, "of three tokens prefill drew one, a step the last"
    policy = make()
    admit(policy, "a", num_tokens=4, max_new_tokens=20)
    step(policy)
    policy.on_move("a", room=9)
    assert policy.next_batch([("a", 2)]).entries[0].drafted == 0


def test_one_that_moves_while_its_guesses_are_computed_stands_still_with_them() -> None:
    policy = make()
    admit(policy, "a", num_tokens=4, max_new_tokens=20)
    step(policy)
    batch = policy.next_batch([("a", 2)])
    policy.on_move("a", room=9)
    policy.on_move_stops("a")
    policy.on_batch_done(batch, [("a", 1)])
    assert policy.stands_still("a")
    assert policy.next_batch().entries == ()


def test_one_that_is_cancelled_with_guesses_in_flight_keeps_its_pages_for_the_step() -> None:
    policy = make()
    admit(policy, "a", num_tokens=4, max_new_tokens=20)
    batch = policy.next_batch([("a", 3)])
    policy.on_cancelled("a")
    policy.check_invariants()
    assert policy.pool.usage.held > 0
    policy.on_batch_done(batch, [("a", 1)])
    assert policy.pool.usage.held == 0


def test_one_that_moves_is_computed_until_its_room_is_full_or_it_is_told_to_stand_still() -> None:
    policy = make()
    admit(policy, "a", num_tokens=4, max_new_tokens=20)
    admit(policy, "b", num_tokens=4, max_new_tokens=20)
    step(policy)
    assert policy.on_move("a", room=2) == 5
    assert not policy.may_move("a")
    assert [ran(step(policy)) for _ in range(3)] == [["a", "b"], ["a", "b"], ["b"]]
    assert policy.stands_still("a")
    policy.on_move_closed("a", has_left=False)
    assert ran(step(policy)) == ["a", "b"]
    policy.on_move("a", room=9)
    in_flight = policy.next_batch()
    policy.on_move_stops("a")
    assert not policy.stands_still("a"), "its step runs"
    policy.on_batch_done(in_flight)
    assert policy.stands_still("a")
    policy.on_move_closed("a", has_left=True)
    assert policy.request_ids == ["b"]
    policy.check_invariants()


def test_one_that_moves_is_not_preempted_but_waits_and_its_pages_stay_while_they_are_read() -> None:
    policy = make(num_pages=5)
    admit(policy, "old", num_tokens=7)
    admit(policy, "young", num_tokens=7)
    policy.on_move("young", room=9)
    assert ran(step(policy)) == ["old", "young"]
    batch = step(policy)
    assert (ran(batch), batch.preempted) == (["old"], ())
    policy.on_finished("old")
    assert ran(step(policy)) == ["young"]
    policy.on_cancelled("young")
    assert policy.pool.usage.held == 3, "its pages are read"
    policy.on_move_closed("young", has_left=False)
    assert policy.pool.usage.held == 0


def test_one_that_comes_by_a_move_has_room_and_gives_back_what_it_did_not_need() -> None:
    policy = make()
    answer = policy.reserve("a", num_tokens=6, max_new_tokens=9, hashes=[], room=8)
    assert isinstance(answer, Granted)
    assert len(answer.pages) == 4
    policy.on_committed("a", 3)
    assert policy.pool.usage.held == 3
    assert step(policy).entries[0].position == 9
    full = policy.reserve("b", num_tokens=44, max_new_tokens=9, hashes=[], room=24)
    assert full == Denied(reason="decode-0: 13 of 16 pages free", retryable=True)
    assert policy.request_ids == ["a"]


def test_what_has_no_token_left_to_decode_is_denied() -> None:
    answer = make().reserve("r", num_tokens=4, max_new_tokens=1, hashes=[])
    assert answer == Denied(reason="decode-0: r has no token left to decode", retryable=False)
