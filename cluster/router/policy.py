"""RouterPolicy decides which workers serve a request, and whether it may wait. It never reads a clock, never asks a
worker a question and never sends anything: its driver tells it what happened and carries out what it returns.

The places a request stands in:

    assign -> Rejected | Unavailable                                   (forgotten)
           -> Queued -> next_assignable -> Assigned -> ... -> finished (forgotten)
           -> Assigned(prefill, decode): submitted -> first token -> handed off
    failed, preempted, its worker lost -> Resend | GiveUp              (forgotten)

What workers hold is known from reports, which are old when they arrive. So the policy adds what it has sent since:
prompt tokens for each prefill worker (a report says the last Submit it had seen), pages for each decode worker (until
a report lists the request), and takes away what it knows to have ended. Ties break by the worker's name.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.router.accounts import DecodeAccount, PrefillAccount, Report, RequestShape, RoutedRequest, WorkerView
from cluster.router.candidates.decode import DecodeCandidates
from cluster.router.candidates.prefill import PrefillCandidates
from cluster.router.decisions import Assigned, Decision, Queued, Rejected, Resend, Retry, Unavailable
from cluster.router.retry import retry_failed, retry_preempted
from cluster.router.waiting import WaitingQueue
from engine.knobs import check, knob
from engine.pages.pool import pages_for
from worker.roles import kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    max_queued_requests: int = knob(
        1024, "that wait in one router; more are refused with RESOURCE_EXHAUSTED", unit="requests", ge=1
    )
    max_queued_tokens: int = knob(1_048_576, "of their prompts, likewise", unit="tokens", ge=1)
    max_backlog_tokens: int = knob(
        32_768, "of prompts sent to one prefill worker and not computed; more wait in the router", unit="tokens", ge=1
    )
    overcommit: float = knob(
        0.25,
        "of a decode worker that may be promised beyond those free; their KV waits at prefill",
        unit="share of pages",
        ge=0,
    )
    dead_after_s: float = knob(2.0, "a worker that says nothing for so long is lost", unit="s", gt=0, le=86_400)
    max_attempts: int = knob(
        4, "that may fail before the request does; a preemption is no failure", unit="attempts", ge=1
    )
    unavailable_grace_s: float = knob(
        0.0, "how long a request waits while a role has no worker at all; 0: it fails at once", unit="s", ge=0
    )

    def __post_init__(self) -> None:
        check(self)


class RouterPolicy:
    def __init__(self, options: RouterOptions | None = None) -> None:
        self.options = options or RouterOptions()
        self._prefill = PrefillCandidates()
        self._decode = DecodeCandidates(self.options.overcommit)
        self._requests: dict[str, RoutedRequest] = {}
        self._queue = WaitingQueue(self.options.max_queued_requests, self.options.max_queued_tokens)

    # what is known of it

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        return self._queue.tokens

    @property
    def most_free_pages(self) -> int:
        """Of any decode worker that takes new requests: who asks for more cannot be reassigned now."""
        return self._decode.most_free_pages

    @property
    def missing_phase(self) -> str:
        """A phase of requests that no worker computes now; empty if there is none."""
        if not self._prefill.is_open:
            return "prefill"
        return "" if self._decode.is_open else "decode"

    # workers

    def on_worker_up(self, view: WorkerView, now: float) -> None:
        """A worker is ready, and empty of this router's requests."""
        is_known = view.name in self._prefill.accounts or view.name in self._decode.accounts
        assert not is_known, f"{view.name} is up already"
        empty = Report(made_s=now, available_pages=view.total_pages)
        phases = kind_of(view.role).phases
        if "prefill" in phases:
            self._prefill.up(PrefillAccount(view, empty))
        if "decode" in phases:
            self._decode.up(DecodeAccount(view, empty))

    def on_worker_lost(self, name: str, reason: str) -> list[Retry]:
        """Forget a worker. Returns what becomes of the requests that it fails, forgotten too, in the order they came.

        A prefill worker takes with it what was not handed off; a decode worker all that was assigned to it; the last
        worker of a role, what waits in the queue; the largest, what no other could ever hold, or the queue would stand.
        """
        was_prefill = self._prefill.lost(name) is not None
        was_decode = self._decode.lost(name) is not None
        if not was_prefill and not was_decode:
            return []
        affected = [r.shape.id for r in self._requests.values() if self._is_hit(r, name)]
        is_role_gone = not self._prefill.accounts or not self._decode.accounts
        affected += [i for i in self._queue if is_role_gone or self._never_fits(self._requests[i].shape)]
        reason = f"{name} is lost: {reason}"
        return [self._retry(self._requests[request_id], reason, frozenset()) for request_id in affected]

    def _is_hit(self, request: RoutedRequest, name: str) -> bool:
        if request.decode == name:
            return True
        return request.prefill == name and not (request.has_first_token and request.is_handed_off)

    def on_report(self, name: str, report: Report, now: float) -> None:
        """A report arrived; one older than the last is dropped."""
        if prefill := self._prefill.accounts.get(name):
            self._prefill.take_report(prefill, report)
        if decode := self._decode.accounts.get(name):
            self._decode.take_report(decode, report)

    # requests

    def refusal(self) -> Rejected | Unavailable | None:
        """Why no new request is taken now, whatever its shape, so that nothing is spent on it; None if one may be."""
        if (phase := self.missing_phase) and not self.options.unavailable_grace_s:
            return Unavailable(reason=f"no {phase} worker is ready")
        full = self._queue.why_full(RequestShape(id="", prompt_len=0, max_tokens=0))
        return Rejected(reason=full, retry_after_s=self._queue.retry_after_s()) if full else None

    def assign(self, shape: RequestShape, now: float, *, is_resent: bool = False) -> Decision:
        """Workers for a new request, a place in the queue, or why not.

        One that `is_resent` (its first attempt failed) is never rejected for a full queue and goes to its front.
        """
        assert shape.id not in self._requests, f"{shape.id} is assigned already"
        if phase := self.missing_phase:
            return Unavailable(reason=f"no {phase} worker is ready", wait_s=self.options.unavailable_grace_s)
        if why := self._never_fits(shape):
            return Rejected(reason=why, retry_after_s=None)
        request = RoutedRequest(shape)
        if is_resent or not self._queue:
            placed = self._place(request)
            if isinstance(placed, Assigned):
                self._requests[shape.id] = request
                return placed
            why = placed
        else:
            why = f"{len(self._queue)} requests wait before it"
        if not is_resent and (full := self._queue.why_full(shape)):
            return Rejected(reason=full, retry_after_s=self._queue.retry_after_s())
        self._requests[shape.id] = request
        self._queue.add(shape, is_resent=is_resent)
        return Queued(reason=why)

    def next_assignable(self, now: float) -> Assigned | None:
        """Workers for the first request of the queue, which leaves it; None while it must wait. First come first."""
        if not self._queue:
            return None
        request = self._requests[self._queue.first]
        placed = self._place(request)
        if not isinstance(placed, Assigned):
            return None
        self._queue.drop(request.shape.id)
        return placed

    def reassign(self, request_id: str, stalled: str) -> str | None:
        """Another decode worker that has pages now, to which the request then belongs; None if there is none."""
        request = self._requests.get(request_id)
        if request is None or request.decode != stalled or request.is_handed_off:
            return None
        better = self._decode.with_pages(request.shape, request.pages, but=stalled)
        if better is None:
            return None
        self._move(request, better)
        return request.decode

    def on_submitted(self, request_id: str, seq: int) -> None:
        """It was sent to its prefill worker as that stream's Submit number `seq`."""
        if request := self._requests.get(request_id):
            request.seq = seq

    def on_first_token(self, request_id: str, now: float) -> None:
        """Its prefill is done and its token has arrived."""
        request = self._requests.get(request_id)
        if request is None or request.has_first_token:
            return
        request.has_first_token = True
        self._prefill.drop(request)
        self._queue.on_computed(now, request.work)

    def on_handed_off(self, request_id: str, decode: str) -> Retry | None:
        """`decode` holds its KV. It may be another than was named last: a reassignment can come too late. Returns what
        becomes of the request if that worker is lost by now."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.is_handed_off = True
        holder = self._decode.accounts.get(decode)
        if holder is None:
            return self._retry(request, f"{decode} was lost after it had taken the KV", frozenset())
        if decode != request.decode:
            self._move(request, holder)
        return None

    def on_finished(self, request_id: str) -> None:
        self._forget(request_id)

    def on_cancelled(self, request_id: str) -> None:
        self._forget(request_id)

    def on_failed(self, request_id: str, reason: str) -> Retry:
        """The handoff failed, or a worker gave up on it.

        After the first token it is the handoff or the decode worker that failed, and prefill has the prompt cached.
        """
        request = self._requests[request_id]
        avoid = {request.decode} if request.has_first_token else {request.prefill, request.decode}
        return self._retry(request, reason, frozenset(avoid))

    def on_preempted(self, request_id: str) -> Resend:
        """The decode worker gave its pages to others."""
        request = self._requests[request_id]
        self._forget(request_id)
        return retry_preempted(request.shape, f"{request.decode} preempted it")

    # inside

    def _place(self, request: RoutedRequest) -> Assigned | str:
        """Choose both workers and note what goes to them, or say why neither choice is possible now."""
        shape = request.shape
        prefill = self._choose_prefill(shape)
        if isinstance(prefill, str):
            return prefill
        decode = self._decode.best(shape)
        if isinstance(decode, str):
            return decode
        request.prefill, request.decode = prefill.view.name, decode.view.name
        cached = prefill.cached_len(shape)
        reason = (
            f"{request.prefill}: {prefill.queued_tokens} prompt tokens queued, {cached} of {shape.prompt_len} cached; "
            f"{request.decode}: {decode.free_pages} of {decode.view.total_pages} pages free, batch {decode.batch}"
        )
        request.work = shape.prompt_len - cached
        request.pages = pages_for(shape.prompt_len + 1, decode.view.page_size)
        self._prefill.add(prefill, request)
        self._decode.promise(decode, request)
        return Assigned(request_id=shape.id, prefill=request.prefill, decode=request.decode, reason=reason)

    def _choose_prefill(self, shape: RequestShape) -> PrefillAccount | str:
        best = self._prefill.best(shape)
        if best is None:
            return "no prefill worker that takes new requests has so many pages"
        queued = best.queued_tokens
        if queued and queued + shape.prompt_len - best.cached_len(shape) > self.options.max_backlog_tokens:
            return f"{best.view.name}: {queued} prompt tokens queued"
        return best

    def _never_fits(self, shape: RequestShape) -> str:
        """Why no worker could ever serve it, even alone; empty if one could."""
        most = self._decode.most_tokens
        if shape.prompt_len + shape.max_tokens > most:
            return (
                f"prompt and max_tokens together are {shape.prompt_len + shape.max_tokens} tokens; "
                f"the largest decode worker holds {most}, so give fewer"
            )
        most = self._prefill.most_tokens
        if shape.prompt_len > most:
            return f"the prompt is {shape.prompt_len} tokens; the largest prefill worker holds {most}, so give fewer"
        return ""

    def _retry(self, request: RoutedRequest, reason: str, avoid: frozenset[str]) -> Retry:
        self._forget(request.shape.id)
        return retry_failed(request.shape, reason, avoid, self.options.max_attempts)

    def _move(self, request: RoutedRequest, to: DecodeAccount) -> None:
        self._decode.drop(request)
        self._decode.promise(to, request)
        request.decode = to.view.name

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None or self._queue.drop(request_id):
            return
        self._prefill.drop(request)
        self._decode.drop(request)

    def check_invariants(self) -> None:
        """Assert that every request is in exactly one place and that every sum is the sum of its parts."""
        assert self._queue.tokens == sum(self._requests[i].shape.prompt_len for i in self._queue)
        for request_id, request in self._requests.items():
            is_assigned = bool(request.prefill and request.decode)
            assert is_assigned != (request_id in self._queue), f"{request_id} is in two places, or in none"
            if is_assigned:
                at = self._decode.accounts[request.decode]
                assert (request_id in at.promised) != (request_id in at.listed), f"{request_id} has lost its pages"
        self._prefill.check_invariants()
        for p in self._prefill.accounts.values():
            assert all(self._requests.get(i) is r and not r.has_first_token for i, r in p.waiting.items())
        self._decode.check_invariants()
        for d in self._decode.accounts.values():
            for request_id in (*d.promised, *d.listed):
                assert self._requests[request_id].decode == d.view.name, f"{request_id} is not at {d.view.name}"
