"""DecodeRole carries out what a DecodePolicy decides: KV in, tokens out.

    prefill worker --reserve--> policy --lease--> KV segments arrive (reservations.py) --commit--> policy: ready
                                                                                                 |
    router <-- one message a step with the tokens of all its requests <-- step <-- next_batch <--+

When pages run out the policy says who leaves; the router is told and has the request computed again (prompt and tokens
so far) by the prefill pool.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from decode_worker.batches import DecodeBatch, DecodeEntry
from decode_worker.drafts import Drafts
from decode_worker.moves import Moves
from decode_worker.policy import DecodePolicy
from decode_worker.reservations import ANY_MOVE, HeldAnswer, Reservations
from decode_worker.searches import Searches
from engine.kept import KeptPages
from engine.pages.pool import PageHash
from engine.types import PENDING, Chunk, Draft, InvalidRequest, SampledToken, Step, finish_reason
from kv_transfer.lease import Denied
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.v1.generate_pb2 import HandoffReceipt
from worker.convert import failure_cause, token_output
from worker.peers.peers import Peers
from worker.requests import HeldRequest
from worker.role import RoleHost
from worker.steps.slow import StepClock, Took
from worker.streams.router_link import RouterLink

log = logging.getLogger(__name__)


class DecodeRole:
    def __init__(self, host: RoleHost, policy: DecodePolicy | None = None, peers: Peers | None = None) -> None:
        self._host = host
        self._name = host.options.name
        self._eos_token_ids = host.engine.info.eos_token_ids
        self.policy = policy or DecodePolicy(
            host.pool, host.options.policy, name=host.options.name, num_stages=host.engine.num_stages
        )
        self.reservations = Reservations(host, self.policy)
        self.requests = self.reservations.requests
        self.peers = peers or Peers(host)
        pages = self.reservations.grant_queued
        self.moves = Moves(host, self.policy, self.requests, self.peers, on_left=self.reservations.end, on_pages=pages)
        self.reservations.on_forgotten = self._on_forgotten
        self._searches = Searches(host, self.policy)
        self._drafts: Drafts | None = None
        if self.policy.options.num_speculative_tokens:
            self._drafts = self._make_drafts(host)
        self._steps = StepClock(host.engine.num_stages)

    def _make_drafts(self, host: RoleHost) -> Drafts:
        """Raises ValueError: the model's state cannot be taken back to before a guess, or steps of stages wait for
        none."""
        if host.engine.num_stages > 1:
            raise ValueError(
                f"num_speculative_tokens is {self.policy.options.num_speculative_tokens} with pipeline_parallel "
                f"{host.engine.num_stages}; give one of the two"
            )
        if host.engine.layout.has_states:
            raise ValueError(
                f"num_speculative_tokens is {self.policy.options.num_speculative_tokens}, but "
                f"{host.engine.info.architecture} keeps a state beside KV, which cannot be taken back to before a "
                "guess; give 0"
            )
        options, eos_token_ids, model = self.policy.options, self._eos_token_ids, host.engine.draft_model
        if model is None:
            return Drafts(options, host.step_costs, eos_token_ids)

        def make_draft(request_id: str) -> Draft:
            request = self.requests[request_id]
            return Draft(tokens=request.tokens, spec=lambda at, guesses: request.sample_spec(at, host.engine, guesses))

        options = replace(options, num_speculative_tokens=min(options.num_speculative_tokens, model.most))
        return Drafts(options, host.step_costs, make_draft=make_draft, pass_s=lambda: model.pass_s)

    @property
    def max_batch(self) -> int:
        return self.policy.options.max_batch_size

    @property
    def receiver(self) -> worker_pb2_grpc.HandoffServicer:
        return self.reservations.handoffs

    # What routers send

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None:
        raise InvalidRequest(f"{self._name} decodes; prompts go to a prefill worker")

    def on_reassign(self, reassign: pb.Reassign) -> None:
        log.warning("%s decodes; reassign of %s is for its prefill worker", self._name, reassign.request_id)

    def on_move(self, move: pb.Move) -> None:
        self.moves.begin(move)

    def on_begin(self, request_id: str) -> None:
        self.reservations.begin(request_id)

    def on_cancel(self, cancel: pb.Cancel) -> None:
        request, reason = self.requests.get(cancel.request_id), cancel.reason
        last_move = cancel.last_move if cancel.HasField("last_move") else ANY_MOVE
        if request is None or request.state.move > last_move:
            self.reservations.remember_cancelled(cancel.request_id, last_move)
            return
        self._host.counters["cancelled"] += 1
        if self.policy.is_reserved(request.id):
            self.reservations.cancel(request, reason)
            return
        self.reservations.end(request)
        trace = request.trace.told()
        self._host.streams.event(request.state, pb.EVENT_KIND_CANCELLED, reason=reason, trace=trace)
        self._host.streams.flush()

    def report(self) -> pb.WorkerReport:
        handoffs, leases = self.reservations.handoffs, self.reservations.handoffs.leases
        return pb.WorkerReport(
            num_waiting=self.policy.num_waiting,
            num_running=self.policy.num_running,
            available_pages=self.policy.spare_pages,
            leased_pages=leases.leased_pages,
            fenced_pages=leases.fenced_pages,
            quarantined_pages=leases.quarantined_pages,
            counters={**handoffs.counters, "preemptions": self.policy.preemptions},
            request_ids=self.policy.request_ids,
            peers=self.peers.report(),
        )

    def check_invariants(self) -> None:
        self.policy.check_invariants()
        self.reservations.handoffs.check_invariants()

    async def stop_serving(self) -> None:
        await self.reservations.handoffs.close()

    async def close(self) -> None:
        await self.moves.settle()
        await self.peers.close()

    # Prompts that are computed in the same pages

    def expect(self, request: HeldRequest, *, stays: bool) -> Denied | None:
        length = len(request.tokens)
        max_len = length + (max(0, request.new_tokens_left - 1) if stays else 0)
        return self.policy.expect(
            request.id,
            num_tokens=length,
            max_len=max_len,
            is_held=request.state.held,
            priority=request.state.priority,
            num_beams=request.num_beams if stays else 0,
            most_pages=self.reservations.most_pages(request.state),
        )

    def stay(self, request: HeldRequest) -> Denied | None:
        max_len = len(request.tokens) + max(0, request.new_tokens_left - 1)
        most_pages = self.reservations.most_pages(request.state)
        return self.policy.on_stays(request.id, max_len=max_len, most_pages=most_pages)

    def adopt(
        self,
        request: HeldRequest,
        token_id: int,
        pages: Sequence[int],
        hashes: Sequence[PageHash],
        num_dropped: int = 0,
    ) -> HandoffReceipt:
        self.policy.adopt(request.id, pages, hashes, more=-request.num_read_twice, num_dropped=num_dropped)
        return self.reservations.keep(request, token_id, hashes, num_dropped)

    # Steps

    @property
    def waits_for_tokens(self) -> bool:
        """Penalties look at every token so far: such a request's next step waits for the last one's. So do guesses, and
        pages that go as tokens come. Where there are stages, all requests' steps wait for their own last ones only."""
        if self._host.engine.num_stages > 1:
            return False
        return self._drafts is not None or any(
            request.params.reads_output or request.kept is not None for request in self.requests.values()
        )

    def next_batch(self) -> DecodeBatch | None:
        if self._drafts is None:
            batch = self.policy.next_batch()
        else:
            running = [self.requests[each.request_id] for each in self.policy.running]
            guessed = [request for request in running if not request.num_beams and request.kept is None]
            batch = self.policy.next_batch(self._drafts.wanted(guessed))
            self._drafts.begin(batch)
        self._announce(batch)
        if not batch.entries:
            return None
        self._steps.begin()
        return batch

    def step_of(self, batch: DecodeBatch) -> Step:
        """Of those entries whose requests are still wanted: all of them, when the batch was just made."""
        chunks = [self._chunk(entry) for entry in batch.entries if entry.request_id in self.requests]
        return Step(chunks=chunks, copies=list(batch.copies))

    def _announce(self, batch: DecodeBatch) -> None:
        for request_id in batch.preempted:
            request = self.requests[request_id]
            self.reservations.forget(request)
            self._host.streams.event(request.state, pb.EVENT_KIND_PREEMPTED, trace=request.trace.told())
        for request_id in batch.joined:
            self._host.streams.event(self.requests[request_id].state, pb.EVENT_KIND_DECODE_STARTED)
        if batch.preempted:
            self.reservations.grant_queued()
        if batch.preempted or batch.joined:
            self._host.streams.flush()

    def _chunk(self, entry: DecodeEntry) -> Chunk:
        request, engine = self.requests[entry.request_id], self._host.engine
        if request.num_beams:
            return self._searches.chunk(request, entry)
        position = entry.position + request.num_dropped * self._host.pool.page_size
        following = position + 1
        draft: Draft | None = None
        guesses: Sequence[int] = ()
        if entry.drafted and self._drafts is not None:
            draft = self._drafts.asked_of(request.id)
            guesses = () if draft is not None else self._drafts.of(request.id)
        is_known = position < len(request.tokens)
        return Chunk(
            request_id=request.id,
            token_ids=(request.tokens[position] if is_known else PENDING, *guesses),
            start=position,
            block_table=entry.pages,
            scores=[request.sample_spec(following + i, engine, guesses[:i]) for i in range(len(guesses))],
            sample=request.sample_spec(following + len(guesses), engine, guesses),
            draft=draft,
            adapter=request.adapter,
            kept=request.kept,
            num_dropped=request.num_dropped,
            rope_len=request.rope_len,
        )

    def on_step(self, batch: DecodeBatch, tokens: Sequence[SampledToken], prompt_tokens: int = 0) -> None:
        """`prompt_tokens`: that were computed in the same step."""
        self._trace(batch, self._steps.end(), prompt_tokens)
        guessed: dict[str, tuple[int, int]] = {}
        if self._drafts is not None:
            rows = [token for token in tokens if self._is_beam(token)]
            drawn, guessed = self._drafts.end([token for token in tokens if not self._is_beam(token)])
            tokens = [*drawn, *rows]
        self.policy.on_batch_done(batch, [(request_id, kept) for request_id, (_, kept) in guessed.items()])
        for token in tokens:
            request = self.requests.get(token.request_id)
            if request is not None and self.policy.holds(request.id):  # else: cancelled while it ran
                if request.num_beams and not token.error:
                    self._on_beam(request, token)
                    continue
                num_drafted, num_kept = guessed.pop(request.id, (0, 1))
                self._on_token(request, token, num_drafted, num_kept - 1)
        self.moves.on_step()
        self.reservations.grant_queued()

    def _trace(self, batch: DecodeBatch, took: Took, prompt_tokens: int) -> None:
        answers = len(batch.entries)
        for request_id in batch.joined:
            if (request := self.requests.get(request_id)) is not None:
                request.trace.first_step(took, answers, prompt_tokens)
        for entry in batch.entries if took.is_slow else ():
            if (request := self.requests.get(entry.request_id)) is not None and not entry.beam:
                request.trace.slow_step(took, answers, prompt_tokens)

    def _on_forgotten(self, request_id: str) -> None:
        self.moves.drop(request_id)
        self._searches.forget(request_id)
        if self._drafts is not None:
            self._drafts.forget(request_id)

    def _on_token(self, request: HeldAnswer, token: SampledToken, num_drafted: int, num_accepted: int) -> None:
        """`num_drafted`: guesses in the step that this is the first token of, of which so many were right."""
        if token.error:
            self._host.counters["chunks_failed"] += 1
            self.policy.on_failed(request.id)
            failed, cause, trace = pb.EVENT_KIND_FAILED, failure_cause(token), request.trace.told()
            self._host.streams.event(request.state, failed, reason=token.error, cause=cause, trace=trace)
            self.reservations.forget(request)
            return
        self._publish_full_pages(request)
        request.tokens.append(token.token_id)
        counters = self._host.counters
        counters["generated_tokens"] += 1
        if num_drafted:
            counters["drafted_tokens"] += num_drafted
            counters["accepted_tokens"] += num_accepted
        reason = finish_reason(request.params, token.token_id, request.num_outputs, self._eos_token_ids)
        link = self._host.streams.link(request.state.router_id)
        if link is not None:
            output = token_output(request.state, request.num_outputs - 1, token, reason)
            if num_drafted:
                output.drafted, output.accepted = num_drafted, num_accepted
            link.token(output)
            if reason is not None and (trace := request.trace.told()) is not None:
                link.event(request.state, pb.EVENT_KIND_TRACE, trace=trace)
        if reason is not None:
            self.reservations.forget(request)
        elif request.must_begin_anew(len(request.tokens)):
            self._begin_anew(request)
        elif request.kept is not None:
            self._drop_pages(request, request.kept)

    def _begin_anew(self, request: HeldAnswer) -> None:
        """Its KV serves no longer: the router has it computed again, as of one that pages ran out for."""
        self._host.counters["begun_anew"] += 1
        self._host.streams.event(request.state, pb.EVENT_KIND_PREEMPTED, trace=request.trace.told())
        self.reservations.forget(request)

    def _drop_pages(self, request: HeldAnswer, kept: KeptPages) -> None:
        """Those that no row from the next one on sees."""
        while request.num_dropped < kept.num_dropped(len(request.tokens) - 1):
            if not self.policy.drop_page(request.id, kept.index_to_drop(request.num_dropped)):
                return
            request.num_dropped += 1
            self._host.counters["dropped_pages"] += 1

    def _is_beam(self, token: SampledToken) -> bool:
        request = self.requests.get(token.request_id)
        return request is not None and request.num_beams > 0

    def _on_beam(self, request: HeldAnswer, token: SampledToken) -> None:
        self._host.counters["generated_tokens"] += 1
        output = self._searches.on_beam(request, token)
        if output is None:
            return
        link = self._host.streams.link(request.state.router_id)
        if link is not None:
            link.token(output)
            if (trace := request.trace.told()) is not None:
                link.event(request.state, pb.EVENT_KIND_TRACE, trace=trace)
        self.reservations.forget(request)

    def _publish_full_pages(self, request: HeldAnswer) -> None:
        """Every token in `tokens` has its KV by now; say what the pages that this filled hold."""
        page_size = self._host.pool.page_size
        if not self._host.options.prefix_cache or request.kept is not None:
            return
        if len(request.tokens) // page_size == request.hashed_pages:
            return
        new = self._host.page_hashes(request.tokens[request.hashed_pages * page_size :], request.parent)
        for page_hash in new:
            self.policy.on_page_filled(request.id, page_hash)
        request.parent, request.hashed_pages = new[-1], request.hashed_pages + len(new)
