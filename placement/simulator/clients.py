"""Clients of a closed loop: each has one request out, and asks again when it is over and its time to think has passed.

    due -> waits for a client -> sent -> answered, refused or left -> the client thinks -> the next one due is sent

First due, first sent. LoopLedger notes when each was sent, from when its latencies count, and tells the clients of each
end. Neither decides what becomes of a request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from placement.simulator.clock import VirtualClock
from placement.simulator.ledger import Ledger
from placement.simulator.outcome import Outcome
from placement.workload.closed_loop import ClosedLoop
from placement.workload.requests import Workload


class Clients:
    def __init__(self, loop: ClosedLoop, clock: VirtualClock) -> None:
        self.clock = clock
        self._think_s = loop.think_s
        self._free = loop.max_concurrency
        self._due: deque[tuple[Callable[[int], None], int]] = deque()  # only while none of them is free

    def ask(self, send: Callable[[int], None], index: int) -> None:
        """Send the request as soon as one of them is free."""
        if self._free:
            self._free -= 1
            send(index)
        else:
            self._due.append((send, index))

    def on_over(self) -> None:
        self.clock.at(self.clock.now + self._think_s, self._on_free, 0)

    def _on_free(self, _: int) -> None:
        self._free += 1
        if self._due:
            self.ask(*self._due.popleft())


class LoopLedger(Ledger):
    def __init__(self, workload: Workload, clients: Clients) -> None:
        super().__init__(workload)
        self._clients = clients
        self._sent_s = [math.nan] * len(workload)

    def on_sent(self, index: int, now: float) -> None:
        super().on_sent(index, now)
        self._sent_s[index] = now

    def on_finished(self, index: int, now: float) -> None:
        super().on_finished(index, now)
        self._clients.on_over()

    def on_cancelled(self, index: int, now: float) -> None:
        super().on_cancelled(index, now)
        self._clients.on_over()

    def on_refused(self, index: int, counter: str) -> None:
        super().on_refused(index, counter)
        self._clients.on_over()

    def outcome(self) -> Outcome:
        """Its workload says when each was sent; one that never was, because none who is out is ever answered, at the
        end."""
        sent_s = np.array(self._sent_s)
        arrival_s = np.where(np.isnan(sent_s), self._clients.clock.now, sent_s)
        return replace(super().outcome(), workload=replace(self.workload, arrival_s=arrival_s))
