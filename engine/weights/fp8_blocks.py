"""Fine-grained FP8 of weights whose widths are no multiple of a block, as their last block is cut off.

transformers takes a block to be as large as the weight divided by the number of scales, which is another size there:
192 rows with two scales of 128 rows are read as two of 96, and 576 with five are refused. Here such a weight is
filled up to whole blocks, given to transformers' own arithmetic, and cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def whole_blocks() -> Iterator[None]:
    """While a model is loaded."""
    from transformers.integrations import finegrained_fp8

    op: Any = getattr(finegrained_fp8, "Fp8Dequantize", None)
    own = getattr(op, "_dequantize_one", None)
    if own is None:  # another version's, which may know by itself
        yield
        return

    def filled_up(self: Any, quantized: torch.Tensor, scales: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        size = getattr(self.hf_quantizer.quantization_config, "weight_block_size", None)
        if not size or scales.dim() < 2 or quantized.dtype != torch.float8_e4m3fn:
            widened: torch.Tensor = own(self, quantized, scales, *args, **more)
            return widened
        rows, columns = quantized.shape[-2:]
        missing = -rows % size[0], -columns % size[1]
        whole_grid = (rows + missing[0]) // size[0], (columns + missing[1]) // size[1]
        if any(missing) and scales.shape[-2:] == whole_grid:
            whole = nn.functional.pad(quantized.view(torch.uint8), (0, missing[1], 0, missing[0]))
            quantized = whole.view(quantized.dtype)
        widened = own(self, quantized, scales, *args, **more)
        return widened[..., :rows, :columns]

    op._dequantize_one = filled_up
    try:
        yield
    finally:
        op._dequantize_one = own
