"""Where the ranks of a model that was cut meet: behind each projection whose products are only a part.

Products of a row-wise cut are summed, those of the head are gathered at rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from engine.fused.layers import Attention, Mlp


class Reduce(Protocol):
    def sum(self, x: torch.Tensor) -> torch.Tensor: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor: ...


def nobody(layer: int) -> None:
    """Waits for the layer."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A projection, or experts, whose products must meet the other ranks'; or a norm whose mean must."""

    parent: nn.Module
    name: str  # of it there
    layer: int | None = None  # of an attention's output: all ranks' KV of this layer is written once they have met
    is_head: bool = False


class Meeting(nn.Module):
    """A projection, or experts, whose product meets the other ranks'."""

    def __init__(self, product: Any, meet: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.product = product
        self._meet = meet

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._meet(self.product(*args, **kwargs))


class WideNorm(nn.Module):
    """RMSNorm of rows of which each rank has a run: of q or k over all heads."""

    def __init__(self, gains: nn.Parameter, eps: float, width: int) -> None:
        """`width`: how many numbers are summed. Until `sum` is the ranks' it is of this rank's run alone."""
        super().__init__()
        self.gains = gains
        self.sum: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._eps = eps
        self._width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.sum is not None:
            squares = self.sum(squares)
        return self.gains * (wide * torch.rsqrt(squares / self._width + self._eps)).to(x.dtype)


def connect(cuts: list[Cut], reduce: Reduce, on_layer: Callable[[int], None]) -> None:
    """Let the cut projections meet, whatever preparation has made of them: to be called after it.

    `on_layer` is told of a layer when all ranks have written its KV, for then they have met behind its attention.
    """
    for cut in cuts:
        meet = reduce.gather if cut.is_head else _summing(reduce, cut.layer, on_layer)
        joined, module = getattr(cut.parent, "forward", None), getattr(cut.parent, cut.name, None)
        if isinstance(module, WideNorm):
            module.sum = reduce.sum
        elif isinstance(joined, Attention):
            object.__setattr__(joined, "out", Meeting(joined.out, meet))
        elif isinstance(joined, Mlp):
            object.__setattr__(joined, "down", Meeting(joined.down, meet))
        else:
            setattr(cut.parent, cut.name, Meeting(module, meet))


def _summing(
    reduce: Reduce, layer: int | None, on_layer: Callable[[int], None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    if layer is None:
        return reduce.sum

    def sum_and_tell(x: torch.Tensor) -> torch.Tensor:
        total = reduce.sum(x)
        on_layer(layer)
        return total

    return sum_and_tell
