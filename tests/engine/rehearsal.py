"""An engine that runs on a CPU what it would run on a GPU: FlashInfer's stand-in, fused layers, graphs, draws.

A graph's capture is a plain run that is run again: it reads the static places, which is what is to be proved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.attention.base import AttentionBackend
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.shapes import KernelChoice
from engine.attention.flashinfer.wrappers import FlashInfer
from engine.attention.probe import Probe
from engine.engine import Engine
from engine.fused.gpu import FlashInferKernels, TorchKernels
from engine.fused.kernels import Kernels, RopeTable
from engine.gpu.together import Together
from engine.loading.capacity import page_dtype, page_size
from engine.loading.gpu import GpuPlatform, shapes_of
from engine.options import EngineOptions
from tests.engine.attention import fake_flashinfer


def run_again(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """As a graph: the output's place stays, its content is the last replay's."""
    output = run()
    return (lambda: output.copy_(run())), output


def rotate_and_write(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    table: RopeTable,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """What stands for the kernel of engine/fused/rotary_kernel.py."""
    library: Any = fake_flashinfer
    q: torch.Tensor
    q, k = library.apply_rope_with_cos_sin_cache(
        table.positions, q_THD.flatten(1), k_TGD.flatten(1), q_THD.shape[-1], table.cos_sin
    )
    for rows, pages in ((k, k_pages), (v_TGD.flatten(1), v_pages)):
        pages.view(-1, rows.shape[1])[slots_T] = rows
    return q.view(q_THD.shape)


class RehearsedGpu(GpuPlatform):
    """A GPU's way on a CPU, with `decode` as the kernel of every shape."""

    def __init__(self, decode: str, fused: bool, library: Any) -> None:
        super().__init__(torch.device("cpu"))
        self._decode = decode
        self._fused = fused
        self._library = library

    def attention_backend(self, options: EngineOptions, probe: Probe, max_len: int) -> AttentionBackend:
        shapes = shapes_of(probe, page_size(options, probe), page_dtype(options, probe))
        choice = KernelChoice(prefill="fa2", decode=self._decode)
        return FlashInferBackend(FlashInfer.on(self.device, self._library), dict.fromkeys(shapes, choice))

    def fused_kernels(self, backend: AttentionBackend, dtype: torch.dtype) -> Kernels:
        return FlashInferKernels(self._library, rotate_and_write) if self._fused else TorchKernels()

    def peak_bytes(self, *args: object) -> int:
        return 0

    def capture(self) -> Callable[..., tuple[Callable[[], object], torch.Tensor]]:
        return run_again

    def capture_steps(self, together: Together) -> Callable[..., tuple[Callable[[], object], torch.Tensor]]:
        return together.capture(self.capture())


def rehearse(
    model: str, *, decode: str = "tensor", fused: bool = True, library: Any = fake_flashinfer, **options: object
) -> Engine:
    """Load `model` as for a GPU."""
    values = {"num_pages": 64, "dtype": "float32", "device": "cpu", "max_graph_batch": 4, **options}
    platform = RehearsedGpu(decode, fused, library)
    return Engine.load(EngineOptions(model=model, **values), platform=platform)  # type: ignore[arg-type]
