"""HostSteps runs steps on a CPU: each is done when `begin` returns, and its tokens are drawn on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.paged_model import KvPages, PagedModel
from engine.pending import DoneStep, PendingStep
from engine.sampling.host import sampled_tokens
from engine.types import PENDING, Chunk, SampledToken, SampleSpec, Step


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
        request_ids: list[str] = []
        specs: list[SampleSpec] = []
        rows, row = [], -1
        for chunk in chunks:
            row += len(chunk.token_ids)
            if chunk.sample is not None:
                rows.append(row)
                request_ids.append(chunk.request_id)
                specs.append(chunk.sample)
        logits = self._model.forward(self._pages, chunks, rows, step.on_layer)
        return sampled_tokens(logits, request_ids, specs) if specs else []

    def _with_last_token(self, chunk: Chunk) -> Chunk:
        if PENDING not in chunk.token_ids:
            return chunk
        last = self._last_tokens[chunk.request_id]
        return replace(chunk, token_ids=[last if token == PENDING else token for token in chunk.token_ids])
