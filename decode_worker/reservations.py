"""Reservations are a decode worker's promises of pages: who asks for them, waits for them, fills them and loses them.

    reserve --> [queued] --granted--> KV segments arrive (kv_transfer.decode_side) --> on_committed --> the batch
                   \\____________________\\--- on_lease_released: the pair is lost, or the request is cancelled

It holds the worker's requests from their reservation to their end. Who may have pages, and when, the policy decides;
what a committed request computes is the role's (driver.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_worker.batches import NEVER
from decode_worker.policy import DecodePolicy
from engine.adapters.files import AdapterError
from engine.pages.pool import PageHash
from engine.types import InvalidRequest
from kv_transfer.decode_side.servicer import HandoffServicer
from kv_transfer.lease import Denied, Granted, Queued
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.generate_pb2 import HandoffReceipt
from worker.requests import HeldRequest, adapter_of, kept_of, most_kept_pages, read_request, root_of
from worker.role import RoleHost
from worker.wire.credentials import FollowedTls

log = logging.getLogger(__name__)

LOCAL = "local"  # the transport of a receipt: the KV was computed where it is
CANCELLED_REMEMBERED = 4096  # ids whose cancel came before their reservation
ANY_MOVE = (1 << 32) - 1  # by which a request may come


@dataclass(slots=True, kw_only=True)
class HeldAnswer(HeldRequest):
    """The KV of the last of its `tokens` is not yet computed."""

    parent: PageHash  # hash of the last page whose tokens are known
    hashed_pages: int
    num_dropped: int = 0  # of its pages, which it does not keep

    def take(self, token_ids: Sequence[int]) -> None:
        """These follow; a beam search begins with its prompt, whose last token they are."""
        if self.num_beams:
            self.tokens = list(self.state.prompt_ids)
        else:
            self.tokens += token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadPrompt:
    """A request of which `computed_len` tokens have their KV in `pages`. `num_read`: of them, by another worker."""

    request: HeldAnswer
    pages: Sequence[int]
    hashes: Sequence[PageHash]
    computed_len: int
    num_read: int
    receipt: HandoffReceipt


class Reservations:
    """A ReservationHost (kv_transfer.decode_side.leases)."""

    def __init__(self, host: RoleHost, policy: DecodePolicy) -> None:
        self._host = host
        self._name = host.options.name
        self._policy = policy
        self._cancelled: OrderedDict[str, int] = OrderedDict()  # up to which move
        self.requests: dict[str, HeldAnswer] = {}
        self.on_forgotten: Callable[[str], None] | None = None  # told each request that is over
        self.on_unread: Callable[[UnreadPrompt], None] | None = None  # reads them on; None: nobody does
        self.handoffs = HandoffServicer(
            self,
            memory=host.engine.memory,
            me=host.address,
            model_fingerprint=host.engine.info.fingerprint,
            vocab_size=host.engine.info.vocab_size,
            options=host.options.transfer,
            address_host=host.options.host,
            tls=FollowedTls(host.options.tls) if host.options.tls else None,
        )

    # What prefill workers bring: ReservationHost

    def reserve(self, request: pb.RequestState, room_tokens: int = 0) -> Granted | Queued | Denied:
        denied = self._why_not(request, is_move=room_tokens > 0)
        if denied is not None:
            return denied
        try:
            params, tokens = read_request(request, self._host.engine.info)
            if (adapter := adapter_of(request)) is not None:
                self._host.engine.adapters.check(adapter)
        except (InvalidRequest, AdapterError) as error:
            unable = isinstance(error, AdapterError)
            return Denied(reason=f"{self._name}: {error}", retryable=False, unable=unable)
        rope = self._host.engine.info.rope
        root, kept = root_of(request, rope), kept_of(request, self._host.pool.page_size)
        hashes = self._host.page_hashes(tokens, root) if kept is None else []
        most_dropped = 0 if kept is None else kept.num_dropped(len(tokens)) * kept.page_size
        if request.dropped_tokens % self._host.pool.page_size or request.dropped_tokens > most_dropped:
            why = f"{request.dropped_tokens} tokens of it are dropped, and at most {most_dropped} can be"
            return Denied(reason=f"{self._name}: {why}", retryable=False)
        weights = None if adapter is None else self._host.engine.adapters.begin(adapter)
        is_loading = weights is not None and not weights.done()
        if room_tokens and is_loading:  # where it runs it waits for nothing
            return Denied(reason=f"{self._name} is loading its adapter", retryable=True)
        if self.reads_prompts and self._host.engine.layout.has_states:
            # a page that others have must not be computed again, as the last one of a prompt that is unread may be
            hashes = hashes[: (len(tokens) - 1) // self._host.pool.page_size]
        held = HeldAnswer(
            state=request,
            params=params,
            tokens=tokens,
            parent=hashes[-1] if hashes else root,
            hashed_pages=len(hashes),
            weights=weights,
            kept=kept,
            num_dropped=request.dropped_tokens // self._host.pool.page_size,
            rope=rope,
        )
        answer = self._policy.reserve(
            held.id,
            num_tokens=len(tokens) - request.dropped_tokens,
            max_new_tokens=held.new_tokens_left,
            hashes=hashes,
            room=room_tokens,
            is_held=request.held or is_loading,
            priority=request.priority,
            most_pages=self.most_pages(request),
            num_beams=held.num_beams,
        )
        if not isinstance(answer, Denied):
            self.requests[held.id] = held
            if weights is not None and is_loading:
                loop = asyncio.get_running_loop()
                weights.add_done_callback(lambda _: loop.call_soon_threadsafe(self._begin_if_ready, held))
        return answer

    def most_pages(self, request: pb.RequestState) -> int:
        """That it holds where it is decoded."""
        policy = request.kv_policy
        return most_kept_pages(policy, self._host.pool.page_size) if policy.window_tokens else NEVER

    def _why_not(self, request: pb.RequestState, *, is_move: bool) -> Denied | None:
        if self._host.is_stopping or (self._host.is_draining and is_move):
            return Denied(reason=f"{self._name} is stopping", retryable=True)
        if request.move <= self._cancelled.get(request.request_id, -1):
            return Denied(reason=f"{request.request_id} was cancelled before its KV came", retryable=False)
        if is_move and request.request_id in self.requests:  # by an earlier one, and is about to be cancelled
            return Denied(reason=f"{request.request_id} is still at {self._name}", retryable=True)
        if self._host.streams.link(request.router_id) is None:
            return Denied(reason=f"{self._name} has no stream with {request.router_id}", retryable=True)
        return None

    def on_committed(self, request: pb.RequestState, token_ids: Sequence[int], receipt: HandoffReceipt) -> None:
        held = self.requests[request.request_id]
        more = len(token_ids) - 1 - held.num_read_twice
        held.take(token_ids)
        self._policy.on_committed(held.id, more)
        receipt.dropped_pages = held.num_dropped
        self._tell_ready(held, receipt)

    @property
    def reads_prompts(self) -> bool:
        return self.on_unread is not None

    def on_committed_unread(self, request: pb.RequestState, num_tokens: int, receipt: HandoffReceipt) -> None:
        assert self.on_unread is not None, f"{self._name} reads no prompts"
        held = self.requests.pop(request.request_id)
        pages, hashes, computed_len = self._policy.on_unread(held.id, num_tokens)
        self.on_unread(
            UnreadPrompt(
                request=held,
                pages=pages,
                hashes=hashes,
                computed_len=computed_len,
                num_read=num_tokens,
                receipt=receipt,
            )
        )

    def keep(self, request: HeldRequest, token_id: int, hashes: Sequence[PageHash], num_dropped: int) -> HandoffReceipt:
        """A prompt that was computed in this worker's pages is its own from now on: nothing moves."""
        held = HeldAnswer(
            state=request.state,
            params=request.params,
            tokens=[*request.tokens],
            parent=hashes[-1] if hashes else root_of(request.state, request.rope),
            hashed_pages=len(hashes),
            weights=request.weights,
            kept=request.kept,
            num_dropped=num_dropped,
            rope=request.rope,
        )
        held.take([token_id])
        self.requests[held.id] = held
        receipt = HandoffReceipt(transport=LOCAL, checksums_ok=True, dropped_pages=num_dropped)
        self._tell_ready(held, receipt)
        return receipt

    def _tell_ready(self, held: HeldAnswer, receipt: HandoffReceipt) -> None:
        self._host.streams.event(held.state, pb.EVENT_KIND_DECODE_READY, receipt=receipt)
        self._host.streams.flush()
        self._host.wake()

    def on_lease_released(self, request: pb.RequestState, reason: str) -> None:
        held = self.requests.get(request.request_id)
        if held is None or held.state.attempt != request.attempt:
            return
        log.info("%s: the lease of %s is over: %s", self._name, held.id, reason)
        self.end(held)  # the prefill worker tells the router, if it still matters
        self._host.streams.flush()

    # For the role

    def begin(self, request_id: str) -> None:
        """The router lets a request begin that was held."""
        held = self.requests.get(request_id)
        if held is not None:
            held.state.held = False
            self._begin_if_ready(held)

    def _begin_if_ready(self, held: HeldAnswer) -> None:
        """Its step would stand still, and all others in it, until its adapter is loaded. One that cannot be loaded
        begins, too: its step says why not."""
        is_loaded = held.weights is None or held.weights.done()
        if is_loaded and not held.state.held and self.requests.get(held.id) is held:
            self._policy.on_begin(held.id)
            self._host.wake()

    def cancel(self, request: HeldAnswer, reason: str) -> None:
        """Of one whose KV has not come: on_lease_released follows, after the fence."""
        self.handoffs.leases.end(request.id, reason)

    def remember_cancelled(self, request_id: str, last_move: int) -> None:
        """Its reservation may still come, by a move up to this one, and is denied then."""
        self._cancelled[request_id] = max(last_move, self._cancelled.get(request_id, 0))
        while len(self._cancelled) > CANCELLED_REMEMBERED:
            self._cancelled.popitem(last=False)

    def end(self, request: HeldAnswer) -> None:
        """Forget a request between two steps, and let others have its pages."""
        self.forget(request)
        self.grant_queued()
        self._host.wake()

    def forget(self, request: HeldAnswer) -> None:
        """Its pages go as soon as no batch uses them."""
        self.requests.pop(request.id, None)
        self._policy.on_cancelled(request.id)
        if self.on_forgotten is not None:
            self.on_forgotten(request.id)

    def grant_queued(self) -> None:
        for request_id, granted in self._policy.next_grants():
            self.handoffs.leases.grant(request_id, self.requests[request_id].state.attempt, granted)
