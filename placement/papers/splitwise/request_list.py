"""ListLoad: requests of one list at any rate, as Splitwise's simulator was given them in the runs that are known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from placement.workload.requests import Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListLoad:
    """Implements placement.mixes.scenario.Load. Arrivals of the source are at 1 request/s: divided by the rate, rounded
    to a microsecond, and cut off after `seconds`. Every seed is the same."""

    source: Workload
    seconds: float = 120.0
    draw: str = "list"
    how: str = "its own requests, arrivals divided by the rate"

    def at(self, rate: float, seed: int) -> Workload:
        arrival_s = np.round(self.source.arrival_s / rate, 6)
        count = int(np.searchsorted(arrival_s, self.seconds))
        return replace(self.source.first(count), arrival_s=arrival_s[:count])
