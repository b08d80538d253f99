"""PrefillMachine is prefill_worker/driver.py on the virtual clock: it carries out what a PrefillPolicy decides.

It decides nothing of its own. Steps take what the latency model says; KV leaves layer group by layer group while a step
is computed, over a link that all handoffs of the worker share, and must fit in the receiver's link too. What waits for
a receiver's link holds up nobody who is for another: in life each pair has a connection of its own.
"""

from __future__ import annotations

from cluster.router.accounts import Report
from engine.pages.news import PageNews
from placement.simulator.cluster import SimWorker
from placement.simulator.ledger import HANDOFF, PREFILL
from placement.simulator.machines.attempt import Attempt, Decoder, Dispatcher, Link, Prefiller
from placement.simulator.machines.host import Host
from prefill_worker.policy import PrefillBatch, PrefillPolicy
from worker.options import owner_of
from worker.steps.costs import StepCosts


class PrefillMachine(Prefiller):
    def __init__(self, router: Dispatcher, worker: SimWorker, policy: PrefillPolicy, host: Host | None = None) -> None:
        super().__init__(worker.name)
        self.router = router
        self.worker = worker
        self.policy = policy
        self.owner = owner_of(worker.name, router.cluster.num_routers)
        self.reporter = router.reporter_of(worker.name, self)
        self.is_dead = False
        self.is_draining = False
        self.is_busy = False  # its first stage
        self.last_done_s = 0.0
        self.egress = Link()
        self.last_seq = 0  # of Submits that it has seen
        self.host = host  # that it shares with decode workers
        self.costs: StepCosts | None = None  # as it tells them
        self._pace = 1.0  # of the step under way: its time, as a multiple of its time alone
        self._version = 0  # of the step's end
        news = -1 if policy.pool.num_news else 0  # of a worker that had another role: all
        self._pages_told = [news] * router.cluster.num_routers  # of the pool's news
        self._batch: PrefillBatch | None = None  # under way; with stages, the last that began
        self._attempts: dict[str, Attempt] = {}
        if host is not None:
            host.join_prefill(worker.name, self.change_pace)

    def report(self, made_s: float, router: int) -> Report:
        policy = self.policy
        return Report(
            made_s=made_s,
            last_submit_seq=self.last_seq,
            num_waiting=policy.num_waiting,
            num_running=policy.num_running,
            waiting_tokens=policy.waiting_tokens,
            available_pages=policy.pool.available,
            costs=self.costs,
            pages=self.page_news(router),
            draining=self.is_draining,
            is_others=self.owner != router,
        )

    def page_news(self, router: int) -> PageNews:
        """Since the last report to it."""
        pool, told = self.policy.pool, self._pages_told[router]
        self._pages_told[router] = pool.num_news
        return pool.news_since(told)

    def report_anew(self, now: float) -> None:
        if not self.is_dead:
            self.reporter.report_anew(now)

    def drain(self) -> None:
        """From now on it takes nothing new."""
        self.reporter.touch(self.router.clock.now)
        self.is_draining = True
        self.reporter.mark(self.router.clock.now)

    @property
    def is_running(self) -> bool:
        return False  # between the ends of its steps nothing changes

    @property
    def is_empty(self) -> bool:
        """Nothing runs here, and no page is held."""
        return self.policy.num_running + self.policy.num_waiting == 0

    def submit(self, attempt: Attempt) -> None:
        if attempt.is_gone or self.is_dead:
            return
        self.reporter.touch(self.router.clock.now)
        self.last_seq = attempt.seq
        self._attempts[attempt.id] = attempt
        self.policy.add(attempt.id, attempt.num_tokens, attempt.hashes, attempt.priority)
        if not self.is_busy:
            self._start()

    def _start(self) -> None:
        if self.policy.is_idle:
            return
        batch = self.policy.next_batch()
        if batch is None:
            return
        router, now = self.router, self.router.clock.now
        latency = self.worker.latency
        stage_s = latency.prefill_s([(chunk.length, chunk.start) for chunk in batch.chunks])
        taken_s = self.worker.step_overhead_s + stage_s * latency.stages
        if self.host is not None:
            self._pace = self.host.prefill_factor(self.name)
            taken_s *= self._pace
        own_s = self.worker.step_overhead_s + stage_s  # of the last stage, which leads
        done_s = max(now + taken_s, self.last_done_s + own_s)
        self.is_busy = True
        self.last_done_s = done_s
        router.ledger.busy_s["prefill"] += taken_s if latency.stages == 1 else own_s
        self.note_begun(batch, done_s)
        if self.host is None:
            router.clock.at(done_s, self._on_done, batch)
        else:
            self._batch = batch
            self._end_at(done_s)
            self.host.tell_prefill(self.name, True)
        if latency.stages > 1:
            router.clock.at(now + self.worker.step_overhead_s + stage_s, self._on_stage_free, 0)
        self.reporter.mark(now)

    def note_begun(self, batch: PrefillBatch, done_s: float) -> None:
        """Its chunks are computed from now until done_s."""
        router, now = self.router, self.router.clock.now
        for chunk in batch.chunks:
            attempt = self._attempts[chunk.request_id]
            leaves = self._leaves(attempt)
            if chunk.is_first:
                router.ledger.enter(attempt.index, PREFILL, now)
                router.ledger.counters["prefix_hit_tokens"] += chunk.start
                if leaves:
                    self._open_handoff(attempt)
            if leaves:
                tokens = chunk.length + (chunk.start if chunk.is_first else 0)  # what its own cache held goes too
                attempt.segments.append((tokens, now, done_s))
                if attempt.granted:
                    self._send_segments(attempt)

    def _leaves(self, attempt: Attempt) -> bool:
        """Its KV goes to another worker."""
        return attempt.max_new > 1

    def change_pace(self) -> None:
        """What else runs on the host has changed: what is left of the step takes longer or shorter."""
        assert self.host is not None
        pace = self.host.prefill_factor(self.name)
        if pace == self._pace or not self.is_busy or self.is_dead:
            return
        now = self.router.clock.now
        left_s = max(0.0, self.last_done_s - now)
        longer_s = left_s * (pace / self._pace - 1.0)
        self._pace = pace
        self.last_done_s += longer_s
        self.router.ledger.busy_s["prefill"] += longer_s
        self._end_at(max(now, self.last_done_s))

    def _end_at(self, done_s: float) -> None:
        self._version += 1
        self.router.clock.at(done_s, self._on_end, self._version)

    def _on_end(self, version: int) -> None:
        if version == self._version and self._batch is not None:
            self._on_done(self._batch)

    def _on_stage_free(self, _: int) -> None:
        self.is_busy = False
        if not self.is_dead:
            self.reporter.touch(self.router.clock.now)
            self._start()

    def _on_done(self, batch: PrefillBatch) -> None:
        if self.is_dead:
            return
        now = self.router.clock.now
        self.reporter.touch(now)
        self.note_done(batch)
        if self.worker.latency.stages == 1:
            self.is_busy = False
            self._start()
            if self.host is not None:
                self.host.tell_prefill(self.name, self.is_busy)
        self.reporter.mark(now)

    def note_done(self, batch: PrefillBatch) -> None:
        """Its chunks are computed."""
        for chunk in batch.chunks:
            attempt = self._attempts.get(chunk.request_id)
            if chunk.is_last and attempt is not None and not attempt.is_gone:
                self._on_first_token(attempt)
        self.policy.on_batch_done(batch)
        for chunk in batch.chunks:
            self._forget_if_gone(chunk.request_id)

    def _on_first_token(self, attempt: Attempt) -> None:
        router, now = self.router, self.router.clock.now
        attempt.left -= 1
        router.ledger.enter(attempt.index, HANDOFF, now)
        router.clock.tell(router.on_first_token, attempt)
        if not attempt.left:
            self.policy.on_cancelled(attempt.id)
        else:
            self._hand_on(attempt)

    def _hand_on(self, attempt: Attempt) -> None:
        attempt.computed = True
        if attempt.granted:
            self._commit(attempt)

    # the handoff

    def _open_handoff(self, attempt: Attempt) -> None:
        assert attempt.decode is not None
        self.policy.on_handoff_opened(attempt.id)
        self.router.clock.tell(attempt.decode.reserve, attempt)

    def on_granted(self, grant: tuple[Attempt, Decoder, int]) -> None:
        attempt, decode, cached_tokens = grant
        if attempt.is_gone or self.is_dead:
            return
        if attempt.decode is not decode:
            self.router.clock.tell(decode.cancel, attempt)
            return
        attempt.granted = True
        attempt.skip_tokens = cached_tokens
        self._send_segments(attempt)
        if attempt.computed:
            self._commit(attempt)

    def _send_segments(self, attempt: Attempt) -> None:
        """Book the links for all that is computed or being computed. A segment's first layers leave while the step
        runs, its last ones after it."""
        assert attempt.decode is not None
        now, groups = self.router.clock.now, self.router.cluster.layer_groups
        for tokens, begun_s, done_s in attempt.segments:
            skipped = min(tokens, attempt.skip_tokens)
            attempt.skip_tokens -= skipped
            wire_s = self.worker.latency.transfer_s(tokens - skipped)
            attempt.sent_tokens += tokens - skipped
            attempt.wire_s += wire_s
            ready_s = max(now, begun_s + (done_s - begun_s) / groups)
            passed_s = max(self.egress.book(ready_s, wire_s), attempt.decode.ingress.book(ready_s, wire_s))
            self.router.ledger.busy_s["link"] += wire_s
            attempt.wire_end_s = max(attempt.wire_end_s, passed_s)
            attempt.tail_s = wire_s / groups  # its last layers cannot leave before the step has ended
        attempt.segments.clear()

    def _commit(self, attempt: Attempt) -> None:
        assert attempt.decode is not None
        sent_s = max(self.router.clock.now + attempt.tail_s, attempt.wire_end_s)
        arrives_s = sent_s + self.router.cluster.handoff_s + self.router.message_s
        self.router.clock.at(arrives_s, attempt.decode.commit, attempt)

    def move(self, order: tuple[Attempt, Decoder]) -> None:
        attempt, better = order
        if attempt.is_gone or self.is_dead or attempt.granted:
            return
        assert attempt.decode is not None
        self.router.clock.tell(attempt.decode.cancel, attempt)
        attempt.decode = better
        self.router.ledger.counters["reassigned"] += 1
        self._go_on_with(attempt)

    def _go_on_with(self, attempt: Attempt) -> None:
        """It has another decode worker."""
        assert attempt.decode is not None
        self.router.clock.tell(attempt.decode.reserve, attempt)

    def end(self, attempt: Attempt) -> None:
        if self.is_dead or not self.policy.holds(attempt.id):
            return
        now = self.router.clock.now
        self.reporter.touch(now)
        self.policy.on_handoff_closed(attempt.id)
        self.policy.on_cancelled(attempt.id)
        self._forget_if_gone(attempt.id)
        self.reporter.mark(now)
        if not self.is_busy:
            self._start()

    def _forget_if_gone(self, request_id: str) -> None:
        if not self.policy.holds(request_id):
            self._attempts.pop(request_id, None)

    def lose(self) -> None:
        """It dies now."""
        self.is_dead = True
        self.reporter.end()
        if self.host is not None:
            self.host.on_lost(self.name)
