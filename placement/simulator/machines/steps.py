"""DecodeSteps is the run of steps under way on the virtual clock: one event at its end, however many steps it has.

The policy hears of those that have ended when somebody looks (`advance_to`). What changes meanwhile moves the end:
somebody comes or goes (`cut_short`), pages went to others (`end_before_pages`), the machine is shared (`change_pace`).
"""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.run import DecodeRun
from placement.latency.base import DecodeLine, decode_run_s, steps_within
from placement.simulator.clock import VirtualClock


class DecodeSteps:
    """`on_end`: called when the last step has ended, to call `end`. `count`: requests in the run; 0: none decode."""

    def __init__(self, clock: VirtualClock, run: DecodeRun, on_end: Callable[[], None]) -> None:
        self.run = run
        self.count = 0
        self.begun_s = 0.0
        self.planned = 0
        self.advanced = 0  # of which the policy knows
        self._clock = clock
        self._on_end = on_end
        self._ended = 0  # those of all runs before
        self._line = DecodeLine(1.0, 0.0)
        self._version = 0

    @property
    def made(self) -> int:
        """Steps of all runs, as far as the policy knows."""
        return self._ended + self.advanced

    def begin(self, line: DecodeLine, planned: int) -> None:
        self.begun_s = self._clock.now
        self.advanced = 0
        self._line = line
        self._plan(planned)

    def _plan(self, steps: int) -> None:
        self.planned = steps
        self._version += 1
        end_s = self.begun_s + decode_run_s(self._line, self.count, steps)
        self._clock.at(end_s, self._at_end, self._version)

    def _at_end(self, version: int) -> None:
        if version == self._version:
            self._on_end()

    def advance_to(self, time_s: float) -> None:
        """Let the policy know of the steps that have ended by then; the run's last is left to `end`."""
        if self.count and self.planned - 1 > self.advanced:
            ended = steps_within(self._line, self.count, time_s - self.begun_s, self.planned - 1)
            if ended > self.advanced:
                self.run.advance(ended - self.advanced)
                self.advanced = ended

    def cut_short(self) -> None:
        """The step under way is the run's last."""
        if self.planned - 1 > self.advanced:
            ended = steps_within(self._line, self.count, self._clock.now - self.begun_s, self.planned - 1)
            if ended + 1 < self.planned:
                self._plan(ended + 1)

    def end_before_pages(self) -> None:
        """Some went to somebody else: the run may have to end before they are short."""
        ahead = self.run.steps_ahead if self.count else 0
        if self.count and self.planned - 1 - self.advanced > ahead:
            self._plan(self.advanced + 1 + ahead)

    def change_pace(self, ratio: float) -> float:
        """A step takes `ratio` times as long from now on: cut the run here. The steps that have ended are behind it,
        the one under way keeps its share of work done, and what is left goes on at the new pace. Returns by how much
        later what is left has begun."""
        now, line, ended = self._clock.now, self._line, self.advanced
        step_s = line.step_s + line.per_token_s * self.count * ended  # of the one under way
        done_s = now - self.begun_s - decode_run_s(line, self.count, ended)
        before_s = self.begun_s
        self.begun_s = now - min(done_s, step_s) * ratio
        self._line = DecodeLine(step_s * ratio, line.per_token_s * ratio)
        self._ended += ended
        self.advanced = 0
        self._plan(self.planned - ended)
        return self.begun_s - before_s

    def end(self) -> None:
        self.run.advance(self.planned - 1 - self.advanced)
        self.run.end()
        self._ended += self.planned
        self.count = self.advanced = 0
