"""Timeline: the phases sum to the whole, whatever the order and the clocks of the marks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router.live.timeline import PHASES, Timeline

pytestmark = pytest.mark.unit


def test_phases_last_from_mark_to_mark() -> None:
    timeline = Timeline(10.0)
    for phase, at_s in zip(PHASES[1:], (11.0, 13.0, 16.0, 20.0, 25.0), strict=True):
        timeline.enter(phase, at_s)
    timeline.first_token(16.5)
    timeline.finish(31.5)
    assert timeline.phases() == {
        "route": 1.0,
        "prefill_queue": 2.0,
        "prefill": 3.0,
        "handoff": 4.0,
        "decode_queue": 5.0,
        "decode": 6.5,
    }
    assert timeline.ttft_s == 6.5
    assert timeline.e2e_s == 21.5
    assert timeline.tpot_s(num_tokens=6) == 3.0


def test_a_phase_that_was_not_entered_is_not_listed() -> None:
    timeline = Timeline(0.0)
    timeline.enter("prefill_queue", 1.0)
    timeline.finish(2.0)
    assert timeline.phases() == {"route": 1.0, "prefill_queue": 1.0}


def test_marks_may_arrive_in_another_order_than_they_were_made() -> None:
    timeline = Timeline(0.0)
    timeline.enter("prefill_queue", 1.0)
    timeline.enter("decode_queue", 4.0)  # decode's stream was quicker than prefill's
    timeline.enter("prefill", 2.0)
    timeline.enter("handoff", 3.0)
    timeline.finish(5.0)
    assert timeline.phases() == dict.fromkeys(("route", "prefill_queue", "prefill", "handoff", "decode_queue"), 1.0)


def test_a_mark_of_a_clock_that_runs_behind_makes_no_negative_phase() -> None:
    timeline = Timeline(10.0)
    timeline.enter("prefill_queue", 11.0)
    timeline.enter("prefill", 10.5)
    timeline.enter("handoff", 12.0)
    timeline.finish(12.5)
    assert timeline.phases() == {"route": 1.0, "prefill_queue": 0.0, "prefill": 1.0, "handoff": 0.5}


def test_a_second_attempt_adds_to_the_phases_of_the_first() -> None:
    timeline = Timeline(0.0)
    timeline.enter("prefill_queue", 1.0)
    timeline.enter("prefill", 2.0)
    timeline.enter("route", 5.0)
    timeline.enter("prefill_queue", 6.0)
    timeline.enter("prefill", 8.0)
    timeline.finish(9.0)
    assert timeline.phases() == {"route": 2.0, "prefill_queue": 3.0, "prefill": 4.0}


def test_first_token_and_end_are_told_once() -> None:
    timeline = Timeline(0.0)
    timeline.first_token(1.0)
    timeline.first_token(2.0)
    timeline.finish(3.0)
    timeline.finish(4.0)
    assert (timeline.ttft_s, timeline.e2e_s) == (1.0, 3.0)
    assert timeline.tpot_s(num_tokens=1) == 0.0


@given(
    marks=st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0, 100)), max_size=30),
    finished_s=st.floats(0, 120),
)
def test_phases_are_never_negative_and_sum_to_e2e(marks: list[tuple[str, float]], finished_s: float) -> None:
    timeline = Timeline(5.0)
    for phase, at_s in marks:
        timeline.enter(phase, at_s)
    timeline.finish(finished_s)
    phases = timeline.phases()
    assert all(seconds >= 0 for seconds in phases.values())
    assert sum(phases.values()) == pytest.approx(timeline.e2e_s, abs=1e-9)
