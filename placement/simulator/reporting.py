"""Reporter brings a worker's reports to the router as late as they are in life, and only when the router looks.

A worker whose state changes reports at every tick of report_gap_s, and the report shows it as it was at the tick. Here
it is drawn up when that state is about to change, or when the router is about to decide; both give the same report. One
that the next would overtake before the router decides again is not drawn up at all.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from cluster.router.accounts import Report

if TYPE_CHECKING:
    from placement.simulator.simulate import Simulation


class Reporting(Protocol):
    def report(self, made_s: float) -> Report:
        """What the worker held at made_s, which is not after now and not before its last change."""

    @property
    def is_running(self) -> bool:
        """Whether its state changes with time alone."""


class Reporter:
    __slots__ = ("_delay_s", "_gap_s", "_is_due", "_sent", "_sim", "_tick", "_worker", "name")

    def __init__(self, name: str, worker: Reporting, sim: Simulation) -> None:
        self.name = name
        self._worker = worker
        self._sim = sim
        self._gap_s = sim.cluster.report_gap_s
        self._delay_s = sim.cluster.message_s
        self._is_due = False  # something has changed since the last tick that was looked at
        self._tick = 0  # the last that was looked at
        self._sent: deque[tuple[float, Report]] = deque()  # when it arrives

    def touch(self, now: float) -> None:
        """The worker is about to change."""
        if not self._is_due:
            return
        tick = int(now / self._gap_s)
        if tick > self._tick:
            arrives_after_s = (tick + 1) * self._gap_s + self._delay_s
            if arrives_after_s > self._sim.next_decision_s:
                self._make(tick)

    def mark(self, now: float) -> None:
        """The worker has changed."""
        if not self._is_due:
            self._is_due = True
            self._tick = int(now / self._gap_s)

    def arrives_s(self, now: float) -> float:
        """When the report that follows a change now will be known to the router."""
        return (int(now / self._gap_s) + 1) * self._gap_s + self._delay_s

    def take(self, now: float) -> Report | None:
        """The last report that has arrived and was not taken; what came before it is forgotten."""
        if self._is_due:
            tick = int(max(0.0, now - self._delay_s) / self._gap_s)
            if tick > self._tick:
                self._make(tick)
        taken: Report | None = None
        while self._sent and self._sent[0][0] <= now:
            taken = self._sent.popleft()[1]
        return taken

    @property
    def is_quiet(self) -> bool:
        return not self._is_due and not self._sent

    def _make(self, tick: int) -> None:
        self._tick = tick
        self._is_due = self._worker.is_running
        made_s = tick * self._gap_s
        self._sent.append((made_s + self._delay_s, self._worker.report(made_s)))
