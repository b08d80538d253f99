"""HostSteps runs steps on a CPU: each is done when `begin` returns, and its tokens are drawn on the host.

PipelineSteps does so where other processes have some of the layers: `begin` has them compute, `result` does the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.attention.base import StepMeta
from engine.paged_model import KvPages, PagedModel
from engine.parallel.team import Team
from engine.pending import DoneStep, PendingStep, WantedRows
from engine.sampling.host import sampled_tokens
from engine.types import PENDING, Chunk, OnLayer, SampledToken, Step


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


@dataclass(slots=True, eq=False)
class _PassingStep:
    """The stages before this process compute it."""

    steps: PipelineSteps
    meta: StepMeta
    rows: torch.Tensor
    told: OnLayer | None
    wanted: WantedRows
    logits: torch.Tensor | None = None  # until this stage has computed it, too

    def result(self) -> list[SampledToken]:
        with torch.inference_mode():
            logits = self.steps.computed(self)
            return sampled_tokens(logits, self.wanted.request_ids, self.wanted.specs) if self.wanted.specs else []


class PipelineSteps:
    """As many steps may be begun as there are stages, of other requests each, or of later parts of a prompt."""

    can_overlap = True

    def __init__(self, model: PagedModel, team: Team, pages: KvPages) -> None:
        self._model = model
        self._team = team
        self._pages = pages
        self._begun: deque[_PassingStep] = deque()

    def begin(self, step: Step) -> PendingStep:
        wanted, meta = WantedRows.of(step.chunks), self._model.packed(step.chunks)
        rows = torch.tensor(wanted.rows, dtype=torch.long)
        told = self._team.begin(self._pages.memory, meta, rows, step.on_layer)
        self._begun.append(_PassingStep(self, meta, rows, told, wanted))
        return self._begun[-1]

    def computed(self, step: _PassingStep) -> torch.Tensor:
        """In the order in which they began, whichever is asked for first: so the other ranks of this stage have them.
        Raises EngineBroken."""
        while step.logits is None:
            first = self._begun.popleft()
            with self._team.in_step():
                first.logits = self._model.run(self._pages, first.meta, first.rows, first.told)
        return step.logits
