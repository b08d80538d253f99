"""Routers are several RouterMachines that look like one to workers: each has requests of its own, by turns, as clients
are spread over live ones, and all hear what workers report.

They do not speak to each other, as live ones do not: what another has sent a router knows from reports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.router.accounts import WorkerView
from placement.simulator.machines.attempt import Attempt, Decoder, Dispatcher, Prefiller
from placement.simulator.machines.router import RouterMachine
from placement.simulator.reporting import Reporter, Reporters, Reporting, Teller


class Routers(Dispatcher):
    def __init__(self, machines: Sequence[RouterMachine], arrival_s: list[float]) -> None:
        """`arrival_s`: of all requests."""
        first = machines[0]
        super().__init__(first.cluster, first.clock, first.ledger)
        self._machines = machines
        self._arrival_s = arrival_s

    def _of(self, index: int) -> RouterMachine:
        return self._machines[index % len(self._machines)]

    def reporter_of(self, name: str, worker: Reporting) -> Teller:
        return Reporters([Reporter(name, worker, machine.inbox, machine.number) for machine in self._machines])

    def arrive(self, index: int, next_arrival_s: float) -> None:
        own_next = index + len(self._machines)
        self._of(index).arrive(index, self._arrival_s[own_next] if own_next < len(self._arrival_s) else math.inf)

    # what all hear

    def on_worker_up(self, view: WorkerView, prefill: Prefiller | None, decode: Decoder | None) -> None:
        for machine in self._machines:
            machine.on_worker_up(view, prefill, decode)

    def on_worker_back(self) -> None:
        for machine in self._machines:
            machine.on_worker_back()

    def on_worker_lost(self, lost: str) -> None:
        for machine in self._machines:
            machine.on_worker_lost(lost)

    def on_drain(self) -> None:
        for machine in self._machines:
            machine.on_drain()

    def has_left(self, name: str) -> bool:
        return all(machine.has_left(name) for machine in self._machines)

    def on_role_changed(self, view: WorkerView, prefill: Prefiller | None, decode: Decoder | None) -> None:
        for machine in self._machines:
            machine.on_role_changed(view, prefill, decode)

    # what is one's own

    def on_first_token(self, attempt: Attempt) -> None:
        self._of(attempt.index).on_first_token(attempt)

    def on_stalled(self, attempt: Attempt) -> None:
        self._of(attempt.index).on_stalled(attempt)

    def on_handoff_failed(self, attempt: Attempt) -> None:
        self._of(attempt.index).on_handoff_failed(attempt)

    def on_no_room(self, attempt: Attempt) -> None:
        self._of(attempt.index).on_no_room(attempt)

    def on_handed_off(self, attempt: Attempt) -> None:
        self._of(attempt.index).on_handed_off(attempt)

    def on_decoded(self, num_tokens: int, attempt: Attempt) -> None:
        self._of(attempt.index).on_decoded(num_tokens, attempt)

    def on_preempted(self, attempt: Attempt) -> None:
        self._of(attempt.index).on_preempted(attempt)

    def on_finished(self, attempt: Attempt) -> None:
        self._of(attempt.index).on_finished(attempt)

    def on_moved(self, attempt: Attempt) -> None:
        self._of(attempt.index).on_moved(attempt)

    def on_move_failed(self, attempt: Attempt) -> None:
        self._of(attempt.index).on_move_failed(attempt)
