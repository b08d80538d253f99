"""Load keeps how the requests fared that ended lately: the sketch of what arrives, for whoever plans by it."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from cluster.router.live.requests import LiveRequest

KEPT = 8192  # requests: minutes of a busy cluster
ROW = struct.Struct("=2d3I3d?2d")  # of an Ended


class Ended(NamedTuple):
    """Times in seconds; `arrived_s` and `ended_s` on the router's clock. Targets of its own, 0: none."""

    arrived_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    handoff_s: float
    failed: bool
    slo_ttft_s: float
    slo_tpot_s: float


class Load:
    """The last KEPT, the oldest first, in one block: an object each, made in the midst of a flood, would hold on to the
    memory of what came and went beside it."""

    def __init__(self) -> None:
        self._rows = bytearray(ROW.size * KEPT)
        self.count = 0  # of all that were ever noted

    def __len__(self) -> int:
        return min(self.count, KEPT)

    def __iter__(self) -> Iterator[Ended]:
        """As they are now, whatever is noted meanwhile."""
        return self.since(0)

    def since(self, count: int) -> Iterator[Ended]:
        """Those that came after so many, as far as they are kept."""
        rows = bytes(self._rows)
        for number in range(max(count, self.count - len(self)), self.count):
            yield _ended(rows, number)

    @property
    def whole_since_s(self) -> float:
        """None is missing that came since: what was dropped had ended when the oldest did that is kept."""
        return -math.inf if self.count <= KEPT else _ended(self._rows, self.count).ended_s

    def note(self, live: LiveRequest, *, failed: bool = False) -> None:
        timeline, num_tokens = live.timeline, len(live.output_ids)
        ended = Ended(
            arrived_s=timeline.arrived_s,
            ended_s=timeline.arrived_s + timeline.e2e_s,
            prompt_tokens=len(live.prompt_ids),
            cached_tokens=live.cached_tokens,
            output_tokens=num_tokens,
            ttft_s=timeline.ttft_s,
            tpot_s=timeline.tpot_s(num_tokens),
            handoff_s=timeline.phases().get("handoff", 0.0),
            failed=failed,
            slo_ttft_s=live.slo[0],
            slo_tpot_s=live.slo[1],
        )
        ROW.pack_into(self._rows, self.count % KEPT * ROW.size, *ended)
        self.count += 1


def _ended(rows: bytes | bytearray, number: int) -> Ended:
    return Ended._make(ROW.unpack_from(rows, number % KEPT * ROW.size))
