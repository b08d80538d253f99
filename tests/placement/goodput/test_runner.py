"""Runner: every job, in order, and word of how far it is."""

from __future__ import annotations

import math

from placement.goodput.runner import open_runner


def test_progress_is_told_from_nothing_to_all() -> None:
    told: list[tuple[str, int, int]] = []
    with open_runner(0, lambda *step: told.append(step)) as runner:
        assert runner.map(math.sqrt, [1.0, 4.0], "roots") == [1.0, 2.0]
    assert told == [("roots", 0, 2), ("roots", 1, 2), ("roots", 2, 2)]
