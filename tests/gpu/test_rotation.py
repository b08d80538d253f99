"""The kernel that rotates rows and writes them into pages gives FlashInfer's two kernels' bits, in a graph, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.build import provide
from engine.attention.flashinfer.modules import FOR_EVERY_MODEL
from engine.attention.flashinfer.shapes import Shape
from engine.attention.flashinfer.wrappers import FlashInfer
from engine.device import why_no_flashinfer
from engine.fused.gpu import FlashInferKernels
from engine.fused.rotary_choice import ROWS_OF_EACH, Rows
from engine.gpu.graphs import cuda_capture

GPU = torch.device("cuda:0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS_OF_EACH)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (8, 1, 256)])
def test_the_bits_are_flashinfer_s(heads: int, kv_heads: int, head_dim: int, rows: int, dtype: torch.dtype) -> None:
    from engine.fused.rotary_kernel import rotate_and_write

    if missing := why_no_flashinfer(GPU):
        pytest.skip(missing)
    provide(FOR_EVERY_MODEL)
    backend = FlashInferBackend(FlashInfer.on(GPU))
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": 16}
    shape = Shape(**sizes, scaling=0.1, dtype=dtype, kv_dtype=dtype)
    step = Rows.of(shape, rows, GPU)
    two, one = FlashInferKernels(backend.flashinfer.module), FlashInferKernels(None, rotate_and_write)
    wanted = step.answer(two, backend, step.qkv_1TN)
    assert torch.equal(step.answer(one, backend, step.qkv_1TN), wanted)
    replay, answer = cuda_capture(GPU)(lambda: step.answer(one, backend, step.qkv_1TN))
    answer.zero_()
    replay()
    assert torch.equal(answer, wanted)
