"""HandoffServicer is a decode worker's side of all its pairs: it grants leases, verifies what arrives, gives receipts.

Who may have pages is the ReservationHost's decision; this module keeps the promise that was made with them. A
reservation's life:

    Reserve -> host.reserve -> Denied
                            -> Queued -> grant() / deny() / end()
                            -> Granted: lease -> segments verified one by one -> Commit -> good receipt -> on_committed
                                              \\-> Abort, end(), expiry, lost pair -> fence -> on_lease_released

Every reservation that was granted or queued ends with exactly one call of the host: on_committed, or
on_lease_released (not for what the host itself denied). One-sided transports write into the pages by themselves, so
there the second waits until the sender has said that it stopped, has closed its end, or is known to be dead.

All methods run in the event loop. Each pair has one thread that receives and verifies.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np

from engine.rpc import PROTOCOL_VERSION, host_id
from kv_transfer.base import ReceiveEnd, Segment, TransferError
from kv_transfer.base import TransferOptions as TransferOptions
from kv_transfer.checksum import Checksummer
from kv_transfer.lease import Denied as Denied
from kv_transfer.lease import Ended, LeaseState, LeaseTable
from kv_transfer.lease import Granted as Granted
from kv_transfer.lease import Queued as Queued
from kv_transfer.memory import KvMemory
from kv_transfer.receiving import Arrival, Landing, ReceiveThread
from kv_transfer.transports.registry import MODULES, load_transport
from kvrelay.v1 import generate_pb2, worker_pb2, worker_pb2_grpc

FENCE_POLL_S = 0.05  # how often a lost sender is looked at, while pages wait for it
MAX_SEGMENT_BYTES = 256 << 20  # staged on the way in

LeaseKey = tuple[str, int]  # (pair, lease id)


class ReservationHost(Protocol):
    """Who owns the pages: the decode worker's driver. Called in the event loop."""

    def reserve(self, request: worker_pb2.RequestState) -> Granted | Queued | Denied: ...

    def on_committed(
        self,
        request: worker_pb2.RequestState,
        token_id: int,
        num_tokens: int,
        receipt: generate_pb2.HandoffReceipt,
    ) -> None:
        """The pages belong to the running request now."""

    def on_lease_released(self, request: worker_pb2.RequestState, reason: str) -> None:
        """The reservation is over: its pages, if it had any, are nobody's and go back to the pool."""


class _Malformed(Exception):
    """The peer breaks the protocol: the pair is closed with this sentence."""


@dataclass(slots=True, eq=False)
class _Reservation:
    pair: _Pair
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


class HandoffServicer(worker_pb2_grpc.HandoffServicer):
    def __init__(
        self,
        host: ReservationHost,
        *,
        memory: KvMemory,
        me: worker_pb2.WorkerAddress,
        model_fingerprint: str,
        options: TransferOptions,
        lease_ttl_s: float,
        address_host: str,
    ) -> None:
        """`address_host`: this worker's address, on which two-sided transports listen."""
        self.memory = memory
        self.options = options
        self.checksummer = Checksummer(memory)
        self.counters: Counter[str] = Counter()
        self._host = host
        self._me = me
        self._model_fingerprint = model_fingerprint
        self._lease_ttl_s = lease_ttl_s
        self._address_host = address_host
        self._table: LeaseTable[LeaseKey] = LeaseTable()
        self._reservations: dict[tuple[str, int], _Reservation] = {}  # by request id and attempt
        self._pairs: set[_Pair] = set()
        self._fenced_pairs: set[_Pair] = set()  # lost, but their sender may still write
        self._expiry: asyncio.TimerHandle | None = None
        self._fence_poll: asyncio.TimerHandle | None = None
        self._num_pairs = 0
        self._is_closed = False

    # --- for the host ---

    @property
    def leased_pages(self) -> int:
        """Pages under a lease, those that wait for a fence counted."""
        return self._table.leased_pages

    def grant(self, request_id: str, attempt: int, granted: Granted) -> None:
        """A queued reservation's turn has come."""
        reservation = self._reservations[request_id, attempt]
        assert reservation.granted is None, f"{request_id} attempt {attempt} is granted twice"
        self._grant(reservation, granted)

    def deny(self, request_id: str, attempt: int, reason: str, retryable: bool) -> None:
        """A queued reservation will not be granted."""
        reservation = self._reservations[request_id, attempt]
        assert reservation.granted is None, f"{request_id} attempt {attempt} is granted already; end it"
        self._deny(reservation, reason, retryable)

    def end(self, request_id: str, reason: str) -> None:
        """The request is not wanted any more: end its lease or queued reservation. Nothing for one not known."""
        for reservation in [r for r in self._reservations.values() if r.request.request_id == request_id]:
            self._end(reservation, reason)

    def check_invariants(self) -> None:
        self._table.check_invariants()
        for name, reservation in self._reservations.items():
            assert name == reservation.name, f"reservation {reservation.name} is filed under {name}"
            lease = self._table.get(reservation.key)
            assert (lease is not None) == (reservation.granted is not None), f"{name} disagrees with its lease {lease}"
            assert reservation.pair in self._pairs | self._fenced_pairs, f"{name} belongs to no pair"
        granted = sum(r.granted is not None for r in self._reservations.values())
        assert granted == len(self._table), f"{len(self._table)} leases for {granted} granted reservations"

    async def close(self) -> None:
        """End every pair. Fenced pages stay fenced: only the end of this process frees them."""
        self._is_closed = True
        pairs = list(self._pairs)
        for pair in pairs:
            pair.fail(f"{self._me.name} is stopping")
        if pairs:
            await asyncio.wait([pair.gone for pair in pairs], timeout=1.0)
        for timer in (self._expiry, self._fence_poll):
            if timer is not None:
                timer.cancel()

    # --- the stream ---

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.PrefillMessage], context: grpc.aio.ServicerContext
    ) -> None:
        hello = (await anext(request_iterator, worker_pb2.PrefillMessage())).hello
        if not hello.protocol_version:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        mismatch = self._mismatch(hello)
        if mismatch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, mismatch)
        offer = self._offer(hello)
        if isinstance(offer, str):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, offer)
            return
        pair = self._open_pair(hello, *offer, context)
        try:
            code, reason = await pair.serve(request_iterator)
        finally:
            self._on_pair_gone(pair)
        if reason:
            await context.abort(code, reason)

    def _mismatch(self, hello: worker_pb2.HandoffHello) -> str:
        """Why the two do not fit together, with both values; empty if they do."""
        if self._is_closed:
            return f"{self._me.name} is stopping"
        ours_theirs = {
            "protocol version": (PROTOCOL_VERSION, hello.protocol_version),
            "model fingerprint": (self._model_fingerprint, hello.model_fingerprint),
            "KV layout": (self.memory.layout.signature, hello.layout),
            "tensor-parallel degree": (1, hello.tensor_parallel),
            "pipeline-parallel degree": (1, hello.pipeline_parallel),
        }
        for what, (ours, theirs) in ours_theirs.items():
            if ours != theirs:
                return (
                    f"{what} of {self._me.name} is {ours}, but of {hello.worker.name} {theirs}; they must be the same"
                )
        return ""

    def _offer(self, hello: worker_pb2.HandoffHello) -> tuple[str, ReceiveEnd] | str:
        """The first transport of the sender's that works here, or why none does."""
        why: list[str] = []
        for name in hello.transports:
            if name not in self.options.transports or name not in MODULES:
                continue
            transport = load_transport(name)
            if transport.same_host_only and hello.host_id != host_id():
                why.append(f"{name} wants both on one host")
                continue
            try:
                timeout_s = self.options.transfer_timeout_s
                host = self._address_host
                return name, transport.offer(self.memory, peer=hello.worker.name, host=host, timeout_s=timeout_s)
            except TransferError as error:
                why.append(f"{name}: {error}")
        both = f"{self._me.name} takes {', '.join(self.options.transports)}"
        theirs = f"{hello.worker.name} offers {', '.join(hello.transports) or 'none'}"
        return "; ".join([f"no transport in common: {both}, {theirs}", *why])

    def _open_pair(
        self, hello: worker_pb2.HandoffHello, transport: str, end: ReceiveEnd, context: grpc.aio.ServicerContext
    ) -> _Pair:
        self._num_pairs += 1
        self.counters["pairs_opened"] += 1
        pair = _Pair(self, f"{hello.worker.name}/{hello.worker.incarnation}/{self._num_pairs}", hello, transport, end)
        self._pairs.add(pair)
        pair.start(context)
        pair.write(
            welcome=worker_pb2.HandoffWelcome(worker=self._me, transport=transport, transport_params=dict(end.params))
        )
        return pair

    def _on_pair_gone(self, pair: _Pair) -> None:
        """The stream is over: so are the pair's reservations; one-sided pages wait for the fence."""
        self.counters["pairs_closed"] += 1
        reason = f"{pair.name} is gone"
        self._pairs.discard(pair)
        self._fenced_pairs.add(pair)
        pair.close()
        for reservation in list(pair.reservations.values()):
            self._end(reservation, reason)
        self._poll_fences()

    def _poll_fences(self) -> None:
        if self._fence_poll is not None:
            self._fence_poll.cancel()
            self._fence_poll = None
        for pair in list(self._fenced_pairs):
            if pair.reservations and pair.sender_has_stopped():
                for lease in self._table.on_peer_dead(pair.id, f"{pair.name} is gone"):
                    self._release(pair.reservations[lease.key[1]], lease.reason)
            if not pair.reservations:
                self._fenced_pairs.discard(pair)
                pair.forget()
        if self._fenced_pairs and not self._is_closed:
            self._fence_poll = asyncio.get_running_loop().call_later(FENCE_POLL_S, self._poll_fences)

    # --- reservations ---

    def on_reserve(self, pair: _Pair, reserve: worker_pb2.Reserve) -> None:
        reservation = _Reservation(pair, reserve.lease_id, reserve.request)
        if reservation.name in self._reservations:
            reason = f"{self._me.name} still holds an earlier reservation of attempt {reserve.request.attempt}"
            pair.write(denied=worker_pb2.LeaseDenied(lease_id=reserve.lease_id, reason=reason, retryable=True))
            return
        answer = self._host.reserve(reserve.request)
        self._reservations[reservation.name] = reservation
        pair.reservations[reservation.lease_id] = reservation
        if isinstance(answer, Granted):
            self._grant(reservation, answer)
        elif isinstance(answer, Queued):
            pair.write(queued=worker_pb2.LeaseQueued(lease_id=reservation.lease_id, reason=answer.reason))
        else:
            self._deny(reservation, answer.reason, answer.retryable)

    def _grant(self, reservation: _Reservation, granted: Granted) -> None:
        assert 0 <= granted.cached_pages <= len(granted.pages), f"{granted.cached_pages} of {len(granted.pages)} cached"
        pair, now = reservation.pair, asyncio.get_running_loop().time()
        reservation.granted = granted
        reservation.covered = np.zeros((self.memory.layout.num_layers, len(granted.pages)), np.bool_)
        reservation.covered[:, : granted.cached_pages] = True
        self._table.grant(
            reservation.key,
            reservation.request.request_id,
            pair.id,
            granted.pages[granted.cached_pages :],
            now,
            self._lease_ttl_s,
            one_sided=pair.one_sided,
        )
        self.counters["leases_granted"] += 1
        self._arm_expiry()
        pair.write(
            granted=worker_pb2.LeaseGranted(
                lease_id=reservation.lease_id,
                pages=granted.pages,
                cached_pages=granted.cached_pages,
                ttl_ms=round(self._lease_ttl_s * 1000),
            )
        )

    def _deny(self, reservation: _Reservation, reason: str, retryable: bool) -> None:
        self._drop(reservation)
        denied = worker_pb2.LeaseDenied(lease_id=reservation.lease_id, reason=reason, retryable=retryable)
        reservation.pair.write(denied=denied)

    def _end(self, reservation: _Reservation, reason: str) -> None:
        if reservation.granted is None:
            self._deny(reservation, reason, retryable=False)
            self._host.on_lease_released(reservation.request, reason)
            return
        ended = self._table.end(reservation.key, reason)
        if ended is not None:
            self._on_ended(reservation, ended)

    def _on_ended(self, reservation: _Reservation, ended: Ended[LeaseKey]) -> None:
        """Tell the sender. Two-sided: only our thread writes into the pages, and not after its landing is closed."""
        reservation.pair.thread.close_landing(reservation.landing)
        self.counters["leases_ended"] += 1
        reservation.pair.write(ended=worker_pb2.LeaseEnded(lease_id=reservation.lease_id, reason=ended.lease.reason))
        if ended.released:
            self._release(reservation, ended.lease.reason)

    def _release(self, reservation: _Reservation, reason: str) -> None:
        self._drop(reservation)
        self._host.on_lease_released(reservation.request, reason)

    def _drop(self, reservation: _Reservation) -> None:
        del self._reservations[reservation.name]
        del reservation.pair.reservations[reservation.lease_id]

    def on_stopped(self, reservation: _Reservation, reason: str) -> None:
        """The sender writes no more: it answers our end, or gives up itself."""
        if reservation.granted is None:
            self._end(reservation, reason)
            return
        self.counters["leases_aborted"] += self.is_live(reservation)
        reservation.pair.thread.close_landing(reservation.landing)
        lease = self._table.on_stopped(reservation.key, reason)
        if lease is not None:
            self._release(reservation, lease.reason)

    def touch(self, reservation: _Reservation) -> None:
        self._table.touch(reservation.key, asyncio.get_running_loop().time())

    def is_live(self, reservation: _Reservation) -> bool:
        lease = self._table.get(reservation.key)
        return lease is not None and lease.state is LeaseState.GRANTED

    def on_good_commit(self, reservation: _Reservation, receipt: generate_pb2.HandoffReceipt) -> None:
        commit = reservation.commit
        assert commit is not None
        self._table.commit(reservation.key)
        self._drop(reservation)
        self._host.on_committed(reservation.request, commit.token_id, commit.num_tokens, receipt)

    def _arm_expiry(self) -> None:
        """One timer, only while something is granted. Progress moves a lease's end, so the timer may find nothing."""
        due_s = self._table.next_expiry_s
        if self._expiry is None and due_s is not None and not self._is_closed:
            self._expiry = asyncio.get_running_loop().call_at(due_s, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        for ended in self._table.expire(asyncio.get_running_loop().time()):
            self.counters["leases_expired"] += 1
            self._on_ended(self._find(ended.lease.key), ended)
        self._arm_expiry()

    def _find(self, key: LeaseKey) -> _Reservation:
        return next(r for r in self._reservations.values() if r.key == key)


class _Pair:
    """The pair with one prefill worker: its stream, its thread, its reservations by lease id."""

    def __init__(
        self, servicer: HandoffServicer, pair_id: str, hello: worker_pb2.HandoffHello, transport: str, end: ReceiveEnd
    ) -> None:
        self.id = pair_id
        self.name = hello.worker.name
        self.transport = transport
        self.one_sided = end.one_sided
        self.reservations: dict[int, _Reservation] = {}
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._servicer = servicer
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[str] = self._loop.create_future()
        self._last_lease_id = 0
        self._next_seq = 0
        self._same_host = hello.host_id == host_id()
        self._pidfd = _open_pidfd(hello.pid) if self._same_host and self.one_sided else -1
        self._outgoing: asyncio.Queue[worker_pb2.DecodeMessage] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    def start(self, context: grpc.aio.ServicerContext) -> None:
        self._writer = asyncio.create_task(self._write(context))
        self.thread: ReceiveThread[tuple[_Reservation, int] | None] = ReceiveThread(
            self._end,
            self._servicer.checksummer,
            name=f"kv-receive-{self.name}",
            timeout_s=self._servicer.options.transfer_timeout_s,
            on_verified=lambda token, ok, took_s: self._in_loop(self._on_verified, token, ok, took_s),
            on_error=lambda reason: self._in_loop(self.fail, reason),
        )

    async def serve(self, messages: AsyncIterator[worker_pb2.PrefillMessage]) -> tuple[grpc.StatusCode, str]:
        """Until the stream ends (empty reason) or the pair fails."""
        reader = asyncio.create_task(self._read(messages))
        try:
            either: set[asyncio.Future[Any]] = {reader, self._failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                return grpc.StatusCode.UNAVAILABLE, self._failure.result()
            reader.result()
            return grpc.StatusCode.OK, ""
        except _Malformed as error:
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
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
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def sender_has_stopped(self) -> bool:
        """One-sided: whether the sender closed its end or is dead, so that nothing is written any more."""
        return self._end.sender_closed or (self._same_host and _has_exited(self._pidfd))

    async def _write(self, context: grpc.aio.ServicerContext) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            while True:
                await context.write(await self._outgoing.get())

    async def _read(self, messages: AsyncIterator[worker_pb2.PrefillMessage]) -> None:
        async for message in messages:
            self._on_message(message)

    def _on_message(self, message: worker_pb2.PrefillMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind is None or kind == "hello":
            raise _Malformed(
                f"{self.name} sent {kind or 'an empty message'} where a reserve, announce or commit belongs"
            )
        body: Any = getattr(message, kind)
        if kind == "reserve":
            self._on_reserve(body)
            return
        if body.lease_id > self._last_lease_id:
            raise _Malformed(
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
            raise _Malformed(f"{self.name} asks for lease {reserve.lease_id} after lease {self._last_lease_id}")
        self._last_lease_id = reserve.lease_id
        self._servicer.on_reserve(self, reserve)

    def _on_announce(self, reservation: _Reservation | None, announce: worker_pb2.Announce) -> None:
        layout = self._servicer.memory.layout
        layers = range(announce.layer_begin, announce.layer_end)
        num_pages = announce.page_end - announce.page_begin
        if not (0 <= layers.start < layers.stop <= layout.num_layers and 0 < num_pages <= layout.num_pages):
            raise _Malformed(f"{self.name} announces {_range_text(announce)} of {layout.num_layers} layers")
        nbytes = layout.page_bytes(layers) * num_pages
        if announce.bytes != nbytes or (nbytes > MAX_SEGMENT_BYTES and not self.one_sided):
            raise _Malformed(
                f"{self.name} announces {announce.bytes} bytes for {_range_text(announce)}, which is {nbytes}"
            )
        if reservation is not None and reservation.granted is None:
            raise _Malformed(f"{self.name} announces KV for lease {announce.lease_id}, which is queued")
        if announce.transfer_seq != self._next_seq:
            raise _Malformed(f"{self.name} announces transfer {announce.transfer_seq}; {self._next_seq} is next")
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

    def _take_segment(self, reservation: _Reservation, layers: range, announce: worker_pb2.Announce) -> None:
        granted = reservation.granted
        assert granted is not None, "a live lease is granted"
        if not granted.cached_pages <= announce.page_begin < announce.page_end <= len(granted.pages):
            both = f"the lease has {len(granted.pages)}, {granted.cached_pages} of them cached"
            raise _Malformed(f"{self.name} announces {_range_text(announce)}, but {both}")
        if announce.segment != len(reservation.segments):
            raise _Malformed(f"{self.name} announces segment {announce.segment}; {len(reservation.segments)} is next")
        if reservation.commit is not None:
            raise _Malformed(f"{self.name} announces a segment of lease {announce.lease_id} after its commit")
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

    def _on_verified(self, token: tuple[_Reservation, int] | None, is_intact: bool, took_s: float) -> None:
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

    def _on_commit(self, reservation: _Reservation, commit: worker_pb2.Commit) -> None:
        if reservation.granted is not None and not self._servicer.is_live(reservation):
            return  # ended meanwhile, and the sender has been told
        if reservation.granted is None or reservation.commit is not None:
            why = "is queued" if reservation.granted is None else "is committed already"
            raise _Malformed(f"{self.name} commits lease {commit.lease_id}, which {why}")
        capacity = len(reservation.granted.pages) * self._servicer.memory.layout.page_size
        if commit.segments != len(reservation.segments) or not 0 < commit.num_tokens <= capacity:
            ours = f"{len(reservation.segments)} segments and room for {capacity} tokens"
            theirs = f"{commit.segments} segments and {commit.num_tokens} tokens"
            raise _Malformed(f"{self.name} commits {theirs} to lease {commit.lease_id}, which has {ours}")
        reservation.commit = commit
        self._answer_if_complete(reservation)

    def _answer_if_complete(self, reservation: _Reservation) -> None:
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

    def _receipt(self, reservation: _Reservation) -> generate_pb2.HandoffReceipt:
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


def _is_covered(reservation: _Reservation, number: int) -> bool:
    """Whether the segment's range stands whole, by a later segment."""
    s = reservation.segments[number]
    assert reservation.covered is not None
    return bool(reservation.covered[s.layer_begin : s.layer_end, s.page_begin : s.page_end].all())


def _range_text(announce: worker_pb2.Announce) -> str:
    layers = f"layers {announce.layer_begin} to {announce.layer_end}"
    return f"{layers}, pages {announce.page_begin} to {announce.page_end}"


def _open_pidfd(pid: int) -> int:
    """-1 if there is no such process any more."""
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError):
        return -1


def _has_exited(pidfd: int) -> bool:
    if pidfd < 0:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
