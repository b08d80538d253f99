"""Recent is the last so many numbers of something: what is usual of it, and what is not."""

from __future__ import annotations

from collections import deque

UNSORTED = 8  # so small a part of them may have come since they were put in order of size


class Recent:
    """To note one costs next to nothing; what is asked of them is of those that were there a moment ago."""

    def __init__(self, size: int) -> None:
        self._last: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []
        self._since = 0  # they were sorted

    def __len__(self) -> int:
        return len(self._last)

    def note(self, value: float) -> None:
        self._last.append(value)
        self._since += 1

    def at(self, share: float) -> float:
        """So large a share of them is smaller; 0 where there are none."""
        if self._since * UNSORTED > len(self._last):
            self._sorted, self._since = sorted(self._last), 0
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))] if self._sorted else 0.0
