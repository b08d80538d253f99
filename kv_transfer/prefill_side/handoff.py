"""Handoff is one request's way from a prefill worker's pages into a decode worker's, as the prefill side sees it.

    reserve -> (stalled) -> granted -> segments, as layers are computed -> commit -> receipt
                                    \\-> abort, from anywhere

Made by HandoffPeer.reserve (sender.py), which owns the stream and the thread. The engine's thread only calls
`segment_ready`. The source pages are the caller's: they must stay as they are until `commit` has returned or raised,
or `abort` has returned.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kv_transfer.prefill_side.thread import Job, Lane, Sent
from kvrelay.v1 import generate_pb2, worker_pb2

if TYPE_CHECKING:
    from kv_transfer.prefill_side.pair import HandoffPeer


class HandoffDenied(Exception):
    """The decode worker will not take the request, or no longer."""

    def __init__(self, reason: str, *, retryable: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable


class HandoffLost(Exception):
    """The pair broke; its peer must be connected anew."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class HandoffFailed(Exception):
    """The bytes did not arrive whole, however often they were sent. The pair still stands; the lease is over."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class HandoffRefused(Exception):
    """The two workers do not fit together: one sentence with both values."""


@dataclass(frozen=True, slots=True)
class Grant:
    pages: tuple[int, ...]
    cached_pages: int


@dataclass(frozen=True, slots=True)
class _Ready:
    layers: range
    page_begin: int
    page_end: int
    src_pages: tuple[int, ...]
    after: object | None


class Handoff:
    """One request's pages on their way. Made by HandoffPeer.reserve; used in the event loop but for segment_ready."""

    def __init__(self, peer: HandoffPeer, lease_id: int, on_stalled: Callable[[str], None]) -> None:
        self.lease_id = lease_id
        self.lane = Lane()
        self._peer = peer
        self._on_stalled = on_stalled
        self._granted: asyncio.Future[Grant] = quiet_future()
        self._answer: asyncio.Future[worker_pb2.Receipt] = quiet_future()
        self._ready_lock = threading.Lock()
        self._ready: list[_Ready] = []  # segments that came before the grant
        self._sent: list[Job] = []  # by segment number
        self._bytes_sent = 0
        self._transfer_s = 0.0
        self._error: Exception | None = None  # why this is over, if it is over badly
        self.is_over = False
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
        ready = _Ready(layers, page_begin, page_end, tuple(src_pages), after)
        with self._ready_lock:
            if not self._granted.done():
                self._ready.append(ready)
                return
        self._enqueue(ready)

    @property
    def is_granted(self) -> bool:
        """Whether the peer has given pages, and has not taken them back."""
        return self._granted.done() and self._granted.exception() is None and not self.is_over

    @property
    def bytes_sent(self) -> int:
        """So far; resends counted."""
        return self._bytes_sent

    async def commit(self, *, token_id: int, num_tokens: int, computed_ns: int) -> generate_pb2.HandoffReceipt:
        """Wait until all segments stand in the peer's pages and it has said so; segments that it calls bad go again.

        `computed_ns`: time.monotonic_ns() when the last layer was computed. Raises HandoffDenied (the lease ended),
        HandoffLost, HandoffFailed.
        """
        grant = await self.granted()
        for resends_left in range(self._peer.options.max_resends, -1, -1):
            receipt = await self._commit_once(token_id, num_tokens, computed_ns)
            if receipt.ok:
                self._finish()
                return self._receipt(grant, receipt, computed_ns)
            if not receipt.bad_segments or not resends_left:
                break
            for number in receipt.bad_segments:
                self._peer.thread.put(replace(self._sent[number], resend=True))
        reason = f"{self._peer.name}: {receipt.reason}"
        await self.abort(reason)
        raise HandoffFailed(reason)

    async def abort(self, reason: str) -> None:
        """Give up. Returns when nothing more will be written, so that the source pages may be used again."""
        if self.is_over:  # the peer has ended it, but a segment may be on its way still
            await self._peer.stop_lane(self.lane)
            return
        self._finish()
        self._fail(HandoffDenied(reason, retryable=False))
        await self._peer.stop_lane(self.lane)
        self._peer.write(abort=worker_pb2.Abort(lease_id=self.lease_id, reason=reason))

    def _finish(self) -> None:
        self.is_over = True
        self._peer.forget(self)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        for future in (self._granted, self._answer):
            if not future.done():
                future.set_exception(self._error)

    async def _commit_once(self, token_id: int, num_tokens: int, computed_ns: int) -> worker_pb2.Receipt:
        if self._answer.done() and self._error is None:
            self._answer = quiet_future()
        await self._peer.drained_or(self._answer)
        if self._error is not None:
            raise self._error
        self._peer.write(
            commit=worker_pb2.Commit(
                lease_id=self.lease_id,
                segments=len(self._sent),
                token_id=token_id,
                num_tokens=num_tokens,
                computed_ns=computed_ns,
            )
        )
        return await self._peer.answer_in_time(self._answer, "receipt")

    def _receipt(self, grant: Grant, receipt: worker_pb2.Receipt, computed_ns: int) -> generate_pb2.HandoffReceipt:
        return generate_pb2.HandoffReceipt(
            transport=self._peer.transport if self._sent else "",
            pages=receipt.pages,
            bytes=receipt.bytes,
            checksums_ok=self._peer.options.checksums,
            cached_pages=grant.cached_pages,
            resends=sum(job.resend for job in self._sent),
            transfer_s=self._transfer_s,
            exposed_s=max(0.0, (time.monotonic_ns() - computed_ns) / 1e9),
        )

    def _enqueue(self, ready: _Ready) -> None:
        if self._granted.cancelled() or self._granted.exception() is not None:
            return
        grant = self._granted.result()
        begin = max(ready.page_begin, grant.cached_pages)
        if ready.page_end > len(grant.pages):
            self._peer.lose(f"{self._peer.name} granted {len(grant.pages)} pages, and page {ready.page_end} is needed")
            return
        src_pages = ready.src_pages[begin - ready.page_begin :]
        for layers, index in self._peer.cut(ready.layers, ready.page_end - begin):
            self._peer.thread.put(
                Job(
                    lane=self.lane,
                    lease_id=self.lease_id,
                    layers=layers,
                    page_begin=begin + index.start,
                    page_end=begin + index.stop,
                    src_pages=src_pages[index.start : index.stop],
                    dst_pages=grant.pages[begin + index.start : begin + index.stop],
                    after=ready.after,
                )
            )

    # --- what the peer says, in the event loop ---

    def on_granted(self, grant: Grant) -> None:
        self.was_answered = True
        with self._ready_lock:
            if not self._granted.done():
                self._granted.set_result(grant)
            ready, self._ready = self._ready, []
        for entry in ready:
            self._enqueue(entry)

    def on_queued(self, reason: str) -> None:
        self.was_answered = True
        self._on_stalled(reason)

    def on_over(self, error: Exception) -> None:
        """Denied, ended by the peer, or the pair is lost."""
        self._finish()
        self._fail(error)

    def on_receipt(self, receipt: worker_pb2.Receipt) -> None:
        if not self._answer.done():
            self._answer.set_result(receipt)

    def on_sent(self, sent: Sent) -> None:
        self._sent.append(sent.job)
        self._bytes_sent += sent.nbytes
        self._transfer_s += sent.transfer_s


def quiet_future() -> asyncio.Future[Any]:
    """A future whose exception nobody has to fetch."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
