"""Dispatcher carries out where requests go: it sends, moves, resends, cancels and ends them, as RouterPolicy
decides. It owns the registry of what is under way, and hears of nothing by itself: the router tells it what happened.

    route -> Assigned: sent to the prefill worker
             Queued -> pump, after every event that frees something; or a phase has no worker for too long -> failed
             Unavailable, Rejected: failed
    retry -> Resend: the same request again, prompt and tokens so far, under a new wire id -> route
             GiveUp: failed
    pump  -> a request that its decode worker holds is told to begin, when its turn has come
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import grpc

from cluster.router.accounts import ALL, RequestShape
from cluster.router.decisions import Assigned, GiveUp, Queued, Rejected, Retry, Unavailable
from cluster.router.explaining.kept import Kept
from cluster.router.explaining.notes import Wait
from cluster.router.explaining.weighing import NAMED, routed
from cluster.router.links.links import WorkerLinks
from cluster.router.live.requests import ChoiceUpdate, LiveRequest, RequestFailed, Submission
from cluster.router.monitoring.metrics import RouterMetrics
from cluster.router.policy import RouterPolicy
from cluster.router.served_model import ServedModel
from engine.types import FinishReason

log = logging.getLogger(__name__)

TIMER_SLACK_S = 0.01  # a timer may be early by its clock's resolution
SENDS_AT_ONCE = 32  # of what has waited: some 0.1 ms each
CLIENT_LEFT = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


class Dispatcher:
    def __init__(
        self,
        policy: RouterPolicy,
        links: WorkerLinks,
        served: ServedModel,
        metrics: RouterMetrics,
        kept: Kept,
        *,
        router_id: str,
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._links = links
        self._served = served
        self._metrics = metrics
        self._kept = kept
        self._router_id = router_id
        self._clock = clock
        self._submissions: dict[str, Submission] = {}
        self._live: dict[str, LiveRequest] = {}  # by wire id: sent, queued, or waiting to be sent again
        self._stalled: dict[str, str] = {}  # wire id: why its decode worker has no pages
        self._sends_more = False  # in the loop's next turn

    # what is under way

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_in_flight(self) -> int:
        return len(self._live) - self._policy.num_queued

    @property
    def submissions(self) -> Mapping[str, Submission]:
        return self._submissions

    def submission_of(self, live: LiveRequest) -> Submission:
        return self._submissions[live.call_id]

    def get(self, wire_id: str) -> LiveRequest | None:
        return self._live.get(wire_id)

    # routing

    def admit(self, owner: str) -> None:
        """Raises RequestFailed, counted, when no new request is taken now."""
        if refusal := self._policy.refusal(owner):
            counter, error = _told(refusal)
            self._metrics.counts.update(["requests", counter])
            raise error

    def start(self, submission: Submission) -> None:
        """Route each choice, up to one that is refused: then the submission has failed."""
        self._submissions[submission.id] = submission
        now = self._clock()
        for live in submission.choices:
            if submission.error is None:
                live.notes.submitted_s = now
                self._route(live)

    def pump(self) -> None:
        """Send what the queue may send now, so many in a turn of the loop, and let begin whose turn has come."""
        if self._policy.num_aside:
            for given_up in self._policy.give_up_aside(self._clock()):
                if live := self._live.get(given_up.request_id):  # else it failed with another choice of the same call
                    self.retry(live, given_up)
        while wire_id := self._policy.next_turn():
            self._links[self._live[wire_id].decode].begin(wire_id)
        if self._sends_more:
            return
        for _ in range(SENDS_AT_ONCE):
            if not self._policy.num_queued or (assigned := self._policy.next_assignable(self._clock())) is None:
                return
            self._send(self._live[assigned.request_id], assigned)
        self._sends_more = True
        asyncio.get_running_loop().call_soon(self._pump_on)

    def _pump_on(self) -> None:
        self._sends_more = False
        self.pump()

    def on_phase_missing(self) -> None:
        """From now on nobody computes some phase: those that wait do so for a time."""
        for wire_id in self._policy.queued:
            self._give_up_later(wire_id)

    def _give_up_later(self, wire_id: str) -> None:
        grace_s = self._policy.options.unavailable_grace_s
        asyncio.get_running_loop().call_later(grace_s + TIMER_SLACK_S, self._give_up_waiting, wire_id)

    def _give_up_waiting(self, wire_id: str) -> None:
        if (given_up := self._policy.give_up_waiting(wire_id, self._clock())) is not None:
            self.retry(self._live[wire_id], given_up)

    def retry(self, live: LiveRequest, retry: Retry) -> None:
        """The attempt is over, and the policy has forgotten it: begin another one, or fail."""
        self._forget(live)
        if isinstance(retry, GiveUp):
            self.fail(self.submission_of(live), RequestFailed(grpc.StatusCode[retry.code], retry.reason))
            return
        log.info("%s is sent again: %s", live.wire_id, retry.reason)
        now = self._clock()
        live.begin_attempt(now, past=retry.past)
        live.notes.event(now, live.attempt, "retry", words=retry.reason)
        self._metrics.counts["retries"] += 1
        self._live[live.wire_id] = live
        if retry.after_s == 0:
            self._route(live)
        else:
            asyncio.get_running_loop().call_later(retry.after_s, self._route_later, live.wire_id)

    def forget_target(self, worker: str) -> None:
        """It is lost: nothing is on its way there."""
        for live in self._live.values():
            if live.moving_to == worker:
                live.moving_to = ""

    def pardon(self, life: str) -> None:
        """A worker that seemed to have died lives: no request is to blame."""
        for live in self._live.values():
            if life in live.past.deaths:
                live.past = live.past.pardoned(life)

    def _route_later(self, wire_id: str) -> None:
        if live := self._live.get(wire_id):
            self._route(live)

    def _route(self, live: LiveRequest) -> None:
        self._live[live.wire_id] = live
        now, ahead, tokens_ahead = self._clock(), self._policy.num_queued, self._policy.queued_tokens
        decision = self._policy.assign(self._shape(live), now, is_resent=live.attempt > 1)
        match decision:
            case Assigned():
                self._send(live, decision)
            case Queued():  # pump sends it
                behind = self._named(self._policy.queued_before(live.wire_id, NAMED))
                live.notes.wait(Wait(now, live.attempt, ahead, tokens_ahead, decision.reason, behind))
                if self._policy.missing_phase:
                    self._give_up_later(live.wire_id)
            case Unavailable(reason=reason):
                error = RequestFailed(grpc.StatusCode.UNAVAILABLE, f"{reason}; try again later")
                self.fail(self.submission_of(live), error)
            case Rejected():
                self._refuse(live, decision)

    def _named(self, wire_ids: Iterable[str]) -> list[tuple[str, str]]:
        """By the ids of their clients, with these."""
        known = [live for live in map(self._live.get, wire_ids) if live is not None]
        return [(live.call_id, live.owner) for live in known]

    def _shape(self, live: LiveRequest) -> RequestShape:
        return RequestShape(
            id=live.wire_id,
            prompt_len=len(live.prompt_ids) + len(live.output_ids),
            max_tokens=live.tokens_left,
            page_hashes=self._served.page_hashes(live.hashes, live.output_ids),
            past=live.past,
            owner=live.owner,
            weight=live.weight,
            slo_ttft_s=live.slo[0],
            slo_tpot_s=live.slo[1],
            priority=live.priority,
            pair=live.pair,
            most_held=ALL if live.kv_policy is None else self._served.most_held(live.kv_policy),
            num_beams=live.num_beams,
            kind=live.kind,
        )

    def _send(self, live: LiveRequest, assigned: Assigned) -> None:
        live.prefill, live.decode = assigned.prefill, assigned.decode
        now = self._clock()
        live.timeline.enter("prefill_queue", now, live.prefill)
        live.notes.route(routed(self._policy.workers, live, assigned.reason, now, self._live.get))
        write = partial(live.write, router_id=self._router_id, is_held=assigned.is_held)
        seq = self._links[live.prefill].submit(write, self._links[live.decode].address)
        self._policy.on_submitted(live.wire_id, seq)
        log.debug("%s goes to %s and %s: %s", live.wire_id, live.prefill, live.decode, assigned.reason)

    def _refuse(self, live: LiveRequest, rejected: Rejected) -> None:
        counter, error = _told(rejected)
        self.fail(self.submission_of(live), error, counter=counter)

    # moving to another decode worker

    def on_stalled(self, live: LiveRequest, reason: str, decode: str) -> None:
        """`decode` has no pages: name another one that has, now or once there is one; or again the one whose it is, of
        which its reader heard too soon."""
        if decode != live.decode:
            self._links[live.prefill].reassign(live.wire_id, self._links[live.decode].address)
            return
        self._stalled[live.wire_id] = reason
        self._move(live, reason)

    def move_stalled(self) -> None:
        """A decode worker has told what it holds: it may have pages for those that another one lets wait, or what has
        waited long is decoded where it was read."""
        workers, are_full = self._policy.workers, self._policy.most_free_pages < 1
        if are_full and not workers.prefill.has_both:
            return
        known = {wire_id: self._live.get(wire_id) for wire_id in self._stalled}
        waiting = [live for live in known.values() if live is not None and not live.is_handed_off]
        self._stalled = {live.wire_id: self._stalled[live.wire_id] for live in waiting}
        if are_full:  # but for what may stay where it was read
            waiting = [live for live in waiting if live.has_first_token and live.prefill in workers.decode.accounts]
        for live in sorted(waiting, key=lambda live: live.priority):
            self._move(live, self._stalled[live.wire_id])

    def _move(self, live: LiveRequest, reason: str) -> None:
        better = self._policy.reassign(live.wire_id, live.decode, self._clock())
        if better is not None:
            del self._stalled[live.wire_id]
            self._reassign(live, better, reason)

    def move_unsent(self, worker: str) -> None:
        """It has told what it holds: if it stops, prompts that others read for it are another's, if nothing of them is
        begun. Their readers confirm that."""
        for wire_id in self._policy.unsent(worker):
            live = self._live.get(wire_id)
            if live is not None and (better := self._policy.rename(wire_id, self._clock())) is not None:
                self._reassign(live, better, f"{worker} is stopping")

    def _reassign(self, live: LiveRequest, better: str, reason: str) -> None:
        """Another decode worker to its prefill worker."""
        log.info("%s moves from %s to %s: %s", live.wire_id, live.decode, better, reason)
        live.notes.event(self._clock(), live.attempt, "reassigned", words=f"to {better}: {reason}")
        what = f"sends a handoff to {better} instead of {live.decode}"
        self._metrics.chronicle.note("router", what, reason, self._clock())
        live.decode = better
        self._metrics.counts["reassigned"] += 1
        self._links[live.prefill].reassign(live.wire_id, self._links[better].address)

    # endings

    def end(self, live: LiveRequest, last: ChoiceUpdate) -> None:
        """A choice is complete."""
        submission = self.submission_of(live)
        self._forget(live)
        self._policy.on_finished(live.wire_id)
        self._charge(live)
        live.finish = last.finish
        live.timeline.finish(self._clock())
        submission.num_running -= 1
        submission.put(last)
        self._metrics.on_finished(live, self._policy.options.targets_s)
        self._kept.end(live, "finished")
        if submission.num_running == 0:
            self._metrics.counts["finished"] += 1
            self._metrics.counts["prompt_tokens"] += len(live.prompt_ids)
            self._metrics.counts["cached_tokens"] += submission.choices[0].cached_tokens
            self._drop(submission)

    def fail(self, submission: Submission, error: RequestFailed, *, counter: str = "") -> None:
        """The call ends without an answer; its choices are cancelled wherever they are."""
        if submission.is_over:
            return
        self._metrics.counts[counter or ("cancelled" if error.code in CLIENT_LEFT else "failed")] += 1
        now = self._clock()
        for live in submission.choices:
            if live.finish is None:
                live.finish = FinishReason.ABORT
                live.timeline.finish(now)
                is_cancelled = error.code is grpc.StatusCode.CANCELLED
                if is_cancelled:
                    self._metrics.on_cancelled(live, self._policy.options.targets_s)
                else:
                    self._metrics.load.note(live, failed=True)
                self._kept.end(live, "cancelled" if is_cancelled else "failed", error.message, error.code.name)
                self._policy.on_cancelled(live.wire_id)
                self._charge(live)
                if live.wire_id in self._live:
                    self.cancel_at_workers(live, error.message)
                    self._forget(live)
        submission.fail(error)
        self._drop(submission)
        asyncio.get_running_loop().call_soon(self.pump)

    def _charge(self, live: LiveRequest) -> None:
        if live.output_ids:
            num_tokens = len(live.output_ids)
            self._policy.on_generated(live.owner, num_tokens, priority=live.priority, weight=live.weight)

    def cancel_at_workers(self, live: LiveRequest, reason: str, but: str = "") -> None:
        names = {live.decode, live.moving_to} if live.is_handed_off else {live.prefill, live.decode}
        for name in sorted(names - {but, ""}):
            self._links.cancel(name, live.wire_id, reason)

    def _forget(self, live: LiveRequest) -> None:
        self._live.pop(live.wire_id, None)
        self._stalled.pop(live.wire_id, None)

    def _drop(self, submission: Submission) -> None:
        self._submissions.pop(submission.id, None)
        for timer in submission.timers:
            timer.cancel()

    def check_invariants(self) -> None:
        """Assert that whatever is under way is filed once, under its last attempt."""
        assert self._live.keys() >= self._stalled.keys(), "an ended request still waits"
        for wire_id, live in self._live.items():
            assert live.wire_id == wire_id, f"{wire_id} is filed under an old attempt"
            assert live.finish is None, f"{wire_id} has ended and is still here"
        under_way = {id(live) for submission in self._submissions.values() for live in submission.choices}
        assert {id(live) for live in self._live.values()} <= under_way, "a request belongs to no call"


def _told(refusal: Rejected | Unavailable) -> tuple[str, RequestFailed]:
    """What counts it, and what the client is told."""
    if isinstance(refusal, Unavailable):
        return "failed", RequestFailed(grpc.StatusCode.UNAVAILABLE, f"{refusal.reason}; try again later")
    if refusal.retry_after_s is None:
        return "failed", RequestFailed(grpc.StatusCode.INVALID_ARGUMENT, refusal.reason)
    error = RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal.reason, retry_after_s=refusal.retry_after_s)
    return "rejected", error
