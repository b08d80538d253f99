"""PrefillMachine is prefill_worker/driver.py on the virtual clock: it carries out what a PrefillPolicy decides.

It decides nothing of its own. Steps take what the latency model says; KV leaves layer group by layer group while a step
is computed, over a link that all handoffs of the worker share, and must fit in the receiver's link too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.router.accounts import Report
from engine.pages.pool import PagePool
from placement.simulator.cluster import SimWorker
from placement.simulator.host import Host
from placement.simulator.ledger import HANDOFF, PREFILL, Live
from placement.simulator.reporting import Reporter
from prefill_worker.policy import PrefillBatch, PrefillOptions, PrefillPolicy

if TYPE_CHECKING:
    from placement.simulator.decode_machine import DecodeMachine
    from placement.simulator.simulate import Simulation


class PrefillMachine:
    def __init__(self, sim: Simulation, worker: SimWorker, pool: PagePool) -> None:
        self.sim = sim
        self.name = worker.name
        self.worker = worker
        assert isinstance(worker.policy, PrefillOptions), worker.name
        self.policy = PrefillPolicy(pool, worker.policy)
        self.reporter = Reporter(worker.name, self, sim)
        self.is_dead = False
        self.is_busy = False  # its first stage
        self.last_done_s = 0.0
        self.egress_free_s = 0.0
        self.last_seq = 0  # of Submits that it has seen
        self.next_seq = 0  # of Submits sent to it
        self.host: Host | None = None  # that it shares with decode workers
        self._pace = 1.0  # of the step under way: its time, as a multiple of its time alone
        self._has_told = False  # the host, that it computes
        self._version = 0  # of the step's end
        self._batch: PrefillBatch | None = None  # under way; with stages, the last that began
        self._live: dict[str, Live] = {}

    def report(self, made_s: float) -> Report:
        policy = self.policy
        return Report(
            made_s=made_s,
            last_submit_seq=self.last_seq,
            num_waiting=policy.num_waiting,
            num_running=policy.num_running,
            waiting_tokens=policy.waiting_tokens,
            available_pages=policy.pool.available,
        )

    @property
    def is_running(self) -> bool:
        return False  # between the ends of its steps nothing changes

    @property
    def is_computing(self) -> bool:
        return self.is_busy and not self.is_dead

    def submit(self, live: Live) -> None:
        if live.is_gone or self.is_dead:
            return
        self.reporter.touch(self.sim.clock.now)
        self.last_seq = live.seq
        self._live[live.id] = live
        self.policy.add(live.id, live.num_tokens, live.hashes)
        if not self.is_busy:
            self._start()

    def _start(self) -> None:
        if self.policy.is_idle:
            return
        batch = self.policy.next_batch()
        if batch is None:
            return
        sim, now = self.sim, self.sim.clock.now
        latency = self.worker.latency
        stage_s = latency.prefill_s([(chunk.length, chunk.start) for chunk in batch.chunks])
        taken_s = self.worker.step_overhead_s + stage_s * latency.stages
        if self.host is not None:
            self._pace = self.host.prefill_factor()
            taken_s *= self._pace
        done_s = max(now + taken_s, self.last_done_s + stage_s)
        self.is_busy = True
        self.last_done_s = done_s
        sim.ledger.busy_s["prefill"] += taken_s if latency.stages == 1 else self.worker.step_overhead_s + stage_s
        for chunk in batch.chunks:
            live = self._live[chunk.request_id]
            if chunk.is_first:
                sim.ledger.enter(live.index, PREFILL, now)
                sim.ledger.counters["prefix_hit_tokens"] += chunk.start
                if live.max_new > 1:
                    self._open_handoff(live)
            if live.max_new > 1:
                tokens = chunk.length + (chunk.start if chunk.is_first else 0)  # what its own cache held goes too
                live.segments.append((tokens, now, done_s))
                if live.granted:
                    self._send_segments(live)
        if self.host is None:
            sim.clock.at(done_s, self._on_done, batch)
        else:
            self._batch = batch
            self._end_at(done_s)
            self._tell_host()
        if latency.stages > 1:
            sim.clock.at(now + self.worker.step_overhead_s + stage_s, self._on_stage_free, 0)
        sim.mark(self.reporter)

    def change_pace(self) -> None:
        """What else runs on the host has changed: what is left of the step takes longer or shorter."""
        assert self.host is not None
        pace = self.host.prefill_factor()
        if pace == self._pace or not self.is_computing:
            return
        now = self.sim.clock.now
        left_s = max(0.0, self.last_done_s - now)
        longer_s = left_s * (pace / self._pace - 1.0)
        self._pace = pace
        self.last_done_s += longer_s
        self.sim.ledger.busy_s["prefill"] += longer_s
        self._end_at(max(now, self.last_done_s))

    def _end_at(self, done_s: float) -> None:
        self._version += 1
        self.sim.clock.at(done_s, self._on_end, self._version)

    def _on_end(self, version: int) -> None:
        if version == self._version and self._batch is not None:
            self._on_done(self._batch)

    def _tell_host(self) -> None:
        if self.host is not None and self._has_told != self.is_computing:
            self._has_told = self.is_computing
            self.host.on_prefill_changed()

    def _on_stage_free(self, _: int) -> None:
        self.is_busy = False
        if not self.is_dead:
            self.reporter.touch(self.sim.clock.now)
            self._start()

    def _on_done(self, batch: PrefillBatch) -> None:
        if self.is_dead:
            return
        sim, now = self.sim, self.sim.clock.now
        self.reporter.touch(now)
        for chunk in batch.chunks:
            live = self._live.get(chunk.request_id)
            if chunk.is_last and live is not None and not live.is_gone:
                self._on_first_token(live)
        self.policy.on_batch_done(batch)
        for chunk in batch.chunks:
            self._forget_if_gone(chunk.request_id)
        if self.worker.latency.stages == 1:
            self.is_busy = False
            self._start()
            self._tell_host()
        sim.mark(self.reporter)

    def _on_first_token(self, live: Live) -> None:
        sim, now = self.sim, self.sim.clock.now
        live.left -= 1
        sim.ledger.enter(live.index, HANDOFF, now)
        sim.clock.at(now + sim.message_s, sim.on_first_token, live)
        if not live.left:
            self.policy.on_cancelled(live.id)
            return
        live.computed = True
        if live.granted:
            self._commit(live)

    # the handoff

    def _open_handoff(self, live: Live) -> None:
        assert live.decode is not None
        self.policy.on_handoff_opened(live.id)
        self.sim.clock.at(self.sim.clock.now + self.sim.message_s, live.decode.reserve, live)

    def on_granted(self, grant: tuple[Live, DecodeMachine, int]) -> None:
        live, decode, cached_tokens = grant
        if live.is_gone or self.is_dead:
            return
        if live.decode is not decode:
            self.sim.clock.at(self.sim.clock.now + self.sim.message_s, decode.cancel, live)
            return
        live.granted = True
        live.skip_tokens = cached_tokens
        self._send_segments(live)
        if live.computed:
            self._commit(live)

    def _send_segments(self, live: Live) -> None:
        """Book the links for all that is computed or being computed. A segment's first layers leave while the step
        runs, its last ones after it."""
        assert live.decode is not None
        now, groups = self.sim.clock.now, self.sim.cluster.layer_groups
        for tokens, begun_s, done_s in live.segments:
            skipped = min(tokens, live.skip_tokens)
            live.skip_tokens -= skipped
            wire_s = self.worker.latency.transfer_s(tokens - skipped)
            ready_s = max(now, begun_s + (done_s - begun_s) / groups)
            start_s = max(ready_s, self.egress_free_s, live.decode.ingress_free_s)
            self.egress_free_s = live.decode.ingress_free_s = start_s + wire_s
            self.sim.ledger.busy_s["link"] += wire_s
            live.wire_end_s = max(live.wire_end_s, start_s + wire_s)
            live.tail_s = wire_s / groups  # its last layers cannot leave before the step has ended
        live.segments.clear()

    def _commit(self, live: Live) -> None:
        assert live.decode is not None
        sent_s = max(self.sim.clock.now + live.tail_s, live.wire_end_s)
        arrives_s = sent_s + self.sim.cluster.handoff_s + self.sim.message_s
        self.sim.clock.at(arrives_s, live.decode.commit, live)

    def move(self, order: tuple[Live, DecodeMachine]) -> None:
        """The router names another decode worker for a handoff that waits for pages."""
        live, better = order
        if live.is_gone or self.is_dead or live.granted:
            return
        assert live.decode is not None
        self.sim.clock.at(self.sim.clock.now + self.sim.message_s, live.decode.cancel, live)
        live.decode = better
        self.sim.ledger.counters["reassigned"] += 1
        self.sim.clock.at(self.sim.clock.now + self.sim.message_s, better.reserve, live)

    def on_receipt(self, live: Live) -> None:
        """The decode worker has all of it."""
        self.end(live)

    def end(self, live: Live) -> None:
        """It needs nothing here any more: handed off, cancelled or failed."""
        if self.is_dead or not self.policy.holds(live.id):
            return
        self.reporter.touch(self.sim.clock.now)
        self.policy.on_handoff_closed(live.id)
        self.policy.on_cancelled(live.id)
        self._forget_if_gone(live.id)
        self.sim.mark(self.reporter)
        if not self.is_busy:
            self._start()

    def _forget_if_gone(self, request_id: str) -> None:
        if not self.policy.holds(request_id):
            self._live.pop(request_id, None)
