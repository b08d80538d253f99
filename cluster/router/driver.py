"""Router carries out what RouterPolicy decides: it sends requests to workers, gathers their tokens, and sends a
request again when a worker fails it. It owns the registry of requests and the links; it knows no client protocol.

    submit -> policy: Assigned -> Submit to the prefill worker -> first token -> tokens from the decode worker -> over
                      Queued   -> policy.next_assignable, after every event that frees something
                      else     -> RequestFailed
    worker lost, handoff failed, preempted -> the same request again, prompt and tokens so far, under a new wire id

Everything runs in one event loop and nothing here waits: a message from a worker is handled in one go, whatever
number of requests it concerns.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

import grpc

from cluster.router.accounts import Report, RequestShape, WorkerView
from cluster.router.links import Fleet
from cluster.router.live_requests import LiveRequest, NewRequest, RequestFailed, Submission, Update
from cluster.router.metrics import RouterMetrics
from cluster.router.policy import Assigned, Queued, Rejected, RouterOptions, RouterPolicy, Unavailable
from cluster.router.retry import GiveUp, Retry
from cluster.router.worker_link import Member, WorkerLink
from engine.pages.pool import page_hashes
from engine.types import FinishReason
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import FINISH_REASON_FROM_PROTO
from worker.recording import record_calls

log = logging.getLogger(__name__)


class Router:
    def __init__(
        self,
        name: str,
        options: RouterOptions,
        *,
        secret: str = "",
        record: str = "",
        clock: Callable[[], float] = time.monotonic,
        on_readiness: Callable[[bool], None] | None = None,
    ) -> None:
        """`record`: a folder to write every call of the policy into; empty: none is."""
        self.router_id = f"{name}/{secrets.token_hex(4)}"
        self.policy = RouterPolicy(options)
        if record:
            record_calls(self.policy, record, name)
        self.metrics = RouterMetrics()
        self._clock = clock
        self._started_s = clock()
        self._on_readiness = on_readiness
        self._was_ready = False
        self.fleet = Fleet(self, router_id=self.router_id, secret=secret, dead_after_s=options.dead_after_s)
        self._serials = itertools.count(1)
        self._submissions: dict[str, Submission] = {}
        self._live: dict[str, LiveRequest] = {}  # by wire id: sent, queued, or waiting to be sent again
        self._owner: dict[str, Submission] = {}  # by wire id
        self._parked: dict[str, LiveRequest] = {}  # by wire id: a role has no worker, within the grace
        self._stalled: dict[str, str] = {}  # wire id: why its decode worker has no pages

    # what the deployment and the front call

    def set_members(self, members: Iterable[Member]) -> None:
        """These are the cluster's workers from now on: links to new ones are opened, to others closed."""
        self.fleet.set_members(members)

    async def close(self) -> None:
        """Fail what still runs, end all links."""
        for submission in list(self._submissions.values()):
            self._fail(submission, RequestFailed(grpc.StatusCode.UNAVAILABLE, "the router is stopping; try another"))
        await asyncio.sleep(0)  # cancels leave before the streams end
        await self.fleet.close()

    @property
    def is_ready(self) -> bool:
        return self.policy.has_role("prefill") and self.policy.has_role("decode")

    @property
    def num_in_flight(self) -> int:
        return len(self._live) - self.policy.num_queued

    @property
    def num_submissions(self) -> int:
        return len(self._submissions)

    def submit(self, request: NewRequest) -> Submission:
        """Take a request in. Raises RequestFailed when it is refused; nothing is kept then."""
        if request.id in self._submissions:
            raise RequestFailed(
                grpc.StatusCode.ALREADY_EXISTS, f"request_id {request.id!r} is in use; give another, or none"
            )
        self.metrics.counts["requests"] += 1
        submission = Submission.of(request, self.router_id, next(self._serials))
        self._submissions[request.id] = submission
        for live in submission.choices:
            if submission.error is None:
                self._owner[live.wire_id] = submission
                self._route(live)
        if submission.error is not None:
            raise submission.error
        if request.deadline_s is not None:
            wait_s = max(0.0, request.deadline_s - self._clock())
            loop = asyncio.get_running_loop()
            submission.deadline_timer = loop.call_later(wait_s, self._on_deadline, submission)
        return submission

    def cancel(self, submission: Submission, reason: str) -> None:
        """The client does not want it any more. No effect on one that is over."""
        if not submission.is_over:
            self._fail(submission, RequestFailed(grpc.StatusCode.CANCELLED, reason))

    def stop_choice(self, submission: Submission, choice: int) -> None:
        """The front found a stop string: what was delivered so far is all."""
        live = submission.choices[choice]
        if live.finish is None and live.wire_id in self._live:
            self._cancel_at_workers(live, "a stop string ended it")
            self._end(submission, live, FinishReason.STOP)

    # routing

    def _shape(self, live: LiveRequest, avoid: frozenset[str] = frozenset()) -> RequestShape:
        tokens = [*live.prompt_ids, *live.output_ids]
        hashes = page_hashes(tokens, self.fleet.page_size) if self.fleet.page_size else []
        return RequestShape(
            id=live.wire_id,
            prompt_len=len(tokens),
            max_tokens=live.tokens_left,
            page_hashes=hashes,
            avoid=avoid,
            failures=live.failures,
        )

    def _route(self, live: LiveRequest, avoid: frozenset[str] = frozenset()) -> None:
        self._live[live.wire_id] = live
        decision = self.policy.assign(self._shape(live, avoid), self._clock(), is_resent=live.attempt > 1)
        match decision:
            case Assigned():
                self._send(live, decision)
            case Queued():
                pass  # _pump sends it
            case Unavailable(reason=reason, wait_s=wait_s):
                self._park(live, f"{reason}; try again later", wait_s)
            case Rejected(reason=reason, retry_after_s=retry_after_s):
                can_retry = retry_after_s is not None
                code = grpc.StatusCode.RESOURCE_EXHAUSTED if can_retry else grpc.StatusCode.INVALID_ARGUMENT
                self._fail(
                    self._owner[live.wire_id],
                    RequestFailed(code, reason, retry_after_s=retry_after_s),
                    counter="rejected" if can_retry else "failed",
                )

    def _send(self, live: LiveRequest, assigned: Assigned) -> None:
        now = self._clock()
        live.prefill, live.decode = assigned.prefill, assigned.decode
        live.timeline.enter("prefill_queue", now)
        state = live.state(self.router_id)
        seq = self.fleet[live.prefill].submit(state, self.fleet[live.decode].address)
        self.policy.on_submitted(live.wire_id, seq)
        log.debug("%s goes to %s and %s: %s", live.wire_id, live.prefill, live.decode, assigned.reason)

    def _park(self, live: LiveRequest, reason: str, wait_s: float) -> None:
        """A role has no worker: fail at once, or wait so long for one."""
        self._parked[live.wire_id] = live
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self._give_up_parked, live.wire_id, reason)
        else:
            self._give_up_parked(live.wire_id, reason)

    def _give_up_parked(self, wire_id: str, reason: str) -> None:
        if self._parked.pop(wire_id, None) is not None:
            self._fail(self._owner[wire_id], RequestFailed(grpc.StatusCode.UNAVAILABLE, reason))

    def _unpark(self) -> None:
        if self._parked and self.is_ready:
            parked, self._parked = self._parked, {}
            for live in parked.values():
                if live.wire_id in self._live:
                    self._route(live)

    def _pump(self) -> None:
        """Send what the queue may send now."""
        if not self.policy.num_queued:
            return
        while assigned := self.policy.next_assignable(self._clock()):
            self._send(self._live[assigned.request_id], assigned)

    def _retry(self, live: LiveRequest, retry: Retry) -> None:
        """The attempt is over, and the policy has forgotten it: begin another one, or fail."""
        submission = self._forget_wire(live)
        if isinstance(retry, GiveUp):
            self._fail(submission, RequestFailed(grpc.StatusCode.UNAVAILABLE, retry.reason))
            return
        log.info("%s is sent again: %s", live.wire_id, retry.reason)
        live.begin_attempt(self._clock(), failures=retry.failures)
        self.metrics.counts["retries"] += 1
        self._owner[live.wire_id] = submission
        self._live[live.wire_id] = live
        if retry.after_s == 0:
            self._route(live, retry.avoid)
        else:
            asyncio.get_running_loop().call_later(retry.after_s, self._resend_now, live.wire_id, retry.avoid)

    def _resend_now(self, wire_id: str, avoid: frozenset[str]) -> None:
        if live := self._live.get(wire_id):
            self._route(live, avoid)

    # what workers say: LinkHost

    def on_ready(self, link: WorkerLink) -> None:
        hello = self.fleet.welcome(link)
        role = link.member.role
        view = WorkerView(name=link.name, role=role, total_pages=hello.num_pages, page_size=hello.page_size)
        self.policy.on_worker_up(view, self._clock())
        log.info("%s is ready at %s", link.name, link.member.address)
        self._note_readiness()
        asyncio.get_running_loop().call_soon(self._unpark)
        asyncio.get_running_loop().call_soon(self._pump)

    def on_report(self, link: WorkerLink, report: pb.WorkerReport) -> None:
        now = self._clock()
        self.fleet.note_report(link, report, now)
        is_decode = link.member.role == "decode"
        self.policy.on_report(
            link.name,
            Report(
                made_s=link.clock.to_router_s(report.made_ns, now),
                last_submit_seq=report.last_submit_seq,
                num_waiting=report.num_waiting,
                num_running=report.num_running,
                waiting_tokens=report.waiting_tokens,
                available_pages=report.available_pages,
                draining=report.draining,
                request_ids=frozenset(report.request_ids) if is_decode else frozenset(),
            ),
            now,
        )
        self._note_readiness()
        if is_decode and self._stalled:
            self._move_stalled()
        self._pump()

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        """Forget the worker; what it had is sent elsewhere, or fails at once when there is nowhere."""
        self.fleet.forget_report(link)
        self.metrics.counts["workers_lost"] += self.fleet.get(link.name) is link  # else it was sent away
        retries = self.policy.on_worker_lost(link.name, reason)
        self._note_readiness()
        for retry in retries:
            if live := self._live.get(retry.request_id):  # else it failed with another choice of the same call
                self._cancel_at_workers(live, f"{link.name} is lost", but=link.name)
                self._retry(live, retry)
        self._pump()

    def on_outputs(self, link: WorkerLink, outputs: pb.Outputs) -> None:
        """Beginnings first, then tokens, then endings: a token that came with its request's end still counts."""
        now = self._clock()
        endings: list[pb.RequestEvent] = []
        for event in outputs.events:
            if event.kind in _ENDINGS:
                endings.append(event)
            elif live := self._live.get(event.request_id):
                self._on_event(link, live, event, link.clock.to_router_s(event.at_ns, now))
            elif event.kind in (pb.EVENT_KIND_DECODE_READY, pb.EVENT_KIND_PREFILL_STARTED):
                link.cancel(event.request_id, "it has ended here")  # our cancel overtook it
        is_prefill = link.member.role == "prefill"
        for token in outputs.tokens:
            live = self._live.get(token.request_id)
            if live is None:
                self.metrics.counts["stale_tokens"] += 1
                continue
            if is_prefill and not live.has_first_token:
                live.has_first_token = True
                self.policy.on_first_token(live.wire_id, now)
            if ready := live.take(token):
                self._deliver(live, ready, now)
        for event in endings:
            if live := self._live.get(event.request_id):
                self._on_ending(link, live, event)
        self._pump()

    def _on_event(self, link: WorkerLink, live: LiveRequest, event: pb.RequestEvent, at_s: float) -> None:
        match event.kind:
            case pb.EVENT_KIND_PREFILL_STARTED:
                live.timeline.enter("prefill", at_s)
                before = live.recomputed_tokens
                live.on_prefill_started(event.cached_tokens)
                self.metrics.counts["recomputed_tokens"] += live.recomputed_tokens - before
            case pb.EVENT_KIND_FIRST_TOKEN:
                live.timeline.enter("handoff", at_s)
            case pb.EVENT_KIND_HANDOFF_STALLED:
                self._stalled[live.wire_id] = event.reason
                self._move(live, event.reason)
            case pb.EVENT_KIND_DECODE_READY:
                live.timeline.enter("decode_queue", at_s)
                if live.receipt is None and event.HasField("receipt"):
                    live.receipt = event.receipt
                self._on_handed_off(live, link.name)
            case pb.EVENT_KIND_HANDED_OFF:
                if event.HasField("receipt"):
                    live.receipt = event.receipt
                self._on_handed_off(live, event.decode_worker or live.decode)
            case pb.EVENT_KIND_DECODE_STARTED:
                live.timeline.enter("decode", at_s)

    def _on_handed_off(self, live: LiveRequest, holder: str) -> None:
        """A reassignment can have come too late, and who holds the KV may be lost by now."""
        live.decode, live.is_handed_off = holder, True
        retry = self.policy.on_handed_off(live.wire_id, holder)
        if retry is not None:
            self._retry(live, retry)

    def _move_stalled(self) -> None:
        """A decode worker has told what it holds: it may have pages for those that another one lets wait."""
        for wire_id, reason in list(self._stalled.items()):
            live = self._live.get(wire_id)
            if live is None or live.is_handed_off:
                del self._stalled[wire_id]
            else:
                self._move(live, reason)

    def _move(self, live: LiveRequest, reason: str) -> None:
        """The decode worker has no pages: name another one that has, if there is one."""
        better = self.policy.reassign(live.wire_id, live.decode)
        if better is None:
            return
        log.info("%s moves from %s to %s: %s", live.wire_id, live.decode, better, reason)
        del self._stalled[live.wire_id]
        live.decode = better
        self.metrics.counts["reassigned"] += 1
        self.fleet[live.prefill].reassign(live.wire_id, self.fleet[better].address)

    def _on_ending(self, link: WorkerLink, live: LiveRequest, event: pb.RequestEvent) -> None:
        if link.name not in (live.prefill, live.decode):
            return  # a decode worker that it was moved away from
        if event.kind == pb.EVENT_KIND_PREEMPTED:
            self.metrics.counts["preempted"] += 1
            self._retry(live, self.policy.on_preempted(live.wire_id))
            return
        if event.kind == pb.EVENT_KIND_CANCELLED and live.is_handed_off and link.name == live.prefill:
            return  # prefill had nothing left of it
        reason = f"{link.name}: {event.reason}" if event.reason else f"{link.name} gave up on it"
        if event.kind == pb.EVENT_KIND_FAILED and not event.retryable:
            self._fail(self._owner[live.wire_id], RequestFailed(grpc.StatusCode.INTERNAL, reason))
            return
        self._cancel_at_workers(live, reason, but=link.name)
        self._retry(live, self.policy.on_failed(live.wire_id, reason))

    def _deliver(self, live: LiveRequest, tokens: list[pb.TokenOutput], now: float) -> None:
        submission = self._owner[live.wire_id]
        live.timeline.first_token(now)
        self.metrics.on_tokens(len(tokens), now - live.last_token_s if live.last_token_s else None)
        live.last_token_s = now
        finish = FINISH_REASON_FROM_PROTO.get(tokens[-1].finish_reason)
        if finish is None:
            submission.put(Update(live.choice, tokens))
        else:
            self._end(submission, live, finish, tokens)

    # endings

    def _end(
        self, submission: Submission, live: LiveRequest, finish: FinishReason, tokens: Sequence[pb.TokenOutput] = ()
    ) -> None:
        """A choice is complete."""
        self._forget_wire(live)
        self.policy.on_finished(live.wire_id)
        live.finish = finish
        live.timeline.finish(self._clock())
        submission.num_running -= 1
        submission.put(Update(live.choice, list(tokens), finish))
        self.metrics.on_finished(live.timeline, len(live.output_ids))
        if submission.num_running == 0:
            self.metrics.counts["finished"] += 1
            self.metrics.counts["prompt_tokens"] += len(live.prompt_ids)
            self.metrics.counts["cached_tokens"] += submission.choices[0].cached_tokens
            self._drop(submission)

    def _fail(self, submission: Submission, error: RequestFailed, *, counter: str = "") -> None:
        """The call ends without an answer; its choices are cancelled wherever they are."""
        if submission.is_over:
            return
        is_cancel = error.code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
        self.metrics.counts[counter or ("cancelled" if is_cancel else "failed")] += 1
        now = self._clock()
        for live in submission.choices:
            if live.finish is None:
                live.finish = FinishReason.ABORT
                live.timeline.finish(now)
                self.policy.on_cancelled(live.wire_id)
                if live.wire_id in self._live:
                    self._cancel_at_workers(live, error.message)
                    self._forget_wire(live)
        submission.fail(error)
        self._drop(submission)
        asyncio.get_running_loop().call_soon(self._pump)

    def _drop(self, submission: Submission) -> None:
        self._submissions.pop(submission.id, None)
        if submission.deadline_timer is not None:
            submission.deadline_timer.cancel()

    def _forget_wire(self, live: LiveRequest) -> Submission:
        self._live.pop(live.wire_id, None)
        self._parked.pop(live.wire_id, None)
        self._stalled.pop(live.wire_id, None)
        return self._owner.pop(live.wire_id)

    def _cancel_at_workers(self, live: LiveRequest, reason: str, but: str = "") -> None:
        names = {live.decode} if live.is_handed_off else {live.prefill, live.decode}
        for name in sorted(names - {but, ""}):
            if link := self.fleet.get(name):
                link.cancel(live.wire_id, reason)

    def _on_deadline(self, submission: Submission) -> None:
        if not submission.is_over:
            self._fail(submission, RequestFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline is over"))

    def _note_readiness(self) -> None:
        if self.is_ready != self._was_ready:
            self._was_ready = self.is_ready
            if self._on_readiness is not None:
                self._on_readiness(self._was_ready)

    # what it knows

    def check_invariants(self) -> None:
        self.policy.check_invariants()
        assert self._live.keys() == self._owner.keys(), "a request has no call, or a call no request"
        assert self._live.keys() >= self._parked.keys() | self._stalled.keys(), "an ended request still waits"
        for wire_id, live in self._live.items():
            assert live.wire_id == wire_id, f"{wire_id} is filed under an old attempt"
            assert live.finish is None, f"{wire_id} has ended and is still here"

    @property
    def model(self) -> generate_pb2.GetModelInfoResponse | None:
        """What the workers serve; None before the first one came up."""
        return self.fleet.model

    def workers(self) -> list[tuple[WorkerLink, pb.WorkerReport | None, float]]:
        """Each link, prefill first, by name, with the worker's last report and its age in seconds."""
        return self.fleet.workers(self._clock())

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_s


_ENDINGS = frozenset((pb.EVENT_KIND_PREEMPTED, pb.EVENT_KIND_FAILED, pb.EVENT_KIND_CANCELLED))
