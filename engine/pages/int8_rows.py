"""KV pages in int8, on CPUs: each head's row of K and of V is as many whole numbers up to 127 as it is wide, and behind
them the float32 that each is times. Half the bytes of bfloat16 to hold and to relay, with nothing to measure before.
"""

from __future__ import annotations

import torch

from engine.pages.layout import BESIDE

DTYPE = torch.int8
SCALE_BYTES = BESIDE["int8"]  # of each row, behind its numbers


def width_of(pages: torch.Tensor) -> int:
    """Of a head's row, as the model has it, in pages [..., row] of any dtype."""
    return pages.shape[-1] - (SCALE_BYTES if pages.dtype == DTYPE else 0)


def quantise(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> int8 [..., D + 4]: the numbers nearest to x / scale, halves to even, and the scale. That of a row
    with something infinite, or no number, is NaN: whoever reads it is told so."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127.0
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    inverse = torch.where(scale >= torch.finfo(torch.float32).tiny, 1.0 / scale, 0.0)
    return torch.cat([torch.round(x * inverse).nan_to_num(0.0).to(DTYPE), scale.view(DTYPE)], dim=-1)


def widened(rows: torch.Tensor) -> torch.Tensor:
    """The inverse, but for what was rounded: float32 [..., D]."""
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return rows[..., :-SCALE_BYTES].float() * scale
