"""AwakeClock: what a process slept is not counted, and how late its loop was is told."""

from __future__ import annotations

import pytest

from worker.awake import BEAT_S, LAG_BEATS, STILL_S, AwakeClock

pytestmark = pytest.mark.unit


class Wall:
    now_s = 100.0


def test_a_sleep_counts_as_two_beats_at_most() -> None:
    wall = Wall()
    clock = AwakeClock(lambda: wall.now_s)
    for _ in range(10):
        wall.now_s += BEAT_S
        clock.beat()
    assert clock.now_s() == pytest.approx(10 * BEAT_S)
    wall.now_s += 3600.0
    assert clock.now_s() == pytest.approx(12 * BEAT_S)
    clock.beat()
    assert clock.now_s() == pytest.approx(12 * BEAT_S)
    wall.now_s += BEAT_S / 2
    assert clock.now_s() == pytest.approx(12.5 * BEAT_S)


def test_stops_are_added_up_and_small_lags_are_none() -> None:
    wall = Wall()
    clock = AwakeClock(lambda: wall.now_s)
    for beat_s in (BEAT_S + STILL_S / 2, BEAT_S + 3.0, BEAT_S, BEAT_S + 1.0):
        wall.now_s += beat_s
        clock.beat()
    assert clock.stopped_s == pytest.approx(4.0)


def test_the_worst_lag_is_told_for_a_while() -> None:
    wall = Wall()
    clock = AwakeClock(lambda: wall.now_s)
    wall.now_s += 2.0
    clock.beat()
    assert clock.lag_s == pytest.approx(2.0 - BEAT_S)
    for _ in range(LAG_BEATS):
        wall.now_s += BEAT_S
        clock.beat()
    assert clock.lag_s == pytest.approx(0.0)


def test_a_stop_is_told_until_it_is_long_ago() -> None:
    wall = Wall()
    clock = AwakeClock(lambda: wall.now_s)
    wall.now_s += BEAT_S + STILL_S / 2
    clock.beat()
    assert not clock.stood_still_within(2.0)
    wall.now_s += 2 * STILL_S  # before the beat that is late
    assert clock.stood_still_within(2.0)
    clock.beat()
    wall.now_s += 2 * BEAT_S
    clock.beat()
    assert clock.stood_still_within(2.0)
    assert not clock.stood_still_within(BEAT_S)
