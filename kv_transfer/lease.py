"""LeaseTable owns the promise that a peer may write into pages, and the moment at which that promise is over.

It never reads a clock (its driver passes `now`, in seconds) and never touches a page's bytes: it says when pages are
free to be used again, and the caller gives them back to the pool. The life of a lease:

    grant --> GRANTED --commit--------------------------> gone: the pages belong to the running request
                 |  touch: the end moves away
                 |--end / expire, two-sided-------------> gone: the pages are free (only we write into them)
                 '--end / expire, one-sided--> FENCING --on_stopped / on_peer_dead--> gone: the pages are free
                                                 '--quarantine_overdue--> QUARANTINED
                                                                               '--on_stopped / on_peer_dead--> gone

One-sided: the peer writes into our memory by itself, so a lease that ended may still be written to until the peer has
said that it stopped or is known to be dead. A fence that lasts longer than `fence_timeout_s` tells of a peer that
hangs: its pages are counted apart, and the caller does what it can to end the peer (decode_side/process_watch.py). No
clock frees them: a stopped process goes on in the middle of its write when it is woken.

Every lease leaves the table exactly once, and its pages with it: by `commit`, or returned by the call that made its
pages free. GRANTED ends within ttl_s of the last progress and FENCING within fence_timeout_s; only QUARANTINED lasts as
long as the peer does.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

MOVE_ROOM_TOKENS = 64  # that a running request may grow by while it moves: pages for these are leased with it

LeaseKey = TypeVar("LeaseKey", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Granted:
    """One page for each page of the tokens handed over; the first `cached_pages` hold the right KV already."""

    pages: tuple[int, ...]
    cached_pages: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """No pages now; the reservation keeps its place."""

    reason: str


@dataclass(frozen=True, slots=True)
class Denied:
    """No pages ever; `retryable` says whether another decode worker may do better. `unable`: it is not, but for this
    worker, which cannot serve such a request."""

    reason: str
    retryable: bool
    unable: bool = False


class LeaseState(StrEnum):
    GRANTED = "granted"
    FENCING = "fencing"  # over, but the peer may still be writing
    QUARANTINED = "quarantined"  # over for so long that the peer must hang: out of use until that is dead or awake


@dataclass(slots=True, kw_only=True)
class Lease(Generic[LeaseKey]):
    key: LeaseKey
    request_id: str
    peer: str
    pages: tuple[int, ...]
    one_sided: bool
    ttl_s: float
    due_s: float  # when its state is over, if nothing happens: GRANTED ends, FENCING is quarantined
    state: LeaseState = LeaseState.GRANTED
    reason: str = ""  # why it ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Generic[LeaseKey]):
    """A lease that ended. `released`: its pages are free now; otherwise they wait for the fence."""

    lease: Lease[LeaseKey]
    released: bool


@dataclass(slots=True)
class LeaseTable(Generic[LeaseKey]):
    fence_timeout_s: float
    _leases: dict[LeaseKey, Lease[LeaseKey]] = field(default_factory=dict)
    _page_of: dict[int, LeaseKey] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, key: LeaseKey) -> Lease[LeaseKey] | None:
        return self._leases.get(key)

    @property
    def leased_pages(self) -> int:
        """Pages under a lease, whatever its state."""
        return len(self._page_of)

    def pages_in(self, state: LeaseState) -> int:
        return sum(len(lease.pages) for lease in self._leases.values() if lease.state is state)

    @property
    def next_due_s(self) -> float | None:
        """When `expire` or `quarantine_overdue` will next find something; None: never, as it stands."""
        timed = (x.due_s for x in self._leases.values() if x.state is not LeaseState.QUARANTINED)
        return min(timed, default=None)

    def grant(
        self,
        key: LeaseKey,
        request_id: str,
        peer: str,
        pages: tuple[int, ...],
        now: float,
        ttl_s: float,
        *,
        one_sided: bool,
    ) -> None:
        """Let `peer` fill `pages` until ttl_s pass without progress. A page may be listed once, in one lease only."""
        assert key not in self._leases, f"lease {key} is granted twice"
        assert len(set(pages)) == len(pages), f"lease {key} lists a page twice"
        for page in pages:
            assert page not in self._page_of, f"page {page} is under lease {self._page_of[page]} already"
        self._leases[key] = Lease(
            key=key,
            request_id=request_id,
            peer=peer,
            pages=pages,
            one_sided=one_sided,
            ttl_s=ttl_s,
            due_s=now + ttl_s,
        )
        self._page_of.update(dict.fromkeys(pages, key))

    def touch(self, key: LeaseKey, now: float) -> None:
        """Progress: the lease lasts another ttl from now. Nothing for a lease that is over."""
        lease = self._leases.get(key)
        if lease is not None and lease.state is LeaseState.GRANTED:
            lease.due_s = now + lease.ttl_s

    def commit(self, key: LeaseKey) -> tuple[int, ...]:
        """The pages pass to the request."""
        lease = self._leases[key]
        assert lease.state is LeaseState.GRANTED, f"lease {key} is committed but is {lease.state}: {lease.reason}"
        return self._remove(lease).pages

    def end(self, key: LeaseKey, reason: str, now: float) -> Ended[LeaseKey] | None:
        """The lease is over. None if it was already."""
        lease = self._leases.get(key)
        if lease is None or lease.state is not LeaseState.GRANTED:
            return None
        lease.reason = reason
        if not lease.one_sided:
            return Ended(lease=self._remove(lease), released=True)
        lease.state, lease.due_s = LeaseState.FENCING, now + self.fence_timeout_s
        return Ended(lease=lease, released=False)

    def on_stopped(self, key: LeaseKey, reason: str = "") -> Lease[LeaseKey] | None:
        """The peer says that it writes no more: the pages are free. None if the lease is gone already."""
        lease = self._leases.get(key)
        if lease is None:
            return None
        lease.reason = lease.reason or reason
        return self._remove(lease)

    def on_peer_dead(self, peer: str, reason: str) -> list[Lease[LeaseKey]]:
        """Nothing of `peer` writes any more: all its leases are over and their pages free."""
        gone = [lease for lease in self._leases.values() if lease.peer == peer]
        for lease in gone:
            lease.reason = lease.reason or reason
            self._remove(lease)
        return gone

    def expire(self, now: float) -> list[Ended[LeaseKey]]:
        """End every lease whose time is over."""
        due = self._due(LeaseState.GRANTED, now)
        ended = [self.end(lease.key, f"no progress for {lease.ttl_s:g} s", now) for lease in due]
        return [entry for entry in ended if entry is not None]

    def quarantine_overdue(self, now: float) -> list[Lease[LeaseKey]]:
        """Those whose peer has not stopped for fence_timeout_s since they ended, each told once."""
        overdue = self._due(LeaseState.FENCING, now)
        for lease in overdue:
            lease.state = LeaseState.QUARANTINED
        return overdue

    def _due(self, state: LeaseState, now: float) -> list[Lease[LeaseKey]]:
        return [lease for lease in self._leases.values() if lease.state is state and lease.due_s <= now]

    def _remove(self, lease: Lease[LeaseKey]) -> Lease[LeaseKey]:
        del self._leases[lease.key]
        for page in lease.pages:
            del self._page_of[page]
        return lease

    def check_invariants(self) -> None:
        """Assert that every leased page is under exactly one lease, and that only one-sided leases wait for a fence."""
        listed = {page: key for key, lease in self._leases.items() for page in lease.pages}
        assert sum(len(lease.pages) for lease in self._leases.values()) == len(listed), "a page is under two leases"
        assert listed == self._page_of, "the map of leased pages disagrees with the leases"
        for lease in self._leases.values():
            assert lease.state is LeaseState.GRANTED or lease.one_sided, (
                f"two-sided lease {lease.key} waits for a fence"
            )
