"""DecodePair is a decode worker's side of its pair with one prefill worker: what is said, announced and verified on it.

It checks every message: what breaks the protocol is Malformed, and ends the pair with a sentence. Who may have pages,
and when they are free again, is HandoffServicer's (receiver.py), which it tells.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_transfer.base import ReceiveEnd, Segment
from kv_transfer.decode_side.thread import Arrival, Landing, ReceiveThread
from kv_transfer.handshake import host_id
from kv_transfer.lease import Granted
from kvrelay.v1 import generate_pb2, worker_pb2

if TYPE_CHECKING:
    from kv_transfer.decode_side.servicer import HandoffServicer

log = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 256 << 20  # staged on the way in

LeaseKey = tuple[str, int]  # (pair, lease id)


class Malformed(Exception):
    """The peer breaks the protocol: the pair is closed with this sentence."""


@dataclass(slots=True, eq=False)
class Reservation:
    pair: DecodePair
    lease_id: int
    request: worker_pb2.RequestState
    granted: Granted | None = None  # None: queued
    landing: Landing = field(default_factory=Landing)
    covered: np.ndarray[Any, np.dtype[np.bool_]] | None = None  # [layers, pages] that arrived intact
    segments: list[worker_pb2.Announce] = field(default_factory=list)
    bad: set[int] = field(default_factory=set)
    num_verified: int = 0
    nbytes: int = 0
    transfer_s: float = 0.0
    commit: worker_pb2.Commit | None = None

    @property
    def key(self) -> LeaseKey:
        return self.pair.id, self.lease_id

    @property
    def name(self) -> tuple[str, int]:
        return self.request.request_id, self.request.attempt


class DecodePair:
    """The pair with one prefill worker: its stream, its thread, its reservations by lease id."""

    def __init__(
        self, servicer: HandoffServicer, pair_id: str, hello: worker_pb2.HandoffHello, transport: str, end: ReceiveEnd
    ) -> None:
        self.id = pair_id
        self.name = hello.worker.name
        self.transport = transport
        self.one_sided = end.one_sided
        self.reservations: dict[int, Reservation] = {}
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._servicer = servicer
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[str] = self._loop.create_future()
        self._last_lease_id = 0
        self._next_seq = 0
        self._same_host = hello.host_id == host_id()
        self._sender = _Process(hello.pid) if self._same_host and self.one_sided else None
        self._outgoing: asyncio.Queue[worker_pb2.DecodeMessage] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    def start(self, send: Callable[[worker_pb2.DecodeMessage], Awaitable[None]]) -> None:
        """`send` writes one message to the peer; it raises ConnectionError when the stream is over."""
        self._writer = asyncio.create_task(self._write(send))
        self.thread: ReceiveThread[tuple[Reservation, int] | None] = ReceiveThread(
            self._end,
            self._servicer.checksummer,
            name=f"kv-receive-{self.name}",
            timeout_s=self._servicer.options.timeout_s,
            on_verified=lambda token, ok, took_s: self._in_loop(self._on_verified, token, ok, took_s),
            on_error=lambda reason: self._in_loop(self.fail, reason),
        )

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

    def fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_result(reason)

    def close(self) -> None:
        self.thread.abort()
        if self._writer is not None:
            self._writer.cancel()
        if not self.gone.done():
            self.gone.set_result(None)

    def forget(self) -> None:
        """Nothing of the pair is left."""
        if self._sender is not None:
            self._sender.close()

    def sender_has_stopped(self) -> bool:
        """One-sided: whether the sender closed its end or is dead, so that nothing is written any more."""
        return self._end.sender_closed or (self._sender is not None and self._sender.has_exited())

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
        reservation = self.reservations.get(body.lease_id)
        if kind == "announce":
            self._on_announce(reservation, body)
        elif reservation is None:
            pass  # over meanwhile, and the sender has been told
        elif kind == "commit":
            self._on_commit(reservation, body)
        elif kind == "abort":
            self._servicer.on_stopped(reservation, f"{self.name} gave up: {body.reason}")
        elif kind == "stopped":
            self._servicer.on_stopped(reservation, f"{self.name} stopped")

    def _on_reserve(self, reserve: worker_pb2.Reserve) -> None:
        if reserve.lease_id <= self._last_lease_id:
            raise Malformed(f"{self.name} asks for lease {reserve.lease_id} after lease {self._last_lease_id}")
        self._last_lease_id = reserve.lease_id
        self._servicer.on_reserve(self, reserve)

    def _on_announce(self, reservation: Reservation | None, announce: worker_pb2.Announce) -> None:
        layout = self._servicer.memory.layout
        layers = range(announce.layer_begin, announce.layer_end)
        num_pages = announce.page_end - announce.page_begin
        if not (0 <= layers.start < layers.stop <= layout.num_layers and 0 < num_pages <= layout.num_pages):
            raise Malformed(f"{self.name} announces {_range_text(announce)} of {layout.num_layers} layers")
        nbytes = layout.page_bytes(layers) * num_pages
        if announce.bytes != nbytes or (nbytes > MAX_SEGMENT_BYTES and not self.one_sided):
            raise Malformed(
                f"{self.name} announces {announce.bytes} bytes for {_range_text(announce)}, which is {nbytes}"
            )
        if reservation is not None and reservation.granted is None:
            raise Malformed(f"{self.name} announces KV for lease {announce.lease_id}, which is queued")
        if announce.transfer_seq != self._next_seq:
            raise Malformed(f"{self.name} announces transfer {announce.transfer_seq}; {self._next_seq} is next")
        self._next_seq += 1
        if reservation is None or not self._servicer.is_live(reservation):
            self._drop_segment(layers, num_pages, announce)
        else:
            self._take_segment(reservation, layers, announce)

    def _drop_segment(self, layers: range, num_pages: int, announce: worker_pb2.Announce) -> None:
        """The lease is over. Two-sided: the bytes are on their way all the same, and must be received."""
        if self.one_sided:
            return
        segment = Segment(seq=announce.transfer_seq, layers=layers, src_pages=(), dst_pages=range(num_pages))
        self.thread.put(Arrival(token=None, segment=segment, landing=None, checksum=None))

    def _take_segment(self, reservation: Reservation, layers: range, announce: worker_pb2.Announce) -> None:
        granted = reservation.granted
        assert granted is not None, "a live lease is granted"
        if not granted.cached_pages <= announce.page_begin < announce.page_end <= len(granted.pages):
            both = f"the lease has {len(granted.pages)}, {granted.cached_pages} of them cached"
            raise Malformed(f"{self.name} announces {_range_text(announce)}, but {both}")
        if announce.segment != len(reservation.segments):
            raise Malformed(f"{self.name} announces segment {announce.segment}; {len(reservation.segments)} is next")
        if reservation.commit is not None:
            raise Malformed(f"{self.name} announces a segment of lease {announce.lease_id} after its commit")
        reservation.segments.append(announce)
        self._servicer.touch(reservation)
        self._servicer.counters["resends"] += announce.resend
        is_checked = self._servicer.options.checksums and not announce.checksum_off
        self.thread.put(
            Arrival(
                token=(reservation, announce.segment),
                segment=Segment(
                    seq=announce.transfer_seq,
                    layers=layers,
                    src_pages=(),
                    dst_pages=granted.pages[announce.page_begin : announce.page_end],
                ),
                landing=reservation.landing,
                checksum=announce.checksum if is_checked else None,
            )
        )

    def _on_verified(self, token: tuple[Reservation, int] | None, is_intact: bool, took_s: float) -> None:
        if token is None:
            return
        reservation, number = token
        if not self._servicer.is_live(reservation):
            return  # its pages may be another's by now: what was read of them says nothing
        announce, counters = reservation.segments[number], self._servicer.counters
        counters["segments_received"] += 1
        counters["bytes_received"] += announce.bytes if is_intact else 0
        counters["checksum_mismatches"] += not is_intact
        assert reservation.covered is not None
        layers, pages = slice(announce.layer_begin, announce.layer_end), slice(announce.page_begin, announce.page_end)
        reservation.covered[layers, pages] = is_intact
        reservation.num_verified += 1
        reservation.nbytes += announce.bytes if is_intact else 0
        reservation.transfer_s += announce.transfer_s if self.one_sided else took_s
        if not is_intact:
            reservation.bad.add(number)
        self._servicer.touch(reservation)
        self._answer_if_complete(reservation)

    def _on_commit(self, reservation: Reservation, commit: worker_pb2.Commit) -> None:
        if reservation.granted is not None and not self._servicer.is_live(reservation):
            return  # ended meanwhile, and the sender has been told
        if reservation.granted is None or reservation.commit is not None:
            why = "is queued" if reservation.granted is None else "is committed already"
            raise Malformed(f"{self.name} commits lease {commit.lease_id}, which {why}")
        num_tokens = len(reservation.request.prompt_ids) + len(reservation.request.output_ids)
        if (commit.segments, commit.num_tokens) != (len(reservation.segments), num_tokens):
            ours = f"{len(reservation.segments)} segments and was reserved for {num_tokens} tokens"
            theirs = f"{commit.segments} segments and {commit.num_tokens} tokens"
            raise Malformed(f"{self.name} commits {theirs} to lease {commit.lease_id}, which has {ours}")
        reservation.commit = commit
        self._answer_if_complete(reservation)

    def _answer_if_complete(self, reservation: Reservation) -> None:
        """Give the receipt once every announced segment was looked at."""
        commit = reservation.commit
        if commit is None or reservation.num_verified < commit.segments:
            return
        assert reservation.covered is not None
        assert reservation.granted is not None
        if reservation.covered.all():
            self._servicer.counters["receipts_good"] += 1
            self._servicer.on_good_commit(reservation, self._receipt(reservation))
            pages = len(reservation.granted.pages) - reservation.granted.cached_pages
            self.write(
                receipt=worker_pb2.Receipt(lease_id=commit.lease_id, ok=True, pages=pages, bytes=reservation.nbytes)
            )
            return
        self._servicer.counters["receipts_bad"] += 1
        reservation.commit = None
        missing = int((~reservation.covered).any(0).sum())
        bad = sorted(n for n in reservation.bad if not _is_covered(reservation, n))
        reservation.bad.clear()
        why = f"{len(bad)} of {commit.segments} segments damaged" if bad else "nothing was announced for them"
        self.write(
            receipt=worker_pb2.Receipt(
                lease_id=commit.lease_id,
                bad_segments=bad,
                bytes=reservation.nbytes,
                reason=f"{missing} of {len(reservation.granted.pages)} pages are not whole: {why}",
            )
        )

    def _receipt(self, reservation: Reservation) -> generate_pb2.HandoffReceipt:
        """exposed_s needs the sender's clock: it is counted from the commit's computed_ns on one host only, else 0."""
        granted, commit = reservation.granted, reservation.commit
        assert granted is not None
        assert commit is not None
        is_checked = self._servicer.options.checksums and not any(s.checksum_off for s in reservation.segments)
        exposed_s = max(0.0, (time.monotonic_ns() - commit.computed_ns) / 1e9) if self._same_host else 0.0
        return generate_pb2.HandoffReceipt(
            transport=self.transport if reservation.segments else "",
            pages=len(granted.pages) - granted.cached_pages,
            bytes=reservation.nbytes,
            checksums_ok=is_checked,
            cached_pages=granted.cached_pages,
            resends=sum(s.resend for s in reservation.segments),
            transfer_s=reservation.transfer_s,
            exposed_s=exposed_s,
        )

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call, *args)


def _is_covered(reservation: Reservation, number: int) -> bool:
    """Whether the segment's range stands whole, by a later segment."""
    s = reservation.segments[number]
    assert reservation.covered is not None
    return bool(reservation.covered[s.layer_begin : s.layer_end, s.page_begin : s.page_end].all())


def _range_text(announce: worker_pb2.Announce) -> str:
    layers = f"layers {announce.layer_begin} to {announce.layer_end}"
    return f"{layers}, pages {announce.page_begin} to {announce.page_end}"


class _Process:
    """Whether a process has exited. One that cannot be watched (no descriptor left) never counts as dead: then only
    its own word frees the pages that it may write into."""

    def __init__(self, pid: int) -> None:
        self._pidfd = -1
        self._was_gone = False
        try:
            self._pidfd = os.pidfd_open(pid)
        except OverflowError:
            self._was_gone = True
        except OSError as error:
            self._was_gone = error.errno in (errno.ESRCH, errno.EINVAL)  # no such process, or not the number of one
            if not self._was_gone:
                log.warning("process %d cannot be watched: %s", pid, error)

    def has_exited(self) -> bool:
        if self._pidfd < 0:
            return self._was_gone
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
