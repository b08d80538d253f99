"""ReceiveThread owns the receiving end of one pair's transport: it sleeps on a queue, receives and verifies segments.

It knows no lease, no message and no event loop: its owner gives it what was announced and is called back, in this
thread. A Landing stands for one lease's right to have bytes put into its pages: once it is closed, what still arrives
(two-sided) is dropped, and `close_landing` returns only when nothing is being put into them.
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

log = logging.getLogger(__name__)

Token = TypeVar("Token")  # what the owner knows the segment by


class Landing:
    """Whether a lease's pages may be written. Read and written under the thread's gate only."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival(Generic[Token]):
    """An announced segment. checksum None: not to be verified. landing None: to be received and dropped."""

    token: Token
    segment: Segment
    landing: Landing | None
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
        """`on_verified(token, ok, seconds spent receiving)` for each arrival; `on_error(reason)` once, at the end."""
        self._end = end
        self._checksummer = checksummer
        self._timeout_s = timeout_s
        self._on_verified = on_verified
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Arrival[Token] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, arrival: Arrival[Token]) -> None:
        self._end.expect(arrival.segment)
        self._queue.put(arrival)

    def close_landing(self, landing: Landing) -> None:
        """Nothing is put into the landing's pages after this returns (by us; a one-sided sender has its own fence)."""
        with self._gate:
            landing.is_open = False

    def abort(self) -> None:
        """Make the thread end soon."""
        self._end.abort()
        self._queue.put(None)

    def _run(self) -> None:
        try:
            self._end.open(self._timeout_s)
            while (arrival := self._queue.get()) is not None:
                self._take(arrival)
        except TransferError as error:
            self._on_error(str(error))
        except Exception as error:
            log.exception("%s failed", self._thread.name)
            self._on_error(f"{self._thread.name} failed: {error!r}")
        finally:
            self._end.close()

    def _take(self, arrival: Arrival[Token]) -> None:
        started = time.perf_counter()
        self._end.receive(arrival.segment)
        with self._gate:
            if arrival.landing is not None and arrival.landing.is_open:
                self._end.place(arrival.segment)
        took = time.perf_counter() - started
        self._on_verified(arrival.token, self._is_intact(arrival), took)

    def _is_intact(self, arrival: Arrival[Token]) -> bool:
        if arrival.checksum is None or arrival.landing is None:
            return True
        return self._checksummer.digest(arrival.segment.layers, arrival.segment.dst_pages) == arrival.checksum
