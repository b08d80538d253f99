"""What a prefill worker remembers of pairs that fail: routers are told, attempts are bounded, success clears."""

from __future__ import annotations

import pytest

from worker.peers.pair_health import FORGET_S, MAX_BACKOFF_S, MAX_TROUBLES, PairHealth, PeerKey

pytestmark = pytest.mark.unit

KEY = ("decode-0", "d1")


def told(health: PairHealth, now: float) -> list[tuple[PeerKey, int, str]]:
    return [(key, trouble.failures, trouble.reason) for key, trouble in health.troubles(now)]


def test_attempts_become_seldom_and_go_on() -> None:
    health, now, waits = PairHealth(), 100.0, list[float]()
    assert health.backoff_s(KEY, now) == 0
    for _ in range(50):
        health.on_unreachable(KEY, "no route", now)
        waits.append(health.backoff_s(KEY, now))
        now += waits[-1]
        assert health.backoff_s(KEY, now) == pytest.approx(0, abs=1e-9)
    assert waits[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert max(waits) == pytest.approx(MAX_BACKOFF_S) == waits[-1]
    assert told(health, now) == [(KEY, 50, "no route")]


def test_a_pair_that_opens_again_is_good_again() -> None:
    health = PairHealth()
    health.on_unreachable(KEY, "no route", 1.0)
    assert health.why_not_now(KEY) == "no route"
    health.on_open(KEY)
    assert health.why_not_now(KEY) == ""
    assert told(health, 1.0) == []


def test_a_pair_that_opens_but_brings_nothing_over_stays_bad_until_a_receipt() -> None:
    health = PairHealth()
    for now in (1.0, 2.0):
        health.on_open(KEY)
        health.on_broken(KEY, "no receipt", now)
    health.on_open(KEY)
    assert told(health, 3.0) == [(KEY, 2, "no receipt")]
    health.on_receipt(KEY)
    assert told(health, 3.0) == []


def test_a_pair_that_is_lost_whenever_it_opens_is_opened_ever_more_seldom() -> None:
    """The first time at once: most that are lost are good again."""
    health, now, waits = PairHealth(), 100.0, list[float]()
    for _ in range(20):
        health.on_open(KEY)
        health.on_broken(KEY, "reset", now)
        waits.append(health.backoff_s(KEY, now))
        now += waits[-1]
    assert waits[:5] == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8])
    assert waits[-1] == pytest.approx(MAX_BACKOFF_S)
    assert health.why_not_now(KEY) == "reset"
    health.on_receipt(KEY)
    health.on_broken(KEY, "reset", now)
    assert health.backoff_s(KEY, now) == 0
    assert health.why_not_now(KEY) == ""


def test_what_is_told_is_bounded_in_time_and_number() -> None:
    health = PairHealth()
    for i in range(MAX_TROUBLES + 10):
        health.on_broken((f"decode-{i}", "d"), "lost", float(i))
    assert len(told(health, 1.0)) == MAX_TROUBLES
    assert told(health, MAX_TROUBLES + 9 + FORGET_S) == []
