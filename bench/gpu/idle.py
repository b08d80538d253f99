"""When a GPU waits while it decodes, from what a profiler saw it do: gaps within a step, and gaps between two steps.

A graph's nodes follow one another with a microsecond or two between them, which no host could use: such gaps are the
work's own, and only longer ones count as idle within a step. Between two steps every gap counts: the next step could
have been queued. A step ends where its tokens have been copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NODE_GAP_US = 5.0
TO_HOST = "Memcpy DtoH"


@dataclass(frozen=True, slots=True)
class Stretch:
    start_us: float
    end_us: float
    name: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the time from the first step's begin to the last one's end."""

    within_steps: float
    between_steps: float
    short_gaps: float  # within steps, of up to NODE_GAP_US: not counted as idle
    steps: int


def steps_of(work: Iterable[Stretch]) -> list[list[Stretch]]:
    """Cut behind the last of the copies to the host that follow one another."""
    steps: list[list[Stretch]] = []
    was_copy = True
    for stretch in sorted(work, key=lambda stretch: stretch.start_us):
        is_copy = stretch.name.startswith(TO_HOST)
        if was_copy and not is_copy:
            steps.append([])
        if steps:  # a copy before all else belongs to a step that was not seen
            steps[-1].append(stretch)
        was_copy = is_copy
    return steps


def idle_of(steps: Sequence[Sequence[Stretch]]) -> Idle | None:
    """None when nothing was seen. Stretches may overlap; a gap is where none runs."""
    if not steps:
        return None
    within = between = short = 0.0
    reached_us = steps[0][0].start_us
    for step in steps:
        for number, stretch in enumerate(step):
            gap_us = max(0.0, stretch.start_us - reached_us)
            if number == 0:
                between += gap_us
            elif gap_us > NODE_GAP_US:
                within += gap_us
            else:
                short += gap_us
            reached_us = max(reached_us, stretch.end_us)
    whole_us = reached_us - steps[0][0].start_us
    return Idle(within / whole_us, between / whole_us, short / whole_us, len(steps)) if whole_us else None
