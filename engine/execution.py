"""run_step runs a step so that one request's trouble is that request's alone, and the engine's own is not kept.

A step that raises is run again chunk by chunk: writing the same KV into the same pages twice changes nothing, and
states beside it were taken back (Engine.begin). A chunk that fails by itself brings a token with an `error`, whether it
was to be sampled or not; the others bring theirs.

When no chunk of a step could be computed, either the engine is broken or all its requests are to blame, a lone one say.
The engine decides: it computes a token of its own (`probe`), in the way of any request. If it can, the requests failed,
and however often somebody sends such ones, no worker dies of them. If it cannot, `max_failed_steps` times in a row with
the step itself, it is broken for good: EngineBroken ends its process, so that a new one serves. So does, at once, an
error that cannot heal (engine/errors.py). No count is kept from one step to the next.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from engine.adapters.files import AdapterError
from engine.errors import EngineBroken, in_short, raise_if_broken
from engine.types import Chunk, SampledToken, Step

log = logging.getLogger(__name__)


class StepRunner(Protocol):
    def step(self, step: Step) -> list[SampledToken]: ...

    def probe(self) -> SampledToken: ...


def run_step(engine: StepRunner, step: Step, *, max_failed_steps: int) -> list[SampledToken]:
    """The tokens of the chunks that have `sample`, and an error for each chunk that could not be computed.

    Raises EngineBroken.
    """
    tokens = _isolated(engine, step)
    if has_failed(step, tokens):
        _prove(engine, max_failed_steps - 1, tokens[-1].error)
    return tokens


def has_failed(step: Step, tokens: Sequence[SampledToken]) -> bool:
    """Whether no chunk of the step could be computed."""
    told = {token.request_id for token in tokens}
    return bool(tokens) and all(token.error for token in tokens) and told == {c.request_id for c in step.chunks}


def _isolated(engine: StepRunner, step: Step) -> list[SampledToken]:
    try:
        return engine.step(step)
    except Exception as error:  # whatever a model's code raises must not take other requests with it
        raise_if_broken(error)
        log.exception("a step of %d requests failed", len(step.chunks))
        if len(step.chunks) == 1:
            return [_failed(step.chunks[0], error)]
    tokens: list[SampledToken] = []
    for chunk in step.chunks:
        tokens += _isolated(engine, step.alone(chunk))
    return tokens


def _prove(engine: StepRunner, probes: int, reason: str) -> None:
    """Let the engine compute a token of its own. Raises EngineBroken when it cannot, so many times in a row."""
    for _ in range(probes):
        try:
            reason = engine.probe().error
        except Exception as error:
            raise_if_broken(error)
            log.exception("a step of the engine's own failed, too")
            reason = in_short(error)
        if not reason:
            return
    raise EngineBroken(f"{probes + 1} steps in a row failed, the last one by {reason}")


def _failed(chunk: Chunk, error: Exception) -> SampledToken:
    is_unable = isinstance(error, AdapterError)
    return SampledToken(request_id=chunk.request_id, token_id=-1, error=in_short(error), is_unable=is_unable)
