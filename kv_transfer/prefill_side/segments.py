"""What a handoff sends: pages whose KV is ready, cut into segments once the peer has granted pages for them.

Values only: Handoff (handoff.py) makes them, SendThread (thread.py) moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.pages.layout import KvLayout
from kv_transfer.plan import cut_segments


class Flow:
    """One handoff's segments. `stopped` and `on_idle` are read and written under the thread's lock only."""

    __slots__ = ("num_announced", "on_idle", "stopped")

    def __init__(self) -> None:
        self.num_announced = 0  # the pair's: segments of it that the peer was told of
        self.stopped = False
        self.on_idle: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True)
class Grant:
    pages: tuple[int, ...]
    cached_pages: int


@dataclass(frozen=True, slots=True)
class ReadyPages:
    """The KV of token pages page_begin .. page_end - 1 in `layers` stands in src_pages, once `after` has happened."""

    layers: range
    page_begin: int
    page_end: int
    src_pages: tuple[int, ...]
    after: object | None  # see Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentToSend:
    """Send the KV of token pages page_begin .. page_end - 1 in `layers`."""

    flow: Flow
    lease_id: int
    layers: range
    page_begin: int
    page_end: int
    src_pages: Sequence[int]
    dst_pages: Sequence[int]
    after: object | None = None
    resend: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSegment:
    """A segment that was sent (one-sided) or is on its way (two-sided). checksum None: checksums are off."""

    segment: SegmentToSend
    seq: int
    nbytes: int
    checksum: int | None
    transfer_s: float


def segments_of(
    ready: ReadyPages, grant: Grant, layout: KvLayout, segment_bytes: int, *, flow: Flow, lease_id: int
) -> Iterator[SegmentToSend]:
    """Those that bring what is ready into the granted pages; what the peer has cached is left out."""
    begin = max(ready.page_begin, grant.cached_pages)
    src_pages = ready.src_pages[begin - ready.page_begin :]
    for layers, index in cut_segments(layout, ready.layers, max(0, ready.page_end - begin), segment_bytes):
        yield SegmentToSend(
            flow=flow,
            lease_id=lease_id,
            layers=layers,
            page_begin=begin + index.start,
            page_end=begin + index.stop,
            src_pages=src_pages[index.start : index.stop],
            dst_pages=grant.pages[begin + index.start : begin + index.stop],
            after=ready.after,
        )
