"""Router is what the front submits requests to and what workers' links speak to: it checks nothing and decides nothing.

    front   submit, cancel, stop_choice    -> Dispatcher, which asks RouterPolicy and sends
    links   ready, report, outputs, lost   -> RouterPolicy hears of it, Dispatcher carries out what follows;
                                              tokens go to the submission's mailbox, in order

Everything runs in one event loop and nothing here waits: a message from a worker is handled in one go, whatever
number of requests it concerns. A request goes on under a new wire id when a worker is lost, a handoff fails or it is
preempted; messages of an earlier attempt are dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import grpc

from cluster.router.accounts import PeerTrouble, Report, WorkerView
from cluster.router.decisions import Cause, GiveUp
from cluster.router.dispatch import Dispatcher
from cluster.router.explaining.kept import Kept, Record, running
from cluster.router.explaining.notes import Told
from cluster.router.links.links import WorkerLinks
from cluster.router.links.worker_link import LinkState, WorkerEndpoint, WorkerLink
from cluster.router.live.moves import LiveMoves
from cluster.router.live.requests import ChoiceUpdate, LiveRequest, NewRequest, RequestFailed, Submission
from cluster.router.live.shared import Shared
from cluster.router.monitoring.metrics import RouterMetrics
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from cluster.router.served_model import ServedModel
from cluster.router.takers import Takers, why_alone, without
from engine.types import FinishReason
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import page_news_from_proto, step_costs_from_proto
from worker.options import report_gap_s
from worker.recording import record_calls
from worker.roles import PHASES, ROLES, kind_of
from worker.wire.tls import TlsFiles

log = logging.getLogger(__name__)

ENDINGS = frozenset((pb.EVENT_KIND_PREEMPTED, pb.EVENT_KIND_FAILED, pb.EVENT_KIND_CANCELLED))
BEGINNINGS = (pb.EVENT_KIND_PREFILL_STARTED, pb.EVENT_KIND_DECODE_READY, pb.EVENT_KIND_MOVE_FAILED)  # or goings-on
HANDED = (pb.EVENT_KIND_HANDED_OFF, pb.EVENT_KIND_MOVED)  # as the worker says that had it
CAUSES: dict[int, Cause] = {
    pb.FAILURE_CAUSE_STEP: "step",
    pb.FAILURE_CAUSE_PEER: "peer",
    pb.FAILURE_CAUSE_ROOM: "room",
    pb.FAILURE_CAUSE_REQUEST: "request",
    pb.FAILURE_CAUSE_WORKER: "worker",
}

RETRY_AFTER_S = 1.0
SETTLE_S = 0.1  # for the end of a worker's own stream to arrive, where another one has seen first that it is gone


class Router:
    def __init__(
        self,
        name: str,
        options: RouterOptions,
        *,
        cluster_id: str = "",
        secret: str = "",
        tls: TlsFiles | None = None,
        record: str = "",
        shared: Shared | None = None,
        keeps: int = 0,
        on_end: Callable[[Record], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_readiness: Callable[[], None] | None = None,
    ) -> None:
        """`record`: a folder to write every call of the policy into; empty: none is. `shared`: what it has in common
        with the routers of other models in this process. `keeps`: so many requests that have ended, and as many slow
        ones, to say where their time went; `on_end`: who else is told of each that has ended. `on_readiness`: called
        whenever `is_ready` changes."""
        shared = shared or Shared.of(options)
        self.router_id = f"{name}/{secrets.token_hex(4)}"
        self.cluster_id = cluster_id
        self.policy = RouterPolicy(options)
        if record:
            record_calls(self.policy, record, name)
        self.metrics = RouterMetrics(shared.load, shared.chronicle)
        self._clock = clock
        self._started_s = clock()
        self._on_readiness = on_readiness
        self._was_ready = False
        self._serials = itertools.count(1)
        self.loop_clock, self.turns = shared.loop_clock, shared.turns
        self.unread, self._bundles = shared.unread, shared.bundles
        self._served = ServedModel()
        self.kept = Kept(keeps, options.targets_s, on_end)
        self._links = WorkerLinks(
            self,
            self.loop_clock,
            router_id=self.router_id,
            secret=secret,
            tls=tls,
            dead_after_s=options.dead_after_s,
        )
        self._dispatcher = Dispatcher(
            self.policy, self._links, self._served, self.metrics, self.kept, router_id=self.router_id, clock=clock
        )
        self._moves = LiveMoves(self.policy, self._links, self.metrics, self._dispatcher.get, clock)

    # what the deployment and the front call

    def set_workers(self, workers: Iterable[WorkerEndpoint]) -> None:
        """These are the cluster's workers from now on: links to new ones are opened, to others closed."""
        wanted = list(workers)
        self._links.set_workers(wanted)
        self.policy.set_members(
            [worker.name for worker in wanted if "prefill" in kind_of(worker.role).phases],
            [worker.name for worker in wanted if "decode" in kind_of(worker.role).phases],
        )
        self.metrics.receipts.keep({worker.name for worker in wanted})

    def take_options(self, options: RouterOptions, keeps: int) -> None:
        """Go by these from now on."""
        self.kept.set_bounds(keeps, options.targets_s)
        self.policy.take_options(options)
        self._links.set_dead_after(options.dead_after_s)
        if not self.is_ready:
            self._dispatcher.on_phase_missing()  # who waits for a worker does so for another time

    async def close(self) -> None:
        """Fail what still runs, end all links."""
        for submission in list(self._dispatcher.submissions.values()):
            stopping = RequestFailed(grpc.StatusCode.UNAVAILABLE, "the router is stopping; try another")
            self._dispatcher.fail(submission, stopping)
        await asyncio.sleep(0)  # cancels leave before the streams end
        await self._links.close()

    def admit(self, owner: str = "") -> None:
        """Raises RequestFailed when a request of this owner would be refused now, whatever is in it: asked before
        anything is spent on it."""
        self._dispatcher.admit(owner)

    def has(self, request_id: str) -> bool:
        """Whether one of this id runs."""
        return request_id in self._dispatcher.submissions

    def _check_id(self, request_id: str) -> None:
        if self.has(request_id):
            raise RequestFailed(
                grpc.StatusCode.ALREADY_EXISTS, f"request_id {request_id!r} is in use; give another, or none"
            )

    def submit(self, request: NewRequest) -> Submission:
        """Take a request in. Raises RequestFailed when it is refused; nothing is kept then."""
        self._check_id(request.id)
        self.metrics.counts["requests"] += 1
        submission = Submission.of(request, self.router_id, next(self._serials), self.turns, self._bundles)
        submission.on_unread = self._end_unread
        self._dispatcher.start(submission)
        if submission.error is not None:
            raise submission.error
        if request.deadline_s is not None:
            self._refuse_late(submission, request.deadline_s - self._clock())
            self._call_at(request.deadline_s, submission, partial(self._on_deadline, submission, request))
        if request.queue_deadline_s is not None and _is_waiting(submission):
            self._call_at(request.queue_deadline_s, submission, partial(self._on_waited, submission, request))
        return submission

    def _refuse_late(self, submission: Submission, left_s: float) -> None:
        if reason := self.policy.why_late(submission.choices[-1].wire_id, left_s):
            error = RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after_s=RETRY_AFTER_S)
            self._dispatcher.fail(submission, error, counter="rejected")
            raise error

    def _call_at(self, at_s: float, submission: Submission, call: Callable[[], None]) -> None:
        wait_s = max(0.0, at_s - self._clock())
        submission.timers.append(asyncio.get_running_loop().call_later(wait_s, call))

    def _on_deadline(self, submission: Submission, request: NewRequest) -> None:
        over = RequestFailed(grpc.StatusCode.DEADLINE_EXCEEDED, request.deadline_reason)
        self._dispatcher.fail(submission, over)

    def _on_waited(self, submission: Submission, request: NewRequest) -> None:
        if _is_waiting(submission):
            waited_s = self._clock() - request.arrived_s
            reason = f"it waited {waited_s:.3g} s for a worker, the most that this router allows"
            error = RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after_s=RETRY_AFTER_S)
            self._dispatcher.fail(submission, error, counter="rejected")

    def cancel(self, submission: Submission, reason: str) -> None:
        """The client does not want it any more. No effect on one that is over."""
        self._dispatcher.fail(submission, RequestFailed(grpc.StatusCode.CANCELLED, reason))

    def stop_choice(self, submission: Submission, choice: int) -> None:
        """The front found a stop string: what was delivered so far is all."""
        if choice >= len(submission.choices):
            return  # of a beam search, which has ended
        live = submission.choices[choice]
        if live.finish is None:
            self._dispatcher.cancel_at_workers(live, "a stop string ended it")
            self._dispatcher.end(live, ChoiceUpdate(choice, [], finish=FinishReason.STOP))

    def drain(self, name: str, *, undo: bool = False, force: bool = False) -> None:
        """Have a worker take nothing new, and left by what it decodes; or take it back. Raises RequestFailed."""
        link = self._ready(name)
        if not (undo or force):
            self._check_others(name)
        link.drain(undo=undo)
        self._chronicle(f"takes {name} back" if undo else f"drains {name}", "as it was asked", by="operator")

    def set_role(self, name: str, role: str, chunk_tokens: int | None = None, *, force: bool = False) -> None:
        """Likewise, until it can be of this role, and is; its chunks change without. Raises RequestFailed."""
        if role not in ROLES:
            raise RequestFailed(grpc.StatusCode.INVALID_ARGUMENT, f"role is {role!r}; give one of {', '.join(ROLES)}")
        if chunk_tokens is not None and kind_of(role).phases != PHASES:
            why = f"chunk_tokens is {chunk_tokens}; only a mixed worker has chunks beside answers, not a {role} one"
            raise RequestFailed(grpc.StatusCode.INVALID_ARGUMENT, why)
        link = self._ready(name)
        if link.worker.is_leaving:
            why = f"{name} is being removed; take it back first (kvrelay drain {name} --undo)"
            raise RequestFailed(grpc.StatusCode.FAILED_PRECONDITION, why)
        if link.role != role:
            if not force:
                self._check_others(name)
            link.set_role(role, chunk_tokens)
            return
        if chunk_tokens is not None and (link.is_leaving or self.policy.workers.is_stopping(name)):
            why = f"{name} drains; take it back first (kvrelay drain {name} --undo), or change its role with its chunks"
            raise RequestFailed(grpc.StatusCode.FAILED_PRECONDITION, why)
        link.set_role(role, chunk_tokens)

    def _ready(self, name: str) -> WorkerLink:
        link = self._links[name]
        if link.state is not LinkState.READY:
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, f"{name} is {link.state.value}: {link.reason}")
        return link

    @property
    def takers(self) -> Takers:
        """Who takes new requests, and was not told to take none."""
        return without(self.policy.workers.takers, self._links.leaving)

    @property
    def ready_workers(self) -> dict[str, str]:
        """By name, the incarnation of each one's process."""
        return {
            link.name: link.hello.worker.incarnation.partition(".")[0]  # behind it, of its role
            for link, *_ in self.workers()
            if link.state is LinkState.READY and link.hello is not None
        }

    def _check_others(self, name: str) -> None:
        """Whether each phase of this worker has another one, for all that is asked for. Raises RequestFailed."""
        unable = self.policy.health.inability.by_kind(self._clock())
        for kind, others in {"": frozenset[str](), **unable}.items():
            if name not in others and (why := why_alone((name,), without(self.takers, others), kind)):
                raise RequestFailed(grpc.StatusCode.FAILED_PRECONDITION, why)

    # what workers say: LinkHost

    def on_ready(self, link: WorkerLink, hello: pb.WorkerHello) -> None:
        self._served.admit(hello, self._links.ready_beside(link))
        view = WorkerView(
            name=link.name,
            role=link.role,
            total_pages=hello.num_pages,
            page_size=hello.page_size,
            incarnation=hello.worker.incarnation,
            step_tokens=int(hello.limits.get("max_batch_tokens", 0)),
            chunk_tokens=_chunk_tokens(hello),
            num_stages=int(hello.limits.get("pipeline_parallel", 1)),
        )
        self._dispatcher.pardon(view.life)
        misfits = self.policy.on_worker_up(view, self._clock())
        log.info("%s is ready at %s", link.name, link.worker.address)
        self._chronicle(f"{link.name} is ready", f"a {link.role} worker at {link.worker.address}")
        self._note_readiness()
        asyncio.get_running_loop().call_soon(self._on_more_room, misfits)

    def on_report(self, link: WorkerLink, report: pb.WorkerReport) -> None:
        now = self._clock()
        self._links.note_report(link, report, now)
        decodes = "decode" in link.phases
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
                request_ids=frozenset(report.request_ids) if decodes else frozenset(),
                step_age_s=report.step_age_ms / 1e3,
                loop_lag_s=report.loop_lag_ms / 1e3,
                peers=self._troubles(report, now),
                costs=step_costs_from_proto(report.step_costs) if report.HasField("step_costs") else None,
                prompt_share=report.prompt_share,
                pages=page_news_from_proto(report),
                is_others=report.is_others,
            ),
            now,
        )
        self._note_readiness()
        if decodes:
            self._dispatcher.move_stalled()
            self._dispatcher.move_unsent(link.name)
        self._moves.on_report(link.name)
        self._dispatcher.pump()

    def _troubles(self, report: pb.WorkerReport, now: float) -> tuple[PeerTrouble, ...]:
        """With decode workers as they are now; not with those that have been started again since."""
        return tuple(
            PeerTrouble(name=p.name, failures=p.failures, reason=p.reason, failed_s=now - p.age_ms / 1e3)
            for p in report.peers
            if p.failures and self._links.is_incarnation(p.name, p.incarnation)
        )

    @property
    def report_gap_s(self) -> float:
        return report_gap_s(len(self._links))

    def has_left(self, link: WorkerLink) -> bool:
        return self.policy.has_left(link.name)

    def on_silent(self, link: WorkerLink, silent_s: float) -> str:
        return self.policy.on_silent(link.name, silent_s)

    def on_heard(self, link: WorkerLink) -> None:
        self.policy.on_heard(link.name)

    def on_lost(self, link: WorkerLink, reason: str, *, is_death: bool) -> None:
        """Forget the worker; what it had is sent elsewhere, waits until there is a worker, or fails."""
        if self._links.get(link.name) is link:  # else it was sent away
            self.metrics.counts["workers_lost"] += 1
            self._chronicle(f"{link.name} is lost", reason)
        self._forget(link, reason, is_death=is_death)
        self._dispatcher.pump()

    def on_hello_again(self, link: WorkerLink, hello: pb.WorkerHello) -> None:
        before, link.hello = link.hello, hello
        if before is not None and before.worker.incarnation == hello.worker.incarnation:
            self.policy.on_chunk_tokens(link.name, _chunk_tokens(hello))
            return
        log.info("%s has another role, and is a %s worker", link.name, hello.role)
        self._chronicle(f"{link.name} has another role", f"it is a {hello.role} worker")
        self._forget(link, "its role has changed", is_death=False, comes_back=True)
        self.on_ready(link, hello)

    def _forget(self, link: WorkerLink, reason: str, *, is_death: bool, comes_back: bool = False) -> None:
        self._links.forget_report(link)
        self._dispatcher.forget_target(link.name)
        now = self._clock()
        retries = self.policy.on_worker_lost(link.name, reason, now, is_death=is_death, comes_back=comes_back)
        if not comes_back:
            self._note_readiness()
        for retry in retries:
            if live := self._dispatcher.get(retry.request_id):  # else it failed with another choice of the same call
                self._dispatcher.cancel_at_workers(live, f"{link.name} is lost", but=link.name)
                self._dispatcher.retry(live, retry)

    def on_outputs(self, link: WorkerLink, outputs: pb.Outputs) -> None:
        """Beginnings first, then tokens, then endings: a token that came with its request's end still counts."""
        now = self._clock()
        endings: list[pb.RequestEvent] = []
        for event in outputs.events:
            if event.HasField("trace"):
                self._on_trace(link, event, now)
            self._note_receipt(link, event)
            if event.kind in ENDINGS:
                endings.append(event)
            elif live := self._dispatcher.get(event.request_id):
                self._on_event(link, live, event, link.clock.to_router_s(event.at_ns, now))
            elif event.kind in BEGINNINGS:
                link.cancel(event.request_id, "it has ended here")  # our cancel overtook it
        columns = outputs.request_ids[:], outputs.indexes[:], outputs.token_ids[:]  # lists, which are read faster
        for request_id, index, token_id in zip(*columns, strict=True):
            self._on_token(link.name, request_id, index, token_id, None, now)
        for token in outputs.tokens:
            self._on_token(link.name, token.request_id, token.index, token.token_id, token, now)
        if (columns[0] or outputs.tokens) and link.name in self.policy.health.steps:
            self.policy.on_stepped(link.name)
        for event in endings:
            if event.cause == pb.FAILURE_CAUSE_PEER:
                asyncio.get_running_loop().call_later(SETTLE_S, self._on_peer_failed, link, event)
            elif live := self._dispatcher.get(event.request_id):
                self._on_ending(link, live, event, now)
        self._dispatcher.pump()

    def _on_token(
        self, worker: str, wire_id: str, index: int, token_id: int, details: pb.TokenOutput | None, now: float
    ) -> None:
        live = self._dispatcher.get(wire_id)
        if live is None:
            self.metrics.counts["stale_tokens"] += 1
            return
        if not live.has_first_token and worker == live.prefill and not live.num_beams:
            self._on_read(live, now)  # which has drawn this token, where the worker decodes, too
        elif live.past.deaths and worker == live.decode:
            self._on_suspect_decoded(live)
        if (ready := live.take(index, token_id, details)) is not None:
            self._deliver(live, ready, now)

    def _on_read(self, live: LiveRequest, now: float) -> None:
        """Its prefill is done."""
        live.has_first_token = True
        self.policy.on_first_token(live.wire_id, now)

    def _on_search(self, live: LiveRequest, now: float) -> None:
        """It begins, which counts as a first token: those that come with its end tell nothing of the time each took."""
        self._on_read(live, now)
        self._note_first_token(live, now)
        live.last_token_s = now

    def _note_first_token(self, live: LiveRequest, now: float) -> None:
        if live.timeline.first_token_s is None:
            live.timeline.first_token(now)
            self.metrics.on_first_token(live.timeline.ttft_s)

    def _on_trace(self, link: WorkerLink, event: pb.RequestEvent, now: float) -> None:
        """Also of a request that has ended: the receipt of a short answer's handoff comes after it."""
        offset_ns = link.clock.offset_ns(event.at_ns, now)
        told = Told(link.name, event.attempt, offset_ns, event.trace.SerializeToString())
        if live := self._dispatcher.get(event.request_id):
            live.notes.tell(told)
        else:
            self.kept.tell(event.request_id, told)

    def _note_receipt(self, link: WorkerLink, event: pb.RequestEvent) -> None:
        """Also of a request that has ended meanwhile. The other side's word of the same handoff counts for nothing."""
        if event.kind in HANDED and event.HasField("receipt"):
            self.metrics.receipts.note(link.name, event.decode_worker, event.receipt)
        elif event.cause == pb.FAILURE_CAUSE_PEER:
            self.metrics.receipts.note_failure(link.name, event.peer)

    def _chronicle(self, what: str, reason: str, *, by: str = "router") -> None:
        self.metrics.chronicle.note(by, what, reason, self._clock())

    def _on_peer_failed(self, link: WorkerLink, event: pb.RequestEvent) -> None:
        """Unless that peer was lost meanwhile, or has the KV: neither is a failure of the request's."""
        if live := self._dispatcher.get(event.request_id):
            self._on_ending(link, live, event, self._clock())
            self._dispatcher.pump()

    def _on_suspect_decoded(self, live: LiveRequest) -> None:
        live.num_decoded += 1
        if self.policy.on_decoded(live.wire_id, live.num_decoded):
            live.past = replace(live.past, deaths=(), is_retried=False)

    def _on_event(self, link: WorkerLink, live: LiveRequest, event: pb.RequestEvent, at_s: float) -> None:
        match event.kind:
            case pb.EVENT_KIND_PREFILL_STARTED:
                live.timeline.enter("prefill", at_s, link.name)
                before = live.recomputed_tokens
                live.on_prefill_started(event.cached_tokens)
                self.metrics.counts["recomputed_tokens"] += live.recomputed_tokens - before
            case pb.EVENT_KIND_FIRST_TOKEN:
                live.timeline.enter("handoff", at_s, link.name)
                if live.num_beams and not live.has_first_token:
                    self._on_search(live, self._clock())
            case pb.EVENT_KIND_HANDOFF_STALLED:
                live.notes.event(at_s, live.attempt, "stalled", link.name, event.reason)
                self._dispatcher.on_stalled(live, event.reason, event.decode_worker or live.decode)
            case pb.EVENT_KIND_REASSIGNED:
                self.policy.on_renamed(live.wire_id)
            case pb.EVENT_KIND_DECODE_READY:
                if live.is_handed_off and link.name != live.decode:
                    self._on_ready_elsewhere(link, live, event, at_s)
                    return
                live.timeline.enter("decode_queue", at_s, link.name)
                if live.receipt is None and event.HasField("receipt"):
                    live.receipt = event.receipt
                if not live.has_moved:
                    self._on_handed_off(live, link.name, event)
            case pb.EVENT_KIND_HANDED_OFF if not live.has_moved:
                if event.HasField("receipt") and not live.has_passed:
                    live.receipt = event.receipt
                self._on_handed_off(live, event.decode_worker or live.decode, event)
            case pb.EVENT_KIND_MOVED if not live.is_handed_off:
                self._on_passed(live, link.name, event, at_s)
            case pb.EVENT_KIND_MOVED:
                self._on_moved(live, link.name, event.decode_worker, event, at_s)
            case pb.EVENT_KIND_MOVE_FAILED if link.name == live.prefill and not live.is_handed_off:
                if event.move == live.last_move:  # else of a move that was given up, while another is under way
                    self._moves.on_passing_failed(live, link.name, event, CAUSES.get(event.cause, ""))
            case pb.EVENT_KIND_MOVE_FAILED:
                self._moves.on_failed(live, link.name, event, CAUSES.get(event.cause, ""))
            case pb.EVENT_KIND_DECODE_STARTED:
                live.timeline.enter("decode", at_s, link.name)

    def _on_handed_off(self, live: LiveRequest, holder: str, event: pb.RequestEvent) -> None:
        """A reassignment can have come too late, and who holds the KV may be lost by now."""
        live.decode, live.is_handed_off = holder, True
        moved, taken_s = self._served.tokens_in(event.receipt.pages), event.receipt.transfer_s
        retry = self.policy.on_handed_off(live.wire_id, holder, self._clock(), num_tokens=moved, taken_s=taken_s)
        if retry is not None:
            self._dispatcher.retry(live, retry)

    def _on_ready_elsewhere(self, link: WorkerLink, live: LiveRequest, event: pb.RequestEvent, at_s: float) -> None:
        if link.name == live.moving_to and event.move == live.last_move:
            self._on_moved(live, link.name, link.name, event, at_s)
        else:  # it was told that it has not moved, or our cancel overtakes it
            link.cancel(live.wire_id, f"it runs at {live.decode}", event.move)

    def _on_passed(self, live: LiveRequest, source: str, event: pb.RequestEvent, at_s: float) -> None:
        if (retry := self._moves.on_passed(live, source, event.decode_worker, event, at_s)) is not None:
            self._dispatcher.cancel_at_workers(live, retry.reason)
            self._dispatcher.retry(live, retry)

    def _on_moved(self, live: LiveRequest, source: str, to: str, event: pb.RequestEvent, at_s: float) -> None:
        if (retry := self._moves.on_moved(live, source, to, event.receipt, at_s)) is not None:
            self._dispatcher.cancel_at_workers(live, retry.reason)
            self._dispatcher.retry(live, retry)

    def _on_ending(self, link: WorkerLink, live: LiveRequest, event: pb.RequestEvent, now: float) -> None:
        if link.name not in (live.prefill, live.decode):
            return  # a decode worker that it was moved away from
        if live.is_handed_off and link.name != live.decode:
            return  # the decode worker has its KV and has said so: what prefill has lost is no more than the receipt
        if event.kind == pb.EVENT_KIND_PREEMPTED:
            self.metrics.counts["preempted"] += 1
            self._dispatcher.retry(live, self.policy.on_preempted(live.wire_id))
            return
        reason = f"{link.name}: {event.reason}" if event.reason else f"{link.name} gave up on it"
        is_passed_on = event.cause == pb.FAILURE_CAUSE_WORKER and event.peer  # that one's own words
        if is_passed_on or event.reason.startswith((f"{link.name} ", f"{link.name}:")):
            reason = event.reason
        self._dispatcher.cancel_at_workers(live, reason, but=link.name)
        is_stopping = event.kind == pb.EVENT_KIND_CANCELLED  # whom we cancel is not here any more
        cause: Cause = "room" if is_stopping else CAUSES.get(event.cause, "")
        retry = self.policy.on_failed(live.wire_id, reason, now, worker=link.name, cause=cause, peer=event.peer)
        self.metrics.counts["circuits_opened"] = self.policy.health.num_opened
        self._dispatcher.retry(live, retry)

    def _deliver(self, live: LiveRequest, ready: ChoiceUpdate, now: float) -> None:
        gap_s = now - live.last_token_s if live.last_token_s else None
        if gap_s is None:
            self._note_first_token(live, now)
        self.metrics.on_tokens(len(live.output_ids) if live.num_beams else len(ready.ids), gap_s)
        live.last_token_s = now
        submission = self._dispatcher.submission_of(live)
        if ready.finish is None:
            submission.put(ready)
        else:
            self._dispatcher.end(live, ready)
        if too_much := self.unread.put(submission, len(ready.ids)):
            most, why = too_much
            most.on_unread(most, why)  # another model's, perhaps

    def _end_unread(self, submission: Submission, why: str) -> None:
        """It may have its last token already, and only its client not."""
        reason = f"its client is too slow: {why}"
        error = RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after_s=RETRY_AFTER_S)
        self._dispatcher.fail(submission, error)
        submission.drop_updates(error)
        self.unread.forget(submission)

    # what is known of it

    @property
    def is_ready(self) -> bool:
        return not self.policy.missing_phase

    @property
    def num_live(self) -> int:
        """Choices that are queued, sent, or wait to be sent again."""
        return self._dispatcher.num_live

    @property
    def num_in_flight(self) -> int:
        return self._dispatcher.num_in_flight

    @property
    def num_submissions(self) -> int:
        return len(self._dispatcher.submissions)

    @property
    def model(self) -> generate_pb2.GetModelInfoResponse | None:
        """What the workers serve; None before the first one came up."""
        return self._served.info

    def records(self, request_id: str) -> list[Record]:
        """Of the newest call of this id, as far as it is known: its choices, those that still run among them."""
        ended = self.kept.choices(request_id)
        submission = self._dispatcher.submissions.get(request_id)
        if submission is None:
            return ended
        came_s, now = submission.choices[0].timeline.arrived_s, self._clock()
        going_on = [running(live, now) for live in submission.choices if live.finish is None]
        ended = [record for record in ended if record.timeline.arrived_s == came_s]
        return sorted([*ended, *going_on], key=lambda record: record.choice)

    def knows(self, worker: str) -> bool:
        return self._links.get(worker) is not None

    def workers(self) -> list[tuple[WorkerLink, pb.WorkerReport | None, float]]:
        """Each link, prefill first, by name, with the worker's last report and its age in seconds."""
        return self._links.with_reports(self._clock())

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def uptime_s(self) -> float:
        return self.now - self._started_s

    def check_invariants(self) -> None:
        self.policy.check_invariants()
        self._dispatcher.check_invariants()

    def _on_more_room(self, misfits: list[GiveUp]) -> None:
        for given_up in misfits:
            if live := self._dispatcher.get(given_up.request_id):
                self._dispatcher.retry(live, given_up)
        self._dispatcher.pump()

    def _note_readiness(self) -> None:
        if self.is_ready != self._was_ready:
            self._was_ready = self.is_ready
            if not self._was_ready:
                self._dispatcher.on_phase_missing()
            if self._on_readiness is not None:
                self._on_readiness()


def _is_waiting(submission: Submission) -> bool:
    """A choice has been sent to no worker yet. One that is sent again has waited before, and is not new."""
    return any(not live.prefill and live.finish is None and live.attempt == 1 for live in submission.choices)


def _chunk_tokens(hello: pb.WorkerHello) -> int:
    return int(hello.limits.get("chunk_tokens", 0))
