"""RouterPolicy decides which workers serve a request, and whether it may wait. It never reads a clock, never asks a
worker a question and never sends anything: its driver tells it what happened and carries out what it returns.

The places a request stands in:

    assign -> Rejected | Unavailable                                   (forgotten)
           -> Queued -> next_assignable -> Assigned -> ... -> finished (forgotten)
              (aside, in a line of its kind's own, where only some workers can serve it)
           -> Assigned(prefill, decode): submitted -> first token -> handed off
                                         held: its first step there waits for next_turn
    failed, preempted, its worker lost -> Resend | GiveUp              (forgotten)
    queued, and a phase without a worker for too long -> GiveUp        (forgotten)

What workers hold is known from reports, which are old when they arrive. So the policy adds what it has sent since:
prompt tokens for each prefill worker (a report says the last Submit it had seen), pages for each decode worker (until
a report lists the request), and takes away what it knows to have ended. Ties break by the worker's name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cluster.router.accounts import Past, Report, RequestShape, RoutedRequest, WorkerView
from cluster.router.decisions import (
    Assigned,
    Cause,
    Decision,
    GiveUp,
    Move,
    Queued,
    Rejected,
    Resend,
    Retry,
    Unavailable,
)
from cluster.router.health.health import Health
from cluster.router.health.isolation import DECODE, PREFILL
from cluster.router.lines import Lines
from cluster.router.moving.moving import REST_S, RETRY_S
from cluster.router.options import RouterOptions
from cluster.router.placing.placing import Unplaced
from cluster.router.retry import (
    FORGIVEN_AFTER_TOKENS,
    blamed,
    retry_failed,
    retry_for_room,
    retry_lost,
    retry_past,
    retry_preempted,
)
from cluster.router.waiting import WaitingQueue
from cluster.router.workers import Workers
from engine.pages.pool import pages_for

LOOK_S = 0.5  # between two looks for those that nobody can serve


class RouterPolicy:
    def __init__(self, options: RouterOptions | None = None) -> None:
        self.options = options or RouterOptions()
        self._workers = Workers(self.options)
        self._requests: dict[str, RoutedRequest] = {}
        self._lines = Lines(self.options.max_queued_requests, self.options.max_queued_tokens)
        self._queue = self._lines.common
        self._unserved_s: dict[frozenset[str], float] = {}  # by whom all of these cannot: since when nobody can
        self._looked_s = -math.inf  # for such

    def take_options(self, options: RouterOptions) -> None:
        """Go by these from now on: what was placed stays so."""
        self.options = options
        self._workers.take_options(options)
        self._lines.set_limits(options.max_queued_requests, options.max_queued_tokens)

    # what is known of it

    @property
    def num_queued(self) -> int:
        return len(self._lines)

    @property
    def num_aside(self) -> int:
        """Of these, those that only some workers can serve."""
        return self._lines.num_aside

    @property
    def queued(self) -> list[str]:
        """The requests that wait."""
        return list(self._lines)

    @property
    def queued_tokens(self) -> int:
        return self._lines.tokens

    def queued_before(self, request_id: str, most: int) -> list[str]:
        """Of the requests that go before one that has just been queued so many."""
        return self._lines.before(request_id, most)

    @property
    def most_free_pages(self) -> int:
        """Of any decode worker that takes new requests: who asks for more cannot be reassigned now."""
        return self._workers.decode.most_free_pages

    @property
    def missing_phase(self) -> str:
        """A phase of requests that no worker computes now; empty if there is none."""
        return self._workers.missing_phase

    @property
    def health(self) -> Health:
        """To be read."""
        return self._workers.health

    @property
    def workers(self) -> Workers:
        """Likewise."""
        return self._workers

    # workers

    def set_members(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """These belong to the cluster, by phase, whether they are ready or not."""
        self._workers.members = {PREFILL: frozenset(prefill), DECODE: frozenset(decode)}

    def has_left(self, name: str) -> bool:
        """A worker drains, nothing of ours is there or on its way, and no request would be sent again for its loss."""
        return self._workers.has_left(name) and not any(self._is_hit(each, name) for each in self._requests.values())

    def on_worker_up(self, view: WorkerView, now: float) -> list[GiveUp]:
        """A worker is ready, and empty of this router's requests. Returns those that waited for one and that it turns
        out to be too small for, forgotten."""
        self._workers.up(view, now)
        if view.incarnation:
            self._pardon(view.life)
        for waiting in [self._requests[i] for i in self._lines.aside()]:
            if view.name in waiting.past.unable:  # it may be able by now
                waiting.past = replace(waiting.past, unable=waiting.past.unable - {view.name})
                waiting.shape = replace(waiting.shape, past=waiting.past)
        return self._give_up_misfits("")

    def on_worker_lost(
        self, name: str, reason: str, now: float, *, is_death: bool = True, comes_back: bool = False
    ) -> list[Retry]:
        """Forget a worker. Returns what becomes of the requests that it fails, forgotten too, in the order they came.

        A prefill worker takes with it what was not handed off; a decode worker all that was assigned to it; the
        largest, what no other could ever hold, or the queue would stand; without a grace, the last of a role the queue.
        `is_death`: it may have died of a request that it computed. Not so one that was about to stop. `comes_back`: in
        another role, by the next call: what waits is judged then.
        """
        account = self._workers.lost(name, now)
        if account is None:
            return []
        reason = f"{name} is lost: {reason}"
        is_death = is_death and not account.report.draining
        if is_death:
            self.health.on_failed(name, reason, now)
        else:
            self.health.steps.on_success(name)
        hit = [r for r in self._requests.values() if self._is_hit(r, name)]
        for request in self._requests.values():
            if request.moving_to == name:
                self._workers.on_stays(request, now + RETRY_S)
            if request.renamed_from == name:
                request.renamed_from = ""
        retries: list[Retry] = []
        for request, past, died_in in self._blame(hit, name if is_death else ""):
            self._forget(request.shape.id)
            retries.append(retry_lost(request.shape.id, past, reason, now, account.view, died_in))
        if comes_back:
            return retries
        retries += self._give_up_misfits(f"{reason}, and ")
        if (phase := self.missing_phase) and not self.options.unavailable_grace_s:
            retries += [self._give_up(i, _not_ready(phase)) for i in self.queued]
        return retries

    def _blame(self, hit: list[RoutedRequest], dead: str) -> list[tuple[RoutedRequest, Past, str]]:
        """For whom the death of this worker counts: see retry.blamed."""
        phases = [_computed_by(request, dead) for request in hit]
        tried = self.health.isolation.tried_at(dead)
        doubted = [r.shape.id for r, phase in zip(hit, phases, strict=True) if phase and r.past.deaths]
        tries_one = not tried.isdisjoint(doubted)
        return [
            (r, *blamed(r.past, phase, is_tried=r.shape.id in tried, tries_one=tries_one, num_doubted=len(doubted)))
            for r, phase in zip(hit, phases, strict=True)
        ]

    def _is_hit(self, request: RoutedRequest, name: str) -> bool:
        if name in (request.decode, request.left):
            return True
        return request.prefill == name and not (request.has_first_token and request.is_handed_off)

    def on_report(self, name: str, report: Report, now: float) -> None:
        """A report arrived; one older than the last is dropped."""
        self._workers.take_report(name, report, now)

    def on_chunk_tokens(self, name: str, tokens: int) -> None:
        """A mixed worker has so many tokens of prompts in a step that decodes from now on."""
        self._workers.set_chunk_tokens(name, tokens)

    def on_silent(self, name: str, silent_s: float) -> str:
        """It has said nothing for so long, its stream being open: it is suspect until it is heard again. Returns why
        it is to be given up; empty: not yet."""
        return self._workers.why_lost(name, silent_s)

    def on_heard(self, name: str) -> None:
        """One that was silent has spoken."""
        self.health.on_heard(name)

    def on_stepped(self, name: str) -> None:
        """A step of its engine brought tokens: told of those that `health.steps` knows."""
        self.health.steps.on_success(name)

    # requests

    def refusal(self, owner: str = "") -> Rejected | Unavailable | None:
        """Why no new request is taken now, whatever its shape, so that nothing is spent on it; None if one may be."""
        if (phase := self.missing_phase) and not self.options.unavailable_grace_s:
            return Unavailable(reason=f"no {phase} worker is ready")
        full = self._queue.why_full(owner, 0)
        return Rejected(reason=full, retry_after_s=self._queue.retry_after_s()) if full else None

    def why_late(self, request_id: str, left_s: float) -> str:
        """Why a request that has just come will not have its first token within `left_s`; empty if it may, or if it is
        not asked for."""
        is_asked = self.options.refuse_late and request_id in self._queue
        empty_s = self._queue.empty_s(request_id) if is_asked else None
        if empty_s is None or empty_s <= left_s:
            return ""
        return (
            f"its deadline is in {left_s:.1f} s, and the prompts that wait at this router take {empty_s:.1f} s at the "
            "rate of late"
        )

    def assign(self, shape: RequestShape, now: float, *, is_resent: bool = False) -> Decision:
        """Workers for a new request, a place in the queue, or why not.

        One that `is_resent` (it had an attempt before) is never rejected for a full queue and goes before all of its
        priority that had none.
        """
        assert shape.id not in self._requests, f"{shape.id} is assigned already"
        absent = self.missing_phase
        if absent and not self.options.unavailable_grace_s:
            return Unavailable(reason=_not_ready(absent))
        shape = self._informed(shape, now, is_resent=is_resent)
        if why := self._workers.placing.why_never(shape, is_resent=is_resent):
            return Unavailable(reason=why) if is_resent else Rejected(reason=why, retry_after_s=None)
        request = RoutedRequest(shape, shape.past, now)
        line = self._lines.for_(shape)
        others = [
            each
            for each in self._lines.in_turn(self._requests)
            if each is not line and self._requests[each.next].shape.priority <= shape.priority
        ]
        if absent:
            why = _not_ready(absent)
        elif line is not None and not line.is_behind(shape.priority, is_resent=is_resent):
            why = f"{len(line)} requests wait before it"
        elif any(self._is_due(each, now) for each in others):
            why = "one that many have gone before waits for pages"
        else:
            placed = self._place(request, now)
            if isinstance(placed, Assigned):
                self._requests[shape.id] = request
                for each in others:
                    each.on_passed(each.next)
                return placed
            why = placed.reason
        if shape.pair is not None:
            return Rejected(reason=why, retry_after_s=self._queue.retry_after_s())
        if not is_resent and (full := self._lines.why_full(shape)):
            return Rejected(reason=full, retry_after_s=self._queue.retry_after_s())
        self._requests[shape.id] = request
        self._lines.add(shape, is_resent=is_resent, is_tried=request.past.died_in == PREFILL)
        return Queued(reason=why)

    def _informed(self, shape: RequestShape, now: float, *, is_resent: bool) -> RequestShape:
        """With those that have said of its like that they cannot serve it, where others may."""
        unable = self.health.inability.of(shape.kind, now) if shape.kind else None
        if not unable or shape.pair is not None:
            return shape
        informed = replace(shape, past=replace(shape.past, unable=shape.past.unable | unable))
        placing = self._workers.placing
        is_never = self._never_able(informed.past, now) or placing.why_never(informed, is_resent=is_resent)
        return shape if is_never else informed

    def _never_able(self, past: Past, now: float) -> bool:
        """Nobody who is there can serve it, nor one who is away: starting, or lost lately."""
        phase = self._workers.placing.why_unable(past.unable)[1]
        if not phase or self._workers.is_awaited(phase):
            return False
        return now - self._workers.last_lost_s(phase) >= self.options.unavailable_grace_s

    def next_assignable(self, now: float) -> Assigned | None:
        """Workers for the next of the queue that may go, which leaves it; None while all must wait. By priority, first
        come first, but that one for which there are no pages lets smaller ones go before it, so many times."""
        if self.missing_phase:
            return None
        passed: list[tuple[WaitingQueue, str]] = []
        for line in self._lines.in_turn(self._requests):
            for request_id in line.in_order():
                request = self._requests[request_id]
                placed = self._place(request, now)
                if isinstance(placed, Assigned):
                    self._lines.take(line, request_id)
                    for its_line, each in passed:
                        its_line.on_passed(each)
                    return placed
                if placed.lacks_pages and line.passed(request_id) >= self.options.max_passes:
                    return None
                if placed.lacks_pages:
                    passed.append((line, request_id))
                elif request.past.died_in != PREFILL:
                    break
        return None

    def _is_due(self, line: WaitingQueue, now: float) -> bool:
        """So many have gone before its first that nobody else does, until there are pages for it."""
        if line.passed(line.next) < self.options.max_passes:
            return False
        placed = self._workers.placing.choose(self._requests[line.next], now)
        return isinstance(placed, Unplaced) and placed.lacks_pages

    def give_up_aside(self, now: float) -> list[GiveUp]:
        """Those that nobody has been able to serve for as long as one waits while a phase has no worker. Looked for so
        often and no more."""
        if now - self._looked_s < LOOK_S:
            return []
        self._looked_s = now
        waiting = [self._requests[i] for i in self._lines.aside()]
        why_unable = self._workers.placing.why_unable
        whys = {each: why_unable(each, is_open=True)[0] for each in {request.past.unable for request in waiting}}
        self._unserved_s = {unable: self._unserved_s.get(unable, now) for unable, why in whys.items() if why}
        return [
            self._give_up(request.shape.id, whys[request.past.unable])
            for request in waiting
            if (since_s := self._unserved_s.get(request.past.unable)) is not None
            and now - max(since_s, request.queued_s) >= self.options.unavailable_grace_s
        ]

    def next_turn(self) -> str | None:
        """A request that its decode worker has held, and computes from now on: tell it to begin. None: nobody's turn
        has come."""
        request_id = self.health.next_turn()
        if request_id is not None:
            request = self._requests[request_id]
            request.is_held = False
            if not request.past.died_in:  # pardoned while it waited
                self.health.isolation.release(DECODE, request.decode, request_id)
        return request_id

    def give_up_waiting(self, request_id: str, now: float) -> GiveUp | None:
        """It has waited in the queue for as long as one does while a phase has no worker; None: it may wait on."""
        absent_s = self._workers.absent_s
        if absent_s is None or request_id not in self._lines:
            return None
        since_s = max(absent_s, self._requests[request_id].queued_s)
        if now < since_s + self.options.unavailable_grace_s:
            return None
        return self._give_up(request_id, _not_ready(self.missing_phase))

    def reassign(self, request_id: str, stalled: str, now: float) -> str | None:
        """Another decode worker that has pages now, to which the request then belongs; None if there is none. Not one
        that has let it wait lately: what it keeps for others it does not tell, and each stands at the end of its queue
        who comes back."""
        request = self._requests.get(request_id)
        if request is None or request.decode != stalled or request.is_handed_off or request.is_passing:
            return None
        if request.decode == request.prefill:  # it reads on there what another has begun, and waits for no handoff
            return None
        request.stalled_s = now if request.stalled_s is None else request.stalled_s
        better = self._workers.placing.elsewhere(request, now) or self._workers.placing.where_read(request, now)
        if better is None:
            return None
        request.stays_away = {**(request.stays_away or {}), stalled: now + REST_S}
        self._workers.move(request, better, now)
        return request.decode

    def unsettled(self) -> list[str]:
        """The decode workers that requests may have to leave; at all others nobody is `leaving`."""
        return self._workers.moving.unsettled()

    def leaving(self, worker: str, now: float) -> list[str]:
        """Of the requests that run there, those that should be decoded elsewhere: `move` them."""
        return self._workers.moving.leaving(worker, self._requests, now)

    def move(self, request_id: str, num_tokens: int, now: float) -> Move | None:
        """To the decode worker that takes this request, of so many tokens, now; None: nobody does, or it may stay."""
        request = self._requests[request_id]
        chosen = self._workers.moving.choose(request, num_tokens, now)
        if chosen is None:
            return None
        target, move = chosen
        self._workers.begin_move(request, target, move.pages)
        return move

    def on_moved(self, request_id: str, to: str, now: float, *, has_left: bool = True) -> Retry | None:
        """That worker has its KV and goes on with it. `has_left`: the one before has said so, after its last token;
        else on_left follows. Returns what becomes of it if the worker is lost by now."""
        request = self._requests.get(request_id)
        if request is None or request.decode == to:
            return None
        if request.moving_to != to:
            self._forget(request_id)
            return retry_lost(request_id, request.past, f"{to} was lost after it had taken the KV", now)
        request.left = "" if has_left else request.decode
        self._workers.on_moved(request, now)
        return None

    def on_left(self, request_id: str, source: str) -> None:
        """All tokens have come that the worker made before it moved."""
        request = self._requests.get(request_id)
        if request is not None and request.left == source:
            request.left = ""

    def on_move_failed(self, request_id: str, now: float, cause: Cause = "") -> None:
        """It goes on where it was."""
        request = self._requests.get(request_id)
        if request is None or not request.moving_to:
            return
        if cause in ("request", "worker"):
            request.refused_by |= {request.moving_to}
        self._workers.on_stays(request, now + (RETRY_S if cause == "room" else REST_S))

    def unread(self, worker: str, now: float) -> list[str]:
        """Of the prompts that were sent there, those that should be read on elsewhere: `pass_on` them."""
        return self._workers.passing.leaving(worker, now)

    def unsent(self, worker: str) -> list[str]:
        """Of the prompts that are read for this decode worker those that may be another's, if it stops."""
        return self._workers.passing.unsent(worker, self._requests)

    def rename(self, request_id: str, now: float) -> str | None:
        """The decode worker whose it is from now on, if its reader has not begun to hand it over: on_renamed follows
        then. None: nobody has pages."""
        request = self._requests[request_id]
        better = self._workers.placing.elsewhere(request, now) or self._workers.placing.at_reader(request, now)
        if better is None:
            return None
        self._workers.rename(request, better, now)
        return request.decode

    def on_renamed(self, request_id: str) -> None:
        """Nothing of it comes to the worker before."""
        if request := self._requests.get(request_id):
            self._workers.end_renaming(request)

    def pass_on(self, request_id: str, now: float) -> Move | None:
        """To the worker that reads and decodes this prompt, which is its decode worker from now on; None: there is
        none, or it may stay."""
        request = self._requests[request_id]
        target = self._workers.passing.choose(request, now)
        if target is None:
            return None
        if target.view.name != request.decode:
            self._workers.move(request, target, now)
        request.is_passing = True
        reason = f"{request.prefill} is stopping"
        return Move(
            request_id=request_id, source=request.prefill, to=request.decode, pages=request.pages, reason=reason
        )

    def on_passed(self, request_id: str, to: str, num_read: int, now: float) -> Retry | None:
        """That worker has what is computed of it, `num_read` tokens, and reads on. Returns what becomes of it if the
        worker is lost by now."""
        request = self._requests.get(request_id)
        if request is None or request.prefill == to or request.has_first_token:
            return None
        account = self._workers.prefill.accounts.get(to)
        if account is None or request.decode != to:
            self._forget(request_id)
            return retry_lost(request_id, request.past, f"{to} was lost after it had taken the prompt", now)
        self._workers.pass_on(request, account, num_read, now)
        return None

    def on_passing_failed(self, request_id: str, decode: str, now: float, cause: Cause = "") -> str:
        """It is read on where it was, for `decode`: perhaps not for the one that it was to be passed to. Returns its
        decode worker from now on."""
        request = self._requests.get(request_id)
        if request is None:
            return decode
        if request.is_passing:
            request.is_passing = False
            if cause == "request":
                request.keeps_reader = True
            else:
                request.rests_until_s = now + (RETRY_S if cause == "room" else REST_S)
            holder = self._workers.decode.accounts.get(decode)
            if holder is not None and decode != request.decode:
                self._workers.move(request, holder, now)
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
        self._workers.prefill.drop(request)
        self._workers.handoff_times.on_read(request)
        self._queue.on_computed(now, request.work)
        if request.past.died_in == PREFILL:
            self._pass(request)

    def on_decoded(self, request_id: str, num_tokens: int) -> bool:
        """Its decode worker has made so many tokens of it: told where a worker has died of it, perhaps. Whether that is
        forgiven now."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        is_many = num_tokens >= FORGIVEN_AFTER_TOKENS
        if request.past.died_in == DECODE and (is_many or not request.past.is_retried):
            self._pass(request)
        if not is_many:
            return False
        request.past = replace(request.past, deaths=(), is_retried=False)
        return True

    def on_generated(self, owner: str, num_tokens: int, *, priority: int = 0, weight: float = 1.0) -> None:
        """So many tokens of an answer of this client's, which has ended: service, as prompts are."""
        self._lines.charge(owner, priority, num_tokens / weight)

    def _pass(self, request: RoutedRequest) -> None:
        """It is past the place where a worker died."""
        self.health.on_passed(request)
        request.past = replace(request.past, died_in="")

    def on_handed_off(
        self, request_id: str, decode: str, now: float, *, num_tokens: int = 0, taken_s: float = 0.0
    ) -> Retry | None:
        """`decode` holds its KV. It may be another than was named last: a reassignment can come too late. Returns what
        becomes of the request if that worker is lost by now. So many tokens' was moved, in so long, by its receipt."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        is_news, request.is_handed_off = not request.is_handed_off, True
        self.health.on_pair_works(request.prefill, decode)
        holder = self._workers.decode.accounts.get(decode)
        if holder is None:
            self._forget(request_id)
            reason = f"{decode} was lost after it had taken the KV"
            return retry_lost(request_id, request.past, reason, now)
        if is_news:
            self._workers.on_handed_off(request, holder, num_tokens, taken_s, now)
        if decode != request.decode:
            self._workers.move(request, holder, now)
            request.is_held |= request.past.died_in == DECODE
        if request.is_held:
            self.health.isolation.await_turn(decode, request_id)
        return None

    def on_finished(self, request_id: str) -> None:
        self._forget(request_id)

    def on_cancelled(self, request_id: str) -> None:
        self._forget(request_id)

    def on_failed(
        self, request_id: str, reason: str, now: float, *, worker: str = "", cause: Cause = "", peer: str = ""
    ) -> Retry:
        """`worker` gave up on it, and says whose fault it is.

        Where it does not say: after the first token it is the handoff or the decode worker that failed, and prefill has
        the prompt cached.
        """
        request = self._requests[request_id]
        self._forget(request_id)
        if cause == "request":
            return GiveUp(request_id=request_id, reason=reason, code="INVALID_ARGUMENT")
        if cause == "worker" and (peer or worker) not in request.past.unable:
            self.health.inability.note(request.shape.kind, peer or worker, now)
            return self._retry_past(request, reason, peer or worker, now)
        avoid = {request.decode} if request.has_first_token else {request.prefill, request.decode}
        if cause == "step":
            self.health.on_failed(worker, reason, now)
            avoid = {worker}
        elif request.shape.pair is None and (
            cause == "room" or self._workers.is_stopping(peer) or self.health.is_stuck(peer)
        ):
            return retry_for_room(request_id, request.past, reason, frozenset((peer or worker,)))
        elif cause == "peer" and self._workers.is_lost(peer):  # of a prompt that had been handed to another meanwhile
            return retry_lost(request_id, request.past, reason, now)
        elif cause == "peer":
            prefill, decode = (worker, peer) if worker == request.prefill else (peer, worker)
            avoid = {decode}
            self._workers.on_pair_failed(prefill, decode, reason, now)
        if request.shape.pair is not None:
            return GiveUp(request_id=request_id, reason=reason)
        return retry_failed(request_id, request.past, reason, frozenset(avoid), self.options.max_attempts)

    def _retry_past(self, request: RoutedRequest, reason: str, unable: str, now: float) -> Retry:
        """By the workers that have not said that they cannot serve it, if there are any."""
        retry = retry_past(request.shape.id, request.past, reason, unable)
        if request.shape.pair is not None or self._never_able(retry.past, now):
            return GiveUp(request_id=request.shape.id, reason=reason, code="INVALID_ARGUMENT")
        return retry

    def on_preempted(self, request_id: str) -> Resend:
        """The decode worker gave its pages to others."""
        request = self._requests[request_id]
        self._forget(request_id)
        return retry_preempted(request_id, request.past, f"{request.decode} preempted it")

    # inside

    def _place(self, request: RoutedRequest, now: float) -> Assigned | Unplaced:
        """Choose both workers and note what goes to them, or say why that is not possible now."""
        shape = request.shape
        placed = self._workers.placing.choose(request, now)
        if isinstance(placed, Unplaced):
            return placed
        seen = placed.seen(shape)
        prefill, decode = placed.prefill, placed.decode
        request.prefill, request.decode = prefill.view.name, decode.view.name
        request.work = shape.prompt_len - seen.cached_len
        request.pages = pages_for(shape.held_len(shape.prompt_len + 1), decode.view.page_size)
        request.is_held = request.past.died_in == DECODE
        self._workers.take(request, placed, now)
        return Assigned(
            request_id=shape.id,
            prefill=request.prefill,
            decode=request.decode,
            seen=seen,
            is_held=request.is_held,
        )

    def _pardon(self, life: str) -> None:
        """That worker has not died."""
        for request in self._requests.values():
            if life not in request.past.deaths:
                continue
            pardoned = request.past.pardoned(life)
            is_free = bool(request.past.died_in) and not pardoned.died_in
            if is_free and not self._lines.stand_again(request.shape):
                self.health.on_passed(request)
            request.past = pardoned

    def _give_up_misfits(self, why: str) -> list[GiveUp]:
        """Of those that wait, what no worker that is there could ever hold."""
        misfits = [(i, self._workers.placing.why_never(self._requests[i].shape)) for i in self.queued]
        return [self._give_up(i, f"{why}{never}") for i, never in misfits if never]

    def _give_up(self, request_id: str, reason: str) -> GiveUp:
        self._forget(request_id)
        return GiveUp(request_id=request_id, reason=f"{reason}; try again later")

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and not self._lines.drop(request_id):
            self._workers.release(request)

    def check_invariants(self) -> None:
        """Assert that every request is in exactly one place and that every sum is the sum of its parts."""
        self._lines.check_invariants(self._requests)
        for request_id, request in self._requests.items():
            is_assigned = bool(request.prefill and request.decode)
            waits = request_id in self._lines
            assert is_assigned + waits == 1, f"{request_id} is in two places, or in none"
        self._workers.check_invariants(self._requests)


def _computed_by(request: RoutedRequest, name: str) -> str:
    """The phase of the request that the worker may have been computing; empty if it cannot have. What it has said of
    that may be lost with it: all that was sent to it counts, and is not known to be done there."""
    if request.prefill == name and not (request.has_first_token or request.is_handed_off):
        return PREFILL
    if request.decode == name and not request.is_held and (request.has_first_token or request.is_handed_off):
        return DECODE
    return ""


def _not_ready(phase: str) -> str:
    return f"no {phase} worker is ready"
