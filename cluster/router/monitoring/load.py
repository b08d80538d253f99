"""Load keeps how the requests fared that ended lately: the sketch of what arrives, for whoever plans by it."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from cluster.router.live.requests import LiveRequest
from cluster.router.live.timeline import PHASES

KEPT = 8192  # requests: minutes of a busy cluster
MOST_NAMES = 65_535  # of workers; later ones have none
ROW = struct.Struct(f"=2d3I3d?2d{2 * len(PHASES)}f2H")  # of an Ended; workers by their numbers
SPLIT = 11  # its fields before those of phases


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
    before_first_s: tuple[float, ...]  # in each of PHASES
    after_first_s: tuple[float, ...]
    prefill_worker: str
    decode_worker: str


class Load:
    """The last KEPT, the oldest first, in one block: an object each, made in the midst of a flood, would hold on to the
    memory of what came and went beside it."""

    def __init__(self) -> None:
        self._rows = bytearray(ROW.size * KEPT)
        self.count = 0  # of all that were ever noted
        self._names: list[str] = []  # of workers
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return min(self.count, KEPT)

    def __iter__(self) -> Iterator[Ended]:
        """As they are now, whatever is noted meanwhile."""
        return self.since(0)

    def since(self, count: int) -> Iterator[Ended]:
        """Those that came after so many, as far as they are kept."""
        rows = bytes(self._rows)
        for number in range(max(count, self.count - len(self)), self.count):
            yield self._ended(rows, number)

    @property
    def whole_since_s(self) -> float:
        """None is missing that came since: what was dropped had ended when the oldest did that is kept."""
        return -math.inf if self.count <= KEPT else self._ended(self._rows, self.count).ended_s

    def note(self, live: LiveRequest, *, failed: bool = False) -> None:
        timeline, num_tokens = live.timeline, len(live.output_ids)
        before, after = timeline.halves()
        handoff = PHASES.index("handoff")
        ROW.pack_into(
            self._rows,
            self.count % KEPT * ROW.size,
            timeline.arrived_s,
            timeline.arrived_s + timeline.e2e_s,
            len(live.prompt_ids),
            live.cached_tokens,
            num_tokens,
            timeline.ttft_s,
            timeline.tpot_s(num_tokens),
            before[handoff] + after[handoff],
            failed,
            *live.slo,
            *before,
            *after,
            self._number(live.prefill),
            self._number(live.decode),
        )
        self.count += 1

    def _number(self, worker: str) -> int:
        number = self._numbers.get(worker)
        if number is None:
            if len(self._names) == MOST_NAMES:
                return MOST_NAMES
            number = self._numbers[worker] = len(self._names)
            self._names.append(worker)
        return number

    def _ended(self, rows: bytes | bytearray, number: int) -> Ended:
        values = ROW.unpack_from(rows, number % KEPT * ROW.size)
        middle = SPLIT + len(PHASES)
        names = [self._names[each] if each < MOST_NAMES else "" for each in values[-2:]]
        return Ended._make((*values[:SPLIT], values[SPLIT:middle], values[middle:-2], *names))
