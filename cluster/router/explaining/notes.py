"""Notes are what is written down of one request while it is under way, for who asks later where its time went: who was
weighed and chosen, what it waited behind, what happened, and what workers told. Bounded; nothing is noted for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

MOST = 64  # of each kind


class Weighed(NamedTuple):
    """A worker that might have had it. `takes_s`: until its first token, or for each after it; 0: not known."""

    name: str
    phase: str
    takes_s: float
    queued_tokens: int = 0
    cached_tokens: int = 0
    free_pages: int = 0
    total_pages: int = 0
    batch: int = 0


class Routed(NamedTuple):
    """`behind`: of the prompts that its prefill worker had from this router and had not read, the last: ids, owners."""

    at_s: float
    attempt: int
    prefill: str
    decode: str
    reason: str
    others: Sequence[Weighed]
    num_behind: int
    behind: Sequence[tuple[str, str]]
    behind_tokens: int


class Wait(NamedTuple):
    """In the router, for a worker. `ahead`: requests that waited already. `behind`: some that go first: ids, owners."""

    at_s: float
    attempt: int
    ahead: int
    tokens_ahead: int
    reason: str
    behind: Sequence[tuple[str, str]] = ()


class Handed(NamedTuple):
    at_s: float
    source: str
    to: str


class Event(NamedTuple):
    """What happened in a moment, at a worker or (empty) in the router."""

    at_s: float
    attempt: int
    name: str
    worker: str
    words: str


class Told(NamedTuple):
    """A worker's Trace, as it came. `offset_ns`: of its clock, before ours."""

    worker: str
    attempt: int
    offset_ns: int
    trace: bytes


class Notes:
    __slots__ = ("events", "handed", "routed", "submitted_s", "told", "waits")

    def __init__(self) -> None:
        self.submitted_s = 0.0  # when the router had it, checked and tokenised
        self.routed: tuple[Routed, ...] = ()
        self.waits: tuple[Wait, ...] = ()
        self.handed: tuple[Handed, ...] = ()  # from one worker to another, while it was computed
        self.events: tuple[Event, ...] = ()
        self.told: tuple[Told, ...] = ()

    def route(self, routed: Routed) -> None:
        if len(self.routed) < MOST:
            self.routed += (routed,)

    def wait(self, wait: Wait) -> None:
        if len(self.waits) < MOST:
            self.waits += (wait,)

    def hand(self, at_s: float, source: str, to: str) -> None:
        if len(self.handed) < MOST:
            self.handed += (Handed(at_s, source, to),)

    def event(self, at_s: float, attempt: int, name: str, worker: str = "", words: str = "") -> None:
        if len(self.events) < MOST:
            self.events += (Event(at_s, attempt, name, worker, words),)

    def tell(self, told: Told) -> None:
        if len(self.told) < MOST:
            self.told += (told,)

    def state(self) -> tuple[Any, ...]:
        """All of it, without a name."""
        routed = [(*each[:5], [*map(tuple, each.others)], *each[6:]) for each in self.routed]
        kinds = (self.waits, self.handed, self.events, self.told)
        return self.submitted_s, routed, [[*map(tuple, kind)] if kind else () for kind in kinds]

    @classmethod
    def of(cls, state: tuple[Any, ...]) -> Self:
        notes = cls()
        notes.submitted_s, routed, (waits, handed, events, told) = state
        remade = [Routed._make((*each[:5], [Weighed(*other) for other in each[5]], *each[6:])) for each in routed]
        notes.routed = tuple(remade)
        notes.waits = tuple(Wait(*each) for each in waits)
        notes.handed = tuple(Handed(*each) for each in handed)
        notes.events = tuple(Event(*each) for each in events)
        notes.told = tuple(Told(*each) for each in told)
        return notes

    def waited(self, attempt: int) -> Wait | None:
        return next((wait for wait in self.waits if wait.attempt == attempt), None)
