"""Order decides which cell is played next, and when it is enough. It reads no clock: `now` is in seconds."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

from kvrelay.chaos.cells.cell import Cell

AIM = 0.9  # of the time, in which all is to be done


class Order:
    """Each cell once, then the one that is furthest behind its share; where faults come too slowly for the time that
    there is, the one that brings them fastest."""

    def __init__(self, cells: Sequence[Cell], faults: int, seed: int, *, begins_s: float, ends_s: float) -> None:
        self._cells = list(cells)
        random.Random(seed).shuffle(self._cells)
        self._faults = faults
        self._seed = seed
        self._begins_s, self._ends_s = begins_s, ends_s
        self._rounds: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._took_s: defaultdict[str, float] = defaultdict(float)

    def next(self, now: float) -> tuple[Cell, int] | None:
        """With the seed of its round; None when it is enough, or too late."""
        fresh = [cell for cell in self._cells if not self._rounds[cell.name]]
        if now >= self._ends_s or (not fresh and self._done.total() >= self._faults):
            return None
        cell = fresh[0] if fresh else self._fastest() if self._is_late(now) else self._furthest_behind()
        self._rounds[cell.name] += 1
        return cell, self._seed + self._rounds[cell.name] - 1

    def on_played(self, name: str, faults: int, took_s: float) -> None:
        self._done[name] += max(1, faults)
        self._took_s[name] += took_s

    def _is_late(self, now: float) -> bool:
        passed = (now - self._begins_s) / (self._ends_s - self._begins_s)
        return self._done.total() / self._faults < passed / AIM

    def _fastest(self) -> Cell:
        return max(self._cells, key=lambda cell: self._done[cell.name] / max(self._took_s[cell.name], 0.001))

    def _furthest_behind(self) -> Cell:
        return min(self._cells, key=lambda cell: self._done[cell.name] / cell.share)
