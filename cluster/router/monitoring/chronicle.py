"""Chronicle keeps the last things that were decided or have happened to workers, with their reasons, for people who
watch: the router's own, and what planners tell it. Nothing goes by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

KEPT = 50
MOST_CHARACTERS = 500  # of a text
SAME_S = 60.0  # for so long what happens again is counted, and not told again


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    at_s: float  # of the last time, on the router's clock
    by: str  # router, operator, planner
    what: str
    reason: str
    acted: bool  # else it is only advised
    times: int = 1


class Chronicle:
    def __init__(self) -> None:
        self._deeds: deque[Deed] = deque(maxlen=KEPT)
        self.version = 0  # another one whenever anything is noted

    def __iter__(self) -> Iterator[Deed]:
        """The newest first."""
        return reversed(self._deeds)

    def note(self, by: str, what: str, reason: str, now: float, *, acted: bool = True) -> None:
        by, what, reason = (text[:MOST_CHARACTERS] for text in (by, what, reason))
        deed = Deed(at_s=now, by=by, what=what, reason=reason, acted=acted)
        for before in self:
            if (before.by, before.what, before.acted) == (by, what, acted) and now - before.at_s < SAME_S:
                self._deeds.remove(before)
                deed = replace(deed, times=before.times + 1)
                break
        self._deeds.append(deed)
        self.version += 1
