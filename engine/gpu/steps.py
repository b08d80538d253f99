"""GpuSteps runs steps on a device without waiting for it: `begin` queues a step, `result` of it waits for its tokens.

    begin   chunks -> host arrays -> one upload -> forward (a graph's replay, or layer by layer) -> draw -> copy of ids
    result  wait for that copy's event -> tokens

A step may be begun while the one before it runs: a token id that is PENDING is taken, on the device, from what that
step draws. The host touches the device's results only in `result`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from engine.attention.base import StepMeta, build_meta
from engine.gpu.graphs import DecodeGraphs
from engine.gpu.staging import Uploader, stage
from engine.pending import PendingStep, WantedRows
from engine.sampling.device import Drawn, draw, sampled_tokens
from engine.sampling.plan import SamplingPlan
from engine.types import PENDING, Chunk, SampledToken, Step

RunStep = Callable[[StepMeta, torch.Tensor | None, Callable[[int], None] | None], torch.Tensor]


class Mirror(Protocol):
    """Where several ranks run each step: how they come to run the same one, and to have the same drawn ids."""

    has_others: bool

    def told(self, step: Step) -> AbstractContextManager[None]:
        """The step runs inside. Raises EngineBroken."""

    def draw(self, logits: torch.Tensor, plan: SamplingPlan, placed: Mapping[str, torch.Tensor]) -> Drawn: ...

    def all_have(self, is_done: bool) -> bool:
        """Whether it is done here and at the others, who ask the same. Raises EngineBroken."""


class Alone:
    """There are no other ranks."""

    has_others = False

    def told(self, step: Step) -> AbstractContextManager[None]:
        return nullcontext()

    def draw(self, logits: torch.Tensor, plan: SamplingPlan, placed: Mapping[str, torch.Tensor]) -> Drawn:
        return draw(logits, plan, placed)

    def all_have(self, is_done: bool) -> bool:
        return is_done


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class _QueuedStep:
    plan: SamplingPlan
    drawn: Sequence[torch.Tensor]  # on the host, once `done` has passed
    done: torch.cuda.Event | None

    def result(self) -> list[SampledToken]:
        if self.done is not None:
            self.done.synchronize()
        return sampled_tokens(self.plan, self.drawn) if self.drawn else []


class GpuSteps:
    can_overlap = True

    def __init__(
        self,
        *,
        device: torch.device,
        page_size: int,
        run: RunStep,
        with_tables: bool,
        graphs: DecodeGraphs | None = None,
        mirror: Mirror = ALONE,
    ) -> None:
        self._device = device
        self._page_size = page_size
        self._run_step = run
        self._with_tables = with_tables
        self.graphs = graphs
        self._mirror = mirror
        self._upload = Uploader(device)
        self._drawn_ids: torch.Tensor | None = None  # of the last step, on the device
        self._drawn_row: dict[str, int] = {}  # request id -> row in it

    def begin(self, step: Step) -> PendingStep:
        """Queue the step. Raises KeyError when a PENDING token is not the last step's to draw."""
        wanted = WantedRows.of(step.chunks)
        plan = SamplingPlan.of(wanted.request_ids, wanted.specs)
        beside = dict(plan.arrays)
        chunks, source = self._sources(step.chunks)
        if source is not None:
            beside["source"] = source
        with self._mirror.told(step):
            if self._takes_graph(step):
                logits, placed = self._replay(chunks, beside)
            else:
                beside["rows"] = np.array(wanted.rows, np.int64)
                logits, placed = self._run(chunks, beside, step.on_layer)
            return self._draw(logits, plan, placed)

    def _takes_graph(self, step: Step) -> bool:
        if self.graphs is None or step.on_layer is not None:
            return False
        for chunk in step.chunks:
            if len(chunk.token_ids) != 1 or chunk.sample is None or chunk.scores or chunk.adapter is not None:
                return False
        return self.graphs.size_for(len(step.chunks)) is not None

    def _replay(
        self, chunks: Sequence[Chunk], beside: Mapping[str, np.ndarray]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert self.graphs is not None
        placed = self._upload(beside) if beside else {}

        def fill_in(token_ids: torch.Tensor) -> None:
            if "source" in placed:
                rows = token_ids[: len(chunks)]
                rows.copy_(self._filled_in(rows, placed["source"]))

        return self.graphs.replay(chunks, fill_in), placed

    def _run(
        self, chunks: Sequence[Chunk], beside: Mapping[str, np.ndarray], on_layer: Callable[[int], None] | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        meta = build_meta(chunks, self._page_size)
        meta, placed = stage(meta, beside, self._upload, with_tables=self._with_tables)
        if "source" in placed:
            meta = replace(meta, token_ids=self._filled_in(meta.token_ids, placed["source"]))
        return self._run_step(meta, placed["rows"], on_layer), placed

    def _sources(self, chunks: Sequence[Chunk]) -> tuple[Sequence[Chunk], np.ndarray | None]:
        """The chunks with 0 for each token that is only known on the device, and the last draw's row for it, or -1."""
        if not any(PENDING in chunk.token_ids for chunk in chunks):
            return chunks, None
        known, source = [], []
        for chunk in chunks:
            row = self._drawn_row[chunk.request_id] if PENDING in chunk.token_ids else -1
            source += [row if token == PENDING else -1 for token in chunk.token_ids]
            known.append(replace(chunk, token_ids=[0 if token == PENDING else token for token in chunk.token_ids]))
        return known, np.array(source, np.int64)

    def _filled_in(self, token_ids: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        assert self._drawn_ids is not None, "a pending token, but nothing was drawn"
        return torch.where(source >= 0, self._drawn_ids[source.clamp_min(0)], token_ids)

    def _draw(self, logits: torch.Tensor, plan: SamplingPlan, placed: Mapping[str, torch.Tensor]) -> PendingStep:
        self._drawn_row = {request_id: row for row, request_id in enumerate(plan.request_ids)}
        if not plan.request_ids:
            return self._queued(plan, ())
        drawn = self._mirror.draw(logits, plan, placed)
        self._drawn_ids = drawn.ids
        return self._queued(plan, drawn.tensors())

    def _queued(self, plan: SamplingPlan, drawn: Sequence[torch.Tensor]) -> PendingStep:
        if self._device.type != "cuda":
            return _QueuedStep(plan, drawn, None)
        host = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in drawn]
        done = torch.cuda.Event()
        done.record()  # a step that draws nothing: its KV is what is waited for
        return _QueuedStep(plan, host, done)
