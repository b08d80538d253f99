"""Ledger keeps what a simulation finds of each request: when its tokens came and where its time went.

The phases are those of a live request (cluster/router/timeline.py); they sum to its end-to-end time. It decides
nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from cluster.router.timeline import PHASES
from engine.pages.pool import PageHash
from placement.simulator.outcome import Outcome
from placement.workload.requests import Workload

if TYPE_CHECKING:
    from placement.simulator.decode_machine import DecodeMachine
    from placement.simulator.prefill_machine import PrefillMachine

ROUTE, PREFILL_QUEUE, PREFILL, HANDOFF, DECODE_QUEUE, DECODE = range(len(PHASES))


class Live:
    """One attempt of one request. After `is_gone` nothing that happens to it counts any more."""

    __slots__ = (
        "attempt",
        "avoid",
        "computed",
        "decode",
        "failures",
        "granted",
        "hashes",
        "id",
        "index",
        "is_gone",
        "joined_step",
        "left",
        "max_new",
        "num_tokens",
        "prefill",
        "segments",
        "seq",
        "skip_tokens",
        "tail_s",
        "wire_end_s",
    )

    def __init__(
        self,
        index: int,
        attempt: int,
        num_tokens: int,
        left: int,
        hashes: list[PageHash],
        failures: int,
        avoid: frozenset[str],
    ) -> None:
        self.index = index
        self.attempt = attempt
        self.id = f"{index}" if attempt == 1 else f"{index}/{attempt}"
        self.num_tokens = num_tokens  # prompt, and tokens made by attempts before
        self.max_new = left
        self.left = left  # tokens still to make
        self.hashes = hashes
        self.failures = failures  # attempts before that failed
        self.avoid = avoid  # workers that failed it
        self.prefill: PrefillMachine | None = None
        self.decode: DecodeMachine | None = None
        self.seq = 0
        self.is_gone = False
        # the handoff
        self.granted = False
        self.computed = False
        self.skip_tokens = 0  # that the decode worker has cached
        self.segments: list[tuple[int, float, float]] = []  # tokens, begun, computed: waiting for the grant
        self.wire_end_s = 0.0  # when the link has passed it all
        self.tail_s = 0.0  # of the last segment: what leaves after its step
        self.joined_step = -1  # of the decode machine


class Ledger:
    def __init__(self, workload: Workload) -> None:
        count = len(workload)
        self.workload = workload
        self.counters: Counter[str] = Counter()
        self.busy_s = {"prefill": 0.0, "decode": 0.0, "colocated": 0.0, "link": 0.0}  # of all workers together
        self.first_token = [math.nan] * count
        self.finish = [math.nan] * count
        self._phase = [ROUTE] * count
        self._since: list[float] = workload.arrival_s.tolist()
        self._spent = [[0.0] * count for _ in PHASES]

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

    def outcome(self) -> Outcome:
        return Outcome(
            workload=self.workload,
            first_token_s=np.array(self.first_token),
            finish_s=np.array(self.finish),
            phases={name: np.array(spent) for name, spent in zip(PHASES, self._spent, strict=True)},
            counters=dict(self.counters),
            busy_s={name: spent for name, spent in self.busy_s.items() if spent},
        )
