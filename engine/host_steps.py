"""HostSteps runs steps on a CPU: each is done when `begin` returns, and its tokens are drawn on the host.

PipelineSteps does so where other processes have some of the layers: `begin` has them compute, `result` does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.paged_model import KvPages, PagedModel
from engine.parallel.stages import BegunPass, Stages
from engine.pending import DoneStep, PendingStep, WantedRows
from engine.sampling.host import sampled_tokens
from engine.types import PENDING, Chunk, SampledToken, Step


class HostSteps:
    can_overlap = False

    def __init__(self, model: PagedModel, pages: KvPages) -> None:
        self._model = model
        self._pages = pages
        self._last_tokens: dict[str, int] = {}  # of the step before, by request id

    def begin(self, step: Step) -> PendingStep:
        tokens = self._run([self._with_last_token(chunk) for chunk in step.chunks], step)
        self._last_tokens = {token.request_id: token.token_id for token in tokens}
        return DoneStep(tokens)

    def _run(self, chunks: Sequence[Chunk], step: Step) -> list[SampledToken]:
        wanted = WantedRows.of(chunks)
        logits = self._model.forward(self._pages, chunks, wanted.rows, step.on_layer)
        return sampled_tokens(logits, wanted.request_ids, wanted.specs) if wanted.specs else []

    def _with_last_token(self, chunk: Chunk) -> Chunk:
        if PENDING not in chunk.token_ids:
            return chunk
        last = self._last_tokens[chunk.request_id]
        return replace(chunk, token_ids=[last if token == PENDING else token for token in chunk.token_ids])


@dataclass(frozen=True, slots=True)
class _PassingStep:
    """The stages before this process compute it."""

    model: PagedModel
    stages: Stages
    begun: BegunPass
    wanted: WantedRows

    def result(self) -> list[SampledToken]:
        with torch.inference_mode():
            rows = torch.tensor(self.wanted.rows, dtype=torch.long)
            logits = self.stages.finish(self.begun, rows, self.model.run_alone)
            return sampled_tokens(logits, self.wanted.request_ids, self.wanted.specs) if self.wanted.specs else []


class PipelineSteps:
    """As many steps may be begun as there are stages, of other requests each, or of later parts of a prompt."""

    can_overlap = True

    def __init__(self, model: PagedModel, stages: Stages, pages: KvPages) -> None:
        self._model = model
        self._stages = stages
        self._pages = pages

    def begin(self, step: Step) -> PendingStep:
        begun = self._stages.begin(self._pages.memory, self._model.packed(step.chunks), step.on_layer)
        return _PassingStep(self._model, self._stages, begun, WantedRows.of(step.chunks))
