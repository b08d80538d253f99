"""An engine that runs on a CPU what it would run on a GPU: FlashInfer's stand-in, fused layers, graphs, draws.

A graph's capture is a plain run that is run again: it reads the static places, which is what is to be proved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import loading as prepare
from engine.attention.base import AttentionBackend
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.shapes import KernelChoice
from engine.attention.flashinfer.wrappers import FlashInfer
from engine.engine import Engine
from engine.options import EngineOptions
from tests.engine.attention import fake_flashinfer


def run_again(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """As a graph: the output's place stays, its content is the last replay's."""
    output = run()
    return (lambda: output.copy_(run())), output


class RehearsedEngine(Engine):
    acts_as_gpu = True

    def _peak_bytes(self) -> int:
        return 0

    def _capture(self) -> Callable[..., tuple[Callable[[], object], torch.Tensor]]:
        return run_again


def rehearse(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    *,
    decode: str = "tensor",
    fused: bool = True,
    library: Any = fake_flashinfer,
    **options: object,
) -> Engine:
    """Load `model` as for a GPU, with `decode` as the kernel of every shape."""

    def backend(options: EngineOptions, probe: object, device: torch.device) -> AttentionBackend:
        shapes = prepare.shapes_of(probe, options.page_size, prepare.page_dtype(options, probe))  # type: ignore[arg-type]
        kernels = {shape: KernelChoice(prefill="fa2", decode=decode) for shape in shapes}
        return FlashInferBackend(FlashInfer.on(device, library), kernels)

    monkeypatch.setattr(prepare, "attention_backend", backend)
    monkeypatch.setattr(prepare, "HALF", (torch.bfloat16, torch.float32) if fused else ())
    values = {"num_pages": 64, "dtype": "float32", "device": "cpu", "max_graph_batch": 4, **options}
    return RehearsedEngine.load(EngineOptions(model=model, **values))  # type: ignore[arg-type]
