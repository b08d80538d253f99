"""AwakeClock counts the seconds that an event loop was awake for, and none while it was stopped, suspended or held up.

What is waited for while a process itself stands still is nobody else's silence: after SIGCONT the messages of all that
time lie in its own sockets. The same beats say how late the loop runs, and how many tasks it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable

BEAT_S = 0.2  # each wakes a process that has nothing else to do
LAG_BEATS = 5  # whose worst lag is told
STILL_S = 0.5  # a beat that is later than that was a stop


class AwakeClock:
    def __init__(self, wall_s: Callable[[], float] = time.monotonic) -> None:
        """It stands at 0, and moves for one beat, and then for one more with each `beat`."""
        self._wall_s = wall_s
        self._woke_s = float("-inf")  # by the wall: the last beat that came after a stop
        self._last = wall_s(), 0.0  # when the last beat was, by the wall and by this clock; read from other threads
        self.stopped_s = 0.0  # all stops together
        self.num_tasks = 0  # of the loop, a second ago at most
        self._lags_s = deque([0.0], LAG_BEATS)
        self._beats: asyncio.Task[None] | None = None

    def now_s(self) -> float:
        beat_s, awake_s = self._last
        return awake_s + min(self._wall_s() - beat_s, 2 * BEAT_S)

    def stood_still_within(self, seconds: float) -> bool:
        """Whether the last stop ended so lately, or has not been noticed yet."""
        wall_s = self._wall_s()
        return wall_s - self._woke_s <= seconds or wall_s - self._last[0] > BEAT_S + STILL_S

    @property
    def lag_s(self) -> float:
        """By how much the loop was late, the worst of the last second."""
        return max(self._lags_s)

    def beat(self) -> None:
        now_s, wall_s = self.now_s(), self._wall_s()
        self._lags_s.append(max(0.0, wall_s - self._last[0] - BEAT_S))
        if self._lags_s[-1] > STILL_S:
            self._woke_s = wall_s
            self.stopped_s += self._lags_s[-1]
        self._last = wall_s, now_s

    def start(self) -> None:
        self._beats = asyncio.get_running_loop().create_task(self._beat_forever())

    async def stop(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beats

    async def _beat_forever(self) -> None:
        for number in itertools.count():
            if not number % LAG_BEATS:
                self.num_tasks = len(asyncio.all_tasks())  # 1 ms for 10,000 of them
            await asyncio.sleep(BEAT_S)
            self.beat()
