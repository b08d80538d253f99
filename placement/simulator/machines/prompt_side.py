"""PromptSide is what a machine that decodes has of a PrefillMachine where it reads prompts in the same steps.

It does for prompts what that does, but that its steps are the machine's, and that prompts which stay are not handed
over. It decides nothing of its own: a MixedPolicy says how many tokens of prompts a step may hold.
"""

from __future__ import annotations

from cluster.router.accounts import Report
from mixed_worker.policy import MixedPolicy
from placement.simulator.machines.attempt import Attempt
from placement.simulator.machines.decode import DecodeMachine
from placement.simulator.machines.prefill import PrefillMachine
from prefill_worker.policy import PrefillBatch
from worker.steps.costs import share_after


class PromptSide(PrefillMachine):
    """Of `machine`, which decodes by `both.decode`: `decode` of a request that stays is that machine."""

    def __init__(self, machine: DecodeMachine, both: MixedPolicy) -> None:
        super().__init__(machine.router, machine.worker, both.prefill)
        self.machine = machine
        self.both = both
        self.reporter = machine.reporter
        self._share = 0.0  # tokens of prompts in a step that decodes, of late

    def report(self, made_s: float, router: int) -> Report:
        """Of the machine, all that it does."""
        machine = self.machine
        machine.steps.advance_to(made_s)
        decode = machine.policy
        return Report(
            made_s=made_s,
            last_submit_seq=self.last_seq,
            num_waiting=decode.num_waiting,
            num_running=decode.num_running,
            waiting_tokens=self.policy.waiting_tokens,
            available_pages=decode.spare_pages,
            request_ids=machine.request_ids(),
            costs=machine.costs,
            prompt_share=share_after(self._share, 0, machine.steps.advanced),
            pages=self.page_news(router),
            draining=machine.is_draining,
            is_others=self.owner != router,
        )

    def next_batch(self, rows: int) -> PrefillBatch | None:
        """Of a step that decodes so many."""
        return self.policy.next_batch(self.both.prompt_tokens(rows))

    def step_s(self, batch: PrefillBatch, rows: int, context_tokens: int) -> float:
        """Of a step, or of one stage of it, that decodes so many besides."""
        latency, chunks = self.worker.latency, [(chunk.length, chunk.start) for chunk in batch.chunks]
        return latency.mixed_s(chunks, rows, context_tokens) if rows else latency.prefill_s(chunks)

    def note_decoded(self, batch: PrefillBatch | None, steps: int) -> None:
        """So many steps that decode have ended, with this of prompts in each."""
        self._share = share_after(self._share, 0 if batch is None else batch.num_tokens, steps)

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
        """A prompt has come, or one that has gone has left its pages to others."""
        self.machine.wake()
        self.reporter.mark(self.router.clock.now)

    def _leaves(self, attempt: Attempt) -> bool:
        return super()._leaves(attempt) and attempt.decode is not self.machine

    def _go_on_with(self, attempt: Attempt) -> None:
        if attempt.decode is self.machine:
            self.router.clock.tell(self._stay_after_all, attempt)  # behind the cancel at the one before
        else:
            super()._go_on_with(attempt)

    def _stay_after_all(self, attempt: Attempt) -> None:
        """It found no pages elsewhere."""
        if attempt.is_gone or self.is_dead:
            return
        self.reporter.touch(self.router.clock.now)
        if self.machine.policy.on_stays(attempt.id, max_len=attempt.num_tokens + attempt.left):
            self.router.clock.tell(self.router.on_no_room, attempt)
            return
        self.policy.on_handoff_closed(attempt.id)
        self._hand_on(attempt)
        self._forget_if_gone(attempt.id)
        self._start()

    def _hand_on(self, attempt: Attempt) -> None:
        if attempt.decode is self.machine:
            self.machine.adopt(attempt, self.policy.pages_of(attempt.id), self.policy.hashes_of(attempt.id))
            self.policy.on_cancelled(attempt.id)
        else:
            super()._hand_on(attempt)
