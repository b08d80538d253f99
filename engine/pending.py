"""A step that was begun, and what comes of it: the one thing an engine hands out before it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.types import SampledToken


class PendingStep(Protocol):
    def result(self) -> list[SampledToken]:
        """Wait for the step's end; a token for each chunk that has `sample`, in the chunks' order."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    tokens: list[SampledToken]

    def result(self) -> list[SampledToken]:
        return self.tokens
