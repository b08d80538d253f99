"""Handoff is one request's way from a prefill worker's pages into a decode worker's, as the prefill side sees it.

    reserve -> (stalled) -> granted -> segments, as layers are computed -> commit -> receipt
                                    \\-> abort, from anywhere

Made by PrefillPair.reserve (pair.py), which owns the stream and the thread. The engine's thread only calls
`segment_ready`. The source pages are the caller's: they must stay as they are until `commit` has returned or raised,
or `abort` has returned.

Every state has a bound, and ends then with the error behind it:

    asked, not answered    3 * timeout_s                              HandoffLost, and with it the pair
    stalled                queued_reservation_s                       HandoffDenied, retryable: no room
    granted, transferring  the decode worker's lease_ttl_s            HandoffEnded
    committed, no receipt  3 * timeout_s, or peer_silent_s            HandoffLost, `is_in_doubt`

In doubt: the commit was sent and its receipt never came. The decode worker may have taken it; then it runs the request
and tells the router so (DECODE_READY), before or after the prefill worker says that it failed: the decode worker's word
wins. If it has not taken it, its lease ends with the pair. So the prefill side only says that it does not know, and who
wants the request elsewhere cancels it at the decode worker first, which gives back what it may hold.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kv_transfer.event_loop import call_in_loop, quiet_future
from kv_transfer.plan import layer_groups
from kv_transfer.prefill_side.errors import HandoffDenied, HandoffError, HandoffFailed, HandoffLost
from kv_transfer.prefill_side.pair_terms import Pair, PairTerms
from kv_transfer.prefill_side.segments import Flow, Grant, ReadyPages, SegmentToSend, SentSegment, segments_of
from kv_transfer.prefill_side.trail import Trail
from kvrelay.v1 import generate_pb2, worker_pb2


class Handoff:
    """One request's pages on their way. Made by PrefillPair.reserve; used in the event loop but for segment_ready."""

    def __init__(
        self,
        lease_id: int,
        pair: Pair,
        terms: PairTerms,
        *,
        on_stalled: Callable[[str], object],
        forget: Callable[[], object],
    ) -> None:
        """`on_stalled(reason)`: pages must be waited for. `forget()`: the peer's messages concern it no more."""
        self.lease_id = lease_id
        self.flow = Flow()
        self.trail = Trail()
        self._pair = pair
        self._terms = terms
        self._on_stalled = on_stalled
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._granted: asyncio.Future[Grant] = quiet_future()
        self._answer: asyncio.Future[worker_pb2.Receipt] = quiet_future()
        self._ready_lock = threading.Lock()
        self._ready: list[ReadyPages] = []  # what came before the grant
        self._sent: list[SegmentToSend] = []  # by segment number
        self._bytes_sent = 0
        self._transfer_s = 0.0
        self._error: HandoffError | None = None  # why this is over, if it is over badly
        self.is_over = False
        self.is_in_doubt = False  # a commit was sent and not answered
        self.was_answered = False

    async def granted(self) -> Grant:
        """Wait for pages. Raises HandoffDenied or HandoffLost."""
        return await asyncio.shield(self._granted)

    def segment_ready(
        self, layers: range, page_begin: int, page_end: int, src_pages: Sequence[int], after: object | None = None
    ) -> None:
        """The KV of token pages page_begin .. page_end - 1 in `layers` stands in src_pages, in that order; on a GPU
        once the event `after` has happened (KvMemory.mark).

        From any thread; returns at once. What comes before the grant is kept; what the peer has cached is skipped.
        """
        assert len(src_pages) == page_end - page_begin, "src_pages must name one page for each token page"
        ready = ReadyPages(layers, page_begin, page_end, tuple(src_pages), after)
        with self._ready_lock:
            if not self._granted.done():
                self._ready.append(ready)
                return
        self._send(ready)

    def pages_ready(self, page_begin: int, src_pages: Sequence[int]) -> None:
        """All layers of the token pages from page_begin on stand in src_pages: segment_ready for each group of them."""
        for layers in layer_groups(self._terms.layout, len(src_pages), self._terms.options.layers_per_group):
            self.segment_ready(layers, page_begin, page_begin + len(src_pages), src_pages)

    @property
    def is_granted(self) -> bool:
        """Whether the peer has given pages, and has not taken them back."""
        return self._granted.done() and self._granted.exception() is None and not self.is_over

    @property
    def bytes_sent(self) -> int:
        """So far; resends counted."""
        return self._bytes_sent

    async def moved(self) -> None:
        """Wait until all segments so far stand in the peer's pages. Raises as `granted` does."""
        await self.granted()
        either: set[asyncio.Future[Any]] = {self._pair.all_sent(), self._answer}  # an answer now: the lease is over
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._error is not None:
            raise self._error

    async def commit(
        self,
        *,
        num_tokens: int,
        computed_ns: int,
        token_id: int = 0,
        more_token_ids: Sequence[int] = (),
        unread_tokens: int = 0,
    ) -> generate_pb2.HandoffReceipt:
        """Wait until all segments stand in the peer's pages and it has said so; segments that it calls bad go again.

        `num_tokens`: whose KV it is, `more_token_ids` counted, which came after the reservation. `computed_ns`:
        time.monotonic_ns() when the last layer was computed. `unread_tokens`: so many of the reservation's are left to
        the peer, and there is no token. Raises HandoffDenied (the lease ended), HandoffLost, HandoffFailed.
        """
        grant = await self.granted()
        commit = worker_pb2.Commit(
            lease_id=self.lease_id,
            token_id=token_id,
            num_tokens=num_tokens,
            computed_ns=computed_ns,
            more_token_ids=more_token_ids,
            unread_tokens=unread_tokens,
        )
        for resends_left in range(self._terms.options.max_resends, -1, -1):
            receipt = await self._commit_once(commit)
            if receipt.ok:
                self._finish()
                return self._receipt(grant, receipt, computed_ns)
            if not receipt.bad_segments or not resends_left:
                break
            if max(receipt.bad_segments) >= len(self._sent):
                self._pair.lose(f"{self._terms.peer} misses segment {max(receipt.bad_segments)}, which was not sent")
                raise HandoffLost(f"{self._terms.peer} misses what was not sent")
            for number in receipt.bad_segments:
                self._pair.send(replace(self._sent[number], resend=True))
        reason = f"{self._terms.peer}: {receipt.reason}"
        await self.abort(reason)
        raise HandoffFailed(reason)

    async def abort(self, reason: str) -> None:
        """Give up. Returns when nothing more will be written, so that the source pages may be used again."""
        if self.is_over:  # the peer has ended it, but a segment may be on its way still
            await self._pair.stop_flow(self.flow)
            return
        self._finish()
        self._fail(HandoffDenied(reason, retryable=True))
        await self._pair.stop_flow(self.flow)
        self._pair.write(abort=worker_pb2.Abort(lease_id=self.lease_id, reason=reason))

    def _finish(self) -> None:
        self.is_over = True
        self._forget()

    def _fail(self, error: HandoffError) -> None:
        self._error = self._error or error
        for future in (self._granted, self._answer):
            if not future.done():
                future.set_exception(self._error)

    async def _commit_once(self, commit: worker_pb2.Commit) -> worker_pb2.Receipt:
        if self._answer.done() and self._error is None:
            self._answer = quiet_future()
        await self.moved()
        self.is_in_doubt = True
        commit.segments = len(self._sent)
        self.trail.committed_ns = self.trail.committed_ns or time.monotonic_ns()
        self._pair.write(commit=commit)
        limit_s = self._terms.answer_timeout_s
        try:
            return await asyncio.wait_for(asyncio.shield(self._answer), limit_s)
        except TimeoutError:
            reason = f"{self._terms.peer} sent no receipt for {limit_s:g} s"
            self._pair.lose(reason)
            raise HandoffLost(reason) from None

    def _receipt(self, grant: Grant, receipt: worker_pb2.Receipt, computed_ns: int) -> generate_pb2.HandoffReceipt:
        return generate_pb2.HandoffReceipt(
            transport=self._terms.transport if self._sent else "",
            pages=receipt.pages,
            bytes=receipt.bytes,
            checksums_ok=self._terms.options.checksums,
            cached_pages=grant.cached_pages,
            resends=sum(segment.resend for segment in self._sent),
            transfer_s=self._transfer_s,
            exposed_s=max(0.0, (time.monotonic_ns() - computed_ns) / 1e9),
            rank_bytes=[receipt.pages * num_bytes for num_bytes in self._terms.rank_page_bytes],
        )

    def _send(self, ready: ReadyPages) -> None:
        if self._granted.cancelled() or self._granted.exception() is not None:
            return
        grant, terms = self._granted.result(), self._terms
        if ready.page_end > len(grant.pages):
            reason = f"{terms.peer} granted {len(grant.pages)} pages, and page {ready.page_end} is needed"
            call_in_loop(self._loop, self._pair.lose, reason)
            return
        for segment in segments_of(
            ready, grant, terms.layout, terms.segment_bytes, flow=self.flow, lease_id=self.lease_id
        ):
            self._pair.send(segment)

    # --- what the peer says, in the event loop ---

    def on_granted(self, grant: Grant) -> None:
        self.was_answered, self.trail.granted_ns = True, time.monotonic_ns()
        with self._ready_lock:
            if not self._granted.done():
                self._granted.set_result(grant)
            earlier, self._ready = self._ready, []
        for ready in earlier:
            self._send(ready)

    def on_queued(self, reason: str) -> None:
        if self.was_answered:
            return
        self.was_answered = True
        limit_s = self._terms.options.queued_reservation_s
        self._loop.call_later(limit_s, self._stop_waiting, f"no pages for {limit_s:g} s: {reason}")
        self._on_stalled(reason)

    def _stop_waiting(self, reason: str) -> None:
        """Its KV holds pages here that others could use. Nothing of it was sent."""
        if not self._granted.done() and not self.is_over:
            self.on_over(HandoffDenied(reason, retryable=True))
            self._pair.write(abort=worker_pb2.Abort(lease_id=self.lease_id, reason=reason))

    def on_over(self, error: HandoffError) -> None:
        """Denied, ended by the peer, or the pair is lost: only then it does not say what became of a commit."""
        self.is_in_doubt = self.is_in_doubt and isinstance(error, HandoffLost)
        self._finish()
        self._fail(error)

    def on_receipt(self, receipt: worker_pb2.Receipt) -> None:
        self.is_in_doubt, self.trail.answered_ns = False, time.monotonic_ns()
        if not self._answer.done():
            self._answer.set_result(receipt)

    def on_sent(self, sent: SentSegment) -> None:
        self._sent.append(sent.segment)
        self.trail.on_sent(sent)
        self._bytes_sent += sent.nbytes
        self._transfer_s += sent.transfer_s
