"""Stalls bounds waits for clients, each for its message or until it takes what was sent: a wait costs a note, and one
timer serves all, where asyncio.timeout makes and cancels one for each token. It reads and writes nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
ENDED_AT_ONCE = 8  # waits, in one turn of the loop: of thousands that began together


class Stalls:
    def __init__(self, bound_s: float) -> None:
        self.bound_s = bound_s
        self._ends_s: dict[asyncio.Timeout, float] = {}  # of each wait, on the loop's clock: the next to end first
        self._timer: asyncio.TimerHandle | None = None  # None: no wait has begun since the last look

    async def bounded(self, limit: asyncio.Timeout, wait: Awaitable[T]) -> T:
        """`limit` is the caller's, entered without an end, for one wait after another: it raises TimeoutError when one
        takes longer than the bound."""
        loop = asyncio.get_running_loop()
        self._ends_s[limit] = loop.time() + self.bound_s
        if self._timer is None:
            self._timer = loop.call_later(self.bound_s, self._look)
        try:
            return await wait
        finally:
            self._ends_s.pop(limit, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for _ in range(ENDED_AT_ONCE):
            limit, end_s = next(iter(self._ends_s.items()), (None, 0.0))
            if limit is None:
                return
            if end_s > loop.time():
                self._timer = loop.call_at(end_s, self._look)
                return
            del self._ends_s[limit]
            limit.reschedule(loop.time())
        self._timer = loop.call_later(0, self._look)
