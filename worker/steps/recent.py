"""Recent is the last so many numbers of something, in order of size, too: what is usual of it, and what is not."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class Recent:
    def __init__(self, size: int) -> None:
        self._last: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._last)

    def note(self, value: float) -> None:
        if len(self._last) == self._last.maxlen:
            del self._sorted[bisect_left(self._sorted, self._last[0])]
        self._last.append(value)
        insort(self._sorted, value)

    def at(self, share: float) -> float:
        """So large a share of them is smaller; 0 where there are none."""
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))] if self._sorted else 0.0
