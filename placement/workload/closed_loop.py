"""ClosedLoop says how many clients ask, each of whom waits for its answer before it asks again. Values only.

Who is sent when, the simulator finds out (placement/simulator/clients.py): it depends on when others are answered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from placement.workload.traces import WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """A request whose arrival time has come is sent when one of `max_concurrency` clients is free, as `kvrelay bench`
    and `vllm bench serve` do it: with all arrivals at 0, so many are always out. `think_s`: that a client lets pass
    between an answer, or a refusal, and what it asks next."""

    max_concurrency: int
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise WorkloadError(f"max concurrency is {self.max_concurrency}; give 1 client or more")
        if not 0 <= self.think_s < math.inf:
            raise WorkloadError(f"think time is {self.think_s:g} s; give seconds, 0 or more")
