"""Handoffs brings the KV of a prefill worker's prompts to decode workers: layers as they are computed, then a commit.

    open --> segments of each chunk --> hand_off: commit --> receipt
                 \\-- stalled --> reassign --> opened again elsewhere, with all that was computed before
                                            \\-> not at all: it is decoded here

A request's pages are read until its handoff is closed: the policy is told of both. What a handoff's end means for its
request is the role's to say.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.pages.mass import PageMass
from engine.pages.pool import pages_for
from engine.types import OnLayer
from kv_transfer.lease import Denied
from kv_transfer.plan import layer_groups
from kv_transfer.prefill_side.errors import HandoffDenied, HandoffError
from kv_transfer.prefill_side.handoff import Handoff
from kv_transfer.prefill_side.pair import PrefillPair
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.generate_pb2 import HandoffReceipt, PositionLogprobs
from prefill_worker.policy import ChunkPlan, PrefillPolicy
from worker.peers.peers import Peers, Undelivered
from worker.requests import HeldRequest
from worker.role import RoleHost
from worker.streams.router_link import RouterLink

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class HeldPrompt(HeldRequest):
    """`sent_pages` are those whose segments were given to the handoff."""

    link: RouterLink
    decode: pb.WorkerAddress
    handoff: Handoff | None = None
    sent_pages: int = 0
    is_stalled: bool = False
    is_committing: bool = False
    moving_to: pb.WorkerAddress | None = None
    is_passing: bool = False  # to another worker, which reads the rest
    stays: bool = False  # it is decoded here
    scores: list[PositionLogprobs] = field(default_factory=list)  # of its prompt, where they are wanted
    mass: PageMass | None = None  # by which it is chosen what is kept
    waiting: asyncio.Task[None] | None = None  # for its pair, or its adapter
    is_cancelled: bool = False  # or over for another reason: nothing more is sent to the router

    def relayed(self, begin: int, end: int) -> tuple[int, Sequence[int]]:
        """Of its token pages [begin, end) those that are kept, and how many are kept before them."""
        if self.kept is None:
            return begin, range(begin, end)
        held = self.kept.held(self.num_dropped, end * self.kept.page_size)
        index = bisect_left(held, begin)
        return index, held[index:]

    @property
    def num_dropped(self) -> int:
        """Of its pages, when all of it is read."""
        return 0 if self.kept is None else self.kept.num_dropped(len(self.tokens))

    def told(self) -> pb.Trace | None:
        """Where its time went, since that was told last."""
        if self.handoff is not None:
            self.trace.handoff(self.handoff.trail, self.decode.name)
        return self.trace.told()


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Pages [begin, end) of those that a request keeps, which a chunk completes, for its handoff."""

    handoff: Handoff
    begin: int
    end: int
    pages: Sequence[int]


class Handoffs:
    def __init__(
        self, host: RoleHost, policy: PrefillPolicy, peers: Peers, stay: Callable[[HeldPrompt], Denied | None] | None
    ) -> None:
        """`stay`: may a prompt be decoded here, that was to leave? None: nothing is."""
        self._host = host
        self._stay = stay
        self._policy = policy
        self.peers = peers
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run what waits for a handoff, beside the steps."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    async def settle(self) -> None:
        """Until all that was spawned has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # One request's handoff

    async def wait_connected(self, request: HeldPrompt) -> Undelivered | None:
        """Why the pair could not be opened; None once it stands. With whomever it is to be handed to by then."""
        while not request.stays:
            decode, failure = request.decode, None
            try:
                await self.peers.pair(decode)
            except Exception as error:
                failure = self.peers.undelivered(request.id, decode, error)
            if request.decode is decode:
                return failure
        return None

    def open(self, request: HeldPrompt) -> None:
        pair = self.peers.open_pair(request.decode)
        if pair is not None:  # else it was lost since: hand_off opens another one
            self._reserve(request, pair)

    def reassign(self, request: HeldPrompt, decode: pb.WorkerAddress) -> None:
        """Move a handoff that is stalled, or has not begun, to another decode worker."""
        if request.is_cancelled or request.is_passing:
            return
        if not request.is_stalled:
            self._rename(request, decode)
            return
        if request.handoff is not None and request.handoff.is_granted:
            return  # pages came meanwhile; moved now, it might run on both workers. The first one tells the router
        if decode.name == self._host.options.name and self._why_not_here(request):
            return  # it waits on where it does, and the router hears whose it is from whom it comes to
        request.moving_to = decode
        if request.is_committing and request.handoff is not None:  # its commit ends, and looks at moving_to
            self.spawn(request.handoff.abort("reassigned"))

    def _rename(self, request: HeldPrompt, decode: pb.WorkerAddress) -> None:
        """Unless the one before is asked for pages, or about to be."""
        if request.handoff is not None or request.is_committing or request.stays:
            return
        is_waiting = request.waiting is not None and not request.waiting.done()
        if decode.name == self._host.options.name:
            if not is_waiting and self._why_not_here(request):
                return
            request.stays = True
        request.decode = decode
        if not (is_waiting or request.stays):  # its pair stands when its first pages are read
            request.waiting = self.spawn(self._connect(request))
        request.link.event(request.state, pb.EVENT_KIND_REASSIGNED, decode_worker=decode.name)
        self._host.streams.flush()

    def _why_not_here(self, request: HeldPrompt) -> Denied | None:
        assert self._stay is not None, f"{request.id} stays where nothing decodes"
        return self._stay(request)

    async def _connect(self, request: HeldPrompt) -> None:
        """If it can; else its handoff says why it cannot."""
        await self.wait_connected(request)

    async def open_elsewhere(self, request: HeldPrompt, decode: pb.WorkerAddress) -> Handoff:
        """Another decode worker has it from now on; a handoff there, given up where it has no pages now. Raises
        HandoffError."""
        await self.abort(request, f"{decode.name} reads it on")
        request.decode, request.stays, request.is_stalled, request.sent_pages = decode, False, False, 0
        pair = await self.peers.pair(decode)
        if request.is_cancelled:
            raise HandoffDenied("cancelled", retryable=False)
        return self._reserve(request, pair, lambda reason: self.spawn(self.abort(request, reason)))

    async def hand_off(
        self, request: HeldPrompt, token_id: int, computed_ns: int
    ) -> HandoffReceipt | Undelivered | None:
        """Commit, elsewhere if another worker is named meanwhile. None: it is this one."""
        while True:
            try:
                if request.handoff is None or request.moving_to is not None:
                    await self._move(request)
                if request.stays:
                    return None
                assert request.handoff is not None
                num_tokens = len(request.tokens) - request.state.dropped_tokens
                receipt = await request.handoff.commit(
                    token_id=token_id, num_tokens=num_tokens, computed_ns=computed_ns
                )
                receipt.dropped_pages = request.num_dropped
                self.peers.on_receipt(request.decode, receipt)
                return receipt
            except Exception as error:
                undelivered = self.peers.undelivered(request.id, request.decode, error)
                in_doubt = request.handoff is not None and request.handoff.is_in_doubt  # the peer may run it
                may_move = isinstance(error, HandoffError) and not request.is_cancelled and not in_doubt
                if request.moving_to is None or not may_move:
                    return undelivered

    async def abort(self, request: HeldPrompt, reason: str) -> None:
        """Returns when nobody reads the request's pages any more."""
        if request.handoff is not None:
            await request.handoff.abort(reason)
        self.close(request)

    def close(self, request: HeldPrompt) -> None:
        if request.handoff is not None:
            request.trace.handoff(request.handoff.trail, request.decode.name)
            request.handoff = None
            self._policy.on_handoff_closed(request.id)

    async def _move(self, request: HeldPrompt) -> None:
        """Open a handoff, to another worker if one was named, and give it all that was computed before; none to this
        one."""
        if request.handoff is not None:
            await self.abort(request, "reassigned")
        if request.moving_to is not None:
            request.decode, request.moving_to, request.is_stalled = request.moving_to, None, False
            self._host.counters["reassigned"] += 1
        request.stays = request.decode.name == self._host.options.name
        if request.stays:
            return
        pair = await self.peers.pair(request.decode)
        if request.is_cancelled:
            raise HandoffDenied("cancelled", retryable=False)
        handoff = self._reserve(request, pair)
        pages = self._policy.pages_of(request.id)
        _, numbers = request.relayed(0, len(pages))
        handoff.pages_ready(0, [pages[number] for number in numbers])

    def _reserve(
        self, request: HeldPrompt, pair: PrefillPair, on_stalled: Callable[[str], object] | None = None
    ) -> Handoff:
        request.state.dropped_tokens = request.num_dropped * self._host.pool.page_size
        handoff = pair.reserve(request.state, on_stalled=on_stalled or partial(self._on_stalled, request))
        request.handoff = handoff
        self._policy.on_handoff_opened(request.id)
        return handoff

    def _on_stalled(self, request: HeldPrompt, reason: str) -> None:
        request.is_stalled = True
        self._host.counters["handoffs_stalled"] += 1
        stalled = pb.EVENT_KIND_HANDOFF_STALLED
        request.link.event(request.state, stalled, reason=reason, decode_worker=request.decode.name)
        self._host.streams.flush()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a handoff task of %s failed", self._host.options.name, exc_info=task.exception())

    # The layers of one step

    def plan_segment(self, request: HeldPrompt, handoff: Handoff, chunk: ChunkPlan) -> SegmentPlan:
        """The pages that this chunk completes; the last chunk takes the partly filled page along."""
        end, page_size = chunk.start + chunk.length, self._host.pool.page_size
        begin, request.sent_pages = request.sent_pages, pages_for(end, page_size) if chunk.is_last else end // page_size
        index, numbers = request.relayed(begin, request.sent_pages)
        pages = self._policy.pages_of(request.id)
        return SegmentPlan(handoff, index, index + len(numbers), [pages[number] for number in numbers])

    def on_layer(self, segments: Sequence[SegmentPlan]) -> OnLayer | None:
        """Gives the segments to their handoffs, a group of layers at a time, as the engine's thread computes them."""
        if not segments:
            return None
        num_pages = max(1, sum(segment.end - segment.begin for segment in segments))
        groups = layer_groups(self._host.engine.layout, num_pages, self._host.options.transfer.layers_per_group)
        group_ending_at = {group.stop - 1: group for group in groups}

        def on_layer(layer: int) -> None:
            group = group_ending_at.get(layer)
            if group is None:
                return
            computed = self._host.engine.memory.mark()
            for segment in segments:
                if segment.end > segment.begin:
                    segment.handoff.segment_ready(group, segment.begin, segment.end, segment.pages, computed)

        return on_layer
