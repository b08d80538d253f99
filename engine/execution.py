"""run_step runs a step so that one request's trouble is that request's alone.

A step that raises is run again chunk by chunk: writing the same KV into the same pages twice changes nothing. A chunk
that fails by itself brings a token with an `error`, whether it was to be sampled or not; the others bring theirs. An
engine that is broken for good (EngineBroken) ends its worker instead, whose process is then started anew.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

from engine.errors import EngineBroken
from engine.types import Chunk, SampledToken, Step

log = logging.getLogger(__name__)


class StepRunner(Protocol):
    def step(self, step: Step) -> list[SampledToken]: ...


def run_step(engine: StepRunner, step: Step) -> list[SampledToken]:
    """The tokens of the chunks that have `sample`, and an error for each chunk that could not be computed."""
    try:
        return engine.step(step)
    except EngineBroken:
        raise
    except Exception as error:  # whatever a model's code raises must not take other requests with it
        log.exception("a step of %d requests failed", len(step.chunks))
        if len(step.chunks) == 1:
            return [_failed(step.chunks[0], error)]
    tokens: list[SampledToken] = []
    for chunk in step.chunks:
        tokens += run_step(engine, replace(step, chunks=(chunk,)))
    return tokens


def _failed(chunk: Chunk, error: Exception) -> SampledToken:
    return SampledToken(request_id=chunk.request_id, token_id=-1, error=f"{type(error).__name__}: {error}")
