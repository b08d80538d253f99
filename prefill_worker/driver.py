"""PrefillRole carries out what a PrefillPolicy decides: prompts in, first tokens and KV out.

    submit --> [connecting to the decode worker] --> policy --> step --> first token to the router
                                                       \\-- layer groups to the decode worker, as computed --> commit

While a step runs, every layer group it completes is put into the pages of the decode worker by the pair's own thread
(kv_transfer.prefill_side). What fails, fails for one request: the router is told, with a reason and whether
another attempt may do better, and the pages come back once neither the engine nor a handoff reads them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.adapters.files import AdapterError
from engine.pages.mass import PageMass
from engine.pages.pool import PageHash, pages_for
from engine.types import Chunk, InvalidRequest, OnLayer, SampledToken, Step, finish_reason
from kv_transfer.lease import Denied
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.generate_pb2 import HandoffReceipt
from prefill_worker.handoffs import Handoffs, HeldPrompt, SegmentPlan
from prefill_worker.passing import Passing
from prefill_worker.policy import ChunkPlan, PrefillBatch, PrefillPolicy
from worker.convert import failure_cause, logprobs_to_proto, token_output
from worker.peers.peers import Peers, Undelivered
from worker.requests import HeldRequest, kept_of, read_request, root_of
from worker.role import RoleHost
from worker.steps.slow import StepClock
from worker.streams.router_link import RouterLink

log = logging.getLogger(__name__)

SCORED_CHUNK = 64  # tokens, for all of which there are logits at once


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch whose handoffs are open."""

    plan: PrefillBatch
    step: Step


class DecodesBeside(Protocol):
    """What decodes in the same pages."""

    def expect(self, request: HeldRequest, *, stays: bool) -> Denied | None:
        """A prompt has come. Or why it may not."""

    def stay(self, request: HeldRequest) -> Denied | None:
        """One that was to leave, and is read, shall be adopted. Or why it may not."""

    def adopt(
        self,
        request: HeldRequest,
        token_id: int,
        pages: Sequence[int],
        hashes: Sequence[PageHash],
        num_dropped: int = 0,
    ) -> HandoffReceipt:
        """One that stays is computed, in these pages; `token_id` is its first token. `num_dropped`: pages of it that
        are not kept."""


class PrefillRole:
    receiver = None

    def __init__(
        self,
        host: RoleHost,
        make_policy: Callable[..., PrefillPolicy] = PrefillPolicy,
        beside: DecodesBeside | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`make_policy`: called with the worker's page pool and the options of the policy."""
        self._host = host
        self._beside = beside
        self._name = host.options.name
        self._eos_token_ids = host.engine.info.eos_token_ids
        self.policy = make_policy(host.pool, host.options.policy)
        self.handoffs = Handoffs(host, self.policy, peers or Peers(host), beside.stay if beside else None)
        self.passing = Passing(host, self.policy, self.handoffs, on_passed=self._end, on_doubt=self._end_undelivered)
        self.requests: dict[str, HeldPrompt] = {}
        self._steps = StepClock(host.engine.num_stages)

    @property
    def max_batch(self) -> int:
        return self.policy.options.max_batch_tokens

    # What routers send

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None:
        state = submit.request
        if self._host.is_stopping or state.request_id in self.requests:
            why = "is stopping" if self._host.is_stopping else f"has {state.request_id} already"
            self._refuse(link, state, f"{self._name} {why}", pb.FAILURE_CAUSE_ROOM)
            return
        params, tokens = read_request(state, self._host.engine.info)
        pool = self._host.pool
        if pages_for(len(tokens), pool.page_size) > pool.num_pages:
            raise InvalidRequest(f"the prompt of {len(tokens)} tokens needs more pages than exist")
        if why := self._why_kept_whole(state):
            is_cut = self._host.engine.num_stages > 1  # else every worker's model is so
            self._refuse(link, state, why, pb.FAILURE_CAUSE_WORKER if is_cut else pb.FAILURE_CAUSE_REQUEST)
            return
        request = HeldPrompt(
            state=state,
            link=link,
            params=params,
            tokens=tokens,
            decode=submit.decode,
            rope=self._host.engine.info.rope,
        )
        self._keep(request)
        self.requests[request.id] = request
        request.stays = self._beside is not None and request.decode.name == self._name
        needs_pair = request.new_tokens_left > 1 and not request.stays
        is_connected = not needs_pair or self.handoffs.peers.open_pair(request.decode) is not None
        if request.adapter is not None:
            request.weights = self._host.engine.adapters.begin(request.adapter)
        is_loaded = request.weights is None or (request.weights.done() and request.weights.exception() is None)
        if is_connected and is_loaded:
            self._enqueue(request)
        else:
            request.waiting = self.handoffs.spawn(self._enqueue_when_ready(request, needs_pair=needs_pair))

    def _why_kept_whole(self, state: pb.RequestState) -> str:
        """Why all of its KV must be kept, where it asks for less; empty if it need not be."""
        if not (state.kv_policy.window_tokens and self._host.engine.why_kept_whole):
            return ""
        model, why = self._host.engine.info.architecture, self._host.engine.why_kept_whole
        return f"kv_policy is given, but {model} {why}; leave it out"

    def _keep(self, request: HeldPrompt) -> None:
        """Note what it keeps of its KV."""
        if not request.state.kv_policy.window_tokens:
            return
        page_size = self._host.pool.page_size
        request.kept = kept_of(request.state, page_size)
        if request.kept is None:
            request.mass = PageMass(page_size)

    def on_begin(self, request_id: str) -> None:
        """It holds none."""

    def on_move(self, move: pb.Move) -> None:
        request = self.requests.get(move.request_id)
        if request is not None:  # else its end is on its way to the router
            self.passing.begin(request, move.decode, move.number)

    def on_cancel(self, cancel: pb.Cancel) -> None:
        request = self.requests.get(cancel.request_id)
        if request is None or request.is_cancelled:
            return
        request.is_cancelled = True
        self._host.counters["cancelled"] += 1
        if request.waiting is not None:
            request.waiting.cancel()  # what it waits for may never come, and a change of role waits for it
        self.handoffs.spawn(self._cancel(request, cancel.reason))

    def on_reassign(self, reassign: pb.Reassign) -> None:
        request = self.requests.get(reassign.request_id)
        if request is not None:
            self.handoffs.reassign(request, reassign.decode)

    def report(self) -> pb.WorkerReport:
        return pb.WorkerReport(
            num_waiting=self.policy.num_waiting,
            num_running=self.policy.num_running,
            waiting_tokens=self.policy.waiting_tokens,
            available_pages=self._host.pool.usage.available,
            request_ids=list(self.requests),
            peers=self.handoffs.peers.report(),
        )

    def check_invariants(self) -> None:
        self.policy.check_invariants()

    async def stop_serving(self) -> None:
        """It serves nothing to other workers."""

    async def close(self) -> None:
        await self.handoffs.settle()
        await self.handoffs.peers.close()

    def _refuse(self, link: RouterLink, state: pb.RequestState, reason: str, cause: pb.FailureCause) -> None:
        link.event(state, pb.EVENT_KIND_FAILED, reason=reason, cause=cause)
        self._host.streams.flush()

    def _tell_undelivered(self, request: HeldPrompt, failure: Undelivered) -> None:
        self._host.counters["handoffs_failed"] += 1
        request.link.event(
            request.state,
            pb.EVENT_KIND_FAILED,
            reason=failure.reason,
            cause=failure.cause,
            peer=failure.peer,
            trace=request.told(),
        )

    async def _enqueue_when_ready(self, request: HeldPrompt, *, needs_pair: bool) -> None:
        failure = await self._load_adapter(request)
        if failure is None and needs_pair:
            failure = await self.handoffs.wait_connected(request)
        if failure is None and not request.is_cancelled:
            self._enqueue(request)
            return
        self.requests.pop(request.id, None)
        if failure is not None and not request.is_cancelled:
            self._tell_undelivered(request, failure)
            self._host.streams.flush()

    async def _load_adapter(self, request: HeldPrompt) -> Undelivered | None:
        """Why it cannot be had."""
        try:
            if request.weights is not None:
                await asyncio.shield(asyncio.wrap_future(request.weights))
        except AdapterError as error:
            return Undelivered(str(error), pb.FAILURE_CAUSE_WORKER, "")
        except Exception as error:  # memory, say: it must fail one request, not leave it waiting
            log.exception("the adapter of %s could not be loaded", request.id)
            return Undelivered(f"its adapter: {type(error).__name__}: {error}", pb.FAILURE_CAUSE_STEP, "")
        return None

    def _enqueue(self, request: HeldPrompt) -> None:
        if self._beside is not None and (denied := self._beside.expect(request, stays=request.stays)):
            del self.requests[request.id]
            cause = pb.FAILURE_CAUSE_ROOM if denied.retryable else pb.FAILURE_CAUSE_REQUEST
            self._refuse(request.link, request.state, denied.reason, cause)
            return
        is_scored = request.params.prompt_logprobs is not None
        is_whole = is_scored or request.mass is not None  # all of it must be read
        # behind the prompt KV is another request's only where that keeps as much
        shared = request.tokens if request.kept is None else request.tokens[: request.prompt_len]
        hashes = () if is_whole else self._host.page_hashes(shared, root_of(request.state, request.rope))
        chunk = SCORED_CHUNK if is_scored else len(request.tokens)
        self.policy.add(request.id, len(request.tokens), hashes, request.state.priority, longest_chunk=chunk)
        self._host.wake()

    def take_over(
        self,
        request: HeldPrompt,
        pages: Sequence[int],
        hashes: Sequence[PageHash],
        computed_len: int,
        *,
        num_read: int,
    ) -> None:
        """Read on, and let stay, what another worker has read `num_read` tokens of. KV is here of `computed_len`."""
        request.stays = True
        self.requests[request.id] = request
        self.policy.take_over(
            request.id,
            len(request.tokens),
            hashes,
            pages,
            computed_len,
            has_begun=num_read > 0,
            priority=request.state.priority,
        )
        self._host.counters["prompts_taken_over"] += 1
        self._host.wake()

    # Steps

    def next_batch(self, most_tokens: int | None = None) -> PreparedBatch | None:
        """`most_tokens`: what others leave of the step."""
        plan = self.policy.next_batch(most_tokens)
        return self._prepare(plan) if plan is not None else None

    @property
    def waits_for_tokens(self) -> bool:
        """What a step's attention gave each page is added up before the next one's: of those that keep the heaviest."""
        return any(request.mass is not None for request in self.requests.values())

    def step_of(self, batch: PreparedBatch) -> Step:
        return batch.step

    def _prepare(self, plan: PrefillBatch) -> PreparedBatch:
        chunks: list[Chunk] = []
        segments: dict[str, SegmentPlan] = {}  # by request
        for chunk in plan.chunks:
            request = self.requests[chunk.request_id]
            if chunk.is_first:
                self._begin(request)
            chunks.append(self._chunk(request, chunk))
            if request.handoff is not None:
                segments[request.id] = self.handoffs.plan_segment(request, request.handoff, chunk)
        self._host.streams.flush()

        def on_layer_of(request_id: str) -> OnLayer | None:
            return self.handoffs.on_layer([segments[request_id]] if request_id in segments else [])

        on_layer = self.handoffs.on_layer(list(segments.values()))
        self._steps.begin()
        return PreparedBatch(plan, Step(chunks=chunks, on_layer=on_layer, on_layer_of=on_layer_of))

    def _begin(self, request: HeldPrompt) -> None:
        cached_tokens = self.policy.cached_len_of(request.id)
        request.link.event(request.state, pb.EVENT_KIND_PREFILL_STARTED, cached_tokens=cached_tokens)
        is_known = request.mass is None  # what is kept; else that follows when all is read
        is_open = request.handoff is not None  # its passing on was given up, and it goes where it was to go
        if request.new_tokens_left > 1 and not (request.stays or request.is_cancelled or is_open) and is_known:
            self.handoffs.open(request)

    def _chunk(self, request: HeldPrompt, plan: ChunkPlan) -> Chunk:
        end = plan.start + plan.length
        return Chunk(
            request_id=request.id,
            token_ids=request.tokens[plan.start : end],
            start=plan.start,
            block_table=self.policy.pages_of(request.id)[: pages_for(end, self._host.pool.page_size)],
            sample=request.sample_spec(len(request.tokens), self._host.engine) if plan.is_last else None,
            scores=request.score_specs(plan.start, end),
            adapter=request.adapter,
            kept=request.kept,
            mass=request.mass,
            rope_len=request.rope_len,
        )

    def on_step(self, batch: PreparedBatch, tokens: Sequence[SampledToken]) -> None:
        took, chunks = self._steps.end(), batch.plan.chunks
        computed_ns = took.end_ns
        for chunk in chunks:
            if (request := self.requests.get(chunk.request_id)) is not None:
                request.trace.chunk(took, chunk.length, len(chunks))
                if request.mass is not None:
                    request.mass.settle()
        self._host.counters["prompt_tokens"] += batch.plan.num_tokens
        for token in tokens:
            self._on_token(token, computed_ns)
        self.policy.on_batch_done(batch.plan)
        for chunk in chunks:
            self._forget_if_gone(chunk.request_id)
        self.passing.on_step()

    def _on_token(self, token: SampledToken, computed_ns: int) -> None:
        if token.error:
            self._host.counters["chunks_failed"] += 1
            self.policy.on_failed(token.request_id)  # cancelled or not: nobody may find these pages in the cache
        request = self.requests.get(token.request_id)
        if request is None or request.is_cancelled:
            return
        if token.error:
            self._fail(request, token)
        elif token.is_given and token.logprob is not None:
            request.scores.append(logprobs_to_proto(token.logprob, token.top_logprobs))
        else:
            self._on_first_token(request, token, computed_ns)

    def _on_first_token(self, request: HeldPrompt, token: SampledToken, computed_ns: int) -> None:
        if request.num_beams:
            self._begin_search(request, computed_ns)
            return
        index = request.num_outputs
        reason = finish_reason(request.params, token.token_id, index + 1, self._eos_token_ids)
        first = pb.EVENT_KIND_FIRST_TOKEN
        request.link.event(request.state, first, at_ns=computed_ns, trace=request.trace.told())
        output = token_output(request.state, index, token, reason)
        if request.mass is not None:
            self._choose_kept(request, request.mass)
            output.heavy_pages.extend(request.state.heavy_pages)
        output.prompt_logprobs.extend(request.scores)
        request.link.token(output)
        self._host.counters["generated_tokens"] += 1
        if reason is None and request.must_begin_anew(len(request.tokens) + 1):
            self._host.counters["begun_anew"] += 1
            request.link.event(request.state, pb.EVENT_KIND_PREEMPTED, trace=request.told())
            request.is_cancelled = True
            self.handoffs.spawn(self._let_go(request, "its KV is computed anew"))
        elif reason is None:
            self._go_on(request, token.token_id, computed_ns)
        else:
            request.is_cancelled = True
            self.handoffs.spawn(self._let_go(request, f"finished: {reason}"))

    def _choose_kept(self, request: HeldPrompt, mass: PageMass) -> None:
        page_size = self._host.pool.page_size
        request.state.heavy_pages.extend(mass.heaviest(pages_for(request.state.kv_policy.heavy_tokens, page_size)))
        request.kept, request.mass = kept_of(request.state, page_size), None

    def _begin_search(self, request: HeldPrompt, computed_ns: int) -> None:
        """Its prompt is read but for the last token, which its first step computes: nothing was drawn."""
        first = pb.EVENT_KIND_FIRST_TOKEN
        request.link.event(request.state, first, at_ns=computed_ns, trace=request.trace.told())
        self._go_on(request, request.state.prompt_ids[-1], computed_ns)

    def _go_on(self, request: HeldPrompt, token_id: int, computed_ns: int) -> None:
        """To be decoded, from this token on."""
        if request.stays:
            self._stay(request, token_id)
        else:
            request.is_committing = True
            self.handoffs.spawn(self._hand_off(request, token_id, computed_ns))

    # Ends

    def _stay(self, request: HeldPrompt, token_id: int) -> None:
        assert self._beside is not None, f"{request.id} stays where nothing decodes"
        pages, hashes = self.policy.pages_of(request.id), self.policy.hashes_of(request.id)
        if request.kept is not None:
            pages, hashes = [pages[number] for number in request.relayed(0, len(pages))[1]], ()
        receipt = self._beside.adopt(request, token_id, pages, hashes, request.num_dropped)
        handed_off = pb.EVENT_KIND_HANDED_OFF
        request.link.event(request.state, handed_off, receipt=receipt, decode_worker=self._name)
        self._finish(request)

    def _stay_after_all(self, request: HeldPrompt, token_id: int) -> Undelivered | None:
        """It found no pages elsewhere. Why it may not have any more here."""
        assert self._beside is not None, f"{request.id} stays where nothing decodes"
        if denied := self._beside.stay(request):
            return Undelivered(denied.reason, pb.FAILURE_CAUSE_ROOM, "")
        self._stay(request, token_id)
        return None

    def _fail(self, request: HeldPrompt, token: SampledToken) -> None:
        """End a request whose chunk the engine could not compute: the router tries another worker's, if it may help."""
        failed, cause = pb.EVENT_KIND_FAILED, failure_cause(token)
        request.link.event(request.state, failed, reason=token.error, cause=cause, trace=request.told())
        request.is_cancelled = True
        self.handoffs.spawn(self._let_go(request, f"{self._name}: {token.error}"))

    async def _hand_off(self, request: HeldPrompt, token_id: int, computed_ns: int) -> None:
        outcome = await self.handoffs.hand_off(request, token_id, computed_ns)
        if outcome is None and not request.is_cancelled:
            outcome = self._stay_after_all(request, token_id)
        if isinstance(outcome, HandoffReceipt):
            self._host.counters["receipts_good"] += 1
            handed_off, name = pb.EVENT_KIND_HANDED_OFF, request.decode.name
            trace = request.told()
            request.link.event(request.state, handed_off, receipt=outcome, decode_worker=name, trace=trace)
        if request.is_cancelled:
            return
        if isinstance(outcome, Undelivered):
            self._end_undelivered(request, outcome)
        elif outcome is not None:
            self._end(request)
        self._host.streams.flush()

    def _end(self, request: HeldPrompt) -> None:
        """Another worker has it."""
        self.handoffs.close(request)
        self._finish(request)

    def _end_undelivered(self, request: HeldPrompt, failure: Undelivered) -> None:
        """Another worker has it not, or that is not known."""
        self._tell_undelivered(request, failure)
        request.is_cancelled = True
        self.handoffs.spawn(self._let_go(request, failure.reason))

    async def _cancel(self, request: HeldPrompt, reason: str) -> None:
        await self._let_go(request, reason)
        request.link.event(request.state, pb.EVENT_KIND_CANCELLED, reason=reason, trace=request.told())
        self._host.streams.flush()

    async def _let_go(self, request: HeldPrompt, reason: str) -> None:
        """End a request that is cancelled, failed or finished here; its pages go once nobody reads them."""
        await self.handoffs.abort(request, reason)
        self._finish(request)

    def _finish(self, request: HeldPrompt) -> None:
        self.policy.on_cancelled(request.id)
        self._forget_if_gone(request.id)
        self._host.wake()

    def _forget_if_gone(self, request_id: str) -> None:
        if not self.policy.holds(request_id):
            self.requests.pop(request_id, None)
