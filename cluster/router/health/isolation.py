"""Isolation keeps apart the requests of which a worker may have died, until each has passed the place where it was: of
a prefill worker the first token, of a decode worker one token more. A worker computes one of them at a time, so that
the next death says whose fault it is and nobody else is blamed twice. It decides no more than that, and reads no clock.

    died at prefill: [the router's queue] -> hold: it goes to a worker that tries no other -> release
    died at decode:  prefill and handoff as of any other, held by the decode worker
                     -> await_turn -> next_turn: it may begin, where no other is tried -> release
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from cluster.router.accounts import RoutedRequest

PREFILL, DECODE = "prefill", "decode"


class Isolation:
    def __init__(self) -> None:
        self._tried: dict[str, dict[str, str]] = {PREFILL: {}, DECODE: {}}  # by phase: worker -> request
        self._lines: dict[str, dict[str, None]] = {}  # by decode worker: who waits for its turn there, the next first

    def triers(self, phase: str) -> Iterable[str]:
        """The workers at which one is tried."""
        return self._tried[phase]

    def num_tried(self, phase: str) -> int:
        return len(self._tried[phase])

    def tried_at(self, worker: str) -> set[str]:
        """The requests that are tried at the worker, whatever the phase."""
        return {tried[worker] for tried in self._tried.values() if worker in tried}

    def hold(self, worker: str, request_id: str) -> None:
        """It goes to a prefill worker that tries no other."""
        self._tried[PREFILL].setdefault(worker, request_id)

    def await_turn(self, worker: str, request_id: str) -> None:
        """A decode worker has its KV, and holds it. Told again, it keeps its place."""
        self._lines.setdefault(worker, {})[request_id] = None

    def next_turn(self, silent: Container[str]) -> str | None:
        """Who is tried from now on, at a decode worker that tried nobody, and that is heard: the death of one that was
        silent before says nothing."""
        for worker, line in self._lines.items():
            if worker not in self._tried[DECODE] and worker not in silent:
                request_id = self._tried[DECODE][worker] = next(iter(line))
                self.leave(worker, request_id)
                return request_id
        return None

    def leave(self, worker: str, request_id: str) -> None:
        """It waits no more, if it did."""
        line = self._lines.get(worker, {})
        line.pop(request_id, None)
        if not line:
            self._lines.pop(worker, None)

    def release(self, phase: str, worker: str, request_id: str) -> None:
        """It has passed, or gone."""
        if self._tried[phase].get(worker) == request_id:
            del self._tried[phase][worker]

    def check_invariants(self, requests: Mapping[str, RoutedRequest]) -> None:
        """Assert that a decode worker computes no doubtful request but the one that is known to be tried there, that
        whoever is tried is where it is said to be, and that whoever is held there waits in the line of its worker."""
        for phase, tried in self._tried.items():
            for worker, request_id in tried.items():
                request = requests[request_id]
                assert (request.at(phase), request.past.died_in) == (worker, phase), f"{worker} tries {request_id}"
        for request_id, request in requests.items():
            if request.is_handed_off and request.past.died_in == DECODE and not request.is_held:
                assert self._tried[DECODE].get(request.decode) == request_id, f"{request_id} runs untried"
        waiting = {(worker, request_id) for worker, line in self._lines.items() for request_id in line}
        held = {(r.decode, i) for i, r in requests.items() if r.is_held and r.is_handed_off}
        assert waiting == held, f"held by decode workers: {held}, in line: {waiting}"
