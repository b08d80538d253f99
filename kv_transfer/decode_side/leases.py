"""LeaseKeeper keeps the promise that was made with a decode worker's pages, for the reservations of all its pairs.

Who may have pages is the ReservationHost's decision. A reservation's life:

    reserve -> host.reserve -> Denied
                            -> Queued -> grant() / end()
                            -> Granted: lease -> segments verified one by one -> commit -> on_committed
                                              \\-> stopped, end(), expiry, lost pair -> fence -> on_lease_released

Every reservation that was granted or queued ends with exactly one call of the host: on_committed, or
on_lease_released (not for what the host itself denied). One-sided transports write into the pages by themselves, so
there the second waits until the peer has said that it stopped, has closed its end, or is known to be dead. One that
does neither for `fence_timeout_s` hangs: its pair is told to end it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Container

from kv_transfer.decode_side.reservation import (
    Attempt,
    IncomingKv,
    LeaseKey,
    Reservation,
    ReservationHost,
    ReservingPair,
)
from kv_transfer.lease import Denied, Ended, Granted, LeaseState, LeaseTable, Queued
from kv_transfer.options import TransferOptions
from kvrelay.v1 import generate_pb2, worker_pb2

MAX_OF_A_PAIR = 4096  # reservations: a prefill worker holds pages for each


class LeaseKeeper:
    """Used in the event loop."""

    def __init__(
        self, host: ReservationHost, *, name: str, num_layers: int, options: TransferOptions, counters: Counter[str]
    ) -> None:
        self._host = host
        self._name = name
        self._num_layers = num_layers
        self._lease_ttl_s = options.lease_ttl_s
        self._counters = counters
        self._table: LeaseTable[LeaseKey] = LeaseTable(options.fence_timeout_s)
        self._reservations: dict[LeaseKey, Reservation] = {}
        self._by_attempt: dict[Attempt, Reservation] = {}
        self._num_of: Counter[str] = Counter()  # reservations, by pair; those that have none are not in it
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    # --- for the host ---

    @property
    def reads_prompts(self) -> bool:
        """The host goes on with what is not read to its end."""
        return self._host.reads_prompts

    @property
    def leased_pages(self) -> int:
        """Pages under a lease, those that wait for a fence or are quarantined counted."""
        return self._table.leased_pages

    @property
    def fenced_pages(self) -> int:
        return self._table.pages_in(LeaseState.FENCING)

    @property
    def quarantined_pages(self) -> int:
        return self._table.pages_in(LeaseState.QUARANTINED)

    def grant(self, request_id: str, attempt: int, granted: Granted) -> None:
        """A queued reservation's turn has come."""
        reservation = self._by_attempt[request_id, attempt]
        assert reservation.incoming is None, f"{request_id} attempt {attempt} is granted twice"
        self._grant(reservation, granted)

    def end(self, request_id: str, reason: str) -> None:
        """The request is not wanted any more: end its lease or queued reservation. Nothing for one not known."""
        for reservation in [r for r in self._reservations.values() if r.request.request_id == request_id]:
            self._end(reservation, reason)

    def check_invariants(self, pairs: Container[str]) -> None:
        """`pairs`: ids of those that may have reservations."""
        self._table.check_invariants()
        assert len(self._by_attempt) == len(self._reservations), "a reservation is filed once only"
        for key, reservation in self._reservations.items():
            attempt, lease = reservation.attempt, self._table.get(key)
            assert key == reservation.key, f"reservation {reservation.key} is filed under {key}"
            assert self._by_attempt[attempt] is reservation, f"{attempt} is filed as another reservation"
            assert (lease is not None) == (reservation.incoming is not None), f"{attempt} disagrees with {lease}"
            assert reservation.pair.id in pairs, f"{attempt} belongs to no pair"
        assert self._num_of == Counter(r.pair.id for r in self._reservations.values()), "a pair's sum is wrong"
        granted = sum(r.incoming is not None for r in self._reservations.values())
        assert granted == len(self._table), f"{len(self._table)} leases for {granted} granted reservations"

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    # --- for the pairs ---

    def get(self, key: LeaseKey) -> Reservation | None:
        return self._reservations.get(key)

    def reserve(self, pair: ReservingPair, reserve: worker_pb2.Reserve) -> None:
        """Ask the host, and tell the peer what it says."""
        reservation = Reservation(pair, reserve.lease_id, reserve.request, reserve.room_tokens)
        if reservation.attempt in self._by_attempt:
            reason = f"{self._name} still holds an earlier reservation of attempt {reserve.request.attempt}"
            pair.write(denied=worker_pb2.LeaseDenied(lease_id=reserve.lease_id, reason=reason, retryable=True))
            return
        if self._num_of[pair.id] >= MAX_OF_A_PAIR:
            reason = f"{self._name} keeps {MAX_OF_A_PAIR} reservations of {pair.id} already"
            pair.write(denied=worker_pb2.LeaseDenied(lease_id=reserve.lease_id, reason=reason, retryable=True))
            return
        answer = self._host.reserve(reserve.request, reserve.room_tokens)
        self._num_of[pair.id] += 1
        self._reservations[reservation.key] = reservation
        self._by_attempt[reservation.attempt] = reservation
        if isinstance(answer, Granted):
            self._grant(reservation, answer)
        elif isinstance(answer, Queued):
            pair.write(queued=worker_pb2.LeaseQueued(lease_id=reservation.lease_id, reason=answer.reason))
        else:
            self._deny(reservation, answer)

    def is_live(self, reservation: Reservation) -> bool:
        """Whether it has pages and may fill them."""
        lease = self._table.get(reservation.key)
        return lease is not None and lease.state is LeaseState.GRANTED

    def touch(self, reservation: Reservation) -> None:
        """Progress: the lease lasts another while."""
        self._table.touch(reservation.key, asyncio.get_running_loop().time())

    def commit(self, reservation: Reservation, commit: worker_pb2.Commit, receipt: generate_pb2.HandoffReceipt) -> None:
        """All has arrived: the pages pass to the request."""
        self._table.commit(reservation.key)
        self._drop(reservation)
        if commit.unread_tokens:
            self._host.on_committed_unread(reservation.request, commit.num_tokens, receipt)
        else:
            self._host.on_committed(reservation.request, [*commit.more_token_ids, commit.token_id], receipt)

    def on_stopped(self, reservation: Reservation, reason: str) -> None:
        """The peer writes no more: it answers our end, or gives up itself."""
        if reservation.incoming is None:
            self._end(reservation, reason)
            return
        self._counters["leases_aborted"] += self.is_live(reservation)
        reservation.pair.revoke(reservation.incoming.permit)
        lease = self._table.on_stopped(reservation.key, reason)
        if lease is not None:
            self._release(reservation, lease.reason)

    # --- for the servicer, when a pair is lost ---

    def has_any_of(self, pair_id: str) -> bool:
        return pair_id in self._num_of

    def end_all_of(self, pair_id: str, reason: str) -> None:
        """The stream is over: so are its reservations; one-sided pages wait for the fence."""
        for reservation in [r for r in self._reservations.values() if r.pair.id == pair_id]:
            self._end(reservation, reason)

    def on_peer_dead(self, pair_id: str, reason: str) -> None:
        """The fence of a lost pair: nothing of its peer writes any more."""
        for lease in self._table.on_peer_dead(pair_id, reason):
            self._release(self._reservations[lease.key], lease.reason)

    # --- the steps of a reservation's life ---

    def _grant(self, reservation: Reservation, granted: Granted) -> None:
        reservation.incoming = IncomingKv(granted, self._num_layers)
        self._table.grant(
            reservation.key,
            reservation.request.request_id,
            reservation.pair.id,
            granted.pages[granted.cached_pages :],
            asyncio.get_running_loop().time(),
            self._lease_ttl_s,
            one_sided=reservation.pair.one_sided,
        )
        self._counters["leases_granted"] += 1
        self._arm_timer()
        told = worker_pb2.LeaseGranted(
            lease_id=reservation.lease_id, pages=granted.pages, cached_pages=granted.cached_pages
        )
        reservation.pair.write(granted=told)

    def _deny(self, reservation: Reservation, answer: Denied) -> None:
        self._drop(reservation)
        denied = worker_pb2.LeaseDenied(
            lease_id=reservation.lease_id, reason=answer.reason, retryable=answer.retryable, unable=answer.unable
        )
        reservation.pair.write(denied=denied)

    def _end(self, reservation: Reservation, reason: str) -> None:
        if reservation.incoming is None:
            self._deny(reservation, Denied(reason, retryable=True))  # where it is still wanted, another has room
            self._host.on_lease_released(reservation.request, reason)
            return
        ended = self._table.end(reservation.key, reason, asyncio.get_running_loop().time())
        if ended is not None:
            self._on_ended(reservation, reservation.incoming, ended)

    def _on_ended(self, reservation: Reservation, incoming: IncomingKv, ended: Ended[LeaseKey]) -> None:
        """Tell the peer. Two-sided: only our thread writes into the pages, and not once the permit is revoked."""
        reservation.pair.revoke(incoming.permit)
        self._counters["leases_ended"] += 1
        reservation.pair.write(ended=worker_pb2.LeaseEnded(lease_id=reservation.lease_id, reason=ended.lease.reason))
        if ended.released:
            self._release(reservation, ended.lease.reason)
        else:
            self._arm_timer()

    def _release(self, reservation: Reservation, reason: str) -> None:
        self._drop(reservation)
        self._host.on_lease_released(reservation.request, reason)

    def _drop(self, reservation: Reservation) -> None:
        del self._reservations[reservation.key]
        del self._by_attempt[reservation.attempt]
        pair_id = reservation.pair.id
        self._num_of[pair_id] -= 1
        if not self._num_of[pair_id]:
            del self._num_of[pair_id]

    def _arm_timer(self) -> None:
        """One timer, only while something has a bound. Progress moves a lease's end, so it may find nothing."""
        due_s = self._table.next_due_s
        if due_s is None or self._is_closed or (self._timer is not None and self._timer.when() <= due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due_s, self._on_due)

    def _on_due(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for ended in self._table.expire(now):
            self._counters["leases_expired"] += 1
            reservation = self._reservations[ended.lease.key]
            assert reservation.incoming is not None, f"{ended.lease.key} has a lease and no pages"
            self._on_ended(reservation, reservation.incoming, ended)
        overdue = self._table.quarantine_overdue(now)
        self._counters["leases_quarantined"] += len(overdue)
        for pair in {self._reservations[lease.key].pair for lease in overdue}:
            pair.end_peer(f"it has not stopped writing for {self._table.fence_timeout_s:g} s")
        self._arm_timer()
