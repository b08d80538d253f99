"""MixedMachine is mixed_worker/driver.py on the virtual clock: a DecodeMachine whose steps hold chunks of prompts, too.

It decides nothing of its own. While prompts are read each step is an event; between them steps pass many at once, as at
any DecodeMachine. Its PromptSide does for prompts what a PrefillMachine does, but that its steps are the machine's.
"""

from __future__ import annotations

from cluster.router.accounts import Report
from mixed_worker.policy import MixedPolicy
from placement.latency.base import DecodeLine
from placement.simulator.cluster import SimWorker
from placement.simulator.machines.attempt import Attempt, Dispatcher
from placement.simulator.machines.decode import DecodeMachine
from placement.simulator.machines.host import Host
from placement.simulator.machines.prefill import PrefillMachine
from prefill_worker.policy import PrefillBatch
from worker.steps.costs import share_after


class MixedMachine(DecodeMachine):
    def __init__(self, router: Dispatcher, worker: SimWorker, policy: MixedPolicy, host: Host | None = None) -> None:
        super().__init__(router, worker, policy.decode, host)
        self.both = policy
        self.prompts = PromptSide(self)
        self._batch: PrefillBatch | None = None  # of the step under way
        self._prompt_share = 0.0
        if host is not None:
            host.join_prefill(worker.name, self.change_pace)

    def report(self, made_s: float, router: int) -> Report:
        self.steps.advance_to(made_s)
        policy = self.policy
        return Report(
            made_s=made_s,
            last_submit_seq=self.prompts.last_seq,
            num_waiting=policy.num_waiting,
            num_running=policy.num_running,
            waiting_tokens=self.both.prefill.waiting_tokens,
            available_pages=policy.spare_pages,
            request_ids=self._request_ids(),
            costs=self.costs,
            prompt_share=share_after(self._prompt_share, 0, self.steps.advanced),
            pages=self.prompts.page_news(router),
            draining=self.is_draining,
        )

    @property
    def is_running(self) -> bool:
        """A step is under way."""
        return self.steps.count > 0 or self._batch is not None

    @property
    def is_empty(self) -> bool:
        return self.policy.num_running + self.policy.num_waiting == 0 and self.prompts.is_empty

    def adopt(self, attempt: Attempt) -> None:
        """Its prompt is read here, and it stays."""
        prompts = self.both.prefill
        self.policy.adopt(attempt.id, prompts.pages_of(attempt.id), prompts.hashes_of(attempt.id))
        self._attempts[attempt.id] = attempt
        self._tell_ready(attempt)

    def on_prompts_changed(self) -> None:
        """A prompt has come, or one that has gone has left its pages to others."""
        if self.is_running:
            self.steps.cut_short()
        else:
            self._start()
        self.reporter.mark(self.router.clock.now)

    def _start(self) -> None:
        self._grant_queued()
        joined = self._begin_run()
        rows = self.steps.count if self.guessing is None else self.guessing.rows
        self._batch = self.both.prefill.next_batch(self.both.prompt_tokens(rows))
        if self._batch is not None:
            self._plan_step(self._batch, joined)
        elif self.steps.count:
            self._plan_run(joined)
        self._tell_host()

    def _tell_host(self) -> None:
        if self.host is not None:
            self.host.tell_prefill(self.name, self._batch is not None)
        super()._tell_host()

    def _pace_now(self) -> float:
        if self.host is None or self._batch is None:
            return super()._pace_now()
        return self.host.prefill_factor(self.name)

    def _plan_step(self, batch: PrefillBatch, joined: tuple[str, ...]) -> None:
        """One step with chunks of prompts."""
        latency = self.worker.latency
        count = self.steps.count if self.guessing is None else self.guessing.rows
        chunks = [(chunk.length, chunk.start) for chunk in batch.chunks]
        step_s = latency.mixed_s(chunks, count, self.steps.run.context_tokens) if count else latency.prefill_s(chunks)
        self._pace = 1.0 if self.host is None else self.host.prefill_factor(self.name)
        step_s = (step_s * latency.stages + self.worker.step_overhead_s) * self._pace
        step_s = self._with_guesses_s(step_s, batch.num_tokens)
        self.prompts.note_begun(batch, self.router.clock.now + step_s)
        self._begin_steps(DecodeLine(step_s, 0.0), 1, joined)

    def _end_run(self) -> None:
        batch, self._batch = self._batch, None
        if self.steps.count:
            prompt_tokens = batch.num_tokens if batch is not None else 0
            self._prompt_share = share_after(self._prompt_share, prompt_tokens, self.steps.planned)
        super()._end_run()
        if batch is not None:
            self.prompts.note_done(batch)

    def lose(self) -> None:
        super().lose()
        self.prompts.is_dead = True


class PromptSide(PrefillMachine):
    """Of a MixedMachine: `decode` of a request that stays is that machine."""

    def __init__(self, machine: MixedMachine) -> None:
        super().__init__(machine.router, machine.worker, machine.both.prefill)
        self.machine = machine
        self.reporter = machine.reporter

    def submit(self, attempt: Attempt) -> None:
        if attempt.is_gone or self.is_dead:
            return
        router, machine = self.router, self.machine
        self.reporter.touch(router.clock.now)
        max_len = attempt.num_tokens + (attempt.left - 1 if attempt.decode is machine else 0)
        if machine.policy.expect(
            attempt.id,
            num_tokens=attempt.num_tokens,
            max_len=max_len,
            is_held=attempt.is_held,
            priority=attempt.priority,
        ):
            self.last_seq = attempt.seq
            router.clock.tell(router.on_handoff_failed, attempt)
        else:
            super().submit(attempt)

    def _start(self) -> None:
        self.machine.on_prompts_changed()

    def _leaves(self, attempt: Attempt) -> bool:
        return super()._leaves(attempt) and attempt.decode is not self.machine

    def _hand_on(self, attempt: Attempt) -> None:
        if attempt.decode is self.machine:
            self.machine.adopt(attempt)
            self.policy.on_cancelled(attempt.id)
        else:
            super()._hand_on(attempt)
