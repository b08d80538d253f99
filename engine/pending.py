"""Steps that are begun, and what comes of them. On a GPU one may be begun while the one before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.types import SampledToken, Step


class PendingStep(Protocol):
    def result(self) -> list[SampledToken]:
        """Wait for the step's end; a token for each chunk that has `sample`, in the chunks' order."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    tokens: list[SampledToken]

    def result(self) -> list[SampledToken]:
        return self.tokens


class Steps(Protocol):
    @property
    def can_overlap(self) -> bool:
        """Whether `begin` returns before the step is done, so that it pays to begin the next one meanwhile."""

    def begin(self, step: Step) -> PendingStep:
        """Begin a step that has chunks. Raises KeyError when a PENDING token is not the last step's to draw."""
