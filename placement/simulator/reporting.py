"""Reports reach each router as late as they do in life, and are drawn up only when it looks.

A worker whose state changes reports at every tick of report_gap_s, and the report shows it as it was at the tick. Its
Reporter draws it up when that state is about to change, or when the router is about to decide; both give the same
report. One that the next would overtake before the router decides again is not drawn up at all. The ReportInbox is the
router's end: whose reports may have come, and when one is an event of its own. A worker has a Reporter for each router.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.router.accounts import Report
from engine.pages.news import NO_NEWS
from placement.simulator.clock import VirtualClock


class Reporting(ABC):
    """A worker that reports."""

    @abstractmethod
    def report(self, made_s: float, router: int) -> Report:
        """What the worker held at made_s, which is not after now and not before its last change; of its pages what this
        router has not been told."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether its state changes with time alone."""


class ReportInbox:
    """`is_awaited`: somebody waits in the router, who may go when a report comes. `on_arrival` is then called at each
    time at which one does. `next_decision_s`: when the router will next look at reports, but for failures."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        gap_s: float,
        delay_s: float,
        is_awaited: Callable[[], bool],
        on_arrival: Callable[[int], None],
    ) -> None:
        self.clock = clock
        self.gap_s = gap_s
        self.delay_s = delay_s
        self.next_decision_s = 0.0
        self._is_awaited = is_awaited
        self._on_arrival = on_arrival
        self._reporters: dict[Reporter, None] = {}  # that may have something for the router
        self._watched_tick = 0  # the last whose reports are an event
        self._taken_tick = -1  # whose reports have been taken
        self._next_reports_s = 0.0  # when others arrive

    def expect(self, reporter: Reporter) -> None:
        self._reporters[reporter] = None
        if int(self.clock.now / self.gap_s) >= self._watched_tick and self._is_awaited():
            self.watch()

    def forget(self, reporter: Reporter) -> None:
        self._reporters.pop(reporter, None)

    def watch(self) -> None:
        """Requests wait in the router: the next reports are an event."""
        tick = int(self.clock.now / self.gap_s) + 1
        if tick > self._watched_tick and self._reporters:  # all workers report at the same ticks
            self._watched_tick = tick
            self.clock.at(tick * self.gap_s + self.delay_s, self._on_arrival, 0)

    def take(self) -> list[tuple[str, Report]]:
        """Those that have arrived. All workers report at the same ticks, so between two arrivals there is nothing."""
        now, gap_s = self.clock.now, self.gap_s
        tick = self.arrived_tick(now)
        taken: list[tuple[str, Report]] = []
        if tick == self._taken_tick and now < self._next_reports_s:
            return taken
        self._taken_tick = tick
        self._next_reports_s = (tick + 1) * gap_s + self.delay_s
        quiet = []
        for reporter in self._reporters:
            report = reporter.take(now, tick)
            if report is not None:
                taken.append((reporter.name, report))
            if reporter.is_quiet:
                quiet.append(reporter)
        for reporter in quiet:
            del self._reporters[reporter]
        return taken

    def arrived_tick(self, now: float) -> int:
        """The last whose reports have arrived: by the sum by which they are expected, not as rounding has it."""
        tick = int(max(0.0, now - self.delay_s) / self.gap_s)
        while tick and tick * self.gap_s + self.delay_s > now:
            tick -= 1
        return tick + 1 if (tick + 1) * self.gap_s + self.delay_s <= now else tick


class Teller(ABC):
    """What a worker tells of itself, whoever hears it."""

    __slots__ = ()

    @abstractmethod
    def touch(self, now: float) -> None:
        """The worker is about to change."""

    @abstractmethod
    def mark(self, now: float) -> None:
        """The worker has changed, and will say so."""

    @abstractmethod
    def report_anew(self, now: float) -> None:
        """Though nothing has changed, at the next tick, as a live worker does at each: a router waits for it."""

    @abstractmethod
    def end(self) -> None:
        """The worker says nothing more."""


class Reporters(Teller):
    """To several routers."""

    __slots__ = ("_each",)

    def __init__(self, each: Sequence[Reporter]) -> None:
        self._each = each

    def touch(self, now: float) -> None:
        for reporter in self._each:
            reporter.touch(now)

    def mark(self, now: float) -> None:
        for reporter in self._each:
            reporter.mark(now)

    def report_anew(self, now: float) -> None:
        for reporter in self._each:
            reporter.report_anew(now)

    def end(self) -> None:
        for reporter in self._each:
            reporter.end()


class Reporter(Teller):
    """To the router of this number."""

    __slots__ = ("_inbox", "_is_due", "_router", "_sent", "_tick", "_worker", "name")

    def __init__(self, name: str, worker: Reporting, inbox: ReportInbox, router: int) -> None:
        self.name = name
        self._worker = worker
        self._inbox = inbox
        self._router = router
        self._is_due = False  # something has changed since the last tick that was looked at
        self._tick = 0  # the last that was looked at
        self._sent: deque[tuple[float, Report]] = deque()  # when it arrives

    def touch(self, now: float) -> None:
        if not self._is_due:
            return
        inbox = self._inbox
        tick = int(now / inbox.gap_s)
        if tick <= self._tick or (tick + 1) * inbox.gap_s + inbox.delay_s <= inbox.next_decision_s:
            return
        heard = inbox.arrived_tick(inbox.next_decision_s)
        if self._tick < heard < tick:
            self._make(heard)
        if self._is_due:
            self._make(tick)

    def mark(self, now: float) -> None:
        if not self._is_due:
            self._is_due = True
            self._tick = int(now / self._inbox.gap_s)
        self._inbox.expect(self)

    def report_anew(self, now: float) -> None:
        self._is_due = False
        self.mark(now)

    def end(self) -> None:
        self._inbox.forget(self)

    def take(self, now: float, arrived: int) -> Report | None:
        """The last report that has arrived, those of the tick `arrived` being the last, and was not taken; what came
        before it is forgotten, but for its pages."""
        if self._is_due and arrived > self._tick:
            if not self._sent:
                return self._drawn(arrived)
            self._make(arrived)
        taken: Report | None = None
        while self._sent and self._sent[0][0] <= now:
            report = self._sent.popleft()[1]
            if taken is not None and taken.pages is not NO_NEWS:
                report = replace(report, pages=report.pages.after(taken.pages))
            taken = report
        return taken

    @property
    def is_quiet(self) -> bool:
        return not self._is_due and not self._sent

    def _make(self, tick: int) -> None:
        self._sent.append((tick * self._inbox.gap_s + self._inbox.delay_s, self._drawn(tick)))

    def _drawn(self, tick: int) -> Report:
        self._tick = tick
        self._is_due = self._worker.is_running
        return self._worker.report(tick * self._inbox.gap_s, self._router)
