"""DecodePair is a decode worker's side of its pair with one prefill worker: what is said, announced and verified on it.

It checks every message: what breaks the protocol is Malformed, and ends the pair with a sentence. Who may have pages,
and when they are free again, is LeaseKeeper's (leases.py), which it tells.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.pages.layout import KvLayout
from engine.pages.pool import pages_for
from kv_transfer.base import ReceiveEnd, Segment
from kv_transfer.checksum import SegmentChecksummer
from kv_transfer.decode_side.checks import Malformed, check_announce, check_commit, check_size
from kv_transfer.decode_side.leases import LeaseKeeper
from kv_transfer.decode_side.process_watch import ProcessWatch
from kv_transfer.decode_side.reservation import IncomingKv, Reservation
from kv_transfer.decode_side.thread import AnnouncedSegment, ReceiveThread, WritePermit
from kv_transfer.event_loop import call_in_loop
from kv_transfer.handshake import host_id
from kv_transfer.options import TransferOptions
from kvrelay.v1 import worker_pb2

log = logging.getLogger(__name__)

_SegmentName = tuple[Reservation, IncomingKv, int]  # the last: its number among the reservation's


@dataclass(frozen=True, slots=True, kw_only=True)
class PairContext:
    """What all pairs of a decode worker share."""

    layout: KvLayout
    vocab_size: int
    options: TransferOptions
    checksummer: SegmentChecksummer
    leases: LeaseKeeper
    counters: Counter[str]


class DecodePair:
    """The pair with one prefill worker: its stream and its thread."""

    def __init__(
        self,
        pair_id: str,
        hello: worker_pb2.HandoffHello,
        transport: str,
        end: ReceiveEnd,
        send: Callable[[worker_pb2.DecodeMessage], Awaitable[None]],
        context: PairContext,
    ) -> None:
        """`send` writes one message to the peer; it raises ConnectionError when the stream is over."""
        self.id = pair_id
        self.name = hello.worker.name
        self.transport = transport
        self.one_sided = end.one_sided
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end = end
        self._context = context
        self._leases = context.leases
        self._counters = context.counters
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[str] = self._loop.create_future()
        self._last_lease_id = 0
        self._next_seq = 0
        self._same_host = hello.host_id == host_id()
        self._outgoing: asyncio.Queue[worker_pb2.DecodeMessage] = asyncio.Queue()
        self._thread: ReceiveThread[_SegmentName | None] = ReceiveThread(
            end,
            context.checksummer,
            name=f"kv-receive-{self.name}",
            timeout_s=context.options.timeout_s,
            on_verified=partial(call_in_loop, self._loop, self._on_verified),
            on_error=partial(call_in_loop, self._loop, self.fail),
        )
        self._peer_process = ProcessWatch(hello.pid) if self._same_host and self.one_sided else None
        self._writer = asyncio.create_task(self._write(send))

    async def serve(self, messages: AsyncIterator[worker_pb2.PrefillMessage]) -> str:
        """Until the stream ends (empty) or the pair fails (the reason). Raises Malformed."""
        reader = asyncio.create_task(self._read(messages))
        try:
            either: set[asyncio.Future[Any]] = {reader, self._failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                return self._failure.result()
            reader.result()
            return ""
        finally:
            reader.cancel()
            self._failure.cancel()

    def write(self, **kind: Any) -> None:
        self._outgoing.put_nowait(worker_pb2.DecodeMessage(**kind))

    def revoke(self, permit: WritePermit) -> None:
        self._thread.revoke(permit)

    def fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_result(reason)

    def close(self) -> None:
        self._thread.abort()
        self._writer.cancel()
        if not self.gone.done():
            self.gone.set_result(None)

    def forget(self) -> None:
        """Nothing of the pair is left."""
        self._end.forget()
        if self._peer_process is not None:
            self._peer_process.close()

    def peer_has_stopped(self) -> bool:
        """One-sided: whether the peer closed its end or is dead, so that nothing is written any more."""
        return self._end.sender_closed or (self._peer_process is not None and self._peer_process.has_exited)

    def end_peer(self, reason: str) -> None:
        """Kill the peer's process if it is one that has our memory mapped and can be killed, and end the pair."""
        watch, inode = self._peer_process, self._end.mapped_inode
        why_not = watch.kill(inode) if watch is not None else "its process is not known here"
        what = f"its pages are quarantined: {why_not}" if why_not else "its process was killed"
        log.warning("%s: %s; %s", self.name, reason, what)
        self._counters["peers_killed"] += not why_not
        self.fail(f"{self.name}: {reason}")

    async def _write(self, send: Callable[[worker_pb2.DecodeMessage], Awaitable[None]]) -> None:
        with suppress(ConnectionError):
            while True:
                await send(await self._outgoing.get())

    async def _read(self, messages: AsyncIterator[worker_pb2.PrefillMessage]) -> None:
        async for message in messages:
            self._on_message(message)

    def _on_message(self, message: worker_pb2.PrefillMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind is None or kind == "hello":
            raise Malformed(
                f"{self.name} sent {kind or 'an empty message'} where a reserve, announce or commit belongs"
            )
        body: Any = getattr(message, kind)
        if kind == "reserve":
            self._on_reserve(body)
            return
        if body.lease_id > self._last_lease_id:
            raise Malformed(
                f"{self.name} speaks of lease {body.lease_id}, but the last it asked for is {self._last_lease_id}"
            )
        reservation = self._leases.get((self.id, body.lease_id))
        if kind == "announce":
            self._on_announce(reservation, body)
        elif reservation is None:
            pass  # over meanwhile, and the peer has been told
        elif kind == "commit":
            self._on_commit(reservation, body)
        elif kind == "abort":
            self._leases.on_stopped(reservation, f"{self.name} gave up: {body.reason}")
        elif kind == "stopped":
            self._leases.on_stopped(reservation, f"{self.name} stopped")

    def _on_reserve(self, reserve: worker_pb2.Reserve) -> None:
        if reserve.lease_id <= self._last_lease_id:
            raise Malformed(f"{self.name} asks for lease {reserve.lease_id} after lease {self._last_lease_id}")
        self._last_lease_id = reserve.lease_id
        self._leases.reserve(self, reserve)

    def _on_announce(self, reservation: Reservation | None, announce: worker_pb2.Announce) -> None:
        check_size(self.name, announce, self._context.layout, one_sided=self.one_sided)
        if reservation is not None and reservation.incoming is None:
            raise Malformed(f"{self.name} announces KV for lease {announce.lease_id}, which is queued")
        if announce.transfer_seq != self._next_seq:
            raise Malformed(f"{self.name} announces transfer {announce.transfer_seq}; {self._next_seq} is next")
        self._next_seq += 1
        if reservation is None or reservation.incoming is None or not self._leases.is_live(reservation):
            self._drop_segment(announce)
        else:
            self._take_segment(reservation, reservation.incoming, announce)

    def _drop_segment(self, announce: worker_pb2.Announce) -> None:
        """The lease is over. Two-sided: the bytes are on their way all the same, and must be received."""
        if not self.one_sided:
            segment = _segment(announce, range(announce.page_end - announce.page_begin))
            self._thread.put(AnnouncedSegment(token=None, segment=segment, permit=None, checksum=None))

    def _take_segment(self, reservation: Reservation, incoming: IncomingKv, announce: worker_pb2.Announce) -> None:
        check_announce(self.name, announce, incoming, max_resends=self._context.options.max_resends)
        incoming.segments.append(announce)
        self._leases.touch(reservation)
        self._counters["resends"] += announce.resend
        is_checked = self._context.options.checksums and not announce.checksum_off
        self._thread.put(
            AnnouncedSegment(
                token=(reservation, incoming, announce.segment),
                segment=_segment(announce, incoming.granted.pages[announce.page_begin : announce.page_end]),
                permit=incoming.permit,
                checksum=announce.checksum if is_checked else None,
            )
        )

    def _on_verified(self, name: _SegmentName | None, is_intact: bool, took_s: float) -> None:
        if name is None:
            return
        reservation, incoming, number = name
        if not self._leases.is_live(reservation):
            return  # its pages may be another's by now: what was read of them says nothing
        announce = incoming.segments[number]
        self._counters["segments_received"] += 1
        self._counters["bytes_received"] += announce.bytes if is_intact else 0
        self._counters["checksum_mismatches"] += not is_intact
        transfer_s = announce.transfer_s if self.one_sided else took_s
        incoming.on_verified(number, is_intact=is_intact, transfer_s=transfer_s)
        self._leases.touch(reservation)
        self._answer_if_complete(reservation, incoming)

    def _on_commit(self, reservation: Reservation, commit: worker_pb2.Commit) -> None:
        incoming = reservation.incoming
        if incoming is not None and not self._leases.is_live(reservation):
            return  # ended meanwhile, and the peer has been told
        if incoming is None or incoming.commit is not None:
            why = "is queued" if incoming is None else "is committed already"
            raise Malformed(f"{self.name} commits lease {commit.lease_id}, which {why}")
        check_commit(self.name, commit, reservation, self._context.vocab_size)
        incoming.take_commit(commit, pages_for(commit.num_tokens, self._context.layout.page_size))
        self._answer_if_complete(reservation, incoming)

    def _answer_if_complete(self, reservation: Reservation, incoming: IncomingKv) -> None:
        """Give the receipt once every announced segment was looked at."""
        commit = incoming.commit
        if commit is None or not incoming.is_ready_for_receipt:
            return
        if not incoming.is_whole:
            self._counters["receipts_bad"] += 1
            self.write(receipt=incoming.reject(commit.lease_id))
            return
        if commit.unread_tokens and not self._leases.reads_prompts:
            self.write(receipt=incoming.refuse(commit.lease_id, "it reads no prompts"))
            return
        self._counters["receipts_good"] += 1
        # The peer's clock counts on one host only.
        exposed_s = max(0.0, (time.monotonic_ns() - commit.computed_ns) / 1e9) if self._same_host else 0.0
        checksums = self._context.options.checksums
        receipt = incoming.handoff_receipt(self.transport, checksums=checksums, exposed_s=exposed_s)
        self._leases.commit(reservation, commit, receipt)
        self.write(receipt=incoming.accept(commit.lease_id))


def _segment(announce: worker_pb2.Announce, dst_pages: range | tuple[int, ...]) -> Segment:
    layers = range(announce.layer_begin, announce.layer_end)
    return Segment(seq=announce.transfer_seq, layers=layers, src_pages=(), dst_pages=dst_pages)
