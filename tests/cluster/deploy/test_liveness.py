"""Liveness: who hangs, by when that is known, and who does not."""

from __future__ import annotations

import pytest

from cluster.deploy.liveness import LOAD_SILENCE_S, Liveness

pytestmark = pytest.mark.unit


class Watch:
    """A member that is asked every second, or is silent."""

    def __init__(self) -> None:
        self.liveness = Liveness(timeout_s=10.0, load_timeout_s=600.0)
        self.now_s = 0.0

    def says(self, stage: str = "ready", *, life: str = "a", turns: int = 0, fraction: float = 0.0) -> None:
        answer = {"name": "decode-0", "incarnation": life, "stage": stage, "fraction": fraction, "turns": turns}
        self.liveness.on_answer(answer, self.now_s)

    def hung_after(self, stage: str, *, at_most_s: int) -> str:
        """The reason, once there is one within the time."""
        for _ in range(at_most_s):
            self.now_s += 1.0
            if reason := self.liveness.why_hung("decode-0", stage, self.now_s):
                return reason
        return ""


def test_one_that_says_nothing_hangs() -> None:
    watch = Watch()
    watch.says(turns=1)
    assert watch.hung_after("ready", at_most_s=9) == ""
    assert watch.hung_after("ready", at_most_s=1) == "it gave no sign of life for 10 s"


def test_one_whose_loop_stands_still_hangs_though_it_answers() -> None:
    watch = Watch()
    watch.says(turns=7)
    for _ in range(9):
        assert watch.hung_after("ready", at_most_s=1) == ""
        watch.says(turns=7)
    assert watch.hung_after("ready", at_most_s=1)


def test_one_whose_loop_runs_does_not_hang() -> None:
    watch = Watch()
    for turns in range(100):
        watch.says(turns=turns)
        assert watch.hung_after("ready", at_most_s=5) == ""


def test_one_that_loads_has_more_time_to_answer_and_to_come_further() -> None:
    watch = Watch()
    watch.says("weights")
    assert watch.hung_after("weights", at_most_s=int(LOAD_SILENCE_S) - 1) == ""
    assert watch.hung_after("weights", at_most_s=1)
    watch = Watch()
    for _ in range(599):
        watch.says("weights")
        assert watch.hung_after("weights", at_most_s=1) == ""
    watch.says("weights", fraction=0.5)
    for _ in range(599):
        assert watch.hung_after("weights", at_most_s=1) == ""
        watch.says("weights", fraction=0.5)
    assert watch.hung_after("weights", at_most_s=1) == "it came no further for 600 s"


def test_a_long_silence_in_the_load_is_not_held_against_one_that_is_ready() -> None:
    watch = Watch()
    watch.says("weights")
    assert watch.hung_after("weights", at_most_s=50) == ""
    watch.says("ready")
    assert watch.hung_after("ready", at_most_s=9) == ""


@pytest.mark.parametrize("stage", ["waiting", "failed", "ended"])
def test_one_that_has_no_process_to_judge_does_not_hang(stage: str) -> None:
    assert Watch().hung_after(stage, at_most_s=2000) == ""


def test_one_that_does_not_come_back_is_killed_again_and_again() -> None:
    """It may have been stopped before it could say anything."""
    watch = Watch()
    watch.says()
    watch.liveness.on_lost("decode-0", watch.now_s)
    for _ in range(3):
        assert watch.hung_after("lost", at_most_s=int(LOAD_SILENCE_S) - 1) == ""
        assert watch.hung_after("lost", at_most_s=1)


def test_one_that_was_known_before_the_controller_was_restarted_is_judged_too() -> None:
    assert Watch().hung_after("ready", at_most_s=11)


def test_for_how_long_one_is_ready_counts_from_the_last_start() -> None:
    watch = Watch()
    for stage, life, ready_for_s in (("ready", "a", 7.0), ("weights", "b", 0.0), ("ready", "b", 7.0)):
        watch.says(stage, life=life)
        watch.now_s += 7.0
        watch.says(stage, life=life, turns=1)
        assert watch.liveness.ready_for_s("decode-0", watch.now_s) == ready_for_s
    watch.liveness.on_lost("decode-0", watch.now_s)
    assert watch.liveness.ready_for_s("decode-0", watch.now_s + 7.0) == 0.0
