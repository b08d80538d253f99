"""Steps that are begun, and what comes of them. On a GPU one may be begun while the one before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.types import Chunk, SampledToken, SampleSpec, Step


class PendingStep(Protocol):
    def result(self) -> list[SampledToken]:
        """Wait for the step's end; in the chunks' order, a token for each of `scores` and for `sample`."""


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Of a step's packed rows those whose logits are wanted, whose they are and what for."""

    rows: list[int]
    request_ids: list[str]
    specs: list[SampleSpec]

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> WantedRows:
        wanted, first = cls([], [], []), 0
        for chunk in chunks:
            for row, spec in enumerate(chunk.scores, first):
                wanted._add(row, chunk, spec)
            first += len(chunk.token_ids)
            if chunk.sample is not None:
                wanted._add(first - 1, chunk, chunk.sample)
        return wanted

    def _add(self, row: int, chunk: Chunk, spec: SampleSpec) -> None:
        self.rows.append(row)
        self.request_ids.append(chunk.request_id)
        self.specs.append(spec)


@dataclass(frozen=True, slots=True)
class DoneStep:
    tokens: list[SampledToken]

    def result(self) -> list[SampledToken]:
        return self.tokens


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A step whose tokens count only if nothing broke meanwhile."""

    step: PendingStep
    check: Callable[[], None]

    def result(self) -> list[SampledToken]:
        tokens = self.step.result()
        self.check()
        return tokens


class Steps(Protocol):
    @property
    def can_overlap(self) -> bool:
        """Whether `begin` returns before the step is done, so that it pays to begin the next one meanwhile."""

    def begin(self, step: Step) -> PendingStep:
        """Begin a step that has chunks. Raises KeyError when a PENDING token is not the last step's to draw."""
