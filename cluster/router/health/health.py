"""Health is what a router knows of its workers' troubles: whose steps fail, who says nothing, which pairs cannot hand
over, who cannot serve what, where a request is tried alone. For each choice it says whom to shun, and how much; the
choice is made elsewhere (cluster/router/candidates/). It reads no clock and sends nothing.

Trouble is rare: what nothing is known against costs nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.router.accounts import Past, PeerTrouble, RoutedRequest
from cluster.router.health.circuits import Circuits
from cluster.router.health.inability import Inability
from cluster.router.health.isolation import DECODE, PREFILL, Isolation
from cluster.router.health.shunned import AVOIDED, BARRED, BROKEN, DOUBTED, NOBODY, Grade, Shunned, shun

FAILURES_TO_OPEN = 3  # steps or processes of a worker that end badly, one after another, until its circuit opens
HANDOFFS_TO_OPEN = 1  # each costs a request seconds
LATE_LOOP_S = 0.25  # a worker whose event loop is so late, and LATE_TIMES as late as its peers', gets no processor time
LATE_TIMES = 10
LATE_FOR_S = 1.5  # that it must be so late: one stall is told for a second
LATE_HOLD_S = 5.0  # after it was last so late: what starves a process comes and goes


class Health:
    def __init__(self) -> None:
        self.steps = Circuits(FAILURES_TO_OPEN)  # by worker
        self.isolation = Isolation()
        self.inability = Inability()
        self._pairs: dict[str, Circuits] = {}  # by prefill worker: its decode workers
        self._silent: dict[str, str] = {}  # by worker: one sentence
        self._slow: dict[str, str] = {}
        self._late_since: dict[str, float] = {}
        self._late: dict[str, tuple[float, str]] = {}  # doubted until when, and why
        self.num_opened = 0  # circuits, of workers and of pairs

    # what is heard

    def on_silent(self, worker: str, why: str) -> None:
        self._silent[worker] = why

    def on_heard(self, worker: str) -> None:
        self._silent.pop(worker, None)

    def on_step_age(self, worker: str, age_s: float, most_s: float) -> None:
        if age_s > most_s:
            self._slow[worker] = f"its step has been running for {age_s:.1f} s"
        elif self._slow:
            self._slow.pop(worker, None)

    def on_loop_lag(self, worker: str, lag_s: float, peers_lag_s: float, now: float) -> None:
        """`peers_lag_s`: as others of its role have it."""
        if lag_s <= LATE_LOOP_S and not (self._late or self._late_since):
            return
        if lag_s > max(LATE_LOOP_S, LATE_TIMES * peers_lag_s):
            why = f"it gets little processor time: its event loop is {lag_s:.1f} s late, its peers' {peers_lag_s:.2f} s"
            if now - self._late_since.setdefault(worker, now) >= LATE_FOR_S:
                self._late[worker] = now + LATE_HOLD_S, why
        elif now >= self._late.get(worker, (0.0, ""))[0]:
            self._forget_lag(worker)

    def _forget_lag(self, worker: str) -> None:
        self._late_since.pop(worker, None)
        self._late.pop(worker, None)

    def on_failed(self, worker: str, reason: str, now: float) -> None:
        """A step of its engine, or its process: the successor, under the same name, has shown nothing yet."""
        self.num_opened += self.steps.on_failure(worker, reason, now)

    def on_pair_failed(self, prefill: str, decode: str, reason: str, now: float) -> None:
        self.num_opened += self._pairs_of(prefill).on_failure(decode, reason, now)

    def on_pair_told(self, prefill: str, told: PeerTrouble) -> None:
        self.num_opened += self._pairs_of(prefill).on_told(told.name, told.reason, told.failed_s)

    def _pairs_of(self, prefill: str) -> Circuits:
        return self._pairs.setdefault(prefill, Circuits(HANDOFFS_TO_OPEN))

    def on_pair_works(self, prefill: str, decode: str) -> None:
        if (pairs := self._pairs.get(prefill)) is not None:
            pairs.on_success(decode)
            if not pairs:
                del self._pairs[prefill]

    def forget(self, worker: str) -> None:
        """It is lost: of whoever comes back under its name only its failures are known."""
        self._silent.pop(worker, None)
        self._slow.pop(worker, None)
        self._forget_lag(worker)
        self._pairs.pop(worker, None)
        self.inability.forget(worker)
        for prefill in list(self._pairs):
            self.on_pair_works(prefill, worker)

    # a request's way

    def on_placed(self, request: RoutedRequest, now: float) -> None:
        request_id = request.shape.id
        for worker in {request.prefill, request.decode}:
            self.steps.begin_trial(worker, request_id, now)
        if (pairs := self._pairs.get(request.prefill)) is not None:
            pairs.begin_trial(request.decode, request_id, now)
        if request.past.died_in == PREFILL:
            self.isolation.hold(request.prefill, request_id)

    def on_passed(self, request: RoutedRequest) -> None:
        """It is past the place where a worker may have died of it, or is over."""
        if phase := request.past.died_in:
            self.isolation.release(phase, request.at(phase), request.shape.id)

    def on_over(self, request: RoutedRequest) -> None:
        self.on_passed(request)
        if request.is_held:
            self.isolation.leave(request.decode, request.shape.id)
        if self.steps:
            self.steps.end_trial(request.shape.id)
        for pairs in self._pairs.values():
            pairs.end_trial(request.shape.id)

    def next_turn(self) -> str | None:
        """Who of those that decode workers hold is tried from now on; None: nobody's turn has come."""
        return self.isolation.next_turn(self._silent)

    # whom to shun

    def doubt(self, worker: str) -> str:
        """Why it is suspect; empty if it is not."""
        return self._silent.get(worker) or self._slow.get(worker) or self._late.get(worker, (0.0, ""))[1]

    def is_stuck(self, worker: str) -> bool:
        """It may do nothing at all."""
        return worker in self._silent or worker in self._slow

    def circuit(self, worker: str, now: float) -> str:
        return self.steps.state(worker, now)

    def is_broken_pair(self, prefill: str, decode: str, now: float) -> bool:
        pairs = self._pairs.get(prefill)
        return pairs is not None and not pairs.lets(decode, now)

    def pairs(self, prefill: str) -> list[PeerTrouble]:
        """The decode workers that it cannot hand over to."""
        circuits = self._pairs.get(prefill)
        return [
            PeerTrouble(name=name, failures=c.failures, reason=c.reason, failed_s=c.failed_s)
            for name, c in (circuits.items() if circuits is not None else ())
        ]

    def shunned(self, past: Past, phase: str, now: float, prefill: str = "") -> Shunned:
        """For the choice of a worker that computes this phase; for decode `prefill` is who hands over."""
        is_tried = past.died_in == phase
        tried = 0 if is_tried and phase == DECODE else self.isolation.num_tried(phase)  # there it waits for its turn
        is_calm = not (tried or self._silent or self._slow or self._late or self._pairs or self.steps)
        if is_calm and not (past.avoid or past.unable):
            return NOBODY
        shunned: dict[str, Grade] = dict.fromkeys(past.avoid, AVOIDED)
        for name in (*self._silent, *self._slow, *self._late):
            shun(shunned, name, DOUBTED)
        if past.died_in == phase == PREFILL:  # were it lost, that would count as died of this request
            for name in self._silent:
                shun(shunned, name, BARRED)
        _shun_broken(shunned, self.steps, now)
        if phase == DECODE and (pairs := self._pairs.get(prefill)) is not None:
            _shun_broken(shunned, pairs, now)
        if tried:
            for name in self.isolation.triers(phase):
                shun(shunned, name, BARRED if is_tried else AVOIDED)
        for name in past.unable:
            shun(shunned, name, BARRED)
        return shunned

    def check_invariants(self, requests: Mapping[str, RoutedRequest]) -> None:
        """Assert that whoever is tried alone, or tries a circuit, is one of these and there."""
        self.steps.check_invariants()
        self.isolation.check_invariants(requests)
        for pairs in self._pairs.values():
            assert len(pairs) > 0, "a prefill worker without trouble is kept"
            pairs.check_invariants()
        trials = {c.trial for each in (self.steps, *self._pairs.values()) for _, c in each.items() if c.trial}
        assert trials <= requests.keys(), "one who has gone tries a circuit"


def _shun_broken(shunned: dict[str, Grade], circuits: Circuits, now: float) -> None:
    for name, circuit in circuits.items():
        if not circuit.lets(now):
            shun(shunned, name, (BROKEN, circuit.retry_at_s))
