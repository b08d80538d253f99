"""PagedModel runs packed rows through a model whose attention goes through pages: chunks -> logits.

It owns no pages: each pass is told over which it runs. Where there are other processes, all run each pass, and this one
has its part of the model only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import PreTrainedModel

from engine.attention.base import AttentionBackend, StepMeta, build_meta
from engine.attention.forward_pass import ForwardPass
from engine.attention.probe import Probe
from engine.gpu.steps import ALONE, Mirror
from engine.pages.fp8 import KvScale
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.parallel.passing import Passing
from engine.parallel.team import Team
from engine.state.states import States
from engine.types import Chunk, OnLayer
from engine.upload_guard import queued
from engine.weights.loader import run_packed
from engine.weights.stage import PassLeaves


@dataclass(frozen=True, slots=True)
class KvPages:
    memory: KvMemory
    scales: tuple[KvScale, ...] | None = None  # of each layer, where the pages are in fp8


@dataclass(slots=True)
class Journal:
    """What a step has written over that cannot be written twice."""

    states: States | None = None  # None: the step has not begun, or is done, or no layer keeps a state

    def take_back(self) -> None:
        """The step failed and may be run again: all is as it was before."""
        if self.states is not None:
            self.states.take_back()
        self.forget()

    def forget(self) -> None:
        self.states = None


def _on(device: torch.device, rows: torch.Tensor | None) -> torch.Tensor | None:
    return None if rows is None else queued(rows, device)


def in_place(meta: StepMeta) -> StepMeta:
    """On a CPU a step's arrays are where they are read."""
    return meta


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedModel:
    module: PreTrainedModel
    probe: Probe
    backend: AttentionBackend
    device: torch.device
    page_size: int
    row_multiple: int = 1  # to which a step's rows are padded
    place: Callable[[StepMeta], StepMeta] = in_place  # brings what kernels read of a step to the device
    ranks: Team | None = None  # the other processes, at their leader
    passing: Passing | None = None  # where there are others
    mirror: Mirror = ALONE  # of steps on a GPU
    journal: Journal = field(default_factory=Journal)

    def forward(
        self, pages: KvPages, chunks: Sequence[Chunk], rows: list[int] | None = None, on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """Logits [rows, vocab] of the packed chunks; of every row when `rows` is None."""
        meta = build_meta(chunks, self.page_size, self.row_multiple)
        wanted = None if rows is None else torch.tensor(rows, dtype=torch.long)
        told = on_layer if self.ranks is None else self.ranks.begin(pages.memory, meta, wanted, on_layer)
        with nullcontext() if self.ranks is None else self.ranks.in_step():
            return self.run(pages, self.place(meta), _on(self.device, wanted), told)

    def packed(self, chunks: Sequence[Chunk]) -> StepMeta:
        return self.place(build_meta(chunks, self.page_size, self.row_multiple))

    def run(
        self, pages: KvPages, meta: StepMeta, rows: torch.Tensor | None, on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """What this process does of a pass that is packed and placed, and that the others have been told of: logits, or
        hidden states [T, N], which the next stage has been given."""
        if self.passing is None:
            return self._run_alone(pages, meta, rows, on_layer)
        return self.passing.run(partial(self._run_alone, pages, meta, rows), meta.num_rows, on_layer)

    def _run_alone(
        self, pages: KvPages, meta: StepMeta, rows: torch.Tensor | None, on_layer: OnLayer | None
    ) -> torch.Tensor:
        memory, scales = pages.memory, pages.scales
        if self.probe.has_states:
            self.journal.states = States(memory, meta)
        for _, mass in meta.masses:
            mass.begin()
        state = ForwardPass(meta, memory, self.backend, self.probe, on_layer, scales, states=self.journal.states)
        try:
            return run_packed(self.module, meta.token_ids, meta.positions, rows, state)
        except PassLeaves as leaves:
            return leaves.hidden[0]

    def layout(self, dtype: torch.dtype, num_pages: int) -> KvLayout:
        """Of so many pages of all layers."""
        return KvLayout(self.page_size, str(dtype).removeprefix("torch."), self.probe.shapes, num_pages)

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def page_bytes(self, layout: KvLayout) -> int:
        """Of a page with what all processes keep of it: a KV head that several have counts as often."""
        if self.ranks is None:
            return layout.page_bytes()
        return sum(share.of(layout).page_bytes() for share in self.ranks.shares)

    @contextmanager
    def scratch_pages(
        self, dtype: torch.dtype, num_pages: int, scales: tuple[KvScale, ...] | None = None
    ) -> Iterator[KvPages]:
        """A small memory for a while, in which nothing was written."""
        memory = self.allocate(self.layout(dtype, num_pages))
        try:
            yield KvPages(memory, scales)
        finally:
            memory.close()
            if self.ranks is not None:
                self.ranks.free()

    def allocate(self, layout: KvLayout) -> KvMemory:
        """Pages to run over. Where there are other processes, these have one memory at a time."""
        if self.ranks is not None:
            return self.ranks.allocate(layout, self.device)
        return KvMemory(layout, str(self.device))

    def poison(self, memory: KvMemory) -> None:
        """Let whoever reads what was not written compute NaNs."""
        memory.poison()
        if self.ranks is not None:
            self.ranks.poison()

    def copy_pages(self, memory: KvMemory, copies: Sequence[tuple[int, int]]) -> None:
        """From the first page of each pair to the second, in all layers."""
        memory.copy_pages(copies)
        if self.ranks is not None:
            self.ranks.copy_pages(copies)
