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
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Protocol

import grpc
import grpc.aio
import numpy as np

from engine.pages.memory import KvMemory
from kv_transfer.base import ReceiveEnd, TransferError
from kv_transfer.checksum import Checksummer, SegmentChecksummer, device_checksummer
from kv_transfer.decode_side.pair import DecodePair, LeaseKey, Malformed, Reservation
from kv_transfer.handshake import host_id, mismatch
from kv_transfer.lease import Denied, Ended, Granted, LeaseState, LeaseTable, Queued
from kv_transfer.options import TransferOptions
from kv_transfer.transports.registry import MODULES, load_transport, usable
from kvrelay.v1 import generate_pb2, worker_pb2, worker_pb2_grpc

FENCE_POLL_S = 0.05  # how often a lost sender is looked at, while pages wait for it


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
        on_device = device_checksummer(memory)  # a GPU's kernels are compiled here, not in the first handshake
        self.checksummer: SegmentChecksummer = on_device or Checksummer(memory)
        self.counters: Counter[str] = Counter()
        self._host = host
        self._me = me
        self._model_fingerprint = model_fingerprint
        self._lease_ttl_s = lease_ttl_s
        self._address_host = address_host
        self._table: LeaseTable[LeaseKey] = LeaseTable()
        self._reservations: dict[tuple[str, int], Reservation] = {}  # by request id and attempt
        self._pairs: set[DecodePair] = set()
        self._fenced_pairs: set[DecodePair] = set()  # lost, but their sender may still write
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
        code = grpc.StatusCode.UNAVAILABLE
        try:
            reason = await pair.serve(request_iterator)
        except Malformed as error:
            code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        finally:
            self._on_pair_gone(pair)
        if reason:
            await context.abort(code, reason)

    def _mismatch(self, hello: worker_pb2.HandoffHello) -> str:
        """Why the two do not fit together, with both values; empty if they do."""
        if self._is_closed:
            return f"{self._me.name} is stopping"
        return mismatch(hello, self._me, self._model_fingerprint, self.memory.layout)

    def _offer(self, hello: worker_pb2.HandoffHello) -> tuple[str, ReceiveEnd] | str:
        """The first transport of the sender's that works here, or why none does."""
        why: list[str] = []
        for name in usable(hello.transports, self.memory.device):
            if name not in self.options.transports or name not in MODULES:
                continue
            transport = load_transport(name)
            if transport.same_host_only and hello.host_id != host_id():
                why.append(f"{name} wants both on one host")
                continue
            try:
                timeout_s = self.options.timeout_s
                host = self._address_host
                return name, transport.offer(self.memory, peer=hello.worker.name, host=host, timeout_s=timeout_s)
            except TransferError as error:
                why.append(f"{name}: {error}")
        both = f"{self._me.name} takes {', '.join(self.options.transports)}"
        theirs = f"{hello.worker.name} offers {', '.join(hello.transports) or 'none'}"
        return "; ".join([f"no transport in common: {both}, {theirs}", *why])

    def _open_pair(
        self, hello: worker_pb2.HandoffHello, transport: str, end: ReceiveEnd, context: grpc.aio.ServicerContext
    ) -> DecodePair:
        self._num_pairs += 1
        self.counters["pairs_opened"] += 1
        pair = DecodePair(
            self, f"{hello.worker.name}/{hello.worker.incarnation}/{self._num_pairs}", hello, transport, end
        )
        self._pairs.add(pair)
        pair.start(partial(_send, context))
        pair.write(
            welcome=worker_pb2.HandoffWelcome(worker=self._me, transport=transport, transport_params=dict(end.params))
        )
        return pair

    def _on_pair_gone(self, pair: DecodePair) -> None:
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

    def on_reserve(self, pair: DecodePair, reserve: worker_pb2.Reserve) -> None:
        reservation = Reservation(pair, reserve.lease_id, reserve.request)
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

    def _grant(self, reservation: Reservation, granted: Granted) -> None:
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
            )
        )

    def _deny(self, reservation: Reservation, reason: str, retryable: bool) -> None:
        self._drop(reservation)
        denied = worker_pb2.LeaseDenied(lease_id=reservation.lease_id, reason=reason, retryable=retryable)
        reservation.pair.write(denied=denied)

    def _end(self, reservation: Reservation, reason: str) -> None:
        if reservation.granted is None:
            self._deny(reservation, reason, retryable=False)
            self._host.on_lease_released(reservation.request, reason)
            return
        ended = self._table.end(reservation.key, reason)
        if ended is not None:
            self._on_ended(reservation, ended)

    def _on_ended(self, reservation: Reservation, ended: Ended[LeaseKey]) -> None:
        """Tell the sender. Two-sided: only our thread writes into the pages, and not after its landing is closed."""
        reservation.pair.thread.close_landing(reservation.landing)
        self.counters["leases_ended"] += 1
        reservation.pair.write(ended=worker_pb2.LeaseEnded(lease_id=reservation.lease_id, reason=ended.lease.reason))
        if ended.released:
            self._release(reservation, ended.lease.reason)

    def _release(self, reservation: Reservation, reason: str) -> None:
        self._drop(reservation)
        self._host.on_lease_released(reservation.request, reason)

    def _drop(self, reservation: Reservation) -> None:
        del self._reservations[reservation.name]
        del reservation.pair.reservations[reservation.lease_id]

    def on_stopped(self, reservation: Reservation, reason: str) -> None:
        """The sender writes no more: it answers our end, or gives up itself."""
        if reservation.granted is None:
            self._end(reservation, reason)
            return
        self.counters["leases_aborted"] += self.is_live(reservation)
        reservation.pair.thread.close_landing(reservation.landing)
        lease = self._table.on_stopped(reservation.key, reason)
        if lease is not None:
            self._release(reservation, lease.reason)

    def touch(self, reservation: Reservation) -> None:
        self._table.touch(reservation.key, asyncio.get_running_loop().time())

    def is_live(self, reservation: Reservation) -> bool:
        lease = self._table.get(reservation.key)
        return lease is not None and lease.state is LeaseState.GRANTED

    def on_good_commit(self, reservation: Reservation, receipt: generate_pb2.HandoffReceipt) -> None:
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

    def _find(self, key: LeaseKey) -> Reservation:
        return next(r for r in self._reservations.values() if r.key == key)


async def _send(context: grpc.aio.ServicerContext, message: worker_pb2.DecodeMessage) -> None:
    try:
        await context.write(message)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        raise ConnectionError("the stream is over") from error
