"""MixedMachine is mixed_worker/driver.py on the virtual clock: a DecodeMachine whose steps hold chunks of prompts, too.

It decides nothing of its own. While prompts are read each step is an event; between them steps pass many at once, as at
any DecodeMachine. One with pipeline stages is a PipelinedMixedMachine (pipelined.py).
"""

from __future__ import annotations

from cluster.router.accounts import Report
from mixed_worker.policy import MixedPolicy
from placement.latency.base import DecodeLine
from placement.simulator.cluster import SimWorker
from placement.simulator.machines.attempt import Dispatcher
from placement.simulator.machines.decode import DecodeMachine
from placement.simulator.machines.host import Host
from placement.simulator.machines.prompt_side import PromptSide
from prefill_worker.policy import PrefillBatch


class MixedMachine(DecodeMachine):
    def __init__(self, router: Dispatcher, worker: SimWorker, policy: MixedPolicy, host: Host | None = None) -> None:
        super().__init__(router, worker, policy.decode, host)
        self.prompts = PromptSide(self, policy)
        self._batch: PrefillBatch | None = None  # of the step under way
        if host is not None:
            host.join_prefill(worker.name, self.change_pace)

    def report(self, made_s: float, router: int) -> Report:
        return self.prompts.report(made_s, router)

    @property
    def is_running(self) -> bool:
        """A step is under way."""
        return self.steps.count > 0 or self._batch is not None

    @property
    def is_empty(self) -> bool:
        return self.policy.num_running + self.policy.num_waiting == 0 and self.prompts.is_empty

    def _start(self) -> None:
        self._grant_queued()
        joined = self._begin_run()
        self._batch = self.prompts.next_batch(self._rows)
        if self._batch is not None:
            self._plan_step(self._batch, joined)
        elif self.steps.count:
            self._plan_run(joined)
        self._tell_host()

    @property
    def _rows(self) -> int:
        """That the step under way decodes, guesses counted."""
        return self.steps.count if self.guessing is None else self.guessing.rows

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
        alone_s = self.prompts.step_s(batch, self._rows, self.steps.run.context_tokens) + self.worker.step_overhead_s
        self._pace = 1.0 if self.host is None else self.host.prefill_factor(self.name)
        step_s = self._with_guesses_s(alone_s * self._pace, batch.num_tokens)
        self.prompts.note_begun(batch, self.router.clock.now + step_s)
        self._begin_steps(DecodeLine(step_s, 0.0), 1, joined)

    def _end_run(self) -> None:
        batch, self._batch = self._batch, None
        if self.steps.count:
            self.prompts.note_decoded(batch, self.steps.planned)
        super()._end_run()
        if batch is not None:
            self.prompts.note_done(batch)

    def lose(self) -> None:
        super().lose()
        self.prompts.is_dead = True
