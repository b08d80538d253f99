"""What a router has heard of a worker when it decides."""

from __future__ import annotations

import pytest

from cluster.router.accounts import Report
from placement.simulator.clock import VirtualClock
from placement.simulator.reporting import Reporter, ReportInbox, Reporting

pytestmark = pytest.mark.unit


class Worker(Reporting):
    pages = 1

    @property
    def is_running(self) -> bool:
        return False

    def report(self, made_s: float, router: int) -> Report:
        return Report(made_s=made_s, available_pages=self.pages)


def test_a_change_hides_no_report_that_was_on_its_way() -> None:
    inbox = ReportInbox(VirtualClock(), gap_s=0.01, delay_s=0.03, is_awaited=lambda: False, on_arrival=lambda _: None)
    worker = Worker()
    reporter = Reporter("d0", worker, inbox, 0)
    inbox.next_decision_s = 0.105
    reporter.mark(0.001)
    reporter.touch(0.1)
    worker.pages = 2
    reporter.mark(0.1)
    heard = reporter.take(0.105, inbox.arrived_tick(0.105))
    assert heard is not None
    assert heard.available_pages == 1
    later = reporter.take(0.15, inbox.arrived_tick(0.15))
    assert later is not None
    assert later.available_pages == 2
