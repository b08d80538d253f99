"""What a DecodePolicy (policy.py) holds of a request, and what it says of a step. Values only: it decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from decode_worker.beam_tables import BeamTables
from engine.pages.pool import PageHash

NEVER = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeEntry:
    """Run the token at `position` of a request, and `drafted` guesses behind it; its KV goes to `pages`' slot for that
    position, theirs to the following. `beam`: the number of one of its beams, each of which has an entry."""

    request_id: str
    position: int
    pages: Sequence[int]
    drafted: int = 0
    beam: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    entries: tuple[DecodeEntry, ...]
    joined: tuple[str, ...]  # ran for the first time
    preempted: tuple[str, ...]  # lost their pages; not in the batch
    copies: tuple[tuple[int, int], ...] = ()  # pages that beams shared, and go on in alone


class Stage(Enum):
    QUEUED = "queued"
    READING = "reading"
    RESERVED = "reserved"
    HELD = "held"
    READY = "ready"
    RUNNING = "running"


@dataclass(slots=True, kw_only=True)
class DecodeRequest:
    """computed_len tokens have KV in the pages; scheduled_len counts those in flight too."""

    request_id: str
    order: int  # its priority, then the number of its reservation: lower ones go first, and stay longer
    priority: int
    prompt_len: int  # tokens handed over
    max_len: int  # prompt and output at most; the last token's KV is never needed
    most_pages: int  # that it holds at most
    hashes: list[PageHash]
    stage: Stage = Stage.QUEUED
    pages: list[int] = field(default_factory=list)
    computed_len: int = 0
    scheduled_len: int = 0
    published_pages: int = 0
    room: int = 0  # tokens beyond prompt_len that may be handed over, too
    stops_at: int = NEVER  # no token beyond so many is computed: it is about to leave
    is_held: bool = False
    is_moving: bool = False  # its pages are read
    is_over: bool = False
    drafted: int = 0  # guesses in flight, of what scheduled_len counts
    joined_step: int = 0  # with which its lengths began to lag behind: see DecodeRun
    num_beams: int = 0  # of its search; 0: it has none
    beams: BeamTables | None = None  # their pages, which `pages` has once for each that holds them

    @property
    def is_in_use(self) -> bool:
        """By a batch that is computed, or by a move."""
        return self.is_moving or self.is_in_flight

    @property
    def is_in_flight(self) -> bool:
        """In a batch that is computed."""
        return self.scheduled_len > self.computed_len

    @property
    def num_rows(self) -> int:
        """Of a step, at most."""
        return self.num_beams or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSchedule:
    """A DecodeBatch without entries: who computes a token next, by priority and age."""

    requests: list[DecodeRequest]
    joined: tuple[str, ...]
    preempted: tuple[str, ...]
