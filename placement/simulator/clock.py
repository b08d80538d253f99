"""VirtualClock owns the order of events: it calls what was scheduled, in order of time, ties in order of scheduling.

It never looks at a real clock and knows nothing of what it calls. An event that is not wanted any more is not taken out
of the queue; its owner sees by a number of its own that it is stale.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeVar

Arg = TypeVar("Arg")


class VirtualClock:
    __slots__ = ("_next", "_queue", "now")

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._queue: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._next = 0

    def at(self, time_s: float, call: Callable[[Arg], None], arg: Arg) -> None:
        """Call `call(arg)` at time_s, which is not before now."""
        heappush(self._queue, (time_s, self._next, call, arg))
        self._next += 1

    def run(self) -> None:
        """Until nothing is scheduled."""
        queue = self._queue
        while queue:
            self.now, _, call, arg = heappop(queue)
            call(arg)
