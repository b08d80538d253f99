"""RouterMachine is cluster/router/driver.py on the virtual clock: it carries out what a RouterPolicy decides.

It decides nothing of its own: it makes an attempt of each request, and another where the policy says so, sends it where
the policy says, tells the policy what workers say, and cancels what a client leaves. Which requests should move it asks
when one comes or has moved, and not with every report. What it leaves out: the end of waiting for a role that has no
worker (requests wait until one is back), workers that cannot serve some requests, and other readers' prompts that are
renamed when a decode worker drains: here it waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cluster.router.accounts import FRESH, Past, RequestShape, WorkerView
from cluster.router.decisions import Assigned, GiveUp, Queued, Retry, Unavailable
from cluster.router.moving.moving import RETRY_S
from cluster.router.policy import RouterPolicy
from placement.simulator.clock import VirtualClock
from placement.simulator.cluster import SimCluster
from placement.simulator.ledger import PREFILL_QUEUE, ROUTE, Ledger
from placement.simulator.machines.attempt import Attempt, Decoder, Dispatcher, Prefiller
from placement.simulator.pages import block_hashes
from placement.simulator.reporting import Reporter, ReportInbox, Reporting, Teller
from placement.workload.requests import Workload

OnAssigned = Callable[[int, Assigned], object]  # index of the request


class RouterMachine(Dispatcher):
    def __init__(
        self,
        cluster: SimCluster,
        workload: Workload,
        clock: VirtualClock,
        ledger: Ledger,
        on_assigned: OnAssigned | None = None,
        number: int = 0,
    ) -> None:
        """`number`: of this router, among several."""
        super().__init__(cluster, clock, ledger)
        self.inbox = ReportInbox(
            clock,
            gap_s=cluster.report_gap_s,
            delay_s=cluster.message_s,
            is_awaited=self._is_awaited,
            on_arrival=self._on_report,
        )
        self.number = number
        self.policy = RouterPolicy(cluster.router)
        self.prefills: dict[str, Prefiller] = {}
        self.decodes: dict[str, Decoder] = {}
        self._places: dict[str, int] = {}  # of these, in their order
        self._on_assigned = on_assigned
        self._workload = workload
        self._prompt_len: list[int] = workload.prompt_len.tolist()
        self._output_len: list[int] = workload.output_len.tolist()
        self._priority: list[int] = workload.priority.tolist()
        self._cancel_after_s: list[float] = workload.cancel_after_s.tolist()
        ttft_s, tpot_s = workload.targets_s(0.0, 0.0)
        self._slo_ttft_s: list[float] = ttft_s.tolist()
        self._slo_tpot_s: list[float] = tpot_s.tolist()
        self._page_size = cluster.workers[0].page_size
        self._max_len = cluster.max_len
        self._next_arrival_s = math.inf
        self._attempts: dict[str, Attempt] = {}  # under way
        self._last: dict[int, Attempt] = {}  # by request, where clients leave
        self._stalled: dict[str, Attempt] = {}
        self._parked: list[Attempt] = []  # a role has no worker

    def reporter_of(self, name: str, worker: Reporting) -> Teller:
        return Reporter(name, worker, self.inbox, self.number)

    def on_worker_up(self, view: WorkerView, prefill: Prefiller | None, decode: Decoder | None) -> None:
        if prefill is not None:
            self.prefills[view.name] = prefill
        if decode is not None:
            self.decodes[view.name] = decode
            self._places = {name: place for place, name in enumerate(self.decodes)}
        for given_up in self.policy.on_worker_up(view, self.clock.now):
            self._retry(self._attempts[given_up.request_id], given_up)

    # requests

    def arrive(self, index: int, next_arrival_s: float) -> None:
        if self._cancel_after_s and self._cancel_after_s[index] < math.inf:
            self.clock.at(self.clock.now + self._cancel_after_s[index], self.cancel, index)
        if self._max_len and self._prompt_len[index] + self._output_len[index] > self._max_len:
            self.ledger.on_refused(index, "rejected")
        else:
            self._route(self._attempt(index, 1, 0, FRESH))
            self._look_at_moves()
        self._next_arrival_s = next_arrival_s
        self._note_decision()

    def cancel(self, index: int) -> None:
        """Its client has left. It may be over, or wait, here or to be sent again."""
        attempt = self._last[index]
        if attempt.is_gone:
            return
        self.ledger.on_cancelled(index, self.clock.now)
        self.policy.on_cancelled(attempt.id)
        self._tell_cancelled(attempt, "")
        self._drop(attempt)
        self._pump()

    def _tell_cancelled(self, attempt: Attempt, lost: str) -> None:
        """All workers that it was sent to, but one that is lost."""
        if attempt.prefill is not None and attempt.prefill.name != lost:
            self.clock.tell(attempt.prefill.end, attempt)
        for decode in (attempt.decode, attempt.moving_to):
            if decode is not None and decode.name != lost:
                self.clock.tell(decode.cancel, attempt)

    def _is_awaited(self) -> bool:
        return self.policy.num_queued > 0 or bool(self._stalled)

    def _note_decision(self) -> None:
        """While somebody waits in the router or for pages, every report may decide."""
        self.inbox.next_decision_s = 0.0 if self._is_awaited() else self._next_arrival_s

    def _attempt(self, index: int, number: int, made: int, past: Past) -> Attempt:
        """The request anew, `made` tokens of its output behind its prompt."""
        num_tokens = self._prompt_len[index] + made
        hashes = []
        if self._workload.blocks:
            hashes = block_hashes(
                self._workload.blocks[index], self._workload.block_len, self._prompt_len[index], self._page_size
            )
        priority = self._priority[index] if self._priority else 0
        attempt = Attempt(index, number, num_tokens, self._output_len[index] - made, hashes, past, priority)
        self._attempts[attempt.id] = attempt
        if self._cancel_after_s:
            self._last[index] = attempt
        return attempt

    def _route(self, attempt: Attempt) -> None:
        if attempt.is_gone:
            return  # its client has left since
        self._take_reports()
        shape = RequestShape(
            id=attempt.id,
            prompt_len=attempt.num_tokens,
            max_tokens=attempt.left,
            page_hashes=attempt.hashes,
            past=attempt.past,
            slo_ttft_s=self._slo_ttft_s[attempt.index],
            slo_tpot_s=self._slo_tpot_s[attempt.index],
            priority=attempt.priority,
        )
        decision = self.policy.assign(shape, self.clock.now, is_resent=attempt.number > 1)
        if isinstance(decision, Assigned):
            self._send(attempt, decision)
        elif isinstance(decision, Queued):
            self.inbox.watch()
        elif isinstance(decision, Unavailable):
            self._parked.append(attempt)
        else:
            self.ledger.on_refused(attempt.index, "rejected")
            self._drop(attempt)

    def _send(self, attempt: Attempt, assigned: Assigned) -> None:
        if self._on_assigned is not None:
            self._on_assigned(attempt.index, assigned)
        now = self.clock.now
        prefill = self.prefills[assigned.prefill]
        attempt.prefill, attempt.decode = prefill, self.decodes[assigned.decode]
        attempt.is_held = assigned.is_held
        prefill.next_seq += 1
        attempt.seq = prefill.next_seq
        self.policy.on_submitted(attempt.id, attempt.seq)
        self.ledger.enter(attempt.index, PREFILL_QUEUE, now)
        self.clock.tell(prefill.submit, attempt)

    def _pump(self) -> None:
        """Send what may go now."""
        self._let_begin()
        if not self._is_awaited():
            return
        self._take_reports()
        while self.policy.num_queued and (assigned := self.policy.next_assignable(self.clock.now)):
            self._send(self._attempts[assigned.request_id], assigned)
        self._note_decision()

    def _let_begin(self) -> None:
        while (attempt_id := self.policy.next_turn()) is not None:
            attempt = self._attempts[attempt_id]
            assert attempt.decode is not None
            self.clock.tell(attempt.decode.begin, attempt)

    def _retry(self, attempt: Attempt, retry: Retry) -> None:
        """Another attempt, with the tokens made so far, or none. The policy has forgotten the last one."""
        self._drop(attempt)
        if isinstance(retry, GiveUp):
            self.ledger.on_refused(attempt.index, "failed")
            return
        self.ledger.counters["retries"] += 1
        self.ledger.enter(attempt.index, ROUTE, self.clock.now)
        made = self._output_len[attempt.index] - attempt.left
        self.ledger.counters["recomputed_tokens"] += attempt.num_tokens + attempt.max_new - attempt.left
        again = self._attempt(attempt.index, attempt.number + 1, made, retry.past)
        if retry.after_s:
            self.clock.at(self.clock.now + retry.after_s, self._route, again)
        else:
            self._route(again)

    def _drop(self, attempt: Attempt) -> None:
        attempt.is_gone = True
        del self._attempts[attempt.id]
        self._stalled.pop(attempt.id, None)

    # what workers say

    def on_first_token(self, attempt: Attempt) -> None:
        if attempt.is_gone:
            return
        self.ledger.on_first_token(attempt.index, self.clock.now)
        self.policy.on_first_token(attempt.id, self.clock.now)
        if attempt.left:
            self._pump()
        else:
            self.on_finished(attempt)

    def on_handed_off(self, attempt: Attempt) -> None:
        if attempt.is_gone:
            return
        assert attempt.prefill is not None
        assert attempt.decode is not None
        retry = self.policy.on_handed_off(
            attempt.id, attempt.decode.name, self.clock.now, num_tokens=attempt.sent_tokens, taken_s=attempt.wire_s
        )
        attempt.prefill.end(attempt)
        if retry is not None:
            self._retry(attempt, retry)
        self._let_begin()

    def on_finished(self, attempt: Attempt) -> None:
        if attempt.is_gone:
            return
        self.policy.on_finished(attempt.id)
        self.ledger.on_finished(attempt.index, self.clock.now)
        self._drop(attempt)
        self._pump()

    def on_decoded(self, num_tokens: int, attempt: Attempt) -> None:
        if not attempt.is_gone:
            self.policy.on_decoded(attempt.id, num_tokens)
            self._pump()

    def on_preempted(self, attempt: Attempt) -> None:
        if attempt.is_gone:
            return
        self.ledger.counters["preempted"] += 1
        self._retry(attempt, self.policy.on_preempted(attempt.id))

    # moves of what is decoded

    def _look_at_moves(self) -> None:
        """Of what workers hold, by their reports, some may have to leave them."""
        names = self._unsettled(-1) if len(self.decodes) > 1 else []
        while names:
            name = names.pop()
            if self._let_leave(name):
                names = self._unsettled(self._places[name])

    def _unsettled(self, after: int) -> list[str]:
        """The workers after this place that requests may have to leave, the next at the end."""
        places = self._places
        names = [name for name in self.policy.unsettled() if places[name] > after]
        if len(names) < 2:
            return names
        return sorted(names, key=places.__getitem__, reverse=True)

    def _let_leave(self, name: str) -> bool:
        """Whether somebody does."""
        now, is_moving = self.clock.now, False
        for attempt_id in self.policy.leaving(name, now):
            attempt = self._attempts[attempt_id]
            assert attempt.decode is not None
            move = self.policy.move(attempt_id, attempt.num_tokens + attempt.decode.made_now(attempt), now)
            if move is not None:
                is_moving = True
                attempt.moving_to = self.decodes[move.to]
                self.clock.tell(attempt.decode.move, (attempt, attempt.moving_to))
        return is_moving

    def on_moved(self, attempt: Attempt) -> None:
        if attempt.is_gone or attempt.moving_to is None:
            return
        attempt.decode, attempt.moving_to = attempt.moving_to, None
        self.ledger.counters["moved"] += 1
        self.policy.on_moved(attempt.id, attempt.decode.name, self.clock.now)
        self._look_at_moves()
        self._pump()

    def on_move_failed(self, attempt: Attempt) -> None:
        if not attempt.is_gone and attempt.moving_to is not None:
            attempt.moving_to = None
            self.ledger.counters["moves_failed"] += 1
            self.policy.on_move_failed(attempt.id, self.clock.now, "room")
            if self.cluster.drains:
                self.clock.at(self.clock.now + RETRY_S, self._on_drain_told, 0)

    def on_handoff_failed(self, attempt: Attempt) -> None:
        if attempt.is_gone:
            return
        if attempt.prefill is not None:
            self.clock.tell(attempt.prefill.end, attempt)
        self._retry(attempt, self.policy.on_failed(attempt.id, "no decode worker could ever hold it", self.clock.now))

    def on_no_room(self, attempt: Attempt) -> None:
        if attempt.is_gone:
            return
        assert attempt.prefill is not None
        assert attempt.decode is not None
        self.clock.tell(attempt.prefill.end, attempt)
        reason, worker, peer = "no pages for too long", attempt.prefill.name, attempt.decode.name
        self._retry(
            attempt,
            self.policy.on_failed(attempt.id, reason, self.clock.now, worker=worker, cause="room", peer=peer),
        )
        self._pump()

    def on_stalled(self, attempt: Attempt) -> None:
        if not attempt.is_gone and not attempt.granted:
            self._stalled[attempt.id] = attempt
            self._take_reports()
            if attempt.id in self._stalled:
                self._move(attempt)
            self.inbox.watch()
            self._note_decision()

    def _move_stalled(self) -> None:
        """A decode worker has told what it holds: it may have pages for those that another one lets wait."""
        if len(self.decodes) < 2:
            return
        most = self.policy.most_free_pages
        waiting = list(self._stalled.values())
        if self._priority:
            waiting.sort(key=_priority)
        for attempt in waiting:
            if attempt.granted:
                del self._stalled[attempt.id]
            elif attempt.num_tokens < most * self._page_size or self._may_stay(attempt):
                self._move(attempt)
                most = self.policy.most_free_pages

    def _may_stay(self, attempt: Attempt) -> bool:
        """It is read where it could be decoded."""
        return attempt.computed and attempt.prefill is not None and attempt.prefill.name in self.decodes

    def _move(self, attempt: Attempt) -> None:
        assert attempt.prefill is not None
        assert attempt.decode is not None
        better = self.policy.reassign(attempt.id, attempt.decode.name, self.clock.now)
        if better is not None:
            del self._stalled[attempt.id]
            self.clock.tell(attempt.prefill.move, (attempt, self.decodes[better]))

    def _on_report(self, _: int) -> None:
        self._pump()

    def _take_reports(self) -> None:
        has_decode = False
        for name, report in self.inbox.take():
            self.policy.on_report(name, report, self.clock.now)
            has_decode |= name in self.decodes
        if has_decode and self._stalled:
            self._move_stalled()

    # losses, workers that shall be empty, and those of another role

    def on_drain(self) -> None:
        self.clock.at(self.clock.now + self.cluster.report_gap_s + self.message_s, self._on_drain_told, 0)

    def _on_drain_told(self, _: int) -> None:
        self._take_reports()
        self._look_at_moves()

    def on_worker_lost(self, lost: str) -> None:
        """What was there is sent again; the other worker of each attempt is told."""
        self._forget_worker(lost, "it died", is_death=True)
        for prefill in self.prefills.values():
            prefill.report_anew(self.clock.now)
        self._pump()

    def _forget_worker(self, lost: str, reason: str, *, is_death: bool) -> None:
        for retry in self.policy.on_worker_lost(lost, reason, self.clock.now, is_death=is_death):
            attempt = self._attempts[retry.request_id]
            self._tell_cancelled(attempt, lost)
            self._retry(attempt, retry)
        for attempt in self._attempts.values():
            if attempt.moving_to is not None and attempt.moving_to.name == lost:
                assert attempt.decode is not None
                attempt.moving_to = None
                self.clock.tell(attempt.decode.forget_target, lost)

    def has_left(self, name: str) -> bool:
        self._take_reports()
        return self.policy.has_left(name)

    def on_role_changed(self, view: WorkerView, prefill: Prefiller | None, decode: Decoder | None) -> None:
        self.prefills.pop(view.name, None)
        self.decodes.pop(view.name, None)
        self._forget_worker(view.name, "its role has changed", is_death=False)
        self.on_worker_up(view, prefill, decode)
        self.on_worker_back()

    def on_worker_back(self) -> None:
        """Those that waited for a role without a worker may go."""
        parked, self._parked = self._parked, []
        for attempt in parked:
            self._route(attempt)
        self._pump()


def _priority(attempt: Attempt) -> int:
    return attempt.priority
