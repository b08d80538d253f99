"""ReceiveThread owns the receiving end of one pair's transport: it sleeps on a queue, receives and verifies segments.

It knows no lease, no message and no event loop: its owner gives it what was announced and is called back, in this
thread. A WritePermit stands for one lease's right to have bytes put into its pages: once it is revoked, what still
arrives (two-sided) is dropped, and `revoke` returns only when nothing is being put into them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kv_transfer.base import ReceiveEnd, Segment, TransferError
from kv_transfer.checksum import SegmentChecksummer
from kv_transfer.event_loop import start_thread

log = logging.getLogger(__name__)

Token = TypeVar("Token")  # what the owner knows the segment by


class WritePermit:
    """Whether a lease's pages may be written. Read and written under the thread's gate only."""

    __slots__ = ("is_valid",)

    def __init__(self) -> None:
        self.is_valid = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedSegment(Generic[Token]):
    """checksum None: not to be verified. permit None: to be received and dropped."""

    token: Token
    segment: Segment
    permit: WritePermit | None
    checksum: int | None


class ReceiveThread(Generic[Token]):
    def __init__(
        self,
        end: ReceiveEnd,
        checksummer: SegmentChecksummer,
        *,
        name: str,
        timeout_s: float,
        on_verified: Callable[[Token, bool, float], None],
        on_error: Callable[[str], None],
    ) -> None:
        """`on_verified(token, ok, seconds spent receiving)` for each segment; `on_error(reason)` once, at the end."""
        self._end = end
        self._checksummer = checksummer
        self._timeout_s = timeout_s
        self._on_verified = on_verified
        self._on_error = on_error
        self._queue: queue.SimpleQueue[AnnouncedSegment[Token] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread, end.close)

    def put(self, announced: AnnouncedSegment[Token]) -> None:
        self._end.expect(announced.segment)
        self._queue.put(announced)

    def revoke(self, permit: WritePermit) -> None:
        """Nothing is put into the permit's pages after this returns (by us; a one-sided peer has its own fence)."""
        with self._gate:
            permit.is_valid = False

    def abort(self) -> None:
        """Make the thread end soon."""
        self._end.abort()
        self._queue.put(None)

    def _run(self) -> None:
        try:
            self._end.open(self._timeout_s)
            while (announced := self._queue.get()) is not None:
                self._receive(announced)
        except TransferError as error:
            self._on_error(str(error))
        except Exception as error:
            log.exception("%s failed", self._thread.name)
            self._on_error(f"{self._thread.name} failed: {error!r}")
        finally:
            self._end.close()

    def _receive(self, announced: AnnouncedSegment[Token]) -> None:
        started = time.perf_counter()
        self._end.receive(announced.segment)
        with self._gate:
            if announced.permit is not None and announced.permit.is_valid:
                self._end.place(announced.segment)
        took_s = time.perf_counter() - started
        self._on_verified(announced.token, self._is_intact(announced), took_s)

    def _is_intact(self, announced: AnnouncedSegment[Token]) -> bool:
        if announced.checksum is None or announced.permit is None:
            return True
        segment = announced.segment
        return self._checksummer.digest(segment.layers, segment.dst_pages) == announced.checksum
