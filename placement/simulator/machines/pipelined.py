"""Machines whose engine has pipeline stages: a step's batch in each, as the live step loop has them (worker/driver.py).

Each pass of a batch through all stages is an event of its own: requests of one batch are not in step with those of
another, so that no run of many steps can be passed over at once. As in life, what comes while passes are under way
waits until one ends. A chunk of a prompt may be in the pass behind the one that has the chunk before it: each stage
computes passes in order.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from cluster.router.accounts import Report
from cluster.router.retry import FORGIVEN_AFTER_TOKENS
from decode_worker.batches import DecodeRequest
from decode_worker.policy import DecodePolicy
from mixed_worker.policy import MixedPolicy
from placement.simulator.cluster import SimWorker
from placement.simulator.ledger import DECODE
from placement.simulator.machines.attempt import Attempt, Dispatcher
from placement.simulator.machines.decode import DecodeMachine
from placement.simulator.machines.host import Host
from placement.simulator.machines.prompt_side import PromptSide
from prefill_worker.policy import PrefillBatch


class Pass:
    """One token for each of `requests`, and chunks of prompts, if `prompts`."""

    __slots__ = ("prompts", "requests")

    def __init__(self, requests: list[DecodeRequest], prompts: PrefillBatch | None) -> None:
        self.requests = requests
        self.prompts = prompts

    @property
    def context_tokens(self) -> int:
        """Attended to by who decodes, the new tokens counted."""
        return sum([request.scheduled_len for request in self.requests])


class PipelinedDecodeMachine(DecodeMachine):
    def __init__(self, router: Dispatcher, worker: SimWorker, policy: DecodePolicy, host: Host | None = None) -> None:
        super().__init__(router, worker, policy, host)
        self._passes: deque[Pass] = deque()  # under way, in the order in which they end
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
        self._tell_host()

    def _tell_host(self) -> None:
        if self.host is not None:
            self.host.tell_decode(self.name, len(self._passes[0].requests) if self._passes else 0)

    def _begin_pass(self) -> bool:
        schedule = self.policy.schedule()
        for request_id in schedule.preempted:
            self._preempt(self._attempts.pop(request_id))
        if schedule.preempted:
            self._grant_queued()
        prompts = self._next_prompts(len(schedule.requests))
        if not schedule.requests and prompts is None:
            return False
        for request in schedule.requests:
            attempt = self._attempts[request.request_id]
            if attempt.joined_step < 0:
                self._paused.pop(attempt.id, None)
                self._joined(attempt)
        for request_id in schedule.joined:
            self.router.ledger.enter(self._attempts[request_id].index, DECODE, self.router.clock.now)
        self._time_pass(Pass(schedule.requests, prompts), schedule.joined)
        return True

    def _next_prompts(self, rows: int) -> PrefillBatch | None:
        """What of prompts a pass holds that decodes so many."""
        return None

    def _time_pass(self, begun: Pass, joined: tuple[str, ...]) -> None:
        """It ends when it has passed all stages, and no sooner than a stage behind the one before it."""
        now, pace = self.router.clock.now, self._pace_of(begun)
        stage_s, overhead_s = self._stage_s(begun) * pace, self.worker.step_overhead_s * pace
        pass_s = stage_s * self.worker.latency.stages + overhead_s
        own_s = stage_s + overhead_s  # of the last stage, which leads
        self._last_done_s = max(now + pass_s, self._last_done_s + own_s)
        self.router.ledger.busy_s[self.worker.role] += own_s
        for attempt in [self._attempts[request_id] for request_id in joined]:
            if attempt.past.deaths:
                tokens = FORGIVEN_AFTER_TOKENS if attempt.past.is_retried else 1
                told_s = self._last_done_s + (tokens - 1) * pass_s + self.router.message_s
                self.router.clock.at(told_s, partial(self.router.on_decoded, tokens), attempt)
        self._passes.append(begun)
        self.router.clock.at(self._last_done_s, self._on_pass_done, 0)

    def _stage_s(self, begun: Pass) -> float:
        """What it takes in each stage, with the machine to itself."""
        return self.worker.latency.decode_line(len(begun.requests), begun.context_tokens).step_s

    def _pace_of(self, begun: Pass) -> float:
        return 1.0 if self.host is None else self.host.decode_factor(self.name, len(begun.requests))

    def _on_pass_done(self, _: int) -> None:
        if self.is_dead:
            return
        self.reporter.touch(self.router.clock.now)
        self._end_pass(self._passes.popleft())
        self._start()
        self.reporter.mark(self.router.clock.now)

    def _end_pass(self, ended: Pass) -> None:
        for request in ended.requests:
            self._count(request)
        if not self.moves.is_quiet and not self._passes:
            self.moves.on_step_end()
        self._grant_queued()

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


class PipelinedMixedMachine(PipelinedDecodeMachine):
    """Chunks of prompts fill what the rows of a pass leave of it, or are all that it has."""

    def __init__(self, router: Dispatcher, worker: SimWorker, policy: MixedPolicy, host: Host | None = None) -> None:
        super().__init__(router, worker, policy.decode, host)
        self.prompts = PromptSide(self, policy)
        if host is not None:
            host.join_prefill(worker.name, self.change_pace)

    def report(self, made_s: float, router: int) -> Report:
        return self.prompts.report(made_s, router)

    @property
    def is_empty(self) -> bool:
        return self.policy.num_running + self.policy.num_waiting == 0 and self.prompts.is_empty

    def _tell_host(self) -> None:
        if self.host is not None:
            self.host.tell_prefill(self.name, any(begun.prompts is not None for begun in self._passes))
        super()._tell_host()

    def _begin_pass(self) -> bool:
        self._grant_queued()  # a prompt may have left its pages
        return super()._begin_pass()

    def _next_prompts(self, rows: int) -> PrefillBatch | None:
        return self.prompts.next_batch(rows)

    def _stage_s(self, begun: Pass) -> float:
        if begun.prompts is None:
            return super()._stage_s(begun)
        return self.prompts.step_s(begun.prompts, len(begun.requests), begun.context_tokens)

    def _pace_of(self, begun: Pass) -> float:
        if self.host is None or begun.prompts is None:
            return super()._pace_of(begun)
        return self.host.prefill_factor(self.name)

    def _time_pass(self, begun: Pass, joined: tuple[str, ...]) -> None:
        super()._time_pass(begun, joined)
        if begun.prompts is not None:
            self.prompts.note_begun(begun.prompts, self._last_done_s)

    def _end_pass(self, ended: Pass) -> None:
        super()._end_pass(ended)
        if ended.requests:
            self.prompts.note_decoded(ended.prompts, 1)
        if ended.prompts is not None:
            self.prompts.note_done(ended.prompts)

    def lose(self) -> None:
        super().lose()
        self.prompts.is_dead = True
