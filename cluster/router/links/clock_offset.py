"""ClockOffset puts a worker's time stamps on the router's clock. It reads neither clock: each sample is given.

A link has one for the monotonic clocks, by which stamps are read, and one for the time of day, which is only told.
"""

from __future__ import annotations

from collections import deque

CLOCK_SAMPLES = 16


class ClockOffset:
    """How far a worker's clock is ahead of ours, from the round trip that took least of the last 16."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=CLOCK_SAMPLES)  # (round trip, offset), ns
        self._offset_ns: int | None = None

    def add(self, sent_ns: int, worker_ns: int, received_ns: int) -> None:
        round_trip = received_ns - sent_ns
        self._samples.append((round_trip, worker_ns - (sent_ns + round_trip // 2)))
        self._offset_ns = min(self._samples)[1]

    @property
    def round_trip_s(self) -> float:
        """0 before the first."""
        return min(self._samples)[0] / 1e9 if self._samples else 0.0

    @property
    def ahead_s(self) -> float:
        return (self._offset_ns or 0) / 1e9

    def to_router_s(self, worker_ns: int, now_s: float) -> float:
        """A worker's stamp on our clock, in seconds; `now_s` before the first round trip, and never after it."""
        if self._offset_ns is None:
            return now_s
        return min((worker_ns - self._offset_ns) / 1e9, now_s)

    def offset_ns(self, worker_ns: int, now_s: float) -> int:
        """Likewise, how far it is ahead: before the first round trip, as if `worker_ns` were now."""
        return worker_ns - int(now_s * 1e9) if self._offset_ns is None else self._offset_ns
