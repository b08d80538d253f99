"""VirtualClock owns the order of events: it calls what was scheduled, in order of time, ties in order of scheduling.

It never looks at a real clock and knows nothing of what it calls. An event that is not wanted any more is not taken out
of the queue; its owner sees by a number of its own that it is stale. Messages, which are most events, take equally long
and so arrive in the order in which they are sent: they stand in a line of their own, and cost no search for a place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeVar

Arg = TypeVar("Arg")
Event = tuple[float, int, Callable[[Any], None], Any]


class VirtualClock:
    __slots__ = ("_last_s", "_next", "_queue", "_sent", "message_s", "now")

    def __init__(self, message_s: float = 0.0) -> None:
        """`message_s`: that a message takes."""
        self.now = 0.0  # seconds
        self.message_s = message_s
        self._queue: list[Event] = []
        self._sent: deque[Event] = deque()  # messages
        self._last_s = 0.0  # when the last of them arrives
        self._next = 0

    def at(self, time_s: float, call: Callable[[Arg], None], arg: Arg) -> None:
        """Call `call(arg)` at time_s, which is not before now."""
        heappush(self._queue, (time_s, self._next, call, arg))
        self._next += 1

    def tell(self, call: Callable[[Arg], None], arg: Arg) -> None:
        """Call `call(arg)` when a message that is sent now has arrived."""
        time_s = self.now + self.message_s
        if time_s < self._last_s:  # an event was before now by a rounding
            self.at(time_s, call, arg)
            return
        self._sent.append((time_s, self._next, call, arg))
        self._last_s = time_s
        self._next += 1

    def run(self) -> None:
        """Until nothing is scheduled."""
        queue, sent = self._queue, self._sent
        while queue or sent:
            is_message = bool(sent) and (not queue or sent[0] < queue[0])
            self.now, _, call, arg = sent.popleft() if is_message else heappop(queue)
            call(arg)
