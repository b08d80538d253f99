"""Isolation keeps apart the requests of which a worker may have died, until each has passed the place where it was: of
a prefill worker the first token, of a decode worker one token more. A worker holds one at a time, so that the next
death says whose fault it is and nobody else is blamed twice. It decides no more than that, and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PREFILL, DECODE = "prefill", "decode"


class Isolation:
    def __init__(self) -> None:
        self._held: dict[str, dict[str, str]] = {PREFILL: {}, DECODE: {}}  # by phase: worker -> request

    def holders(self, phase: str) -> Iterable[str]:
        """The workers at which one is tried."""
        return self._held[phase]

    def num_held(self, phase: str) -> int:
        return len(self._held[phase])

    def tried_at(self, worker: str) -> set[str]:
        """The requests that are tried at the worker, whatever the phase."""
        return {held[worker] for held in self._held.values() if worker in held}

    def hold(self, phase: str, worker: str, request_id: str) -> None:
        """It goes there. One that came by a move that was too late to stop is there beside another, and unheld."""
        self._held[phase].setdefault(worker, request_id)

    def release(self, phase: str, worker: str, request_id: str) -> None:
        """It has passed, or gone."""
        if self._held[phase].get(worker) == request_id:
            del self._held[phase][worker]

    def check_invariants(self, worker_of: Mapping[str, str]) -> None:
        """Assert that those held are among these requests, each at the worker where it is."""
        for held in self._held.values():
            for worker, request_id in held.items():
                assert worker_of.get(request_id) == worker, f"{worker} tries {request_id}, which is not there"
