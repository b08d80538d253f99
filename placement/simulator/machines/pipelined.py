"""PipelinedDecodeMachine is a decode worker whose engine has pipeline stages: a batch in each, as the live step loop
has them (worker/driver.py).

Each pass of a batch through all stages is an event of its own: requests of one batch are not in step with those of
another, so that no run of many steps can be passed over at once.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from cluster.router.retry import FORGIVEN_AFTER_TOKENS
from decode_worker.batches import DecodeRequest
from decode_worker.policy import DecodePolicy
from placement.simulator.cluster import SimWorker
from placement.simulator.ledger import DECODE
from placement.simulator.machines.attempt import Attempt, Dispatcher
from placement.simulator.machines.decode import DecodeMachine
from placement.simulator.machines.host import Host


class PipelinedDecodeMachine(DecodeMachine):
    def __init__(self, router: Dispatcher, worker: SimWorker, policy: DecodePolicy, host: Host | None = None) -> None:
        super().__init__(router, worker, policy, host)
        self._passes: deque[list[DecodeRequest]] = deque()  # under way, in the order in which they end
        self._last_done_s = 0.0

    @property
    def is_running(self) -> bool:
        return bool(self._passes)

    def made_by(self, attempt: Attempt) -> int:
        """Here an attempt's joined_step counts its tokens since it has joined."""
        return max(0, attempt.joined_step)

    def _joined(self, attempt: Attempt) -> None:
        attempt.joined_step = 0

    def _start(self) -> None:
        """Have as many passes as there are stages. While requests move, all end before others begin: between them
        nothing is in flight, as moves want it."""
        if self._passes and not self.moves.is_quiet:
            return
        while len(self._passes) < self.worker.latency.stages and self._begin_pass():
            pass
        if self.host is not None:
            self.host.tell_decode(self.name, len(self._passes[0]) if self._passes else 0)

    def _begin_pass(self) -> bool:
        schedule = self.policy.schedule()
        for request_id in schedule.preempted:
            self._preempt(self._attempts.pop(request_id))
        if schedule.preempted:
            self._grant_queued()
        if not schedule.requests:
            return False
        now, first = self.router.clock.now, set(schedule.joined)
        for request in schedule.requests:
            attempt = self._attempts[request.request_id]
            if attempt.joined_step < 0:
                self._paused.pop(attempt.id, None)
                self._joined(attempt)
            if attempt.id in first:
                self.router.ledger.enter(attempt.index, DECODE, now)
        self._time_pass(schedule.requests, first)
        return True

    def _time_pass(self, requests: list[DecodeRequest], first: set[str]) -> None:
        """It ends when it has passed all stages, and no sooner than a stage behind the one before it."""
        now, latency, overhead_s = self.router.clock.now, self.worker.latency, self.worker.step_overhead_s
        context_tokens = sum([request.scheduled_len for request in requests])
        pace = 1.0 if self.host is None else self.host.decode_factor(self.name, len(requests))
        stage_s = latency.decode_line(len(requests), context_tokens).step_s * pace
        pass_s = stage_s * latency.stages + overhead_s * pace
        own_s = stage_s + overhead_s * pace  # of the last stage, which leads
        self._last_done_s = max(now + pass_s, self._last_done_s + own_s)
        self.router.ledger.busy_s[self.worker.role] += own_s
        for attempt in [self._attempts[request.request_id] for request in requests if request.request_id in first]:
            if attempt.past.deaths:
                tokens = FORGIVEN_AFTER_TOKENS if attempt.past.is_retried else 1
                told_s = self._last_done_s + (tokens - 1) * pass_s + self.router.message_s
                self.router.clock.at(told_s, partial(self.router.on_decoded, tokens), attempt)
        self._passes.append(requests)
        self.router.clock.at(self._last_done_s, self._on_pass_done, 0)

    def _on_pass_done(self, _: int) -> None:
        if self.is_dead:
            return
        self.reporter.touch(self.router.clock.now)
        for request in self._passes.popleft():
            self._count(request)
        if not self.moves.is_quiet and not self._passes:
            self.moves.on_step_end()
        self._grant_queued()
        self._start()
        self.reporter.mark(self.router.clock.now)

    def _count(self, request: DecodeRequest) -> None:
        """One token more, perhaps its last."""
        self.policy.on_steps_done(request, 1)
        attempt = self._attempts.get(request.request_id)
        if attempt is None or attempt.joined_step < 0:
            return
        attempt.joined_step += 1
        if attempt.joined_step < attempt.left:
            return
        self._finish(attempt)
        attempt.joined_step = -1

    def change_pace(self) -> None:
        """The next pass is at the new pace."""
