"""Weights in int8: of each Linear, each output's row is a scale times whole numbers up to 127, in absolute value.

Weight-only: inputs and sums stay as they are, and weights are widened on their way from memory (csrc/products.cpp). The
rows that a module keeps are those numbers times their scale, rounded to its dtype: what the model's own code computes
with, so that it says what the products must give. From them and the scale the whole numbers are had again, for the
rounding moves them by a quarter at most.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.adapters.products import is_linear

MOST = 127
SCALES = "int8_scales"  # the attribute of a Linear, where its weights are such


def quantise(model: nn.Module) -> int:
    """Round the weights of every Linear; how many. An embedding that is a Linear's weight, too, stays as it is."""
    linears = [module for module in model.modules() if is_linear(module)]
    for linear in linears:
        weight = linear.weight
        assert isinstance(weight, torch.Tensor)
        weight_ON = (weight.detach().t() if isinstance(linear, Conv1D) else weight.detach()).float()
        scales_O = weight_ON.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / MOST
        rounded_ON = ((weight_ON / scales_O[:, None]).round() * scales_O[:, None]).to(weight.dtype)
        rounded = rounded_ON.t().contiguous() if isinstance(linear, Conv1D) else rounded_ON
        linear.weight = nn.Parameter(rounded, requires_grad=False)
        setattr(linear, SCALES, scales_O)
    return len(linears)


def scales_of(module: nn.Module) -> torch.Tensor | None:
    """[out], float32; None where its weights are not in int8."""
    scales: torch.Tensor | None = getattr(module, SCALES, None)
    return scales


def whole_numbers(weight_ON: torch.Tensor, scales_O: torch.Tensor) -> torch.Tensor:
    return (weight_ON.float() / scales_O[:, None]).round().clamp(-MOST, MOST).to(torch.int8)


def saved_bytes(model: nn.Module) -> int:
    """By what its weights take less than those that its modules keep."""
    saved = 0
    for module in model.modules():
        weight, scales_O = getattr(module, "weight", None), scales_of(module)
        if scales_O is not None and isinstance(weight, torch.Tensor):
            saved += weight.numel() * (weight.element_size() - 1) - scales_O.numel() * scales_O.element_size()
    return saved
