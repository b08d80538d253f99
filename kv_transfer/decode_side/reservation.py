"""A Reservation is one request's claim on a decode worker's pages; IncomingKv is what has arrived in them so far.

Both only keep account: LeaseKeeper (leases.py) says how long the claim lasts, DecodePair (pair.py) what is announced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.types import read_before_search
from kv_transfer.decode_side.thread import WritePermit
from kv_transfer.lease import Denied, Granted, Queued
from kvrelay.v1 import generate_pb2, worker_pb2

LeaseKey = tuple[str, int]  # (pair, lease id)
Attempt = tuple[str, int]  # (request id, number of the attempt)


class ReservationHost(Protocol):
    """Who owns the pages: the decode worker's driver. Called in the event loop."""

    @property
    def reads_prompts(self) -> bool:
        """It computes what is unread of a request when its KV is committed."""

    def reserve(self, request: worker_pb2.RequestState, room_tokens: int) -> Granted | Queued | Denied:
        """`room_tokens`: see Reserve; above 0 it is never Queued."""

    def on_committed(
        self,
        request: worker_pb2.RequestState,
        token_ids: Sequence[int],
        receipt: generate_pb2.HandoffReceipt,
    ) -> None:
        """The pages belong to the running request now. `token_ids` follow those of the reservation; the KV of the last
        is not there."""

    def on_committed_unread(
        self, request: worker_pb2.RequestState, num_tokens: int, receipt: generate_pb2.HandoffReceipt
    ) -> None:
        """Likewise; but only of the first `num_tokens` of the reservation's is the KV there, and the rest is computed
        here. Asked of those that read prompts."""

    def on_lease_released(self, request: worker_pb2.RequestState, reason: str) -> None:
        """The reservation is over: its pages, if it had any, are nobody's and go back to the pool."""


class ReservingPair(Protocol):
    """What is asked of the pair that a reservation came by."""

    @property
    def id(self) -> str: ...

    @property
    def one_sided(self) -> bool: ...

    def write(self, **kind: Any) -> None:
        """Queue one message to the peer."""

    def revoke(self, permit: WritePermit) -> None:
        """We put nothing into the permit's pages after this returns."""

    def end_peer(self, reason: str) -> None:
        """The peer hangs, and may write into pages when it is woken: it is of no more use."""


@dataclass(slots=True, eq=False)
class Reservation:
    pair: ReservingPair
    lease_id: int
    request: worker_pb2.RequestState
    room_tokens: int = 0  # that may follow the request's before the commit
    incoming: IncomingKv | None = None  # None: queued, no pages yet

    @property
    def key(self) -> LeaseKey:
        return self.pair.id, self.lease_id

    @property
    def attempt(self) -> Attempt:
        return self.request.request_id, self.request.attempt

    @property
    def num_tokens(self) -> int:
        """Whose KV will come."""
        if self.request.sampling.HasField("beam_search"):
            return read_before_search(len(self.request.prompt_ids))
        return len(self.request.prompt_ids) + len(self.request.output_ids) - self.request.dropped_tokens

    @property
    def most_more(self) -> int:
        """Tokens that it may have grown by when it is committed: the one that comes with it is not its last."""
        left = int(self.request.sampling.max_tokens) - len(self.request.output_ids)
        return max(0, min(self.room_tokens, left - 2))


class IncomingKv:
    """Which cells (layer, page) of a lease's pages hold the right KV, by the segments that were announced."""

    def __init__(self, granted: Granted, num_layers: int) -> None:
        assert 0 <= granted.cached_pages <= len(granted.pages), f"{granted.cached_pages} of {len(granted.pages)} cached"
        self.granted = granted
        self.permit = WritePermit()
        self.segments: list[worker_pb2.Announce] = []
        self.commit: worker_pb2.Commit | None = None
        self._num_pages = len(granted.pages)  # that must be filled: all, until the commit says how many
        self._is_intact = np.zeros((num_layers, len(granted.pages)), np.bool_)
        self._is_intact[:, : granted.cached_pages] = True
        self._damaged: set[int] = set()  # numbers of segments, since the last receipt
        self._num_verified = 0
        self._num_bytes = 0  # that arrived intact
        self._transfer_s = 0.0

    def on_verified(self, number: int, *, is_intact: bool, transfer_s: float) -> None:
        announce = self.segments[number]
        self._is_intact[_cells(announce)] = is_intact
        self._num_verified += 1
        self._transfer_s += transfer_s
        if is_intact:
            self._num_bytes += announce.bytes
        else:
            self._damaged.add(number)

    def take_commit(self, commit: worker_pb2.Commit, num_pages: int) -> None:
        """Pages beyond so many are room that was not needed."""
        self.commit, self._num_pages = commit, num_pages

    @property
    def is_ready_for_receipt(self) -> bool:
        """Committed, and every announced segment was looked at."""
        return self.commit is not None and self._num_verified >= self.commit.segments

    @property
    def is_whole(self) -> bool:
        return bool(self._is_intact[:, : self._num_pages].all())

    @property
    def num_cells(self) -> int:
        """Pages of single layers: as many segments as it can be brought in at most, each once."""
        return self._is_intact.size

    @property
    def num_sent_pages(self) -> int:
        return max(0, self._num_pages - self.granted.cached_pages)

    def accept(self, lease_id: int) -> worker_pb2.Receipt:
        return worker_pb2.Receipt(lease_id=lease_id, ok=True, pages=self.num_sent_pages, bytes=self._num_bytes)

    def reject(self, lease_id: int) -> worker_pb2.Receipt:
        """Says what is missing, and opens it for resends and another commit."""
        damaged = sorted(number for number in self._damaged if not self._stands(number))
        total = len(self.segments)
        why = f"{len(damaged)} of {total} segments damaged" if damaged else "nothing was announced for them"
        missing = int((~self._is_intact[:, : self._num_pages]).any(0).sum())
        self.commit = None
        self._damaged.clear()
        return worker_pb2.Receipt(
            lease_id=lease_id,
            bad_segments=damaged,
            bytes=self._num_bytes,
            reason=f"{missing} of {self._num_pages} pages are not whole: {why}",
        )

    def refuse(self, lease_id: int, reason: str) -> worker_pb2.Receipt:
        """What was committed is whole, and cannot be used."""
        self.commit = None
        return worker_pb2.Receipt(lease_id=lease_id, reason=reason)

    def _stands(self, number: int) -> bool:
        """Whether the segment's cells are whole, by a later segment."""
        return bool(self._is_intact[_cells(self.segments[number])].all())

    def handoff_receipt(self, transport: str, *, checksums: bool, exposed_s: float) -> generate_pb2.HandoffReceipt:
        return generate_pb2.HandoffReceipt(
            transport=transport if self.segments else "",
            pages=self.num_sent_pages,
            bytes=self._num_bytes,
            checksums_ok=checksums and not any(announce.checksum_off for announce in self.segments),
            cached_pages=self.granted.cached_pages,
            resends=sum(announce.resend for announce in self.segments),
            transfer_s=self._transfer_s,
            exposed_s=exposed_s,
        )


def _cells(announce: worker_pb2.Announce) -> tuple[slice, slice]:
    return slice(announce.layer_begin, announce.layer_end), slice(announce.page_begin, announce.page_end)
