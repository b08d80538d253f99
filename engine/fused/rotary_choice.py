"""Which kernels rotate a step's rows and write them into pages: FlashInfer's rope and its append, or the one of
rotary_kernel.py. Tried and measured at load, as attention's are (engine/attention/flashinfer/choice.py).

Shapes: T rows, N their width before they are cut, D head_dim.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionBackend, StepMeta
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.choice import best_by_batch, right, timed
from engine.attention.flashinfer.shapes import Shape
from engine.attention.flashinfer.timing import CALLS, Stopwatch, seconds_of_one
from engine.attention.flashinfer.trial import step_over
from engine.attention.forward_pass import ForwardPass
from engine.attention.probe import Probe
from engine.attention.torch_backend import TorchBackend
from engine.fused.gpu import FlashInferKernels, TorchKernels
from engine.fused.kernels import Heads, RopeTable

logger = logging.getLogger(__name__)

SEQUENCES = 32
ROWS_OF_EACH = (1, 64)  # in a decode step, and in one with prompts
POSITIONS = 4096


def chosen(backend: FlashInferBackend, stopwatch: Stopwatch) -> FlashInferKernels:
    """Of those that are right for the backend's shapes, the one least behind over all steps. Without Triton the two."""
    library, device = backend.flashinfer.module, backend.flashinfer.device
    ways = {"flashinfer": FlashInferKernels(library), "triton": FlashInferKernels(library, _in_triton)}
    shapes = {(s.heads, s.kv_heads, s.head_dim): s for s in backend.kernels if s.kv_dtype == s.dtype}
    steps = [Rows.of(shape, rows, device) for shape in shapes.values() for rows in ROWS_OF_EACH]

    def error(step: Rows, name: str) -> float:
        return step.error(ways[name], backend)

    def seconds(step: Rows, name: str) -> float:
        return step.seconds(name, ways[name], backend, stopwatch)

    names = list(ways)
    for step in steps:
        names = right(step.name, names, partial(error, step))
    best = names[0]
    if len(names) > 1:
        times = {(1, number): timed(step.name, names, partial(seconds, step)) for number, step in enumerate(steps)}
        best = best_by_batch(times)[0].kernel
    logger.info("rows are rotated and written into pages by %s", best)
    return ways[best]


def _in_triton(*args: Any) -> torch.Tensor:
    from engine.fused.rotary_kernel import rotate_and_write  # Triton comes with torch's CUDA builds

    return rotate_and_write(*args)


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows in one layer, and the layer's pages."""

    qkv_1TN: torch.Tensor
    heads: Heads
    table: RopeTable
    meta: StepMeta
    pages: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, shape: Shape, rows: int, device: torch.device) -> Rows:
        """`rows` of each sequence, from within a page on."""
        size, rng, generator = shape.page_size, np.random.default_rng(0), torch.Generator().manual_seed(0)
        each = -(-(size + rows) // size)
        starts = rng.integers(size, size=SEQUENCES).astype(np.int32)
        tables = rng.permutation(SEQUENCES * each).astype(np.int32).reshape(SEQUENCES, each)
        meta = step_over(np.arange(0, SEQUENCES * rows + 1, rows, dtype=np.int32), starts, tables, size, device)
        assert meta.tables is not None
        sequence, at = meta.tables.batch_indices.long(), meta.tables.positions.long()
        slots = torch.from_numpy(tables)[sequence, at // size].long() * size + at % size
        angles = torch.rand(POSITIONS, shape.head_dim // 2, generator=generator) * 7
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        pages = torch.zeros(SEQUENCES * each, size, shape.kv_heads, shape.head_dim, dtype=shape.kv_dtype, device=device)
        return cls(
            torch.randn(1, len(at), width, generator=generator).to(device, shape.dtype),
            Heads(shape.heads, shape.kv_heads, shape.head_dim, None, None),
            RopeTable(
                torch.cat((angles.cos(), angles.sin()), -1).to(device),
                torch.from_numpy(rng.integers(POSITIONS, size=len(at))).to(device),
            ),
            replace(meta, slots=slots.to(device)),
            (pages, torch.zeros_like(pages)),
        )

    @property
    def name(self) -> str:
        return f"rotation of {self.meta.num_rows} rows"

    def k(self, layer: int) -> torch.Tensor:
        return self.pages[0]

    def v(self, layer: int) -> torch.Tensor:
        return self.pages[1]

    def run(self, kernels: TorchKernels, backend: AttentionBackend, qkv_1TN: torch.Tensor) -> torch.Tensor:
        state = ForwardPass(self.meta, self, backend, Probe(0), None)
        return kernels.rotate_and_write(qkv_1TN, self.table, self.heads, 0, state)

    def answer(self, kernels: TorchKernels, backend: AttentionBackend, qkv_1TN: torch.Tensor) -> torch.Tensor:
        """Queries and pages, one after the other."""
        for pages in self.pages:
            pages.zero_()
        parts = (self.run(kernels, backend, qkv_1TN), *self.pages)
        return torch.cat([part.flatten().float() for part in parts])

    def error(self, kernels: TorchKernels, backend: AttentionBackend) -> float:
        """Beside torch in float32, by the norm."""
        wanted = self.answer(TorchKernels(), TorchBackend(), self.qkv_1TN.float())
        return float((self.answer(kernels, backend, self.qkv_1TN) - wanted).norm() / wanted.norm())

    def seconds(self, name: str, kernels: TorchKernels, backend: AttentionBackend, stopwatch: Stopwatch) -> float:
        def calls() -> torch.Tensor:
            for _ in range(CALLS):
                q_THD = self.run(kernels, backend, self.qkv_1TN)
            return q_THD

        return seconds_of_one(name, calls, stopwatch)
