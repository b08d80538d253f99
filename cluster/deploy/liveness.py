"""Liveness judges which processes of a cluster hang: they are there, but a stopped process, a stuck event loop or a
load without end serves nobody, and nothing else would ever end them.

It decides; the controller asks each process how it stands and kills those that hang, so that Ray starts them again. It
reads no clock: `now` is in seconds during which the controller itself was awake, for its own sleep is nobody's silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOAD_SILENCE_S = 60.0  # a process that imports and loads may hold its interpreter for some time
UNJUDGED = ("waiting", "failed", "ended")  # no process yet, or one of which nothing is expected


@dataclass(slots=True, kw_only=True)
class _Signs:
    alive_s: float  # when it last gave a sign of life
    moved_s: float  # when it last came further
    life: tuple[Any, ...] = ()  # incarnation, stage, fraction
    turns: int = -1  # of the event loop that serves


class Liveness:
    def __init__(self, *, timeout_s: float, load_timeout_s: float) -> None:
        """`timeout_s`: without a turn of a serving loop. `load_timeout_s`: at one stage of loading."""
        self._timeout_s = timeout_s
        self.load_timeout_s = load_timeout_s
        self._signs: dict[str, _Signs] = {}

    def on_answer(self, answer: Mapping[str, Any], now: float) -> None:
        """What a process says of itself. One that serves must show that its loop runs: by a number that grows."""
        signs = self._of(answer["name"], now)
        life = (answer["incarnation"], answer["stage"], answer["fraction"])
        turns = answer.get("turns", -1)
        if life != signs.life:
            signs.life, signs.moved_s = life, now
        elif answer["stage"] == "ready" and turns == signs.turns:
            return
        signs.turns, signs.alive_s = turns, now

    def on_lost(self, name: str, now: float) -> None:
        """Its process ended; from now on another is awaited."""
        self._signs.pop(name, None)
        self._of(name, now)

    def ready_for_s(self, name: str, now: float) -> float:
        """For how long it has been ready, as far as is known; 0 if it is not."""
        signs = self._of(name, now)
        return now - signs.moved_s if "ready" in signs.life[1:2] else 0.0

    def why_hung(self, name: str, stage: str, now: float) -> str:
        """One sentence if its process must be killed, else nothing. Once said, it is given its time anew."""
        signs = self._of(name, now)
        reason = "" if stage in UNJUDGED else self._why(stage, now - signs.alive_s, now - signs.moved_s)
        if reason or stage in UNJUDGED:
            signs.alive_s = signs.moved_s = now
        return reason

    def _why(self, stage: str, silent_s: float, unmoved_s: float) -> str:
        if stage == "ready":
            return f"it gave no sign of life for {self._timeout_s:g} s" if silent_s >= self._timeout_s else ""
        if silent_s >= LOAD_SILENCE_S:
            return f"it gave no sign of life for {LOAD_SILENCE_S:g} s"
        if stage != "lost" and unmoved_s >= self.load_timeout_s:
            return f"it came no further for {self.load_timeout_s:g} s"
        return ""

    def _of(self, name: str, now: float) -> _Signs:
        return self._signs.setdefault(name, _Signs(alive_s=now, moved_s=now))
