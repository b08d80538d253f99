"""Ledger keeps what a simulation finds of each request: when its tokens came and where its time went.

The phases are those of a live request (cluster/router/live/timeline.py); they sum to its end-to-end time. It decides
nothing.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from cluster.router.live.timeline import PHASES
from placement.simulator.outcome import Outcome
from placement.workload.requests import NO_FLOATS, Floats, Workload

ROUTE, PREFILL_QUEUE, PREFILL, HANDOFF, DECODE_QUEUE, DECODE = range(len(PHASES))


class Ledger:
    def __init__(self, workload: Workload) -> None:
        count = len(workload)
        self.workload = workload
        self.counters: Counter[str] = Counter()
        self.busy_s = {"prefill": 0.0, "decode": 0.0, "mixed": 0.0, "link": 0.0}  # of all workers together
        self.first_token = [math.nan] * count
        self.finish = [math.nan] * count
        self._phase = [ROUTE] * count
        self._since: list[float] = workload.arrival_s.tolist()
        self._spent = [[0.0] * count for _ in PHASES]
        self._cancelled: dict[int, float] = {}  # when
        self._spent_by_then: dict[int, list[float]] = {}

    def on_sent(self, index: int, now: float) -> None:
        """Later than it was due: a client had to be free for it."""
        self._since[index] = now

    def enter(self, index: int, phase: int, now: float) -> None:
        self._spent[self._phase[index]][index] += now - self._since[index]
        self._phase[index] = phase
        self._since[index] = now

    def on_first_token(self, index: int, now: float) -> None:
        if math.isnan(self.first_token[index]):
            self.first_token[index] = now

    def on_finished(self, index: int, now: float) -> None:
        self.enter(index, self._phase[index], now)
        self.finish[index] = now

    def on_refused(self, index: int, counter: str) -> None:
        """It is over, with no answer; `counter` says how."""
        self.counters[counter] += 1

    def on_cancelled(self, index: int, now: float) -> None:
        """What workers do to it until they have heard of that is nobody's phase."""
        self.enter(index, self._phase[index], now)
        self.counters["cancelled"] += 1
        self._cancelled[index] = now
        self._spent_by_then[index] = [spent[index] for spent in self._spent]

    def outcome(self) -> Outcome:
        for index, spent_by_then in self._spent_by_then.items():
            for spent, seconds in zip(self._spent, spent_by_then, strict=True):
                spent[index] = seconds
        return Outcome(
            workload=self.workload,
            first_token_s=np.array(self.first_token),
            finish_s=np.array(self.finish),
            phases={name: np.array(spent) for name, spent in zip(PHASES, self._spent, strict=True)},
            counters=dict(self.counters),
            busy_s={name: spent for name, spent in self.busy_s.items() if spent},
            cancelled_s=self._cancelled_s(),
        )

    def _cancelled_s(self) -> Floats:
        if not self._cancelled:
            return NO_FLOATS
        cancelled_s = np.full(len(self.workload), math.nan)
        cancelled_s[list(self._cancelled)] = list(self._cancelled.values())
        return cancelled_s
