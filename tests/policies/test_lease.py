"""Leases: every page comes back exactly once, whatever happens in whatever order."""

from __future__ import annotations

import random

import pytest

from kv_transfer.lease import LeaseState, LeaseTable

pytestmark = pytest.mark.unit

EVENTS = ["grant", "grant", "touch", "commit", "end", "stopped", "dead", "expire", "overdue", "finish"]


def table(*, one_sided: bool, ttl_s: float = 2.0) -> LeaseTable[int]:
    leases: LeaseTable[int] = LeaseTable(fence_timeout_s=5.0)
    leases.grant(1, "r1", "prefill-0", (3, 4), 10.0, ttl_s, one_sided=one_sided)
    return leases


def test_commit_passes_the_pages_on() -> None:
    leases = table(one_sided=True)
    assert leases.commit(1) == (3, 4)
    assert leases.leased_pages == 0
    assert leases.end(1, "late", 11.0) is None
    assert leases.on_stopped(1) is None


def test_two_sided_leases_end_at_once() -> None:
    leases = table(one_sided=False)
    ended = leases.end(1, "cancelled", 11.0)
    assert ended is not None
    assert ended.released
    assert ended.lease.pages == (3, 4)
    assert leases.leased_pages == 0


def test_one_sided_leases_wait_for_the_sender_to_stop() -> None:
    leases = table(one_sided=True)
    ended = leases.end(1, "cancelled", 11.0)
    assert ended is not None
    assert not ended.released
    assert leases.leased_pages == 2
    assert leases.end(1, "again", 11.0) is None
    stopped = leases.on_stopped(1)
    assert stopped is not None
    assert (stopped.pages, stopped.reason) == ((3, 4), "cancelled")
    assert leases.leased_pages == 0


def test_a_dead_peer_stops_all_its_leases() -> None:
    leases = table(one_sided=True)
    leases.grant(2, "r2", "prefill-0", (5,), 10.0, 2.0, one_sided=True)
    leases.grant(3, "r3", "prefill-1", (6,), 10.0, 2.0, one_sided=True)
    leases.end(1, "cancelled", 11.0)
    assert [(x.key, x.reason) for x in leases.on_peer_dead("prefill-0", "dead")] == [(1, "cancelled"), (2, "dead")]
    assert leases.leased_pages == 1


def test_progress_moves_the_end() -> None:
    leases = table(one_sided=False, ttl_s=2.0)
    assert leases.next_due_s == 12.0
    leases.touch(1, 11.5)
    assert leases.expire(12.0) == []
    assert [e.lease.key for e in leases.expire(13.5)] == [1]
    assert leases.next_due_s is None


def test_a_fenced_lease_does_not_expire_again() -> None:
    leases = table(one_sided=True)
    assert [e.lease.reason for e in leases.expire(99.0)] == ["no progress for 2 s"]
    leases.touch(1, 99.0)
    assert leases.expire(999.0) == []
    assert leases.next_due_s == 104.0


def test_a_fence_that_nobody_passes_ends_in_quarantine_and_is_told_once() -> None:
    leases = table(one_sided=True)
    leases.grant(2, "r2", "prefill-0", (5,), 10.0, 99.0, one_sided=True)
    leases.end(1, "cancelled", 11.0)
    assert (leases.pages_in(LeaseState.FENCING), leases.next_due_s) == (2, 16.0)
    assert leases.quarantine_overdue(15.9) == []
    assert [(lease.key, lease.reason) for lease in leases.quarantine_overdue(16.0)] == [(1, "cancelled")]
    assert [leases.pages_in(state) for state in LeaseState] == [1, 0, 2]
    assert leases.quarantine_overdue(99.0) == []
    assert leases.next_due_s == 109.0
    assert leases.end(1, "again", 17.0) is None


@pytest.mark.parametrize("is_dead", [True, False])
def test_quarantined_pages_come_back_when_the_peer_is_dead_or_awake(is_dead: bool) -> None:
    leases = table(one_sided=True)
    leases.end(1, "cancelled", 11.0)
    leases.quarantine_overdue(16.0)
    gone = leases.on_peer_dead("prefill-0", "killed") if is_dead else [leases.on_stopped(1)]
    assert [(lease.pages, lease.reason) for lease in gone if lease is not None] == [((3, 4), "cancelled")]
    assert (leases.leased_pages, leases.next_due_s) == (0, None)


def test_a_page_cannot_be_under_two_leases() -> None:
    leases = table(one_sided=True)
    with pytest.raises(AssertionError, match="page 4 is under lease 1 already"):
        leases.grant(2, "r2", "prefill-0", (9, 4), 10.0, 2.0, one_sided=True)


@pytest.mark.parametrize("seed", range(20))
def test_random_walk(seed: int) -> None:
    """A pool of pages beside the table: a page that came back twice, or never, would show in it."""
    rng, now, leases = random.Random(seed), 0.0, LeaseTable[int](fence_timeout_s=4.0)
    free, running, granted, fenced = set(range(40)), set[int](), set[int](), set[int]()
    quarantined = set[int]()  # of the fenced
    peers = {}

    def give_back(pages: tuple[int, ...]) -> None:
        assert not free & set(pages)
        free.update(pages)

    for key in range(600):
        now += rng.random()
        event = rng.choice(EVENTS)
        known = sorted(granted | fenced)
        if event == "grant" and len(free) >= 8:
            pages = tuple(rng.sample(sorted(free), rng.randint(0, 8)))
            peers[key] = rng.choice("ab")
            leases.grant(key, f"r{key}", peers[key], pages, now, 3.0, one_sided=peers[key] == "a")
            free -= set(pages)
            granted.add(key)
        elif event == "touch" and known:
            leases.touch(rng.choice(known), now)
        elif event == "commit" and granted:
            key = rng.choice(sorted(granted))
            running.update(leases.commit(key))
            granted.discard(key)
        elif event == "end" and known:
            key = rng.choice(known)
            ended = leases.end(key, "why", now)
            assert (ended is None) == (key in fenced)
            if ended is not None:
                granted.discard(key)
                fenced |= set() if ended.released else {key}
                give_back(ended.lease.pages if ended.released else ())
        elif event == "stopped" and known:
            key = rng.choice(known)
            lease = leases.on_stopped(key)
            assert lease is not None
            give_back(lease.pages)
            granted.discard(key)
            fenced.discard(key)
        elif event == "dead" and rng.random() < 0.2:
            peer = rng.choice("ab")
            for lease in leases.on_peer_dead(peer, "dead"):
                assert peers[lease.key] == peer
                give_back(lease.pages)
                granted.discard(lease.key)
                fenced.discard(lease.key)
        elif event == "expire":
            for ended in leases.expire(now):
                granted.discard(ended.lease.key)
                fenced |= set() if ended.released else {ended.lease.key}
                give_back(ended.lease.pages if ended.released else ())
        elif event == "overdue":
            overdue = {lease.key for lease in leases.quarantine_overdue(now)}
            assert overdue <= fenced - quarantined
            quarantined |= overdue
        elif event == "finish" and running:
            page = running.pop()
            free.add(page)
        leases.check_invariants()
        assert len(free) + len(running) + leases.leased_pages == 40
        assert {k for k in granted if leases.get(k) is not None} == granted
        quarantined &= fenced
        for key in fenced:
            lease = leases.get(key)
            assert lease is not None
            assert lease.state is (LeaseState.QUARANTINED if key in quarantined else LeaseState.FENCING)
        assert leases.leased_pages == sum(leases.pages_in(state) for state in LeaseState)
        assert (leases.next_due_s is None) == (granted | fenced == quarantined)
    for peer in "ab":
        for lease in leases.on_peer_dead(peer, "end"):
            give_back(lease.pages)
    assert free | running == set(range(40))
