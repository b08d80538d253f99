"""Shares keeps a limit that all clients share from being taken whole by one: each may have seven times what is left.

So one alone gets seven eighths, two get seven fifteenths each, and who comes later finds room (dynamic thresholds:
Choudhury and Hahne, 1998). It counts; it knows no clock and no client but by name. Who has no name is not told apart
from others, and may take all.
"""

from __future__ import annotations

TIMES_LEFT = 7


class Shares:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._of: dict[str, int] = {}  # by owner, none of them 0

    def of(self, owner: str) -> int:
        return self._of.get(owner, 0)

    def has_share(self, owner: str) -> bool:
        """Whether the owner may take more, where there is more."""
        return not owner or self.total >= self.limit or self.of(owner) < TIMES_LEFT * (self.limit - self.total)

    def take(self, owner: str, amount: int = 1) -> None:
        self.total += amount
        self._of[owner] = self.of(owner) + amount

    def give(self, owner: str, amount: int = 1) -> None:
        self.total -= amount
        left = self.of(owner) - amount
        assert left >= 0, f"{owner!r} gives back more than it took"
        self._of[owner] = left
        if not left:
            del self._of[owner]
