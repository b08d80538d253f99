"""DecodeMachine is decode_worker/driver.py on the virtual clock: it carries out what a DecodePolicy decides.

It decides nothing of its own. Between two events that matter to the batch (somebody is ready, somebody ends, pages run
short) all steps are one run of DecodeSteps. So a request costs the same however many tokens it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush

from cluster.router.accounts import Report
from cluster.router.retry import FORGIVEN_AFTER_TOKENS
from decode_worker.policy import DecodePolicy
from decode_worker.run import DecodeRun
from engine.pages.pool import PageHash
from kv_transfer.lease import MOVE_ROOM_TOKENS, Granted, Queued
from placement.latency.base import DecodeLine, decode_run_s
from placement.simulator.cluster import SimWorker
from placement.simulator.ledger import DECODE, DECODE_QUEUE
from placement.simulator.machines.attempt import Attempt, Decoder, Dispatcher, Move
from placement.simulator.machines.host import Host
from placement.simulator.machines.moves import Moves
from placement.simulator.machines.speculation import SpeculatedRun
from placement.simulator.machines.steps import DecodeSteps
from worker.roles import kind_of
from worker.steps.costs import StepCosts


class DecodeMachine(Decoder):
    def __init__(self, router: Dispatcher, worker: SimWorker, policy: DecodePolicy, host: Host | None = None) -> None:
        super().__init__(worker.name)
        self.router = router
        self.worker = worker
        self.policy = policy
        self.guessing = guessing_run(worker, policy)
        self.steps = DecodeSteps(router.clock, self.guessing or DecodeRun(policy), self._on_end)
        self.reporter = router.reporter_of(worker.name, self)
        self.is_dead = False
        self.host = host  # that it shares with prefill workers
        self.costs: StepCosts | None = None  # as it tells them
        self._pace = 1.0  # of the run under way: a step's time, as a multiple of its time alone
        self.moves = Moves(
            router,
            policy,
            worker.latency,
            touch=self._touch,
            interrupt=self._interrupt,
            pause=self._pause,
            left=self._on_left,
        )
        self.is_draining = False
        self._attempts: dict[str, Attempt] = {}
        self._coming: dict[str, Attempt] = {}  # from other decode machines
        self._paused: dict[str, Attempt] = {}  # that have run, and are not computed for a while
        self._changes = 0  # of who is here, when _ids was made
        self._ids: frozenset[str] = frozenset()
        self._ends: list[tuple[int, int, int, Attempt]] = []  # the step with which each running request ends
        if host is not None:
            host.join_decode(worker.name, self.change_pace)

    def report(self, made_s: float, router: int) -> Report:
        self.steps.advance_to(made_s)
        policy = self.policy
        return Report(
            made_s=made_s,
            num_waiting=policy.num_waiting,
            num_running=policy.num_running,
            available_pages=policy.spare_pages,
            request_ids=self.request_ids(),
            costs=self.costs,
            draining=self.is_draining,
        )

    def drain(self) -> None:
        """From now on it takes nothing new, and what runs here goes elsewhere."""
        self.reporter.touch(self.router.clock.now)
        self.is_draining = True
        self.reporter.mark(self.router.clock.now)

    def request_ids(self) -> frozenset[str]:
        """The same object while nobody came or went: the router need not look through it again."""
        if self._changes != self.policy.num_changes:
            self._changes = self.policy.num_changes
            self._ids = frozenset(self.policy.request_ids)
        return self._ids

    @property
    def is_running(self) -> bool:
        """A step is under way."""
        return self.steps.count > 0

    @property
    def is_empty(self) -> bool:
        """Nothing runs here, and no page is held."""
        return self.policy.num_running + self.policy.num_waiting == 0

    def made_now(self, attempt: Attempt) -> int:
        if not self.is_dead:
            self._caught_up()
        return attempt.max_new - attempt.left + self.made_by(attempt)

    def _caught_up(self) -> float:
        """Now, when the report before is drawn up and the policy knows of the steps that have ended."""
        now = self.router.clock.now
        self.reporter.touch(now)
        self.steps.advance_to(now)
        return now

    def made_by(self, attempt: Attempt) -> int:
        """Tokens made since it has joined, as far as the policy knows."""
        return 0 if attempt.joined_step < 0 else self.steps.made - attempt.joined_step

    # what prefill workers bring

    def reserve(self, attempt: Attempt) -> None:
        if attempt.is_gone or self.is_dead or attempt.decode is not self:
            return
        router, now = self.router, self._caught_up()
        answer = self.policy.reserve(
            attempt.id,
            num_tokens=attempt.num_tokens,
            max_new_tokens=attempt.max_new,
            hashes=attempt.hashes,
            is_held=attempt.is_held,
            priority=attempt.priority,
        )
        self._attempts[attempt.id] = attempt
        if isinstance(answer, Granted):
            self._grant(attempt, answer)
            self.steps.end_before_pages()
        elif isinstance(answer, Queued):
            router.ledger.counters["stalled"] += 1
            router.clock.at(now + 2 * router.message_s, router.on_stalled, attempt)
            router.clock.at(now + router.cluster.queued_reservation_s, self._stop_waiting, attempt)
        else:
            del self._attempts[attempt.id]
            router.clock.at(now + 2 * router.message_s, router.on_handoff_failed, attempt)
        self.reporter.mark(now)

    def _stop_waiting(self, attempt: Attempt) -> None:
        """Its KV holds pages at its prefill worker that others could use."""
        is_here = self._attempts.get(attempt.id) is attempt and attempt.decode is self and not self.is_dead
        if is_here and not (attempt.is_gone or self.policy.has_pages(attempt.id)):
            self.cancel(attempt)
            self.router.clock.tell(self.router.on_no_room, attempt)

    def _grant(self, attempt: Attempt, granted: Granted) -> None:
        assert attempt.prefill is not None
        cached_tokens = granted.cached_pages * self.policy.pool.page_size
        self.router.clock.tell(attempt.prefill.on_granted, (attempt, self, cached_tokens))

    def _grant_queued(self) -> None:
        for request_id, granted in self.policy.next_grants():
            self._grant(self._attempts[request_id], granted)

    def commit(self, attempt: Attempt) -> None:
        if attempt.is_gone or self.is_dead:
            return
        now = self.router.clock.now
        self.reporter.touch(now)
        self.policy.on_committed(attempt.id)
        self._tell_ready(attempt)
        self.reporter.mark(now)
        self._join()

    def _tell_ready(self, attempt: Attempt) -> None:
        router, now = self.router, self.router.clock.now
        router.ledger.enter(attempt.index, DECODE_QUEUE, now)
        router.clock.tell(router.on_handed_off, attempt)

    def adopt(self, attempt: Attempt, pages: Sequence[int], hashes: Sequence[PageHash]) -> None:
        """Its prompt was read in these pages, and it stays."""
        self.policy.adopt(attempt.id, pages, hashes)
        self._attempts[attempt.id] = attempt
        self._tell_ready(attempt)

    def begin(self, attempt: Attempt) -> None:
        if attempt.is_gone or self.is_dead:
            return
        self.policy.on_begin(attempt.id)
        self._join()

    def _join(self) -> None:
        """Somebody may be ready for the batch."""
        if not self.is_running:
            self._start()
        elif self.steps.count < self.policy.options.max_batch_size:
            self.steps.cut_short()

    def cancel(self, attempt: Attempt) -> None:
        if self.is_dead or not (self._attempts.get(attempt.id) is attempt or attempt.id in self._coming):
            return
        now = self._caught_up()
        if self._coming.pop(attempt.id, None) is None:
            del self._attempts[attempt.id]
            self._paused.pop(attempt.id, None)
            attempt.joined_step = -1
        self.policy.on_cancelled(attempt.id)
        self.moves.drop(attempt)
        self._on_pages()
        self.reporter.mark(now)

    def _on_pages(self) -> None:
        """Some are free that were not."""
        self._grant_queued()
        self.wake()

    def wake(self) -> None:
        """Something may be computed that could not before."""
        if self.is_running:
            self.steps.cut_short()
        else:
            self._start()

    # requests that move

    def move(self, order: tuple[Attempt, Decoder]) -> None:
        attempt, target = order
        if not self.is_dead:
            self.moves.begin(attempt, target)

    def make_room(self, move: Move) -> None:
        attempt = move.attempt
        if attempt.is_gone or move.is_over or self.is_dead:
            return
        router, now = self.router, self._caught_up()
        answer = self.policy.reserve(
            attempt.id,
            num_tokens=move.reserved,
            max_new_tokens=attempt.num_tokens + attempt.max_new - move.reserved,
            hashes=attempt.hashes,
            room=MOVE_ROOM_TOKENS,
            priority=attempt.priority,
        )
        if isinstance(answer, Granted):
            self._coming[attempt.id] = attempt
            cached_tokens = answer.cached_pages * self.policy.pool.page_size
            router.clock.tell(move.source.on_granted, (move, cached_tokens))
            self.steps.end_before_pages()
        else:
            router.clock.tell(move.source.on_failed, move)
        self.reporter.mark(now)

    def take(self, move: Move) -> None:
        if move.is_over or self.is_dead or self._coming.pop(move.attempt.id, None) is None:
            return
        router, now, attempt = self.router, self.router.clock.now, move.attempt
        self.reporter.touch(now)
        self.policy.on_committed(attempt.id, move.more)
        self._attempts[attempt.id] = attempt
        router.clock.tell(router.on_moved, attempt)
        router.clock.tell(move.source.on_receipt, move)
        self.reporter.mark(now)
        self._join()

    def forget_target(self, name: str) -> None:
        if not self.is_dead:
            self.moves.on_lost(name)

    def _pause(self, attempt: Attempt) -> None:
        if attempt.joined_step < 0:
            return
        self._paused[attempt.id] = attempt
        attempt.left -= self.made_by(attempt)
        attempt.joined_step = -1
        self._ends = [end for end in self._ends if end[3] is not attempt]
        heapify(self._ends)

    def _interrupt(self) -> None:
        if self.is_running:
            self.steps.cut_short()
        else:
            self.moves.on_step_end()
            self._start()

    def _touch(self) -> None:
        self.reporter.touch(self.router.clock.now)

    def _on_left(self, attempt: Attempt) -> None:
        del self._attempts[attempt.id]
        self._paused.pop(attempt.id, None)
        self._on_pages()
        self.reporter.mark(self.router.clock.now)

    def _joined(self, attempt: Attempt) -> None:
        attempt.joined_step = self.steps.made
        heappush(self._ends, (self.steps.made + attempt.left, attempt.index, attempt.number, attempt))

    # the run

    def _start(self) -> None:
        joined = self._begin_run()
        if self.steps.count:
            self._plan_run(joined)
        self._tell_host()

    def _begin_run(self) -> tuple[str, ...]:
        """Settle who decodes from now on, perhaps nobody. Returns those who do so for the first time."""
        schedule = self.steps.run.begin()
        for request_id in schedule.preempted:
            self._preempt(self._attempts.pop(request_id))
        if schedule.preempted:
            self._grant_queued()
        self.steps.count = len(schedule.requests)
        if not self.steps.count:
            self.steps.run.end()
        for request_id in schedule.joined:
            attempt = self._attempts[request_id]
            self._joined(attempt)
            self.router.ledger.enter(attempt.index, DECODE, self.router.clock.now)
        if self._paused or not self.moves.is_idle:
            self._note_gaps({request.request_id for request in schedule.requests})
        return schedule.joined

    def _note_gaps(self, computed: set[str]) -> None:
        """While requests move, some are computed again that were not, and some not: those that move stand still, and
        where no page is left nobody makes room for others by leaving."""
        for attempt in list(self._paused.values()):
            if attempt.id in computed:
                del self._paused[attempt.id]
                self._joined(attempt)
        for attempt in self._attempts.values():
            if attempt.joined_step >= 0 and attempt.id not in computed and not self.moves.is_still(attempt):
                self._pause(attempt)

    def _plan_run(self, joined: tuple[str, ...]) -> None:
        """Steps that decode, as many as pass before anything changes."""
        if self.guessing is not None:
            self._plan_guesses(self.guessing, joined)
            return
        worker, count, context_tokens = self.worker, self.steps.count, self.steps.run.context_tokens
        line = worker.latency.decode_line(count, context_tokens)
        self._pace = 1.0 if self.host is None else self.host.decode_factor(self.name, count)
        alone_s = line.step_s + worker.step_overhead_s
        planned = min(self._next_end() - self.steps.made, 1 + self.steps.run.steps_ahead, self.moves.most_steps)
        if line.until_tokens < context_tokens + planned * count:
            planned = max(1, min(planned, 1 + int((line.until_tokens - context_tokens) // count)))
        paced = DecodeLine(alone_s * self._pace, line.per_token_s * self._pace)
        self._begin_steps(paced, planned, joined)

    def _plan_guesses(self, run: SpeculatedRun, joined: tuple[str, ...]) -> None:
        """One step, with guesses."""
        latency = self.worker.latency
        self._pace = 1.0 if self.host is None else self.host.decode_factor(self.name, self.steps.count)
        step_s = latency.decode_line(run.rows, run.context_tokens).step_s
        step_s = self._with_guesses_s((step_s + self.worker.step_overhead_s) * self._pace, 0)
        self._begin_steps(DecodeLine(step_s, 0.0), 1, joined)

    def _with_guesses_s(self, step_s: float, prompt_tokens: int) -> float:
        """Of a step with so many tokens of prompts: also what was spent on its guesses."""
        run = self.guessing
        if run is None:
            return step_s
        run.note(step_s, prompt_tokens)
        return step_s + run.guess_s * self._pace

    def _begin_steps(self, line: DecodeLine, planned: int, joined: tuple[str, ...]) -> None:
        now = self.router.clock.now
        for request_id in joined:
            attempt = self._attempts[request_id]
            if attempt.past.deaths:
                steps = FORGIVEN_AFTER_TOKENS if attempt.past.is_retried else 1
                tokens_s = now + decode_run_s(line, self.steps.count, steps)
                self.router.clock.at(tokens_s + self.router.message_s, partial(self.router.on_decoded, steps), attempt)
        self.steps.begin(line, planned)

    def _tell_host(self) -> None:
        if self.host is not None:
            self.host.tell_decode(self.name, self.steps.count)

    def change_pace(self) -> None:
        """What else runs on the host has changed."""
        if not self.is_running or self.is_dead:
            return
        pace = self._pace_now()
        if pace == self._pace:
            return
        now = self._caught_up()
        self.router.ledger.busy_s[self.worker.role] += self.steps.change_pace(pace / self._pace)
        self._pace = pace
        self.reporter.mark(now)

    def _pace_now(self) -> float:
        assert self.host is not None
        return self.host.decode_factor(self.name, self.steps.count)

    def _next_end(self) -> int:
        while self._ends[0][3].joined_step < 0:
            heappop(self._ends)  # it has left
        return self._ends[0][0]

    def _on_end(self) -> None:
        if self.is_dead:
            return
        now = self.router.clock.now
        self.reporter.touch(now)
        self._end_run()
        self._start()
        self.reporter.mark(now)

    def _end_run(self) -> None:
        router, now = self.router, self.router.clock.now
        self.steps.end()
        router.ledger.busy_s[self.worker.role] += now - self.steps.begun_s
        if self.guessing is not None:
            self._take_guesses(self.guessing)
        while self._ends and self._ends[0][0] <= self.steps.made:
            end, _, _, attempt = heappop(self._ends)
            if attempt.joined_step >= 0 and attempt.joined_step + attempt.left == end:
                self.steps.run.leave(attempt.id)
                assert self.policy.computed_len_of(attempt.id) == attempt.num_tokens + attempt.max_new - 1
                self._finish(attempt)
        if not self.moves.is_quiet:
            self.steps.run.settle()
            self.moves.on_step_end()
        self._grant_queued()

    def _finish(self, attempt: Attempt) -> None:
        """It has its last token."""
        del self._attempts[attempt.id]
        self.policy.on_cancelled(attempt.id)
        self.moves.drop(attempt)
        attempt.left = 0
        self.router.clock.tell(self.router.on_finished, attempt)

    def _take_guesses(self, run: SpeculatedRun) -> None:
        """Those that were right are tokens without a step: who has some ends earlier."""
        counters = self.router.ledger.counters
        counters["drafted_tokens"] += run.num_drafted
        for request_id, more in run.made:
            counters["accepted_tokens"] += more
            attempt = self._attempts.get(request_id)
            if more and attempt is not None and attempt.joined_step >= 0:
                attempt.left -= more
                end = attempt.joined_step + attempt.left
                heappush(self._ends, (end, attempt.index, attempt.number, attempt))

    def _preempt(self, attempt: Attempt) -> None:
        self._paused.pop(attempt.id, None)
        attempt.left -= self.made_by(attempt)
        attempt.joined_step = -1
        self.router.clock.tell(self.router.on_preempted, attempt)

    def lose(self) -> None:
        """It dies now. What it had made is known to the router; the rest is made elsewhere."""
        self.steps.advance_to(self.router.clock.now)
        for attempt in self._attempts.values():
            if not self.moves.is_still(attempt):
                attempt.left -= self.made_by(attempt)
                attempt.joined_step = -1
        self.moves.lose()
        self.is_dead = True
        self.reporter.end()
        if self.host is not None:
            self.host.on_lost(self.name)


def guessing_run(worker: SimWorker, policy: DecodePolicy) -> SpeculatedRun | None:
    """None: it guesses nothing, as none with pipeline stages does, or how often that is right is not known."""
    if worker.speculation is None or not policy.options.num_speculative_tokens or policy.num_stages > 1:
        return None
    return SpeculatedRun(policy, worker.speculation, tuple(kind_of(worker.role).phases))
