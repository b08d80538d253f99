"""Load keeps how the requests fared that ended lately: the sketch of what arrives, for whoever plans by it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from cluster.router.live.requests import LiveRequest

KEPT = 8192  # requests: minutes of a busy cluster, in some 3 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Times in seconds; `arrived_s` on the router's clock."""

    arrived_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    handoff_s: float
    failed: bool


class Load(deque[Ended]):
    def __init__(self) -> None:
        super().__init__(maxlen=KEPT)

    def note(self, live: LiveRequest, *, failed: bool = False) -> None:
        timeline, num_tokens = live.timeline, len(live.output_ids)
        phases = timeline.phases()
        self.append(
            Ended(
                arrived_s=timeline.arrived_s,
                prompt_tokens=len(live.prompt_ids),
                cached_tokens=live.cached_tokens,
                output_tokens=num_tokens,
                ttft_s=timeline.ttft_s,
                tpot_s=timeline.tpot_s(num_tokens),
                handoff_s=phases.get("handoff", 0.0),
                failed=failed,
            )
        )

    def note_refused(self, arrived_s: float) -> None:
        """One that was refused unread."""
        self.append(
            Ended(
                arrived_s=arrived_s,
                prompt_tokens=0,
                cached_tokens=0,
                output_tokens=0,
                ttft_s=math.nan,
                tpot_s=math.nan,
                handoff_s=0.0,
                failed=True,
            )
        )
