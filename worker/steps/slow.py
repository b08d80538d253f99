"""StepClock says from when to when each step of a role took, and which were slow: it is told of both ends.

A step that is prepared while another one runs begins when that one ends, but where an engine has pipeline stages, in
which steps run beside each other. Its cost is of a step, whatever is in it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from worker.steps.recent import Recent

SLOW = 2.0  # times the median
LAST = 64  # steps, that it is of
ENOUGH = 16  # before any is called slow


@dataclass(frozen=True, slots=True)
class Took:
    """By time.monotonic_ns(). `median_ns`: of the steps before it, 0 while those are few."""

    begin_ns: int
    end_ns: int
    median_ns: int

    @property
    def is_slow(self) -> bool:
        return 0 < SLOW * self.median_ns < self.end_ns - self.begin_ns


class StepClock:
    def __init__(self, num_stages: int = 1) -> None:
        self._runs_beside = num_stages > 1
        self._begun: deque[int] = deque()
        self._ended_ns = 0
        self._recent = Recent(LAST)

    def begin(self) -> None:
        """One is prepared. They end in the order in which they began."""
        self._begun.append(time.monotonic_ns())

    def end(self) -> Took:
        begin_ns = self._begun.popleft()
        if not self._runs_beside:
            begin_ns = max(begin_ns, self._ended_ns)
        self._ended_ns = time.monotonic_ns()
        median_ns = int(self._recent.at(0.5)) if len(self._recent) >= ENOUGH else 0
        self._recent.note(self._ended_ns - begin_ns)
        return Took(begin_ns, self._ended_ns, median_ns)
