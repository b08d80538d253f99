"""Turns wakes what waits in the event loop: a few at a time, one client's after another's.

However much has come, little of it is done between two looks at the sockets: a probe of health or a worker's pong waits
for a few others and not for all of them, and who asks for little does not wait for who asks for much. A client's own
are woken in the order they came.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 3  # in one turn of the loop: some 0.1 ms each


class Turns:
    def __init__(self) -> None:
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by client; the first has the next turn
        self._left = AT_ONCE
        self._is_counting = False

    def wake(self, owner: str, waiter: asyncio.Future[None]) -> None:
        if waiter.done():
            return
        if self._takes_turn():
            waiter.set_result(None)
        else:
            self._lines.setdefault(owner, deque()).append(waiter)

    async def wait(self, owner: str) -> None:
        if not self._takes_turn():
            waiter = asyncio.get_running_loop().create_future()
            self._lines.setdefault(owner, deque()).append(waiter)
            await waiter

    def _takes_turn(self) -> bool:
        """At once, where one is left: then nobody waits."""
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next)
        if not self._left:
            return False
        self._left -= 1
        return True

    def _next(self) -> None:
        if self._left == AT_ONCE:
            self._is_counting = False
            return
        self._left = AT_ONCE
        self._wake_some()
        asyncio.get_running_loop().call_soon(self._next)

    def _wake_some(self) -> None:
        while self._lines and self._left:
            owner = next(iter(self._lines))
            line = self._lines.pop(owner)
            waiter = line.popleft()
            if line:
                self._lines[owner] = line  # behind the others
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
