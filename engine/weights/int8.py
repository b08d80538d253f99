"""Weights in int8: of each Linear, each output's row is a scale times whole numbers up to 127, in absolute value.

Weight-only: inputs and sums stay as they are, and weights are widened on their way from memory (csrc/products.cpp). The
rows that a module keeps are those numbers times their scale, rounded to its dtype: what the model's own code computes
with, so that it says what the products must give. From them and the scale the whole numbers are had again, for the
rounding moves them by a quarter at most.
"""

from __future__ import annotations

import torch
from torch import nn

MOST = 127
SCALES = "int8_scales"  # the attribute of a Linear, where its weights are such


def quantise(model: nn.Module) -> int:
    """Round the weights of every Linear; how many. An embedding that is a Linear's weight, too, stays as it is."""
    count = 0
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        weight = module.weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / MOST
        rounded = (weight / scales[:, None]).round() * scales[:, None]
        module.weight = nn.Parameter(rounded.to(module.weight.dtype), requires_grad=False)
        setattr(module, SCALES, scales)
        count += 1
    return count


def scales_of(module: nn.Module) -> torch.Tensor | None:
    """[out], float32; None where its weights are not in int8."""
    scales: torch.Tensor | None = getattr(module, SCALES, None)
    return scales


def whole_numbers(weight_ON: torch.Tensor, scales_O: torch.Tensor) -> torch.Tensor:
    return (weight_ON.float() / scales_O[:, None]).round().clamp(-MOST, MOST).to(torch.int8)


def saved_bytes(model: nn.Module) -> int:
    """By what its weights take less than those that its modules keep."""
    linears = [module for module in model.modules() if type(module) is nn.Linear and scales_of(module) is not None]
    return sum(m.weight.numel() * (m.weight.element_size() - 1) - 4 * m.out_features for m in linears)
